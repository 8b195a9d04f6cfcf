"""Linear layer for few rows: a matrix-vector product that reads the weight once."""

from __future__ import annotations

import functools

import torch

from ..choices import Activation, NormKind
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import GATES, activate
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed

MAX_ROWS = 16
#: rows that weights which pass :func:`takes_wgmma` can be multiplied with
MAX_WGMMA_ROWS = 64
ACTIVATIONS = (Activation.NONE, Activation.RELU, *GATES)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.NONE,
    transposed: bool = False,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
    next_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``activation(norm(x) @ weight.T + bias) + residual``.

    Args:
        x: [..., in_features], at most 16 rows in all; 64 on a GPU of compute capability 9.0, in float16 or bfloat16,
            with a weight that is not ``transposed`` and whose rows are aligned to 16 bytes.
        weight: [out_features, in_features] as ``nn.Linear`` stores it, or [in_features, out_features] with
            ``transposed`` as ``Conv1D`` does. Rows may be strided; the last dimension is contiguous.
        bias: [out_features] or None.
        residual: [..., out_features] or None, added after the activation.
        activation: ``none``, ``relu``, ``silu``, ``gelu_tanh`` or ``gelu``.
        transposed: layout of ``weight``.
        norm: ``none``, ``rms`` (as ``rms_norm``) or ``layer`` (as ``layer_norm``).
        norm_weight, norm_bias: [in_features] of the norm; ``rms`` takes a weight only.
        norm_eps: of the norm.
        programmatic_launch: CUDA may read weight, bias and the norm's parameters while the kernel in front on this
            stream still runs. It is allowed only if neither that kernel nor an earlier one that may still run writes
            any of them. The result does not depend on it.
        next_weight: the matrix that the next kernel on this stream reads, of x's dtype and device, or None. While this
            call ends, CUDA may prefetch parts of that matrix into the L2 cache. The result does not depend on it.

    Returns:
        [..., out_features] in x's dtype, contiguous; accumulated in float32 and rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are too many rows, or the activation is unknown.

    Source: ``torch.nn.Linear``; transformers ``pytorch_utils.py@5.17``, ``Conv1D``.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    out = torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)
    out = activate(out, activation)
    return out if residual is None else out + residual


def fake(x, weight, transposed):
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 0])


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes_wgmma(*weights: torch.Tensor | None) -> bool:
    """Whether CUDA has kernels for more than 16 rows with these weights, each [out_features, in_features] or None."""
    return all(
        weight is None
        or (
            weight.is_cuda
            and weight.dtype in (torch.float16, torch.bfloat16)
            and weight.dim() == 2
            and weight.shape[1] % 8 == weight.stride(0) % 8 == weight.data_ptr() % 16 == 0
            and _has_tiles(weight.device)
        )
        for weight in weights
    )


def rows_reason(x: torch.Tensor, most: int = MAX_ROWS) -> list[str]:
    """Return a reason if ``x`` does not hold 1 to ``most`` rows."""
    rows = x.numel() // max(1, x.shape[-1]) if x.dim() else 0
    return [] if 1 <= rows <= most else [f"x has {rows} rows, expected 1 to {most}: use nn.Linear"]


def most_rows(*weights: torch.Tensor | None, transposed: bool = False) -> int:
    """Return the number of rows of x that the op takes with these weights."""
    return MAX_WGMMA_ROWS if not transposed and takes_wgmma(*weights) else MAX_ROWS


