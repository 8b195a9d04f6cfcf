"""Causal attention of one to sixteen new tokens over the KV cache, split over positions and merged in one kernel."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .kv_cache import (
    cache_reasons,
    capacity_of,
    dequantized,
    gathered,
    in_pages,
    is_quantized,
    length_reasons,
    position_bytes,
    positions,
    quantized,
    refuse_kv_table,
    slot_positions,
)
from .queries import other_reasons, query_reasons, score_reasons

MAX_QUERY_LEN = 16


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    window: int = 0,
    kv_table: torch.Tensor | None = None,
    layer: int = 0,
    workspace: torch.Tensor | None = None,
    programmatic_launch: bool = False,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    other_lse: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``softmax(scale * q @ K.T) @ V`` over the visible positions of each row.

    Token i of row b has position ``p = seq_lens[b] - query_len + i`` and sees the positions ``j`` with
    ``max(starts[b], p - window + 1) <= j <= p`` (no lower bound from the window if it is 0). Position j lies in
    slot ``j mod capacity``. A token that sees no position gives zeros. Slots that are not visible are never used,
    whatever they hold.

    Args:
        q: [batch, query_len, num_heads, head_dim], query_len 1 to 16, head_dim even and at most 512.
        k_cache, v_cache: [batch, num_kv_heads, capacity, head_dim], contiguous; float32, float16 or bfloat16, also if
            q has another dtype, or int8 or float8_e4m3fn with scales. num_kv_heads divides num_heads.
        seq_lens: int32 [batch], tokens that a row holds, the new ones included; at most capacity, or any number if
            window + query_len - 1 <= capacity.
        starts: int32 [batch], first visible position (left padding), or None for 0.
        scale: factor on the scores.
        window: positions that a token sees, itself included; 0 for all.
        kv_table, layer: as in ``rope_append``.
        workspace: uint8 [workspace_bytes(...)] on q's device, zeroed once by the caller; the CUDA kernel keeps its
            partial results and counters there and leaves the counters zero. With None, the call allocates one. Two
            calls that may run at the same time need two workspaces. The CPU ignores it.
        programmatic_launch: CUDA may read lengths, table and all but the newest query_len positions of the cache while
            the kernel in front on this stream still runs. It is allowed only if that kernel writes none of them. The
            result does not depend on it.
        sinks: [num_heads] in q's dtype, or None: one more score for each head, which takes part in the softmax and
            adds nothing to the output.
        k_scales, v_scales: bfloat16 [batch, num_kv_heads, capacity], the factors of a quantized cache's quants; None
            for other caches.
        block_table: int32 [batch, pages a sequence], contiguous, or None. With a table the caches are pages,
            [pages, num_kv_heads, page_size, head_dim] of float32, float16 or bfloat16, and page_size is a power of two
            from 16 on. Slot s of row b lies in page ``block_table[b, s // page_size]`` at ``s mod page_size``; the
            capacity is page_size times the table's columns. An entry whose slots no token sees may name any page. Rows
            may share pages that no call writes.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        slopes: float32 [num_heads], added to a score times ``j - p`` (ALiBi); or None. They do not go with sinks.
        biases: float32 [num_heads, distances], of which ``biases[:, min(p - j, distances - 1)]`` is added to a score
            (T5's relative positions); [batch, num_heads, distances] if rows have biases of their own; or None. They go
            with a query_len of 1, and not with slopes or sinks.
        other: [batch, query_len, num_heads*head_dim] in q's dtype, attention of the same queries over other keys, with
            which these keys then share one softmax; or None.
        other_lse: float32 [batch, query_len, num_heads], the log of the sum of exp(score) over the other keys, minus
            infinity for none; goes with ``other``.
        lse: float32 [batch, query_len, num_heads], contiguous, which gets the log of the sum of exp(score) over all
            keys of the output, sinks among them; or None.

    Returns:
        [batch, query_len, num_heads*head_dim] in q's dtype; softmax and accumulators are float32.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit; on the CPU also if lengths or pages do not fit. On CUDA,
            where nobody waits for their values, such lengths and pages give meaningless results.

    Source: transformers ``integrations/sdpa_attention.py@5.17``, with sinks ``eager_attention_forward`` of
    ``models/gpt_oss/modeling_gpt_oss.py@5.23``, with a cap that of ``models/gemma2/modeling_gemma2.py@5.17``; ALiBi,
    arXiv:2108.12409; biases, arXiv:1910.10683, section 2.1; flash decoding (split KV) and its log of sums,
    arXiv:2205.14135.
    """
    refuse_kv_table(kv_table)
    batch, query_len, num_heads, head_dim = q.shape
    k_cache, v_cache = gathered(k_cache, block_table), gathered(v_cache, block_table)
    visible = visible_slots(seq_lens, starts, query_len, k_cache.shape[2], window)
    used = visible.any(1)[:, None, :, None]
    if k_scales is not None and v_scales is not None:
        k_cache, v_cache = dequantized(k_cache, k_scales, q.dtype), dequantized(v_cache, v_scales, q.dtype)
    k, v = (torch.where(used, cache, 0).to(q.dtype) for cache in (k_cache, v_cache))
    of_scores = slopes, sinks, biases, other, lse
    if softcap or any(each is not None for each in of_scores):
        apart = slot_positions(seq_lens, k.shape[2])[:, None] - positions(seq_lens, query_len)[:, :, None]
        changes = sinks, softcap, slopes, biases
        out, own_lse = _eager(q.transpose(1, 2), k, v, visible[:, None], scale, *changes, apart[:, None])
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=k.shape[1] != num_heads
        )
    sees_any = visible.any(2)[:, None, :, None]
    out = torch.where(sees_any, out, 0).transpose(1, 2).reshape(batch, query_len, num_heads * head_dim)
    if other is None and lse is None:
        return out
    own_lse = torch.where(sees_any, own_lse, -torch.inf)[..., 0].transpose(1, 2)  # [batch, query_len, num_heads]
    if other is not None and other_lse is not None:
        out, own_lse = _joined(out, own_lse, other, other_lse.to(own_lse.dtype))
    if lse is not None:
        lse.copy_(own_lse)
    return out


