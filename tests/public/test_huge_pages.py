"""Weights and caches in host memory lie in pages of 2 MB if Linux gives such pages."""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
from models import CPU, SHORT, build, prompt, require_native

import hf_fastpath
from hf_fastpath.native import huge_pages
from hf_fastpath.patching.state import state_of


def huge_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes in huge pages of the mapping that ``tensor`` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


@pytest.fixture
def huge_pages_given():
    require_native(CPU)
    probe = torch.ones(16 << 20, dtype=torch.uint8)
    if not huge_pages.Move([probe]).wait():
        pytest.skip("this kernel gives no huge pages")


def wide(**changes):
    """Make a model with an embedding of 32 MB."""
    return build("llama", vocab_size=1 << 17, **changes)


def patched(model):
    """Patch a model, and wait until its weights are moved."""
    hf_fastpath.patch(model, quiet=True)
    state_of(model).huge_pages.wait()
    return model


def test_weights_are_moved(huge_pages_given):
    model = wide()
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    address, held = weight.data_ptr(), huge_bytes(weight)
    assert weight.nbytes >= 8 * huge_pages.PAGE_BYTES
    patched(model)
    assert huge_bytes(weight) >= held + weight.nbytes - 2 * huge_pages.PAGE_BYTES
    assert weight.data_ptr() == address and torch.equal(weight, before)
    report = hf_fastpath.report(model)
    assert report.huge_page_bytes == report.to_dict()["huge_page_bytes"] >= weight.nbytes - 2 * huge_pages.PAGE_BYTES
    assert "pages of 2 MB" in str(report)


def test_tied_weights_count_once(huge_pages_given):
    model = patched(wide(tie_word_embeddings=True))
    assert hf_fastpath.report(model).huge_page_bytes <= model.get_input_embeddings().weight.nbytes + (1 << 22)


def test_a_refusal_changes_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", lambda *advice: False)
    model = patched(wide())
    report = hf_fastpath.report(model)
    assert report.huge_page_bytes == 0 and report.loop == "fast" and "pages of 2 MB" not in str(report)


def test_only_whole_pages_inside_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda *advice: not asked.append(advice))
    tensor = torch.empty(9 << 20, dtype=torch.uint8)
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    small = torch.empty(1000)
    moved = huge_pages.Move([tensor[5:], tensor, small]).wait()
    (address, num_bytes, _) = asked[0]
    assert len(asked) == 1 and moved == num_bytes
    assert address % huge_pages.PAGE_BYTES == num_bytes % huge_pages.PAGE_BYTES == 0
    assert first <= address < first + huge_pages.PAGE_BYTES and end - huge_pages.PAGE_BYTES < address + num_bytes <= end


def test_other_tensors_are_left_alone(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", lambda *advice: pytest.fail("asked for memory that is not ours"))
    elsewhere = torch.empty(1 << 24, device="meta")
    assert huge_pages.Move([elsewhere]).wait() == 0
    huge_pages.ask_for(torch.empty(1 << 24, device="meta"))


def test_patch_does_not_wait_for_large_models(monkeypatch):
    """Tokens are right while weights are moved, and a model that is let go of is gone with the move under way."""
    may_move = threading.Event()
    monkeypatch.setattr(huge_pages, "_madvise", lambda *advice: may_move.wait(60))
    stock = wide()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    moving = state_of(ours).huge_pages
    try:
        assert hf_fastpath.report(ours).huge_page_bytes == 0
        assert torch.equal(ours.generate(prompt(CPU), **SHORT), stock.generate(prompt(CPU), **SHORT))
        head = weakref.ref(ours.lm_head.weight)
        del ours
        gc.collect()
        assert head() is None, "the thread keeps what it is not at"
    finally:
        may_move.set()
    assert 0 < moving.wait() <= stock.get_input_embeddings().weight.nbytes
