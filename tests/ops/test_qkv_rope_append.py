"""qkv_rope_append: the common tests, exact integers, one product at a time, its three parts, kv_table."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, is_native, ours, over_dtypes, replaced, small_integers
from memory import duplicate, same_bits

from hf_fastpath.ops.qkv_rope_append import SPEC
from hf_fastpath.ops.rope_append import SPEC as ROPE_APPEND
from hf_fastpath.ops.rope_append import random_angles
from hf_fastpath.registry import OpInputError, Sample


def make(device, dtype, *, hidden_size, heads, kv_heads, head_dim, batch=1, query_len=1, rotary_dim=None, **options):
    """Make a call over three weights; ``options`` replace arguments by name."""
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype, options.get("neighbors", False))
    weights = [(torch.randn(size, hidden_size, device=device) * hidden_size**-0.5).to(dtype) for size in sizes]
    call = {
        "x": torch.randn(batch, query_len, hidden_size, device=device).to(dtype),
        **dict(zip(("q_weight", "k_weight", "v_weight"), weights)),
        **dict.fromkeys(("q_bias", "k_bias", "v_bias")),
        "transposed": False,
        "cos": cos,
        "sin": sin,
        **{
            name: torch.zeros(batch, kv_heads, 7, head_dim, device=device, dtype=dtype)
            for name in ("k_cache", "v_cache")
        },
        "seq_lens": torch.full((batch,), 7, device=device, dtype=torch.int32),
        "num_heads": heads,
    }
    return Sample(**(call | options))


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for hidden_size in (1, 17, 96, 1000, 1032):  # rows have any alignment, and every kernel runs
        yield make(device, dtype, hidden_size=hidden_size, heads=3, kv_heads=1, head_dim=40, rotary_dim=24)
        yield make(
            device, dtype, hidden_size=hidden_size, heads=3, kv_heads=1, head_dim=40, rotary_dim=24, neighbors=True
        )
    for hidden_size in (768, 2048, 4096, 5632):
        yield make(device, dtype, hidden_size=hidden_size, heads=2, kv_heads=2, head_dim=64, rotary_dim=64)
    for batch, query_len in ((2, 1), (1, 5), (3, 5)):
        yield make(
            device,
            dtype,
            hidden_size=72,
            heads=4,
            kv_heads=2,
            head_dim=32,
            batch=batch,
            query_len=query_len,
            rotary_dim=32,
            q_bias=randn(128),
            v_bias=randn(64),  # Whisper: no bias on k
            norm="layer",
            norm_weight=randn(72),
            norm_bias=randn(72),
            norm_eps=1e-5,
        )
    fused = randn(4 * 32, 104) * 0.1
    names = ("q_weight", "k_weight", "v_weight")
    for head_dims in ((64, 32, 32),):  # three parts of one matrix
        parts = dict(zip(names, fused.split(head_dims)))
        yield make(device, dtype, hidden_size=104, heads=2, kv_heads=1, head_dim=32, rotary_dim=16, **parts)
    strided = {name: randn(size, 300)[:, 100:200] * 0.1 for name, size in zip(names, (64, 32, 32))}
    yield make(device, dtype, hidden_size=100, heads=2, kv_heads=1, head_dim=32, **strided)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_qkv_rope_append_exact_on_integers(device, dtype):
    """Compare bit for bit: a skipped product, or one of the wrong matrix, cannot hide in rounding."""
    for rows, hidden_size in ((1, 111), (1, 2048), (1, 4096), (3, 96), (16, 768)):
        x, q, k, v = small_integers(device, dtype, (1, rows, hidden_size), *((n, hidden_size) for n in (96, 32, 32)))
        sample = make(
            device,
            dtype,
            hidden_size=hidden_size,
            heads=3,
            kv_heads=1,
            head_dim=32,
            x=x,
            q_weight=q,
            k_weight=k,
            v_weight=v,
        )
        caches = {name: torch.zeros(1, 1, 20, 32, device=device, dtype=dtype) for name in ("k_cache", "v_cache")}
        sample = replaced(SPEC, sample, seq_lens=torch.tensor([rows], device=device, dtype=torch.int32), **caches)
        got, expected = ours(SPEC, sample), torch.nn.functional.linear(x.double(), torch.cat([q, k, v]).double())[0]
        found = torch.cat(
            [got["result"][0].flatten(1), *(got[name][0, 0, :rows] for name in ("k_cache", "v_cache"))], 1
        )
        assert torch.equal(found.double(), expected), (rows, hidden_size)


@over_dtypes
def test_qkv_rope_append_uses_every_weight_once(device, dtype):
    """Unit vectors as x pick out single weights, whatever their values."""
    sample = make(device, dtype, hidden_size=48, heads=3, kv_heads=1, head_dim=32)
    units = torch.eye(48, device=device, dtype=dtype)
    for column, unit in enumerate(units):
        got = ours(SPEC, replaced(SPEC, sample, x=unit.view(1, 1, -1)))
        assert torch.equal(got["result"].flatten(), sample.kwargs["q_weight"][:, column])
        for cache, weight in (("k_cache", "k_weight"), ("v_cache", "v_weight")):
            assert torch.equal(got[cache][0, 0, 6], sample.kwargs[weight][:, column])
            assert not got[cache][0, 0, :6].any()


@over_dtypes
def test_qkv_rope_append_layouts_agree(device, dtype):
    """Three weights, one weight of all, and a Conv1D agree within the rule, each compared with float64."""
    sample = make(device, dtype, hidden_size=128, heads=4, kv_heads=2, head_dim=32, rotary_dim=32)
    fused = torch.cat([sample.kwargs[name] for name in ("q_weight", "k_weight", "v_weight")])
    one = {"k_weight": None, "v_weight": None}
    assert_matches(SPEC, sample)
    assert_matches(SPEC, replaced(SPEC, sample, q_weight=fused, **one))
    assert_matches(SPEC, replaced(SPEC, sample, q_weight=fused.t().contiguous(), transposed=True, **one))


@over_dtypes
def test_qkv_rope_append_reference_is_its_parts(dtype):
    sample = make(torch.device("cpu"), dtype, hidden_size=96, heads=2, kv_heads=1, head_dim=32, rotary_dim=32)
    given = sample.kwargs
    qkv = torch.cat([torch.nn.functional.linear(given["x"], given[f"{name}_weight"]) for name in "qkv"], -1)
    whole, parts = (sample.map_tensors(duplicate).kwargs for _ in range(2))
    order = ("cos", "sin", "k_cache", "v_cache", "seq_lens", "num_heads")
    expected = ROPE_APPEND.reference(qkv, None, *(parts[name] for name in order))
    assert same_bits(SPEC.reference(**whole), expected)
    assert same_bits(whole["k_cache"], parts["k_cache"]) and same_bits(whole["v_cache"], parts["v_cache"])


@over_dtypes
def test_qkv_rope_append_special_values(device, dtype):
    """NaN and infinity reach exactly the pairs that they belong to."""
    sample = make(device, dtype, hidden_size=128, heads=1, kv_heads=1, head_dim=32, rotary_dim=16)
    sample.kwargs["q_weight"][3, 127], sample.kwargs["v_weight"][31, 0] = float("nan"), float("inf")
    got = ours(SPEC, sample)
    assert (~got["result"].flatten().isfinite()).nonzero().flatten().tolist() == [3, 11]
    assert (~got["v_cache"][0, 0, 6].isfinite()).nonzero().flatten().tolist() == [31]
    assert got["k_cache"].isfinite().all()


def test_qkv_rope_append_follows_kv_table(device):
    """Addresses and capacity come from the table's row, and the tensors given are not touched."""
    sample = make(device, torch.float32, hidden_size=64, heads=2, kv_heads=1, head_dim=32, rotary_dim=32)
    actual = {name: torch.zeros(1, 1, 12, 32, device=device) for name in ("k_cache", "v_cache")}
    table = torch.tensor([[0, 0, 0], [*(cache.data_ptr() for cache in actual.values()), 12]], device=device)
    lens = torch.tensor([11], device=device, dtype=torch.int32)
    expected = ours(SPEC, replaced(SPEC, sample, seq_lens=lens, **actual))
    call = replaced(SPEC, sample.map_tensors(duplicate), seq_lens=lens, kv_table=table, layer=1)
    if not is_native(SPEC, device):
        with pytest.raises(NotImplementedError, match="kv_table needs the native library"):
            SPEC(**call.kwargs)
        return
    assert same_bits(SPEC(**call.kwargs), expected["result"])
    for name, cache in actual.items():
        assert same_bits(cache, expected[name]), name
        assert not call.kwargs[name].any(), f"{name} was written beside the table's cache"


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"v_weight": None}, "k_weight and v_weight go together"),
        ({"transposed": True}, "transposed takes all projections in q_weight"),
        ({"x": torch.zeros(17, 1, 64)}, "x has 17 rows, expected 1 to 16"),
        ({"num_heads": 3}, r"q_weight has shape \(64, 64\), expected \(96, 64\)"),
        ({"norm": "rms"}, "norm 'rms' takes norm_weight"),
        ({"norm_weight": torch.ones(64)}, "norm is 'none': name the norm"),
    ),
)
def test_qkv_rope_append_names_the_fault(change, message):
    sample = make(torch.device("cpu"), torch.float32, hidden_size=64, heads=2, kv_heads=1, head_dim=32)
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)
