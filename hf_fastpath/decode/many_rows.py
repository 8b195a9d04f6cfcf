"""Replacements of the ops for a few rows by what is fast for many: matrix products of PyTorch's libraries, and a given
attention.

A rule makes the calls that replace one call. A pass applies the rules to a recorded list; :class:`ManyRows` and
:func:`few_rows` apply them to calls that are made at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import ops
from ..choices import Activation, Approximation
from ..ops.gemv import MAX_WGMMA_ROWS, most_rows
from ..quantization import FORMATS, PackedWeight
from . import composed
from .attend import Attention, attend
from .named_calls import Call, Emit, Norm, Register, Step, by_name, run

#: gives the rule for a call, which is then called as ``rule(emit, **arguments)``; or None
_Rules = Callable[[Callable[..., Any], dict[str, Any]], Callable[..., Any] | None]


class _Replacements:
    """Rules that replace ops for a few rows by what is fast for many.

    Args:
        rows: rows of the inputs: all tokens of all sequences. Some devices have kernels for up to 64 rows, see
            ``gemv.most_rows``.
        beside: see ``named_calls.Step``.
    """

    def __init__(self, rows: int, beside: bool = False):
        self._rows = rows
        self._beside = _SideStream() if beside else None
        self._shared: tuple[Any, Any, Any] = (None, None, None)

    def __call__(self, op: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any] | None:
        rule = _INSTEAD.get(op)
        if op in _DENSE and self._rows <= MAX_WGMMA_ROWS:
            weights = [arguments[name] for name in _DENSE[op]]
            if self._rows <= most_rows(*weights, transposed=arguments.get("transposed", False)):
                return None
        return None if rule is None else rule.__get__(self)

    def _norm(self, emit: Emit, x: Any, norm: Norm | None) -> Any:
        """Do as :func:`_normed`; projections in a row that take the same input share the result."""
        if norm is None:
            self._shared = None, None, None  # the next norm is of another input
            return x
        known_x, known_weight, normed = self._shared
        if x is not known_x or norm.weight is not known_weight:
            normed = _normed(emit, x, norm)
            self._shared = x, norm.weight, normed
        return normed

    def project(self, emit, x, weight, bias, residual, activation, transposed, norm, programmatic_launch):
        x = self._norm(emit, x, norm)
        return _product(emit, x, weight, bias, transposed, residual, activation)

    def project_packed(
        self, emit, x, quants, scales, zeros, multiplier, format,
        bias=None, residual=None, activation=Activation.NONE, norm=None, programmatic_launch=False,
    ):  # fmt: skip
        x = self._norm(emit, x, norm)
        weight = dict(quants=quants, scales=scales, zeros=zeros, multiplier=multiplier, format=format)
        if quants.device.type not in ops.packed_gemm.native:
            return emit(dequantized_product, x=x, **weight, bias=bias, residual=residual, activation=activation)
        out = emit(ops.packed_gemm.overload, x=x, **weight, bias=bias)
        if activation == Activation.NONE and residual is None:
            return out
        return emit(finished, out=out, residual=residual, activation=activation)

    def gate_packed(self, emit, x, activation, norm, programmatic_launch, **weight):
        both = self.project_packed(emit, x, **weight, norm=norm)
        return emit(gated_halves, both=both, activation=activation)

    def append_packed(self, emit, x, quants, scales, zeros, multiplier, format, norm, programmatic_launch, **to):
        qkv = self.project_packed(emit, x, quants, scales, zeros, multiplier, format, norm=norm)
        return emit(ops.rope_append.overload, qkv=qkv, bias=None, **to)

    def gate(self, emit, x, gate_weight, up_weight, activation, norm, programmatic_launch):
        x = _normed(emit, x, norm)
        parts = dict(gate=_product(emit, x, gate_weight), up=_product(emit, x, up_weight))
        del x  # a long prompt's x is as large as the result of the next op
        return emit(ops.fused_swiglu.overload, **parts, activation=activation)

    def append(
        self, emit, x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, transposed, norm, programmatic_launch, **to
    ):  # fmt: skip
        x = _normed(emit, x, norm)
        pairs = [(q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if len(pairs) == 1:
            qkv = _product(emit, x, *pairs[0], transposed)
        elif self._beside is not None and q_weight.is_cuda:
            weights, biases = map(list, zip(*pairs))
            qkv = emit(side_by_side, x=x, weights=weights, biases=biases, transposed=transposed, beside=self._beside)
        else:
            qkv = emit(composed.concatenated, *(_product(emit, x, *pair, transposed) for pair in pairs))
        return emit(ops.rope_append.overload, qkv=qkv, bias=None, **to)


#: op for a few rows -> the rule that replaces it
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.gemv.overload: _Replacements.project,
    ops.packed_gemv.overload: _Replacements.project_packed,
    ops.gemv_swiglu.overload: _Replacements.gate,
    ops.packed_gemv_swiglu.overload: _Replacements.gate_packed,
    ops.packed_qkv_rope_append.overload: _Replacements.append_packed,
    ops.qkv_rope_append.overload: _Replacements.append,
}
#: ops for which some devices have kernels for more rows, and the names of their weights
_DENSE = {
    ops.gemv.overload: ("weight",),
    ops.gemv_swiglu.overload: ("gate_weight", "up_weight"),
    ops.qkv_rope_append.overload: ("q_weight", "k_weight", "v_weight"),
}


def _attention_rule(attention: Any, op: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the rule that replaces attention over a cache, if ``op`` is that; ``attention`` may be a register."""
    if op is not ops.decode_attention.overload:
        return None

    def rule(emit, q, cache, scale, window, softcap=0.0, sinks=None, slopes=None, **of_few_rows):
        seen = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, slopes=slopes)
        return emit(attend, attention=attention, q=q, cache=cache, **seen)

    return rule


