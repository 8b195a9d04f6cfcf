"""quantizing_attention: the common tests; the cache that it leaves, and its output, are those of two ops."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, is_native, ours, over_dtypes, replaced
from memory import duplicate, same_bits
from test_quantized_kv import attention_call, attention_calls, over_quants

from hf_fastpath.ops import decode_attention as ATTENTION
from hf_fastpath.ops.kv_cache import positions, quantized
from hf_fastpath.ops.quantizing_attention import SPEC
from hf_fastpath.registry import Sample

CACHE = ("k_cache", "v_cache", "k_scales", "v_scales")


def with_new(call: Sample) -> Sample:
    """Take the newest positions of a ``decode_attention`` call as float32, and put NaN where the op is to write."""
    given = dict(call.kwargs)
    q = given["q"]
    batch, query_len, _, head_dim = q.shape
    kv_heads, capacity = given["k_cache"].shape[1:3]
    given |= {name: torch.randn(batch, kv_heads, query_len, head_dim, device=q.device) for name in ("k", "v")}
    for row, slots in enumerate((positions(given["seq_lens"], query_len) % capacity).tolist()):
        for name in ("k_scales", "v_scales"):
            given[name][row, :, slots] = torch.nan
    return Sample(**given)


def odd_sizes(device, dtype):
    for number, call in enumerate(attention_calls(device, dtype)):
        if number % 3 == 0 and (call.kwargs["seq_lens"] >= call.kwargs["q"].shape[1]).all():
            yield with_new(call)


globals().update(common_tests(SPEC, odd_sizes))


def appended(call: Sample) -> Sample:
    """Return the ``decode_attention`` call over a cache that holds the new positions."""
    given = dict(call.map_tensors(duplicate).kwargs)
    new = given.pop("k"), given.pop("v")
    query_len, capacity = given["q"].shape[1], given["k_cache"].shape[2]
    starts = given["starts"].tolist() if given["starts"] is not None else [0] * len(given["seq_lens"])
    for row, of_row in enumerate(positions(given["seq_lens"], query_len).tolist()):
        steps = [step for step, position in enumerate(of_row) if position >= starts[row]]
        slots = [of_row[step] % capacity for step in steps]
        for states, name in zip(new, "kv"):
            quants, scales = quantized(states[row][:, steps], given[f"{name}_cache"].dtype)
            given[f"{name}_cache"].view(torch.int8)[row, :, slots] = quants.view(torch.int8)
            given[f"{name}_scales"][row, :, slots] = scales
    return Sample(**given)


def assert_as_two_ops(call: Sample) -> None:
    expected = appended(call)
    found = ours(SPEC, call)
    for name in CACHE:
        bits = [t.view(torch.int8) if t.element_size() == 1 else t for t in (found[name], expected.kwargs[name])]
        assert same_bits(*bits), name
    attend = ATTENTION if is_native(SPEC, found["result"].device) else ATTENTION.reference
    assert same_bits(found["result"], attend(**expected.kwargs))


@over_dtypes
def test_quantizing_attention_is_an_append_and_attention(device, dtype):
    """Every bit of cache and output is equal, in rings that wrap and if rows of queries take two blocks."""
    for call in odd_sizes(device, dtype):
        assert_as_two_ops(call)
    for query_len, window in ((1, 0), (9, 0), (16, 40)):
        sizes = dict(heads=8, kv_heads=2, head_dim=128, capacity=720, seq_lens=[700, 333], query_len=query_len)
        assert_as_two_ops(with_new(attention_call(device, dtype, torch.int8, **sizes, window=window)))


@over_quants
def test_quantizing_attention_shows_heads_that_are_not_finite(device, kv):
    """New heads with an infinity, a NaN, zeros and the smallest numbers are stored as ``quantized`` has them."""
    for dtype in (torch.float16, torch.float32):
        sizes = dict(heads=8, kv_heads=4, head_dim=64, capacity=90, seq_lens=[80, 80])
        call = with_new(attention_call(device, dtype, kv, **sizes))
        call.kwargs["k"][0, 0, 0, 5], call.kwargs["v"][0, 1, 0, 63] = torch.inf, torch.nan
        call.kwargs["k"][0, 2], call.kwargs["v"][0, 3], call.kwargs["v"][1, 0] = 0, 1e-45, 0
        expected = appended(call)
        found = ours(SPEC, call)
        for name in ("k_scales", "v_scales"):
            torch.testing.assert_close(found[name], expected.kwargs[name], rtol=0, atol=0, equal_nan=True)
        result = found["result"].view(2, 8, 64)
        assert result[0, :4].isnan().all() and result[0, 4:].isfinite().all() and result[1].isfinite().all()


@over_quants
def test_quantizing_attention_follows_kv_table(device, kv):
    if not is_native(SPEC, device):
        pytest.skip("the reference cannot follow addresses")
    for dtype in (torch.float16, torch.float32):
        sizes = dict(heads=8, kv_heads=2, head_dim=64, capacity=41, seq_lens=[40, 37])
        call = with_new(attention_call(device, dtype, kv, **sizes))
        expected = ours(SPEC, call)
        actual = {name: duplicate(call.kwargs[name]) for name in CACHE}
        k, v, k_scales, v_scales = (actual[name].data_ptr() for name in CACHE)
        table = torch.tensor([[0] * 5, [k, v, 41, k_scales, v_scales]], device=device)
        given = replaced(SPEC, call.map_tensors(duplicate), kv_table=table, layer=1)
        assert same_bits(SPEC(**given.kwargs), expected["result"])
        for name in CACHE:
            assert same_bits(actual[name].view(torch.int8), expected[name].view(torch.int8)), name
