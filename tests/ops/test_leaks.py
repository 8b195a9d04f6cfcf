"""No call of an op leaves a byte behind on the heap."""

from __future__ import annotations

import ctypes

import pytest
import torch
from checks import is_native
from heap import growth

from hf_fastpath import registry

CALLS = 500


@pytest.mark.parametrize("name", registry.all_ops())
def test_calls_free_what_they_allocate(name, device):
    spec = registry.get(name)
    if not is_native(spec, device):
        pytest.skip(f"{name} has no kernel for {device.type}")
    samples = list(spec.samples(device, torch.float32))
    call = min(samples, key=lambda sample: sum(tensor.nbytes for tensor in sample.tensors()))
    with torch.no_grad():
        grown = growth(lambda: spec.overload(*call.args, **call.kwargs), CALLS)
    assert grown < CALLS, f"{grown / CALLS} bytes a call"


def test_a_leak_is_seen():
    """torch's conversion of a string forgets memory of this size."""
    allocate = ctypes.CDLL(None).malloc
    allocate.restype = ctypes.c_void_p
    assert growth(lambda: allocate(ctypes.c_size_t(48)), CALLS) >= 48 * CALLS
