"""Shared by the ops of attention: what queries, and what is done to their scores, have to be."""

from __future__ import annotations

import torch

from ..registry import shape_reason, tensor_reasons

#: largest size of a head; sizes are even. Kernels exist for 32 to 256 in steps of 8; portable kernels take other sizes
MAX_HEAD_DIM = 512


def takes_head_dim(head_dim: int) -> bool:
    """Whether attention takes heads of this size."""
    return 0 < head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0


def score_reasons(
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    softcap: float,
    slopes: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> list[str]:
    """Return reasons why scores of queries, [batch, query_len, heads, head_dim], cannot be changed so."""
    reasons = []
    if softcap < 0:
        reasons.append(f"softcap is {softcap}, expected 0 (none) or a positive number")
    if slopes is not None and sinks is not None:
        reasons.append("slopes and sinks do not go together: pass one of them")
    if slopes is not None and (slopes.dtype != torch.float32 or tuple(slopes.shape) != (q.shape[2],)):
        reasons.append(f"slopes are {slopes.dtype} {tuple(slopes.shape)}, expected torch.float32 ({q.shape[2]},)")
    if slopes is not None and slopes.device != q.device:
        reasons.append(f"slopes are on {slopes.device}, expected {q.device}: move them")
    if biases is None:
        return reasons
    if sinks is not None or slopes is not None or q.shape[1] > 1:
        reasons.append("biases go with one new token, and not with slopes or sinks: pass them alone")
    shapes = (q.shape[2],), (q.shape[0], q.shape[2])
    if biases.dtype != torch.float32 or tuple(biases.shape[:-1]) not in shapes or not biases.shape[-1]:
        expected = f"torch.float32 ({q.shape[2]}, 1 or more) or ({q.shape[0]}, {q.shape[2]}, 1 or more)"
        reasons.append(f"biases are {biases.dtype} {tuple(biases.shape)}, expected {expected}")
    if biases.device != q.device:
        reasons.append(f"biases are on {biases.device}, expected {q.device}: move them")
    return reasons


def other_reasons(
    q: torch.Tensor, other: torch.Tensor | None, other_lse: torch.Tensor | None, lse: torch.Tensor | None
) -> list[str]:
    """Return reasons why attention over other keys does not go with queries, [batch, query_len, heads, head_dim]."""
    rows, features = tuple(q.shape[:3]), (*q.shape[:2], q.shape[2] * q.shape[3])
    reasons = shape_reason("other", other, features) + tensor_reasons(q, other=other)
    if (other is None) != (other_lse is None):
        reasons.append("other and other_lse go together: pass both")
    for name, each in (("other_lse", other_lse), ("lse", lse)):
        if each is not None and (each.dtype != torch.float32 or tuple(each.shape) != rows or each.device != q.device):
            what = f"{name} is {each.dtype} {tuple(each.shape)} on {each.device}"
            reasons.append(f"{what}, expected torch.float32 {rows} on {q.device}")
    if lse is not None and not lse.is_contiguous():
        reasons.append("lse has to be contiguous: pass a whole tensor")
    return reasons


def query_reasons(q: torch.Tensor, k_cache: torch.Tensor, starts: torch.Tensor | None, window: int) -> list[str]:
    """Return reasons why queries, [batch, query_len, heads, head_dim], do not fit a cache, padding and a window."""
    batch, _, num_heads, head_dim = q.shape
    reasons = []
    if k_cache.dim() == 4 and (k_cache.shape[3] != head_dim or k_cache.shape[1] == 0 or num_heads % k_cache.shape[1]):
        reasons.append(
            f"q has {num_heads} heads of {head_dim}, the cache {k_cache.shape[1]} of {k_cache.shape[3]}: "
            "expected the same head_dim and a multiple of the cache's heads"
        )
    if not takes_head_dim(head_dim):
        reasons.append(f"head_dim is {head_dim}, expected an even number up to {MAX_HEAD_DIM}")
    if window < 0:
        reasons.append(f"window is {window}, expected 0 (none) or a positive number of positions")
    if starts is not None and (starts.dtype != torch.int32 or tuple(starts.shape) != (batch,)):
        reasons.append(f"starts is {starts.dtype} {tuple(starts.shape)}, expected torch.int32 ({batch},)")
    if starts is not None and starts.device != q.device:
        reasons.append(f"starts is on {starts.device}, expected {q.device}: move it")
    return reasons
