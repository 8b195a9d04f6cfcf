"""Routers: whom recorded calls choose and with which weights, and what is like a router but not the same."""

from __future__ import annotations

import copy

import pytest
import torch
from causal_lm_types import small_config
from models import require_native
from recordings import WIDTH, Decoder, Experts, Of, assert_same, calls_of, linear, names, recorded, softmax_first
from test_recorded_families import assert_equal, plans_of
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.choices import Scoring
from hf_fastpath.ops.choose_experts import MAX_EXPERTS
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import experts, products, routers, views
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record

COUNT = 12
PASSES = [experts.stacked_experts, views.constant_views, products.unflattened, views.no_change, routers.routers]


def routed(route, **inside):
    """A recording of experts that ``route`` chooses of scores: it gives ids and weights."""

    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return m.experts(rows, *route(m, m.router(rows))).view(x.shape)

    return recorded(step, 2, 1, router=linear(COUNT), experts=Experts(COUNT), **inside)


def divided(weights, eps=0.0):
    return weights / (weights.sum(-1, keepdim=True) + eps)


def softmax(m, scores):
    return softmax_first(scores)


def softmax_divided(m, scores):
    ids, weights = softmax_first(scores)
    return ids, divided(weights)


def softmax_behind(m, scores):
    weights, ids = scores.topk(2, dim=-1, sorted=False)
    return ids, weights.softmax(-1)


def sigmoids(m, scores):
    weights, ids = scores.sigmoid().topk(3, dim=-1)
    return ids, weights


def doubled(m, scores):
    ids, weights = softmax_first(scores)
    return ids, 2 * weights


