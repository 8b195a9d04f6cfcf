"""bytes_sum: the common tests, and that every byte counts, and where it is."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests

from hf_fastpath.native import loader
from hf_fastpath.ops.bytes_sum import SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    for count in (1, 5, 1023, 32_768, 65_537):
        yield Sample([torch.randn(count, device=device, dtype=dtype), torch.randn(3, device=device, dtype=dtype)])


globals().update(common_tests(SPEC, odd_sizes))


def test_every_byte_counts(device):
    """Also in the last word, of an unaligned tensor, and of the last tensor."""
    torch.manual_seed(0)
    tensors = [torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for size in (9, 70_000, 131_072, 13)]
    tensors[2] = tensors[2][3:]
    first = SPEC(tensors)
    for tensor in tensors:
        for place in {0, 7, 8, len(tensor) // 2, len(tensor) - 1}:
            for bit in (1, 128):
                tensor[place] ^= bit
                assert SPEC(tensors) != first
                tensor[place] ^= bit
    assert SPEC(tensors) == first and SPEC([each.clone() for each in tensors]) == first


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32, torch.float64))
def test_places_count(device, dtype):
    """Two elements that have changed places change the sum, also if they differ in their highest bits alone."""
    data = torch.zeros(1 << 17, dtype=dtype, device=device)
    per_word = 8 // data.element_size()
    for place in range(per_word):
        for apart in (1, 2, 512, 1 << 14):
            one, other = data.clone(), data.clone()
            one[place], other[place + apart * per_word] = -2.0, -2.0
            assert SPEC([one]) != SPEC([other])


def test_the_sum_does_not_depend_on_how_tensors_are_cut(device):
    """Words have places among those of all tensors."""
    data = torch.randint(0, 255, (8 * 5000,), dtype=torch.uint8, device=device)
    assert SPEC([data]) == SPEC([data[:80], data[80:24_000], data[24_000:]])
    assert SPEC([data.view(torch.float32)]) == SPEC([data]) == SPEC([data[:0], data])


def test_bytes_sum_rejects_bad_input(device):
    """In the place of the common test: tensors of any type and shape are taken."""
    with pytest.raises(OpInputError, match="tensors is empty, expected at least one tensor"):
        SPEC([])
    with pytest.raises(OpInputError, match=r"tensors\[1\] has strides \(1, 3\): make it contiguous"):
        SPEC([torch.zeros(2, device=device), torch.zeros(4, 3, device=device).t()])
    with pytest.raises(OpInputError, match=r"tensors\[1\] is on meta, expected .*: move it"):
        SPEC([torch.zeros(2, device=device), torch.zeros(4, device="meta")])
    if loader.is_native(device.type):  # the library has checks of its own behind Python's
        with pytest.raises(RuntimeError, match="tensors have to be contiguous"):
            SPEC.overload([torch.zeros(4, 3, device=device).t()])
