"""append_attention: the common tests, lengths at which tiles and splits end, masks of every kind, unused slots."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes, replaced
from memory import poisoned, same_bits
from test_decode_attention import make as make_decode
from test_decode_attention import naive

from hf_fastpath.ops.append_attention import SPEC
from hf_fastpath.registry import Sample

CPU = torch.device("cpu")


def make(device, dtype, *, softcap=0.0, **sizes) -> Sample:
    """Make a call whose cache holds NaN in every slot that no token of the call sees."""
    return Sample(**make_decode(device, dtype, **sizes).kwargs, softcap=softcap)


def odd_sizes(device, dtype):
    for query_len in (1, 2, 15, 17, 31, 64, 65):
        heads, kv_heads = ((6, 2), (5, 5), (7, 1))[query_len % 3]
        lens = [query_len, 121, 16 + query_len]
        starts = [0, 7, 3] if query_len % 2 else None
        sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=40, capacity=123, query_len=query_len)
        yield make(device, dtype, **sizes, seq_lens=lens, starts=starts)
    for head_dim in (32, 48, 56, 72, 88, 104, 120, 136, 160, 192, 224, 248, 256):
        yield make(device, dtype, heads=2, kv_heads=1, head_dim=head_dim, capacity=90, seq_lens=[83], query_len=5)
    for length in (63, 64, 65, 127, 128, 129, 255, 257, 511, 1023, 1025):  # tiles and chunks end
        sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=length + 3, query_len=6)
        yield make(device, dtype, **sizes, seq_lens=[length])


globals().update(common_tests(SPEC, odd_sizes))


def test_append_attention_reference_is_the_formula():
    for sample in itertools.chain(odd_sizes(CPU, torch.float64), edges(CPU, torch.float64)):
        if sample.kwargs["softcap"] or sample.kwargs["q"].shape[1] > 20:
            continue
        expected = naive(sample)
        assert (SPEC.reference(**sample.kwargs) - expected).abs().max() <= 1e3 * torch.finfo(torch.float64).eps


def test_append_attention_cap_is_the_formula():
    """The cap of the reference is ``softcap * tanh(score / softcap)``; a cap that is far away changes nothing."""
    sizes = dict(heads=4, kv_heads=2, head_dim=32, capacity=30, query_len=7, seq_lens=[25], sinks=True)
    sample = make(CPU, torch.float64, **sizes, softcap=0.5)
    a = sample.kwargs
    scores = a["scale"] * a["q"].transpose(1, 2) @ a["k_cache"][:, :, :25].repeat_interleave(2, 1).transpose(2, 3)
    capped = 0.5 * torch.tanh(scores / 0.5)
    visible = torch.ones(7, 25, dtype=torch.bool).tril(18)
    weights = capped.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + a["sinks"].double().exp().view(1, -1, 1, 1)
    expected = (weights / total @ a["v_cache"][:, :, :25].repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
    assert (SPEC.reference(**a) - expected).abs().max() <= 1e3 * torch.finfo(torch.float64).eps
    far = SPEC.reference(**replaced(SPEC, sample, softcap=1e6).kwargs)
    assert (far - naive(sample)).abs().max() < 1e-9


def edges(device, dtype):
    """Yield windows and paddings at the lengths where something begins or ends."""
    for window, query_len, length in itertools.product((1, 8, 64, 200), (3, 40), (41, 130, 260)):
        sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=270, query_len=query_len, window=window)
        yield make(device, dtype, **sizes, seq_lens=[length], sinks=query_len == 3)
    for starts in ([0, 19, 20], [18, 5, 1], [64, 63, 65]):  # everything, the last token only, nothing visible
        sizes = dict(heads=4, kv_heads=1, head_dim=64, capacity=82)
        yield make(device, dtype, **sizes, query_len=3, seq_lens=[20, 20, 20], starts=starts)
        yield make(device, dtype, **sizes, query_len=33, seq_lens=[70, 66, 80], starts=starts, window=6, sinks=True)


@over_dtypes
def test_append_attention_edges(device, dtype):
    """Slots outside of windows and padding hold NaN, so that one slot too many shows."""
    for sample in edges(device, dtype):
        assert not assert_matches(SPEC, sample).isnan().any()


QUERIES = (2, 8, 33, 130)
CASES = list(itertools.product(QUERIES, (64, 80, 96, 128, 256), ((8, 8), (8, 4), (8, 2), (8, 1), (24, 2))))


@over_dtypes
@pytest.mark.parametrize(
    ("query_len", "head_dim", "heads"),
    [pytest.param(*case, marks=() if i % 7 == 0 else pytest.mark.full) for i, case in enumerate(CASES)],
)
def test_append_attention_grid(query_len, head_dim, heads, cuda, dtype):
    """Queries, head dims and groups are combined with masks, caps and sinks; other devices run the reference."""
    for number, (past, window, padded, softcap) in enumerate(
        itertools.product((0, 29, 500), (0, 70), (False, True), (0.0, 15.0))
    ):
        length = past + query_len
        sample = make(
            cuda,
            dtype,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            capacity=length + number % 3,
            query_len=query_len,
            seq_lens=[length, max(query_len, length - 11)],
            starts=[length // 3, 0] if padded else None,
            window=window,
            softcap=softcap,
            sinks=number % 2 == 1,
        )
        assert not assert_matches(SPEC, sample).isnan().any()


@over_dtypes
@pytest.mark.parametrize("scale", (-1.0, 0.0, 4.0, 300.0))
def test_append_attention_of_far_apart_scores(device, dtype, scale):
    """A score that is far below the largest weighs nothing, whatever the factor's sign."""
    for heads, query_len, length in ((2, 3, 70), (8, 9, 300), (5, 20, 133)):
        sizes = dict(heads=heads, kv_heads=1, head_dim=64, capacity=length + 2, query_len=query_len)
        sample = make(device, dtype, **sizes, seq_lens=[length])
        keys = torch.where(torch.arange(length + 2, device=device) % 3 == 0, 1.0, -1.0)[:, None]
        change = {"q": torch.ones_like(sample.kwargs["q"]), "k_cache": sample.kwargs["k_cache"] * 0 + keys.to(dtype)}
        result = assert_matches(SPEC, replaced(SPEC, sample, scale=scale, **change))
        last = result[0, -1].float().unflatten(0, (heads, 64))
        v = sample.kwargs["v_cache"][0, 0, :length].float()
        best = v if scale == 0 else v[keys[:length, 0] == (1 if scale > 0 else -1)]
        assert (last - best.mean(0)).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()


