"""Lines on the terminal: they appear for work that takes long, and never from generate()."""

from __future__ import annotations

import io
import sys
import time

import pytest
from models import CPU, SHORT, fresh, prompt, require_native
from transformers.utils import logging

import hf_fastpath
from hf_fastpath import progress
from hf_fastpath.bench import generate
from hf_fastpath.check.quality import compare_formats


class Terminal(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def terminal(monkeypatch):
    """Put a stream in place of stderr, and make everything take long."""

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


def test_a_bar_counts_on_a_terminal(terminal):
    """The bar also appears while the first step is not done; when the block ends, the line is empty again."""
    stream = terminal()
    with progress.counted(3, "counting") as bar:
        assert wait_for(stream, "counting:   0%")
        for _ in range(3):
            bar.update()
    assert "0/3 [" in stream.getvalue() and stream.getvalue().endswith("\r")


def test_no_bar_elsewhere_or_when_it_is_quick_or_quiet(terminal, monkeypatch):
    stream = terminal(is_terminal=False)
    with progress.counted(1, "counting") as bar:
        time.sleep(0.02)
        bar.update()
    stream.is_terminal = True
    with progress.counted(1, "counting", quiet=True) as bar:
        time.sleep(0.02)
        bar.update()
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.counted(1, "counting") as bar:
        bar.update()
    with pytest.raises(ZeroDivisionError), progress.counted(1, "failing"):
        _ = 1 // 0
    time.sleep(0.1)
    assert stream.getvalue() == ""


def test_no_bar_if_those_of_transformers_are_off(terminal, monkeypatch):
    stream = terminal()
    monkeypatch.setattr(logging, "is_progress_bar_enabled", lambda: False)
    with progress.counted(1, "counting") as bar:
        time.sleep(0.02)
        bar.update()
    assert stream.getvalue() == ""


def counts_while(terminal, monkeypatch, call) -> str:
    """Return what a terminal shows of a bar whose every step is drawn."""
    stream = terminal()
    real = progress.tqdm

    def drawn_at_once(**options):
        return real(**options | dict(delay=0, mininterval=0, miniters=1))

    monkeypatch.setattr(progress, "tqdm", drawn_at_once)
    call()
    return stream.getvalue()


def test_verify_says_which_row_it_is_at(terminal, monkeypatch):
    _, ours = fresh("llama")
    shown = counts_while(terminal, monkeypatch, lambda: hf_fastpath.verify(ours, prompt(CPU), max_new_tokens=4))
    assert "hf_fastpath: verify, long" in shown and "4/4 [" in shown


def test_quantizing_counts_layers(terminal, monkeypatch, capsys):
    require_native(CPU)
    stock, _ = fresh("llama")
    shown = counts_while(terminal, monkeypatch, lambda: hf_fastpath.patch(stock, weights="int8"))
    assert "hf_fastpath: int8 weights, layers" in shown and "2/2 [" in shown
    hf_fastpath.unpatch(stock)
    assert counts_while(terminal, monkeypatch, lambda: hf_fastpath.patch(stock, weights="int8", quiet=True)) == ""


def test_comparing_formats_counts_them(terminal, monkeypatch):
    require_native(CPU)
    stock, _ = fresh("llama")
    shown = counts_while(terminal, monkeypatch, lambda: compare_formats(stock, prompt(CPU), ["int8"]))
    assert "hf_fastpath: int8 weights" in shown and "2/2 [" in shown


def test_bench_counts_rounds(terminal, monkeypatch, capsys):
    require_native(CPU)
    given = "--model tiny --device cpu --dtype fp32 --engines ours --context 16 --new-tokens 4 --repeats 2"
    shown = counts_while(terminal, monkeypatch, lambda: generate.main(given.split()))
    assert "tiny, context 16, batch 1" in shown and "3/3 [" in shown


def test_generate_prints_nothing(terminal, capfd):
    _, ours = fresh("llama")
    stream = terminal()
    capfd.readouterr()
    ours.generate(prompt(CPU, 2), **SHORT)
    ours.generate(prompt(CPU, 17), **SHORT)  # stock's loop runs
    assert stream.getvalue() == "" and capfd.readouterr() == ("", "")
