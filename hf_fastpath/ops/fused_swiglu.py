"""Gated activation ``act(gate) * up`` in one pass (SwiGLU, and gates with GELU or a sigmoid)."""

from __future__ import annotations

import torch

from ..choices import Activation, Approximation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_gelu import gelu_grad

#: gate activations by the names that ops use
GATES = (Activation.SILU, Activation.GELU_TANH, Activation.GELU)
#: those that this op has
ACTIVATIONS = (*GATES, Activation.SIGMOID)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply ``activation`` to every element with PyTorch's own functions; ``"none"`` returns ``x``."""
    if activation == Activation.NONE:
        return x
    if activation == Activation.RELU:
        return torch.relu(x)
    if activation == Activation.SILU:
        return torch.nn.functional.silu(x)
    if activation == Activation.GELU_TANH:
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == Activation.SIGMOID:
        return torch.sigmoid(x)
    return torch.nn.functional.gelu(x)


def reference(gate: torch.Tensor, up: torch.Tensor, activation: Activation = Activation.SILU) -> torch.Tensor:
    """Compute ``activation(gate) * up``, element by element.

    Args:
        gate, up: float32, float16 or bfloat16, same shape, dtype and device; any strides. The last dimension of gate
            may be one: a gate for a row, as of a shared expert.
        activation: ``"silu"`` (SwiGLU), ``"gelu_tanh"`` or ``"gelu"`` (GeGLU, erf), or ``"sigmoid"`` (of attention's
            output).

    Returns:
        Tensor of up's shape and dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices differ, or the activation is unknown.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralMLP``; Shazeer, arXiv:2002.05202.
    Sigmoid: ``Qwen3NextAttention``.
    """
    return (activate(gate, activation) * up).contiguous()


def fake(up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(up, memory_format=torch.contiguous_format)


def why_not(gate: torch.Tensor, up: torch.Tensor, activation: Activation = Activation.SILU) -> list[str]:
    reasons = tensor_reasons(gate, up=up) + choice_reason("activation", activation, ACTIVATIONS)
    is_of_rows = up.dim() > 0 and gate.shape == (*up.shape[:-1], 1)
    return reasons if is_of_rows else reasons + shape_reason("up", up, tuple(gate.shape))


def setup_context(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def backward(ctx, grad: torch.Tensor):
    gate, up = ctx.saved_tensors
    work = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(work), up.to(work), grad.to(work)
    if ctx.activation == Activation.SILU:
        sigmoid = torch.sigmoid(g)
        slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    elif ctx.activation == Activation.SIGMOID:
        slope = torch.sigmoid(g) * torch.sigmoid(-g)
    else:
        slope = gelu_grad(g, Approximation.TANH if ctx.activation == Activation.GELU_TANH else Approximation.NONE)
    of_gate = (d * u * slope).sum_to_size(gate.shape)
    return of_gate.to(gate.dtype), (d * activate(g, ctx.activation)).to(up.dtype), None


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype) * 2

    for shape in ((3, 111), (1,), (2, 5, 704)):
        for activation in ACTIVATIONS:
            yield Sample(randn(*shape), randn(*shape), activation)
    both = randn(4, 2 * 96)
    yield Sample(both[:, :96], both[:, 96:], Activation.SILU)  # halves of one projection: strided rows
    heads = randn(2, 1, 6, 2 * 64)
    yield Sample(heads[..., 64:], randn(2, 1, 6, 64), Activation.SIGMOID)  # queries and gates head by head
    yield Sample(randn(2, 3, 1), randn(2, 3, 111), Activation.SIGMOID)  # a gate for a row


SPEC = register(
    OpSpec(
        name="fused_swiglu",
        schema="(Tensor gate, Tensor up, int activation=2) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda gate, up: nbytes(gate, up) + nbytes(up),
        samples=samples,
        backward=backward,
        setup_context=setup_context,
    )
)
