"""A token's step of a gated delta net, or those of several tokens in turn: gates, norms of query and key, the state's
update, and its product with q."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .recurrence import in_turn, parameter_reasons, state_reasons, tokens_reason

#: of a head's key; a warp of the GPU holds a key in its registers
MAX_K_DIM = 256
#: what transformers adds to the square of a norm
L2_EPS = 1e-6


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    l2_norm: bool = True,
    beta_scale: float = 1.0,
    programmatic_launch: bool = False,
    tokens: int = 1,
) -> torch.Tensor:
    """Decay the state, replace what it holds for the key by the value, as far as beta says, and read it for the query.

    With ``g = exp(-exp(a_log) * softplus(a + dt_bias))`` and ``beta = beta_scale * sigmoid(b)``, a head's state S
    becomes ``g S + k (beta (v - k^T g S))^T``, and the result is ``scale * q^T S``.

    Args:
        q, k: [batch * tokens, k_heads, k_dim] float32, float16 or bfloat16, any strides (columns of the convolution's
            output). The tokens of a sequence follow each other. k_dim 1 to 256.
        v: [rows, v_heads, v_dim], as q. Each head of q and k serves ``v_heads / k_heads`` heads of v in a row.
        a: [rows, v_heads], or [rows, v_heads, k_dim] where each element of a key has a decay of its own
            (Kimi Linear), any strides, q's dtype.
        b: [rows, v_heads], any strides, q's dtype.
        a_log: [v_heads], float32 or q's dtype.
        dt_bias: a's shape without the rows, float32 or q's dtype.
        state: [batch, v_heads, k_dim, v_dim] float32, contiguous, updated in place.
        scale: of the query, behind its norm; ``k_dim**-0.5`` in transformers.
        l2_norm: divide q and k by ``sqrt(sum of squares + 1e-6)``.
        beta_scale: 2 where a model allows negative eigenvalues (OLMo Hybrid).
        programmatic_launch: CUDA may read state, a_log and dt_bias while the kernel in front on this stream still runs.
            It is allowed only if neither that kernel nor an earlier one that may still run writes any of them. The
            result does not depend on it.
        tokens: of each sequence.

    Returns:
        [batch * tokens, v_heads, v_dim] of q's dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/qwen3_next/modeling_qwen3_next.py@5.24``, ``torch_recurrent_gated_delta_rule`` and
    ``Qwen3NextGatedDeltaNet``; ``models/kimi_linear/modeling_kimi_linear.py@5.24``, ``recurrent_kimi_delta_attention``;
    arXiv:2412.06464.
    """
    if tokens > 1:
        how: dict[str, Any] = dict(scale=scale, l2_norm=l2_norm, beta_scale=beta_scale)
        step = lambda q, k, v, a, b: reference(q, k, v, a, b, a_log, dt_bias, state, **how)  # noqa: E731
        return in_turn(step, tokens, (q, k, v, a, b))
    wide = state.dtype
    beta = b.sigmoid() * beta_scale
    softplus = torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide))
    rates = a_log.to(wide).exp()
    decay = (-(rates if a.dim() == 2 else rates[:, None]) * softplus).exp()
    decay = decay[..., None, None] if a.dim() == 2 else decay[..., None]
    repeats = v.shape[1] // k.shape[1]
    query, key = (x.repeat_interleave(repeats, dim=1).to(wide) for x in (q, k))
    if l2_norm:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (query, key))
    query = query * scale
    decayed = state * decay
    known = (decayed * key[..., None]).sum(-2)
    delta = (v.to(wide) - known) * beta.to(wide)[..., None]
    state.copy_(decayed + key[..., None] * delta[..., None, :])
    return (state * query[..., None]).sum(-2).to(q.dtype)


def fake(q, v):
    return q.new_empty(v.shape)


def why_not(q, k, v, a, b, a_log, dt_bias, state, tokens=1) -> list[str]:
    if q.dim() != 3 or v.dim() != 3 or not 1 <= q.shape[2] <= MAX_K_DIM:
        found = f"q {tuple(q.shape)} and v {tuple(v.shape)}"
        return [f"got {found}, expected [rows, k_heads, 1 to {MAX_K_DIM}] and [rows, v_heads, v_dim]"]
    if reasons := tokens_reason(q, tokens):
        return reasons
    rows, k_heads, k_dim = q.shape
    _, v_heads, v_dim = v.shape
    reasons = tensor_reasons(q, k=k, v=v, a=a, b=b)
    reasons += shape_reason("k", k, (rows, k_heads, k_dim)) + shape_reason("v", v, (rows, v_heads, v_dim))
    if v_heads == 0 or k_heads == 0 or v_heads % k_heads:
        reasons.append(f"v has {v_heads} heads, expected a multiple of the {k_heads} heads of q and k")
    of_gate = (v_heads, k_dim) if a.dim() == 3 else (v_heads,)
    reasons += shape_reason("a", a, (rows, *of_gate)) + shape_reason("b", b, (rows, v_heads))
    reasons += shape_reason("a_log", a_log, (v_heads,)) + shape_reason("dt_bias", dt_bias, of_gate)
    reasons += parameter_reasons(q, a_log=a_log, dt_bias=dt_bias)
    return reasons + state_reasons(q, state, (rows // tokens, v_heads, k_dim, v_dim))


def moved(q, k, v, a, b, a_log, dt_bias, state) -> int:
    return nbytes(q, k, v, a, b, a_log, dt_bias) + 2 * nbytes(state) + nbytes(v)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(
        batch,
        k_heads,
        v_heads,
        k_dim,
        v_dim,
        per_element=False,
        parameters=torch.float32,
        l2_norm=True,
        tokens=1,
        **how,
    ):
        sizes = [heads * dim for heads, dim in ((k_heads, k_dim), (k_heads, k_dim), (v_heads, v_dim))]
        rows = batch * tokens
        q, k, v = randn(rows, sum(sizes)).split(sizes, dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in ((q, k_heads), (k, k_heads), (v, v_heads)))
        if not l2_norm:
            k = k * k_dim**-0.5  # else the state grows without bound
        of_gate = (v_heads, k_dim) if per_element else (v_heads,)
        a_log = torch.empty(v_heads, device=device).uniform_(0.01, 16).log().to(parameters or dtype)
        dt_bias = torch.randn(of_gate, device=device).to(parameters or dtype)
        state = torch.randn(batch, v_heads, k_dim, v_dim, device=device)
        gates = randn(rows, *of_gate) - 2, randn(rows, v_heads)
        return Sample(q, k, v, *gates, a_log, dt_bias, state, k_dim**-0.5, l2_norm, tokens=tokens, **how)

    yield call(1, 2, 4, 32, 32)
    yield call(2, 1, 2, 40, 24, per_element=True)  # Kimi Linear
    yield call(1, 16, 32, 128, 128, parameters=None, programmatic_launch=True)
    yield call(2, 3, 3, 96, 192, beta_scale=2.0)  # OLMo Hybrid
    yield call(1, 2, 2, 17, 13, l2_norm=False)
    yield call(1, 1, 3, 256, 40, per_element=True, parameters=None)
    yield call(1, 2, 4, 32, 32, tokens=9)
    yield call(2, 1, 2, 40, 24, per_element=True, tokens=5)
    yield call(2, 3, 3, 96, 192, beta_scale=2.0, tokens=2)
    yield call(1, 2, 2, 17, 13, l2_norm=False, tokens=17)
    yield call(1, 1, 3, 256, 40, per_element=True, parameters=None, tokens=3)
    yield call(2, 1, 2, 128, 40, tokens=35)
    yield call(1, 1, 2, 64, 33, per_element=True, tokens=20)
    yield call(1, 1, 1, 128, 32, per_element=True, tokens=16)


SPEC = register(
    OpSpec(
        name="gated_delta_step",
        schema=(
            "(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) state, "
            "float scale, bool l2_norm=True, float beta_scale=1.0, bool programmatic_launch=False, int tokens=1) "
            "-> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
