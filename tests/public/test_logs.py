"""Where the package says what: the report on stderr, all else through a logger that follows transformers'."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import CPU, build, fresh, require_native
from said import lines
from torch import nn
from transformers.utils import logging as theirs

import hf_fastpath
from hf_fastpath import logs, progress
from hf_fastpath.native import loader

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def partly_stock(architecture: str = "gpt2") -> nn.Module:
    """Make a model of which patch() leaves attention to stock code, and warns."""
    require_native(CPU)
    return build(architecture, **(dict(n_embd=84, n_head=4) if architecture == "gpt2" else dict(head_dim=514)))


@pytest.fixture
def verbosity():
    """Put transformers' verbosity back at the end."""
    before = theirs.get_verbosity()
    yield theirs.set_verbosity
    theirs.set_verbosity(before)


@pytest.mark.parametrize("quiet", (False, True))
def test_the_report_goes_to_stderr(quiet, capsys):
    _, ours = fresh("llama")
    hf_fastpath.unpatch(ours)
    capsys.readouterr()
    hf_fastpath.patch(ours, quiet=quiet)
    said = capsys.readouterr()
    assert said.out == "" and said.err == ("" if quiet else f"{hf_fastpath.report(ours)}\n")


@pytest.mark.parametrize("how", ("patched", "load_packed", "weights"))
def test_nothing_ever_goes_to_stdout(how, capsys, tmp_path):
    require_native(CPU)
    model = build("llama")
    if how == "patched":
        with hf_fastpath.patched(model):
            pass
    else:
        hf_fastpath.patch(model, weights="int8")
    if how == "load_packed":
        hf_fastpath.save_packed(model, tmp_path)
        hf_fastpath.load_packed(tmp_path)
    said = capsys.readouterr()
    assert said.out == "" and "hf_fastpath on llama" in said.err


@pytest.mark.each_value
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("architecture", ("gpt2", "llama"))
def test_warnings_follow_the_verbosity(architecture, level, verbosity, capsys):
    model = partly_stock(architecture)
    verbosity(level)
    assert logs.logger.getEffectiveLevel() == level
    hf_fastpath.patch(model, quiet=True)
    said = capsys.readouterr()
    assert said.out == "" and ("keep stock code (unsupported_head_dim)" in said.err) == (level <= 30)
    assert "[transformers]" not in said.err


def test_a_level_of_its_own_comes_first(verbosity, capsys):
    verbosity(logging.WARNING)
    logs.logger.setLevel(logging.ERROR)
    try:
        hf_fastpath.patch(partly_stock(), quiet=True)
    finally:
        logs.logger.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_handlers_of_transformers_get_the_records(capsys):
    """Those that were added as well, and none on stderr if that one was removed."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.name, record.getMessage()))
    theirs.add_handler(handler)
    theirs.disable_default_handler()
    try:
        logs.say("hf_fastpath: something")
        assert found == [("hf_fastpath", "hf_fastpath: something")] and capsys.readouterr().err == ""
        handler.setLevel(logging.ERROR)
        logs.say("hf_fastpath: something else")
        assert len(found) == 1
    finally:
        theirs.enable_default_handler()
        theirs.remove_handler(handler)
    logs.say("hf_fastpath: something")
    assert capsys.readouterr().err == "hf_fastpath: something\n"


def test_records_go_on_if_those_of_transformers_do(monkeypatch):
    """A handler gets a record once, also one that several loggers have."""
    library, found = logging.getLogger("transformers"), []
    handler = logging.Handler()
    handler.emit = found.append
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    for propagates, more in ((True, []), (False, []), (True, [library]), (True, [library, logs.logger])):
        monkeypatch.setattr(library, "propagate", propagates)
        for each in more:
            monkeypatch.setattr(each, "handlers", [*each.handlers, handler])
        logs.say("hf_fastpath: something")
        assert [record.name for record in found] == ["hf_fastpath"] * propagates
        found.clear()


def test_a_warning_is_given_once():
    with lines() as said:
        for text in ("one", "two", "one"):
            logs.warn(text)
    assert said == ["one", "two"]


def test_work_is_announced_at_once_to_those_who_ask_for_more(verbosity, capsys):
    for level, shown in ((logging.INFO, "hf_fastpath: counting ...\n"), (logging.WARNING, "")):
        verbosity(level)
        with progress.announced("counting"):
            assert capsys.readouterr().err == shown
    assert capsys.readouterr().err == ""


def test_builds_are_said_through_the_logger(monkeypatch, capsys):
    def building(device, directory, archs, mode, targets, progress):
        progress("hf_fastpath: building the CPU kernels, 3 files ...")

    monkeypatch.setattr(loader, "_status", dict.fromkeys(loader.status(), loader.Status("cpu", "reference", "")))
    monkeypatch.setattr(loader, "_packaged", lambda device: None)
    monkeypatch.setattr(loader, "_find_or_build", building)
    monkeypatch.delenv("HF_FASTPATH_NATIVE", raising=False)
    with lines() as said:
        loader.ensure("cpu")
    assert said == ["hf_fastpath: building the CPU kernels, 3 files ..."] and capsys.readouterr().out == ""


#: forks in front of the import of transformers: torch alone takes a second
SCRIPT = """
import os, sys
import torch
sys.path.insert(0, sys.argv[1])
for level in sys.argv[2:]:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(level, file=sys.stderr)
        continue
    os.environ["TRANSFORMERS_VERBOSITY"] = level
    import hf_fastpath
    from transformers import GPT2Config, GPT2LMHeadModel
    hf_fastpath.patch(GPT2LMHeadModel(GPT2Config(n_embd=84, n_head=4, n_layer=2, vocab_size=64)).eval())
    sys.exit()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_variable_of_transformers(tmp_path):
    """Before transformers is imported, and in a program of its own."""
    require_native(CPU)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    environment.pop("TRANSFORMERS_VERBOSITY", None)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "error", ""]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == "", result.stderr
    by_level = result.stderr.split("error\n")
    assert [part.count("hf_fastpath on gpt2") for part in by_level] == [1, 1], result.stderr
    assert ["hf_fastpath: 4 modules keep stock code" in part for part in by_level] == [False, True], result.stderr
