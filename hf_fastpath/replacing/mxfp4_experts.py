"""Experts of checkpoints in MXFP4: the same bits in the order of our kernels."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional

from ..choices import Activation
from ..compat import hook_of
from ..linears.packed_experts import DOWN, GATE_UP, GateHow, PackedExperts, PackedStacks
from ..native import heap
from ..progress import counted
from ..quantization.formats import FORMATS, PackedWeight, pack, padded, unpack
from .quantizing import Replaced, places_of

#: format of these experts
MXFP4 = FORMATS["mxfp4"]


def is_mxfp4(module: nn.Module) -> bool:
    """Whether experts are transformers' own in MXFP4, with blocks and scales as a checkpoint has them."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("transformers.integrations.mxfp4", "Mxfp4GptOssExperts"):
        return False
    found = [_blocks(module, name) for name in (GATE_UP, DOWN)]
    # 255 is NaN in the format's specification, and 2^128 in transformers, which float32 does not have
    return all(each is not None and not bool((each[1] == 255).any()) for each in found)


def _blocks(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return blocks, uint8 [experts, rows, groups, 16], and scales, uint8 [experts, rows, groups]; None if the module
    does not hold them so."""
    blocks, scales = (getattr(module, f"{name}_{part}", None) for part in ("blocks", "scales"))
    if not isinstance(blocks, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return None
    is_right = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, MXFP4.group // 2)
    return (blocks, scales) if is_right and scales.dim() == 3 else None


def _packed_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """Repack blocks of two quants a byte, the first in the lower half, expert by expert."""
    experts, rows, groups, _ = blocks.shape
    columns = groups * MXFP4.group
    width = padded(columns)
    quants = blocks.new_empty(experts * rows, width // 2)
    for expert, of_expert in enumerate(blocks.detach()):
        numbers = torch.stack((of_expert & 15, of_expert >> 4), dim=-1).view(rows, columns)
        whole = functional.pad(numbers, (0, width - columns), value=MXFP4.empty_quant)
        quants[expert * rows : (expert + 1) * rows] = pack(MXFP4, whole)
    all_scales = functional.pad(scales.detach().reshape(-1, groups), (0, MXFP4.groups(columns) - groups), value=127)
    return PackedWeight(MXFP4, columns, quants, all_scales.contiguous(), None, 1.0)


def _blocks_of(weight: PackedWeight, like: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo :func:`_packed_mxfp4`; ``like``: the shape of the scales."""
    experts, rows, groups = like
    blocks = weight.quants.new_empty(experts, rows, groups, MXFP4.group // 2)
    for expert, of_expert in enumerate(weight.quants.split(rows)):
        numbers = unpack(MXFP4, of_expert)[:, : weight.in_features].view(rows, groups, -1, 2)
        blocks[expert] = numbers[..., 0] | numbers[..., 1] << 4
    return blocks, weight.scales[:, :groups].reshape(like).contiguous()


def repacked_experts(module: nn.Module, dtype: torch.dtype) -> PackedExperts:
    """Return experts of a checkpoint in MXFP4 as ours; their blocks are freed stack by stack, see :func:`restore`.

    Args:
        dtype: of the model; biases are cast to it.
    """
    made = []
    for name in (GATE_UP, DOWN):
        found = _blocks(module, name)
        assert found is not None, "is_mxfp4() has looked at it"
        made.append(_packed_mxfp4(*found))
        for tensor in found:
            tensor.data = tensor.data.new_empty(0)
    biases: list[nn.Parameter | None] = []
    for name in (GATE_UP, DOWN):
        bias = getattr(module, f"{name}_bias", None)
        if isinstance(bias, torch.Tensor) and not (isinstance(bias, nn.Parameter) and bias.dtype == dtype):
            bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        biases.append(bias)
    alpha, limit = float(getattr(module, "alpha", 1.702)), float(getattr(module, "limit", math.inf))
    how = GateHow(Activation.CLAMPED_SWIGLU, True, alpha, limit)
    return PackedExperts(PackedStacks(*made), how, *biases, dtype).train(module.training)


def restore(shapes: tuple[torch.Size, torch.Size], module: nn.Module, stacks: PackedStacks) -> None:
    """Give experts in MXFP4 back what :func:`repacked_experts` has freed, bit for bit.

    Args:
        shapes: of both stacks' scales.
    """
    for name, shape, weight in zip((GATE_UP, DOWN), shapes, (stacks.gate_up, stacks.down)):
        blocks, scales = _blocks_of(weight, shape)
        getattr(module, f"{name}_blocks").data = blocks
        getattr(module, f"{name}_scales").data = scales


def _restoring(module: nn.Module) -> functools.partial[None]:
    """Return :func:`restore` for a module that is not freed yet."""
    found = [_blocks(module, name) for name in (GATE_UP, DOWN)]
    return functools.partial(restore, tuple(each[1].shape for each in found if each is not None))  # type: ignore[arg-type]


def repack_experts(model: nn.Module, replaced: list[Replaced], quiet: bool) -> None:
    """Replace experts in MXFP4 by ours, one module after the other.

    Args:
        replaced: gets what was done, so that a caller can undo it.
        quiet: show no progress on a terminal.
    """
    places = places_of(model)
    found = [module for module in model.modules() if is_mxfp4(module) and hook_of(module) is None]
    with counted(len(found), "hf_fastpath: repacking experts", quiet) as bar, heap.repacking():
        for module in found:
            restore = _restoring(module)
            with torch.inference_mode(False), torch.no_grad():
                packed = repacked_experts(module, model.dtype)
            Replaced(module, packed, places[id(module)], restore).put(replaced)
            if packed.quants.device.type == "cpu":
                heap.give_back()
            bar.update()
