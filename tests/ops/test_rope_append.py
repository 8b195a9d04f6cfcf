"""rope_append: the common tests, ring slots, the untouched rest of the cache, kv_table, transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import DTYPES, assert_matches, common_tests, is_native, ours, over_dtypes, replaced
from memory import duplicate, same_bits

from hf_fastpath.ops.rope_append import SPEC, random_angles, random_caches, random_head_norms
from hf_fastpath.registry import OpInputError, Sample


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
    rotary_dim=None,
    bias=False,
    kv=None,
    neighbors=False,
) -> Sample:
    """Make a call; without ``rotary_dim`` nothing is rotated; ``kv`` is the cache's dtype if it is not ``dtype``."""
    batch, features = len(seq_lens), (heads + 2 * kv_heads) * head_dim
    cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype, neighbors)
    shape = (batch, kv_heads, capacity, head_dim)
    caches = [torch.randn(shape, device=device).to(kv or dtype) for _ in range(2)]
    return Sample(
        qkv=torch.randn(batch, query_len, features, device=device).to(dtype),
        bias=torch.randn(features, device=device).to(dtype) if bias else None,
        cos=cos,
        sin=sin,
        k_cache=caches[0],
        v_cache=caches[1],
        seq_lens=torch.tensor(seq_lens, device=device, dtype=torch.int32),
        num_heads=heads,
        neighbors=neighbors,
    )


def odd_sizes(device, dtype):
    for query_len, neighbors in itertools.product(range(1, 17), (False, True)):
        yield make(
            device,
            dtype,
            heads=3,
            kv_heads=1,
            head_dim=40,
            capacity=16 + query_len,
            query_len=query_len,
            seq_lens=[query_len, 5 * query_len + 3],
            rotary_dim=2 * query_len,
            bias=query_len % 2 == 0,
            neighbors=neighbors,
        )
    for head_dim in (32, 56, 72, 96, 120, 192, 256):
        for kv in DTYPES:
            yield make(
                device,
                dtype,
                heads=5,
                kv_heads=5,
                head_dim=head_dim,
                capacity=3,
                query_len=2,
                seq_lens=[1000],
                rotary_dim=head_dim,
                kv=kv,
            )


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("kv", DTYPES, ids=str)
def test_rope_append_writes_its_slots_and_no_others(device, dtype, kv):
    """Position p goes to slot p mod capacity, however often that wraps; every other slot keeps its bits."""
    query_len, capacity = 3, 7
    seq_lens = [3, 7, 8, 9, 10, 700, 2_000_000]
    sample = make(
        device,
        dtype,
        heads=2,
        kv_heads=2,
        head_dim=32,
        capacity=capacity,
        query_len=query_len,
        seq_lens=seq_lens,
        rotary_dim=16,
        kv=kv,
    )
    result = ours(SPEC, sample)
    heads_of_v = sample.kwargs["qkv"].view(len(seq_lens), query_len, 6, 32)[:, :, 4:]
    for row, seq_len in enumerate(seq_lens):
        slots = [(seq_len - query_len + i) % capacity for i in range(query_len)]
        rest = [slot for slot in range(capacity) if slot not in slots]
        for name in ("k_cache", "v_cache"):
            assert same_bits(result[name][row, :, rest], sample.kwargs[name][row, :, rest]), (name, seq_len)
        assert same_bits(result["v_cache"][row, :, slots], heads_of_v[row].transpose(0, 1).to(kv)), seq_len


@over_dtypes
def test_rope_append_without_rotation_copies(device, dtype):
    """As in GPT-2, q and the appended k and v have the projection's own bits."""
    sample = make(device, dtype, heads=3, kv_heads=3, head_dim=64, capacity=9, query_len=4, seq_lens=[4, 9])
    result = ours(SPEC, sample)
    q, k, v = sample.kwargs["qkv"].view(2, 4, 9, 64).split(3, dim=2)
    assert same_bits(result["result"], q)
    for row, first in ((0, 0), (1, 5)):
        assert same_bits(result["k_cache"][row, :, first : first + 4], k[row].transpose(0, 1))
        assert same_bits(result["v_cache"][row, :, first : first + 4], v[row].transpose(0, 1))


