"""decode_layers: the common tests, two tokens compared with the separate ops, kv_table, workspace, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import assert_rule, common_tests, describe, is_native, over_dtypes
from memory import duplicate, same_bits, upcast

from hf_fastpath import ops
from hf_fastpath.ops.decode_attention import workspace_bytes
from hf_fastpath.ops.decode_layers import (
    LAYER_TENSORS,
    OUTER_TENSORS,
    SPEC,
    by_name,
    sizes,
)
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")
NAMES = [argument.name for argument in SPEC.overload._schema.arguments]

globals().update(common_tests(SPEC))


def named(sample: Sample) -> dict:
    """Return the sample's arguments by name, its tensors copied."""
    copy = sample.map_tensors(duplicate)
    return dict(zip(NAMES, copy.args)) | copy.kwargs


def separately(call: dict) -> torch.Tensor:
    """Compute the same step with one op after the other."""

    def given(tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor if tensor.numel() else None

    layers, outer = by_name([given(tensor) for tensor in call["weights"]])
    x, transposed, activation = call["x"], call["transposed"], call["activation"]
    cos, sin, lens = call["cos"], call["sin"], call["seq_lens"]
    for i, w in enumerate(layers):
        cache = call["k_caches"][i], call["v_caches"][i]
        qkv = (w[f"{name}_weight"] for name in "qkv"), (w[f"{name}_bias"] for name in "qkv")
        first, second = (
            (call["norm"], w[f"{name}_norm_weight"], w[f"{name}_norm_bias"], call["norm_eps"])
            for name in ("attention", "mlp")
        )
        queries = ops.qkv_rope_append(
            *(x, *qkv[0], *qkv[1], transposed, cos, sin, *cache, lens, call["num_heads"], None, 0, *first)
        )
        mixed = ops.decode_attention(queries, *cache, lens, call["starts"], call["scale"], call["windows"][i])
        x = ops.gemv(mixed, w["out_weight"], w["out_bias"], x, "none", transposed)
        if w["gate_weight"] is None:
            hidden = ops.gemv(x, w["up_weight"], w["up_bias"], None, activation, transposed, *second)
        else:
            hidden = ops.gemv_swiglu(x, w["gate_weight"], w["up_weight"], activation, *second)
        x = ops.gemv(hidden, w["down_weight"], w["down_bias"], x, "none", transposed)
    norm = call["norm"], outer["final_norm_weight"], outer["final_norm_bias"], call["norm_eps"]
    return ops.gemv(x, outer["head_weight"], outer["head_bias"], None, "none", False, *norm)


def two_tokens(sample: Sample, step: Callable[[dict], torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of two steps in a row and the caches after them; the second step is the sample's own."""
    call = named(sample)
    last = call["seq_lens"].clamp(min=2)
    found = []
    for lens, x in ((last - 1, call["x"].roll(1, -1)), (last, call["x"])):
        found.append(step(call | {"seq_lens": lens, "x": x}))
    return [*found, *call["k_caches"], *call["v_caches"]]


@over_dtypes
def test_decode_layers_is_the_separate_ops(device, dtype):
    """Sums run in another order, and results keep the numerics rule."""
    for sample in SPEC.samples(device, dtype):
        whole, parts = two_tokens(sample, lambda call: SPEC(**call)), two_tokens(sample, separately)
        ref, stock = (two_tokens(s, lambda call: SPEC.reference(**call)) for s in (sample.map_tensors(upcast), sample))
        for found in (whole, parts):
            for number, results in enumerate(zip(found, stock, ref)):
                assert_rule(*results, f"result {number} of {describe(SPEC, sample)}")


def test_decode_layers_follows_kv_table(device):
    """Addresses and capacities come from the table's rows; the tensors given, full of NaN, are not touched."""
    for sample in SPEC.samples(device, torch.float16):
        call, expected = named(sample), named(sample)
        caches = list(zip(call["k_caches"], call["v_caches"]))
        rows = [[k.data_ptr(), v.data_ptr(), k.shape[2]] for k, v in caches]
        decoys = {
            name: [torch.full_like(cache[:, :, :1], float("nan")) for cache in call[name]]
            for name in ("k_caches", "v_caches")
        }
        through_table = call | decoys | {"kv_table": torch.tensor(rows, device=device)}
        if not is_native(SPEC, device):
            with pytest.raises(NotImplementedError, match="kv_table needs the native library"):
                SPEC(**through_table)
            return
        assert same_bits(SPEC(**through_table), SPEC(**expected))
        for k, v, k_expected, v_expected in zip(*zip(*caches), expected["k_caches"], expected["v_caches"]):
            assert same_bits(k, k_expected) and same_bits(v, v_expected)
        assert all(cache.isnan().all() for part in decoys.values() for cache in part)


@over_dtypes
def test_decode_layers_reuses_its_workspace(device, dtype):
    """One workspace, zeroed once, serves models of changing shape in any order, as fresh ones would."""
    samples = list(SPEC.samples(device, dtype))
    workspace = torch.zeros(max(map(workspace_size, samples)), dtype=torch.uint8, device=device)
    for sample in (*samples, *reversed(samples), samples[0], samples[0]):
        assert same_bits(SPEC(**named(sample), workspace=workspace), SPEC(**named(sample)))


def workspace_size(sample: Sample) -> int:
    call = named(sample)
    return workspace_bytes(len(call["x"]), 1, call["num_heads"], call["k_caches"][0].shape[3])


def test_decode_layers_sizes():
    mistral, gpt2, *_ = SPEC.samples(CPU, torch.float32)
    for sample, layers, expected in ((mistral, 2, (256, 256, 512, 512, 501)), (gpt2, 2, (256, 256, 768, 1024, 503))):
        call = named(sample)
        model = sizes(call["weights"], call["num_heads"] * 64, call["transposed"])
        assert (model.layers, model.hidden_size, model.q_features, model.qkv_features) == (layers, *expected[:3])
        assert (model.intermediate_size, model.vocab_size) == expected[3:]


# ---- what it refuses -----------------------------------------------------------------------------------------


def changed(name: str, tensor: torch.Tensor, layer: int = 1) -> Callable[[dict], dict]:
    """Make a change of a call that exchanges one weight of a layer."""

    def change(call: dict) -> dict:
        outer = name in OUTER_TENSORS
        place = OUTER_TENSORS.index(name) - len(OUTER_TENSORS) if outer else LAYER_TENSORS.index(name)
        weights = list(call["weights"])
        weights[place if outer else place + layer * len(LAYER_TENSORS)] = tensor
        return {"weights": weights}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            lambda call: {"weights": call["weights"][:-1]},
            "weights has 37 tensors, expected 17 for each of the 2 layers",
        ),
        (lambda call: {"weights": []}, "weights has 0 tensors"),
        (lambda call: {"k_caches": call["k_caches"][:1]}, "v_caches has 2 entries, expected 1, one for every layer"),
        (lambda call: {"v_caches": []}, "v_caches has 0 entries, expected 2"),
        (lambda call: {"windows": [0, 16, 0]}, "windows has 3 entries, expected 2"),
        (lambda call: {"k_caches": [], "v_caches": [], "windows": [], "weights": []}, "k_caches is empty"),
    ),
)
def test_decode_layers_names_wrong_lengths(change, message):
    call = named(next(iter(SPEC.samples(CPU, torch.float32))))
    wrong = call | change(call)
    with pytest.raises(OpInputError, match=message):
        SPEC(**wrong)
    if is_native(SPEC, CPU):
        with pytest.raises(RuntimeError, match="hf_fastpath::decode_layers: "):
            SPEC.overload(**wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            lambda call: {"x": torch.zeros(1, 2, 256)},
            r"x has shape \(1, 2, 256\), expected \[1 to 16, 1, hidden_size\]",
        ),
        (lambda call: {"x": torch.zeros(17, 1, 256)}, r"x has shape \(17, 1, 256\), expected \[1 to 16, 1"),
        (lambda call: {"x": torch.zeros(2, 1, 256)}, r"layer 0: k_cache has shape \(1, 2, 64, 64\), expected \[2,"),
        (changed("down_weight", torch.empty(0)), "layer 1: down_weight is empty, expected a weight"),
        (changed("head_weight", torch.empty(0)), "head_weight is empty, expected a weight"),
        (changed("mlp_norm_weight", torch.empty(0)), "layer 1: mlp_norm_weight is empty, expected a weight"),
        (changed("mlp_norm_bias", torch.zeros(256), 0), "layer 0: norm 'rms' takes no mlp_norm_bias"),
        (changed("out_bias", torch.zeros(256)), "layer 1: out_bias is given, unlike the first layer's"),
        (changed("gate_weight", torch.empty(0)), "layer 1: gate_weight is empty, unlike the first layer's"),
        (changed("up_bias", torch.zeros(512), 0), "gate_weight takes no up_bias"),
        (changed("k_weight", torch.empty(0), 0), "k_weight and v_weight go together"),
        (changed("v_weight", torch.zeros(64, 256)), r"layer 1: v_weight has shape \(64, 256\), expected \(128, 256\)"),
        (changed("up_weight", torch.zeros(256, 512).t()), "layer 1: up_weight has strides"),
        (lambda call: {"transposed": True}, "transposed takes all projections in q_weight and no gate_weight"),
        (lambda call: {"norm": "none"}, "norm is 'none', expected one of rms, layer"),
        (lambda call: {"activation": "relu"}, "activation is 'relu', expected one of silu, gelu_tanh, gelu"),
        (lambda call: {"num_heads": 3}, r"layer 0: q_weight has shape \(256, 256\), expected \(192, 256\)"),
        (lambda call: {"windows": [0, -1]}, "layer 1: window is -1"),
        (lambda call: {"starts": torch.zeros(2, dtype=torch.int32)}, r"starts is torch.int32 \(2,\)"),
        (lambda call: {"workspace": torch.zeros(8, dtype=torch.uint8)}, "workspace has 8 bytes"),
        (lambda call: {"kv_table": torch.zeros(1, 3, dtype=torch.long)}, "layer 1: layer is 1, expected 0 to 0"),
    ),
)
def test_decode_layers_names_the_fault(change, message):
    call = named(next(iter(SPEC.samples(CPU, torch.float32))))
    with pytest.raises(OpInputError, match=message):
        SPEC(**(call | change(call)))
