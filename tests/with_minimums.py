"""Layers of HQQ by the description of their layout, without the package."""

from __future__ import annotations

import torch
from torch import nn


class HQQLinear(nn.Module):
    """A layer of the package's name; tests that run it give it a forward."""


HQQLinear.__module__ = "hqq.core.quantize"


def hqq(
    rows: int, columns: int, bits: int, group: int, dtype: torch.dtype, **changes
) -> tuple[nn.Module, torch.Tensor]:
    """Return a layer of HQQ with axis=1, packed number by number, and its weight, ``scale * (number - zero)``.

    Numbers of a group are a row of [groups, group]. Those of 4, 2 and 1 bits lie in bytes, of which one has the numbers
    of rows that are a half, a quarter or an eighth of all apart, the first in the highest bits; of three bits ten lie
    in an int32, a tenth apart.
    """
    numbers = torch.randint(0, 1 << bits, (rows * columns // group, group))
    scales = (torch.rand(len(numbers), 1) / 99 + 1e-3).to(dtype)
    zeros = (torch.rand(len(numbers), 1) * ((1 << bits) - 1)).to(dtype)
    count, step = {4: (2, 4), 3: (10, 3), 2: (4, 2), 1: (8, 1)}[bits]
    height = -(-len(numbers) // count)
    packed = torch.zeros(height, group, dtype=torch.int64)
    for row in range(len(numbers)):
        packed[row % height] |= numbers[row] << step * (count - 1 - row // height)
    layer = HQQLinear()
    layer.W_q = nn.Parameter(packed.to(torch.int32 if bits == 3 else torch.uint8), requires_grad=False)
    layer.bias, layer.ready, layer.in_features, layer.out_features = None, True, columns, rows
    layer.meta = dict(nbits=bits, group_size=group, shape=torch.Size((rows, columns)), scale=scales, zero=zeros, axis=1)
    layer.meta |= dict(packing="some", view_as_float=False, quant_scale=False, quant_zero=False) | changes
    weight = scales.float() * (numbers.float() - zeros.float())
    return layer, weight.view(rows, columns)
