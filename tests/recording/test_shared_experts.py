"""The pass that lets the experts' kernels run a shared expert: what it finds, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, Experts, Of, assert_same, calls_of, linear, names, parameter, recorded
from torch import nn

from hf_fastpath.choices import NormKind
from hf_fastpath.ops.fused_experts import MAX_TOP_K
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES

functional = nn.functional
#: features of a chosen expert
INNER = 8


class Shared(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int = 2 * INNER, bias: bool = False):
        super().__init__()
        self.gate, self.up, self.down = linear(width), linear(width), linear(WIDTH, width, bias=bias)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def rms(m, x, *_):
    return m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def mixture(m, x, shared=lambda m, y: m.shared(y), total=lambda routed, shared: routed + shared):
    """A row and, added to it, what experts and a shared one make of its norm."""
    y = m.norm(x)
    rows = y.view(-1, WIDTH)
    weights, ids = m.router(rows).softmax(-1, dtype=torch.float32).topk(2, dim=-1)
    routed = m.experts(rows, ids, weights.to(x.dtype)).view(x.shape)
    return x + total(routed, shared(m, y))


def shut(m, y):
    """A shared expert behind a gate, as of Qwen2-MoE."""
    return torch.sigmoid(m.shut(y)) * m.shared(y)


def record_mixture(batch=1, query_len=1, width=2 * INNER, bias=False, activation=None, **options):
    inside = dict(
        router=linear(6), experts=Experts(act_fn=activation), norm=Of(rms, weight=parameter(WIDTH)), shut=linear(1)
    )
    return recorded(lambda m, x, *_: mixture(m, x, **options), batch, query_len, shared=Shared(width, bias), **inside)


@pytest.mark.each_pair
@pytest.mark.parametrize(
    "total",
    (lambda routed, shared: routed + shared, lambda routed, shared: shared + routed),
    ids=("behind", "in front"),
)
@pytest.mark.parametrize("shared", (lambda m, y: m.shared(y), shut), ids=("open", "shut"))
@pytest.mark.parametrize("width", (INNER, 3 * INNER))
def test_shared_experts(width, shared, total):
    recording, model = record_mixture(width=width, shared=shared, total=total)
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.routed_experts)
    weights = {name: call.arguments[f"shared_{name}_weight"] for name in ("gate", "up", "down")}
    assert {name: each.data_ptr() for name, each in weights.items()} == {
        name: getattr(model.body.shared, name).weight.data_ptr() for name in weights
    }
    assert (call.arguments["shared_logits"] is not None) == (shared is shut)
    assert call.arguments["residual"] is not None and call.arguments["norm"].kind == NormKind.RMS
    assert not {"gated", "sigmoid_gated", "add", "mul", "normed"} & set(names(recording))


@pytest.mark.parametrize(
    "options",
    (
        dict(batch=2),
        dict(query_len=3),
        dict(width=INNER + 1),
        dict(width=(MAX_TOP_K - 1) * INNER),
        dict(bias=True),
        dict(activation=nn.GELU()),
        dict(shared=lambda m, y: m.shared(2 * y)),
        dict(shared=lambda m, y: m.shared(y).relu()),
        dict(shared=lambda m, y: m.shared(y) * m.shut(y)),
        dict(total=lambda routed, shared: routed * shared),
        dict(total=lambda routed, shared: routed + shared + shared.sin()),
        dict(total=lambda routed, shared: routed + shared + routed.sin()),
    ),
    ids=(
        *("two rows", "three tokens", "another width", "too many places", "a bias", "another activation"),
        *("another row", "an activation behind", "another gate", "a product", "the shared read twice"),
        "the others read twice",
    ),
)
def test_others_stay(options):
    recording, model = record_mixture(**options)
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.routed_experts)
    assert "shared_gate_weight" not in call.arguments and calls_of(recording, marks.gated)