def weight_reason(name: str, x: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> list[str]:
    """Return a reason if ``weight`` is not a matrix over x's features with a contiguous last dimension."""
    if not x.dim():
        return []  # rows_reason gives the reason
    if weight.dim() != 2 or weight.shape[0 if transposed else 1] != x.shape[-1]:
        want = f"[{x.shape[-1]}, out]" if transposed else f"[out, {x.shape[-1]}]"
        return [f"{name} has shape {tuple(weight.shape)}, expected {want}"]
    return [] if weight.stride(1) == 1 else [f"{name} has strides {weight.stride()}: make its rows contiguous"]


def product_reasons(x, weight, bias, residual, activation: Activation, transposed: bool) -> list[str]:
    """Return reasons why these are no arguments of a linear layer, its activation and a residual."""
    reasons = weight_reason("weight", x, weight, transposed)
    if weight.dim() == 2:
        out_features = weight.shape[1 if transposed else 0]
        reasons += shape_reason("bias", bias, (out_features,))
        reasons += shape_reason("residual", residual, (*x.shape[:-1], out_features))
    return reasons + choice_reason("activation", activation, ACTIVATIONS)


def why_not(x, weight, bias, residual, activation, transposed, norm, norm_weight, norm_bias, next_weight) -> list[str]:
    reasons = tensor_reasons(x, weight=weight, bias=bias, residual=residual, next_weight=next_weight)
    reasons += norm_reasons(x, norm, norm_weight, norm_bias)
    reasons += rows_reason(x, most_rows(weight, transposed=transposed))
    return reasons + product_reasons(x, weight, bias, residual, activation, transposed)


def moved(x, weight, bias, residual, transposed, norm_weight, norm_bias) -> int:
    return nbytes(x, weight, bias, residual, norm_weight, norm_bias) + nbytes(fake(x, weight, transposed))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def weight(rows, columns, fan_in):
        return randn(rows, columns) * fan_in**-0.5

    for rows, k, n in ((1, 111, 37), (1, 768, 2304), (2, 64, 65), (3, 1000, 33), (16, 96, 257), (1, 7, 5)):
        yield Sample(randn(rows, k), weight(n, k, k))
        yield Sample(randn(rows, k), weight(k, n, k), transposed=True)
    yield Sample(randn(1, 1, 256), weight(300, 256, 256), randn(300), randn(1, 1, 300))
    yield Sample(randn(2, 2, 256), weight(256, 304, 256), randn(304), randn(2, 2, 304), Activation.GELU_TANH, True)
    for activation in ACTIVATIONS:
        yield Sample(randn(5, 128), weight(48, 128, 128), randn(48), None, activation)
    for norm in NORMS[1:]:
        shift = randn(256) if norm == NormKind.LAYER else None
        for stored, transposed in ((weight(72, 256, 256), False), (weight(256, 72, 256), True)):
            x, residual = randn(2, 256) + 1, randn(2, 72)
            yield Sample(x, stored, None, residual, Activation.NONE, transposed, norm, randn(256), shift, 1e-5, True)
            yield Sample(x[:1], stored, randn(72), None, Activation.GELU, transposed, norm, randn(256), shift, 1e-5)
    yield Sample(randn(1, 96), weight(50, 96, 96), norm=NormKind.LAYER, norm_eps=1e-5)
    yield Sample(randn(8, 2048), weight(70, 2048, 2048), randn(70), randn(8, 70))
    yield Sample(randn(3, 2048), weight(33, 2048, 2048), norm=NormKind.RMS, norm_weight=randn(2048), norm_eps=1e-5)
    offset = dict(norm=NormKind.RMS_OFFSET, norm_weight=randn(2048), norm_eps=1e-6)
    for rows in (1, 3, 9):
        yield Sample(randn(rows, 2048), weight(33, 2048, 2048), **offset)
    yield Sample(
        randn(2, 2048),
        weight(50, 2048, 2048),
        None,
        None,
        Activation.GELU,
        False,
        NormKind.LAYER,
        randn(2048),
        randn(2048),
        1e-5,
    )
    yield Sample(randn(8, 4352), weight(40, 4352, 4352), programmatic_launch=True)
    yield Sample(randn(1, 256), weight(48, 256, 256), programmatic_launch=True, next_weight=weight(99, 48, 48))
    wide = weight(40, 200, 100)
    yield Sample(randn(1, 100), wide[:, 100:])  # a column slice: strided rows, 4- or 2-byte alignment
    yield Sample(randn(4, 3, 99).transpose(0, 1), weight(64, 99, 99))
    many = weight(48, 256, 256)
    if most_rows(many) == MAX_WGMMA_ROWS:
        x = randn(17 * 256 + 1)
        yield Sample(x[:-1].view(17, 256), many)
        yield Sample(x[1:].view(17, 256), many)  # 4- or 2-byte alignment


SPEC = register(
    OpSpec(
        name="gemv",
        schema=(
            "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
            f"int activation=0, bool transposed=False, {NORM_SCHEMA}, bool programmatic_launch=False, "
            "Tensor? next_weight=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
