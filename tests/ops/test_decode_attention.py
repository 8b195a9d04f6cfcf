"""decode_attention: the common tests, window and ring edges, padding, unused slots, workspace, kv_table."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import DTYPES, assert_matches, common_tests, is_native, over_dtypes, replaced
from memory import poisoned, same_bits
from routes import main, over_instruction_sets, run_limited

from hf_fastpath.ops.decode_attention import SPEC, workspace_bytes
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")


def make(
    device,
    dtype,
    *,
    heads,
    kv_heads,
    head_dim,
    capacity,
    seq_lens,
    query_len=1,
    starts=None,
    window=0,
    kv=None,
    sinks=False,
) -> Sample:
    """Make a call whose cache holds NaN in every slot that no token of the call sees."""
    batch = len(seq_lens)
    caches = []
    for _ in range(2):
        cache = torch.full((batch, kv_heads, capacity, head_dim), float("nan"), device=device).to(kv or dtype)
        for row, seq_len in enumerate(seq_lens):
            slots = [position % capacity for position in seen(seq_len, query_len, starts and starts[row], window)]
            cache[row, :, slots] = torch.randn(kv_heads, len(slots), head_dim, device=device).to(cache.dtype)
        caches.append(cache)
    return Sample(
        q=torch.randn(batch, query_len, heads, head_dim, device=device).to(dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        seq_lens=torch.tensor(seq_lens, device=device, dtype=torch.int32),
        starts=None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
        sinks=torch.linspace(-2, 2, heads, device=device).to(dtype) if sinks else None,
    )


def seen(seq_len: int, query_len: int, start: int | None, window: int) -> range:
    """Return the positions that at least one of a row's new tokens sees."""
    oldest = seq_len - query_len - window + 1 if window else 0
    return range(max(oldest, start or 0, 0), seq_len)


