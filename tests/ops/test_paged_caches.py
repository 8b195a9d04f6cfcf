"""Caches in pages: ops give over them what they give over the caches that the pages stand for."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, is_native, over_dtypes
from routes import main, over_instruction_sets, run_limited
from test_decode_attention import make

from hf_fastpath.ops import decode_attention, rope_append
from hf_fastpath.ops.decode_attention import workspace_bytes
from hf_fastpath.ops.kv_cache import capacity_of, gathered, in_pages
from hf_fastpath.registry import OpInputError, Sample


def in_pages_of(sample: Sample, page_size: int) -> Sample:
    """Return the call over the same cache in pages of random order; pages that no row has hold NaN."""
    arguments = dict(sample.kwargs)
    table, k, v = in_pages([arguments["k_cache"], arguments["v_cache"]], page_size)
    k, v = (torch.cat((each, torch.full_like(each[:3], float("nan")))) for each in (k, v))
    return Sample(**arguments | dict(k_cache=k, v_cache=v, block_table=table))


def lengths_and_windows(device, dtype, page_size):
    """Yield calls whose visible positions begin and end at, before and behind the edges of pages, tiles and splits."""
    size = page_size
    sizes = dict(heads=4, kv_heads=2, head_dim=64)
    for length in (1, size - 1, size, size + 1, 2 * size + 7, 5 * size):
        yield make(device, dtype, **sizes, capacity=6 * size, seq_lens=[length])
    for start in (1, 15, size, size + 3):  # padding: the first tile begins inside of a page
        yield make(device, dtype, **sizes, capacity=3 * size, seq_lens=[2 * size + 9], starts=[start])
    for length in (size + 2, 3 * size, 7 * size + 5):  # a ring of three pages
        yield make(device, dtype, **sizes, capacity=3 * size, seq_lens=[length, 9], window=2 * size - 3)
    many = dict(heads=8, kv_heads=1, head_dim=128, query_len=3)
    yield make(device, dtype, **many, capacity=40 * size, seq_lens=[37 * size + 1, 2 * size], starts=[0, 7])
    yield make(device, dtype, **many, capacity=4 * size, seq_lens=[9 * size, 3], window=2 * size, sinks=True)
    yield make(device, dtype, heads=6, kv_heads=2, head_dim=40, query_len=16, capacity=2 * size, seq_lens=[size + 8])
    yield make(device, dtype, heads=2, kv_heads=1, head_dim=256, capacity=4 * size, seq_lens=[3 * size + 1])
    for kv in (torch.float16, torch.float32, torch.bfloat16):
        yield make(device, dtype, **sizes, capacity=4 * size, seq_lens=[2 * size + 3], kv=kv)


@pytest.mark.parametrize("page_size", (16, 64, 256))
@over_dtypes
def test_attention_over_pages_matches_the_buffer(device, dtype, page_size):
    for sample in lengths_and_windows(device, dtype, page_size):
        paged = in_pages_of(sample, page_size)
        assert torch.equal(decode_attention.reference(**paged.kwargs), decode_attention.reference(**sample.kwargs))
        assert_matches(decode_attention, paged)


@over_instruction_sets
def test_attention_over_pages_with_every_instruction_set(isa):
    run_limited(decode_attention, __file__, isa)


def check(isa):
    for dtype in (torch.float32, torch.float16):
        for sample in lengths_and_windows(torch.device("cpu"), dtype, 16):
            assert_matches(decode_attention, in_pages_of(sample, 16), isa)


@over_dtypes
def test_append_into_pages_is_that_into_the_buffer(device, dtype):
    for batch, query_len, capacity, lens in ((1, 1, 32, [17]), (3, 5, 48, [16, 18, 50]), (2, 33, 64, [33, 40])):
        qkv = torch.randn(batch, query_len, 4 * 40, device=device, dtype=dtype)
        caches = [torch.randn(batch, 1, capacity, 40, device=device, dtype=dtype) for _ in range(2)]
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        table, *pages = in_pages(caches, 16)
        expected = rope_append(qkv, None, None, None, *caches, lens, 2)
        got = rope_append(qkv, None, None, None, *pages, lens, 2, block_table=table)
        assert torch.equal(got, expected)
        for cache, each in zip(caches, pages):
            assert torch.equal(gathered(each, table), cache)


def test_rows_may_share_pages_they_read(device):
    sample = make(device, torch.float32, heads=4, kv_heads=2, head_dim=64, capacity=64, seq_lens=[50])
    paged = dict(in_pages_of(sample, 16).kwargs)
    q = torch.randn(3, *paged["q"].shape[1:], device=device)
    one_by_one = [decode_attention(**paged | dict(q=row[None])) for row in q]
    table, lens = paged["block_table"].repeat(3, 1), paged["seq_lens"].repeat(3)
    together = decode_attention(**paged | dict(q=q, seq_lens=lens, block_table=table))
    torch.testing.assert_close(together, torch.cat(one_by_one), rtol=1e-5, atol=1e-6)


def test_a_kv_table_leads_to_pages_and_their_table(device):
    if not is_native(decode_attention, device):
        pytest.skip("references follow no addresses")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    sample = make(device, dtype, heads=4, kv_heads=2, head_dim=128, capacity=128, seq_lens=[100, 31])
    paged = dict(in_pages_of(sample, 32).kwargs)
    expected = decode_attention(**paged)
    k, v, table = paged["k_cache"], paged["v_cache"], paged["block_table"]
    row = [k.data_ptr(), v.data_ptr(), capacity_of(k, table), table.data_ptr()]
    kv_table = torch.tensor([[0, 0, 0, 0], row], dtype=torch.int64, device=device)
    other = dict(k_cache=torch.zeros_like(k), v_cache=torch.zeros_like(v), block_table=torch.zeros_like(table[:, :1]))
    options = dict(kv_table=kv_table, layer=1)
    if device.type == "cuda":
        options["workspace"] = torch.zeros(workspace_bytes(2, 1, 4, 128), dtype=torch.uint8, device=device)
    got = decode_attention(**paged | other | options)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    qkv = torch.randn(2, 1, 8 * 128, device=device, dtype=dtype)
    lens = torch.tensor([101, 32], dtype=torch.int32, device=device)
    before = [gathered(each, table) for each in (k, v)]
    rope_append(
        qkv, None, None, None, *list(other.values())[:2], lens, 4, kv_table, 1, block_table=other["block_table"]
    )
    rope_append(qkv, None, None, None, *before, lens, 4)
    for each, cache in zip((k, v), before):
        assert torch.equal(torch.nan_to_num(gathered(each, table)), torch.nan_to_num(cache))


def test_what_is_no_block_table_is_refused(device):
    sample = make(device, torch.float32, heads=4, kv_heads=2, head_dim=64, capacity=64, seq_lens=[50])
    paged = dict(in_pages_of(sample, 16).kwargs)
    table = paged["block_table"]
    for bad in (table.long(), table[0], table.repeat(2, 1), table[:, :0], table.repeat(1, 2)[:, ::2]):
        with pytest.raises(OpInputError, match="block_table"):
            decode_attention(**paged | dict(block_table=bad))
    with pytest.raises(OpInputError, match="power of two"):
        decode_attention(**sample.kwargs | dict(k_cache=paged["k_cache"][:, :, :9].contiguous(), block_table=table))
    quants = {name: paged[name].nan_to_num().to(torch.int8) for name in ("k_cache", "v_cache")}
    with pytest.raises(OpInputError, match="int8"):
        decode_attention(**paged | quants)


if __name__ == "__main__":
    main(decode_attention, check)
