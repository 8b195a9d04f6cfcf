"""Shared by the ops that touch the KV cache: where a position lies, quantized keys and values, and the table of cache
addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..registry import FLOAT_DTYPES, in_host_memory

#: columns of a row of a ``kv_table``: address of K, address of V, capacity in positions; for quantized caches also the
#: addresses of their scales
KV_TABLE_COLUMNS, QUANTIZED_TABLE_COLUMNS = 3, 5
#: the same for a cache in pages: address of K, address of V, positions that a row has pages for, address of the block
#: table
PAGED_TABLE_COLUMNS = 4
#: positions of a page, a power of two; smaller pages would cut the tiles that kernels read
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 16, 4096
#: storage type of quantized keys and values -> the largest quant; a value is ``quant * scale``
LARGEST_QUANT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: type of the scales, one for each head and token: it has the range of float32, so no head is too large or too small
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer as the ops take them, as tensors or as registers of a recorded step.

    Attributes:
        k, v: [batch, kv_heads, capacity, head_dim], or with a block table [pages, kv_heads, page_size, head_dim].
        k_scales, v_scales: scales of a quantized cache, bfloat16 [batch, kv_heads, capacity]; or None.
        block_table: int32 [batch, pages of a sequence], or None.
        table, layer: a ``kv_table``, whose addresses replace those of the tensors, and a row of it; see
            ``ops.rope_append``.
    """

    k: Any
    v: Any
    k_scales: Any = None
    v_scales: Any = None
    block_table: Any = None
    table: Any = None
    layer: int = 0
    #: argument of an op -> attribute
    PARTS: ClassVar[dict[str, str]] = {
        "k_cache": "k",
        "v_cache": "v",
        "k_scales": "k_scales",
        "v_scales": "v_scales",
        "block_table": "block_table",
        "kv_table": "table",
        "layer": "layer",
    }

    @property
    def is_paged(self) -> bool:
        return self.block_table is not None

    def names(self) -> tuple[str, ...]:
        """Return the names of the buffers that the cache has."""
        return tuple(
            name for name in ("k", "v", "k_scales", "v_scales", "block_table") if getattr(self, name) is not None
        )


def is_quantized(dtype: torch.dtype | None) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype in LARGEST_QUANT