def naive(sample: Sample) -> torch.Tensor:
    """Compute the docstring's formula in float64, one token and one head at a time."""
    a = sample.kwargs
    batch, query_len, num_heads, head_dim = a["q"].shape
    group, capacity = num_heads // a["k_cache"].shape[1], a["k_cache"].shape[2]
    out = torch.zeros(batch, query_len, num_heads, head_dim, dtype=torch.float64)
    for b, i, h in itertools.product(range(batch), range(query_len), range(num_heads)):
        p = int(a["seq_lens"][b]) - query_len + i
        first = max(int(a["starts"][b]) if a["starts"] is not None else 0, p - a["window"] + 1 if a["window"] else 0)
        slots = [j % capacity for j in range(first, p + 1)]
        if slots:
            k, v = (a[name][b, h // group, slots].double() for name in ("k_cache", "v_cache"))
            scores = a["scale"] * (k @ a["q"][b, i, h].double())
            if a["sinks"] is not None:
                scores = torch.cat((scores, a["sinks"][h : h + 1].double()))
            out[b, i, h] = torch.softmax(scores, 0)[: len(v)] @ v
    return out.flatten(2)


def odd_sizes(device, dtype):
    for query_len in range(1, 17):
        heads, kv_heads = ((6, 2), (5, 5), (7, 1))[query_len % 3]
        yield make(
            device,
            dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=40,
            capacity=61,
            query_len=query_len,
            seq_lens=[query_len, 61, 16 + query_len],
            starts=[0, 7, 3] if query_len % 2 else None,
        )
    for head_dim in range(32, 257, 8):
        yield make(device, dtype, heads=2, kv_heads=1, head_dim=head_dim, capacity=19, seq_lens=[19])
    for length in (2, 15, 63, 64, 65, 127, 129, 511, 1023, 1025):
        yield make(device, dtype, heads=4, kv_heads=2, head_dim=64, capacity=length + 3, seq_lens=[length])
    for length, head_dim in ((1, 32), (63, 40), (65, 96), (129, 128), (1025, 64)):
        sizes = dict(heads=8, kv_heads=1, head_dim=head_dim, capacity=length + 3)
        yield make(device, dtype, **sizes, seq_lens=[length], sinks=True)
    for head_dim, query_len in ((96, 2), (200, 3)):  # over 16 splits, blocks of rows, threads with several outputs
        sizes = dict(heads=8, kv_heads=1, head_dim=head_dim, capacity=1500, query_len=query_len)
        yield make(device, dtype, **sizes, seq_lens=[1480], sinks=True)
    for query_len, group in itertools.product((1, 2, 3, 7), (3, 5, 6)):  # tiles of unequal numbers of queries
        sizes = dict(heads=2 * group, kv_heads=2, head_dim=80, capacity=140, query_len=query_len)
        yield make(device, dtype, **sizes, seq_lens=[31 + group, 130])


globals().update(common_tests(SPEC, odd_sizes))


def test_decode_attention_reference_is_the_formula():
    for sample in itertools.chain(odd_sizes(CPU, torch.float64), edges(CPU, torch.float64)):
        expected = naive(sample)
        assert (SPEC.reference(**sample.kwargs) - expected).abs().max() <= 1e3 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("sinks", [False, True])
def test_keys_apart_give_what_they_give_together(sinks):
    """Attention over the first keys, then over the others with what the first have given, is attention over all."""
    sizes = dict(heads=6, kv_heads=2, head_dim=32, capacity=150, seq_lens=[150, 90], starts=[5, 60], sinks=sinks)
    whole = make(CPU, torch.float64, **sizes).kwargs
    lens, starts = whole["seq_lens"], whole["starts"]
    for border in (1, 60, 89):  # of which the second row sees nothing, or all but a few
        first = whole | dict(seq_lens=torch.full_like(lens, border), starts=starts, sinks=None)
        lse = torch.full((2, 1, 6), float("nan"), dtype=torch.float64)
        other = SPEC.reference(**first | dict(lse=lse))
        assert bool((lse > -torch.inf).eq((starts < border)[:, None, None]).all())
        whole_lse = torch.empty_like(lse)
        second = whole | dict(starts=starts.clamp(min=border), other=other, other_lse=lse, lse=whole_lse)
        found, expected_lse = SPEC.reference(**second), torch.empty_like(lse)
        expected = SPEC.reference(**whole | dict(lse=expected_lse))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole_lse, expected_lse, rtol=1e-12, atol=1e-12)


def edges(device, dtype):
    """Yield windows, rings and paddings at the lengths where something begins or ends."""
    window = 8
    for seq_len in (1, 7, 8, 9, 15, 16, 17, 24, 25, 1000):  # the window fills; the ring wraps
        for capacity in (8, 9, 24):
            yield make(
                device,
                dtype,
                heads=4,
                kv_heads=2,
                head_dim=32,
                capacity=capacity,
                seq_lens=[seq_len],
                window=window,
                sinks=capacity == 9,
            )
    for seq_len in (
        5,
        8,
        12,
        13,
        28,
        29,
        100,
    ):  # several new tokens have a window each, and the ring is full
        yield make(
            device,
            dtype,
            heads=4,
            kv_heads=2,
            head_dim=32,
            capacity=window + 4,
            query_len=5,
            seq_lens=[seq_len],
            window=window,
        )
    yield make(device, dtype, heads=2, kv_heads=2, head_dim=32, capacity=30, seq_lens=[30], window=1)  # itself only
    yield make(device, dtype, heads=2, kv_heads=2, head_dim=32, capacity=30, seq_lens=[20], window=1000)
    for starts in ([0, 19, 20], [18, 5, 1]):  # everything, the last token only, nothing visible
        yield make(device, dtype, heads=4, kv_heads=1, head_dim=64, capacity=32, seq_lens=[20, 20, 20], starts=starts)
        yield make(
            device,
            dtype,
            heads=4,
            kv_heads=4,
            head_dim=64,
            capacity=32,
            seq_lens=[20, 20, 20],
            starts=starts,
            query_len=3,
            window=6,
            sinks=True,
        )
    yield make(
        device,
        dtype,
        heads=4,
        kv_heads=2,
        head_dim=32,
        capacity=24,
        seq_lens=[100, 40],
        starts=[95, 39],
        window=8,
    )


@over_dtypes
def test_decode_attention_edges(device, dtype):
    """Slots outside of windows, rings and padding hold NaN, so that one slot too many shows."""
    for sample in edges(device, dtype):
        assert not assert_matches(SPEC, sample).isnan().any()


@over_dtypes
@pytest.mark.parametrize("scale", (-1.0, 4.0, 300.0))
def test_decode_attention_of_far_apart_scores(device, dtype, scale):
    """A score that is far below the largest weighs nothing, whatever the factor's sign."""
    far_apart(device, dtype, scale)


def far_apart(device, dtype, scale):
    for heads, length in ((2, 70), (8, 300), (5, 33)):
        sizes = dict(heads=heads, kv_heads=1, head_dim=64, capacity=length + 2)
        sample = make(device, dtype, **sizes, seq_lens=[length], starts=[3])
        keys = torch.where(torch.arange(length + 2, device=device) % 3 == 0, 1.0, -1.0)[:, None]
        change = {"q": torch.ones_like(sample.kwargs["q"]), "k_cache": sample.kwargs["k_cache"] * 0 + keys.to(dtype)}
        result = assert_matches(SPEC, replaced(SPEC, sample, scale=scale, **change))
        v = sample.kwargs["v_cache"][:, 0, 3:length].float()
        best = v[:, keys[3:length, 0] == (1 if scale > 0 else -1)].mean(1)
        eps = torch.finfo(dtype).eps
        assert (result.float().unflatten(2, (heads, 64)) - best).abs().max() <= 4 * eps * v.abs().max()


def test_decode_attention_sees_nothing_gives_zeros(device):
    sample = make(device, torch.float32, heads=2, kv_heads=1, head_dim=32, capacity=9, seq_lens=[6, 6], starts=[6, 0])
    with poisoned(device, 2 * 64 * 4):
        result = SPEC(**sample.kwargs)
    assert not result[0].any() and result[1].any()


@over_dtypes
@pytest.mark.parametrize("kv", DTYPES, ids=str)
def test_decode_attention_cache_dtypes(device, dtype, kv):
    """Any cache dtype goes with any q dtype, and the arithmetic is float32."""
    for query_len, seq_len in ((1, 40), (1, 300), (4, 77)):
        sample = make(
            device,
            dtype,
            heads=8,
            kv_heads=2,
            head_dim=64,
            capacity=311,
            query_len=query_len,
            seq_lens=[seq_len],
            kv=kv,
        )
        assert_matches(SPEC, sample)


@over_dtypes
def test_decode_attention_one_position_copies_v(device, dtype):
    """A softmax over one position is 1, so that the result has V's own bits."""
    for window, starts, seq_len in ((1, None, 11), (0, [10], 11), (0, None, 1)):
        sample = make(
            device,
            dtype,
            heads=6,
            kv_heads=2,
            head_dim=48,
            capacity=12,
            seq_lens=[seq_len],
            window=window,
            starts=starts,
        )
        v = sample.kwargs["v_cache"][:, :, seq_len - 1].repeat_interleave(3, 1).flatten(1)
        assert torch.equal(SPEC(**sample.kwargs)[:, 0], v)


@over_dtypes
@pytest.mark.parametrize("length", (1, 64, 700))
def test_decode_attention_sinks(length, device, dtype):
    """A sink of -inf takes nothing, a large sink takes everything, and a sink equal to a lone score takes half."""
    sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=length, seq_lens=[length, length], starts=[0, length])
    sample = make(device, dtype, **sizes)

    def sunk(value: float) -> torch.Tensor:
        sinks = torch.full((4,), value, device=device, dtype=dtype)
        return SPEC(**replaced(SPEC, sample, sinks=sinks).kwargs)

    without = SPEC(**sample.kwargs)
    assert same_bits(sunk(-torch.inf), without)
    assert not sunk(1000.0).any()
    sample.kwargs["k_cache"].zero_()
    sample.kwargs["v_cache"].fill_(1)
    expected = torch.full((256,), length / (length + 1), device=device).to(dtype)
    torch.testing.assert_close(sunk(0.0)[0, 0], expected)
    assert not sunk(0.0)[1].any()  # this token sees nothing


