"""Digests of imported modules follow what the modules hold, although an unchanged module is not looked at twice."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch
from transformers.models.llama import modeling_llama

from hf_fastpath import compat

NAME = modeling_llama.__name__
NORM = modeling_llama.LlamaRMSNorm


def other(*given):
    return given


def other_function(monkeypatch):
    monkeypatch.setattr(modeling_llama, "rotate_half", other)


def new_function(monkeypatch):
    monkeypatch.setattr(modeling_llama, "other", other, raising=False)


def other_method(monkeypatch):
    monkeypatch.setattr(NORM, "forward", other)


def new_method(monkeypatch):
    monkeypatch.setattr(NORM, "other", other, raising=False)


def other_property(monkeypatch):
    monkeypatch.setattr(NORM, "training", property(other), raising=False)


def static_method(monkeypatch):
    monkeypatch.setattr(NORM, "forward", staticmethod(other))


def wrapped(monkeypatch):
    monkeypatch.setattr(modeling_llama.rotate_half, "__wrapped__", other, raising=False)


CHANGES = (other_function, new_function, other_method, new_method, other_property, static_method, wrapped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_another_digest_and_taking_it_back_the_same_one(change, monkeypatch):
    first = compat.module_digest(NAME)
    assert first is not None and compat.module_digest(NAME) == first
    with monkeypatch.context() as patch:
        change(patch)
        changed = compat.module_digest(NAME)
        assert changed is not None and changed != first and compat.module_digest(NAME) == changed
    assert compat.module_digest(NAME) == first


def test_code_that_no_file_has_is_another_digest(monkeypatch):
    first = compat.module_digest(NAME)
    monkeypatch.setattr(modeling_llama.rotate_half, "__code__", other.__code__)
    assert compat.module_digest(NAME) not in (None, first)


def test_code_of_the_file_as_it_was_before_has_no_digest(monkeypatch):
    """A function with the file's name and code that the file does not hold was imported from an older one."""
    assert compat.module_digest(NAME) is not None
    code = compile("def older():\n    pass\n", modeling_llama.__file__, "exec").co_consts[0]
    monkeypatch.setattr(modeling_llama, "older", types.FunctionType(code, vars(modeling_llama)), raising=False)
    assert compat.module_digest(NAME) is None
    monkeypatch.undo()
    assert compat.module_digest(NAME) is not None


def test_a_function_that_is_gone_changes_nothing_that_runs(monkeypatch):
    first = compat.module_digest(NAME)
    monkeypatch.delattr(modeling_llama, "rotate_half")
    assert compat.module_digest(NAME) == first


def test_a_module_that_is_imported_anew_is_looked_at(monkeypatch):
    first = compat.module_digest(NAME)
    copied = types.ModuleType(NAME)
    vars(copied).update(vars(modeling_llama), rotate_half=other)
    monkeypatch.setitem(sys.modules, NAME, copied)
    assert compat.module_digest(NAME) != first


def test_what_a_program_puts_into_a_module_is_not_held(monkeypatch):
    tensor = torch.zeros(1)
    gone = weakref.ref(tensor)

    def closure(*given, held=tensor):
        return held

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "rotate_half", closure)
        assert compat.module_digest(NAME) is not None
    del closure, tensor
    gc.collect()
    assert gone() is None


def test_no_attribute_of_an_entry_is_asked_for(monkeypatch):
    """An entry may be a module that is imported when it is needed, and that is not installed."""

    class Lazy:
        def __getattr__(self, name):
            raise ImportError(f"no module for {name}")

    monkeypatch.setattr(NORM, "lazy", Lazy(), raising=False)
    monkeypatch.setattr(modeling_llama, "lazy", Lazy(), raising=False)
    assert compat.module_digest(NAME) is not None
