"""GELU in one pass: one read and one write for each element."""

from __future__ import annotations

import math

import torch

from ..choices import Approximation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, tensor_reasons

APPROXIMATIONS = tuple(Approximation)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def reference(x: torch.Tensor, approximate: Approximation = Approximation.TANH) -> torch.Tensor:
    """Compute GELU of every element.

    ``tanh``: ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``; ``none``: ``0.5 x (1 + erf(x / sqrt(2)))``.

    Args:
        x: float32, float16 or bfloat16, any shape and strides.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``.

    Returns:
        Tensor of x's shape and dtype, contiguous.

    Raises:
        OpInputError: the approximation or dtype is unknown (through ``hf_fastpath.ops.fused_gelu``).

    Source: transformers ``activations.py@5.17``, ``NewGELUActivation`` and ``GELUActivation``; Hendrycks and
    Gimpel, arXiv:1606.08415.
    """
    if approximate == Approximation.TANH:
        inner = _SQRT_2_OVER_PI * (x + _CUBIC * torch.pow(x, 3.0))
        return (0.5 * x * (1.0 + torch.tanh(inner))).contiguous()
    return torch.nn.functional.gelu(x).contiguous()


def fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x: torch.Tensor, approximate: Approximation = Approximation.TANH) -> list[str]:
    return tensor_reasons(x) + choice_reason("approximate", approximate, APPROXIMATIONS)


def gelu_grad(x: torch.Tensor, approximate: Approximation) -> torch.Tensor:
    """Compute the derivative of GELU at ``x``, in ``x``'s dtype."""
    if approximate == Approximation.TANH:
        tanh = torch.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
        inner_grad = _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
        return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_grad
    cdf = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def setup_context(ctx, inputs, output) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def backward(ctx, grad: torch.Tensor):
    (x,) = ctx.saved_tensors
    work = torch.promote_types(x.dtype, torch.float32)  # terms of the derivative cancel near -0.75: half is too coarse
    return (grad.to(work) * gelu_grad(x.to(work), ctx.approximate)).to(x.dtype), None


def samples(device: torch.device, dtype: torch.dtype):
    for shape in ((1,), (7,), (3, 111), (2, 5, 768)):
        for approximate in APPROXIMATIONS:
            yield Sample(torch.randn(shape, device=device, dtype=dtype) * 3, approximate)
    yield Sample(torch.randn(33, 17, device=device, dtype=dtype).t(), Approximation.TANH)  # strided
    yield Sample(torch.randn(0, 8, device=device, dtype=dtype), Approximation.TANH)


SPEC = register(
    OpSpec(
        name="fused_gelu",
        schema="(Tensor x, int approximate=1) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda x: 2 * nbytes(x),
        samples=samples,
        backward=backward,
        setup_context=setup_context,
    )
)
