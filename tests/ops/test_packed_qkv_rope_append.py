"""packed_qkv_rope_append: the common tests, and a comparison with its two parts."""

from __future__ import annotations

import torch
from checks import common_tests, over_dtypes
from memory import duplicate

from hf_fastpath.ops.packed_gemv import SPEC as PACKED_GEMV
from hf_fastpath.ops.packed_qkv_rope_append import SPEC, samples
from hf_fastpath.ops.rope_append import SPEC as ROPE_APPEND


def odd_sizes(device, dtype):
    return ()


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_packed_qkv_rope_append_is_its_two_parts(device, dtype):
    """Results agree but for the rounding of the projections between the parts."""
    for sample in samples(device, dtype):
        whole, parts = sample.map_tensors(duplicate), sample.map_tensors(duplicate)
        queries = SPEC(*whole.args)
        x, *weight = parts.args[:6]
        norms, scales, neighbors = parts.args[14:18], parts.args[19:21], parts.args[21]
        qkv = PACKED_GEMV(x, *weight, None, None, "none", *norms)
        expected = ROPE_APPEND(qkv, None, *parts.args[6:12], None, 0, *scales, neighbors=neighbors)
        close = dict(rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
        torch.testing.assert_close(queries, expected, **close)
        if scales[0] is not None:
            continue  # a rounded product may give another quant
        for place in (8, 9):
            found, want = whole.args[place], parts.args[place]
            eps = torch.finfo(found.dtype).eps
            close = dict(rtol=4 * max(eps, torch.finfo(dtype).eps), atol=8 * torch.finfo(dtype).eps)
            torch.testing.assert_close(found, want, **close)
