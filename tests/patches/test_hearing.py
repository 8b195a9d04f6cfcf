"""Which code runs is heard once for each code of a thread, whoever else hears it, and leaves profilers as they were."""

from __future__ import annotations

import cProfile
import gc
import sys
import threading
from contextlib import nullcontext

import pytest

from hf_fastpath import compat

module = sys.modules[compat.hearing.__module__]


def inner():
    return 1


def outer():
    return inner() + 1


def heard_in(run):
    """Return the names of the functions of this file that are heard while ``run()`` runs."""
    codes = []
    with compat.hearing(lambda frame, event, _: codes.append((frame.f_code, frame.f_globals, event))):
        run()
    mine = [code for code, space, event in codes if event == "call" and space is globals()]
    return [code.co_name for code in mine]


@pytest.fixture(params=("monitoring", "profile"))
def way(request, monkeypatch):
    """Both ways to hear; other tools may have taken all numbers of ``sys.monitoring``."""
    if request.param == "profile":
        monkeypatch.setattr(module, "_NUMBERS", ())
    elif sys.version_info < (3, 12):
        pytest.skip("sys.monitoring is of Python 3.12")
    return request.param


def test_code_is_heard_again_each_time(way):
    for _ in range(2):
        assert set(heard_in(outer)) >= {"outer", "inner"}
    if way == "monitoring":
        found = heard_in(lambda: [outer() for _ in range(5)])
        assert found.count("outer") == found.count("inner") == 1


def test_hearing_within_hearing(way):
    """What hears a part hears all of it, also what was heard before; behind it, the first goes on."""
    parts = []

    def run():
        outer()
        parts.append(heard_in(outer))
        threading.Thread()

    found = heard_in(run)
    assert {"outer", "inner"} <= set(parts[0]) and {"outer", "inner"} <= set(found)
    assert sys.getprofile() is None


def test_other_threads_are_not_heard(way):
    other = threading.Thread(target=outer)

    def run():
        other.start()
        other.join()

    assert "outer" not in heard_in(run)
    assert "outer" in heard_in(outer), "what ran in another thread is heard in this one"


def test_an_error_ends_hearing(way):
    def fail():
        raise KeyError("it")

    for _ in range(2):
        with pytest.raises(KeyError):
            heard_in(fail)
    assert gc.isenabled() and not module._heard.by and sys.getprofile() is None
    if sys.version_info >= (3, 12):
        assert all(sys.monitoring.get_tool(number) != "hf_fastpath" for number in (3, 4))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_a_block_whose_end_an_interrupt_skips_is_not_heard_for_ever():
    listening = module._Listening()
    assert module._begin(listening)
    number = module._number
    outer()
    assert sys.monitoring.get_tool(number) == "hf_fastpath", "the block still runs"
    del listening
    threading.Thread()  # any code that begins
    outer()
    assert sys.monitoring.get_tool(number) is None and module._number is None


def test_a_profiler_of_the_user_goes_on(way):
    profile = cProfile.Profile()
    profile.enable()
    try:
        heard_in(outer)
        with compat.unheard() if way == "profile" else nullcontext():
            inner()
        outer()
    finally:
        profile.disable()
    calls = {entry.code.co_name: entry.callcount for entry in profile.getstats() if hasattr(entry.code, "co_name")}
    assert calls["outer"] >= 1 and calls["inner"] >= 1
