"""Quantized KV caches: the quants and scales of rope_append, and decode_attention over them."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import DTYPES, describe, is_native, ours, over_dtypes, replaced
from memory import duplicate, same_bits, upcast
from routes import main, over_instruction_sets, run_limited

from hf_fastpath.ops import decode_attention as ATTENTION
from hf_fastpath.ops import qkv_rope_append as QKV
from hf_fastpath.ops import rope_append as APPEND
from hf_fastpath.ops.kv_cache import LARGEST_QUANT, dequantized, quantized
from hf_fastpath.ops.rope_append import random_angles
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")
over_quants = pytest.mark.parametrize("kv", LARGEST_QUANT, ids=("int8", "fp8"))
HEAD_DIMS = (32, 40, 64, 80, 96, 128, 200, 256)


# ---- the numbers -------------------------------------------------------------------------------------------


@over_quants
def test_quants_are_the_nearest(kv):
    """No quant is clipped, or further from its value than half of the distance between its neighbors."""
    torch.manual_seed(0)
    states = torch.randn(50, 4, 64) * torch.logspace(-30, 30, 50)[:, None, None]
    quants, scales = quantized(states, kv)
    most = LARGEST_QUANT[kv]
    exact = states.abs().amax(-1) / most
    assert ((scales.float() >= exact) & (scales.float() <= exact * (1 + 2**-7))).all()
    error = (dequantized(quants, scales, torch.float64) - states).abs() / scales.double()[..., None]
    # int8: half a step; e4m3: half of a mantissa's last place, 2^-4 of the value, or of the smallest step
    bound = 0.5 if kv == torch.int8 else torch.clamp(states.abs() / scales.float()[..., None] / 16, min=2**-10)
    assert (error <= bound + 1e-5).all()
    assert quants.float().abs().max() == most or kv == torch.int8


@over_quants
def test_special_heads(kv):
    """Zeros stay, the smallest floats vanish without noise, and a value that is not finite makes only its head NaN."""
    states = torch.ones(6, 32)
    states[0] = 0
    states[1, 3] = torch.inf
    states[2, 31] = torch.nan
    states[3] = 1e-45
    states[4] = 3e38
    quants, scales = quantized(states, kv)
    values = dequantized(quants, scales, torch.float32)
    assert not values[0].any() and values[1:3].isnan().all() and values[3].abs().max() <= 1e-40
    assert values[4].isfinite().all() and (values[4] > 2.9e38).all() and (values[5] - 1).abs().max() < 0.01


def test_scales_are_as_wide_as_float32():
    """A head that float16 could not hold comes back."""
    states = torch.full((1, 32), 1e6)
    assert (dequantized(*quantized(states, torch.int8), torch.float32) - states).abs().max() < 8e3


# ---- rope_append -------------------------------------------------------------------------------------------


def append_call(device, dtype, kv, *, heads=3, kv_heads=2, head_dim=64, rotary_dim=None, bias=True) -> Sample:
    """Append five tokens of two rows, which wrap in a ring of seven slots."""
    batch, query_len, capacity = 2, 5, 7
    features = (heads + 2 * kv_heads) * head_dim
    cos, sin = random_angles(batch, query_len, rotary_dim, device, dtype)
    (k, k_scales), (v, v_scales) = (
        quantized(torch.randn(batch, kv_heads, capacity, head_dim, device=device), kv) for _ in range(2)
    )
    return Sample(
        qkv=torch.randn(batch, query_len, features, device=device).to(dtype),
        bias=torch.randn(features, device=device).to(dtype) if bias else None,
        cos=cos,
        sin=sin,
        k_cache=k,
        v_cache=v,
        seq_lens=torch.tensor([5, 17], device=device, dtype=torch.int32),
        num_heads=heads,
        k_scales=k_scales,
        v_scales=v_scales,
    )


def assert_quantizes(spec, call: Sample) -> None:
    """Assert that quants and scales are, bit for bit, those of what the op puts into a float32 cache, that other slots
    keep theirs, and that the queries are the same."""
    plain = {name: call.kwargs[name].float() for name in ("k_cache", "v_cache")}
    values = ours(spec, replaced(spec, call, **plain, k_scales=None, v_scales=None))
    found = ours(spec, call)
    assert same_bits(found["result"], values["result"])
    capacity, query_len = call.kwargs["k_cache"].shape[2], found["result"].shape[1]
    for row, length in enumerate(call.kwargs["seq_lens"].tolist()):
        written = sorted((length - query_len + i) % capacity for i in range(query_len))
        rest = [slot for slot in range(capacity) if slot not in written]
        for name in ("k", "v"):
            quants, scales = found[f"{name}_cache"][row], found[f"{name}_scales"][row]
            expected = quantized(values[f"{name}_cache"][row], quants.dtype)
            assert same_bits(quants.view(torch.int8)[:, written], expected[0].view(torch.int8)[:, written])
            exact = dict(rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(scales[:, written], expected[1][:, written], **exact)
            before = call.kwargs[f"{name}_cache"][row], call.kwargs[f"{name}_scales"][row]
            assert same_bits(quants.view(torch.int8)[:, rest], before[0].view(torch.int8)[:, rest])
            assert same_bits(scales[:, rest], before[1][:, rest])


def append_calls(device, dtype):
    for kv in LARGEST_QUANT:
        for head_dim in (*HEAD_DIMS, 20, 30, 512):
            yield append_call(device, dtype, kv, head_dim=head_dim, rotary_dim=head_dim // 4 * 2)
        yield append_call(device, dtype, kv, rotary_dim=64, heads=8, kv_heads=1, bias=False)
        yield append_call(device, dtype, kv)
        special = append_call(device, dtype, kv, rotary_dim=64, bias=False)
        qkv = special.kwargs["qkv"].view(2, 5, 7, 64)
        qkv[0, 0, 3], qkv[0, 1, 4, 5], qkv[1, 2, 5, 63], qkv[1, 3, 6] = 0, torch.inf, torch.nan, 1e-7
        qkv[1, 4, 6] = torch.finfo(dtype).max
        qkv[0, 2, 6] = torch.finfo(dtype).tiny * 2.0**-5
        yield special


@over_dtypes
def test_rope_append_quantizes_as_the_reference(device, dtype):
    for call in append_calls(device, dtype):
        assert_quantizes(APPEND, call)


@over_dtypes
@over_quants
def test_qkv_rope_append_quantizes_as_the_reference(device, dtype, kv):
    sizes = dict(heads=4, kv_heads=2, head_dim=64, rotary_dim=64)
    for joined in (False, True):
        kept = append_call(device, dtype, kv, **sizes).kwargs
        del kept["qkv"], kept["bias"]
        widths = [8 * 64] if joined else [4 * 64, 2 * 64, 2 * 64]
        weights = [torch.randn(width, 104, device=device).to(dtype) / 10 for width in widths]
        names = dict(zip(("q_weight", "k_weight", "v_weight"), [*weights, None, None]))
        absent = dict.fromkeys(("q_bias", "k_bias", "v_bias"))
        x = torch.randn(2, 5, 104, device=device).to(dtype)
        norm = dict(norm="rms", norm_weight=torch.randn(104, device=device).to(dtype), norm_eps=1e-5)
        assert_quantizes(QKV, Sample(x=x, **names, **absent, transposed=False, **kept, **norm))


@over_quants
def test_rope_append_follows_kv_table_to_the_scales(device, kv):
    call = append_call(device, torch.float32, kv)
    if not is_native(APPEND, device):
        pytest.skip("the reference cannot follow addresses")
    actual = append_call(device, torch.float32, kv).kwargs
    names = ("k_cache", "v_cache", "k_scales", "v_scales")
    expected = ours(APPEND, replaced(APPEND, call, **{name: actual[name] for name in names}))
    k, v, k_scales, v_scales = (actual[name].data_ptr() for name in names)
    table = torch.tensor([[0] * 5, [k, v, 7, k_scales, v_scales]], device=device)
    given = replaced(APPEND, call.map_tensors(duplicate), kv_table=table, layer=1)
    assert same_bits(APPEND(**given.kwargs), expected["result"])
    for name in names:
        assert same_bits(actual[name], expected[name]), name
        assert same_bits(given.kwargs[name], call.kwargs[name]), f"{name} was written beside the table's"


# ---- decode_attention --------------------------------------------------------------------------------------


def attention_call(
    device, dtype, kv, *, heads, kv_heads, head_dim, capacity, seq_lens, query_len=1, starts=None, window=0, sinks=False
) -> Sample:
    """Make a call whose cache holds NaN as scales, and any quants, in every slot that no token sees."""
    caches = []
    for _ in range(2):
        states = torch.randn(len(seq_lens), kv_heads, capacity, head_dim, device=device)
        states *= torch.exp2(torch.randint(-2, 1, states.shape[:3], device=device))[..., None]
        quants, scales = quantized(states, kv)
        for row, seq_len in enumerate(seq_lens):
            oldest = max(seq_len - query_len - window + 1 if window else 0, starts[row] if starts else 0)
            seen = {position % capacity for position in range(max(oldest, 0), seq_len)}
            scales[row, :, [slot for slot in range(capacity) if slot not in seen]] = torch.nan
        caches.append((quants, scales))
    (k, k_scales), (v, v_scales) = caches
    return Sample(
        q=torch.randn(len(seq_lens), query_len, heads, head_dim, device=device).to(dtype),
        k_cache=k,
        v_cache=v,
        seq_lens=torch.tensor(seq_lens, device=device, dtype=torch.int32),
        starts=None if starts is None else torch.tensor(starts, device=device, dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
        sinks=torch.linspace(-2, 2, heads, device=device).to(dtype) if sinks else None,
        k_scales=k_scales,
        v_scales=v_scales,
    )


def attention_calls(device, dtype):
    for kv, head_dim in itertools.product(LARGEST_QUANT, HEAD_DIMS):
        for length in (1, 19, 130, 1000):
            sizes = dict(heads=4, kv_heads=2, head_dim=head_dim, capacity=length + 3)
            yield attention_call(device, dtype, kv, **sizes, seq_lens=[length])
    for kv, group in itertools.product(LARGEST_QUANT, range(1, 9)):
        sizes = dict(heads=2 * group, kv_heads=2, head_dim=64, capacity=301)
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[77, 301], starts=[5, 0])
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[290, 23], query_len=group)
    for kv, length in itertools.product(LARGEST_QUANT, (7, 8, 24, 25, 100, 1000)):  # the window fills, the ring wraps
        sizes = dict(heads=4, kv_heads=2, head_dim=80, capacity=24)
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[length], window=8, sinks=True)
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[length, 9], query_len=5, window=8, starts=[4, 3])
    for kv in LARGEST_QUANT:  # several chunks, or splits, of every kind of rows
        sizes = dict(heads=8, kv_heads=1, head_dim=128, capacity=2100)
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[2087], sinks=True)
        yield attention_call(device, dtype, kv, **sizes, seq_lens=[2100, 1500], query_len=3, window=1200)


def assert_rule_over(calls, what: str) -> None:
    """Assert the numerics rule over dequantized caches, for the mean over the calls of their largest errors.

    In a single call of few numbers in float32 chance would decide. A slot too many shows as NaN.
    """
    errors = []
    for call in calls:
        ref = ATTENTION.reference(**call.map_tensors(upcast).kwargs)
        found = [f(**call.map_tensors(duplicate).kwargs) for f in (ATTENTION.overload, ATTENTION.reference)]
        assert all(out.isfinite().all() for out in found), describe(ATTENTION, call)
        errors.append([(out.double() - ref).abs().max().item() / ref.abs().max().item() for out in found])
    mine, stock = torch.tensor(errors).mean(0).tolist()
    bound = 2 * stock + torch.finfo(found[0].dtype).eps
    assert mine <= bound, f"{what}: mean error {mine:.3e}, bound {bound:.3e} (stock {stock:.3e})"


@over_dtypes
def test_decode_attention_of_quants(device, dtype):
    assert_rule_over(attention_calls(device, dtype), str(dtype))


@over_dtypes
@over_quants
def test_decode_attention_of_one_position_is_v(device, dtype, kv):
    sizes = dict(heads=6, kv_heads=2, head_dim=48, capacity=12)
    call = attention_call(device, dtype, kv, **sizes, seq_lens=[11], window=1)
    v = dequantized(call.kwargs["v_cache"], call.kwargs["v_scales"], dtype)[:, :, 10]
    assert torch.equal(ATTENTION(**call.kwargs)[:, 0], v.repeat_interleave(3, 1).flatten(1))


@over_quants
def test_every_quant_is_read_as_what_it_stands_for(device, kv):
    """All bytes but e4m3's NaN are values of positions that get all of the weight, with a scale of their own."""
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device).view(torch.int8)
    known = bytes_[bytes_.view(kv).float().isfinite()]
    dim = 64
    quants = torch.nn.functional.pad(known, (0, -len(known) % dim)).view(1, 1, -1, dim).view(kv)
    scales = torch.linspace(0.5, 3, quants.shape[2], device=device).to(torch.bfloat16)[None, None]
    q = torch.randn(1, 1, 1, dim, device=device)
    for slot in range(quants.shape[2]):
        given = dict(k_scales=scales, v_scales=scales, window=1)
        lens = torch.tensor([slot + 1], dtype=torch.int32, device=device)
        out = ATTENTION(q, quants, quants, lens, None, 1.0, **given)
        assert torch.equal(out[0, 0], dequantized(quants, scales, torch.float32)[0, 0, slot])


