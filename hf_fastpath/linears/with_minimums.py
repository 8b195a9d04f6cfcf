"""Layers of HQQ, optimum-quanto and torchao whose groups have a float beside their scale: a minimum or a zero point."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import NoCounterpart
from .checkpoint_weights import AffineWeight


def _need(is_so: bool, reason: str = "quantized_format") -> None:
    if not is_so:
        raise NoCounterpart(reason)


# ---- HQQ -----------------------------------------------------------------------------------------------------

#: bits -> numbers that an element of the packed tensor holds, the first in its highest bits, and their distance
_HQQ_PACKED = {4: (2, 4), 3: (10, 3), 2: (4, 2), 1: (8, 1)}


def _hqq_numbers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers, uint8, of which one part of the rows lies beside the next in an element's bits."""
    count, step = _HQQ_PACKED[bits]
    shifts = [step * (count - 1 - part) for part in range(count)]
    return torch.cat([((packed >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in shifts])


def _hqq_packed(numbers: torch.Tensor, bits: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Undo :func:`_hqq_numbers`: ``rows`` of the packed tensor, whose last numbers are 0."""
    count, step = _HQQ_PACKED[bits]
    whole = numbers.new_zeros(count * rows, numbers.shape[1])
    whole[: len(numbers)] = numbers
    made = torch.zeros(rows, numbers.shape[1], dtype=dtype, device=numbers.device)
    for part, some in enumerate(whole.split(rows)):
        made |= some.to(dtype) << (step * (count - 1 - part))
    return made


def hqq(module: nn.Module) -> AffineWeight:
    """Read W_q, packed numbers of groups, of which rows consist one after the other, and scale and zero [groups, 1]."""
    meta: Any = module.meta
    _need(bool(getattr(module, "ready", False)) and meta is not None and meta["packing"] is not None)
    (rows, columns), bits, group = meta["shape"], meta["nbits"], meta["group_size"]
    _need(bits in _HQQ_PACKED and not meta["view_as_float"])
    _need(not meta["quant_scale"] and not meta["quant_zero"] and "scale" in meta and "zero" in meta)
    _need(meta["axis"] == 1, "quantized_axis")
    _need(columns % group == 0, "quantized_blocks")
    numbers = _hqq_numbers(module.W_q.detach(), bits)[: rows * columns // group]
    scales, zeros = (meta[name].view(rows, -1) for name in ("scale", "zero"))
    return AffineWeight("float_zeros", group, numbers.view(rows, columns), scales, zeros)


def release_hqq(module: nn.Module) -> None:
    """Free the quants; scales and zeros stay."""
    module.W_q.data = module.W_q.data.new_empty(0)


def restore_hqq(module: nn.Module, quants: torch.Tensor) -> None:
    """Give a layer its quants again, and scales and zeros on their device."""
    meta: Any = module.meta
    bits, numbers = meta["nbits"], quants.reshape(-1, meta["group_size"])
    rows = math.ceil(len(numbers) / _HQQ_PACKED[bits][0])
    module.W_q.data = _hqq_packed(numbers, bits, rows, module.W_q.dtype)
    for name in ("scale", "zero"):
        meta[name] = meta[name].to(quants.device)


# ---- optimum-quanto and torchao ------------------------------------------------------------------------------


#: rows that PyTorch packs one such part behind the other, on a CPU and on a GPU; what is left of them is a part, too
_PART = 64


@functools.lru_cache(maxsize=8)
def _order_of(pack: Callable[[torch.Tensor], torch.Tensor], rows: int, columns: int, device: str) -> torch.Tensor:
    """Return which number each half byte of a packed matrix is, the low half of a byte first, int64.

    Args:
        pack: packs int32 [rows, columns] of four bits in an order of its own, which is the same for all numbers.
    """
    count = rows * columns
    places, found = torch.arange(count, device=device).view(rows, columns), torch.zeros(count, dtype=torch.int64)
    found = found.to(device)
    for digit in range(0, max(count - 1, 1).bit_length(), 4):
        packed = pack((places >> digit & 15).int())
        found |= halves_of_bytes(packed).long() << digit
    return found


def halves_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the half bytes of a tensor in the order of its memory, the low half of a byte first, as uint8."""
    bytes = packed.contiguous().view(torch.uint8).flatten()
    return torch.stack((bytes & 15, bytes >> 4), -1).flatten()


def in_own_order(
    pack: Callable[[torch.Tensor], torch.Tensor], packed: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """Return the numbers, uint8 [rows, columns], that ``pack`` has made ``packed`` of."""
    halves, whole = halves_of_bytes(packed), rows // _PART * _PART
    numbers = torch.empty(rows * columns, dtype=torch.uint8, device=packed.device)
    for start, end, height in ((0, whole, _PART), (whole, rows, rows - whole)):
        if start < end:
            order = _order_of(pack, height, columns, str(packed.device))
            at, count = slice(start * columns, end * columns), height * columns
            numbers[at].view(-1, count)[:, order] = halves[at].view(-1, count)
    return numbers.view(rows, columns)


def _pack_for_cpu(numbers: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 2)


def _pack_for_gpu(inner: int, numbers: torch.Tensor) -> torch.Tensor:
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, inner)


#: how many tiles of inputs lie together: of optimum-quanto and of torchao
_QUANTO_TILES, _TORCHAO_TILES = 2, 8
#: one function for each, because what they do is remembered
_PACKS = {tiles: functools.partial(_pack_for_gpu, tiles) for tiles in (_QUANTO_TILES, _TORCHAO_TILES)}


def _tiled(packed: torch.Tensor, rows: int, columns: int, tiles: int) -> torch.Tensor:
    pack = _pack_for_cpu if packed.device.type == "cpu" else _PACKS[tiles]
    return in_own_order(pack, packed, rows, columns)


def quanto_bits(weight: Any) -> AffineWeight:
    """Read ``_data``, quants from 0 up of groups of a row, and ``_scale`` and ``_shift`` [groups, 1]: a weight is the
    scale times the quant, less the shift. Or read ``_scale_shift`` [groups of a row, out, 2]: the scale, and what the
    quant 8 stands for."""
    rows, columns = weight.shape
    _need(weight.axis == 0)
    group = weight._group_size or columns
    if type(weight).__name__ == "TinyGemmWeightQBitsTensor":
        scales, middles = (each.t() for each in weight._scale_shift.detach().unbind(-1))
        return AffineWeight("middles", group, _tiled(weight._data._data, rows, columns, _QUANTO_TILES), scales, middles)
    _need(type(weight).__name__ == "WeightQBitsTensor", "quantized_kernel")
    packed, bits = weight._data._data, weight._data._bits
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    quants = torch.cat(parts)[: rows * columns // group].reshape(rows, columns)
    scales, shifts = (each.detach().view(rows, -1) for each in (weight._scale, weight._shift))
    if not shifts.is_floating_point():
        return AffineWeight("float_zeros", group, quants, scales, shifts.to(scales.dtype))
    return AffineWeight("minimums", group, quants, scales, -shifts)


def release_quanto_bits(weight: Any) -> None:
    """Free the quants, but those in the order of PyTorch's kernel."""
    if type(weight).__name__ == "WeightQBitsTensor":
        weight._data._data.data = weight._data._data.data.new_empty(0)


def restore_quanto_bits(weight: Any, quants: torch.Tensor) -> None:
    """Give a weight its quants again, on its device."""
    if type(weight).__name__ != "WeightQBitsTensor":
        return
    packed, bits = weight._data._data, weight._data._bits
    numbers = quants.reshape(-1, weight._group_size or quants.shape[1])
    rows = -(-len(numbers) * bits // 8)
    made = numbers.new_zeros(rows, numbers.shape[1])
    for part, some in enumerate(numbers.split(rows)):
        made[: len(some)] |= some << (bits * part)
    packed.data = made.to(packed.device)


def torchao_pairs(module: nn.Module) -> AffineWeight:
    """Read qdata [out, in / 2], a byte's first number in its low bits, from -8 up, and scale and zero_point, both
    [groups of a row, out]: zero_point is what the number 0 stands for."""
    weight: Any = module.weight
    _need(getattr(weight, "act_pre_scale", None) is None, "quantized_activations")
    inputs = getattr(weight, "activation_dtype", None)
    _need(inputs in (None, torch.bfloat16), "quantized_activations")
    rows, columns = weight.shape
    bytes = weight.qdata.detach().view(torch.uint8)
    _need(tuple(bytes.shape) == (rows, columns // 2) and weight.block_size[0] == 1)
    numbers = torch.stack((bytes & 15, bytes >> 4), -1).view(rows, columns) ^ 8
    return AffineWeight("middles", weight.block_size[1], numbers, weight.scale.t(), weight.zero_point.t())


def torchao_tiles(module: nn.Module) -> AffineWeight:
    """Read qdata, numbers from 0 up in the order of PyTorch's kernel, filled up with others to whole tiles, and
    scale_and_zero [groups of a row, out, 2]: scale, and what the quant 8 stands for."""
    weight: Any = module.weight
    _need(getattr(weight, "act_pre_scale", None) is None, "quantized_activations")
    rows, columns = weight.shape
    group, table = weight.block_size[1], weight.scale_and_zero.detach()
    height, width = table.shape[1], table.shape[0] * group
    numbers = _tiled(weight.qdata.detach(), height, width, _TORCHAO_TILES)[:rows, :columns]
    scales, middles = (each.t()[:rows, : -(-columns // group)] for each in table.unbind(-1))
    return AffineWeight("middles", group, numbers, scales, middles)
