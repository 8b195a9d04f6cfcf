"""Models with quantized weights beside those whose weights are what the quants stand for; a stand-in for a layer."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from models import SHORT, counting
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_fastpath
from hf_fastpath.compat import FORWARD_NOTES
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.packed_formats import FP4, NF4


def packed_in(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the quantized layers of a model by their names."""
    return {name: module for name, module in model.named_modules() if type(module) is PackedLinear}


def with_dequantized(stock: nn.Module, patched: nn.Module) -> nn.Module:
    """Return a copy of ``stock`` whose weights are those that the patched model's quants stand for."""
    made = copy.deepcopy(stock)
    for name, packed in packed_in(patched).items():
        at, _, attribute = name.rpartition(".")
        if isinstance(stack := getattr(made.get_submodule(at), attribute), nn.Parameter):  # of a mixture's experts
            weight = packed.packed.dequantize(stack.dtype).unflatten(0, (len(stack), -1))
            setattr(
                made.get_submodule(at), attribute, nn.Parameter(weight if weight.shape == stack.shape else weight.mT)
            )
            continue
        linear = made.get_submodule(name)
        weight = packed.packed.dequantize(linear.weight.dtype)
        linear.weight = nn.Parameter(weight.t().contiguous() if type(linear) is Conv1D else weight)
    return made


def check_saved_copied_and_taken_back(stock: nn.Module, inputs: dict[str, torch.Tensor], directory: Path) -> None:
    """Assert that a copy of ``stock`` with quantized weights gives its tokens after save and load and as a deep copy,
    and that ``unpatch()`` brings all weights back bit for bit.

    Args:
        inputs: of ``generate()``, for one sequence.
        directory: where the weights are saved.
    """
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights="int4_g32", quiet=True)
    found = ours.generate(**inputs, **SHORT)
    hf_fastpath.save_packed(ours, directory)
    for other in (hf_fastpath.load_packed(directory, device=stock.device, quiet=True), copy.deepcopy(ours)):
        assert type(other) is type(stock) and packed_in(other).keys() == packed_in(ours).keys()
        with counting(other) as counts:
            assert torch.equal(other.generate(**inputs, **SHORT), found)
        assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.unpatch(ours)
    assert not packed_in(ours) and vars(ours).keys() - FORWARD_NOTES == vars(stock).keys() - FORWARD_NOTES
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


class QuantState(SimpleNamespace):
    """What bitsandbytes knows of a weight of four bits."""

    def to(self, device: torch.device) -> None:
        for held in (self, self.state2):
            for name, value in vars(held).items() if held is not None else ():
                if isinstance(value, torch.Tensor):
                    setattr(held, name, value.to(device))


class Linear4bit(nn.Linear):
    """A layer as bitsandbytes' of the same name keeps it, by the description of its format: two numbers of four bits in
    a byte, the first in the high bits, row behind row; each is a place in a table, and each ``block`` of them has a
    float32 as scale. Nested, scales less their mean are a byte each, places in a code of 256 values, of which 256 have
    a float32 as scale.
    """

    __module__ = "bitsandbytes.somewhere"

    def __init__(self, weight: torch.Tensor, kind: str, block: int = 64, nested: bool = False, bias=None, storage=None):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        table = torch.tensor({"nf4": NF4, "fp4": FP4}[kind])
        flat = nn.functional.pad(weight.detach().float().flatten(), (0, -weight.numel() % block)).view(-1, block)
        absmax, offset, inner = flat.abs().amax(1), None, None
        steps = (flat / absmax[:, None].clamp(min=1e-30)).view(-1)[: weight.numel()]
        numbers = torch.cat([(part[:, None] - table).abs().argmin(1) for part in steps.split(1 << 16)])
        numbers = nn.functional.pad(numbers, (0, numbers.numel() % 2)).to(torch.uint8).view(-1, 2)
        if nested:
            code, offset = torch.linspace(-1, 1, 256) ** 3, absmax.mean()
            left = absmax - offset
            whole = nn.functional.pad(left, (0, -len(left) % 256)).view(-1, 256).abs().amax(1)
            steps = left / whole.repeat_interleave(256)[: len(left)]
            absmax = (steps[:, None] - code).abs().argmin(1).to(torch.uint8)
            inner = QuantState(absmax=whole, code=code, blocksize=256, state2=None)
        data = (numbers[:, 0] << 4 | numbers[:, 1]).view(storage or torch.uint8).view(-1, 1)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        shape, dtype = weight.shape, weight.dtype
        self.quant_state = QuantState(
            absmax=absmax, code=table, blocksize=block, quant_type=kind, shape=shape, dtype=dtype, offset=offset
        )
        self.quant_state.state2 = inner

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32: each number's value of the table times the scale of its block."""
        state, numbers = self.quant_state, self.weight.data.view(torch.uint8).flatten()
        scales, inner = state.absmax, state.state2
        if inner is not None:
            whole = inner.absmax.repeat_interleave(inner.blocksize)[: len(scales)]
            scales = inner.code[scales.long()] * whole + state.offset
        places = torch.stack((numbers >> 4, numbers & 15), 1).flatten()[: state.shape.numel()].long()
        return (state.code[places] * scales.repeat_interleave(state.blocksize)[: len(places)]).view(state.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.dequantized().to(x.dtype), None if self.bias is None else self.bias.to(x))


def with_linear4bit(model: nn.Module, kind: str, **how) -> nn.Module:
    """Return a copy of a model whose projections are stand-ins for bitsandbytes' layers."""
    made = copy.deepcopy(model)
    for name, linear in list(made.named_modules()):
        if type(linear) is nn.Linear and name.endswith("_proj"):
            parent, _, attribute = name.rpartition(".")
            setattr(made.get_submodule(parent), attribute, Linear4bit(linear.weight, kind, bias=linear.bias, **how))
    return made
