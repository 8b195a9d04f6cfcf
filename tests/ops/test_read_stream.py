"""read_stream: the common tests, and one element that decides, wherever it stands."""

from __future__ import annotations

import torch
from checks import common_tests, over_dtypes

from hf_fastpath.ops.read_stream import SPEC, variants
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    for variant in variants(torch.device(device)):
        for count in (1, 3, 15, 31, 33, 1023, 65_537):
            yield Sample(torch.randn(count, device=device, dtype=dtype), variant)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_read_stream_sees_every_element(device, dtype):
    """A single large element, or a NaN, shows from every part of the buffer."""
    buffer = torch.rand(10_007, device=device, dtype=dtype)
    for variant in variants(torch.device(device)):
        for position in (0, 1, 255, 4096, 9_999, 10_006):
            changed = buffer.clone()
            changed[position] = -7
            assert SPEC(changed, variant).item() == 7
            changed[position] = float("nan")
            assert SPEC(changed, variant).isnan().all()
