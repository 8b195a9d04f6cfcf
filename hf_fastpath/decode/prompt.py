"""A whole prompt, op by op: what a decode plan does for one token, for many.

The layers are the calls of :mod:`.steps`; those ops that are made for a few rows are replaced by what is fast for many:
matrix products of PyTorch's libraries and its fused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import ops
from ..cache import FastpathCache
from ..ops.decode_attention import visible_slots
from ..ops.kv_cache import dequantized
from ..quantization import FORMATS, PackedWeight
from . import composed, steps
from .parts import MoEPart
from .structure import ModelPart, full_angles


@dataclass
class Prompt:
    """New tokens that follow what a cache holds.

    Attributes:
        tokens: int64 [batch, query_len].
        positions: int64 [batch or 1, query_len], their position ids.
        starts: int64 [batch], left padding of each row, or None for none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None


def is_readable(part: ModelPart, cache: FastpathCache, prompt: Prompt) -> bool:
    """Whether :func:`read` can take it; else stock code has to.

    It cannot where attention is more than softmax, a window ends inside of the prompt, or MLPs are mixtures.
    """
    batch, query_len = prompt.tokens.shape
    if prompt.positions.shape[-1] != query_len or query_len == 0:
        return False
    if cache.get_seq_length() and any(layer.batch_size != batch for layer in cache.layers):
        return False
    length = cache.get_seq_length() + query_len
    for layer in part.layers:
        attention = layer.attention
        if attention.softcap or attention.sinks is not None or isinstance(layer.mlp, MoEPart):
            return False
        if attention.window is not None and length > attention.window:
            return False
    return True


def read(part: ModelPart, cache: FastpathCache, prompt: Prompt) -> torch.Tensor:
    """Run the model over the prompt and append it to ``cache``.

    Args:
        part: the model, without a reason against a decode plan.
        cache: of the same batch, or empty.
        prompt: one that :func:`is_readable`.

    Returns:
        [batch, vocab_size] logits of the token that follows.
    """
    batch, query_len = prompt.tokens.shape
    past, dtype, device = cache.get_seq_length(), part.embedding.weight.dtype, prompt.tokens.device
    for index, layer in enumerate(part.layers):
        attention = layer.attention
        heads = attention.num_heads if attention.repeats_kv else attention.num_kv_heads
        like = torch.empty((batch, heads, 0, attention.head_dim), dtype=dtype, device=device)
        cache.prepare(index, like)
    cache.reserve(query_len)
    lengths = cache.seq_lens(0, query_len)
    emit = _ManyRows(past + query_len, _mask(past, query_len, lengths, prompt.starts))
    hidden, _ = steps.step_inputs(emit, part, prompt.tokens, prompt.positions.expand(batch, -1), [])
    at = steps.Positions(_angles(part, hidden, prompt.positions), lengths, None)
    for index, layer in enumerate(part.layers):
        hidden = steps.decoder_layer(emit, layer, hidden, cache.layers[index].buffers, at, index)
    logits = steps.head(steps.run, part, hidden[:, -1:])
    cache.advance(query_len)
    return steps.scaled_logits(steps.run, part, logits)[:, 0]


def _angles(part: ModelPart, like: torch.Tensor, positions: torch.Tensor) -> dict:
    """cos and sin of every kind of layer at ``positions``, by the model's own module."""
    made = {}
    for kind in part.rope_kinds:
        tables = part.rotary.forward(like, positions, *(() if kind is None else (kind,)))
        made[kind] = tuple(full_angles(part.architecture, table.to(like.dtype)) for table in tables)
    return made


