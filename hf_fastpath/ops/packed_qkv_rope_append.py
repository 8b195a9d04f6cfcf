"""Query, key and value projections with quantized weights, their rotation and their append to the KV cache, in one."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind, PackedFormat
from ..quantization import FORMATS
from ..registry import OpSpec, Sample, nbytes, register
from .gemv import MAX_ROWS
from .kv_cache import refuse_kv_table
from .norm import NORM_SCHEMA
from .packed_gemv import random_weight
from .packed_gemv import reference as product
from .packed_gemv import why_not as product_reasons
from .rope_append import random_angles, random_caches, written_bytes
from .rope_append import reference as rope_append
from .rope_append import why_not as rope_reasons


def reference(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    multiplier: float,
    format: PackedFormat,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    kv_table: torch.Tensor | None = None,
    layer: int = 0,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    neighbors: bool = False,
) -> torch.Tensor:
    """Compute ``rope_append`` of the projections of ``norm(x)``.

    Args:
        x: [batch, query_len, hidden_size], at most 16 rows in all.
        quants, scales, zeros, multiplier, format: the rows of query, key and value one after the other, as in
            ``packed_gemv``.
        cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer, k_scales, v_scales, neighbors: as in
            ``rope_append``.
        norm, norm_weight, norm_bias, norm_eps, programmatic_launch: as in ``qkv_rope_append``.

    Returns:
        [batch, query_len, num_heads, head_dim] rotated queries in x's dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or the format is unknown.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralAttention``, over dequantized weights.
    """
    refuse_kv_table(kv_table)
    weight = quants, scales, zeros, multiplier, format
    qkv = product(x, *weight, None, None, Activation.NONE, norm, norm_weight, norm_bias, norm_eps)
    to = k_cache, v_cache, seq_lens, num_heads
    return rope_append(qkv, None, cos, sin, *to, k_scales=k_scales, v_scales=v_scales, neighbors=neighbors)


def fake(x, k_cache, num_heads):
    return x.new_empty(x.shape[0], x.shape[1], num_heads, k_cache.shape[-1])


def why_not(
    x,
    quants,
    scales,
    zeros,
    format,
    cos,
    sin,
    k_cache,
    v_cache,
    seq_lens,
    num_heads,
    kv_table,
    layer,
    norm,
    norm_weight,
    norm_bias,
    k_scales,
    v_scales,
) -> list[str]:
    if x.dim() != 3:
        return [f"x has shape {tuple(x.shape)}, expected [batch, query_len, hidden_size]"]
    reasons = product_reasons(
        x, quants, scales, zeros, format, None, None, Activation.NONE, norm, norm_weight, norm_bias
    )
    if reasons:
        return reasons
    qkv = x.new_empty(x.shape[0], x.shape[1], quants.shape[0])
    to = (k_cache, v_cache, seq_lens, num_heads, kv_table, layer, k_scales, v_scales)
    return rope_reasons(qkv, None, cos, sin, *to)


def moved(x, quants, scales, zeros, cos, sin, k_cache, seq_lens, num_heads, norm_weight, norm_bias) -> int:
    inputs = nbytes(x, quants, scales, zeros, cos, sin, seq_lens, norm_weight, norm_bias)
    return inputs + written_bytes(x, k_cache, num_heads)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(
        format,
        batch,
        query_len,
        hidden_size,
        heads,
        kv_heads,
        head_dim,
        seq_lens,
        rotary_dim,
        norm=NormKind.NONE,
        kv=None,
        neighbors=False,
    ):
        weight = random_weight(format, (heads + 2 * kv_heads) * head_dim, hidden_size, device)
        cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype, neighbors)
        caches, scales = random_caches((batch, kv_heads, 9, head_dim), device, kv or dtype)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        norms = (
            norm,
            None if norm == NormKind.NONE else randn(hidden_size),
            randn(hidden_size) if norm == NormKind.LAYER else None,
        )
        return Sample(
            *(randn(batch, query_len, hidden_size), *weight, cos, sin, *caches, lens, heads, None, 0, *norms, 1e-5),
            *(norm == NormKind.RMS, *scales, neighbors),
        )

    for format in FORMATS.values():
        yield call(format, 1, 1, 256, 4, 2, 32, [5], 32)
        yield call(format, 1, 1, 256, 8, 2, 32, [5], 32, NormKind.RMS)
        yield call(format, 1, 1, 192, 3, 1, 64, [9], 32, NormKind.LAYER)
        yield call(format, 3, 2, 2048, 4, 2, 32, [3, 17, 9], 16, NormKind.RMS)
        yield call(format, 1, 2, 256, 4, 2, 64, [5], 32, NormKind.RMS, neighbors=True)
    yield call(FORMATS["int4"], 2, 3, 111, 4, 1, 40, [3, 17], 40)
    yield call(FORMATS["int4_g32"], MAX_ROWS, 1, 64, 2, 2, 32, list(range(1, MAX_ROWS + 1)), None, NormKind.RMS)
    yield call(FORMATS["int8"], 1, 1, 128, 4, 4, 80, [7], 32, NormKind.RMS, torch.float16)
    yield call(FORMATS["int4_g32"], 1, 1, 256, 2, 1, 64, [7], 64, NormKind.RMS, torch.int8)
    yield call(FORMATS["fp8"], 2, 2, 104, 2, 2, 40, [7, 30], 40, NormKind.NONE, torch.float8_e4m3fn)


SPEC = register(
    OpSpec(
        name="packed_qkv_rope_append",
        schema=(
            "(Tensor x, Tensor quants, Tensor scales, Tensor? zeros, float multiplier, int format, Tensor? cos, "
            "Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seq_lens, int num_heads, "
            f"Tensor? kv_table=None, int layer=0, {NORM_SCHEMA}, bool programmatic_launch=False, "
            "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None, bool neighbors=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