def of_groups(m, ranked, groups, kept, tops):
    """Hide all experts but those of the best groups."""
    parts = ranked.view(-1, groups, COUNT // groups)
    best = parts.topk(tops, dim=-1)[0].sum(dim=-1) if tops > 1 else parts.max(dim=-1).values
    mask = torch.zeros_like(best).scatter_(1, best.topk(kept, dim=-1, sorted=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, COUNT // groups).reshape(-1, COUNT)
    return ranked.masked_fill(~mask.bool(), -torch.inf)


def as_deepseek_v3(m, scores):
    scores = scores.float().sigmoid()
    ids = of_groups(m, scores + m.correction, 4, 2, 2).topk(3, dim=-1, sorted=False)[1]
    return ids, divided(scores.gather(1, ids), 1e-20) * 2.5


def as_deepseek_v2(m, scores):
    weights, ids = of_groups(m, scores.softmax(-1, dtype=torch.float32), 6, 3, 1).topk(4, dim=-1, sorted=False)
    return ids, weights * 16.0


def as_lfm2(m, scores):
    scores = scores.sigmoid()
    ids = (scores + m.correction).topk(2, dim=-1)[1]
    return ids, divided(scores.gather(1, ids), 1e-6)


def as_ernie(m, scores):
    scores = scores.softmax(-1, dtype=torch.float32)
    ids = (scores + m.wide_correction.squeeze()).topk(4, dim=-1)[1]
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


SIGMOID = dict(scoring=Scoring.SIGMOID)


@pytest.mark.parametrize(
    ("route", "expected"),
    (
        (softmax, dict(normalized=False)),
        (softmax_divided, dict(normalized=True)),
        (softmax_behind, dict(normalized=True)),
        (sigmoids, dict(normalized=False, **SIGMOID)),
        (doubled, dict(normalized=False, factor=2.0)),
        (as_deepseek_v3, dict(normalized=True, num_groups=4, top_groups=2, factor=2.5, sum_eps=1e-20, **SIGMOID)),
        (as_deepseek_v2, dict(normalized=False, num_groups=6, top_groups=3, group_tops=1, factor=16.0)),
        (as_lfm2, dict(normalized=True, sum_eps=1e-6, **SIGMOID)),
        (as_ernie, dict(normalized=True)),
    ),
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("zeros", (False, True))
def test_routers(zeros, route, expected):
    """Biases of new models are zeros, which say nothing about what a bias does."""
    bias = torch.zeros(COUNT) if zeros else torch.randn(COUNT) / 8
    recording, model = routed(route, correction=nn.Parameter(bias), wide_correction=nn.Parameter(bias[None]))
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.routed_experts)
    given = dict(call.arguments)
    found = given.pop("correction_bias", None)
    for name in ("x", "logits", "gate_up_weight", "down_weight", "activation", "top_k", "rounded"):
        given.pop(name)
    assert given == expected
    own = {as_deepseek_v3: "correction", as_lfm2: "correction", as_ernie: "wide_correction"}.get(route)
    assert (found is None) == (own is None)
    assert own is None or found.data_ptr() == getattr(model.body, own).data_ptr()
    assert not {"topk", "_softmax", "sigmoid", "sum", "div", "gather", "scatter"} & set(names(recording))


def smallest(m, scores):
    weights, ids = (-scores).softmax(-1).topk(2, dim=-1)
    return ids, weights


def in_weights(m, scores):
    weights, ids = (scores.sigmoid() + m.correction).topk(2, dim=-1)
    return ids, weights


def on_logits(m, scores):
    ids = (scores + m.correction).topk(2, dim=-1)[1]
    return ids, scores.gather(1, ids).sigmoid()


def multiplied(m, scores):
    scores = scores.softmax(-1)
    ids = (scores * m.correction).topk(2, dim=-1)[1]
    return ids, scores.gather(1, ids)


def two_biases(m, scores):
    scores = scores.sigmoid()
    ids = (scores + m.correction + m.wide_correction).topk(2, dim=-1)[1]
    return ids, scores.gather(1, ids)


def hidden_by_zero(m, scores):
    """Experts of other groups are chosen if the others' scores are negative."""
    scores = scores.sigmoid()
    ranked = of_groups(m, scores + m.correction, 4, 2, 2)
    ids = ranked.masked_fill(ranked == -torch.inf, 0.0).topk(3, dim=-1)[1]
    return ids, scores.gather(1, ids)


def of_three(m, scores):
    weights, ids = of_groups(m, scores.softmax(-1), 3, 1, 3).topk(2, dim=-1)
    return ids, weights


def root(m, scores):
    scores = nn.functional.softplus(scores).sqrt()
    weights, ids = scores.topk(2, dim=-1)
    return ids, divided(weights)


@pytest.mark.parametrize(
    "route",
    (smallest, in_weights, on_logits, multiplied, two_biases, hidden_by_zero, of_three, root),
    ids=lambda each: each.__name__,
)
def test_other_routers_stay(route):
    bias = torch.randn(COUNT)
    recording, model = routed(route, correction=nn.Parameter(bias), wide_correction=nn.Parameter(-bias[None]))
    assert_same(recording, model, PASSES)
    assert not calls_of(recording, marks.routed_experts) and len(calls_of(recording, marks.experts)) == 1


@pytest.mark.parametrize(
    ("dtype", "count", "bias", "is_one"),
    (
        (torch.bfloat16, COUNT, False, True),
        (torch.float32, COUNT, False, True),
        (torch.float32, MAX_EXPERTS + 1, False, False),
        (torch.bfloat16, MAX_EXPERTS + 1, False, True),
        (torch.float16, COUNT, False, False),
        (torch.float32, COUNT, True, False),
    ),
)
def test_products_in_float32(dtype, count, bias, is_one):
    """Of rows in bfloat16, and of a matrix that is cast, or kept in float32 and no larger than a router's."""

    def step(m, x, *_):
        return nn.functional.linear(x.float(), m.router.weight.float(), m.router.bias)

    model = Decoder(Of(step, router=linear(count, bias=bias))).bfloat16()
    model.body.router.to(dtype).bias = nn.Parameter(torch.randn(count)) if bias else None
    recording = record(Skeleton(model), 1, 1)
    for each in (products.unflattened, views.no_change, routers.router_logits):
        each(recording, model)
    recording.drop_unread()
    found = calls_of(recording, marks.router_logits)
    assert [each.arguments["weight"].data_ptr() for each in found] == [model.body.router.weight.data_ptr()] * is_one
    assert [recording.fact(each.arguments["x"]).dtype for each in found] == [torch.bfloat16] * is_one
    assert ("_to_copy" not in names(recording)) == is_one


@pytest.mark.parametrize("num_groups", (1, 2, 4))
def test_a_bias_that_changes_is_read(num_groups):
    """Of DeepSeek-V3: tokens are stock's with zeros, and with biases that are set after patching, in place or not."""
    require_native(torch.device("cpu"))
    config = small_config("deepseek_v3")
    config.n_routed_experts = config.num_local_experts = 8
    config.n_group, config.topk_group, config.num_experts_per_tok = num_groups, -(-num_groups // 2), 2
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).eval()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for change in (0.0, 2.0, -3.0):
        for model in (stock, ours):
            for name, each in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    torch.manual_seed(7)
                    each.copy_(change * torch.randn(each.shape))
        assert_equal(ours, stock)
    names = {each.removesuffix(".default") for each in plans_of(ours)[0].program.op_names()}
    assert "routed_experts" in names and not {"topk", "sigmoid", "gather"} & names