@over_dtypes
def test_rope_append_leaves_the_rest_of_a_head(device, dtype):
    """Beyond rotary_dim, elements pass through bit for bit."""
    sample = make(device, dtype, heads=4, kv_heads=2, head_dim=80, capacity=8, seq_lens=[5], rotary_dim=32)
    result = ours(SPEC, sample)
    heads = sample.kwargs["qkv"].view(1, 1, 8, 80)
    assert same_bits(result["result"][..., 32:], heads[:, :, :4, 32:])
    assert same_bits(result["k_cache"][:, :, 4, 32:], heads[:, 0, 4:6, 32:])


@over_dtypes
def test_rope_append_shares_angles_between_rows(device, dtype):
    """cos and sin of batch 1 serve every row; so do expanded cos and sin."""
    sample = make(device, dtype, heads=4, kv_heads=2, head_dim=32, capacity=9, seq_lens=[3, 9, 30], rotary_dim=32)
    one = {name: sample.kwargs[name][:1] for name in ("cos", "sin")}
    shared = replaced(SPEC, sample, **one)
    expanded = replaced(SPEC, sample, **{name: tensor.expand(3, -1, -1) for name, tensor in one.items()})
    assert same_bits(assert_matches(SPEC, shared), assert_matches(SPEC, expanded))


@over_dtypes
@pytest.mark.parametrize(("head_dim", "rotary_dim"), ((64, 64), (64, 32), (40, 20)))
def test_rope_append_of_neighbors_is_that_of_halves_in_another_order(device, dtype, head_dim, rotary_dim):
    """Bit for bit: elements 2i and 2i + 1 turn as elements i and i + rotary_dim / 2 do where they lie so."""
    sizes = dict(heads=3, kv_heads=2, head_dim=head_dim, capacity=9, query_len=2, seq_lens=[2, 30])
    sample = make(device, dtype, **sizes, rotary_dim=rotary_dim, bias=True, neighbors=True)
    order = torch.arange(head_dim, device=device)
    order[:rotary_dim] = torch.cat((order[:rotary_dim:2], order[1:rotary_dim:2]))
    given = {name: sample.kwargs[name].unflatten(-1, (-1, head_dim)).clone() for name in ("qkv", "bias")}
    for each in given.values():
        each[..., :5, :] = each[..., :5, order]  # queries and keys
    given = {name: each.flatten(-2) for name, each in given.items()}
    given |= {name: sample.kwargs[name][..., order[:rotary_dim]] for name in ("cos", "sin")}
    given["k_cache"] = sample.kwargs["k_cache"][..., order]
    got, expected = ours(SPEC, sample), ours(SPEC, replaced(SPEC, sample, **given, neighbors=False))
    assert same_bits(got["result"][..., order], expected["result"])
    assert same_bits(got["k_cache"][..., order], expected["k_cache"])
    assert same_bits(got["v_cache"], expected["v_cache"])


def _by_head(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _last_first(x):
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def _beside_gates(x):
    return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]


