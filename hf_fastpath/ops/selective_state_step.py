"""A token's step of a selective state space, or those of several tokens in turn: Mamba-2, whose heads have one decay
each, and Mamba-1."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .recurrence import in_turn, parameter_reasons, state_reasons, tokens_reason


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    d: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    tokens: int = 1,
) -> torch.Tensor:
    """Decay the state, add the token, and read the state.

    With ``t = softplus(dt + dt_bias)`` a channel's state S becomes ``exp(-t exp(a_log)) S + t x b``, and the result is
    ``(S . c + d x) silu(z)``.

    Args:
        x: [batch * tokens, heads, head_dim] float32, float16 or bfloat16, any strides (columns of the convolution's
            output). The tokens of a sequence follow each other. Mamba-1 has one head, whose channels are all there are.
        dt: [rows, heads] (Mamba-2), or [rows, heads, head_dim] (Mamba-1: each channel has its own), any strides.
        a_log: [heads] (Mamba-2), or [heads, head_dim, state_size] (Mamba-1), float32 or x's dtype.
        b, c: [rows, groups, state_size], any strides; each group serves ``heads / groups`` heads in a row.
        state: [batch, heads, head_dim, state_size] float32, contiguous, updated in place.
        d: [heads] (Mamba-2), or [heads, head_dim] (Mamba-1), float32 or x's dtype; None for nothing.
        dt_bias: as d.
        z: like x, a gate; None for nothing.
        tokens: of each sequence.

    Returns:
        [batch * tokens, heads, head_dim] of x's dtype, contiguous. transformers' Mamba-2 rounds ``t b`` and ``t x b``
        to x's dtype; here both forms compute them in float32, as its Mamba-1 does.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mamba2/modeling_mamba2.py@5.24``, ``mamba2_selective_state_update``;
    ``models/mamba/modeling_mamba.py@5.24``, ``mamba_selective_state_update``; arXiv:2312.00752, arXiv:2405.21060.
    """
    if tokens > 1:
        step = lambda x, dt, b, c, z: reference(x, dt, a_log, b, c, state, d, dt_bias, z)  # noqa: E731
        return in_turn(step, tokens, (x, dt, b, c, z))
    wide = state.dtype
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt)
    rates = a_log.to(wide).exp()
    if a_log.dim() == 1:
        dt, rates = dt[..., None], rates[:, None, None]
        d = None if d is None else d[:, None]
    repeats = x.shape[1] // b.shape[1]
    b, c = (t.repeat_interleave(repeats, dim=1) for t in (b, c))
    dt = dt.to(wide)[..., None]
    new = state * torch.exp(dt * -rates) + dt * b.to(wide)[:, :, None] * x.to(wide)[..., None]
    state.copy_(new)
    out = torch.matmul(new.to(c.dtype), c[..., None]).squeeze(-1)
    if d is not None:
        out = (out + x * d).to(out.dtype)
    return (out if z is None else out * torch.nn.functional.silu(z)).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, dt, a_log, b, c, state, d=None, dt_bias=None, z=None, tokens=1) -> list[str]:
    if x.dim() != 3 or b.dim() != 3 or a_log.dim() not in (1, 3):
        found = f"x {tuple(x.shape)}, b {tuple(b.shape)}, a_log {tuple(a_log.shape)}"
        wanted = "[batch, heads, head_dim], [batch, groups, state_size], [heads] or [heads, head_dim, state_size]"
        return [f"got {found}, expected {wanted}"]
    if reasons := tokens_reason(x, tokens):
        return reasons
    rows, heads, head_dim = x.shape
    _, groups, state_size = b.shape
    reasons = tensor_reasons(x, dt=dt, b=b, c=c, z=z) + parameter_reasons(x, a_log=a_log, d=d, dt_bias=dt_bias)
    if heads == 0 or groups == 0 or heads % groups:
        reasons.append(f"x has {heads} heads, expected a multiple of the {groups} groups of b and c")
    of_step = (heads,) if a_log.dim() == 1 else (heads, head_dim)
    of_rates = (heads,) if a_log.dim() == 1 else (heads, head_dim, state_size)
    reasons += shape_reason("dt", dt, (rows, *of_step)) + shape_reason("a_log", a_log, of_rates)
    reasons += shape_reason("b", b, (rows, groups, state_size)) + shape_reason("c", c, (rows, groups, state_size))
    reasons += shape_reason("d", d, of_step) + shape_reason("dt_bias", dt_bias, of_step)
    reasons += shape_reason("z", z, (rows, heads, head_dim))
    return reasons + state_reasons(x, state, (rows // tokens, heads, head_dim, state_size))


def moved(x, dt, a_log, b, c, state, d, dt_bias, z) -> int:
    return nbytes(x, dt, a_log, b, c, d, dt_bias, z) + 2 * nbytes(state) + nbytes(x)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(batch, heads, head_dim, groups, state_size, per_channel=False, parameters=None, options="dbz", tokens=1):
        sizes = heads * head_dim, groups * state_size, groups * state_size
        rows = batch * tokens
        x, b, c = randn(rows, sum(sizes)).split(sizes, dim=-1)
        x = x.unflatten(-1, (heads, head_dim))
        b, c = (t.unflatten(-1, (groups, -1)) for t in (b, c))
        of_step = (heads, head_dim) if per_channel else (heads,)
        of_rates = (heads, head_dim, state_size) if per_channel else (heads,)
        a_log = torch.empty(of_rates, device=device).uniform_(1, 16).log().to(parameters or dtype)
        d, dt_bias = (torch.randn(of_step, device=device).to(parameters or dtype) for _ in range(2))
        state = torch.randn(batch, heads, head_dim, state_size, device=device)
        z = randn(rows, 2 * heads * head_dim)[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
        given = (tensor if letter in options else None for tensor, letter in ((d, "d"), (dt_bias, "b"), (z, "z")))
        return Sample(x, randn(rows, *of_step) - 2, a_log, b, c, state, *given, tokens)

    yield call(1, 4, 32, 1, 32, options="db")  # Mamba-2
    yield call(2, 1, 96, 1, 16, per_channel=True)  # Mamba-1
    yield call(1, 24, 64, 1, 128, parameters=torch.float32, options="db")
    yield call(2, 6, 24, 3, 40)
    yield call(3, 2, 17, 2, 13, per_channel=True, parameters=torch.float32)  # Zamba: heads of a Mamba-1
    yield call(1, 3, 5, 1, 256, options="")
    yield call(1, 1, 33, 1, 8, per_channel=True, options="z")
    yield call(1, 4, 32, 1, 32, options="db", tokens=9)
    yield call(2, 1, 96, 1, 16, per_channel=True, tokens=5)
    yield call(2, 6, 24, 3, 40, tokens=2)
    yield call(1, 3, 5, 1, 256, parameters=torch.float32, tokens=17)
    yield call(3, 2, 17, 2, 13, per_channel=True, parameters=torch.float32, tokens=3)
    yield call(2, 2, 40, 1, 128, tokens=35)
    yield call(1, 1, 70, 1, 16, per_channel=True, tokens=67)
    yield call(1, 1, 33, 1, 128, per_channel=True, options="db", tokens=18)
    yield call(2, 2, 6, 1, 300, tokens=3)


SPEC = register(
    OpSpec(
        name="selective_state_step",
        schema=(
            "(Tensor x, Tensor dt, Tensor a_log, Tensor b, Tensor c, Tensor(a!) state, Tensor? d=None, "
            "Tensor? dt_bias=None, Tensor? z=None, int tokens=1) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