@over_dtypes
def test_append_attention_special_values(device, dtype):
    """A NaN key spoils its head group, a NaN or infinite value its column, and nothing else."""
    for length, query_len in ((9, 2), (200, 5)):
        sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=length, query_len=query_len)
        sample = make(device, dtype, **sizes, seq_lens=[length, length])
        past = length - query_len
        sample.kwargs["k_cache"][0, 1, past - 1, 3] = float("nan")
        sample.kwargs["v_cache"][1, 0, 1, 5] = float("inf")
        sample.kwargs["v_cache"][1, 1, past - 1, 31] = float("nan")
        result = assert_matches(SPEC, sample).view(2, query_len, 4, 64)
        assert result[0, :, :2].isfinite().all() and result[0, :, 2:].isnan().all()
        wrong = (~result[1].isfinite()).nonzero()
        assert {tuple(each[1:]) for each in wrong.tolist()} == {(0, 5), (1, 5), (2, 31), (3, 31)}


@over_dtypes
def test_append_attention_exact_average(device, dtype):
    """Equal scores over 2^n positions average integers exactly; a slot counted twice or left out shows."""
    for length in (4, 32, 256, 1024):
        sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=length + 1, query_len=3)
        sample = make(device, dtype, **sizes, seq_lens=[length])
        sample.kwargs["k_cache"][:, :, :length] = 0
        values = torch.zeros(1, 2, length, 64, device=device)
        values[:, :, torch.randperm(length, device=device)[: length // 2]] = 2
        sample.kwargs["v_cache"][:, :, :length] = values.to(dtype)
        assert torch.equal(SPEC(**sample.kwargs)[:, -1], torch.ones(1, 4 * 64, device=device, dtype=dtype))


@over_dtypes
def test_append_attention_uses_no_stale_memory(device, dtype):
    """Memory that the op allocates itself may hold anything."""
    for h, kv, d, n, lens in ((8, 2, 64, 2, [2050]), (8, 8, 128, 5, [700, 2000]), (8, 1, 256, 4, [2048, 3000])):
        sample = make(device, dtype, heads=h, kv_heads=kv, head_dim=d, capacity=3100, query_len=n, seq_lens=lens)
        expected = assert_matches(SPEC, sample)
        for size in (1 << 16, 1 << 20, 1 << 22):
            with poisoned(device, size):
                assert same_bits(SPEC(**sample.kwargs), expected)
