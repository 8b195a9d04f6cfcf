"""Heads of sizes that kernels are not made for, from 2 elements to 512, and sizes that are refused."""

from __future__ import annotations

import pytest
import torch
from checks import DTYPES, Sample, assert_matches

from hf_fastpath import ops
from hf_fastpath.ops.kv_cache import in_pages, quantized, slot_positions
from hf_fastpath.ops.rope_append import random_angles, random_caches
from hf_fastpath.registry import OpInputError

HEAD_DIMS = (2, 4, 6, 8, 10, 16, 24, 34, 100, 250, 264, 320, 512)
over_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
KV = (None, torch.float16, torch.int8, torch.float8_e4m3fn)


def attention_calls(head_dim, device, dtype):
    """Yield caches of every kind, padding, a ring, sinks, pages, GQA and several tokens; unwritten slots are NaN."""

    def call(query_len, heads, kv_heads, capacity, seq_lens, starts=None, window=0, kv=None, sinks=False, pages=False):
        batch = len(seq_lens)
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        shape, scales = (batch, kv_heads, capacity, head_dim), (None, None)
        unwritten = (slot_positions(lens, capacity) < 0)[:, None, :, None]
        caches = [torch.randn(shape, device=device).masked_fill(unwritten, torch.nan) for _ in range(2)]
        if kv in (torch.int8, torch.float8_e4m3fn):
            caches, scales = zip(*(quantized(cache, kv) for cache in caches))
        caches, table = [cache.to(kv or dtype) for cache in caches], None
        if pages:
            table, *caches = in_pages(caches, 16)
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        first = None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32)
        logits = torch.linspace(-2, 2, heads, device=device).to(dtype) if sinks else None
        given = dict(sinks=logits, k_scales=scales[0], v_scales=scales[1], block_table=table)
        return Sample(q, *caches, lens, first, head_dim**-0.5, window, **given)

    for kv in KV:
        yield call(1, 4, 2, 70, [67], kv=kv)
    yield call(3, 4, 4, 20, [18, 20], starts=[2, 0], sinks=True)
    yield call(2, 6, 2, 24, [100, 7], window=8, kv=torch.int8)
    yield call(2, 2, 1, 48, [61, 20], window=20, pages=True)


@over_head_dims
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_attention(head_dim, dtype, device):
    for sample in attention_calls(head_dim, device, dtype):
        assert not ops.decode_attention.why_not(*sample.args, **sample.kwargs)
        assert_matches(ops.decode_attention, sample)


@over_head_dims
def test_append_attention(head_dim, device):
    for dtype in DTYPES:
        q = torch.randn(2, 20, 4, head_dim, device=device, dtype=dtype)
        caches = [torch.randn(2, 2, 40, head_dim, device=device, dtype=dtype) for _ in range(2)]
        lens, starts = torch.tensor([[40, 25], [0, 3]], device=device, dtype=torch.int32)
        for options in ({}, {"window": 9}, {"softcap": 5.0}):
            sample = Sample(q, *caches, lens, starts, head_dim**-0.5, **options)
            assert not ops.append_attention.why_not(*sample.args, **sample.kwargs)
            assert_matches(ops.append_attention, sample)


@over_head_dims
def test_quantizing_attention(head_dim, device):
    for kv in KV[2:]:
        stored = [quantized(torch.randn(2, 2, 24, head_dim, device=device), kv) for _ in range(2)]
        new = [torch.randn(2, 2, 3, head_dim, device=device) for _ in range(2)]
        q = torch.randn(2, 3, 4, head_dim, device=device, dtype=torch.bfloat16)
        lens = torch.tensor([17, 24], device=device, dtype=torch.int32)
        to = [quants for quants, _ in stored] + [scales for _, scales in stored]
        sample = Sample(q, *new, *to, lens, None, head_dim**-0.5)
        assert not ops.quantizing_attention.why_not(*sample.args, **sample.kwargs)
        assert_matches(ops.quantizing_attention, sample)


def append_calls(head_dim, device, dtype):
    """Yield calls that rotate whole heads, some of their elements, and none."""
    for rotary_dim, kv in zip((head_dim, head_dim // 4 * 2 or None, None, head_dim), KV):
        caches, scales = random_caches((2, 2, 9, head_dim), device, kv or dtype)
        lens = torch.tensor([5, 11], device=device, dtype=torch.int32)
        yield random_angles(2, 2, rotary_dim, device, dtype), caches, lens, scales


@over_head_dims
def test_rope_append(head_dim, device):
    for dtype in DTYPES:
        for angles, caches, lens, (k_scales, v_scales) in append_calls(head_dim, device, dtype):
            qkv, bias = torch.randn(2, 2, 8 * head_dim, device=device, dtype=dtype), None
            sample = Sample(qkv, bias, *angles, *caches, lens, 4, k_scales=k_scales, v_scales=v_scales)
            assert_matches(ops.rope_append, sample)


@over_head_dims
def test_qkv_rope_append(head_dim, device):
    for dtype in DTYPES:
        for angles, caches, lens, (k_scales, v_scales) in append_calls(head_dim, device, dtype):
            x = torch.randn(2, 2, 64, device=device, dtype=dtype)
            weights = [torch.randn(n * head_dim, 64, device=device, dtype=dtype) / 8 for n in (4, 2, 2)]
            to = (*angles, *caches, lens, 4)
            scales = dict(k_scales=k_scales, v_scales=v_scales)
            norm = dict(norm="rms", norm_weight=torch.rand(64, device=device).to(dtype), norm_eps=1e-5)
            sample = Sample(x, *weights, None, None, None, False, *to, **scales, **norm)
            assert not ops.qkv_rope_append.why_not(*sample.args, **sample.kwargs)
            assert_matches(ops.qkv_rope_append, sample)


@pytest.mark.parametrize("head_dim", (1, 7, 33, 514))
def test_other_sizes_are_refused(head_dim, device):
    q, cache = torch.randn(1, 1, 2, head_dim, device=device), torch.randn(1, 2, 4, head_dim, device=device)
    lens = torch.ones(1, dtype=torch.int32, device=device)
    for op in (ops.decode_attention, ops.append_attention):
        with pytest.raises(OpInputError, match=f"head_dim is {head_dim}, expected an even number up to 512"):
            op(q, cache, cache, lens, None, 1.0)
        if device.type in op.native:
            with pytest.raises(RuntimeError, match=f"head_dim is {head_dim}, expected an even number up to 512"):
                op.overload(q, cache, cache, lens, None, 1.0)
