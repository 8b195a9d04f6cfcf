"""Causal attention of many new tokens over a KV cache that already holds them."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from . import decode_attention
from .kv_cache import cache_reasons, length_reasons, slot_positions
from .queries import query_reasons

#: a larger batch would not fit into a grid of the CUDA kernels
MAX_BATCH = 65535


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``softmax(cap(scale * q @ K.T)) @ V`` over the visible positions of each row; ``cap(s)`` is
    ``softcap * tanh(s / softcap)``.

    Token i of row b has position ``p = seq_lens[b] - query_len + i`` and sees the positions ``j`` with
    ``max(starts[b], p - window + 1) <= j <= p`` (no lower bound from the window if it is 0). Position j lies in
    slot j. A token that sees no position gives zeros. Slots that no token of the call sees are never used, whatever
    they hold.

    Args:
        q: [batch, query_len, num_heads, head_dim], head_dim even and at most 512.
        k_cache, v_cache: [batch, num_kv_heads, capacity, head_dim], contiguous, in q's dtype; num_kv_heads divides
            num_heads.
        seq_lens: int32 [batch], tokens that a row holds, the new ones included; at most capacity.
        starts: int32 [batch], first visible position (left padding), or None for 0.
        scale: factor on the scores.
        window: positions that a token sees, itself included; 0 for all.
        softcap: bound of the scores; 0 for none.
        sinks: [num_heads] in q's dtype, or None: one more score for each head, which takes part in the softmax and
            adds nothing to the output.
        programmatic_launch: CUDA may read lengths and all but the newest query_len positions of the cache while the
            kernel in front on this stream still runs. It is allowed only if that kernel writes none of them. The result
            does not depend on it.

    Returns:
        [batch, query_len, num_heads*head_dim] in q's dtype; softmax and accumulators are float32.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``integrations/sdpa_attention.py@5.17``, with sinks ``eager_attention_forward`` of
    ``models/gpt_oss/modeling_gpt_oss.py@5.23``, with a cap that of ``models/gemma2/modeling_gemma2.py@5.23``; flash
    attention, arXiv:2307.08691 and arXiv:2407.08608.
    """
    if not softcap:
        return decode_attention.reference(q, k_cache, v_cache, seq_lens, starts, scale, window, sinks=sinks)
    batch, query_len, num_heads, head_dim = q.shape
    visible = decode_attention.visible_slots(seq_lens, starts, query_len, k_cache.shape[2], window)
    used = visible.any(1)[:, None, :, None]
    group = num_heads // k_cache.shape[1]
    k, v = (torch.where(used, cache, 0).repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))
    scores = torch.tanh(q.transpose(1, 2) @ k.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=wide).to(q.dtype)[..., : k.shape[2]]
    out = torch.where(visible.any(2)[:, None, :, None], weights @ v, 0)
    return out.transpose(1, 2).reshape(batch, query_len, num_heads * head_dim)


def fake(q) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def why_not(q, k_cache, v_cache, seq_lens, starts, window, softcap, sinks) -> list[str]:
    if q.dim() != 4 or q.shape[1] < 1:
        return [f"q has shape {tuple(q.shape)}, expected [batch, query_len, heads, head_dim]"]
    batch, query_len, num_heads, _ = q.shape
    reasons = tensor_reasons(q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    reasons += shape_reason("sinks", sinks, (num_heads,))
    reasons += cache_reasons(k_cache, v_cache, seq_lens, batch, q.device, None, 0)
    reasons += query_reasons(q, k_cache, starts, window)
    if k_cache.dim() == 4 and k_cache.shape[2] < query_len:
        reasons.append(f"the cache has {k_cache.shape[2]} slots, expected at least the {query_len} new tokens")
    if not reasons:
        reasons += length_reasons(seq_lens, k_cache.shape[2])
    if batch > MAX_BATCH:
        reasons.append(f"batch is {batch}, expected at most {MAX_BATCH}")
    if softcap < 0:
        reasons.append(f"softcap is {softcap}, expected 0 (none) or a positive bound")
    return reasons


def moved(q, k_cache, seq_lens, starts, window, sinks) -> int:
    length = seq_lens.long() if starts is None else seq_lens.long() - starts.long()
    if window:
        length = length.clamp(max=window + q.shape[1] - 1)
    row = 2 * k_cache.shape[1] * k_cache.shape[3] * k_cache.element_size()
    return int(length.clamp(max=k_cache.shape[2]).sum()) * row + 2 * nbytes(q) + nbytes(sinks)


def samples(device: torch.device, dtype: torch.dtype):
    def call(
        query_len,
        heads,
        kv_heads,
        head_dim,
        capacity,
        seq_lens,
        starts=None,
        window=0,
        softcap=0.0,
        sinks=False,
        programmatic_launch=False,
    ):
        batch = len(seq_lens)
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        shape = (batch, kv_heads, capacity, head_dim)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        unwritten = (slot_positions(lens, capacity) < 0)[:, None, :, None]
        caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
        caches = [cache.masked_fill(unwritten, float("nan")) for cache in caches]
        first = None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32)
        logits = torch.linspace(-2, 2, heads, device=device).to(dtype) if sinks else None
        return Sample(
            q, *caches, lens, first, head_dim**-0.5, window, softcap, logits, programmatic_launch=programmatic_launch
        )

    yield call(2, 4, 4, 64, 16, [2])
    yield call(7, 8, 2, 128, 300, [257])  # GQA 4, several splits
    yield call(20, 4, 4, 64, 90, [25, 90], sinks=True)
    yield call(33, 8, 1, 64, 200, [150], softcap=20.0)  # several tiles of rows
    yield call(17, 4, 2, 80, 70, [70, 33], starts=[5, 20])
    yield call(5, 2, 1, 256, 140, [133], window=50)
    yield call(3, 6, 2, 96, 24, [20, 7], window=8, starts=[1, 5], softcap=5.0, sinks=True)
    yield call(40, 2, 2, 40, 40, [40], programmatic_launch=True)  # a prompt


SPEC = register(
    OpSpec(
        name="append_attention",
        schema=(
            "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor? starts, float scale, int window=0, "
            "float softcap=0.0, Tensor? sinks=None, bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, matrix products of PyTorch's libraries compute it
    )
)
