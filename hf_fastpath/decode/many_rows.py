"""The ops for a few rows, for many: matrix products of PyTorch's libraries, and attention that is given."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import ops
from ..choices import Activation, Approximation, Norm
from ..ops.gemv import MAX_TILED_ROWS, most_rows
from ..quantization import FORMATS, PackedWeight
from . import composed, steps
from .attend import Attention


class ManyRows:
    """``emit`` of :mod:`.steps` for many rows: calls at once, ops for few rows replaced.

    Args:
        attention: what takes the place of ``ops.decode_attention``; None leaves that.
        rows: of the inputs, all tokens of all sequences. Up to 64 some devices have kernels for: ``gemv.takes_tiles``.
        beside: projections of one input may run beside each other: those behind the first, of a few rows each, leave
            most of a GPU idle.
    """

    def __init__(self, attention: Attention | None, rows: int, beside: bool = False):
        self._attention = attention
        self._rows = rows
        self._runs_beside = beside
        self._beside: torch.cuda.Stream | None = None
        self._shared: tuple[Any, Any, Any] = (None, None, None)

    def __call__(self, op: Callable[..., Any], *arguments: Any) -> Any:
        if self._attention is not None and op in _ATTENTION:
            return _ATTENTION[op](self._attention, *arguments)
        instead = self._instead(op, arguments)
        return op(*arguments) if instead is None else instead(self, *arguments)

    def _instead(self, op, arguments):
        instead = _INSTEAD.get(op)
        if instead in _WEIGHTS and self._rows <= MAX_TILED_ROWS:
            weights, transposed = _WEIGHTS[instead](arguments)
            if self._rows <= most_rows(*weights, transposed=transposed):
                return None
        return instead

    def recorded(self, emit: steps.Emit, attention: Any = None) -> steps.Emit:
        """As this one, where ``emit`` notes the calls that are to be made, and ``attention`` is the register of what
        takes the place of ``ops.decode_attention``."""

        def record(op: Callable[..., Any], *arguments: Any) -> Any:
            if attention is not None and op in _ATTENTION:
                return emit(_ATTENTION[op], attention, *arguments)
            instead = self._instead(op, arguments)
            return emit(op if instead is None else MethodType(instead, self), *arguments)

        return record

    def _norm(self, x, kind, weight, bias, eps):
        """As :func:`_normed`; projections that take the same input, one after the other, share it."""
        if kind == Norm.NONE:
            self._shared = None, None, None  # whatever comes next is of another input
            return x
        known_x, known_weight, normed = self._shared
        if x is not known_x or weight is not known_weight:
            normed = _normed(x, kind, weight, bias, eps)
            self._shared = x, weight, normed
        return normed

    def _project(self, x, weight, bias, residual, activation, transposed, *norm_and_overlap):
        *norm, _ = norm_and_overlap
        return _linear(self._norm(x, *norm), weight, bias, transposed, residual, activation)

    def _project_packed(
        self, x, quants, scales, zeros, multiplier, form, bias, residual, activation, *norm_and_overlap
    ):
        *norm, _ = norm_and_overlap
        x = self._norm(x, *norm)
        if x.device.type in ops.packed_gemm.native:
            out = ops.packed_gemm.overload(x, quants, scales, zeros, multiplier, form, bias)
            return _finished(out, residual, activation)
        packed = PackedWeight(FORMATS[form.label], x.shape[-1], quants, scales, zeros, multiplier)
        return _linear(x, packed.dequantize(x.dtype), bias, False, residual, activation)

    def _gate_packed(self, x, quants, scales, zeros, multiplier, form, activation, *norm_and_overlap):
        weight = quants, scales, zeros, multiplier, form
        both = self._project_packed(x, *weight, None, None, Activation.NONE, *norm_and_overlap)
        return ops.fused_swiglu.overload(*both.chunk(2, dim=-1), activation)

    def _append_packed(self, x, quants, scales, zeros, multiplier, form, cos, sin, *arguments):
        to, norm_and_overlap, of_cache = arguments[:6], arguments[6:11], arguments[11:]
        weight = quants, scales, zeros, multiplier, form
        qkv = self._project_packed(x, *weight, None, None, Activation.NONE, *norm_and_overlap)
        return ops.rope_append.overload(qkv, None, cos, sin, *to, *of_cache)

    def _gate(self, x, gate, up, activation, *norm_and_overlap):
        *norm, _ = norm_and_overlap
        x = _normed(x, *norm)
        parts = _linear(x, gate), _linear(x, up)
        del x  # of a long prompt, as large as what the next op makes
        return ops.fused_swiglu.overload(*parts, activation)

    def _append(self, x, *arguments):
        weights, biases, (transposed, *rest) = arguments[:3], arguments[3:6], arguments[6:]
        cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer, *others = rest
        (*norm, _), scales = others[:5], others[5:]
        made = self._products(
            _normed(x, *norm), [pair for pair in zip(weights, biases) if pair[0] is not None], transposed
        )
        qkv = made[0] if len(made) == 1 else composed.joined(*made)
        to = (k_cache, v_cache, seq_lens, num_heads, kv_table, layer, *scales)
        return ops.rope_append.overload(qkv, None, cos, sin, *to)

    def _products(self, x, pairs, transposed):
        """``x`` times several weights."""
        if not self._runs_beside or not x.is_cuda or len(pairs) == 1:
            return [_linear(x, *pair, transposed) for pair in pairs]
        current = torch.cuda.current_stream(x.device)
        if self._beside is None:
            self._beside = torch.cuda.Stream(x.device)
        # What is allocated there is used here, and used again there only behind the wait of the next call.
        self._beside.wait_stream(current)
        with torch.cuda.stream(self._beside):
            others = [_linear(x, *pair, transposed) for pair in pairs[1:]]
        first = _linear(x, *pairs[0], transposed)
        current.wait_stream(self._beside)
        return [first, *others]


#: op for a few rows -> what takes its place
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.gemv.overload: ManyRows._project,
    ops.packed_gemv.overload: ManyRows._project_packed,
    ops.gemv_swiglu.overload: ManyRows._gate,
    ops.packed_gemv_swiglu.overload: ManyRows._gate_packed,
    ops.packed_qkv_rope_append.overload: ManyRows._append_packed,
    ops.qkv_rope_append.overload: ManyRows._append,
}

#: op -> what of :class:`Attention` takes its place
_ATTENTION: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.decode_attention.overload: Attention.__call__,
    composed.soft_capped_attention: Attention.capped,
}

#: what the weights are among the arguments of the ops replaced, and whether they are transposed
_WEIGHTS: dict[Callable[..., Any], Callable[[tuple], tuple[tuple, bool]]] = {
    ManyRows._project: lambda arguments: (arguments[1:2], arguments[5]),
    ManyRows._gate: lambda arguments: (arguments[1:3], False),
    ManyRows._append: lambda arguments: (arguments[1:4], arguments[7]),
}

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU: lambda x: ops.fused_gelu.overload(x, Approximation.NONE),
    Activation.GELU_TANH: lambda x: ops.fused_gelu.overload(x, Approximation.TANH),
    Activation.SILU: nn.functional.silu,
    Activation.RELU: torch.relu,
}


def _normed(x, kind, weight, bias, eps):
    """``x`` behind its norm."""
    if kind == Norm.NONE:
        return x
    return ops.rms_norm.overload(x, weight, eps) if kind == Norm.RMS else ops.layer_norm.overload(x, weight, bias, eps)


def _linear(x, weight, bias=None, transposed=False, residual=None, activation=Activation.NONE):
    """As ``ops.gemm``, whose place PyTorch takes where no kernel is: that op's reference would go through Python."""
    if x.device.type in ops.gemm.native:
        return ops.gemm.overload(x, weight, bias, residual, activation, transposed)
    out = nn.functional.linear(x, weight.t() if transposed else weight, bias)
    return _finished(out, residual, activation)


def _finished(out, residual, activation):
    """A product behind its activation, plus ``residual``."""
    if activation != Activation.NONE:
        out = _ACTIVATIONS[activation](out)
    return out if residual is None else out.add_(residual)
