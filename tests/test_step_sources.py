"""Both kinds of models have what plans, prompts, loops, caches and reports ask of a source of steps."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest
from causal_lm_types import small_model
from models import build
from step_sources import DESCRIBED, RECORDED
from torch import nn

from hf_fastpath.architecture import architectures
from hf_fastpath.decode.sources.described import model_part
from hf_fastpath.decode.sources.step_source import StepSource
from hf_fastpath.patching import families
from hf_fastpath.recording.placed_model import RecordedAlone

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = {
    name: each
    for name, each in vars(StepSource).items()
    if isinstance(each, property | FunctionType) and not name.startswith("_")
}
#: what is known of an instance alone
_OF_INSTANCES = {
    "module",
    "architecture",
    "windows",
    "is_multimodal",
    "has_encoder",
    "token_shape",
    "by_length",
    "prompts",
}


def described() -> StepSource:
    model = build("llama")
    (part,) = filter(None, (model_part(each, model) for each in architectures()))
    return part


def recorded() -> StepSource:
    model = small_model("glm4")
    return RecordedAlone(model).model_part(model)


@pytest.mark.parametrize("kind", (*DESCRIBED, *RECORDED))
def test_every_kind_has_every_member(kind):
    missing = {name for name in MEMBERS if inspect.getattr_static(kind, name, None) is None and not hasattr(kind, name)}
    assert missing <= _OF_INSTANCES, missing


@pytest.mark.parametrize("make", (described, recorded))
def test_every_member_can_be_read(make):
    part = make()
    for name, each in MEMBERS.items():
        value = getattr(part, name)
        assert isinstance(each, property) or callable(value), name
    for name in ("reason", "other_reason", "lasting_reason", "making_reason"):
        assert getattr(part, name)() is None
    assert isinstance(part.source, nn.Module) and part.owner(part.head) is part.head
    assert len(part.layers) == len(part.kinds) == len(part.windows) == len(part.layer_devices)
    groups = [linear for layer in part.projection_groups() for linears in layer for linear in linears]
    assert set(map(id, groups)) <= set(map(id, part.projections()))


def test_methods_take_what_the_interface_says():
    for name, each in MEMBERS.items():
        if isinstance(each, FunctionType):
            wanted = list(inspect.signature(each).parameters)
            for kind in (*DESCRIBED, *RECORDED):
                assert list(inspect.signature(getattr(kind, name)).parameters) == wanted, (kind, name)


def test_every_member_says_what_it_is():
    for name, each in MEMBERS.items():
        assert (inspect.getdoc(each) or "").endswith("."), name


def test_nobody_asks_which_kind_a_source_is():
    """Where the kinds differ, a member says in what. The count is ARCHITECTURE.md's."""
    asked = re.compile(r"\bis_recorded\b|isinstance\([^()]*\b(?:DescribedModel|ModelInRoles|RecordedModel)\b")
    found = [str(path) for path in (ROOT / "hf_fastpath").rglob("*.py") if asked.search(path.read_text())]
    assert not found, found


def test_every_member_is_asked_for():
    """Outside of the kinds' own files: the interface has nothing that nobody needs."""
    own = {"step_source.py", "described.py", "structure.py", "local_models.py", "offloaded.py", "shards.py"}
    files = [
        *(path for path in (ROOT / "hf_fastpath").rglob("*.py") if path.parent.name != "recording"),
        *(ROOT / "hf_fastpath/recording").glob("proof.py"),
    ]
    text = "\n".join(path.read_text() for path in files if path.name not in own)
    unused = [name for name in MEMBERS if not re.search(rf"\.{name}\b", text)]
    assert not unused, unused


def test_files_give_families_of_their_models():
    model = build("llama")
    (family,) = families.of_files(model, architectures(), None)
    assert family.architecture.name == "llama"
    assert not families.of_files(small_model("glm4"), architectures(), None)


@pytest.mark.full
def test_types_by_mypy():
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    said, errors, status = api.run(["--config-file", str(ROOT / "pyproject.toml"), str(ROOT / "tests/step_sources.py")])
    assert status == 0, said + errors