def _mask(past: int, query_len: int, lengths: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor | None:
    """bool [batch or 1, 1, query_len, past + query_len]: what each token sees; None where that is all before it.

    A token of the padding sees everything: nothing reads what becomes of it, but it has to stay finite.
    """
    if starts is None:
        if past == 0 or query_len == 1:
            return None
        lengths = lengths[:1]
    visible = visible_slots(lengths, starts, query_len, past + query_len, window=0)
    return (visible | ~visible.any(-1, keepdim=True))[:, None]


class _ManyRows:
    """``emit`` of :mod:`.steps` for many rows: calls at once, ops for few rows replaced.

    Args:
        length: tokens the cache holds with the prompt.
        mask: see :func:`_mask`.
    """

    def __init__(self, length: int, mask: torch.Tensor | None):
        self._length, self._mask = length, mask
        self._normed: tuple[Any, Any, Any] = (None, None, None)

    def __call__(self, op: Callable[..., Any], *arguments: Any) -> Any:
        instead = _INSTEAD.get(op)
        return op(*arguments) if instead is None else instead(self, *arguments)

    def _norm(self, x, kind, weight, bias, eps):
        """``x`` behind its norm; projections that take the same input, one after the other, share it."""
        if kind == "none":
            return x
        known_x, known_weight, normed = self._normed
        if x is not known_x or weight is not known_weight:
            rms = kind == "rms"
            normed = ops.rms_norm.overload(x, weight, eps) if rms else ops.layer_norm.overload(x, weight, bias, eps)
            self._normed = x, weight, normed
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
        packed = PackedWeight(FORMATS[form], x.shape[-1], quants, scales, zeros, multiplier)
        return _linear(x, packed.dequantize(x.dtype), bias, False, residual, activation)

    def _gate_packed(self, x, quants, scales, zeros, multiplier, form, activation, *norm_and_overlap):
        weight = quants, scales, zeros, multiplier, form
        both = self._project_packed(x, *weight, None, None, "none", *norm_and_overlap)
        return ops.fused_swiglu.overload(*both.chunk(2, dim=-1), activation)

    def _append_packed(self, x, quants, scales, zeros, multiplier, form, cos, sin, *arguments):
        to, norm_and_overlap, of_cache = arguments[:6], arguments[6:11], arguments[11:]
        weight = quants, scales, zeros, multiplier, form
        qkv = self._project_packed(x, *weight, None, None, "none", *norm_and_overlap)
        return ops.rope_append.overload(qkv, None, cos, sin, *to, *of_cache)

    def _gate(self, x, gate, up, activation, *norm_and_overlap):
        *norm, _ = norm_and_overlap
        x = self._norm(x, *norm)
        return ops.fused_swiglu.overload(_linear(x, gate), _linear(x, up), activation)

    def _append(self, x, *arguments):
        weights, biases, (transposed, *rest) = arguments[:3], arguments[3:6], arguments[6:]
        cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer, *others = rest
        (*norm, _), scales = others[:5], others[5:]
        x = self._norm(x, *norm)
        made = [_linear(x, w, b, transposed) for w, b in zip(weights, biases) if w is not None]
        qkv = made[0] if len(made) == 1 else composed.joined(*made)
        to = (k_cache, v_cache, seq_lens, num_heads, kv_table, layer, *scales)
        return ops.rope_append.overload(qkv, None, cos, sin, *to)

    def _attend(self, q, k_cache, v_cache, seq_lens, starts, scale, *others):
        # What is stored, of the prompt's own tokens too: then it makes no difference how a text is cut into prompts.
        k, v, *scales = (each.narrow(2, 0, self._length) for each in (k_cache, v_cache, *others[6:]))
        if scales:
            k, v = (dequantized(*each, q.dtype) for each in zip((k, v), scales))
        k, v = k.to(q.dtype), v.to(q.dtype)
        grouped = q.shape[2] != k.shape[1]
        if grouped and (self._mask is not None or q.dtype == torch.float32):
            # the kernels that take a mask, or float32, want as many KV heads as queries
            k, v = (states.repeat_interleave(q.shape[2] // k.shape[1], dim=1) for states in (k, v))
            grouped = False
        causal = self._mask is None and q.shape[1] > 1
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=self._mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(2)


#: op for a few rows -> what takes its place
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.gemv.overload: _ManyRows._project,
    ops.packed_gemv.overload: _ManyRows._project_packed,
    ops.gemv_swiglu.overload: _ManyRows._gate,
    ops.packed_gemv_swiglu.overload: _ManyRows._gate_packed,
    ops.packed_qkv_rope_append.overload: _ManyRows._append_packed,
    ops.qkv_rope_append.overload: _ManyRows._append,
    ops.decode_attention.overload: _ManyRows._attend,
}

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: ops.fused_gelu.overload(x, "none"),
    "gelu_tanh": lambda x: ops.fused_gelu.overload(x, "tanh"),
    "silu": nn.functional.silu,
    "relu": torch.relu,
}


def _linear(x, weight, bias=None, transposed=False, residual=None, activation="none"):
    """As ``ops.gemm``, whose place PyTorch takes where no kernel is: that op's reference would go through Python."""
    if x.device.type in ops.gemm.native:
        return ops.gemm.overload(x, weight, bias, residual, activation, transposed)
    out = nn.functional.linear(x, weight.t() if transposed else weight, bias)
    return _finished(out, residual, activation)


def _finished(out, residual, activation):
    """A product behind its activation, plus ``residual``."""
    if activation != "none":
        out = _ACTIVATIONS[activation](out)
    return out if residual is None else out.add_(residual)
