"""Tensors without data, of which a thread asks while another one computes with them."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from causal_lm_types import small_model
from in_thread import Call
from models import CPU, require_native
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

import hf_fastpath
from hf_fastpath.compat import memory_of
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording.fake_mode import FakeMode
from hf_fastpath.recording.text_lengths import Lengths, new_env


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


#: calls, each of a tensor float32 [3, 4, 5] and a generator of such tensors
_CALLS = {
    "views of views": lambda x, more: x.transpose(0, 2)[1:, ::2].unsqueeze(1).expand(-1, 2, -1, -1)[..., 1:],
    "a view of other sizes": lambda x, more: x.view(2, 30).view(5, 12)[:, 3:7].t(),
    "a copy where no view will do": lambda x, more: x.transpose(0, 1).reshape(-1),
    "several views": lambda x, more: [*x.split(2, dim=1), *x.unbind(0), *x.chunk(2, -1)],
    "elements": lambda x, more: (x.transpose(0, 1) * 2 + more().transpose(0, 1)).sigmoid().rsqrt(),
    "elements of other types": lambda x, more: [x.half() * more(), x > 1, x.long() // 2, x.long() / 2, x.bool() | True],
    "elements of several sizes": lambda x, more: x[:, :1] + more()[0, 0] * more()[:, :, :1],
    "a tensor of no elements": lambda x, more: torch.cat([x[:0], more()[1:1]]).sum(0),
    "writes": lambda x, more: [x.mul_(2), x, x[1].add_(more()[0]), x.copy_(more().transpose(0, 1).transpose(0, 1)), x],
    "a write that changes sizes": lambda x, more: [x.resize_(6, 10), x, x.unsqueeze_(0), x, x.transpose_(0, 1), x],
    "a result given": lambda x, more: torch.mul(x, 2, out=more()),
    "several results": lambda x, more: [*torch.native_layer_norm(x, [5], None, None, 1e-5), *x.topk(2), *x.max(dim=1)],
    "sums": lambda x, more: [x.sum(), x.mean(1), x.cumsum(0), x.softmax(-1), torch.bmm(x, more().transpose(1, 2))],
    "new ones": lambda x, more: [torch.zeros(2, 3), x.new_ones(3), torch.arange(7), torch.empty_like(x), x.clone()],
    "numbers": lambda x, more: [torch.tensor(3.0) + 1, torch.tensor([1, 2])[0], x * torch.tensor(2.0)],
    "places": lambda x, more: [x[torch.zeros(2, dtype=torch.long)], x.index_select(1, torch.ones(1, dtype=torch.int))],
    "complex": lambda x, more: torch.view_as_complex(x[..., :4].clone().reshape(3, 4, 2, 2)).conj() * 2j,
    "gradients": lambda x, more: (x.requires_grad_() * 2).detach()[0],
    "padding": lambda x, more: nn.functional.pad(x, (1, 2)).to(torch.bfloat16).contiguous(),
}


def _facts(found):
    """Return what is asked of tensors, and which share memory."""
    each = list(found) if isinstance(found, (list, tuple)) else [found]
    places = {memory_of(tensor): place for place, tensor in reversed(list(enumerate(each)))}
    facts = ((x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad) for x in each)
    keys = ((torch._C._dispatch_key_set(x), x.is_conj(), x.constant is None, places[memory_of(x)]) for x in each)
    return list(zip(facts, keys))


@pytest.mark.parametrize("name", _CALLS)
def test_the_same_as_of_the_mode_that_pytorch_has(name, device, monkeypatch):
    """The first time, when a call is found out, and later, when it is looked up."""
    monkeypatch.setattr(FakeMode, "_known", {})
    with torch.device(device):
        found = {}
        for kind in (FakeTensorMode, FakeMode):
            for _ in range(3):
                with kind(allow_non_fake_inputs=True):
                    made = _CALLS[name](torch.zeros(3, 4, 5), lambda: torch.zeros(3, 4, 5))
                found.setdefault(kind, []).append(_facts(made))
    assert found[FakeMode] == found[FakeTensorMode] and len({str(each) for each in found[FakeMode]}) == 1
    assert any(FakeMode._known.values()), "nothing is looked up"


def test_sizes_with_symbols_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(FakeMode, "_known", {})
    env = new_env()
    size = Lengths(env, past=7, encoded=9).past
    with FakeMode(shape_env=env):
        for _ in range(2):
            symbols = torch.zeros(size, 8)
            assert isinstance((symbols * 2).shape[0], torch.SymInt)
            assert isinstance(torch.zeros(8).expand(size, 8).shape[0], torch.SymInt)
    given = (each for key in FakeMode._known for each in key)
    assert not any(isinstance(each, torch.SymInt) or each is torch.SymInt for each in given)


def test_two_modes_know_their_own_tensors():
    with FakeMode():
        one = torch.zeros(3)
    with FakeMode() as mode:
        assert (torch.zeros(3) + 1).fake_mode is mode and (torch.zeros(3) + 1).fake_mode is mode
        with pytest.raises(AssertionError, match="[Mm]ix"):
            one + torch.zeros(3)


def test_numbers_that_data_says_are_refused_each_time():
    with FakeMode():
        tensor = torch.zeros(3)
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                tensor.sum().item()
            with pytest.raises(DynamicOutputShapeException):
                tensor.nonzero()


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
