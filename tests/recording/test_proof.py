"""How the proof of a recorded step runs stock code, and what it allows."""

from contextlib import nullcontext

import pytest
import torch
from causal_lm_types import small_model
from torch.nn.functional import linear
from torch.nn.functional import scaled_dot_product_attention as attention

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import proof
from hf_fastpath.recording.proof import _OtherRoundings, _WideAttention


def test_attention_of_16_bits_runs_in_float32_and_nothing_else_does():
    q, k, v = (torch.randn(2, 4, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.randn(2, 1, 3, 3, dtype=torch.bfloat16)
    wide = [each.float() for each in (q, k, v, mask)]
    expected = attention(*wide[:3], attn_mask=wide[3]), attention(*wide[:3], is_causal=True)
    narrow, rows = attention(q, k, v, attn_mask=mask), linear(q, k[0, 0])
    with _WideAttention():
        found = attention(query=q, key=k, value=v, attn_mask=mask), attention(q, k, v, is_causal=True)
        in_float32 = attention(*wide[:3], attn_mask=wide[3])
        assert torch.equal(linear(q, k[0, 0]), rows)
    assert all(each.dtype == torch.bfloat16 for each in found)
    assert all(torch.equal(each, one.bfloat16()) for each, one in zip(found, expected))
    assert torch.equal(in_float32, expected[0]) and torch.equal(attention(q, k, v, attn_mask=mask), narrow)
    assert not torch.equal(narrow, found[0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_products_are_rounded_otherwise_and_nothing_else_is(dtype):
    rows, weight = torch.randn(3, 40, dtype=dtype), torch.randn(9, 40, dtype=dtype)
    q, k, v = (torch.randn(2, 4, 3, 16, dtype=dtype) for _ in range(3))

    def products():
        return linear(rows, weight), rows @ weight.T, torch.bmm(q[0], k[0].mT), attention(q, k, v)

    def others():
        return rows + rows, rows.softmax(-1), rows[1:], torch.arange(3) * 2, torch.cat((rows, rows))

    plain, unchanged, state = products(), others(), torch.get_rng_state()
    with torch.no_grad(), _OtherRoundings(torch.device("cpu")):
        found, same = products(), others()
    assert all(map(torch.equal, same, unchanged)) and torch.equal(torch.get_rng_state(), state)
    most = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1)  # a sum of 40 terms is rounded several times
    for each, before in zip(found, plain):
        step = (each.double() - before.double()).abs() / before.double().abs()
        assert 0.05 < (step > 0).float().mean() and step.max() <= most and each.dtype == dtype


def test_noise_of_stock_grows_with_the_roundings_of_its_products():
    model = small_model("glm4").bfloat16()
    part = state_of(hf_fastpath.patch(model, quiet=True)).plans.part_of(model)
    assert 0.003 < proof.own_difference(part) < 0.1


@pytest.fixture(scope="module", params=["glm4", "qwen3_5_text", "lfm2"])
def part(request):
    """A recorded model in its roles."""
    model = hf_fastpath.patch(small_model(request.param), quiet=True)
    return state_of(model).plans.part_of(model)


def test_stocks_own_noise_is_rounding(part, monkeypatch):
    assert 0 < proof.own_difference(part) < 1e-5
    monkeypatch.setattr(proof, "_OtherRoundings", lambda device: nullcontext())
    assert proof.own_difference(part) == 0


@pytest.mark.parametrize(
    ("found", "noise", "allowed"),
    [(0.3, 0.15, True), (0.3, 0.05, False), (0.95, 0.4, True), (1.05, 0.4, False), (1e-7, 0.0, True)],
)
def test_a_model_may_be_as_far_from_stock_as_its_own_noise_tells(part, monkeypatch, found, noise, allowed):
    monkeypatch.setattr(proof, "difference", lambda *_: found)
    monkeypatch.setattr(proof, "own_difference", lambda _: noise)
    monkeypatch.setattr(part, "verdict", None)
    reason = proof.reason_against(part, None)
    assert (reason is None) == allowed
    assert allowed or f"by {found:.1e} of their size, {min(3 * noise, 1.0):.1e} are allowed" in reason.what
