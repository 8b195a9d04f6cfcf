"""Everything that an architecture file declares exists in the installed transformers, and a wrong name is noticed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from architecture_checks import CORE
from models import CPU, assert_same_instances, build, instances, require_native

import hf_fastpath
from hf_fastpath import UnsupportedModelError
from hf_fastpath.architecture import Architecture, architectures
from hf_fastpath.patching import analyse, passed_twins, selftest
from hf_fastpath.patching.twin_config import twin_config

over_all = pytest.mark.parametrize("architecture", architectures(), ids=lambda architecture: architecture.name)
LLAMA = next(architecture for architecture in architectures() if architecture.name == "llama")
ROLES = ("causal_lm", "layer", "attention", "mlp", "norm")


def misdeclared(architecture: Architecture, role: str) -> Architecture:
    """Return ``architecture`` with a class name for ``role`` that no module has."""
    if role == "causal_lm":
        return replace(architecture, causal_lm="NoSuchClass")
    return replace(architecture, **{role: replace(getattr(architecture, role), class_name="NoSuchClass")})


@over_all
def test_classes_exist(architecture):
    architecture.check_classes()


@pytest.mark.parametrize("role", ROLES)
@over_all
def test_wrong_class_name_is_named(architecture, role):
    with pytest.raises(UnsupportedModelError, match=f"'{architecture.name}': .* has no class 'NoSuchClass'"):
        misdeclared(architecture, role).check_classes()


@pytest.mark.parametrize(
    "architecture", [pytest.param(a.name, marks=[] if a.name in CORE else pytest.mark.full) for a in architectures()]
)
def test_self_test_passes(architecture, monkeypatch):
    """patch() does this on a version of transformers that was not tested."""
    require_native(CPU)
    kept = []
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    monkeypatch.setattr(passed_twins, "keep", lambda *what: kept.append(what))
    assert selftest.run(build(architecture)) == (None, 0.0)
    assert len(kept) == 1


def test_twin_has_layers_of_every_kind():
    layers = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
    small = twin_config(build("gemma3_text", **layers).config)
    assert (small.num_hidden_layers, small.layer_types) == (2, ["sliding_attention", "full_attention"])


def test_wrong_module_is_named():
    wrong = replace(LLAMA, module="transformers.models.llama.no_such_module")
    with pytest.raises(UnsupportedModelError, match="'llama': there is no module 'transformers.models.llama.no_such"):
        wrong.check_classes()


@pytest.mark.parametrize("role", ROLES)
def test_patch_with_a_wrong_class_name_fails(role, monkeypatch):
    """The error comes here at the latest, and the model is as it was."""
    model = build("llama")
    before = instances(model)
    monkeypatch.setattr(analyse, "architectures", lambda: (misdeclared(LLAMA, role),))
    with pytest.raises(UnsupportedModelError, match="'llama': .* has no class 'NoSuchClass'"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def test_collecting_architectures_imports_no_model_code():
    script = "import sys, hf_fastpath.architecture as a; a.architectures(); print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stdout + result.stderr
