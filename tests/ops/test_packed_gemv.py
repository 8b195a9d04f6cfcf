"""packed_gemv: the common tests, every format compared with its float64 weights, exact integers, special values."""

from __future__ import annotations

import os

import pytest
import torch
from checks import DTYPES, assert_exact, assert_matches, common_tests, is_native, over_dtypes
from memory import same_bits
from routes import LIMIT, main, over_instruction_sets, run_limited

from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.ops.packed_gemv import SPEC, random_weight
from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.quantization.formats import pack, padded, scale_bits
from hf_fastpath.registry import Sample

over_formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def packed(format, weight):
    made = quantize(weight, format)
    return made.quants, made.scales, made.zeros, made.multiplier, format.name


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for format in FORMATS.values():
        for rows, k, n in ((1, 1, 1), (2, 3, 1), (3, 31, 129), (13, 127, 31), (1, 2049, 515), (5, 129, 7)):
            weight = torch.randn(n, k, device=device) * k**-0.5
            yield Sample(randn(rows, k), *packed(format, weight), randn(n), randn(rows, n))
        # On a GPU each block takes half of k: parts are equal or not, rows of scales start at whole 16 bytes.
        for rows, k, n in ((2, 1000, 33), (5, 1279, 9), (8, 2047, 70), (4, 3000, 65)):
            yield Sample(randn(rows, k), *packed(format, torch.randn(n, k, device=device) * k**-0.5))
        for rows in range(1, MAX_ROWS + 1):
            yield Sample(randn(rows, 200), *packed(format, torch.randn(21, 200, device=device)))

    yield from extremes(device, dtype)


def extremes(device, dtype):
    """Yield the largest quants on the largest steps of x, whole or as separate bytes; 16-bit sums must hold them."""
    columns = 700  # five blocks and a half
    for format in FORMATS.values():
        if format.is_float:
            continue
        groups = 9, format.groups(columns)
        values = format.table or range(256 if format.bits == 8 else 16)
        lowest, highest = format.lowest + format.zero, format.highest + format.zero
        quants = torch.full((9, padded(columns)), values.index(highest), device=device)
        quants[1::2] = values.index(lowest % 256 if format.bits == 8 else lowest)  # two's complement in eight bits
        quants = quants.to(torch.uint8)
        zeros = torch.zeros(groups, device=device, dtype=torch.uint8) if format.has_zeros else None
        scales = ones(format, groups, device)
        x = torch.full((3, columns), 2 - 2**-7, device=device)  # the low byte of a step is -128
        x[1] = 2 - torch.finfo(dtype).eps
        x[:, 1::2] *= torch.tensor([[1], [-1], [-1]], device=device)
        for sign in (1, -1):
            yield Sample((sign * x).to(dtype), pack(format, quants), scales, zeros, 1 / 128, format.name)


globals().update(common_tests(SPEC, odd_sizes))


def quants_of(format, whole, center=0):
    """Return the quants of whole numbers in units of the scale; of a table, which has 1, 0 and -1, what is closest."""
    if format.is_table:
        places = torch.tensor([format.table.index(each) for each in (-1.0, 0.0, 1.0)], device=whole.device)
        return places[whole.clamp(-1, 1) + 1].to(torch.uint8)
    quants = whole + center
    return quants.to(torch.float8_e4m3fn).view(torch.uint8) if format.is_float else quants.to(torch.uint8)


def center_of(format):
    """Return the quant that stands for 0, where groups have no zeros; of minimums, those of :func:`scales_of`."""
    return 7 if format.has_minimums else format.zero


def scales_of(format, scales):
    """Return scales as the format has them, with minimums that make :func:`center_of` 0."""
    return scale_bits(format, scales, -7 * scales if format.has_minimums else None)


def ones(format, groups, device):
    return scales_of(format, torch.ones(groups, device=device))


