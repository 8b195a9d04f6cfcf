"""Products of one row are joined; others stay apart."""

from __future__ import annotations

import pytest
from recordings import WIDTH, assert_same, calls_of, linear, recorded
from torch import nn

from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, joined_products, modules, products


@pytest.mark.parametrize("count", (1, 2, 4, 5, 6, 9))
def test_products_of_one_row_are_joined(count):
    def step(m, x, *_):
        x = m.norm(x)
        return sum((place + 1) * getattr(m, f"l{place}")(x).sin().sum(-1) for place in range(count))[..., None] * x

    inside = {f"l{place}": linear(8 * (place + 1)) for place in range(count)}
    recording, model = recorded(step, norm=nn.RMSNorm(WIDTH, eps=1e-6), **inside)
    passes = [modules.module_formulas, products.norms_in_front, joined_products.joined_products]
    assert_same(recording, model, passes)
    joined = [call.arguments["weights"] for call in calls_of(recording, marks.joined_linear)]
    alone = calls_of(recording, marks.linear)
    of_model = [getattr(model.body, f"l{place}").weight for place in range(count)]
    together, rest = of_model[: count - (count % 4 == 1)], of_model[count - (count % 4 == 1) :]
    assert [id(weight) for weights in joined for weight in weights] == [id(weight) for weight in together]
    assert [len(weights) for weights in joined] == [4] * (count // 4) + ([count % 4] if count % 4 > 1 else [])
    assert [id(call.arguments["weight"]) for call in alone] == [id(weight) for weight in rest]


@pytest.mark.parametrize(
    ("features", "joined"),
    (((17, 1), [[17, 1]]), ((8, 17, 1), [[8, 17, 1]]), ((17, 8, 8), [[8, 8]]), ((1, 17, 9), []), ((3, 4, 1), [[3, 1]])),
)
def test_slices_of_a_joined_product_are_aligned(features, joined):
    """A router of 17 experts and the gate of a shared one, for example."""

    def step(m, x, *_):
        return sum(getattr(m, f"l{place}")(x).sin().sum(-1) for place in range(len(features)))[..., None] * x

    inside = {f"l{place}": linear(count) for place, count in enumerate(features)}
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [joined_products.joined_products])
    found = [[len(each) for each in call.arguments["weights"]] for call in calls_of(recording, marks.joined_linear)]
    assert found == joined


@pytest.mark.parametrize(
    "how", ("bias", "residual", "activation", "x", "norm", "alignment", "batch", "tokens", "written")
)
def test_products_that_are_not_of_one_row_or_more_than_products_stay_apart(how):
    def step(m, x, *_):
        if how == "written":
            x = x * 2
            one = m.one(x)
            x.add_(1)
            return one + m.two(x) * x
        of_two = x.sin() if how == "x" else m.norm(x) if how == "norm" else x
        one, two = m.one(x), m.two(of_two)
        two = two + x if how == "residual" else two
        return m.out(one.cos() * (two.relu() if how == "activation" else two.sin()))

    width = 17 if how == "alignment" else WIDTH
    inside = dict(one=linear(width, bias=how == "bias"), two=linear(width), out=linear(given=width))
    inside |= dict(norm=nn.RMSNorm(WIDTH, eps=1e-6))
    recording, model = recorded(step, 2 if how == "batch" else 1, 2 if how == "tokens" else 1, **inside)
    assert_same(recording, model, PASSES)
    assert not calls_of(recording, marks.joined_linear) and len(calls_of(recording, marks.linear)) >= 2
