"""Environment variables that switch something on or off follow one rule."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hf_fastpath import switches
from hf_fastpath.native import loader, toolchain

PACKAGE = Path(switches.__file__).parent
OFF = ("", "0", "false", "no", "off", "False", "OFF", " no ")
ON = ("1", "true", "yes", "on", "True", "ON", "2")


@pytest.mark.parametrize(("value", "expected"), [*((value, False) for value in OFF), *((value, True) for value in ON)])
def test_what_is_on(value, expected, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_SOMETHING", value)
    for default in (False, True):
        assert switches.is_on("HF_FASTPATH_SOMETHING", default) == expected
    monkeypatch.delenv("HF_FASTPATH_SOMETHING")
    assert switches.is_on("HF_FASTPATH_SOMETHING", True) and not switches.is_on("HF_FASTPATH_SOMETHING")


@pytest.mark.parametrize(("value", "off"), [(None, False), *((v, True) for v in OFF), *((v, False) for v in ON)])
def test_native(value, off, monkeypatch):
    monkeypatch.delenv("HF_FASTPATH_NATIVE", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_FASTPATH_NATIVE", value)
    assert loader.switched_off() == off


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        *[(None, "auto"), ("auto", "auto"), ("force", "force"), ("FORCE", "force"), ("never", "never")],
        *((value, "never") for value in OFF),
        *((value, "auto") for value in ON if value != "2"),
    ],
)
def test_build(value, mode, monkeypatch):
    """Switched on or off, it means what it means by its names."""
    monkeypatch.delenv("HF_FASTPATH_BUILD", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_FASTPATH_BUILD", value)
    assert toolchain.build_mode() == mode


def test_a_mode_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_BUILD", "2")
    with pytest.raises(ValueError, match="HF_FASTPATH_BUILD is '2', expected one of auto, never, force, or 0 for nev"):
        toolchain.build_mode()


#: variables that hold a list, a folder, or the name of an instruction set
VALUES = {"HF_FASTPATH_CACHE", "HF_FASTPATH_TARGETS", "HF_FASTPATH_CUDA_ARCHS"}


def test_no_switch_is_read_in_another_way():
    """Whatever reads a variable of the package from the environment itself reads a value, not a switch."""
    found = set()
    for path in (*PACKAGE.rglob("*.py"), PACKAGE.parent / "setup.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.Subscript) and "environ" in ast.dump(node):
                found |= {
                    each.value
                    for each in ast.walk(node)
                    if isinstance(each, ast.Constant) and str(each.value).startswith("HF_FASTPATH_")
                }
                if any(isinstance(each, ast.Name) and each.id.isupper() for each in ast.walk(node)):
                    found.add(f"{path.name}: {ast.unparse(node)}")
    assert found == VALUES
