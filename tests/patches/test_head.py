"""The head in forwards: within the rule for any rows, and stock's if something is trained or switched off."""

from __future__ import annotations

import pytest
import torch
from models import CPU, fresh, over_architectures, prompt

import hf_fastpath
from hf_fastpath.decode.loops.patched import paused
from hf_fastpath.patching import forwards


@pytest.fixture
def products(monkeypatch) -> list:
    """Collect projections that ran as ops of their own, heads among them."""
    made, projection = [], forwards.steps.projection

    def noted(emit, linear, *others, **named):
        made.append(linear)
        return projection(emit, linear, *others, **named)

    monkeypatch.setattr(forwards.steps, "projection", noted)
    return made


@over_architectures
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_logits_within_rule(architecture, dtype, device, products):
    stock, ours = (model.to(dtype).lm_head for model in fresh(architecture, device))
    weight = stock.weight.double()
    with torch.no_grad():
        for shape in ((1, 1), (2, 8), (1, 17), (3, 40), (1, 0)):
            x = torch.randn(*shape, weight.shape[1], device=device).to(dtype)
            products.clear()
            found, expected, exact = ours(x), stock(x), x.double() @ weight.t()
            assert found.shape == expected.shape and found.dtype == dtype
            assert products == [ours] * (device.type == "cpu" and x.numel() > 0)
            if x.numel():
                error, stock_error = ((logits - exact).abs().max() for logits in (found, expected))
                assert error <= 2 * stock_error + torch.finfo(dtype).eps * exact.abs().max()


def test_forwards_and_beams_use_it(products):
    stock, ours = fresh("llama")
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt(CPU, 2, 9)).logits, stock(prompt(CPU, 2, 9)).logits)
    assert products.count(ours.lm_head) == 1
    options = dict(max_new_tokens=8, num_beams=3, do_sample=False)
    assert torch.equal(ours.generate(prompt(CPU), **options), stock.generate(prompt(CPU), **options))
    assert products.count(ours.lm_head) == 1 + 1 + 1, (
        "a forward, the prompt of the beams, and their step when it is recorded"
    )


def test_what_is_learned_is_stocks(products):
    stock, ours = fresh("llama")
    x = torch.randn(3, stock.lm_head.in_features)
    for model in (stock, ours):
        model.lm_head(x).square().sum().backward()
    assert torch.equal(ours.lm_head.weight.grad, stock.lm_head.weight.grad)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert ours(prompt(CPU)).logits.dtype == torch.bfloat16
    with torch.no_grad(), paused(ours):
        ours(prompt(CPU))
    lm_head = hf_fastpath.unpatch(ours).lm_head
    lm_head(torch.ones(1, lm_head.in_features))
    assert lm_head not in products and not {"forward", forwards.KEY} & vars(lm_head).keys()


def test_a_forward_of_the_users_stays(products):
    stock, _ = fresh("llama")
    stock.lm_head.forward = own = lambda x: 2 * type(stock.lm_head).forward(stock.lm_head, x)
    ours = hf_fastpath.patch(stock, quiet=True)
    with torch.no_grad():
        ours(prompt(CPU))
    assert vars(ours.lm_head)["forward"] is own and ours.lm_head not in products