def quantized(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys or values.

    A head's scale is its largest magnitude divided by ``LARGEST_QUANT``, rounded up to bfloat16, so that no quant is
    clipped; quants are rounded to the nearest, ties to even. A head of zeros has scale 0; a head with an infinity or a
    NaN has scale NaN, and so is NaN throughout.

    Args:
        states: [..., head_dim], floating.
        dtype: a key of ``LARGEST_QUANT``.

    Returns:
        Quants [..., head_dim] in ``dtype``, and scales [...] in bfloat16.
    """
    most = LARGEST_QUANT[dtype]
    wide = states if states.dtype == torch.float64 else states.float()
    largest = wide.abs().amax(-1)
    # The divisor is a tensor because on CUDA, PyTorch multiplies by a number's reciprocal, which may round differently.
    step = (largest.float() / largest.new_full((), most, dtype=torch.float32)).view(torch.int32)
    scales = torch.where(largest.isfinite(), ((step + 0xFFFF) & -0x10000).view(torch.float32), torch.nan)
    return _quants(wide, scales, dtype), scales.to(SCALE_DTYPE)


def _quants(wide: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most, divisor = LARGEST_QUANT[dtype], scales[..., None]
    quants = torch.where(divisor > 0, wide / divisor, 0).clamp(-most, most)
    return (quants.round() if dtype == torch.int8 else quants).to(dtype)


def requantized(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as :func:`quantized`; a head that came from quants gets quants that stand for exactly the same values.

    The largest quant of a head may be less than ``LARGEST_QUANT``, and the states were rounded. The scale that they
    came from is then a few steps of bfloat16 away from the scale that is computed.
    """
    quants, scales = quantized(states, dtype)
    wide = states if states.dtype == torch.float64 else states.float()
    found = (dequantized(quants, scales, states.dtype) == states).all(-1)
    for steps in (1, -1, 2):
        if bool(found.all()):
            break
        tried = (scales.view(torch.int16) + steps).view(SCALE_DTYPE)
        others = _quants(wide, tried.float(), dtype)
        better = ~found & (dequantized(others, tried, states.dtype) == states).all(-1)
        quants = torch.where(better[..., None], others.view(torch.uint8), quants.view(torch.uint8)).view(dtype)
        scales, found = torch.where(better, tried, scales), found | better
    return quants, scales


def dequantized(quants: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``quants * scales``, [..., head_dim] in ``dtype``, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return quants.to(wide).mul_(scales.to(wide)[..., None]).to(dtype)


def refuse_kv_table(kv_table: torch.Tensor | None) -> None:
    """Refuse a ``kv_table``: the PyTorch references cannot follow addresses.

    Raises:
        NotImplementedError: a ``kv_table`` was given and no native library implements the op here.
    """
    if kv_table is not None:
        raise NotImplementedError("kv_table needs the native library of this device: build it, or pass the caches")


def position_bytes(cache: torch.Tensor) -> int:
    """Return the bytes of one head and position in a cache, with its scale."""
    return cache.shape[3] * cache.element_size() + is_quantized(cache.dtype) * SCALE_DTYPE.itemsize


def positions(seq_lens: torch.Tensor, query_len: int) -> torch.Tensor:
    """Return [batch, query_len] positions of the newest ``query_len`` tokens of sequences ``seq_lens`` long."""
    steps = torch.arange(query_len, device=seq_lens.device, dtype=torch.long)
    return seq_lens.long()[:, None] - query_len + steps


def slot_positions(seq_lens: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return [batch, capacity], the newest position that each ring slot holds; negative if nothing was written."""
    last = seq_lens.long()[:, None] - 1
    slots = torch.arange(capacity, device=seq_lens.device, dtype=torch.long)
    return last - torch.remainder(last - slots, capacity)


def is_page_size(number: int) -> bool:
    """Whether a page may hold so many positions."""
    return MIN_PAGE_SIZE <= number <= MAX_PAGE_SIZE and number & (number - 1) == 0


def gathered(cache: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """Gather pages into the cache that they stand for: [batch, num_kv_heads, capacity, head_dim].

    Args:
        cache: [pages, num_kv_heads, page_size, head_dim]; without a table, the cache itself is the result.
        block_table: int32 [batch, pages a sequence], or None.
    """
    if block_table is None:
        return cache
    return cache[block_table.long()].transpose(1, 2).flatten(2, 3)


def in_pages(caches: list[torch.Tensor], page_size: int) -> tuple[torch.Tensor, ...]:
    """Put caches [batch, num_kv_heads, capacity, head_dim] into pages in random order; :func:`gathered` undoes it.

    Samples and tests use it. The capacity is a multiple of ``page_size``.

    Returns:
        The block table, and the pages of each cache.
    """
    batch, heads, capacity, head_dim = caches[0].shape
    columns = capacity // page_size
    order = torch.randperm(batch * columns)
    table = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    made = []
    for cache in caches:
        pages = cache.unflatten(2, (columns, page_size)).transpose(1, 2).flatten(0, 1)
        made.append(pages[order.to(cache.device)].contiguous())
    return table.view(batch, columns).to(caches[0].device, torch.int32), *made


def capacity_of(cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Return the positions that a sequence has slots for; in a cache with pages, that it has entries for."""
    return cache.shape[2] * (1 if block_table is None else block_table.shape[1])


def _block_table_reasons(k_cache, block_table, batch: int) -> list[str]:
    reasons = []
    if k_cache.dim() != 4 or not is_page_size(k_cache.shape[2]):
        expected = f"[pages, kv_heads, page_size, head_dim], page_size a power of two from {MIN_PAGE_SIZE} on"
        reasons.append(f"k_cache has shape {tuple(k_cache.shape)}, expected with a block_table {expected}")
    if k_cache.dtype not in FLOAT_DTYPES:
        reasons.append(f"k_cache is {k_cache.dtype}, expected float32, float16 or bfloat16 with a block_table")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != batch:
        expected = f"torch.int32 [{batch}, pages of a sequence]"
        reasons.append(f"block_table is {block_table.dtype} {tuple(block_table.shape)}, expected {expected}")
    elif block_table.shape[1] == 0 or not block_table.is_contiguous():
        reasons.append("block_table has to be contiguous, with a column or more: pass the whole table")
    return reasons


def length_reasons(seq_lens: torch.Tensor, most: int | None = None) -> list[str]:
    """Return a reason if host memory holds lengths, int32 [batch], below 0 or above ``most``."""
    if not seq_lens.numel() or not in_host_memory(seq_lens):
        return []
    lowest, highest = (int(length) for length in seq_lens.aminmax())
    if lowest < 0:
        return [f"seq_lens holds {lowest}, expected 0 or more"]
    if most is not None and highest > most:
        return [f"seq_lens holds {highest}, expected at most the cache's capacity {most}: grow the cache first"]
    return []


def _page_reasons(k_cache: torch.Tensor, block_table: torch.Tensor) -> list[str]:
    if not in_host_memory(block_table):
        return []
    pages = k_cache.shape[0]
    strange = block_table[(block_table < 0) | (block_table >= pages)]
    return [f"block_table holds {int(strange[0])}, expected pages from 0 to {pages - 1}"] if strange.numel() else []


def cache_reasons(
    k_cache,
    v_cache,
    seq_lens,
    batch: int,
    device: torch.device,
    kv_table,
    layer: int,
    k_scales=None,
    v_scales=None,
    block_table=None,
) -> list[str]:
    """Return reasons why the cache arguments do not fit a batch on ``device``."""
    reasons = []
    if block_table is not None:
        reasons += _block_table_reasons(k_cache, block_table, batch)
    elif k_cache.dim() != 4 or k_cache.shape[0] != batch:
        reasons.append(f"k_cache has shape {tuple(k_cache.shape)}, expected [{batch}, kv_heads, capacity, head_dim]")
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        reasons.append("k_cache and v_cache differ in shape or dtype: allocate them alike")
    if k_cache.dtype not in (*FLOAT_DTYPES, *LARGEST_QUANT):
        reasons.append(
            f"k_cache has dtype {k_cache.dtype}, expected float32, float16 or bfloat16, or int8 or float8_e4m3fn with "
            "scales"
        )
    reasons += _scales_reasons(k_cache, k_scales, v_scales)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        reasons.append("k_cache and v_cache have to be contiguous: pass the whole buffers, not slices")
    tensors = dict(k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, kv_table=kv_table)
    tensors |= dict(k_scales=k_scales, v_scales=v_scales, block_table=block_table)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            reasons.append(f"{name} is on {tensor.device}, expected {device}: move it")
    if seq_lens.dtype != torch.int32 or tuple(seq_lens.shape) != (batch,):
        reasons.append(f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}, expected torch.int32 ({batch},)")
    elif not reasons:
        reasons += length_reasons(seq_lens)
        if block_table is not None and kv_table is None:
            reasons += _page_reasons(k_cache, block_table)
    if kv_table is not None:
        columns = table_columns(k_cache.dtype, block_table is not None)
        if kv_table.dtype != torch.int64 or kv_table.dim() != 2 or kv_table.shape[1] != columns:
            expected = f"torch.int64 [layers, {columns}]"
            reasons.append(f"kv_table is {kv_table.dtype} {tuple(kv_table.shape)}, expected {expected}")
        elif not 0 <= layer < kv_table.shape[0]:
            reasons.append(f"layer is {layer}, expected 0 to {kv_table.shape[0] - 1}")
    return reasons


def table_columns(dtype: torch.dtype | None, paged: bool = False) -> int:
    """Return the number of columns of a ``kv_table`` for caches of this dtype, with pages or without."""
    if paged:
        return PAGED_TABLE_COLUMNS
    return QUANTIZED_TABLE_COLUMNS if is_quantized(dtype) else KV_TABLE_COLUMNS


def _scales_reasons(k_cache, k_scales, v_scales) -> list[str]:
    if not is_quantized(k_cache.dtype):
        given = k_scales is not None or v_scales is not None
        return [f"scales go with int8 and float8_e4m3fn caches, k_cache is {k_cache.dtype}: pass none"] * given
    reasons = []
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is None:
            reasons.append(f"{name} is None: caches of {k_cache.dtype} need the scales of their quants")
            continue
        if scales.dtype != SCALE_DTYPE or scales.shape != k_cache.shape[:3]:
            expected = f"{SCALE_DTYPE} {tuple(k_cache.shape[:3])}"
            reasons.append(f"{name} is {scales.dtype} {tuple(scales.shape)}, expected {expected}")
        if not scales.is_contiguous():
            reasons.append(f"{name} has to be contiguous: pass the whole buffer, not a slice")
    return reasons
