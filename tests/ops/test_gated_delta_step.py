"""gated_delta_step: the common tests, many tokens one after another, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.gated_delta_step import MAX_K_DIM, SPEC
from hf_fastpath.registry import OpInputError, Sample


def call(device, dtype, batch, k_heads, v_heads, k_dim, v_dim, per_element=False, parameters=torch.float32, **how):
    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype)

    of_gate = (v_heads, k_dim) if per_element else (v_heads,)
    return Sample(
        *(randn(batch, k_heads, k_dim), randn(batch, k_heads, k_dim), randn(batch, v_heads, v_dim)),
        *(randn(batch, *of_gate), randn(batch, v_heads), randn(v_heads, dtype=parameters)),
        *(randn(*of_gate, dtype=parameters), randn(batch, v_heads, k_dim, v_dim, dtype=torch.float32), k_dim**-0.5),
        **how,
    )


def odd_sizes(device, dtype):
    for batch, k_heads, v_heads, k_dim, v_dim in (
        *((4, 1, 1, 1, 9), (2, 1, 3, 2, 5), (1, 2, 4, 31, 33), (3, 2, 2, 33, 31), (1, 1, 2, 64, 4), (2, 2, 2, 65, 36)),
        *((1, 1, 1, 129, 66), (1, 1, 1, 255, 129), (1, 2, 2, 200, 100)),
    ):
        for per_element in (False, True):
            yield call(device, dtype, batch, k_heads, v_heads, k_dim, v_dim, per_element)
    yield call(device, dtype, 2, 2, 4, 48, 64, parameters=dtype, beta_scale=2.0)
    yield call(device, dtype, 0, 2, 4, 48, 64)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("per_element", (False, True))
def test_gated_delta_step_over_many_tokens(per_element, dtype, device):
    """Errors do not grow from token to token: the state after 30 of them keeps the numerics rule."""
    calls = [call(device, dtype, 2, 2, 4, 40, 36, per_element).args for _ in range(30)]
    states = {"ours": torch.zeros_like(calls[0][7]), "stock": torch.zeros_like(calls[0][7])}
    exact = states["ours"].double()
    for q, k, v, a, b, a_log, dt_bias, _, scale in calls:
        SPEC(q, k, v, a, b, a_log, dt_bias, states["ours"], scale)
        SPEC.reference(q, k, v, a, b, a_log, dt_bias, states["stock"], scale)
        SPEC.reference(*(t.double() for t in (q, k, v, a, b, a_log, dt_bias)), exact, scale)
    errors = {name: (state - exact).abs().max().item() for name, state in states.items()}
    assert errors["ours"] <= 2 * errors["stock"] + torch.finfo(torch.float32).eps * exact.abs().max().item()


@over_dtypes
def test_gated_delta_step_gates_at_their_ends(dtype, device):
    """A gate that forgets all leaves the new token alone; one that keeps all and writes nothing leaves the state."""
    sample = call(device, dtype, 1, 2, 4, 32, 64)
    q, k, v, a, b, a_log, dt_bias, state, scale = sample.args
    zero, large = torch.zeros_like(a), torch.full_like(a, 1e4)
    kept = state.clone()
    SPEC(q, k, v, -large, -large, a_log * 0, dt_bias * 0, kept, scale)
    assert same_bits(kept, state)
    forgotten = state.clone()
    SPEC(q, k, v, large, zero, a_log * 0, dt_bias * 0, forgotten, scale)
    alone = torch.zeros_like(state)
    SPEC(q, k, v, zero, zero, a_log * 0, dt_bias * 0, alone, scale)
    assert same_bits(forgotten, alone)


@over_dtypes
def test_gated_delta_step_special_values(dtype, device):
    """NaN stays in its head of its row; keys of zero are no division by zero."""
    sample = call(device, dtype, 2, 4, 4, 32, 40)
    q, k, v = sample.args[:3]
    q[0, 1, 3], k[0, 2, 5], v[1, 3, 7] = (float("nan"),) * 3
    q[1, 0], k[1, 0] = 0, 0
    result = assert_matches(SPEC, sample)
    assert result[0, 0].isfinite().all() and result[1, :3].isfinite().all() and not result[1, 0].any()


@pytest.mark.parametrize("l2_norm", (True, False))
def test_gated_delta_step_reference_is_transformers(l2_norm):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, a, b, a_log, dt_bias, state, scale = call("cpu", torch.float32, 2, 4, 4, 24, 40).args
    g = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    stock, stock_state = torch_recurrent_gated_delta_rule(
        *(t[:, None] for t in (q, k, v)),
        g=g[:, None],
        beta=b.sigmoid()[:, None],
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2_norm,
    )
    found = SPEC.reference(q, k, v, a, b, a_log, dt_bias, state, scale, l2_norm)
    torch.testing.assert_close(found, stock[:, 0])
    torch.testing.assert_close(state, stock_state)


def test_gated_delta_step_reference_is_kimi_linear():
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    if not hasattr(modeling, "recurrent_kimi_delta_attention"):
        pytest.skip("this transformers has no recurrent_kimi_delta_attention")
    q, k, v, a, b, a_log, dt_bias, state, scale = call("cpu", torch.float32, 2, 3, 3, 24, 24, True).args
    g = -a_log.exp()[:, None] * torch.nn.functional.softplus(a + dt_bias)
    stock, stock_state = modeling.recurrent_kimi_delta_attention(
        *(t[:, None] for t in (q, k, v, g, b.sigmoid())), state.clone(), True, use_qk_l2norm_in_kernel=True
    )
    found = SPEC.reference(q, k, v, a, b, a_log, dt_bias, state, scale)
    torch.testing.assert_close(found, stock[:, 0])
    torch.testing.assert_close(state, stock_state)


def test_gated_delta_step_names_the_fault():
    given = call("cpu", torch.float32, 1, 2, 4, 8, 8).args
    with pytest.raises(OpInputError, match="v has 4 heads, expected a multiple of the 3 heads of q and k"):
        SPEC(*(torch.zeros(1, 3, 8) for _ in range(2)), *given[2:])
    with pytest.raises(OpInputError, match="state has dtype torch.float16, expected torch.float32"):
        SPEC(*given[:7], given[7].half(), given[8])
    with pytest.raises(OpInputError, match=rf"expected \[rows, k_heads, 1 to {MAX_K_DIM}\]"):
        SPEC(torch.zeros(1, 2, MAX_K_DIM + 1), *given[1:])