@over_dtypes
def test_decode_attention_exact_average(device, dtype):
    """Equal scores over 2^n positions average integers exactly; a slot counted twice or left out shows."""
    for length in (1, 4, 32, 256):
        sample = make(device, dtype, heads=4, kv_heads=2, head_dim=32, capacity=length + 1, seq_lens=[length])
        sample.kwargs["k_cache"][:, :, :length] = 0
        values = torch.randint(-2, 3, (1, 2, length, 32), device=device)
        values[:, :, -1] -= values.sum(2)  # they add up to zero, then to the length itself
        values[:, :, 0] += length
        if values.abs().max() > 256:  # beyond bfloat16's exact integers
            continue
        sample.kwargs["v_cache"][:, :, :length] = values.to(dtype)
        assert torch.equal(SPEC(**sample.kwargs), torch.ones(1, 1, 4 * 32, device=device, dtype=dtype))


@over_dtypes
def test_decode_attention_large_scores(device, dtype):
    """Scores far apart neither overflow nor lose the maximum, wherever in the cache it lies."""
    for length in (5, 130, 1000):
        for hot in (0, length // 2, length - 1):
            sample = make(device, dtype, heads=4, kv_heads=2, head_dim=64, capacity=length, seq_lens=[length])
            sample.kwargs["q"].fill_(10)
            sample.kwargs["k_cache"].copy_(sample.kwargs["k_cache"].sign() * 5)
            sample.kwargs["k_cache"][:, :, hot] = 50
            v = sample.kwargs["v_cache"][:, :, hot].repeat_interleave(2, 1).flatten(1)
            assert torch.equal(SPEC(**sample.kwargs)[:, 0], v)


@over_dtypes
def test_decode_attention_special_values(device, dtype):
    """A NaN key spoils its head group, a NaN or infinite value its column, and nothing else."""
    for length in (9, 200):
        sample = make(device, dtype, heads=4, kv_heads=2, head_dim=32, capacity=length, seq_lens=[length, length])
        sample.kwargs["k_cache"][0, 1, length - 2, 3] = float("nan")
        sample.kwargs["v_cache"][1, 0, 1, 5] = float("inf")
        sample.kwargs["v_cache"][1, 1, length - 1, 31] = float("nan")
        result = assert_matches(SPEC, sample).view(2, 4, 32)
        assert result[0, :2].isfinite().all() and result[0, 2:].isnan().all()
        assert (~result[1].isfinite()).nonzero().tolist() == [[0, 5], [1, 5], [2, 31], [3, 31]]


def test_decode_attention_subnormals_survive(device):
    """Values far below float16's normal range come back; nothing flushes them."""
    sample = make(device, torch.float16, heads=2, kv_heads=1, head_dim=32, capacity=600, seq_lens=[600])
    sample.kwargs["v_cache"].fill_(2.0**-23)
    assert_matches(SPEC, sample)
    sample.kwargs["k_cache"].zero_()
    assert SPEC(**sample.kwargs).float().max() == 2.0**-23


@over_dtypes
def test_decode_attention_reuses_its_workspace(device, dtype):
    """One workspace, zeroed once, serves calls of changing shape in any order, as fresh ones would."""
    calls = [
        make(
            device,
            dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=2100,
            query_len=query_len,
            seq_lens=seq_lens,
        )
        for heads, kv_heads, head_dim, query_len, seq_lens in (
            (8, 2, 64, 1, [2050]),
            (8, 2, 64, 1, [3]),
            (8, 8, 128, 1, [700, 2000]),
            (4, 1, 32, 16, [1500]),
            (2, 1, 256, 1, [2048]),
            (8, 2, 64, 3, [900, 17, 2100]),
        )
    ]
    size = max(workspace_bytes(*call.kwargs["q"].shape) for call in calls)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    for call in calls:
        assert_matches(SPEC, call)
        with poisoned(device, workspace_bytes(*call.kwargs["q"].shape)):  # memory that the op allocates is not zero
            call.fresh = SPEC(**call.kwargs)
    for call in (*calls, *reversed(calls), calls[0], calls[0]):
        assert same_bits(SPEC(**call.kwargs, workspace=workspace), call.fresh)


@pytest.mark.parametrize("kv", DTYPES, ids=str)
def test_decode_attention_follows_kv_table(device, kv):
    """Addresses and capacity come from the table's row; the tensors given, full of NaN, are not read."""
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "seq_lens": [100, 37], "window": 16, "query_len": 2}
    actual = make(device, torch.float32, capacity=40, kv=kv, **shape)
    k_cache, v_cache = actual.kwargs["k_cache"], actual.kwargs["v_cache"]
    table = torch.tensor([[0, 0, 0], [k_cache.data_ptr(), v_cache.data_ptr(), 40], [0, 0, 0]], device=device)
    decoy = torch.full((2, 2, 23, 64), float("nan"), device=device, dtype=kv)
    call = replaced(SPEC, actual, k_cache=decoy, v_cache=decoy.clone(), kv_table=table, layer=1)
    if is_native(SPEC, device):
        assert same_bits(SPEC(**call.kwargs), SPEC(**actual.kwargs))
    else:
        with pytest.raises(NotImplementedError, match="kv_table needs the native library"):
            SPEC(**call.kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {"q": torch.randn(1, 17, 4, 32)},
            r"q has shape \(1, 17, 4, 32\), expected \[batch, 1 to 16, heads, head_dim\]",
        ),
        ({"q": torch.randn(1, 1, 5, 32)}, "q has 5 heads of 32, the cache 2 of 32"),
        ({"window": -1}, "window is -1"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"starts is torch.int32 \(2,\)"),
        ({"workspace": torch.zeros(8, dtype=torch.uint8)}, "workspace has 8 bytes"),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\), expected \(4,\)"),
        ({"k_cache": torch.randn(1, 2, 16, 32)[:, :, ::2]}, "have to be contiguous"),
    ),
)
def test_decode_attention_names_the_fault(change, message):
    sample = make(CPU, torch.float32, heads=4, kv_heads=2, head_dim=32, capacity=8, seq_lens=[5])
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)


