"""Rotary embedding of new queries and keys, and append of the new keys and values to the KV cache."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .kv_cache import (
    cache_reasons,
    capacity_of,
    in_pages,
    is_quantized,
    position_bytes,
    positions,
    quantized,
    refuse_kv_table,
)
from .rms_norm import reference as rms_norm

#: for quantized caches, whose kernels hold a head of a token in local memory
MAX_QUANTIZED_HEAD_DIM = 512


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbors: bool) -> torch.Tensor:
    """Turn the first elements of every head, as many as there are angles: x [batch, query_len, heads, head_dim]."""
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if neighbors:
        crossed = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos[:, :, None] + crossed * sin[:, :, None]
    return torch.cat((rotated, rest), dim=-1)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    """Norm every head, or all heads at once if ``weight`` is as long: x [batch, query_len, heads, head_dim]."""
    return rms_norm(x.flatten(2).unflatten(-1, (-1, weight.numel())), weight, eps, None, weight_offset).reshape(x.shape)


def reference(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    kv_table: torch.Tensor | None = None,
    layer: int = 0,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    neighbors: bool = False,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    head_norm_eps: float = 0.0,
    head_norm_offset: float = 0.0,
    programmatic_launch: bool = False,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> torch.Tensor:
    """Split ``qkv + bias`` into q, k and v; norm and rotate q and k; write k and v at their positions; return q.

    Token i of row b has position ``p = seq_lens[b] - query_len + i`` and goes to slot ``p mod capacity``, so
    a cache of window + 16 slots is a ring. The first ``rotary_dim`` elements of a head turn in pairs: elements i and
    ``i + rotary_dim/2``, or 2i and 2i + 1.

    Args:
        qkv: [batch, query_len, (num_heads + 2*num_kv_heads)*head_dim], query_len 1 to capacity; with k and v the
            queries alone, [batch, query_len, num_heads, head_dim].
        bias: [(num_heads + 2*num_kv_heads)*head_dim] added first, or None.
        cos, sin: [batch or 1, query_len, rotary_dim], rotary_dim even and at most head_dim; None: no rotation.
        k_cache, v_cache: [batch, num_kv_heads, capacity, head_dim], contiguous, float32, float16 or bfloat16, or
            int8 or float8_e4m3fn with scales; written in place.
        seq_lens: int32 [batch], tokens that a row holds after this append.
        num_heads: number of query heads.
        kv_table: int64 [layers, 3]; row ``layer`` holds the addresses of K and V and the capacity, which then replace
            those of ``k_cache`` and ``v_cache`` (so a captured CUDA graph works for another cache as well). With scales
            the table is [layers, 5]: the addresses of ``k_scales`` and ``v_scales`` follow.
        layer: row of ``kv_table``.
        k_scales, v_scales: bfloat16 [batch, num_kv_heads, capacity], written in place with what ``kv_cache.quantized``
            computes from float32 keys and values; None for caches that are not quantized.
        block_table: as in ``decode_attention``; a page that this call writes belongs to one row alone. A ``kv_table``
            then has four columns: the addresses of K and V, the capacity, the address of the table.
        neighbors: elements 2i and 2i + 1 turn together; ``cos`` and ``sin`` stay those of each element.
        q_norm_weight, k_norm_weight: of RMS norms over queries and over keys in front of the rotation: both [head_dim]
            for norms of each head, or [num_heads*head_dim] and [num_kv_heads*head_dim] for norms of all heads at once;
            or None for no norm.
        head_norm_eps: added to the mean of squares.
        head_norm_offset: the factors are this + weight; see ``rms_norm``.
        programmatic_launch: see ``gemv``; lengths and tables may be read early as well.
        k, v: keys and values, [batch, query_len, num_kv_heads, head_dim] each, if ``qkv`` does not hold them. All three
            may be views: heads of a projection that also holds gates, for example.

    Returns:
        [batch, query_len, num_heads, head_dim] rotated queries in qkv's dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``apply_rotary_pos_emb``, and with ``neighbors``
    that of ``models/cohere/modeling_cohere.py@5.17``; arXiv:2104.09864. Norms of heads: ``Qwen3Attention`` and
    ``Olmo2Attention``.
    """
    refuse_kv_table(kv_table)
    batch, query_len = qkv.shape[:2]
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    heads = [num_heads, num_kv_heads, num_kv_heads]
    if k is None or v is None:
        q, k, v = qkv.reshape(batch, query_len, -1, head_dim).split(heads, dim=2)
    else:
        q = qkv
    if bias is not None:
        q, k, v = (each + of_it for each, of_it in zip((q, k, v), bias.view(-1, head_dim).split(heads)))
    if q_norm_weight is not None and k_norm_weight is not None:
        q = head_norm(q, q_norm_weight, head_norm_eps, head_norm_offset)
        k = head_norm(k, k_norm_weight, head_norm_eps, head_norm_offset)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin, neighbors), rotate(k, cos, sin, neighbors)
    slots = positions(seq_lens, query_len) % capacity_of(k_cache, block_table)
    rows = torch.arange(batch, device=qkv.device)[:, None]
    if block_table is not None:
        rows, slots = block_table.long()[rows, slots // page_size], slots % page_size
    for states, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is None:
            cache[rows, :, slots] = states.to(cache.dtype)
            continue
        quants, steps = quantized(states, cache.dtype)
        cache.view(torch.int8)[rows, :, slots] = quants.view(torch.int8)  # PyTorch cannot copy float8 this way
        scales[rows, :, slots] = steps.to(scales.dtype)
    return q.clone(memory_format=torch.contiguous_format)


def fake(qkv, k_cache, num_heads):
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], num_heads, k_cache.shape[-1])


def why_not(
    qkv,
    bias,
    cos,
    sin,
    k_cache,
    v_cache,
    seq_lens,
    num_heads,
    kv_table=None,
    layer=0,
    k_scales=None,
    v_scales=None,
    block_table=None,
    q_norm_weight=None,
    k_norm_weight=None,
    k=None,
    v=None,
) -> list[str]:
    if (k is None) != (v is None):
        return ["k and v go together: pass both or neither"]
    if qkv.dim() != (3 if k is None else 4) or qkv.shape[1] < 1:
        want = "[batch, 1 or more, features]" if k is None else "[batch, 1 or more, heads, head_dim] with k and v"
        return [f"qkv has shape {tuple(qkv.shape)}, expected {want}"]
    batch, query_len = qkv.shape[:2]
    reasons = tensor_reasons(qkv, bias=bias, cos=cos, sin=sin, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    reasons += [] if k is None else tensor_reasons(qkv, k=k, v=v)
    of_cache = k_scales, v_scales, block_table
    reasons += cache_reasons(k_cache, v_cache, seq_lens, batch, qkv.device, kv_table, layer, *of_cache)
    if k_cache.dim() == 4:
        num_kv_heads, head_dim, capacity = k_cache.shape[1], k_cache.shape[3], capacity_of(k_cache, None)
        if block_table is not None and block_table.dim() == 2:
            capacity = capacity_of(k_cache, block_table)
        want = (num_heads + 2 * num_kv_heads) * head_dim
        if k is not None:
            reasons += shape_reason("qkv", qkv, (batch, query_len, num_heads, head_dim))
            for name, states in (("k", k), ("v", v)):
                reasons += shape_reason(name, states, (batch, query_len, num_kv_heads, head_dim))
        elif qkv.shape[2] != want:
            reasons.append(f"qkv has {qkv.shape[2]} features, expected (heads + 2*kv_heads)*head_dim = {want}")
        reasons += shape_reason("bias", bias, (want,))
        reasons += _head_norm_reasons(q_norm_weight, k_norm_weight, num_heads, num_kv_heads, head_dim)
        if is_quantized(k_cache.dtype) and head_dim > MAX_QUANTIZED_HEAD_DIM:
            reasons.append(f"head_dim is {head_dim}, expected at most {MAX_QUANTIZED_HEAD_DIM} in a quantized cache")
        if query_len > capacity:
            reasons.append(f"query_len {query_len} exceeds the cache's capacity {capacity}: grow the cache first")
        if (cos is None) != (sin is None):
            reasons.append("cos and sin go together: pass both or neither")
        elif cos is not None and (cos.shape != sin.shape or not _fits(cos, batch, query_len, head_dim)):
            reasons.append(
                f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: expected [{batch} or 1, {query_len}, even]"
            )
    return reasons


def _head_norm_reasons(q_norm_weight, k_norm_weight, num_heads, num_kv_heads, head_dim) -> list[str]:
    if q_norm_weight is None and k_norm_weight is None:
        return []
    if q_norm_weight is None or k_norm_weight is None:
        return ["q_norm_weight and k_norm_weight go together: pass both or neither"]
    found = tuple(q_norm_weight.shape), tuple(k_norm_weight.shape)
    of_all = (num_heads * head_dim,), (num_kv_heads * head_dim,)
    if found in (((head_dim,), (head_dim,)), of_all):
        return []
    return [f"q_norm_weight and k_norm_weight have shapes {found}, expected ({head_dim},) both, or {of_all}"]


def _fits(cos: torch.Tensor, batch: int, query_len: int, head_dim: int) -> bool:
    return (
        cos.dim() == 3
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == query_len
        and cos.shape[2] % 2 == 0
        and cos.shape[2] <= head_dim
    )


def moved(qkv, bias, cos, sin, k_cache, seq_lens, num_heads, q_norm_weight, k_norm_weight, k, v) -> int:
    read = nbytes(qkv, k, v, bias, cos, sin, seq_lens, q_norm_weight, k_norm_weight)
    return read + written_bytes(qkv, k_cache, num_heads)


def written_bytes(x: torch.Tensor, k_cache: torch.Tensor, num_heads: int) -> int:
    """Return the bytes that an op writes if it appends the tokens of ``x``, [batch, query_len, any], and returns q."""
    appended = 2 * k_cache.shape[1] * position_bytes(k_cache)
    return x.shape[0] * x.shape[1] * (appended + num_heads * k_cache.shape[3] * x.element_size())


def random_angles(
    batch: int,
    query_len: int,
    rotary_dim: int | None,
    device: torch.device,
    dtype: torch.dtype,
    neighbors: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return cos and sin for samples, [batch, query_len, rotary_dim]; None for no rotation."""
    if rotary_dim is None:
        return None, None
    angle = torch.rand(batch, query_len, rotary_dim // 2, device=device) * 6.28
    angle = angle.repeat_interleave(2, dim=-1) if neighbors else angle.repeat(1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def random_head_norms(
    of: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    offset: float = 0.0,
) -> dict[str, Any]:
    """Return arguments of a sample: weights of norms of each head (``of="each"``) or of all at once (``"all"``)."""
    sizes = (head_dim, head_dim) if of == "each" else (num_heads * head_dim, num_kv_heads * head_dim)
    q, k = ((torch.rand(size, device=device) + 0.5 - offset).to(dtype) for size in sizes)
    return dict(q_norm_weight=q, k_norm_weight=k, head_norm_eps=1e-5, head_norm_offset=offset)


def random_caches(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return K and V for samples, [batch, num_kv_heads, capacity, head_dim] in ``dtype``, and scales or None."""
    caches = [torch.randn(shape, device=device) for _ in range(2)]
    if not is_quantized(dtype):
        return [cache.to(dtype) for cache in caches], [None, None]
    pairs = [quantized(cache, dtype) for cache in caches]
    return [quants for quants, _ in pairs], [scales for _, scales in pairs]


def samples(device: torch.device, dtype: torch.dtype):
    def call(
        batch,
        query_len,
        heads,
        kv_heads,
        head_dim,
        capacity,
        seq_lens,
        rotary_dim=None,
        bias=False,
        kv=None,
        page_size=None,
        neighbors=False,
        norms=None,
        norm_offset=0.0,
        programmatic_launch=False,
        apart=False,
    ):
        features = (heads + 2 * kv_heads) * head_dim
        options: dict[str, Any] = {}
        if norms is not None:  # first: the kernel in front of a programmatic launch must not have made them
            options |= random_head_norms(norms, heads, kv_heads, head_dim, device, dtype, norm_offset)
        if apart:  # queries and gates by head, then keys, then values
            features += heads * head_dim
        qkv = torch.randn(batch, query_len, features, device=device, dtype=dtype)
        if apart:
            q, k, v = qkv.split([2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
            qkv = q.unflatten(-1, (heads, -1))[..., :head_dim]
            options |= dict(k=k.unflatten(-1, (kv_heads, -1)), v=v.unflatten(-1, (kv_heads, -1)))
        cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype, neighbors)
        caches, scales = random_caches((batch, kv_heads, capacity, head_dim), device, kv or dtype)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        row = torch.randn((heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype) if bias else None
        table = None
        if page_size is not None:
            table, *caches = in_pages(caches, page_size)
        options |= dict(k_scales=scales[0], v_scales=scales[1], block_table=table, neighbors=neighbors)
        options["programmatic_launch"] = programmatic_launch
        return Sample(qkv, row, cos, sin, *caches, lens, heads, **options)

    yield call(1, 1, 4, 2, 32, 9, [5], rotary_dim=32)
    yield call(1, 1, 12, 12, 64, 33, [33], bias=True)  # GPT-2: no rotation, fused bias
    yield call(2, 3, 8, 2, 40, 20, [3, 17], rotary_dim=40, bias=True)
    yield call(2, 16, 4, 1, 128, 24, [30, 100], rotary_dim=64)  # wraps; half of the head rotated
    yield call(2, 19, 4, 1, 64, 24, [19, 23], rotary_dim=64)
    yield call(3, 1, 2, 1, 256, 8, [8, 9, 1], rotary_dim=256)
    yield call(1, 2, 4, 4, 80, 7, [7], rotary_dim=32, kv=torch.float16)
    yield call(1, 1, 4, 4, 64, 7, [7], rotary_dim=64, kv=torch.bfloat16)
    yield call(2, 3, 4, 2, 64, 9, [5, 20], rotary_dim=64, bias=True, kv=torch.int8)
    yield call(2, 2, 3, 1, 40, 9, [2, 8], rotary_dim=24, kv=torch.float8_e4m3fn)
    yield call(2, 5, 4, 2, 64, 48, [50, 17], rotary_dim=64, bias=True, page_size=16)  # one wraps, one crosses a page
    yield call(1, 1, 4, 1, 40, 64, [33], rotary_dim=40, kv=torch.float16, page_size=32)
    yield call(2, 3, 4, 2, 64, 9, [3, 17], rotary_dim=32, bias=True, neighbors=True)
    yield call(1, 2, 3, 1, 40, 9, [7], rotary_dim=20, kv=torch.float16, neighbors=True)
    yield call(2, 2, 3, 1, 40, 9, [2, 8], rotary_dim=24, kv=torch.int8, neighbors=True)
    yield call(2, 5, 4, 2, 64, 48, [50, 17], rotary_dim=64, page_size=16, neighbors=True)
    yield call(1, 1, 4, 2, 128, 9, [5], rotary_dim=128, norms="each", programmatic_launch=True)
    yield call(2, 3, 6, 2, 40, 9, [3, 17], rotary_dim=24, bias=True, norms="each", norm_offset=1.0)
    yield call(2, 2, 4, 2, 64, 9, [3, 17], rotary_dim=64, norms="all")
    yield call(1, 2, 5, 1, 36, 9, [7], norms="all", kv=torch.float16, norm_offset=1.0)
    yield call(1, 1, 32, 8, 128, 9, [5], rotary_dim=128, bias=True, norms="all", programmatic_launch=True)
    yield call(1, 1, 80, 1, 72, 9, [5], rotary_dim=24, kv=torch.bfloat16, norms="all", neighbors=True)
    yield call(2, 2, 4, 2, 64, 9, [5, 20], rotary_dim=32, bias=True, kv=torch.int8, norms="each")
    yield call(2, 2, 3, 1, 40, 9, [2, 8], rotary_dim=24, kv=torch.float8_e4m3fn, norms="all", neighbors=True)
    yield call(2, 5, 4, 2, 64, 48, [50, 17], rotary_dim=64, norms="each", page_size=16)
    apart = dict(apart=True)
    qwen = dict(rotary_dim=64, norms="each", norm_offset=1.0, programmatic_launch=True)
    yield call(1, 1, 16, 4, 256, 9, [5], **qwen, **apart)
    yield call(3, 1, 4, 2, 64, 9, [3, 17, 5], rotary_dim=64, **apart)
    yield call(2, 3, 3, 1, 40, 9, [3, 17], rotary_dim=24, bias=True, norms="all", **apart)
    yield call(2, 2, 4, 2, 36, 9, [3, 17], rotary_dim=36, norms="each", kv=torch.float16, neighbors=True, **apart)
    yield call(2, 2, 4, 2, 64, 9, [5, 20], rotary_dim=32, kv=torch.int8, norms="all", **apart)
    yield call(2, 5, 4, 2, 64, 48, [50, 17], bias=True, page_size=16, **apart)


SPEC = register(
    OpSpec(
        name="rope_append",
        schema=(
            "(Tensor qkv, Tensor? bias, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
            "Tensor seq_lens, int num_heads, Tensor? kv_table=None, int layer=0, Tensor(c!)? k_scales=None, "
            "Tensor(d!)? v_scales=None, Tensor? block_table=None, bool neighbors=False, Tensor? q_norm_weight=None, "
            "Tensor? k_norm_weight=None, float head_norm_eps=0.0, float head_norm_offset=0.0, "
            "bool programmatic_launch=False, Tensor? k=None, Tensor? v=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
