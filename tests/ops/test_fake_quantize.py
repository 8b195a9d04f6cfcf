"""fake_quantize: the common tests, the quants by the packages' own formulas, outliers, special values."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, ours, over_dtypes
from memory import same_bits

from hf_fastpath import ops
from hf_fastpath.choices import InputQuants, NormKind
from hf_fastpath.ops.fake_quantize import SPEC
from hf_fastpath.registry import OpInputError, Sample

FLOAT8 = torch.float8_e4m3fn


def odd_sizes(device, dtype):
    for quants in InputQuants:
        if quants.is_narrow and dtype != torch.float32:
            continue
        for shape in ((1, 1), (3, 129), (2, 5, 383), (70, 31), (1, 5000)):
            yield Sample(torch.randn(*shape, device=device).to(dtype), quants)


globals().update(common_tests(SPEC, odd_sizes))


def all_float8(device) -> torch.Tensor:
    """Return every finite float8, the largest in front so that their scale is 1, 256 to a row of two blocks."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(FLOAT8).float()
    values = values[values.isfinite()]
    largest = torch.tensor([448.0], device=device)
    return torch.cat((largest, values[:127], largest, values[127:]))[None]


@over_dtypes
@pytest.mark.parametrize("quants", [each for each in InputQuants if each.name.startswith("FP8")])
def test_float8_stay_as_they_are_and_others_round_to_the_nearest(quants, device, dtype):
    exact = all_float8(device)
    assert torch.equal(SPEC(exact.to(dtype), quants), exact.to(dtype))
    ordered = exact.unique()
    between = (ordered[:-1] + ordered[1:]) / 2  # ties, which go to the even one
    for x in (between, (ordered[:-1] * 3 + ordered[1:]) / 4):
        x = torch.nn.functional.pad(x.to(dtype).view(-1, 1), (1, 0), value=448.0)
        assert torch.equal(SPEC(x, quants), x.float().to(FLOAT8).to(dtype))


