"""Quantized experts in the place of a mixture's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import compat
from ..choices import Activation
from ..decode.ranks.rank_calls import style_of
from ..linears.packed_experts import DOWN, GATE_UP, GateHow, PackedExperts, PackedStacks
from ..ops.fused_experts import UNGATED
from ..quantization.formats import Format, PackedWeight
from ..quantization.quantizer import quantize
from ..recording.passes.experts import formula_of
from ..registry import FLOAT_DTYPES, PLAIN_TENSORS


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
