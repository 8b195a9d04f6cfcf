"""The weight of a product as a value: plain or quantized, either with adapters behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ops.lora_down import MAX_MATRICES, MAX_RANKS
from ...quantization import InputRounding, PackedWeight, ReorderedWeight, RoundedInputWeight
from .modules import is_packed, is_transposed, weight_and_bias


@dataclass(frozen=True)
class PlainWeight:
    """A matrix of floats, as a model holds it.

    Attributes:
        matrix: [out_features, in_features], or [in_features, out_features] if ``transposed``.
        transposed: whether the matrix is stored as GPT-2's are.
    """

    matrix: torch.Tensor
    transposed: bool = False

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def out_features(self) -> int:
        return self.matrix.shape[1 if self.transposed else 0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.matrix]

    def rows(self, first: int, count: int) -> PlainWeight:
        """Return a weight of so many output features, as a view."""
        return PlainWeight(self.matrix.narrow(1 if self.transposed else 0, first, count), self.transposed)


@dataclass(frozen=True)
class Adapter:
    """What LoRA adds to a product: ``scale * up @ down``.

    Attributes:
        down: [rank, in_features].
        up: [out_features, rank].
        scale: a factor.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight with adapters behind it, each of which is added to the product.

    Attributes:
        base: the weight without adapters.
        adapters: of all output features each.
    """

    base: PlainWeight | PackedWeight | ReorderedWeight | RoundedInputWeight
    adapters: tuple[Adapter, ...]

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.base.tensors + [each for adapter in self.adapters for each in (adapter.down, adapter.up)]

    def rows(self, first: int, count: int) -> AdaptedWeight:
        """Return a weight of so many output features, as views."""
        adapters = tuple(Adapter(each.down, each.up.narrow(0, first, count), each.scale) for each in self.adapters)
        return AdaptedWeight(self.base.rows(first, count), adapters)


Weight = PlainWeight | PackedWeight | ReorderedWeight | RoundedInputWeight | AdaptedWeight


@dataclass(frozen=True)
class Adapters:
    """The adapters of weights whose products lie side by side, as ``ops.lora_down`` and ``ops.lora_up`` take them.

    Attributes:
        down, up, scales: of each adapter, see :class:`Adapter`.
        firsts: the first feature of all products that each adapter is added to.
    """

    down: list[torch.Tensor]
    up: list[torch.Tensor]
    scales: list[float]
    firsts: list[int]

    @property
    def are_alike(self) -> bool:
        """Whether all matrices have one dtype."""
        return len({each.dtype for each in (*self.down, *self.up)}) == 1

    @property
    def are_few(self) -> bool:
        """Whether one call of these ops takes them."""
        return len(self.down) <= MAX_MATRICES and sum(map(len, self.down)) <= MAX_RANKS

    @property
    def added(self) -> dict[str, Any]:
        """What ``ops.lora_up`` is told of them."""
        return dict(weights=self.up, scales=self.scales, firsts=self.firsts)

    def of_rows(self, owners: RowOwners | None) -> dict[str, Any]:
        """Return what both ops are told of the rows that take them, if rows have owners."""
        if owners is None:
            return {}
        return dict(chosen=owners.chosen, owners=[owners.numbers[each.data_ptr()] for each in self.down])

    @staticmethod
    def of(weights: Sequence[Weight]) -> Adapters:
        made, first = Adapters([], [], [], []), 0
        for weight in weights:
            for each in weight.adapters if isinstance(weight, AdaptedWeight) else ():
                made.down.append(each.down)
                made.up.append(each.up)
                made.scales.append(each.scale)
                made.firsts.append(first)
            first += weight.out_features
        return made


@dataclass(frozen=True)
class RowOwners:
    """Which rows of a step take which adapters.

    Attributes:
        chosen: int32 [rows], the number of each row's adapter; another number for none.
        numbers: address of an adapter's ``down`` -> the adapter's number.
    """

    chosen: torch.Tensor
    numbers: Mapping[int, int]


def weight_of(linear: nn.Module) -> tuple[Weight, torch.Tensor | None]:
    """Return the weight of a projection, and its bias or None."""
    matrix, bias = weight_and_bias(linear)
    weight: Weight = linear.packed if is_packed(linear) else PlainWeight(matrix, is_transposed(linear))
    return weight, bias


def joined(weights: Sequence[Weight]) -> PackedWeight | None:
    """Return quantized weights that lie side by side in memory as one; None if they do not, or one is plain."""
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    return PackedWeight.joined(packed) if len(packed) == len(weights) else None


def has_adapters(*weights: Weight) -> bool:
    """Whether one of the weights has adapters behind it."""
    return any(isinstance(each, AdaptedWeight) for each in weights)


def order_of(weights: Sequence[Weight]) -> tuple[torch.Tensor, list[PackedWeight]] | None:
    """Return the order of the inputs that weights of one input share, and the weights in it; None if there is none."""
    found = [each for each in weights if isinstance(each, ReorderedWeight)]
    if not found or len(found) < len(weights) or any(each.order is not found[0].order for each in found):
        return None
    return found[0].order, [each.weight for each in found]


def rounding_of(weights: Sequence[Weight]) -> tuple[InputRounding, list[PackedWeight]] | None:
    """Return how weights of one input have it rounded, and the weights without that; None if there is no such thing."""
    found = [each for each in weights if isinstance(each, RoundedInputWeight)]
    if not found or len(found) < len(weights) or any(each.rounding != found[0].rounding for each in found):
        return None
    return found[0].rounding, [each.weight for each in found]


def halves(weight: Weight) -> list[Weight]:
    """Return the first and the last half of the output features, as views."""
    count = weight.out_features // 2
    return [weight.rows(0, count), weight.rows(count, count)]