def _rewritten(calls: list[Call], register: Callable[[], Register], rules: _Rules) -> list[Call]:
    made: list[Call] = []

    def emit(op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        made.append(Call(op, by_name(op, positional, named), register()))
        return made[-1].out

    for call in calls:
        rule = rules(call.op, call.arguments)
        if rule is None:
            made.append(call)
        else:
            out = rule(emit, **call.arguments)
            assert out is made[-1].out, f"the calls in place of {call.name} do not end in its result"
            made[-1].out = call.out
    return made


def few_to_many(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """Pass: replace ops for a few rows by products of many rows and the ops that the few-row ops are fused with."""
    return _rewritten(calls, register, _Replacements(step.rows, step.beside)) if step.many else calls


def replace_attention(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """Pass: replace attention over a cache by the given ``attend.Attention``."""
    if step.attention is None:
        return calls
    return _rewritten(calls, register, lambda op, arguments: _attention_rule(step.attention, op))


class ManyRows:
    """The ``emit`` of :mod:`.steps` for many rows: it makes calls at once, and replaces those of ops for a few rows.

    Args:
        attention: replaces attention over a cache; with None, that attention stays.
        rows: rows of the inputs: all tokens of all sequences.
    """

    def __init__(self, attention: Attention | None, rows: int):
        self._attention, self._rules = attention, _Replacements(rows)

    def __call__(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
        arguments = by_name(op, positional, named)
        rule = None if self._attention is None else _attention_rule(self._attention, op)
        rule = rule or self._rules(op, arguments)
        return run(op, **arguments) if rule is None else rule(run, **arguments)


def few_rows(attention: Attention) -> Emit:
    """Make the ``emit`` of :mod:`.steps` for as many rows as the ops of a token step take, with this attention."""

    def emit(op: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
        rule = _attention_rule(attention, op)
        return run(op, *positional, **named) if rule is None else rule(run, **by_name(op, positional, named))

    return emit


def _normed(emit: Emit, x: Any, norm: Norm | None) -> Any:
    """Apply a norm to ``x``."""
    if norm is None:
        return x
    if norm.kind.is_rms:
        offset = norm.kind.weight_offset
        return emit(ops.rms_norm.overload, x=x, weight=norm.weight, eps=norm.eps, weight_offset=offset)
    return emit(ops.layer_norm.overload, x=x, weight=norm.weight, bias=norm.bias, eps=norm.eps)


def _product(
    emit: Emit,
    x: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    residual: Any = None,
    activation: Activation = Activation.NONE,
) -> Any:
    """Emit ``ops.gemm``, or PyTorch's product on a device without that kernel: the op's reference would go through
    Python."""
    op = ops.gemm.overload if weight.device.type in ops.gemm.native else linear
    behind = dict(residual=residual, activation=activation, transposed=transposed)
    return emit(op, x=x, weight=weight, bias=bias, **behind)


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
    weight = PackedWeight(FORMATS[format.label], x.shape[-1], quants, scales, zeros, multiplier)
    return linear(x, weight.dequantize(x.dtype), bias, residual, activation)


def gated_halves(both, activation):
    """Compute ``activation(gate) * up``; gate and up are the halves of ``both``."""
    return ops.fused_swiglu.overload(*both.chunk(2, dim=-1), activation)


class _SideStream:
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
