"""The module that replaces a linear layer whose weight is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ..ops.fake_quantize import SPEC as FAKE_QUANTIZE
from ..ops.gemv import MAX_ROWS
from ..ops.packed_gemm import SPEC as PACKED_GEMM
from ..ops.packed_gemv import SPEC as PACKED_GEMV
from ..quantization.formats import (
    AnyPackedWeight,
    InputRounding,
    PackedWeight,
    ReorderedWeight,
    RoundedInputWeight,
    scale_dtype,
)
from ..registry import FLOAT_DTYPES, OpSpec
from .absent_weight import REMEDY, AbsentWeight

#: attribute with the parameter that was quantized, while that is tied to others
QUANTIZED_OF = "_hf_fastpath_quantized_of"
#: bytes of a scale -> type that holds their bits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Rounded(torch.autograd.Function):
    """Rounding to quants, whose gradient is that of no rounding, as packages have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: InputRounding) -> torch.Tensor:
        function = FAKE_QUANTIZE.overload if x.dtype in FLOAT_DTYPES else FAKE_QUANTIZE.reference
        return function(x, rounding.quants, rounding.limit)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class PackedLinear(nn.Module):
    """A linear layer whose weight is quantized.

    Few rows without gradients go through ``ops.packed_gemv``, many rows through ``ops.packed_gemm``. If gradients are
    needed, which then reach x, or there is no kernel, the weight is dequantized to x's type. If the module is moved,
    its weight moves; a cast leaves the weight as it is.

    Args:
        given: the quantized weight, in an order of inputs, or with what its input is rounded to.
        bias: [out_features] or None; the module keeps the parameter itself.
        dtype: type of the weight that was quantized, which a cast of the module changes.
    """

    #: whether this stands for a layer of a checkpoint that is not loaded; it has no data and is only asked about
    is_described = False
    quants: torch.Tensor
    scale_bits: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self, given: AnyPackedWeight, bias: nn.Parameter | None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        weight = given if isinstance(given, PackedWeight) else given.weight
        #: how the input is rounded, or None
        self.rounding = given.rounding if isinstance(given, RoundedInputWeight) else None
        self.format, self.multiplier = weight.format, weight.multiplier
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.register_buffer("quants", weight.quants)
        # The bits of the scales are stored as integers because half() and float() leave these alone.
        self.register_buffer("scale_bits", weight.scales.view(_BITS[weight.scales.element_size()]))
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("order", given.order if isinstance(given, ReorderedWeight) else None)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> AbsentWeight:
        """What tells of the weight to code that asks a linear layer for it."""
        return AbsentWeight(self.dtype, self.quants.device, (self.out_features, self.in_features))

    @weight.setter
    def weight(self, value: Any) -> NoReturn:
        self._refuse("weight")

    @weight.deleter
    def weight(self) -> NoReturn:
        self._refuse("weight")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register the bias; refuse a weight, which would not be read, unless it is the one that was quantized."""
        if name == "bias":
            super().register_parameter(name, param)
        elif name != "weight" or param is None or param is not vars(self).get(QUANTIZED_OF):
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name!r} of a layer whose weight hf_fastpath has quantized to {self.format.name} cannot be set: {REMEDY}"
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors = args[-1]
        if f"{prefix}weight" in state_dict:
            errors.append(f"{prefix}weight would not be read, because hf_fastpath has quantized the layer: {REMEDY}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> PackedLinear:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.quants.device)).dtype
        return super()._apply(fn, recurse)

    @property
    def scales(self) -> torch.Tensor:
        return self.scale_bits.view(scale_dtype(self.format))

    @property
    def in_order(self) -> PackedWeight:
        """The weight in the order in which it lies; its tensors are those of this module."""
        return PackedWeight(self.format, self.in_features, self.quants, self.scales, self.zeros, self.multiplier)

    @property
    def packed(self) -> AnyPackedWeight:
        """The weight; its tensors are those of this module."""
        if self.rounding is not None:
            return RoundedInputWeight(self.in_order, self.rounding)
        return self.in_order if self.order is None else ReorderedWeight(self.in_order, self.order)

    @property
    def mixes_rows(self) -> bool:
        """Whether inputs of one row have a say in how those of others are rounded."""
        return self.rounding is not None and self.rounding.mixes_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounding is not None and x.numel():
            x = _Rounded.apply(x, self.rounding)
        op = self._op_for(x)
        if op is not None:
            x = x if self.order is None else x.index_select(-1, self.order)
            return op(x, *self.in_order.parts, self.bias)
        return nn.functional.linear(x, self.packed.dequantize(x.dtype), self.bias)

    def _op_for(self, x: torch.Tensor) -> OpSpec | None:
        """Return the op that computes this layer for ``x``, or None if the weight has to be dequantized."""
        device = x.device.type
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(device) or x.dtype not in FLOAT_DTYPES:
            return None
        if torch.is_grad_enabled() and (x.requires_grad or self.bias is not None and self.bias.requires_grad):
            return None
        rows = x.numel() // max(1, x.shape[-1])
        op = PACKED_GEMV if rows <= MAX_ROWS else PACKED_GEMM
        return op if rows and device in op.native else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.name}"
