"""Tensors without data, of which a thread asks while another one computes with them."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from causal_lm_types import small_model
from in_thread import Call
from models import CPU, require_native
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording.fake_mode import FakeMode


@pytest.mark.parametrize(("mode", "says"), ((FakeMode, "cpu"), (FakeTensorMode, "meta")))
def test_the_device_while_a_kernel_is_under_way(mode, says):
    """PyTorch's own mode, which says "meta", shows that the test can fail."""
    with mode() as made:
        tensor = torch.zeros(3)
    begun, asked = threading.Event(), threading.Event()

    def compute():
        with in_kernel_invocation_manager(made):
            found = tensor.device.type
            begun.set()
            asked.wait(10)
        return found

    call = Call(compute)
    begun.wait(10)
    try:
        assert tensor.device.type == says
    finally:
        asked.set()
    assert call.result() == "meta" and tensor.device.type == "cpu"


@pytest.mark.parametrize("model_type", ("lfm2", "mamba2"))
def test_threads_with_batches_that_nobody_has_recorded(model_type):
    """One thread's first batch of a size is recorded while others make plans of theirs."""
    require_native(CPU)
    stock, texts = small_model(model_type), random.Random(3)
    asked = []
    for number in range(9):
        shape = 1 + number % 3, texts.choice((2, 5, 17, 33))
        ids = torch.randint(3, stock.config.vocab_size, shape, generator=torch.Generator().manual_seed(number))
        asked.append((ids, stock.generate(ids, max_new_tokens=8, do_sample=False)))
    for _ in range(2):
        ours = hf_fastpath.patch(small_model(model_type), quiet=True)
        made = [Call(ours.generate, ids, max_new_tokens=8, do_sample=False) for ids, _ in asked]
        assert [call.result().tolist() for call in made] == [expected.tolist() for _, expected in asked]
        assert not {"not_proven", "not_recorded"} & set(state_of(ours).stats.reasons)
        hf_fastpath.unpatch(ours)
