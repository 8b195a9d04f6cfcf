"""packed_layers: the common tests, two tokens compared with the separate ops, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, is_native, over_dtypes
from memory import duplicate, same_bits

from hf_fastpath import ops
from hf_fastpath.ops.packed_layers import LAYER_TENSORS, MATRICES, SPEC, by_name
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
    x, activation, lens = call["x"], call["activation"], call["seq_lens"]
    for i, w in enumerate(by_name([tensor if tensor.numel() else None for tensor in call["weights"]])):
        factors = call["multipliers"][i * len(MATRICES) :]
        parts = {
            name: (*(w[f"{name}_{part}"] for part in ("quants", "scales", "zeros")), factor, call["format"])
            for name, factor in zip(MATRICES, factors)
        }
        first, second = (
            (call["norm"], w[f"{name}_norm_weight"], w[f"{name}_norm_bias"], call["norm_eps"])
            for name in ("attention", "mlp")
        )
        cache = call["k_caches"][i], call["v_caches"][i]
        qkv = ops.packed_gemv(x, *parts["qkv"], None, None, "none", *first)
        queries = ops.rope_append(qkv, None, call["cos"], call["sin"], *cache, lens, call["num_heads"])
        mixed = ops.decode_attention(queries, *cache, lens, call["starts"], call["scale"], call["windows"][i])
        x = ops.packed_gemv(mixed, *parts["out"], None, x)
        hidden = ops.packed_gemv(x, *parts["up"], None, None, "none" if call["gated"] else activation, *second)
        if call["gated"]:
            hidden = ops.fused_swiglu(*hidden.chunk(2, dim=-1), activation)
        x = ops.packed_gemv(hidden, *parts["down"], None, x)
    return x


@over_dtypes
def test_packed_layers_is_the_separate_ops(device, dtype):
    """The bits are the same over two steps in a row."""
    if not is_native(SPEC, device):
        pytest.skip("no library for this device")
    for sample in SPEC.samples(device, dtype):
        found = []
        for step in (lambda call: SPEC(**call), separately):
            call = named(sample)
            last = call["seq_lens"].clamp(min=2)
            outs = [step(call | {"seq_lens": lens}) for lens in (last - 1, last)]
            found.append([*outs, *call["k_caches"], *call["v_caches"]])
        assert all(map(same_bits, *found))


def changed(name: str, tensor: torch.Tensor):
    """Make a change of a call that exchanges one weight of the second layer."""

    def change(call: dict) -> dict:
        weights = list(call["weights"])
        weights[LAYER_TENSORS.index(name) + len(LAYER_TENSORS)] = tensor
        return {"weights": weights}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda call: {"x": torch.zeros(1, 2, 256)}, r"x has shape \(1, 2, 256\), expected \[1 to 16, 1"),
        (lambda call: {"weights": call["weights"][:-1]}, "weights has 31 entries, expected 16 for each of the 2"),
        (lambda call: {"multipliers": [1.0]}, "multipliers has 1 entries, expected 4 for each of the 2"),
        (lambda call: {"v_caches": []}, "v_caches has 0 entries, expected 1 for each"),
        (lambda call: {"k_caches": []}, "k_caches is empty"),
        (lambda call: {"format": "int3"}, "format is 'int3'"),
        (lambda call: {"format": "int8"}, r"layer 0: qkv_quants has shape \(512, 128\), expected \(512, 256\)"),
        (lambda call: {"norm": "none"}, "norm is 'none', expected one of rms, layer"),
        (lambda call: {"activation": "relu"}, "activation is 'relu', expected one of silu, gelu_tanh, gelu"),
        (lambda call: {"num_heads": 3}, "layer 0: qkv_quants has shape"),
        (lambda call: {"windows": [0, -1]}, "layer 1: window is -1"),
        (changed("down_quants", torch.zeros(256, 192, dtype=torch.int8)), "layer 1: down_quants has dtype torch.int8"),
        (changed("out_scales", torch.zeros(256, 1).half()), r"layer 1: out_scales has shape \(256, 1\), expected"),
        (changed("up_zeros", torch.zeros(768, 8, dtype=torch.uint8)), "layer 1: up_zeros is given, which format"),
        (changed("up_quants", torch.zeros(767, 128, dtype=torch.uint8)), "layer 1: up_quants has 767 rows"),
        (changed("mlp_norm_bias", torch.zeros(256)), "layer 1: norm 'rms' takes mlp_norm_weight and no mlp_norm_bias"),
        (changed("attention_norm_weight", torch.zeros(0)), "layer 1: norm 'rms' takes attention_norm_weight"),
    ),
)
def test_packed_layers_names_the_fault(change, message):
    call = named(next(iter(SPEC.samples(CPU, torch.float32))))
    with pytest.raises(OpInputError, match=message):
        SPEC(**(call | change(call)))


def test_packed_layers_refuses_wrong_lengths_natively():
    if not is_native(SPEC, CPU):
        pytest.skip("no library for the CPU")
    call = named(next(iter(SPEC.samples(CPU, torch.float32))))
    for name in ("weights", "multipliers", "v_caches", "windows"):
        with pytest.raises(RuntimeError, match="hf_fastpath::packed_layers: the lists' lengths"):
            SPEC.overload(**(call | {name: call[name][:-1]}))