@over_quants
def test_decode_attention_shows_heads_that_are_not_finite(device, kv):
    """A visible scale of NaN spoils its head's group if it is a key's, its whole output if it is a value's, no more."""
    for length in (9, 200):
        sizes = dict(heads=4, kv_heads=2, head_dim=64, capacity=length)
        call = attention_call(device, torch.float32, kv, **sizes, seq_lens=[length, length])
        call.kwargs["k_scales"][0, 1, length - 2] = torch.nan
        call.kwargs["v_scales"][1, 0, 3] = torch.nan
        result = ATTENTION(**call.kwargs).view(2, 4, 64)
        assert result[0, :2].isfinite().all() and result[0, 2:].isnan().all()
        assert result[1, 2:].isfinite().all() and result[1, :2].isnan().all()


@over_quants
def test_decode_attention_follows_kv_table_to_the_scales(device, kv):
    if not is_native(ATTENTION, device):
        pytest.skip("the reference cannot follow addresses")
    sizes = dict(heads=8, kv_heads=2, head_dim=64, seq_lens=[40, 37])
    call = attention_call(device, torch.float32, kv, **sizes, capacity=41)
    other = attention_call(device, torch.float32, kv, **sizes, capacity=50).kwargs
    names = ("k_cache", "v_cache", "k_scales", "v_scales")
    k, v, k_scales, v_scales = (call.kwargs[name].data_ptr() for name in names)
    table = torch.tensor([[0] * 5, [k, v, 41, k_scales, v_scales]], device=device)
    kept = {name: other[name] for name in names}
    given = replaced(ATTENTION, call, **kept, kv_table=table, layer=1)
    assert same_bits(ATTENTION(**given.kwargs), ATTENTION(**call.kwargs))


