"""A checkpoint's tensors are made again of our quants, so that they are not kept twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..linears.checkpoint_weights import IntWeight
from ..quantization.formats import AnyPackedWeight, PackedWeight, ReorderedWeight, RoundedInputWeight, unpack


@dataclass(frozen=True)
class Restoring:
    """Gives a layer the quants again that its family's ``release`` has freed.

    Attributes:
        restore, restores_weight: as of :class:`..linears.checkpoints.LayerFamily`.
    """

    restore: Callable[[nn.Module, Any], None]
    restores_weight: bool = False

    def __call__(self, module: nn.Module, weight: AnyPackedWeight) -> None:
        if self.restores_weight:
            return self.restore(module, weight if isinstance(weight, PackedWeight) else weight.weight)
        weight = weight.weight if isinstance(weight, RoundedInputWeight) else weight
        assert isinstance(weight, PackedWeight), "no family with this has an order of inputs"
        self.restore(module, unpack(weight.format, weight.quants)[:, : weight.in_features])


@dataclass
class Rewriting:
    """Makes the tensors of a checkpoint's layer of the weight that was repacked.

    Attributes:
        written: as of :class:`..linears.checkpoints.LayerFamily`.
        bits, group, scale_dtype: of the weight that was read.
        zeros: its zero points, if the format has none and they are not all 0.
        names: the tensors that were freed.
    """

    written: Callable[[nn.Module, IntWeight], dict[str, torch.Tensor]]
    bits: int
    group: int
    scale_dtype: torch.dtype
    zeros: torch.Tensor | None
    names: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        written: Callable[[nn.Module, IntWeight], dict[str, torch.Tensor]],
        weight: IntWeight,
        made: AnyPackedWeight,
    ) -> Rewriting:
        """Return what makes the tensors of a layer whose ``weight`` became ``made``."""
        packed = made.weight if isinstance(made, ReorderedWeight) else made
        zeros = None if packed.format.has_zeros or not bool(weight.zeros.any()) else weight.zeros.clone()
        return Rewriting(written, weight.bits, weight.group, weight.scales.dtype, zeros)

    def release(self, module: nn.Module, made: AnyPackedWeight) -> None:
        """Free the tensors that come back bit for bit: those whose scales a format has rounded do not."""
        for name, tensor in self.written(module, self._weight(made)).items():
            own = attrgetter(name)(module)
            if own.dtype == tensor.dtype and torch.equal(own, tensor):
                self.names.append(name)
                own.data = own.data.new_empty(0)

    def __call__(self, module: nn.Module, made: AnyPackedWeight) -> None:
        """Give the layer back what was freed, on the device of the repacked weight."""
        tensors = self.written(module, self._weight(made))
        for name in self.names:
            own = attrgetter(name)(module)
            own.data = tensors[name].to(own.device) if "." in name else tensors[name]

    def _weight(self, made: AnyPackedWeight) -> IntWeight:
        packed, order = made, None
        if isinstance(made, ReorderedWeight):
            packed, order = made.weight, made.order.long()
        assert isinstance(packed, PackedWeight)
        format, columns = packed.format, packed.in_features
        numbers = unpack(format, packed.quants)[:, :columns]
        starts = torch.arange(-(-columns // self.group), device=packed.device) * self.group // format.group
        scales = (packed.scales[:, starts].double() * packed.multiplier).to(self.scale_dtype)
        zeros = torch.zeros_like(scales, dtype=torch.int16) if self.zeros is None else self.zeros.to(packed.device)
        half = 1 << (format.bits - 1)
        if packed.zeros is not None:
            zeros = packed.zeros[:, starts].to(torch.int16) - half
        if format.bits == 8 and packed.zeros is None:
            steps = numbers.view(torch.int8)
            of_columns = zeros.repeat_interleave(self.group, dim=1)[:, :columns]
            quants = steps if self.zeros is None else (steps + of_columns).to(torch.int8)
        else:
            quants = (numbers - half).view(torch.int8)
        return IntWeight(self.bits, self.group, quants, scales, zeros, order)
