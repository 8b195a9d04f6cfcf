"""Experts behind transformers' seam become one call, in every layout that kernels have; others stay."""

from __future__ import annotations

import pytest
from recordings import WIDTH, Experts, assert_same, calls_of, linear, names, recorded, softmax_first
from torch import nn

from hf_fastpath.choices import Activation
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, experts

functional = nn.functional


class _InFloat32(Experts):
    """A gate that computes in float32, as Beam's."""

    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up.float()).to(gate_up.dtype)


class _Bounded(Experts):
    """A gate whose values are bounded, as DeepSeek-V4's."""

    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up.clamp(max=7.0))


TRANSPOSED = dict(is_transposed=True)


#: name -> experts, and the arguments of the op that they are besides their weights
LAYOUTS = {
    "plain": (Experts(), dict(activation=Activation.SILU)),
    "gelu": (Experts(act_fn=nn.GELU()), dict(activation=Activation.GELU)),
    "tanh": (Experts(act_fn=nn.GELU("tanh")), dict(activation=Activation.GELU_TANH)),
    "a function": (Experts(act_fn=functional.silu), dict(activation=Activation.SILU)),
    "float32": (_InFloat32(), dict(activation=Activation.SILU)),
    "no gate": (Experts(act_fn=lambda x: x.relu().square(), has_gate=False), dict(activation=Activation.SQUARED_RELU)),
    "transposed": (Experts(**TRANSPOSED), dict(activation=Activation.SILU, transposed=True, concatenated=True)),
    "in turn": (
        Experts(**TRANSPOSED, is_concatenated=False, has_bias=True),
        dict(activation=Activation.SILU, transposed=True, concatenated=False),
    ),
}


def _with_experts(module):
    """A recording of experts that a router chooses."""

    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return m.experts(rows, *softmax_first(m.router(rows))).view(x.shape)

    return recorded(step, 2, 1, router=linear(6), experts=module)


@pytest.mark.parametrize("case", LAYOUTS)
def test_experts_of_a_module(case):
    module, wanted = LAYOUTS[case]
    recording, model = _with_experts(module)
    assert len(calls_of(recording, marks.other_experts)) == 1
    experts.stacked_experts(recording, model)
    (call,) = calls_of(recording, marks.experts)
    held = {id(each): name for name, each in module.named_parameters()}
    weights = {role for role, value in call.arguments.items() if id(value) in held}
    assert len(weights) == len(held)
    assert {name: call.arguments[name] for name in call.arguments.keys() - weights - {"x", "ids", "weights"}} == wanted


OTHER_EXPERTS = {
    "bounded": _Bounded(),
    "another activation": Experts(act_fn=nn.Tanh()),
    "no gate, another activation": Experts(act_fn=nn.GELU(), has_gate=False),
    "biases of plain weights": Experts(has_bias=True),
    "weights of float64": Experts().double(),
}


@pytest.mark.parametrize("case", OTHER_EXPERTS)
def test_other_experts_stay(case):
    recording, model = _with_experts(OTHER_EXPERTS[case])
    experts.stacked_experts(recording, model)
    assert len(calls_of(recording, marks.other_experts)) == 1 and not calls_of(recording, marks.experts)


def test_experts_add_a_residual():
    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return x + m.experts(rows, *softmax_first(m.router(rows))).view(x.shape)

    recording, model = recorded(step, router=linear(6), experts=Experts())
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.routed_experts)
    assert call.arguments["residual"] is not None and "add" not in names(recording)