@over_dtypes
@pytest.mark.parametrize("lie", (_by_head, _last_first, _beside_gates), ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("kv", (None, torch.int8), ids=("float", "int8"))
@pytest.mark.parametrize("norms", ("none", "each", "all"))
def test_rope_append_of_heads_apart_is_that_of_one_projection(device, dtype, norms, kv, lie):
    """Bit for bit, however heads, tokens and rows lie."""
    heads, head_dim, lens = (6, 2, 2), 64, [3, 17]
    sizes = dict(heads=heads[0], kv_heads=heads[1], head_dim=head_dim, capacity=9, query_len=3, seq_lens=lens)
    given = make(device, dtype, **sizes, rotary_dim=32, bias=True).kwargs
    caches, scales = random_caches((len(lens), heads[1], 9, head_dim), device, kv or dtype)
    given |= dict(k_cache=caches[0], v_cache=caches[1], k_scales=scales[0], v_scales=scales[1])
    if norms != "none":
        given |= random_head_norms(norms, *heads[:2], head_dim, device, dtype)
    q, k, v = map(lie, given["qkv"].unflatten(-1, (-1, head_dim)).split(heads, dim=2))
    expected, got = ours(SPEC, Sample(**given)), ours(SPEC, Sample(**given | dict(qkv=q, k=k, v=v)))
    for name in ("result", "k_cache", "v_cache", *(() if kv is None else ("k_scales", "v_scales"))):
        assert same_bits(got[name], expected[name]), name


@over_dtypes
@pytest.mark.parametrize("norms", ("each", "all"))
def test_rope_append_of_heads_apart_that_are_not_aligned(device, dtype, norms):
    sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=9, query_len=2, seq_lens=[3, 17])
    given = make(device, dtype, **sizes, rotary_dim=64).kwargs | random_head_norms(norms, 4, 2, 64, device, dtype)
    together = torch.nn.functional.pad(given["qkv"].unflatten(-1, (-1, 64)), (1, 0))[..., 1:]
    q, k, v = together.split([4, 2, 2], dim=2)
    assert_matches(SPEC, Sample(**given | dict(qkv=q, k=k, v=v)))


@over_dtypes
def test_rope_append_special_values(device, dtype):
    """NaN and infinity in q, k and v reach their own pair of elements and nothing else."""
    sample = make(device, dtype, heads=2, kv_heads=1, head_dim=32, capacity=4, seq_lens=[2, 6], rotary_dim=32)
    qkv = sample.kwargs["qkv"]
    qkv[0, 0, 5], qkv[1, 0, 2 * 32 + 17], qkv[1, 0, 3 * 32 + 31] = float("nan"), float("inf"), float("nan")
    result = assert_matches(SPEC, sample)
    assert result[0, 0, 0].isnan().nonzero().flatten().tolist() == [5, 21]


def test_rope_append_overflow_of_a_half_cache_is_infinite(device):
    """A key beyond float16's range becomes inf in a float16 cache, as a cast does."""
    sample = make(device, torch.float32, heads=1, kv_heads=1, head_dim=32, capacity=4, seq_lens=[2], kv=torch.float16)
    sample.kwargs["qkv"][0, 0, 32], sample.kwargs["qkv"][0, 0, 64] = 1e6, -65520.0
    result = ours(SPEC, sample)
    assert result["k_cache"][0, 0, 1, 0] == float("inf") and result["v_cache"][0, 0, 1, 0] == -float("inf")


