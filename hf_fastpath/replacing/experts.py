"""Experts of mixtures as quantized ones: of a model's own weights, and of checkpoints in MXFP4."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import compat
from ..choices import Activation
from ..decode.ranks.rank_calls import style_of
from ..linears.packed_experts import DOWN, GATE_UP, GateHow, PackedExperts, PackedStacks
from ..ops.fused_experts import UNGATED
from ..quantization.formats import FORMATS, Format, PackedWeight, pack, padded, unpack
from ..quantization.quantizer import quantize
from ..recording.passes.experts import formula_of
from ..registry import FLOAT_DTYPES, PLAIN_TENSORS

#: format of checkpoints whose experts are in MXFP4
MXFP4 = FORMATS["mxfp4"]


def gate_of(module: nn.Module) -> GateHow | None:
    """Return what experts do between their products, None if their weights cannot be quantized: they are no stacks of
    plain matrices, or ``ops.packed_experts`` does not compute what the module does."""
    if (stacks := compat.expert_stacks(module)) is None or not stacks.has_gate:
        return None
    held = list(stacks.tensors.values())
    if any(type(each) not in PLAIN_TENSORS or each.dtype not in FLOAT_DTYPES for each in held):
        return None
    if len({len(each) for each in held}) > 1 or len({each.dtype for each in held}) > 1:
        return None
    formula = formula_of(module, stacks)
    if formula is None or formula["activation"] == UNGATED:
        return None
    numbers = {name: formula[name] for name in ("alpha", "limit") if name in formula}
    is_alternating = bool(formula.get("transposed")) and not formula.get("concatenated")
    return GateHow(Activation(formula["activation"]), is_alternating, **numbers)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts ``patch(weights=)`` quantizes: those of the decoder of text."""
    decoder = compat.text_decoder(model) if compat.is_multimodal(model) or compat.has_encoder(model) else model
    held = [each for each in decoder.modules() if _holds_stacks(each) and compat.hook_of(each) is None]
    return [each for each in held if style_of(each) is None and gate_of(each) is not None]


def _holds_stacks(module: nn.Module) -> bool:
    parameters = module._parameters
    return all(getattr(parameters.get(name), "ndim", 0) == 3 for name in (GATE_UP, DOWN))


def quantized_experts(module: nn.Module, format: Format) -> PackedExperts:
    """Return quantized experts in the place of a module that :func:`experts_of` gave.

    A stack is quantized as one matrix; no more than a copy of it is made beside it.
    """
    stacks, how = compat.expert_stacks(module), gate_of(module)
    assert stacks is not None and how is not None, "experts_of() has looked at it"
    tensors = {role: stacks.tensors[name] for role, name in stacks.roles.items()}

    def quantized(role: str) -> PackedWeight:
        matrices = tensors[role].detach()
        matrices = matrices.mT if stacks.is_transposed else matrices
        return quantize(matrices.flatten(0, 1), format)

    made = PackedStacks(quantized("gate_up_weight"), quantized("down_weight"))
    biases: list[Any] = [tensors.get(role) for role in ("gate_up_bias", "down_bias")]
    return PackedExperts(made, how, *biases, tensors["down_weight"].dtype).train(module.training)


def experts_with(module: nn.Module, stacks: PackedStacks) -> PackedExperts:
    """Return experts with quantized weights that are there, in the place of a module whose own are no more needed."""
    held, how = compat.expert_stacks(module), gate_of(module)
    if held is None or how is None:
        raise ValueError(f"the experts of a {type(module).__name__} cannot have quantized weights: load it anew")
    biases: list[Any] = [
        held.tensors[held.roles[role]] if role in held.roles else None for role in ("gate_up_bias", "down_bias")
    ]
    return PackedExperts(stacks, how, *biases, held.tensors[DOWN].dtype).train(module.training)


# ---- checkpoints in MXFP4 -----------------------------------------------------------------------------------------


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


def restoring(module: nn.Module) -> functools.partial[None]:
    """Return :func:`restore` for a module that is not freed yet."""
    found = [_blocks(module, name) for name in (GATE_UP, DOWN)]
    return functools.partial(restore, tuple(each[1].shape for each in found if each is not None))  # type: ignore[arg-type]
