"""Models with quantized weights beside those whose weights are what the quants stand for."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from models import SHORT, counting
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_fastpath
from hf_fastpath.compat import FORWARD_NOTES
from hf_fastpath.linears.packed_linear import PackedLinear


def packed_in(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the quantized layers of a model by their names."""
    return {name: module for name, module in model.named_modules() if type(module) is PackedLinear}


def with_dequantized(stock: nn.Module, patched: nn.Module) -> nn.Module:
    """Return a copy of ``stock`` whose weights are those that the patched model's quants stand for."""
    made = copy.deepcopy(stock)
    for name, packed in packed_in(patched).items():
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
