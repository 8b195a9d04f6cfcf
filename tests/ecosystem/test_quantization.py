"""Quantized projections are right and have a reason, whether they are quantized before or after patching."""

from __future__ import annotations

import copy

import pytest
import torch
from models import SHORT, build, counting, left_padded, require_native
from parity import assert_same_tokens
from torch import nn

import hf_fastpath
from hf_fastpath import ops


class Int8Linear(nn.Linear):
    """A subclass whose weight is int8 with one scale for each row, as in bitsandbytes and others."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        del self.weight
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = base.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def stand_in(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Int8Linear(module))


def torchao(model: nn.Module) -> None:
    """Put a tensor subclass into a plain nn.Linear as its weight."""
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    library.quantize_(model, library.Int8WeightOnlyConfig())


def quanto(model: nn.Module) -> None:
    library = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)


def bitsandbytes(model: nn.Module) -> None:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    device = model.device
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            made = library.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            made.weight = library.nn.Params4bit(module.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, made.to(device))


def compressed(model: nn.Module) -> None:
    """Give each projection scales and a forward of its own; it keeps its class."""
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    weights = library.QuantizationArgs(num_bits=4, symmetric=True, strategy="channel")
    schemes = {"all": library.QuantizationScheme(targets=["Linear"], weights=weights)}
    library.apply_quantization_config(model, library.QuantizationConfig(config_groups=schemes, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.abs().amax(1, keepdim=True) / 7


@pytest.mark.each_value
@torch.no_grad()
@pytest.mark.parametrize("when", ("before_patch", "after_patch", "after_generate"))
@pytest.mark.parametrize("quantize", (stand_in, torchao, quanto, bitsandbytes, compressed), ids=lambda f: f.__name__)
def test_quantized_projections(quantize, when, device):
    require_native(device)
    stock = build("llama").to(device)
    ours, inputs = copy.deepcopy(stock), left_padded(device, 2)
    plain = stock(**inputs).logits
    quantize(stock)
    assert not torch.equal(stock(**inputs).logits, plain), "quantization changes nothing, so the test shows nothing"
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(**inputs, **SHORT)
    quantize(ours)
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    expected = stock.generate(**inputs, **SHORT)
    given = {*counts.reasons, *(what.split(": ")[1] for what in hf_fastpath.report(ours).declined)}
    reason = "compressed_tensors" if quantize is compressed else "quantized_format"
    if when == "before_patch" and device.type in ops.packed_gemv.native:
        if quantize in (torchao, quanto):  # repacked: test_quantized_checkpoints.py
            assert counts.fast and not counts.fallback
            return
        if quantize is bitsandbytes:  # as well, but not rows that are no whole number of blocks
            reason = "quantized_blocks"
    if quantize is stand_in:  # the step of such a layer can be recorded
        assert counts.fast and not counts.fallback and not counts.reasons
        assert_same_tokens(found, expected)
        return
    assert set(counts.reasons) <= {reason, "partial_patch"}, counts.reasons
    assert reason in given and counts.reasons and not counts.fast, given
    assert_same_tokens(found, expected)