def over(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide: by a number that is no tensor, PyTorch multiplies by its reciprocal on a GPU."""
    return x / torch.tensor(number, dtype=x.dtype, device=x.device)


@over_dtypes
@pytest.mark.parametrize("shape", ((1, 1, 512), (3, 7, 130)))
def test_scales_and_quants_are_those_of_the_packages(shape, device, dtype):
    """Each formula once more, as its package writes it."""
    x = (torch.randn(*shape, device=device) * 3).to(dtype)
    row = over(x.float().abs().amax(-1, keepdim=True), 448.0)
    expected = (x.float() / row.clamp(min=1e-12)).to(FLOAT8).float() * row
    assert torch.equal(SPEC(x, InputQuants.FP8_ROW), expected.to(dtype))
    scale = over(x.abs().amax(-1, keepdim=True), 448.0)
    expected = (x / scale).clamp(-448, 448).to(FLOAT8).to(dtype) * scale
    assert torch.equal(SPEC(x, InputQuants.FP8_ROW_NARROW), expected)
    for start in range(0, shape[-1], 128):  # each block is a row of its own
        block = x[..., start : start + 128]
        of_block = SPEC(block.contiguous(), InputQuants.FP8_ROW_NARROW)
        assert torch.equal(SPEC(x, InputQuants.FP8_BLOCK_NARROW)[..., start : start + 128], of_block)
        assert torch.equal(SPEC(x, InputQuants.FP8_BLOCK)[..., start : start + 128], SPEC(block, InputQuants.FP8_ROW))
    scale = over(x.abs().amax(-1, keepdim=True), 127.5)
    expected = (x / scale).clamp(-128, 127).round() * scale
    assert torch.equal(SPEC(x, InputQuants.INT8_ROW_NARROW), expected)
    scale = scale.clamp(min=2.0**-23).float()
    expected = (x.float() * (1.0 / scale)).round().clamp(-128, 127) * scale
    assert torch.equal(SPEC(x, InputQuants.INT8_ROW), expected.to(dtype))
    of_half = x.half().float()
    most = of_half.abs().amax(-1, keepdim=True)
    expected = (of_half * (127.0 / most)).round() * over(most, 127.0)
    assert torch.equal(SPEC(x, InputQuants.INT8_OUTLIERS), expected.to(dtype))
    for quants in InputQuants:
        assert same_bits(SPEC(x, quants), SPEC.reference(x, quants))


@over_dtypes
@pytest.mark.parametrize("rows", (1, 2, 3, 70))
def test_columns_with_an_outlier_stay_as_they_are(rows, device, dtype):
    x = torch.randn(rows, 200, device=device).clamp_(-3, 3).to(dtype)
    x[rows // 2, 17], x[0, 150] = 6.0, -40.0
    found = SPEC(x, InputQuants.INT8_OUTLIERS, limit=6.0)
    assert torch.equal(found[:, [17, 150]], x[:, [17, 150]])
    others = [i for i in range(200) if i not in (17, 150)]
    within = x.half().float()
    within[within.abs() >= 6] = 0
    most = within.abs().amax(-1, keepdim=True)
    expected = (within * (127.0 / most)).round() * over(most, 127.0)
    assert torch.equal(found[:, others], expected.to(dtype)[:, others])
    rounded = SPEC(x, InputQuants.INT8_OUTLIERS)  # no limit: the outlier sets the scale
    assert not torch.equal(rounded[0, others], found[0, others])


@over_dtypes
def test_what_passes_the_limit_of_a_scale_is_cut(device, dtype):
    x = torch.randn(3, 300, device=device).to(dtype)
    x[1, 5] = 50.0
    found = SPEC(x, InputQuants.FP8_ROW, limit=4.0)
    assert found[1, 5] == 4.0 and bool((found.abs() <= 4.0).all())


@over_dtypes
@pytest.mark.parametrize("norm", (NormKind.RMS, NormKind.RMS_OFFSET, NormKind.LAYER))
@pytest.mark.parametrize("quants", (InputQuants.FP8_BLOCK, InputQuants.FP8_BLOCK_NARROW, InputQuants.INT8_OUTLIERS))
def test_a_norm_in_front_is_the_norm_ops(quants, norm, device, dtype):
    """Where a kernel does both, norms may differ in their last bit, and one input in a thousand lie beside a tie."""
    for shape in ((1, 1, 4096), (3, 384), (2, 1000), (70, 256), (1, 9216), (2, 111)):
        x, weight = (2 * torch.randn(shape, device=device)).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
        given = dict(norm=norm, norm_weight=weight, norm_eps=1e-5)
        if norm is NormKind.LAYER:
            behind = ops.layer_norm(x, weight, None, 1e-5)
        else:
            behind = ops.rms_norm(x, weight, 1e-5, None, norm.weight_offset)
        found, expected = SPEC(x, quants, **given), SPEC(behind, quants)
        are_alike = torch.isclose(found.float(), expected.float(), rtol=4 * torch.finfo(dtype).eps, atol=0)
        assert float((~are_alike).float().mean()) <= 1e-3
        assert same_bits(found, SPEC(x, quants, **given, programmatic_launch=True))


@over_dtypes
@pytest.mark.parametrize("quants", InputQuants)
def test_zeros_and_what_is_not_finite(quants, device, dtype):
    """Zeros stay; NaN and infinities show in their block, or row, and in no other."""
    assert not SPEC(torch.zeros(2, 300, device=device, dtype=dtype), quants).any()
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 300, device=device).to(dtype)
        x[1, 140] = value
        call = Sample(x, quants)
        found = ours(SPEC, call)["result"]
        assert not found[1, 140].isfinite() and found[[0, 2]].isfinite().all()
        expected = SPEC.reference(x, quants)
        assert torch.equal(found.isfinite(), expected.isfinite())


def test_limits_that_do_not_fit_are_refused(device):
    x = torch.randn(2, 8, device=device)
    for quants, limit in ((InputQuants.FP8_BLOCK, 1.0), (InputQuants.INT8_OUTLIERS, -1.0)):
        with pytest.raises(OpInputError, match="limit"):
            SPEC(x, quants, limit=limit)
