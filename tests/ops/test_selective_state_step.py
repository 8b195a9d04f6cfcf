"""selective_state_step: the common tests, many tokens one after another, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes

from hf_fastpath.ops.selective_state_step import SPEC
from hf_fastpath.registry import OpInputError, Sample


def call(device, dtype, batch, heads, head_dim, groups, state_size, per_channel, parameters=torch.float32, **given):
    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype)

    of_step = (heads, head_dim) if per_channel else (heads,)
    of_rates = (heads, head_dim, state_size) if per_channel else (heads,)
    return Sample(
        *(randn(batch, heads, head_dim), randn(batch, *of_step), randn(*of_rates, dtype=parameters)),
        *(randn(batch, groups, state_size), randn(batch, groups, state_size)),
        randn(batch, heads, head_dim, state_size, dtype=torch.float32),
        *(randn(*of_step, dtype=parameters), randn(*of_step, dtype=parameters)),
        randn(batch, heads, head_dim),
        **given,
    )


def odd_sizes(device, dtype):
    for batch, heads, head_dim, groups, state_size in (
        *((4, 1, 9, 1, 1), (2, 3, 5, 3, 2), (1, 4, 31, 2, 33), (3, 2, 33, 1, 31), (1, 6, 64, 2, 64), (2, 1, 129, 1, 4)),
        *((1, 1, 300, 1, 16), (1, 2, 72, 1, 300), (1, 1, 127, 1, 263)),
    ):
        for per_channel in (False, True):
            yield call(device, dtype, batch, heads, head_dim, groups, state_size, per_channel)
    yield call(device, dtype, 2, 2, 24, 1, 16, True, dtype)
    yield call(device, dtype, 0, 2, 24, 1, 16, False)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("per_channel", (False, True))
def test_selective_state_step_over_many_tokens(per_channel, dtype, device):
    """Errors do not grow from token to token: the state after 30 of them keeps the numerics rule."""
    calls = [call(device, dtype, 2, 2, 24, 1, 36, per_channel).args for _ in range(30)]
    states = {"ours": torch.zeros_like(calls[0][5]), "stock": torch.zeros_like(calls[0][5])}
    exact = states["ours"].double()
    for given in calls:
        SPEC(*given[:5], states["ours"], *given[6:])
        SPEC.reference(*given[:5], states["stock"], *given[6:])
        SPEC.reference(*(t.double() for t in given[:5]), exact, *(t.double() for t in given[6:]))
    errors = {name: (state - exact).abs().max().item() for name, state in states.items()}
    assert errors["ours"] <= 2 * errors["stock"] + torch.finfo(torch.float32).eps * exact.abs().max().item()


@over_dtypes
def test_selective_state_step_special_values(dtype, device):
    """NaN stays in its channel of its row; steps that are very large or very small are finite."""
    sample = call(device, dtype, 2, 3, 24, 1, 32, False)
    sample.args[0][0, 1, 3] = float("nan")
    sample.args[1][1, 0], sample.args[1][1, 1] = 80.0, -80.0
    result = assert_matches(SPEC, sample)
    assert result[0, 1, 3].isnan() and int(result.isnan().sum()) == 1


def test_selective_state_step_reference_is_mamba2():
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    x, dt, a_log, b, c, state, d, dt_bias, z = call("cpu", torch.float32, 2, 4, 24, 2, 40, False).args
    stock_state = state.clone()
    stock = mamba2_selective_state_update(
        stock_state,
        x,
        dt[..., None].expand(-1, -1, 24),
        -a_log.exp()[:, None, None].expand(-1, 24, 40),
        b,
        c,
        d[:, None].expand(-1, 24),
        dt_bias=dt_bias[:, None].expand(-1, 24),
        dt_softplus=True,
        z=z,
    )
    torch.testing.assert_close(SPEC.reference(x, dt, a_log, b, c, state, d, dt_bias, z), stock)
    torch.testing.assert_close(state, stock_state)


@over_dtypes
def test_selective_state_step_reference_is_mamba(dtype):
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

    x, dt, a_log, b, c, state, d, dt_bias, z = call("cpu", dtype, 2, 1, 24, 1, 16, True, dtype).args
    stock_state = state[:, 0].clone()
    stock = mamba_selective_state_update(
        *(stock_state, x[:, 0], dt[:, 0], -a_log[0].float().exp(), b[:, 0], c[:, 0], d[0]),
        z=z[:, 0],
        dt_bias=dt_bias[0].float(),
        dt_softplus=True,
    )
    torch.testing.assert_close(SPEC.reference(x, dt, a_log, b, c, state, d, dt_bias, z)[:, 0], stock)
    torch.testing.assert_close(state[:, 0], stock_state)


def test_selective_state_step_names_the_fault():
    given = call("cpu", torch.float32, 1, 4, 8, 2, 8, False).args
    with pytest.raises(OpInputError, match="x has 4 heads, expected a multiple of the 3 groups of b and c"):
        SPEC(*given[:3], *(torch.zeros(1, 3, 8) for _ in range(2)), *given[5:])
    with pytest.raises(OpInputError, match="d has dtype torch.float16, expected torch.float32 or torch.float32"):
        SPEC(*given[:6], given[6].half(), *given[7:])
    with pytest.raises(OpInputError, match=r"dt has shape \(1, 4, 8\), expected \(1, 4\)"):
        SPEC(given[0], given[0], *given[2:])
