"""Inputs rounded to the 8 bits in which the kernels of a checkpoint's package multiply them."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..choices import InputQuants, NormKind
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, tensor_reasons
from .norm import NORM_SCHEMA, norm_reasons, normed

#: neighboring inputs that share a scale of FP8_BLOCK
BLOCK = 128
#: scales are not less than this where they divide
LEAST_SCALE = 1e-12
#: scales of INT8_ROW are not less than this
LEAST_INT8_SCALE = 2.0**-23
_FLOAT8 = torch.float8_e4m3fn


def reference(
    x: torch.Tensor,
    quants: InputQuants,
    limit: float = 0.0,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``quant * scale``, where quants are the inputs, behind their norm, divided by their scale and rounded.

    Args:
        x: [..., in_features], any strides. Each index but the last has a row.
        quants: what a row is rounded to, with ``most`` for the largest magnitude of those that share a scale:

            * FP8_BLOCK: float8_e4m3fn, ``scale = most / 448`` for 128 neighbors.
            * FP8_ROW: the same for a row. If ``limit`` is not 0, ``most`` is at most that, and larger inputs are cut.
            * FP8_BLOCK_NARROW, FP8_ROW_NARROW: the same, with scales, quotients and results rounded to x's dtype.
            * INT8_ROW_NARROW: integers from -128 to 127, ``scale = most / 127.5``, rounded likewise.
            * INT8_ROW: integers from -128 to 127, ``scale = most / 127.5`` rounded to x's dtype and at least 2^-23.
            * INT8_OUTLIERS: integers, ``scale = most / 127``, of x as float16. If ``limit`` is not 0, inputs of this or
              a larger magnitude do not count, and columns where a row has one stay as they are in all rows.
        limit: see there.
        norm, norm_weight, norm_bias, norm_eps: of x, as in ``gemv``; what it gives is rounded to x's dtype.
        programmatic_launch: as in ``gemv``.

    Returns:
        Tensor of x's shape and dtype, contiguous, rounded once more to that. Quants are found in float32.

    Raises:
        OpInputError: shapes or dtypes do not fit, or limit is negative or goes with other quants.

    Source: FP8_BLOCK and FP8_ROW: ``finegrained_fp8/utils.py`` of kernels-community/finegrained-fp8. The narrow ones:
    ``quantization/lifecycle/forward.py`` of compressed-tensors 0.20. INT8_ROW:
    ``quantization/quant_primitives.py`` of torchao 0.18. INT8_OUTLIERS: ``backends/default/ops.py`` of
    bitsandbytes 0.50, arXiv:2208.07339.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    quants, wide = InputQuants(quants), torch.promote_types(x.dtype, torch.float32)
    values = x.float()
    if quants.is_block:
        count = x.shape[-1]
        narrow = x if quants.is_narrow and x.dtype != torch.float64 else values
        groups = functional.pad(narrow, (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
        if quants.is_narrow:
            made = _narrow(groups, quants)
        else:
            found, scale = _float8(groups, groups.abs().amax(-1, keepdim=True))
            made = found.to(wide) * scale.to(wide)
        return made.flatten(-2)[..., :count].to(x.dtype).contiguous()
    if quants == InputQuants.FP8_ROW:
        most = values.abs().amax(-1, keepdim=True)
        if limit:
            most = most.clamp(max=limit)
        found, scale = _float8(values, most)
        return (found.to(wide) * scale.to(wide)).to(x.dtype).contiguous()
    if quants == InputQuants.INT8_OUTLIERS:
        return _without_outliers(x, limit, wide)
    as_given = x if x.dtype != torch.float64 else values
    made = _int8_row(as_given, wide) if quants == InputQuants.INT8_ROW else _narrow(as_given, quants)
    return made.to(x.dtype).contiguous()


def _over(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide, rounded once: on a GPU, PyTorch multiplies by the reciprocal of a number that is no tensor."""
    return x / torch.full_like(x, number)


def _float8(values: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return quants as float32, and their scale."""
    scale = _over(most, 448)
    return (values / scale.clamp(min=LEAST_SCALE)).clamp(-448, 448).to(_FLOAT8).float(), scale


def _narrow(x: torch.Tensor, quants: InputQuants) -> torch.Tensor:
    most = x.abs().amax(-1, keepdim=True)
    is_float = quants != InputQuants.INT8_ROW_NARROW
    scale = _over(most, 448 if is_float else 127.5)
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    steps = x / scale
    found = steps.clamp(-448, 448).to(_FLOAT8).to(x.dtype) if is_float else steps.clamp(-128, 127).round()
    return found * scale


def _int8_row(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    scale = _over(x.abs().amax(-1, keepdim=True), 127.5).clamp(min=LEAST_INT8_SCALE).float()
    return (x.float() * scale.reciprocal()).round().clamp(-128, 127).to(wide) * scale.to(wide)


def _without_outliers(x: torch.Tensor, limit: float, wide: torch.dtype) -> torch.Tensor:
    given, values = x.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]).half()
    are_out = values.abs() >= limit if limit else torch.zeros_like(values, dtype=torch.bool)
    within = values.masked_fill(are_out, 0).float()
    most = within.abs().amax(-1, keepdim=True)
    found = (within * torch.where(most == 0, torch.zeros_like(most), most.reciprocal() * 127)).round()
    rounded = found.to(wide) * _over(most.to(wide), 127)
    return torch.where(are_out.any(0), given.to(wide), rounded).to(x.dtype).view(x.shape).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, quants, limit=0.0, norm=NormKind.NONE, norm_weight=None, norm_bias=None) -> list[str]:
    reasons = choice_reason("quants", quants, InputQuants) + tensor_reasons(x)
    reasons += norm_reasons(x, norm, norm_weight, norm_bias)
    if not x.dim() or not x.numel():
        reasons.append(f"x has shape {tuple(x.shape)}, expected [..., in_features] with at least one input")
    if not reasons and (limit < 0 or limit and InputQuants(quants) not in _LIMITED):
        names = " or ".join(each.label for each in _LIMITED)
        reasons.append(f"limit is {limit}, expected 0, or a positive number with {names}")
    return reasons


_LIMITED = (InputQuants.FP8_ROW, InputQuants.INT8_OUTLIERS)


def moved(x, norm_weight, norm_bias) -> int:
    return 2 * nbytes(x) + nbytes(norm_weight, norm_bias)


def samples(device: torch.device, dtype: torch.dtype):
    """None has a norm: behind one that float64 computes, what lies beside a tie rounds to the other neighbor."""

    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for quants in InputQuants:
        if quants.is_narrow and dtype != torch.float32:
            continue  # steps of a narrow type have no counterpart in float64: their bits are compared in tests
        for shape in ((1, 1, 4096), (1, 111), (2, 3, 256), (5, 1000), (17, 7)):
            yield Sample(randn(*shape), quants)
        yield Sample(4 * randn(1, 1, 2304), quants, programmatic_launch=True)
        yield Sample(randn(96, 33).t(), quants)
        yield Sample(randn(4, 520)[:, 100:], quants)
        if quants in _LIMITED:
            for shape in ((1, 1, 1024), (3, 333), (2, 40, 64)):
                yield Sample(randn(*shape), quants, limit=2.5)


SPEC = register(
    OpSpec(
        name="fake_quantize",
        schema=f"(Tensor x, int quants, float limit=0.0, {NORM_SCHEMA}, bool programmatic_launch=False) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
