"""Arguments that take one of a few values: names in Python, the numbers of ``csrc`` in schemas."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from hf_fastpath import choices, ops, registry
from hf_fastpath.choices import Activation, Choice
from hf_fastpath.quantization import FORMATS
from hf_fastpath.registry import OpInputError

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KINDS = [
    kind for _, kind in inspect.getmembers(choices, inspect.isclass) if issubclass(kind, Choice) and kind is not Choice
]
#: choice -> the header that C++ has it in, if that is not common/dtype.h
DEFINED = {
    "PackedFormat": "weights/formats.generated.h",
    "InputQuants": "fake_quantize/fake_quantize_params.h",
    "GateActivation": "gated_rms_norm/gated_rms_norm_params.h",
    "Rotation": "latent_attention/latent_attention_params.h",
    "Scoring": "choose_experts/choose_experts_params.h",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_numbers_are_those_of_the_native_code(kind):
    text = (CSRC / DEFINED.get(kind.__name__, "common/dtype.h")).read_text()
    (body,) = re.findall(rf"enum class {kind.__name__} : int \{{(.*?)\}};", text, re.DOTALL)
    native = {label: int(number) for label, number in re.findall(r"k(\w+) = (\d+)", body)}
    if kind is Activation:
        gate = (CSRC / "fused_swiglu/gate.h").read_text()
        native["Sigmoid"] = int(re.search(r"Activation kSigmoid\{(\d+)\};", gate)[1])  # of fused_swiglu only
        for label in ("ClampedSwiglu", "SquaredRelu"):  # of fused_experts only
            native[label] = int(re.search(rf"k{label} = (\d+);", text)[1])
    assert {member.label.replace("_", ""): int(member) for member in kind} == {k.lower(): v for k, v in native.items()}


def test_formats_are_numbered():
    assert [choices.PackedFormat(format.number).label for format in FORMATS.values()] == list(FORMATS)


@pytest.mark.parametrize("name", registry.all_ops())
def test_no_op_takes_a_string(name):
    """torch's conversion of a string for a native kernel leaks it; a number has nothing to free."""
    spec = registry.get(name)
    kinds = {argument.name: str(argument.type) for argument in spec.overload._schema.arguments}
    assert "str" not in " ".join(kinds.values())
    assert {kinds[choice] for choice in spec.choices} <= {"int"}


def test_names_and_numbers_are_the_same_call(device):
    gate, up = torch.randn(2, 3, 40, device=device)
    found = [ops.fused_swiglu(gate, up, given) for given in ("gelu_tanh", 3, Activation.GELU_TANH)]
    found.append(torch.ops.hf_fastpath.fused_swiglu(gate, up, 3))
    found.append(ops.fused_swiglu(gate, up=up, activation="gelu_tanh"))
    assert all(torch.equal(each, found[0]) for each in found)
    assert not torch.equal(ops.fused_swiglu(gate, up), found[0])


@pytest.mark.parametrize("given", ("gelu_new", "GELU", 8, None))
def test_an_unknown_choice_lists_the_known_ones(given):
    x, weight = torch.randn(1, 8), torch.randn(4, 8)
    expected = f"activation is {given!r}, expected one of none, relu, silu, gelu_tanh, gelu"
    with pytest.raises(OpInputError, match=re.escape(f"hf_fastpath.ops.gemv: {expected}")):
        ops.gemv(x, weight, activation=given)


def test_a_choice_that_an_op_does_not_have_is_named():
    x = torch.randn(1, 8)
    with pytest.raises(OpInputError, match="activation is 'relu', expected one of silu, gelu_tanh, gelu, sigmoid"):
        ops.fused_swiglu(x, x, "relu")
