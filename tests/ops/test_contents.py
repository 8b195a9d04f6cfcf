"""Wrong contents of lengths, block tables, tokens and positions: an error in host memory, and no access out of bounds
on a GPU."""

from __future__ import annotations

import re

import pytest
import torch
from checks import arguments, over_dtypes, replaced, written
from memory import same_bits

from hf_fastpath import ops
from hf_fastpath.ops.decode_attention import workspace_bytes
from hf_fastpath.ops.kv_cache import capacity_of, in_pages
from hf_fastpath.registry import OpInputError, all_ops

HEADS, HEAD_DIM, SIZE, COLUMNS = 2, 64, 16, 3
#: arguments whose numbers kernels use as places; those of step_inputs are in test_step_inputs.py
PLACES = ("seq_lens", "starts", "block_table", "expert_ids", "positions", "tokens")


def _is_place(argument):
    """Whether an argument of an op is a tensor of places; some ops are given a number of tokens."""
    return argument.name in PLACES and "Tensor" in str(argument.type)


PLACED = [
    name
    for name, spec in all_ops().items()
    if name != "step_inputs" and any(_is_place(argument) for argument in spec.overload._schema.arguments)
]
#: numbers around the right ones, and at the ends of int32
NUMBERS = (-(2**31), -1, 0, 17, 2**31 - 70, 2**31 - 1)
GUARD = 2**14  # bytes


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged(device, dtype, tail=16):
    """Make a block table of two rows, and pages of keys and values with ``tail`` pages of sentinels behind them."""
    shape = 2, HEADS, SIZE * COLUMNS, HEAD_DIM
    table, *caches = in_pages([torch.randn(shape, device=device, dtype=dtype) for _ in range(2)], SIZE)
    wholes = [torch.cat([cache, torch.full_like(cache[:1], 7.0).expand(tail, -1, -1, -1)]) for cache in caches]
    return table, [whole[: len(cache)] for whole, cache in zip(wholes, caches)], wholes


def paged_calls(device, dtype, table, caches, lens):
    q = torch.randn(2, 1, 2 * HEADS, HEAD_DIM, device=device, dtype=dtype)
    yield (
        ops.decode_attention,
        dict(q=q, k_cache=caches[0], v_cache=caches[1], seq_lens=lens, starts=None, scale=0.1, block_table=table),
    )
    to = dict(k_cache=caches[0], v_cache=caches[1], seq_lens=lens, num_heads=2 * HEADS, block_table=table)
    qkv = torch.randn(2, 1, 4 * HEADS * HEAD_DIM, device=device, dtype=dtype)
    yield ops.rope_append, dict(qkv=qkv, bias=None, cos=None, sin=None, **to)
    x, weight = torch.randn(2, 1, 32, device=device, dtype=dtype), torch.randn(4 * HEADS * HEAD_DIM, 32).to(qkv)
    names = ("k_weight", "v_weight", "q_bias", "k_bias", "v_bias", "cos", "sin")
    yield ops.qkv_rope_append, dict(x=x, q_weight=weight, transposed=False, **dict.fromkeys(names), **to)


