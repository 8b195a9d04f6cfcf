"""What lengths, block tables, tokens and positions hold, where it is wrong: an error in host memory, and on a GPU no
access out of bounds."""

from __future__ import annotations

import re

import pytest
import torch
from memory import same_bits

from hf_fastpath import ops
from hf_fastpath.ops.kv_cache import in_pages
from hf_fastpath.registry import OpInputError

HEADS, HEAD_DIM, SIZE, COLUMNS = 2, 64, 16, 3


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def paged(device, dtype, tail=16):
    """A block table of two rows and pages of keys and values, with ``tail`` pages of sentinels behind them."""
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
    """Native checks look at what a call reads or writes, in the time that it takes anyway."""
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
