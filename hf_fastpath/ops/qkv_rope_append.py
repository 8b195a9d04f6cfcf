"""Query, key and value projections of a few new tokens, their rotation and their append to the KV cache, in one."""

from __future__ import annotations

import torch

from ..choices import NormKind
from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .gemv import MAX_ROWS, MAX_WGMMA_ROWS, most_rows, rows_reason, weight_reason
from .kv_cache import in_pages, refuse_kv_table
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed
from .rope_append import random_angles, random_caches, random_head_norms, written_bytes
from .rope_append import reference as rope_append
from .rope_append import why_not as rope_reasons


def reference(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    v_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
    transposed: bool,
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
    block_table: torch.Tensor | None = None,
    neighbors: bool = False,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    head_norm_eps: float = 0.0,
    head_norm_offset: float = 0.0,
) -> torch.Tensor:
    """Compute ``rope_append`` of the projections of ``norm(x)``.

    Args:
        x: [batch, query_len, hidden_size], at most 16 rows in all, or 64 as in ``gemv``.
        q_weight, k_weight, v_weight: [num_heads*head_dim | num_kv_heads*head_dim, hidden_size], the weights of the
            model's three ``nn.Linear`` modules; or all three projections one after the other in ``q_weight``, and None.
        q_bias, k_bias, v_bias: one per output feature, or None.
        transposed: ``q_weight`` holds all projections as a ``Conv1D`` does, [hidden_size, features].
        cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer: as in ``rope_append``.
        norm, norm_weight, norm_bias, norm_eps, programmatic_launch: as in ``gemv``. With ``programmatic_launch``,
            lengths and table may be read early as well.
        k_scales, v_scales, block_table, neighbors, q_norm_weight, k_norm_weight, head_norm_eps, head_norm_offset: as
            in ``rope_append``.

    Returns:
        [batch, query_len, num_heads, head_dim] rotated queries in x's dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or there are too many rows.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralAttention``.
    """
    refuse_kv_table(kv_table)
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    linear = torch.nn.functional.linear
    if k_weight is None or v_weight is None:
        qkv = linear(x, q_weight.t() if transposed else q_weight, q_bias)
    else:
        qkv = torch.cat([linear(x, q_weight, q_bias), linear(x, k_weight, k_bias), linear(x, v_weight, v_bias)], -1)
    rest = k_scales, v_scales, block_table, neighbors, q_norm_weight, k_norm_weight, head_norm_eps, head_norm_offset
    return rope_append(qkv, None, cos, sin, k_cache, v_cache, seq_lens, num_heads, None, 0, *rest)


def fake(x, k_cache, num_heads):
    return x.new_empty(x.shape[0], x.shape[1], num_heads, k_cache.shape[-1])


def why_not(
    x,
    q_weight,
    k_weight,
    v_weight,
    q_bias,
    k_bias,
    v_bias,
    transposed,
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
    block_table,
    q_norm_weight,
    k_norm_weight,
) -> list[str]:
    if x.dim() != 3:
        return [f"x has shape {tuple(x.shape)}, expected [batch, query_len, hidden_size]"]
    weights = {"q": (q_weight, q_bias), "k": (k_weight, k_bias), "v": (v_weight, v_bias)}
    most = most_rows(q_weight, k_weight, v_weight, transposed=transposed)
    reasons = rows_reason(x, most) + norm_reasons(x, norm, norm_weight, norm_bias)
    if (k_weight is None) != (v_weight is None) or (k_weight is None and not (k_bias is None and v_bias is None)):
        reasons.append("k_weight and v_weight go together, with their biases: pass both or neither")
    if transposed and k_weight is not None:
        reasons.append("transposed takes all projections in q_weight: pass k_weight and v_weight as None")
    if reasons:
        return reasons
    features = 0
    for name, (weight, bias) in weights.items():
        if weight is None:
            continue
        reasons += tensor_reasons(x, **{f"{name}_weight": weight, f"{name}_bias": bias})
        reasons += weight_reason(f"{name}_weight", x, weight, transposed)
        if weight.dim() == 2:
            width = weight.shape[1 if transposed else 0]
            features += width
            reasons += shape_reason(f"{name}_bias", bias, (width,))
    if not reasons and k_weight is not None and k_cache.dim() == 4:
        head_dim = k_cache.shape[3]
        sizes = {"q_weight": num_heads * head_dim, "k_weight": k_cache.shape[1] * head_dim}
        sizes["v_weight"] = sizes["k_weight"]
        for (name, size), (weight, _) in zip(sizes.items(), weights.values()):
            reasons += shape_reason(name, weight, (size, x.shape[-1]))
    if reasons:
        return reasons
    qkv = x.new_empty(x.shape[0], x.shape[1], features)
    to = k_cache, v_cache, seq_lens, num_heads, kv_table, layer, k_scales, v_scales, block_table
    head_norms = dict(q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight)
    return rope_reasons(qkv, None, cos, sin, *to, **head_norms)