def test_decode_attention_reference_is_transformers():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sample = make(CPU, torch.float32, heads=4, kv_heads=2, head_dim=32, capacity=9, seq_lens=[9, 9])
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    q, k, v = sample.kwargs["q"].transpose(1, 2), sample.kwargs["k_cache"], sample.kwargs["v_cache"]
    expected, _ = sdpa_attention_forward(module, q, k, v, None, scaling=sample.kwargs["scale"])
    got = SPEC.reference(**sample.kwargs)
    assert (got - expected.flatten(2)).abs().max() <= 4 * torch.finfo(torch.float32).eps


def test_decode_attention_sinks_are_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    sizes = dict(heads=4, kv_heads=2, head_dim=32, capacity=9, seq_lens=[9, 9])
    sample = make(CPU, torch.float32, **sizes, sinks=True)
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sample.kwargs["sinks"]
    q, k, v = sample.kwargs["q"].transpose(1, 2), sample.kwargs["k_cache"], sample.kwargs["v_cache"]
    expected, _ = eager_attention_forward(module, q, k, v, None, scaling=sample.kwargs["scale"])
    got = SPEC.reference(**sample.kwargs)
    assert (got - expected.flatten(2)).abs().max() <= 4 * torch.finfo(torch.float32).eps


@over_instruction_sets
def test_decode_attention_every_route(isa):
    run_limited(SPEC, __file__, isa)