@pytest.mark.parametrize("shift", (0, 1))
@pytest.mark.parametrize("kv", DTYPES, ids=str)
def test_rope_append_follows_kv_table(device, kv, shift):
    """Addresses, aligned or not, and capacity come from the table's row, and the tensors given are not touched."""
    sample = make(
        device,
        torch.float32,
        heads=4,
        kv_heads=2,
        head_dim=64,
        capacity=6,
        query_len=2,
        seq_lens=[2, 11],
        rotary_dim=64,
        kv=kv,
    )
    actual = make(device, torch.float32, heads=4, kv_heads=2, head_dim=64, capacity=9, seq_lens=[1, 1], kv=kv)
    k_cache, v_cache = (
        torch.nn.functional.pad(actual.kwargs[name].flatten(), (shift, 0))[shift:].view_as(actual.kwargs[name])
        for name in ("k_cache", "v_cache")
    )
    table = torch.tensor([[0, 0, 0], [k_cache.data_ptr(), v_cache.data_ptr(), 9]], device=device)
    expected = ours(SPEC, replaced(SPEC, sample, k_cache=k_cache, v_cache=v_cache))
    call = replaced(SPEC, sample.map_tensors(duplicate), kv_table=table, layer=1)
    if not is_native(SPEC, device):
        with pytest.raises(NotImplementedError, match="kv_table needs the native library"):
            SPEC(**call.kwargs)
        return
    assert same_bits(SPEC(**call.kwargs), expected["result"])
    assert same_bits(k_cache, expected["k_cache"]) and same_bits(v_cache, expected["v_cache"])
    for name in ("k_cache", "v_cache"):
        assert same_bits(call.kwargs[name], sample.kwargs[name]), f"{name} was written beside the table's cache"


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"seq_lens": torch.tensor([5])}, "seq_lens is torch.int64"),
        ({"sin": None}, "cos and sin go together"),
        ({"num_heads": 3}, "qkv has 128 features, expected .* = 160"),
        ({"k": torch.zeros(1, 1, 1, 32)}, "k and v go together"),
        ({name: torch.zeros(1, 1, 1, 32) for name in "kv"}, r"\(1, 1, 128\), expected \[batch, 1 or more, heads"),
        ({"qkv": torch.zeros(1, 1, 3, 32), **{name: torch.zeros(1, 1, 1, 32) for name in "kv"}}, r"expected \(1, 1, 2"),
        (
            {"qkv": torch.zeros(1, 1, 2, 32), "k": torch.zeros(1, 1, 1, 32), "v": torch.zeros(1, 1, 2, 32)},
            r"v has shape \(1, 1, 2, 32\), expected \(1, 1, 1, 32\)",
        ),
        ({"kv_table": torch.zeros(1, 2, dtype=torch.int64)}, "kv_table is torch.int64"),
        ({"kv_table": torch.zeros(2, 3, dtype=torch.int64), "layer": 2}, "layer is 2, expected 0 to 1"),
        ({"q_norm_weight": torch.ones(32)}, "q_norm_weight and k_norm_weight go together"),
        ({"q_norm_weight": torch.ones(64), "k_norm_weight": torch.ones(16)}, r"expected \(32,\) both, or"),
        (
            {"q_norm_weight": torch.ones(32).half(), "k_norm_weight": torch.ones(32)},
            "q_norm_weight has dtype",
        ),
    ),
)
def test_rope_append_names_the_fault(change, message):
    sample = make(
        torch.device("cpu"),
        torch.float32,
        heads=2,
        kv_heads=1,
        head_dim=32,
        capacity=8,
        seq_lens=[5],
        rotary_dim=32,
    )
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)


def test_rope_append_refuses_more_tokens_than_slots():
    cpu = torch.device("cpu")
    sample = make(cpu, torch.float32, heads=2, kv_heads=1, head_dim=32, capacity=3, query_len=4, seq_lens=[4])
    with pytest.raises(OpInputError, match="query_len 4 exceeds the cache's capacity 3"):
        SPEC(**sample.kwargs)


@over_dtypes
def test_rope_append_reference_is_transformers(dtype):
    from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb

    cpu = torch.device("cpu")
    sample = make(
        cpu, dtype, heads=4, kv_heads=2, head_dim=32, capacity=9, query_len=5, seq_lens=[5, 5], rotary_dim=32
    ).map_tensors(duplicate)
    q, k, v = sample.kwargs["qkv"].view(2, 5, 8, 32).transpose(1, 2).split([4, 2, 2], dim=1)
    q, k = apply_rotary_pos_emb(q, k, sample.kwargs["cos"], sample.kwargs["sin"])
    assert same_bits(SPEC.reference(**sample.kwargs), q.transpose(1, 2))
    assert same_bits(sample.kwargs["k_cache"][:, :, :5], k)
    assert same_bits(sample.kwargs["v_cache"][:, :, :5], v)


@over_dtypes
def test_rope_append_reference_of_neighbors_is_transformers(dtype):
    """Where transformers turns in float32 and rounds once."""
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

    cpu = torch.device("cpu")
    sizes = dict(heads=4, kv_heads=2, head_dim=32, capacity=9, query_len=5, seq_lens=[5, 5])
    sample = make(cpu, dtype, **sizes, rotary_dim=32, neighbors=True).map_tensors(duplicate)
    q, k, _ = sample.kwargs["qkv"].view(2, 5, 8, 32).transpose(1, 2).split([4, 2, 2], dim=1)
    q, k = apply_rotary_pos_emb(q, k, sample.kwargs["cos"], sample.kwargs["sin"])
    close = dict(rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(ours(SPEC, sample)["result"], q.transpose(1, 2), **close)
    torch.testing.assert_close(ours(SPEC, sample)["k_cache"][:, :, :5], k, **close)
