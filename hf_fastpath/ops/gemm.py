"""Linear layer for many rows: a matrix product whose half-precision weight is converted to float32 piece by piece."""

from __future__ import annotations

import torch

from ..choices import Activation
from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons
from .gemv import ACTIVATIONS, product_reasons
from .gemv import reference as of_few_rows


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.NONE,
    transposed: bool = False,
) -> torch.Tensor:
    """Compute ``activation(x @ weight.T + bias) + residual``.

    Args:
        x: [..., in_features], any number of rows.
        weight: [out_features, in_features] as ``nn.Linear`` stores it, or [in_features, out_features] with
            ``transposed`` as ``Conv1D`` does. Rows may be strided; the last dimension is contiguous.
        bias: [out_features] or None.
        residual: [..., out_features] or None, added after the activation.
        activation: ``none``, ``relu``, ``silu``, ``gelu_tanh`` or ``gelu``.
        transposed: layout of ``weight``.

    Returns:
        [..., out_features] in x's dtype, contiguous. On CPUs without arithmetic in float16 or bfloat16, accumulators
        are float32 and are rounded once, after bias, activation and residual. If PyTorch multiplies these types faster
        than float32, the product is PyTorch's and is rounded before that.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are no features, or the activation is unknown.

    Source: ``torch.nn.Linear``; transformers ``pytorch_utils.py@5.17``, ``Conv1D``.
    """
    return of_few_rows(x, weight, bias, residual, activation, transposed).contiguous()


def fake(x, weight, transposed):
    return x.new_empty(*x.shape[:-1], weight.shape[1 if transposed else 0])


def why_not(x, weight, bias=None, residual=None, activation=Activation.NONE, transposed=False) -> list[str]:
    reasons = tensor_reasons(x, weight=weight, bias=bias, residual=residual)
    if not x.dim() or not x.shape[-1]:
        reasons.append(f"x has shape {tuple(x.shape)}, expected [..., in_features] with at least one feature")
    return reasons + product_reasons(x, weight, bias, residual, activation, transposed)


def moved(x, weight, bias, residual, transposed) -> int:
    return nbytes(x, weight, bias, residual) + nbytes(fake(x, weight, transposed))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def weight(rows, columns, fan_in):
        return randn(rows, columns) * fan_in**-0.5

    for rows, k, n in ((32, 111, 37), (17, 768, 300), (100, 64, 65), (67, 300, 33), (1, 7, 5)):
        yield Sample(randn(rows, k), weight(n, k, k))
        yield Sample(randn(rows, k), weight(k, n, k), transposed=True)
    yield Sample(randn(1, 20, 256), weight(300, 256, 256), randn(300), randn(1, 20, 300))
    yield Sample(randn(2, 11, 256), weight(256, 304, 256), randn(304), randn(2, 11, 304), Activation.GELU_TANH, True)
    for activation in ACTIVATIONS:
        yield Sample(randn(30, 128), weight(48, 128, 128), randn(48), None, activation)
    yield Sample(randn(200, 520), weight(150, 520, 520), None, randn(200, 150), Activation.RELU)
    wide = weight(40, 200, 100)
    yield Sample(randn(19, 100), wide[:, 100:])  # a column slice: strided rows, 4- or 2-byte alignment
    yield Sample(randn(4, 13, 120)[..., 7:106], weight(64, 99, 99))


SPEC = register(
    OpSpec(
        name="gemm",
        schema=(
            "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
            "int activation=0, bool transposed=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cpu",),  # on a GPU, cuBLAS does what this op's kernels do
    )
)