def _joined(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over two sets of keys, and its lse, of the attention over each."""
    both = torch.logaddexp(lse, other_lse)
    shares = [torch.where(both > -torch.inf, (each - both).exp(), 0)[..., None] for each in (lse, other_lse)]
    heads = (each.unflatten(-1, (lse.shape[-1], -1)) for each in (out, other))
    return sum(share * each for share, each in zip(shares, heads)).flatten(2).to(out.dtype), both


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
    slopes: torch.Tensor | None,
    biases: torch.Tensor | None,
    apart: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [batch, num_heads, query_len, head_dim], and its lse [batch, num_heads, query_len, 1].

    ``apart``: positions of keys minus those of queries.
    """
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores + (slopes.to(q.dtype)[:, None, None] * apart).to(q.dtype)
    if biases is not None:
        behind = (-apart[:, 0]).clamp(0, biases.shape[-1] - 1)  # [batch, query_len, capacity]
        of_rows = biases.to(q.dtype).expand(len(q), -1, -1)
        places = behind[:, None].expand(-1, q.shape[1], -1, -1).flatten(2)
        scores = scores + of_rows.gather(2, places).view(scores.shape)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
    scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    lse = scores.logsumexp(-1, keepdim=True)
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.softmax(-1)[..., :-1] @ v, lse


def visible_slots(
    seq_lens: torch.Tensor, starts: torch.Tensor | None, query_len: int, capacity: int, window: int
) -> torch.Tensor:
    """Return bool [batch, query_len, capacity], the slots of the cache that each token sees."""
    held = slot_positions(seq_lens, capacity)[:, None]  # [batch, 1, capacity]
    query = positions(seq_lens, query_len)[:, :, None]  # [batch, query_len, 1]
    visible = (held >= 0) & (held <= query)
    if window:
        visible &= held > query - window
    if starts is not None:
        visible &= held >= starts.long()[:, None, None]
    return visible


def fake(q):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def workspace_bytes(batch: int, query_len: int, num_heads: int, head_dim: int) -> int:
    """Return the bytes of ``workspace`` that calls of at most this shape need.

    Each query of each head has MAX_SPLITS partial outputs of head_dim float32 with their maximum and sum, and one
    32-bit counter.
    """
    return batch * query_len * num_heads * (MAX_SPLITS * (head_dim + 2) + 1) * 4


#: number of blocks at most over which the CUDA kernel spreads the cache of one KV head
MAX_SPLITS = 64


def why_not(
    q,
    k_cache,
    v_cache,
    seq_lens,
    starts,
    window,
    kv_table=None,
    layer=0,
    workspace=None,
    sinks=None,
    k_scales=None,
    v_scales=None,
    block_table=None,
    softcap=0.0,
    slopes=None,
    biases=None,
    other=None,
    other_lse=None,
    lse=None,
) -> list[str]:
    if q.dim() != 4 or not 1 <= q.shape[1] <= MAX_QUERY_LEN:
        return [f"q has shape {tuple(q.shape)}, expected [batch, 1 to {MAX_QUERY_LEN}, heads, head_dim]"]
    batch, query_len, num_heads, head_dim = q.shape
    reasons = tensor_reasons(q, sinks=sinks) + shape_reason("sinks", sinks, (num_heads,))
    reasons += score_reasons(q, sinks, softcap, slopes, biases) + other_reasons(q, other, other_lse, lse)
    of_cache = k_scales, v_scales, block_table
    reasons += cache_reasons(k_cache, v_cache, seq_lens, batch, q.device, kv_table, layer, *of_cache)
    reasons += query_reasons(q, k_cache, starts, window)
    if not reasons and kv_table is None:
        capacity = capacity_of(k_cache, block_table)
        if not 0 < window <= capacity - query_len + 1:  # a ring takes any length
            reasons += length_reasons(seq_lens, capacity)
    if workspace is not None and workspace.device != q.device:
        reasons.append(f"workspace is on {workspace.device}, expected {q.device}: move it")
    if workspace is not None and workspace.nbytes < workspace_bytes(batch, query_len, num_heads, head_dim):
        reasons.append(f"workspace has {workspace.nbytes} bytes: allocate workspace_bytes(...), zeroed")
    return reasons


def moved(
    q,
    k_cache,
    seq_lens,
    starts,
    window,
    sinks=None,
    block_table=None,
    slopes=None,
    biases=None,
    other=None,
    other_lse=None,
    lse=None,
) -> int:
    length = seq_lens.long() if starts is None else seq_lens.long() - starts.long()
    if window:
        length = length.clamp(max=window + q.shape[1] - 1)
    row = 2 * k_cache.shape[1] * position_bytes(k_cache)
    read = int(length.clamp(max=capacity_of(k_cache, block_table)).sum()) * row
    return read + 2 * nbytes(q) + nbytes(sinks, slopes, biases, other, other_lse, lse)


def samples(device: torch.device, dtype: torch.dtype):
    def call(
        batch,
        query_len,
        heads,
        kv_heads,
        head_dim,
        capacity,
        seq_lens,
        starts=None,
        window=0,
        kv=None,
        sinks=False,
        programmatic_launch=False,
        page_size=None,
        softcap=0.0,
        slopes=False,
        distances=None,
        of_rows=False,
        others=None,
        lse=False,
    ):
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        shape = (batch, kv_heads, capacity, head_dim)
        caches = [torch.randn(shape, device=device) for _ in range(2)]
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        held = slot_positions(lens, capacity)
        for cache in caches:  # slots that were never written must not matter
            cache[(held < 0)[:, None, :, None].expand(shape)] = float("nan")
        scales = (None, None)
        if is_quantized(kv or dtype):
            caches, scales = zip(*(quantized(cache, kv) for cache in caches))
        caches = [cache.to(kv or dtype) for cache in caches]
        first = None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32)
        logits = torch.linspace(-2, 2, heads, device=device).to(dtype) if sinks else None
        table = None
        if page_size is not None:
            table, *caches = in_pages(caches, page_size)
        options = dict(
            programmatic_launch=programmatic_launch,
            sinks=logits,
            k_scales=scales[0],
            v_scales=scales[1],
            block_table=table,
            softcap=softcap,
            slopes=2.0 ** -torch.arange(1, 1 + heads, device=device, dtype=torch.float32) if slopes else None,
            biases=None if distances is None else torch.randn(*[batch] * of_rows, heads, distances, device=device),
        )
        rows = batch, query_len, heads
        if others is not None:  # how much more the other keys weigh, as a logarithm
            options["other"] = torch.randn(*rows[:2], heads * head_dim, device=device, dtype=dtype)
            options["other_lse"] = torch.tensor(seq_lens, device=device).log()[:, None, None] + others
            options["other_lse"] = options["other_lse"] + torch.randn(rows, device=device)
        if lse:
            options["lse"] = torch.full(rows, float("nan"), device=device)
        return Sample(q, *caches, lens, first, head_dim**-0.5, window, **options)

    yield call(1, 1, 4, 4, 32, 16, [1])
    yield call(1, 1, 32, 8, 128, 300, [257])  # GQA 4
    yield call(1, 1, 32, 8, 128, 300, [257], sinks=True, programmatic_launch=True)
    yield call(2, 3, 4, 2, 64, 90, [5, 90], sinks=True, programmatic_launch=True)
    yield call(1, 1, 8, 1, 64, 1100, [1030], sinks=True)  # MQA, several splits
    yield call(2, 1, 12, 12, 64, 70, [70, 33], starts=[5, 0])
    yield call(3, 4, 8, 2, 80, 50, [44, 50, 4], starts=[0, 40, 0])
    yield call(1, 16, 4, 2, 256, 40, [40])
    yield call(2, 1, 4, 2, 96, 24, [100, 7], window=8)  # ring
    yield call(1, 7, 6, 2, 40, 24, [61], window=17)
    yield call(2, 1, 4, 2, 64, 600, [555, 20], starts=[540, 3], window=128)
    yield call(1, 1, 4, 1, 128, 40, [40], kv=torch.float16)
    yield call(1, 2, 4, 1, 64, 40, [39], kv=torch.bfloat16)
    yield call(1, 1, 8, 2, 64, 300, [257], kv=torch.int8)
    yield call(2, 3, 4, 2, 80, 90, [5, 90], starts=[2, 0], kv=torch.float8_e4m3fn, sinks=True)
    yield call(2, 1, 4, 2, 40, 24, [100, 7], window=8, kv=torch.int8)
    yield call(2, 1, 8, 2, 128, 320, [257, 31], page_size=16, sinks=True, programmatic_launch=True)
    yield call(2, 3, 4, 2, 64, 128, [300, 7], starts=[0, 2], window=70, page_size=32)  # ring
    yield call(1, 1, 4, 1, 80, 64, [40], kv=torch.float16, page_size=64)
    yield call(1, 1, 8, 4, 256, 300, [257], softcap=2.0, programmatic_launch=True)
    yield call(2, 3, 4, 2, 64, 90, [5, 90], starts=[0, 40], softcap=5.0, sinks=True)
    yield call(1, 1, 8, 1, 64, 1100, [1030], slopes=True)
    yield call(2, 4, 6, 2, 40, 24, [100, 7], window=8, softcap=3.0, slopes=True)
    yield call(2, 16, 4, 2, 96, 320, [300, 20], slopes=True)
    yield call(1, 1, 3, 3, 300, 70, [65], softcap=1.5, slopes=True)
    yield call(2, 1, 4, 2, 128, 320, [257, 31], softcap=4.0, slopes=True, page_size=16)
    yield call(1, 2, 8, 2, 64, 300, [257], softcap=2.0, slopes=True, kv=torch.int8)
    yield call(1, 1, 8, 8, 64, 300, [257], distances=113, programmatic_launch=True)
    yield call(2, 1, 4, 2, 40, 90, [5, 90], starts=[0, 40], distances=7)
    yield call(2, 1, 4, 2, 64, 320, [300, 7], softcap=3.0, distances=400, page_size=32)
    yield call(1, 1, 3, 3, 300, 70, [65], distances=1)
    yield call(1, 1, 8, 2, 128, 1100, [1030], distances=128, kv=torch.int8)
    yield call(3, 1, 12, 4, 64, 300, [257, 3, 90], distances=129, of_rows=True, others=0.0)
    yield call(2, 1, 3, 3, 300, 70, [65, 9], distances=7, of_rows=True)
    yield call(1, 1, 8, 2, 64, 300, [257], others=0.0, lse=True, programmatic_launch=True)
    yield call(2, 3, 4, 2, 80, 90, [5, 90], starts=[0, 90], others=1.0, lse=True)  # tokens that see nothing here
    yield call(1, 1, 8, 1, 128, 1100, [1030], lse=True, softcap=3.0)  # several splits
    yield call(2, 1, 8, 4, 256, 2100, [2050, 70], others=-1.0, sinks=True, lse=True)
    yield call(1, 1, 3, 3, 300, 70, [65], others=0.5, lse=True, sinks=True)
    yield call(2, 1, 4, 2, 64, 320, [300, 7], window=70, others=0.0, page_size=32)
    yield call(1, 2, 8, 2, 64, 300, [257], others=0.0, lse=True, kv=torch.int8)


SPEC = register(
    OpSpec(
        name="decode_attention",
        schema=(
            "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor? starts, float scale, int window=0, "
            "Tensor? kv_table=None, int layer=0, Tensor(a!)? workspace=None, bool programmatic_launch=False, "
            "Tensor? sinks=None, Tensor? k_scales=None, Tensor? v_scales=None, Tensor? block_table=None, "
            "float softcap=0.0, Tensor? slopes=None, Tensor? biases=None, Tensor? other=None, Tensor? other_lse=None, "
            "Tensor(b!)? lse=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
