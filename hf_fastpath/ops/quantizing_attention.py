"""``decode_attention`` over a quantized KV cache whose newest keys and values it quantizes and appends itself."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason
from .decode_attention import moved as attention_bytes
from .decode_attention import reference as attention
from .decode_attention import why_not as attention_reasons
from .kv_cache import LARGEST_QUANT, is_quantized, positions, quantized, refuse_kv_table, slot_positions


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    window: int = 0,
    kv_table: torch.Tensor | None = None,
    layer: int = 0,
    workspace: torch.Tensor | None = None,
    programmatic_launch: bool = False,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    other_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Append ``k`` and ``v`` to the cache, quantized as ``kv_cache.quantized`` does; compute ``decode_attention``.

    A product in which several blocks compute the parts of a head cannot quantize that head. With this op it appends to
    a float32 cache of query_len slots, and needs no quantizing kernel behind it.

    Args:
        q: as in ``decode_attention``.
        k, v: float32 [batch, num_kv_heads, query_len, head_dim], keys and values of the new tokens after rotation.
        k_cache, v_cache, k_scales, v_scales: int8 or float8_e4m3fn and bfloat16, as in ``decode_attention``, but the
            newest query_len positions are written, not read. Positions before ``starts`` stay as they are.
        seq_lens, starts, scale, window, kv_table, layer, workspace, programmatic_launch, sinks, softcap, slopes,
            biases, other, other_lse: as in ``decode_attention``.

    Returns:
        [batch, query_len, num_heads*head_dim] in q's dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: that of ``rope_append`` and ``decode_attention``.
    """
    refuse_kv_table(kv_table)
    new = positions(seq_lens, q.shape[1])  # [batch, query_len]
    slots = torch.remainder(new, k_cache.shape[2])
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    kept = torch.zeros_like(new, dtype=torch.bool) if starts is None else new < starts.long()[:, None]
    for states, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        quants, of_heads = quantized(states.transpose(1, 2), cache.dtype)
        stored = cache.view(torch.int8)  # every PyTorch can index this dtype
        stored[rows, :, slots] = torch.where(kept[:, :, None, None], stored[rows, :, slots], quants.view(torch.int8))
        scales[rows, :, slots] = torch.where(kept[:, :, None], scales[rows, :, slots], of_heads.to(scales.dtype))
    place = None, 0, workspace, programmatic_launch, sinks
    changes = softcap, slopes, biases, other, other_lse
    return attention(q, k_cache, v_cache, seq_lens, starts, scale, window, *place, k_scales, v_scales, None, *changes)


def fake(q):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def why_not(
    q,
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    seq_lens,
    starts,
    window,
    kv_table,
    layer,
    workspace,
    sinks,
    softcap,
    slopes,
    biases,
    other,
    other_lse,
) -> list[str]:
    cache = k_cache, v_cache, seq_lens, starts, window, kv_table, layer, workspace, sinks
    reasons = attention_reasons(q, *cache, k_scales, v_scales, None, softcap, slopes, biases, other, other_lse)
    if not is_quantized(k_cache.dtype):
        reasons.append(f"k_cache has dtype {k_cache.dtype}, expected {' or '.join(map(str, LARGEST_QUANT))}")
    if reasons:
        return reasons
    for name, states in (("k", k), ("v", v)):
        reasons += shape_reason(name, states, (q.shape[0], k_cache.shape[1], q.shape[1], q.shape[3]))
        if states.dtype != torch.float32 or states.device != q.device:
            reasons.append(f"{name} is {states.dtype} on {states.device}, expected torch.float32 on {q.device}")
    if k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16:
        reasons.append("k_cache and v_cache have to start at a multiple of 16 bytes: allocate them by themselves")
    return reasons


def moved(q, k, v, k_cache, seq_lens, starts, window, sinks, slopes, biases, other, other_lse) -> int:
    of_rows = sinks, None, slopes, biases, other, other_lse
    return attention_bytes(q, k_cache, seq_lens, starts, window, *of_rows) + nbytes(k, v)


def samples(device: torch.device, dtype: torch.dtype):
    def call(
        batch, query_len, heads, kv_heads, head_dim, capacity, seq_lens, starts=None, window=0, kv=torch.int8, **given
    ):
        shape = (batch, kv_heads, capacity, head_dim)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        stored = [quantized(torch.randn(shape, device=device), kv) for _ in range(2)]
        for _, scales in stored:  # slots that were never written, or are yet to be, must not matter
            scales[(slot_positions(lens - query_len, capacity) < 0)[:, None].expand(shape[:3])] = float("nan")
        (k_cache, k_scales), (v_cache, v_scales) = stored
        new = [torch.randn(batch, kv_heads, query_len, head_dim, device=device) for _ in range(2)]
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        first = None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32)
        to = k_cache, v_cache, k_scales, v_scales, lens, first
        return Sample(q, *new, *to, head_dim**-0.5, window, **given)

    fp8 = torch.float8_e4m3fn
    yield call(1, 1, 4, 4, 32, 16, [1])
    yield call(1, 1, 8, 2, 128, 300, [257], programmatic_launch=True)
    yield call(1, 1, 8, 1, 64, 1100, [1030], kv=fp8)
    yield call(2, 3, 4, 2, 80, 90, [5, 90], starts=[2, 0], kv=fp8, programmatic_launch=True)
    yield call(1, 16, 4, 2, 256, 40, [40])
    yield call(2, 1, 4, 2, 40, 24, [100, 7], window=8)
    yield call(2, 5, 6, 2, 96, 24, [100, 27], window=17, kv=fp8)
    yield call(1, 1, 8, 4, 256, 300, [257], softcap=2.0, programmatic_launch=True)
    slopes = 2.0 ** -torch.arange(1, 5, device=device, dtype=torch.float32)
    yield call(2, 3, 4, 2, 64, 90, [5, 90], starts=[2, 0], slopes=slopes, softcap=3.0)
    biases = torch.randn(4, 50, device=device)
    yield call(2, 1, 4, 2, 64, 90, [5, 90], starts=[2, 0], biases=biases)
    rows = dict(other=torch.randn(2, 1, 256, device=device, dtype=dtype), other_lse=torch.randn(2, 1, 4, device=device))
    yield call(2, 1, 4, 2, 64, 90, [5, 90], starts=[2, 0], **rows)
    yield call(1, 2, 4, 1, 16 * 3, 70, [65], sinks=torch.linspace(-2, 2, 4, device=device).to(dtype))


SPEC = register(
    OpSpec(
        name="quantizing_attention",
        schema=(
            "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scales, "
            "Tensor(d!) v_scales, Tensor seq_lens, Tensor? starts, float scale, int window=0, Tensor? kv_table=None, "
            "int layer=0, Tensor(e!)? workspace=None, bool programmatic_launch=False, Tensor? sinks=None, "
            "float softcap=0.0, Tensor? slopes=None, Tensor? biases=None, Tensor? other=None, "
            "Tensor? other_lse=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),
    )
)
