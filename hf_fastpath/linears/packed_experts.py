"""The module that replaces the experts of a mixture whose weights are quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..choices import Activation
from ..expert_pairs import one_by_one, sorted_pairs
from ..ops.fused_experts import clamped
from ..ops.fused_swiglu import SPEC as FUSED_SWIGLU
from ..ops.fused_swiglu import reference as gated
from ..ops.gemv import MAX_ROWS
from ..ops.packed_experts import SPEC as PACKED_EXPERTS
from ..ops.packed_gemm import SPEC as PACKED_GEMM
from ..ops.packed_gemv import SPEC as PACKED_GEMV
from ..quantization.formats import Format, PackedWeight
from ..registry import FLOAT_DTYPES
from .absent_weight import REMEDY
from .packed_linear import PackedLinear

#: names of the stacks among a module's children
GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class PackedStacks:
    """The quantized matrices of all experts. Those of one kind are one weight, whose rows follow each other.

    Attributes:
        gate_up: of num_experts * 2 * intermediate_size rows.
        down: of num_experts * hidden_size rows.
    """

    gate_up: PackedWeight
    down: PackedWeight

    #: argument of an op -> attribute
    PARTS: ClassVar[dict[str, str]] = {
        f"{role}_{part}": f"{role}.{attribute}"
        for role in ("gate_up", "down")
        for part, attribute in PackedWeight.PARTS.items()
    }

    @property
    def parts(self) -> tuple:
        """The weights as ops take them, in the order of :attr:`PARTS`."""
        return *self.gate_up.parts, *self.down.parts

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.gate_up.tensors, *self.down.tensors]


@dataclass(frozen=True)
class GateHow:
    """What an expert does between its products: arguments of ``ops.packed_experts``.

    Attributes:
        activation: of the gate.
        alternating: rows of gate and up alternate.
        alpha, limit: of ``clamped_swiglu``.
    """

    activation: Activation
    alternating: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def apply(self, both: torch.Tensor, is_differentiable: bool = False) -> torch.Tensor:
        """Return what goes into the product with down, given gate and up features as the weight has them."""
        gate, up = (both[..., ::2], both[..., 1::2]) if self.alternating else both.chunk(2, dim=-1)
        if self.activation == Activation.CLAMPED_SWIGLU:
            return clamped(gate, up, self.alpha, self.limit)
        return (gated if is_differentiable else FUSED_SWIGLU.overload)(gate, up, self.activation)


class PackedExperts(nn.Module):
    """The experts of a mixture, whose weights are quantized.

    Few rows without gradients go through ``ops.packed_experts``, many rows through ``ops.packed_gemm`` expert by
    expert. If gradients are needed, or there is no kernel, one expert at a time is dequantized.

    Args:
        stacks: the quantized weights.
        how: what an expert does between its products.
        gate_up_bias, down_bias: [num_experts, features] or None; the module keeps the parameters themselves.
        dtype: type of the weights that were quantized.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        stacks: PackedStacks,
        how: GateHow,
        gate_up_bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.how = how
        self.hidden_size, self.intermediate_size = stacks.gate_up.in_features, stacks.down.in_features
        self.num_experts = stacks.down.out_features // self.hidden_size
        self.add_module(GATE_UP, PackedLinear(stacks.gate_up, None, dtype))
        self.add_module(DOWN, PackedLinear(stacks.down, None, dtype))
        self.register_parameter(f"{GATE_UP}_bias", gate_up_bias)
        self.register_parameter(f"{DOWN}_bias", down_bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors = args[-1]
        for name in (GATE_UP, DOWN):
            if f"{prefix}{name}" in state_dict:
                errors.append(f"{prefix}{name} would not be read, because hf_fastpath has quantized it: {REMEDY}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def packed(self) -> PackedStacks:
        """The weights; their tensors are those of this module."""
        return PackedStacks(self._modules[GATE_UP].in_order, self._modules[DOWN].in_order)  # type: ignore[union-attr]

    @property
    def format(self) -> Format:
        """The format of the larger stack."""
        return self.packed.gate_up.format

    @property
    def quants(self) -> torch.Tensor:
        """What says where the module is."""
        return self.packed.gate_up.quants

    @property
    def is_described(self) -> bool:
        """As of :class:`PackedLinear`."""
        return self._modules[GATE_UP].is_described  # type: ignore[union-attr,return-value]

    @property
    def biases(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        return self._parameters[f"{GATE_UP}_bias"], self._parameters[f"{DOWN}_bias"]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Do as transformers' experts do: [tokens, hidden_size], and [tokens, top_k] of experts and their weights."""
        return chosen_experts(hidden_states, top_k_index, top_k_weights, self.packed, self.how, *self.biases)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, format={self.format.name}"


def chosen_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: PackedStacks,
    how: GateHow,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Do as ``ops.packed_experts`` for any number of rows.

    Args:
        x: [..., hidden_size].
        ids, weights: [rows, top_k] of any integers and floats: experts, of which those of the stacks are
            ``first_expert`` and those behind it, and what their outputs are multiplied by.
        gate_up_bias, down_bias, residual: as of the op.

    Returns:
        [..., hidden_size] in x's dtype.
    """
    rows, device = len(ids), x.device.type
    needs_grad = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (x, weights, gate_up_bias, down_bias)
    )
    is_plain = not needs_grad and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device)
    if is_plain and 0 < rows <= MAX_ROWS and x.dtype in FLOAT_DTYPES and device in PACKED_EXPERTS.native:
        chosen = ids.long() - first_expert if first_expert else ids.long()
        settings = how.activation, gate_up_bias, down_bias, how.alternating, how.alpha, how.limit
        return PACKED_EXPERTS.overload(x, chosen, weights.float(), *stacks.parts, residual, *settings)
    multiply = _multiply if is_plain and x.dtype in FLOAT_DTYPES else _multiply_dequantized
    out = _one_by_one(x, ids.long() - first_expert, weights, stacks, how, gate_up_bias, down_bias, multiply, needs_grad)
    return out if residual is None else out + residual


def _multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    op = PACKED_GEMV if len(x) <= MAX_ROWS else PACKED_GEMM
    if x.device.type not in op.native:
        return _multiply_dequantized(x, weight, bias)
    return op.overload(x, *weight.parts, bias)


def _multiply_dequantized(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def _one_by_one(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: PackedStacks,
    how: GateHow,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    multiply: Callable[[torch.Tensor, PackedWeight, torch.Tensor | None], torch.Tensor],
    is_differentiable: bool,
) -> torch.Tensor:
    """Run experts that were chosen one after the other, each for its rows; the host waits for the choice."""
    rows, hidden_size = x.reshape(len(ids), -1), x.shape[-1]
    count = stacks.down.out_features // hidden_size
    both_rows = stacks.gate_up.out_features // count
    _, order, ends = sorted_pairs(ids.flatten(), count)

    def compute(expert: int, mine: torch.Tensor) -> torch.Tensor:
        first = stacks.gate_up.rows(expert * both_rows, both_rows)
        both = multiply(rows[mine], first, None if gate_up_bias is None else gate_up_bias[expert])
        hidden = how.apply(both, is_differentiable)
        second = stacks.down.rows(expert * hidden_size, hidden_size)
        return multiply(hidden, second, None if down_bias is None else down_bias[expert])

    return one_by_one(rows, weights, order, ends, compute).to(x.dtype).view(x.shape)
