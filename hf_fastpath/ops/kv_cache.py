"""What the two ops that touch the KV cache share: where a position lives, and the table of cache addresses."""

from __future__ import annotations

import torch

from ..registry import FLOAT_DTYPES

#: columns of a ``kv_table`` row: address of K, address of V, capacity in positions
KV_TABLE_COLUMNS = 3


def refuse_kv_table(kv_table: torch.Tensor | None) -> None:
    """The PyTorch references cannot follow addresses.

    Raises:
        NotImplementedError: a ``kv_table`` was given and no native library implements the op here.
    """
    if kv_table is not None:
        raise NotImplementedError("kv_table needs the native library of this device: build it, or pass the caches")


def positions(seq_lens: torch.Tensor, query_len: int) -> torch.Tensor:
    """[batch, query_len] positions of the newest ``query_len`` tokens of sequences ``seq_lens`` long."""
    steps = torch.arange(query_len, device=seq_lens.device, dtype=torch.long)
    return seq_lens.long()[:, None] - query_len + steps


def slot_positions(seq_lens: torch.Tensor, capacity: int) -> torch.Tensor:
    """[batch, capacity] the newest position each ring slot holds; negative where none was written yet."""
    last = seq_lens.long()[:, None] - 1
    slots = torch.arange(capacity, device=seq_lens.device, dtype=torch.long)
    return last - torch.remainder(last - slots, capacity)


def cache_reasons(k_cache, v_cache, seq_lens, batch: int, device: torch.device, kv_table, layer: int) -> list[str]:
    """Reasons why the cache arguments do not fit a batch on ``device``."""
    reasons = []
    if k_cache.dim() != 4 or k_cache.shape[0] != batch:
        reasons.append(f"k_cache has shape {tuple(k_cache.shape)}, expected [{batch}, kv_heads, capacity, head_dim]")
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        reasons.append("k_cache and v_cache differ in shape or dtype: allocate them alike")
    if k_cache.dtype not in FLOAT_DTYPES:
        reasons.append(f"k_cache has dtype {k_cache.dtype}, expected float32, float16 or bfloat16")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        reasons.append("k_cache and v_cache have to be contiguous: pass the whole buffers, not slices")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("seq_lens", seq_lens), ("kv_table", kv_table)):
        if tensor is not None and tensor.device != device:
            reasons.append(f"{name} is on {tensor.device}, expected {device}: move it")
    if seq_lens.dtype != torch.int32 or tuple(seq_lens.shape) != (batch,):
        reasons.append(f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}, expected torch.int32 ({batch},)")
    if kv_table is not None:
        if kv_table.dtype != torch.int64 or kv_table.dim() != 2 or kv_table.shape[1] != KV_TABLE_COLUMNS:
            reasons.append(f"kv_table is {kv_table.dtype} {tuple(kv_table.shape)}, expected torch.int64 [layers, 3]")
        elif not 0 <= layer < kv_table.shape[0]:
            reasons.append(f"layer is {layer}, expected 0 to {kv_table.shape[0] - 1}")
    return reasons