# ---- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", (APPEND, ATTENTION), ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda a: {"k_scales": None}, "k_scales is None: caches of torch.int8 need"),
        (lambda a: {"v_scales": a["v_scales"].float()}, "v_scales is torch.float32"),
        (lambda a: {"v_scales": a["v_scales"][:, :, :-1].contiguous()}, r"v_scales is torch.bfloat16 \(2, 2, 6\)"),
        (lambda a: {"k_scales": torch.cat([a["k_scales"]] * 2, -1)[:, :, ::2]}, "k_scales has to be contiguous"),
        (lambda a: {"k_cache": a["k_cache"].float(), "v_cache": a["v_cache"].float()}, "scales go with int8"),
        (lambda a: {"v_cache": a["v_cache"].to(torch.float8_e4m3fn)}, "differ in shape or dtype"),
        (lambda a: {"kv_table": torch.zeros(1, 3, dtype=torch.int64)}, r"expected torch.int64 \[layers, 5\]"),
    ),
)
def test_names_the_fault(spec, change, message):
    sizes = dict(heads=3, kv_heads=2, head_dim=64)
    call = append_call(CPU, torch.float32, torch.int8, **sizes)
    if spec is ATTENTION:
        call = attention_call(CPU, torch.float32, torch.int8, **sizes | {"heads": 4}, capacity=7, seq_lens=[3, 7])
    given = replaced(spec, call, **change(call.kwargs))
    with pytest.raises(OpInputError, match=message):
        spec(**given.kwargs)
    if is_native(spec, CPU):  # the library has checks of its own behind Python's
        with pytest.raises(RuntimeError):
            spec.overload(**given.kwargs)


def test_rope_append_declines_heads_that_are_too_long():
    call = append_call(CPU, torch.float32, torch.int8, head_dim=520)
    with pytest.raises(OpInputError, match="head_dim is 520, expected at most 512 in a quantized cache"):
        APPEND(**call.kwargs)


# ---- the kernels this CPU does not choose by itself -----------------------------------------------------------


@over_instruction_sets
def test_quantized_kv_every_route(isa):
    run_limited(ATTENTION, __file__, isa)


def every_route(isa: str) -> None:
    for dtype in DTYPES:
        for call in append_calls(CPU, dtype):
            assert_quantizes(APPEND, call)
        calls = list(attention_calls(CPU, dtype))
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_rule_over(calls, f"{isa} {dtype}")
            found.append([ATTENTION(**call.kwargs) for call in calls])
        assert all(itertools.starmap(same_bits, zip(*found))), "the result depends on the number of threads"
    for kv in LARGEST_QUANT:
        test_every_quant_is_read_as_what_it_stands_for(CPU, kv)
        test_decode_attention_shows_heads_that_are_not_finite(CPU, kv)


if __name__ == "__main__":
    main(ATTENTION, every_route)
