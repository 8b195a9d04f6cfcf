"""decode_layers: the common tests, two tokens compared with the separate ops, kv_table, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import assert_rule, common_tests, describe, is_native, over_dtypes
from memory import duplicate, same_bits, upcast

from hf_fastpath import ops
from hf_fastpath.ops.decode_layers import LAYER_TENSORS, SPEC, by_layer
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")
CACHES = ("k_caches", "v_caches")
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

    x, activation, lens = call["x"], call["activation"], call["seq_lens"]
    layers = by_layer([given(tensor) for tensor in call["weights"]])
    for i, w in enumerate(layers):
        cache = call["k_caches"][i], call["v_caches"][i]
        first, second = (
            ("layer", w[f"{name}_norm_weight"], w[f"{name}_norm_bias"], call["norm_eps"])
            for name in ("attention", "mlp")
        )
        qkv = w["qkv_weight"], None, None, w["qkv_bias"], None, None
        queries = ops.qkv_rope_append(x, *qkv, True, None, None, *cache, lens, call["num_heads"], None, 0, *first)
        mixed = ops.decode_attention(queries, *cache, lens, call["starts"], call["scale"], call["windows"][i])
        x = ops.gemv(mixed, w["out_weight"], w["out_bias"], x, "none", True)
        hidden = ops.gemv(x, w["up_weight"], w["up_bias"], None, activation, True, *second)
        x = ops.gemv(hidden, w["down_weight"], w["down_bias"], x, "none", True)
    return x


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
        decoys = {name: [torch.full_like(cache[:, :, :1], float("nan")) for cache in call[name]] for name in CACHES}
        through_table = call | decoys | {"kv_table": torch.tensor(rows, device=device)}
        if not is_native(SPEC, device):
            with pytest.raises(NotImplementedError, match="kv_table needs the native library"):
                SPEC(**through_table)
            return
        assert same_bits(SPEC(**through_table), SPEC(**expected))
        for k, v, k_expected, v_expected in zip(*zip(*caches), expected["k_caches"], expected["v_caches"]):
            assert same_bits(k, k_expected) and same_bits(v, v_expected)
        assert all(cache.isnan().all() for part in decoys.values() for cache in part)


# ---- what it refuses -----------------------------------------------------------------------------------------


def changed(name: str, tensor: torch.Tensor, layer: int = 1) -> Callable[[dict], dict]:
    """Make a change of a call that exchanges one weight of a layer."""

    def change(call: dict) -> dict:
        weights = list(call["weights"])
        weights[LAYER_TENSORS.index(name) + layer * len(LAYER_TENSORS)] = tensor
        return {"weights": weights}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            lambda call: {"weights": call["weights"][:-1]},
            "weights has 23 tensors, expected 12 for each of the 2 layers",
        ),
        (lambda call: {"weights": []}, "weights has 0 tensors"),
        (lambda call: {"k_caches": call["k_caches"][:1]}, "v_caches has 2 entries, expected 1, one for every layer"),
        (lambda call: {"v_caches": []}, "v_caches has 0 entries, expected 2"),
        (lambda call: {"windows": [0, 16, 0]}, "windows has 3 entries, expected 2"),
        (lambda call: {"k_caches": [], "v_caches": [], "windows": [], "weights": []}, "k_caches is empty"),
        (lambda call: {"x": torch.zeros(1, 2, 256)}, r"x has shape \(1, 2, 256\) and strides .*, expected \[1, 1, "),
        (lambda call: {"x": torch.zeros(2, 1, 256)}, r"x has shape \(2, 1, 256\)"),
        (lambda call: {"x": torch.zeros(1, 1, 512)[:, :, ::2]}, r"strides \(512, 512, 2\), expected .* contiguous"),
        (changed("down_weight", torch.empty(0)), "layer 1: down_weight is empty, expected a weight"),
        (changed("mlp_norm_weight", torch.empty(0)), "layer 1: mlp_norm_weight is empty, unlike the first layer's"),
        (changed("out_bias", torch.empty(0)), "layer 1: out_bias is empty, unlike the first layer's"),
        (changed("up_bias", torch.zeros(512), 0), r"layer 0: up_bias has shape \(512,\), expected \(1024,\)"),
        (
            changed("qkv_weight", torch.zeros(256, 512)),
            r"layer 1: qkv_weight has shape \(256, 512\), expected \(256, 7",
        ),
        (changed("up_weight", torch.zeros(1024, 256).t()), "layer 1: up_weight has strides"),
        (changed("mlp_norm_bias", torch.zeros(512)[::2]), r"layer 1: mlp_norm_bias has strides \(2,\)"),
        (changed("out_weight", torch.zeros(256, 256).half()), "layer 1: out_weight has dtype torch.float16"),
        (lambda call: {"activation": "softplus"}, "activation is 'softplus', expected one of none, "),
        (lambda call: {"num_heads": 2}, r"layer 0: qkv_weight has shape \(256, 768\), expected \(256, 384\)"),
        (lambda call: {"windows": [0, -1]}, "layer 1: window is -1"),
        (lambda call: {"starts": torch.zeros(2, dtype=torch.int32)}, r"starts is torch.int32 \(2,\)"),
        (lambda call: {"kv_table": torch.zeros(1, 3, dtype=torch.long)}, "layer 1: layer is 1, expected 0 to 0"),
        (
            lambda call: {"k_caches": [cache.half() for cache in call["k_caches"]]},
            "layer 0: .*k_cache is torch.float16, expected torch.float32 as x",
        ),
        (
            lambda call: {name: [each.expand(1, 4, -1, -1)[:, :2] for each in call[name]] for name in CACHES},
            "layer 0: .*k_cache has 2 heads, expected 4",
        ),
        (
            lambda call: {name: [each.mT.contiguous().mT for each in call[name]] for name in CACHES},
            "layer 0: .*k_cache has strides",
        ),
    ),
)
def test_decode_layers_names_the_fault(change, message):
    call = named(next(iter(SPEC.samples(CPU, torch.float32))))
    with pytest.raises(OpInputError, match=message):
        SPEC(**(call | change(call)))


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda call: {"weights": call["weights"][:-1]}, "weights, expected 24"),
        (lambda call: {"v_caches": []}, "one of each for every layer"),
        (lambda call: {"x": call["x"].repeat(2, 1, 1)}, r"x has to be \[1, 1, hidden_size\]"),
        (lambda call: {"x": call["x"][..., :256].contiguous()}, "no kernels for a hidden_size of 256"),
        (lambda call: {"num_heads": 17}, "no kernels for a hidden_size of 768 and 17 heads"),
        (lambda call: changed("up_weight", call["weights"][0])(call), r"a matrix has to be \[768, 3072\]"),
        (lambda call: changed("up_bias", call["weights"][0])(call), r"has to be \[3072\] in x's dtype, or empty"),
        (lambda call: {"k_caches": [each.half() for each in call["k_caches"]]}, r"a cache has to be \[1, 12, capacity"),
        (lambda call: {"seq_lens": call["seq_lens"].long()}, r"seq_lens and starts have to be int32 \[1\]"),
    ),
)
def test_kernels_refuse_what_would_read_past_the_end(change, message, cuda):
    """The dispatcher reaches the kernels without the checks in Python."""
    call = named(next(iter(SPEC.samples(cuda, torch.float32))))
    with pytest.raises(RuntimeError, match=message):
        SPEC.overload(**(call | change(call)))


def test_other_sizes_on_a_gpu_are_told_what_to_do(cuda):
    call = named(next(iter(SPEC.samples(CPU, torch.float16))))
    moved = {name: _on(cuda, value) for name, value in call.items()}
    with pytest.raises(OpInputError, match="hidden_size is 256 and the MLP's 1024, expected 768 or 1024 and four"):
        SPEC(**moved)


def _on(device: torch.device, value):
    if isinstance(value, list):
        return [_on(device, each) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