def noise_of(format):
    """Return what is left where whole numbers cancel: 1 is so many steps of a table, which is no power of two."""
    return 2.0**-16 if format.is_table else 0.0


def of_small_integers(format, rows, columns, device):
    """Make a packed weight of whole numbers with scales that are powers of two."""
    width = padded(columns)
    groups = rows, format.groups(columns)
    zeros = torch.randint(5, 10, groups, device=device).to(torch.uint8) if format.has_zeros else None
    center = zeros.repeat_interleave(width // groups[1], dim=1) if format.has_zeros else center_of(format)
    quants = quants_of(format, torch.randint(-3, 4, (rows, width), device=device), center)
    quants[:, columns:] = 77 if format.bits == 8 else 3  # x has no input there
    scales = 2.0 ** torch.randint(-1, 2, groups, device=device)
    return pack(format, quants), scales_of(format, scales), zeros, 2.0, format.name


@over_dtypes
@over_formats
def test_packed_gemv_exact_on_integers(device, dtype, format):
    """Compare bit for bit: a skipped or doubled product, or one with another's weight, cannot hide in rounding."""
    for rows, k, n in ((1, 11, 37), (1, 150, 65), (2, 64, 65), (4, 130, 40), (7, 33, 33), (16, 40, 19)):
        x = torch.randint(-1, 2, (rows, k), device=device).to(dtype)
        x[:, ::2] = 0  # sums of all types stay below 256
        assert_exact(SPEC, Sample(x, *of_small_integers(format, n, k, device)), noise_of(format))


@over_dtypes
@over_formats
def test_packed_gemv_uses_every_weight_once(device, dtype, format):
    """Unit vectors as x pick out single weights."""
    for k, n in ((45, 23), (256, 40)):
        made = quantize(torch.randn(n, k, device=device), format)
        weight = made.dequantize(torch.float64)
        units = torch.eye(k, device=device, dtype=dtype)
        parts = made.quants, made.scales, made.zeros, made.multiplier, format.name
        for rows in (1, MAX_ROWS):
            picked = torch.cat([SPEC(unit, *parts) for unit in units.split(rows)])
            torch.testing.assert_close(picked, weight.t().to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


@over_dtypes
@over_formats
def test_packed_gemv_special_values(device, dtype, format):
    """Infinities and NaN in x reach their row's outputs as in PyTorch, or as NaN on a GPU, and reach no other row."""
    for value in (float("inf"), float("nan"), float("-inf")):
        many = torch.randn(MAX_ROWS, 130, device=device).to(dtype)
        many[1, 129] = value
        x, made = many[:3], packed(format, torch.randn(50, 130, device=device))
        if device.type == "cpu" or not is_native(SPEC, device):
            assert_matches(SPEC, Sample(x, *made))
            assert_matches(SPEC, Sample(many, *made))
            continue
        assert not SPEC(x[1:2], *made).isfinite().any()
        whole, others = SPEC(x, *made), [0, 2]
        assert not whole[1].isfinite().any()
        assert same_bits(whole[others], SPEC(x[others], *made))


@over_dtypes
@over_formats
def test_packed_gemv_small_and_large_inputs(device, dtype, format):
    """Inputs of very different sizes, zeros and subnormals are side by side."""
    for scale in (1e-7, 1e-3, 1.0, 1e3):
        x = torch.randn(2, 512, device=device) * scale
        x[:, ::37] *= 300
        x[:, 128:256] = 0
        x[1, 256:384] *= 1e-4
        assert_matches(SPEC, Sample(x.to(dtype), *packed(format, torch.randn(40, 512, device=device) / 16)))


@over_formats
def test_packed_gemv_large(device, format):
    """The matrix has a model's size, so that work is really split."""
    x = torch.randn(1, 4096, device=device)
    made = packed(format, torch.randn(1536, 4096, device=device) / 64)
    for dtype in (torch.float32, torch.bfloat16):
        assert_matches(SPEC, Sample(x.to(dtype), *made))


def products(format, dtype):
    """Make an odd number of blocks, one weight row more than the streams share evenly, and x of 1 to 16 rows."""
    torch.manual_seed(1729)
    x, parts = torch.randn(MAX_ROWS, 2100).to(dtype), packed(format, torch.randn(517, 2100) / 45)
    return lambda rows: SPEC(x[:rows], *parts)


@over_formats
def test_next_weight_changes_nothing(cuda, format):
    """The result does not depend on a prefetch of the next quants: too few, enough, their last bytes included."""
    x = torch.randn(1, 1024, device=cuda, dtype=torch.float16)
    weight = packed(format, torch.randn(4099, 1024, device=cuda) / 32)
    expected = SPEC(x, *weight)
    for bytes_ in (5, 50_331_648, 70_000_003):
        following = torch.empty(bytes_, device=cuda, dtype=torch.uint8)
        assert same_bits(SPEC(x, *weight, next_weight=following), expected)
        assert same_bits(SPEC(x, *weight, next_weight=following[1:]), expected)  # not aligned, so not read
        assert same_bits(SPEC(x, *weight, next_weight=following[::2]), expected)  # not contiguous, so not read
    torch.cuda.synchronize()


def test_next_weight_is_checked(device):
    x, weight = torch.randn(1, 128, device=device), packed(FORMATS["int8"], torch.randn(8, 128, device=device))
    with pytest.raises(ValueError, match="next_weight is torch.float16 on"):
        SPEC(x, *weight, next_weight=x.half())


# With AVX2 alone, more rows of 8-bit weights are products in float32, whose sums run in another order.
MOST_FEW = {each.name: 2 if each.is_float else 4 for each in FORMATS.values() if each.bits == 8}


@over_instruction_sets
def test_packed_gemv_every_route(isa, tmp_path):
    """Sums of integers have the same bits."""
    run_limited(SPEC, __file__, isa, tmp_path / "products")
    if "baseline" in (isa, os.environ.get(LIMIT)):
        return  # these kernels have no integers
    theirs = torch.load(tmp_path / "products")
    for format in FORMATS.values():
        for dtype in (torch.float16, torch.bfloat16):
            few = products(format, dtype)(3)  # a CPU with tiles takes more rows in the tiles, with other sums
            assert format.is_float or same_bits(theirs[format.name, dtype], few)


@pytest.mark.parametrize("kind", ("rms", "rms_offset"))
@pytest.mark.parametrize("rows", (1, 5, MAX_ROWS))
@over_formats
def test_packed_gemv_norms_the_input_of_a_large_matrix(device, format, rows, kind):
    """Where a GPU prepares several rows of x for all blocks at once."""
    if device.type == "cpu":
        pytest.skip("one way for all sizes")
    weight = random_weight(format, 17000, 4224, device)
    x, norm_weight = torch.randn(rows, 4224, device=device).half(), torch.randn(4224, device=device).half()
    assert_matches(SPEC, Sample(x, *weight, norm=kind, norm_weight=norm_weight, norm_eps=1e-6))


def every_route(isa: str, path: str) -> None:
    device = torch.device("cpu")
    only_avx2 = isa == "avx2" or isa == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    found = {}
    for dtype in DTYPES:
        for sample in odd_sizes(device, dtype):
            assert_matches(SPEC, sample, isa)
        for format in FORMATS.values():
            product = products(format, dtype)
            whole, found[format.name, dtype] = product(MAX_ROWS), product(3)
            few = MOST_FEW.get(format.name, 0) if only_avx2 else 0
            for threads in (1, 3):  # neither threads nor other rows change a bit
                torch.set_num_threads(threads)
                for rows in (1, 2, 3, 4, 7):
                    others = product(few) if rows <= few else whole
                    assert same_bits(product(rows), others[:rows]), (format.name, dtype, threads, rows)
    torch.save(found, path)


if __name__ == "__main__":
    main(SPEC, every_route)