@pytest.mark.parametrize("page", (-1, 6, 7, 21, 2**31 - 1, -(2**31)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_pages_that_are_none(page, dtype, device):
    table, caches, wholes = paged(device, dtype)
    table[1, 2] = page
    for op, call in paged_calls(device, dtype, table, caches, ints(device, 40, 40)):
        if device.type == "cpu":
            with pytest.raises(OpInputError, match=f"block_table holds {page}, expected pages from 0 to 5"):
                op(**call)
            with pytest.raises(RuntimeError, match=re.escape(f"block_table[1, 2] is {page}, expected a page from 0")):
                op.overload(**call)
        else:
            op(**call)
        for whole in wholes:
            assert bool((whole[6:] == 7).all()), f"{op.name} wrote behind the cache"


def test_pages_that_no_token_needs_may_be_anything_for_a_plan(device):
    """Native checks look at what a call reads or writes, in time that it takes anyway."""
    table, caches, _ = paged(device, torch.float32)
    (op, call), *_ = paged_calls(device, torch.float32, table, caches, ints(device, 20, 30))
    expected = op.overload(**call)
    table[:, 2] = 999
    assert same_bits(op.overload(**call), expected)


@pytest.mark.parametrize("length", (-1, -(2**31)))
def test_negative_lengths(length, device):
    table, caches, wholes = paged(device, torch.float32)
    for op, call in paged_calls(device, torch.float32, table, caches, ints(device, 20, length)):
        if device.type == "cpu":
            with pytest.raises(OpInputError, match=f"seq_lens holds {length}, expected 0 or more"):
                op(**call)
        op.overload(**call)
        for whole in wholes:
            assert bool((whole[6:] == 7).all()), f"{op.name} wrote behind the cache"


def test_lengths_beyond_the_capacity(device):
    q = torch.randn(1, 2, 2, 32, device=device)
    cache, lens = torch.randn(1, 2, 20, 32, device=device), ints(device, 21)
    for op in (ops.decode_attention, ops.append_attention):
        if device.type == "cpu":
            with pytest.raises(OpInputError, match="seq_lens holds 21, expected at most the cache's capacity 20"):
                op(q, cache, cache, lens, None, 1.0)
        else:
            op(q, cache, cache, lens, None, 1.0)
    ring = ops.decode_attention(q, cache, cache, lens, None, 1.0, window=19)
    assert ring.isfinite().all()
    with torch.no_grad():
        assert same_bits(ring, ops.decode_attention(q, cache, cache, lens, None, 1.0, window=19))


def test_a_cache_without_a_slot_for_every_token(device):
    caches = [torch.randn(1, HEADS, 1, HEAD_DIM, device=device) for _ in range(2)]
    qkv = torch.randn(1, 2, 3 * HEADS * HEAD_DIM, device=device)
    with pytest.raises(RuntimeError, match="query_len 2 exceeds the cache's capacity 1"):
        ops.rope_append.overload(qkv, None, None, None, *caches, ints(device, 2), HEADS)
    if device.type == "cuda":
        quants = [cache.to(torch.int8) for cache in caches]
        scales = [torch.ones(1, HEADS, 1, device=device, dtype=torch.bfloat16) for _ in range(2)]
        q, new = (torch.randn(shape, device=device) for shape in ((1, 2, HEADS, HEAD_DIM), (1, HEADS, 2, HEAD_DIM)))
        with pytest.raises(RuntimeError, match="query_len 2 exceeds the cache's capacity 1"):
            ops.quantizing_attention.overload(q, new, new, *quants, *scales, ints(device, 2), None, 1.0)


# ---- every op, between guards ----------------------------------------------------------------------------------


def guarded(value, wholes: list[torch.Tensor]):
    """Copy a tensor, or a list of them, into memory whose first and last ``GUARD`` bytes are 255, which floats read as
    NaN; the memory is added to ``wholes``."""
    if isinstance(value, list):
        return [guarded(item, wholes) for item in value]
    if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
        return value
    whole = torch.full((value.nbytes + 2 * GUARD,), 255, dtype=torch.uint8, device=value.device)
    wholes.append(whole)
    return whole[GUARD:-GUARD].view(value.dtype).view(value.shape).copy_(value)


def guarded_calls(spec, device, dtype):
    """Yield the arguments of every sample of an op, and the memory of those that are places or are written."""
    for sample in spec.samples(device, dtype):
        given = arguments(spec, replaced(spec, sample))
        names = {argument.name for argument in spec.overload._schema.arguments}
        if "programmatic_launch" in names:
            given["programmatic_launch"] = False  # the kernel in front writes the numbers
        if {"q", "workspace"} <= names and device.type == "cuda":
            given["workspace"] = torch.zeros(workspace_bytes(*given["q"].shape), dtype=torch.uint8, device=device)
        wholes = []
        for argument in {*PLACES, *written(spec)} & {*given}:
            given[argument] = guarded(given[argument], wholes)
        yield given, wholes


def with_numbers(given):
    """Yield the arguments with other numbers in each of ``PLACES``: in the last element, and in all elements."""
    for name in PLACES:
        if not isinstance(given.get(name), torch.Tensor):
            continue
        right = given[name].clone()
        for number in NUMBERS:
            for count in {1, right.numel()}:
                given[name].view(-1)[-count:].fill_(number)
                yield name, number
                given[name].copy_(right)


@pytest.mark.each_value
@over_dtypes
@pytest.mark.parametrize("name", PLACED)
def test_no_number_leads_outside_the_buffers(name, dtype, device):
    """Nothing is written outside the buffers; a read outside ends the process if there is no memory."""
    spec = all_ops()[name]
    calls = 0
    for given, wholes in guarded_calls(spec, device, dtype):
        for place, number in with_numbers(given):
            try:
                spec.overload(**given)
            except RuntimeError as error:  # pages are checked where the host can look at them
                assert device.type == "cpu" and place == "block_table" and "expected a page" in str(error), error
            calls += 1
            for whole in wholes:
                where = f"{name}: {place} {number}"
                assert bool((whole[:GUARD] == 255).all() & (whole[-GUARD:] == 255).all()), where
            if given.get("workspace") is not None:
                counters = given["q"].shape[:3].numel() * 4
                assert not given["workspace"][-counters:].any(), f"{name}: {place} {number} leaves a counter"
    assert calls > 10


@over_dtypes
@pytest.mark.parametrize("name", ("decode_attention", "append_attention"))
def test_what_wrong_lengths_and_starts_stand_for(name, dtype, cuda):
    """A length below 0 counts as 0, and a length above the capacity of a cache without a window as the capacity; a
    start below 0 counts as 0, and a start behind the last position leaves nothing to see."""
    spec = all_ops()[name]
    for given, _ in guarded_calls(spec, cuda, dtype):
        capacity = capacity_of(given["k_cache"], given.get("block_table"))
        most = capacity if name == "append_attention" else 2**31 - 2**16
        for place, number in with_numbers(given):
            if place not in ("seq_lens", "starts"):
                continue
            found, bounded = spec.overload(**given), dict(given)
            bounded["seq_lens"] = given["seq_lens"].clamp(0, most)
            if given["starts"] is not None:
                bounded["starts"] = torch.minimum(given["starts"].clamp(min=0), bounded["seq_lens"])
            assert same_bits(found, spec.overload(**bounded)), f"{place} {number}"
            starts = 0 if given["starts"] is None else given["starts"]
            if given.get("other") is not None:  # then there is something else to see
                continue
            unseen = found.view(given["q"].shape)[bounded["seq_lens"] <= starts]
            assert not unseen.any(), f"{place} {number}: what nothing was seen for is not zero"
