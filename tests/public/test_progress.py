"""Lines on the terminal: for what takes long, and never out of generate()."""

from __future__ import annotations

import io
import sys
import time

import pytest
from models import CPU, SHORT, fresh, prompt

import hf_fastpath
from hf_fastpath import progress


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def terminal(monkeypatch):
    """Puts a stream in the place of stderr, and makes everything take long."""

    def install(is_terminal: bool = True) -> Terminal:
        stream = Terminal(is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        return stream

    return install


def wait_for(stream: Terminal, text: str) -> bool:
    """Whether ``text`` appears; the line comes from a thread."""
    deadline = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.001)
    return text in stream.getvalue()


def test_a_long_block_is_announced_on_a_terminal(terminal):
    stream = terminal()
    with progress.announced("counting"):
        assert wait_for(stream, "hf_fastpath: counting ...\n")
    assert stream.getvalue().count("counting") == 1


def test_nothing_is_announced_elsewhere_or_when_it_is_quick(terminal, monkeypatch):
    stream = terminal(is_terminal=False)
    with progress.announced("counting"):
        time.sleep(0.02)
    stream.is_terminal = True
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.announced("counting"):
        pass
    with pytest.raises(ZeroDivisionError), progress.announced("failing"):
        _ = 1 // 0
    time.sleep(0.1)
    assert stream.getvalue() == ""


def test_verify_says_which_row_it_is_at(terminal):
    _, ours = fresh("llama")
    stream = terminal()
    hf_fastpath.verify(ours, prompt(CPU), max_new_tokens=4)
    assert "hf_fastpath: verify: long, 512 tokens and 4 more ...\n" in stream.getvalue()


def test_generate_prints_nothing(terminal, capfd):
    _, ours = fresh("llama")
    stream = terminal()
    capfd.readouterr()
    ours.generate(prompt(CPU, 2), **SHORT)
    ours.generate(prompt(CPU, 17), **SHORT)  # stock's loop
    assert stream.getvalue() == "" and capfd.readouterr() == ("", "")
