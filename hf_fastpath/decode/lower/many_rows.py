"""What products of many rows run as: functions over tensors, which calls of a step stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from ... import ops
from ...choices import Activation, Approximation
from ...quantization import PackedWeight

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU: lambda x: ops.fused_gelu.overload(x, Approximation.NONE),
    Activation.GELU_TANH: lambda x: ops.fused_gelu.overload(x, Approximation.TANH),
    Activation.SILU: nn.functional.silu,
    Activation.RELU: torch.relu,
}


def linear(x, weight, bias=None, residual=None, activation=Activation.NONE, transposed=False):
    """Compute what ``ops.gemm`` computes."""
    out = nn.functional.linear(x, weight.t() if transposed else weight, bias)
    return finished(out, residual, activation)


def finished(out, residual, activation):
    """Apply the activation to a product, and add ``residual``."""
    if activation != Activation.NONE:
        out = _ACTIVATIONS[activation](out)
    return out if residual is None else out.add_(residual)


def dequantized_product(x, quants, scales, zeros, multiplier, format, bias, residual, activation):
    """Multiply by a quantized weight on a device that has no such kernel for many rows."""
    weight = PackedWeight.of_parts(x.shape[-1], quants, scales, zeros, multiplier, format)
    return linear(x, weight.dequantize(x.dtype), bias, residual, activation)


def with_adapters(
    base,
    x,
    down,
    weights,
    scales,
    firsts,
    residual=None,
    activation=Activation.NONE,
    gated=False,
    chosen=None,
    owners=(),
):
    """Compute what ``ops.lora_down`` and ``ops.lora_up`` compute, given ``x`` behind its norm."""
    dtypes = [each.dtype for each in (*down, *weights)]
    out = base.to(functools.reduce(torch.promote_types, dtypes), copy=True)
    for place, (matrix, weight, scale, first) in enumerate(zip(down, weights, scales, firsts)):
        added = nn.functional.linear(nn.functional.linear(x.to(matrix.dtype), matrix), weight)
        if chosen is not None:
            added = added.where((chosen == owners[place]).view(*base.shape[:-1], 1), 0)
        out.narrow(-1, first, len(weight)).add_(added, alpha=scale)
    out = out.to(base.dtype)
    return gated_halves(out, activation) if gated else finished(out, residual, activation)


def gated_halves(both, activation):
    """Compute ``activation(gate) * up``; gate and up are the halves of ``both``."""
    return ops.fused_swiglu.overload(*both.chunk(2, dim=-1), activation)


class SideStream:
    """A stream beside the current one for all calls of a step; it is made when it is first asked for."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def of(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


def side_by_side(x, weights, biases, transposed, beside):
    """Multiply ``x`` by several weights, and put features side by side; all but the first use the stream ``beside``."""
    current, stream = torch.cuda.current_stream(x.device), beside.of(x.device)
    first, *others = ((weight.t() if transposed else weight, bias) for weight, bias in zip(weights, biases))
    # The side stream's memory is allocated and used there; the next call waits before it is used there again.
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        made = [nn.functional.linear(x, *pair) for pair in others]
    made.insert(0, nn.functional.linear(x, *first))
    current.wait_stream(stream)
    return torch.cat(made, dim=-1)