def every_route(isa: str) -> None:
    for dtype in DTYPES:
        for sample in itertools.chain(odd_sizes(CPU, dtype), edges(CPU, dtype), SPEC.samples(CPU, dtype)):
            found = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found.append(assert_matches(SPEC, sample, isa))
            assert same_bits(*found), "the result depends on the number of threads"
        for scale in (-1.0, 4.0, 300.0):
            far_apart(CPU, dtype, scale)


if __name__ == "__main__":
    main(SPEC, every_route)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(biases=torch.zeros(4)), "expected torch.float32 \\(4, 1 or more\\)"),
        (dict(biases=torch.zeros(3, 7)), "expected torch.float32 \\(4, 1 or more\\)"),
        (dict(biases=torch.zeros(4, 0)), "expected torch.float32 \\(4, 1 or more\\)"),
        (dict(biases=torch.zeros(4, 7, dtype=torch.float16)), "biases are torch.float16"),
        (dict(biases=torch.zeros(4, 7), slopes=torch.ones(4)), "not with slopes or sinks"),
        (dict(biases=torch.zeros(4, 7), q=torch.zeros(1, 2, 4, 32)), "one new token"),
    ],
)
def test_biases_that_do_not_fit(changes, message):
    sample = make(CPU, torch.float32, heads=4, kv_heads=2, head_dim=32, capacity=16, seq_lens=[9])
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **changes).kwargs)


def test_views_of_biases_and_keys_that_are_further_behind(device):
    """The last bias holds of all keys that are further behind; one bias alone changes nothing."""
    sample = make(device, torch.float32, heads=4, kv_heads=2, head_dim=64, capacity=330, seq_lens=[300])
    table = torch.randn(4, 40, device=device)
    far = torch.cat((table, table[:, -1:].expand(-1, 300)), dim=1)
    of_table, of_all, of_one = (replaced(SPEC, sample, biases=each) for each in (far[:, :40], far, table[:, :1]))
    assert_matches(SPEC, of_table)
    assert torch.equal(SPEC(**of_table.kwargs), SPEC(**of_all.kwargs))
    torch.testing.assert_close(SPEC(**of_one.kwargs), SPEC(**sample.kwargs), rtol=1e-5, atol=1e-5)