def moved(
    x,
    q_weight,
    k_weight,
    v_weight,
    q_bias,
    k_bias,
    v_bias,
    cos,
    sin,
    k_cache,
    seq_lens,
    num_heads,
    norm_weight,
    norm_bias,
    q_norm_weight,
    k_norm_weight,
) -> int:
    inputs = nbytes(x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, cos, sin, seq_lens, norm_weight, norm_bias)
    inputs += nbytes(q_norm_weight, k_norm_weight)
    return inputs + written_bytes(x, k_cache, num_heads)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(
        batch,
        query_len,
        hidden_size,
        heads,
        kv_heads,
        head_dim,
        seq_lens,
        rotary_dim=None,
        layout="separate",
        bias=False,
        kv=None,
        norm=NormKind.NONE,
        programmatic_launch=False,
        page_size=None,
        neighbors=False,
        head_norms=None,
        head_norm_offset=0.0,
    ):
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        if layout != "separate":
            sizes = [sum(sizes)]
        weights = [randn(size, hidden_size) * hidden_size**-0.5 for size in sizes]
        if layout == "conv1d":
            weights = [weights[0].t().contiguous()]
        biases = [randn(size) if bias else None for size in sizes]
        weights, biases = (part + [None] * (3 - len(part)) for part in (weights, biases))
        cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype, neighbors)
        caches, scales = random_caches(
            (batch, kv_heads, 3 * page_size if page_size else 9, head_dim), device, kv or dtype
        )
        table = None
        if page_size is not None:
            table, *caches = in_pages(caches, page_size)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        norm_weight = None if norm == NormKind.NONE else randn(hidden_size)
        norm_bias = randn(hidden_size) if norm == NormKind.LAYER else None
        return Sample(
            *(randn(batch, query_len, hidden_size), *weights, *biases, layout == "conv1d", cos, sin, *caches, lens),
            *(heads, None, 0, norm, norm_weight, norm_bias, 1e-5, programmatic_launch, *scales, table, neighbors),
            **(
                {}
                if head_norms is None
                else random_head_norms(head_norms, heads, kv_heads, head_dim, device, dtype, head_norm_offset)
            ),
        )

    yield call(1, 1, 256, 4, 2, 32, [5], rotary_dim=32)
    yield call(1, 1, 256, 8, 2, 32, [5], rotary_dim=32, norm=NormKind.RMS, programmatic_launch=True)
    yield call(1, 1, 192, 3, 3, 64, [30], layout="conv1d", bias=True, norm=NormKind.LAYER, programmatic_launch=True)
    yield call(1, 1, 192, 3, 1, 64, [9], 32, layout="fused", bias=True, norm=NormKind.LAYER)
    yield call(2, 3, 111, 4, 1, 40, [3, 17], rotary_dim=40, bias=True)
    yield call(3, 2, 2048, 4, 2, 32, [3, 17, 9], rotary_dim=16, norm=NormKind.RMS, programmatic_launch=True)
    yield call(8, 1, 2048, 3, 1, 64, list(range(1, 9)), rotary_dim=64, bias=True, layout="fused")
    yield call(MAX_ROWS, 1, 64, 2, 2, 32, list(range(1, MAX_ROWS + 1)), rotary_dim=32, norm=NormKind.RMS)
    if most_rows(randn(8, 8)) == MAX_WGMMA_ROWS:
        for batch, query_len in ((20, 1), (8, 8)):
            yield call(
                batch, query_len, 256, 4, 2, 32, [9] * batch, rotary_dim=32, norm=NormKind.RMS, programmatic_launch=True
            )
    yield call(1, 1, 128, 4, 4, 80, [7], rotary_dim=32, bias=True, kv=torch.float16, norm=NORMS[1])
    yield call(1, 1, 104, 2, 1, 256, [7], rotary_dim=256, kv=torch.bfloat16)
    yield call(1, 1, 256, 4, 2, 32, [5], rotary_dim=32, norm=NormKind.RMS_OFFSET, programmatic_launch=True)
    yield call(3, 1, 104, 2, 1, 40, [7, 8, 9], rotary_dim=40, norm=NormKind.RMS_OFFSET)
    yield call(1, 1, 104, 2, 1, 64, [7], rotary_dim=64, kv=torch.int8, norm=NormKind.RMS)
    yield call(2, 2, 104, 2, 2, 40, [7, 30], rotary_dim=40, kv=torch.float8_e4m3fn)
    yield call(2, 2, 256, 4, 2, 32, [17, 50], rotary_dim=32, norm=NormKind.RMS, programmatic_launch=True, page_size=16)
    yield call(1, 1, 256, 4, 2, 64, [5], rotary_dim=32, norm=NormKind.RMS, programmatic_launch=True, neighbors=True)
    yield call(3, 2, 2048, 4, 2, 32, [3, 17, 9], rotary_dim=32, bias=True, layout="fused", neighbors=True)
    yield call(1, 2, 104, 2, 1, 40, [7], rotary_dim=20, layout="conv1d", neighbors=True)
    yield call(1, 1, 104, 2, 1, 64, [7], rotary_dim=64, kv=torch.int8, neighbors=True)
    each, of_all = dict(head_norms="each"), dict(head_norms="all")
    yield call(1, 1, 256, 4, 2, 64, [5], rotary_dim=64, norm=NormKind.RMS, programmatic_launch=True, **each)
    yield call(3, 2, 2048, 4, 2, 32, [3, 17, 9], rotary_dim=32, norm=NormKind.RMS_OFFSET, head_norm_offset=1.0, **each)
    yield call(1, 2, 104, 3, 1, 40, [7], rotary_dim=20, layout="fused", bias=True, neighbors=True, **of_all)
    yield call(1, 1, 512, 8, 2, 64, [5], rotary_dim=64, programmatic_launch=True, **of_all)
    yield call(1, 1, 104, 2, 1, 64, [7], rotary_dim=64, kv=torch.int8, norm=NormKind.RMS, **each)
    yield call(2, 2, 256, 4, 2, 32, [17, 50], rotary_dim=32, programmatic_launch=True, page_size=16, **each)


SPEC = register(
    OpSpec(
        name="qkv_rope_append",
        schema=(
            "(Tensor x, Tensor q_weight, Tensor? k_weight, Tensor? v_weight, Tensor? q_bias, Tensor? k_bias, "
            "Tensor? v_bias, bool transposed, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
            f"Tensor seq_lens, int num_heads, Tensor? kv_table=None, int layer=0, {NORM_SCHEMA}, "
            "bool programmatic_launch=False, Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None, "
            "Tensor? block_table=None, bool neighbors=False, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, "
            "float head_norm_eps=0.0, float head_norm_offset=0.0) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
