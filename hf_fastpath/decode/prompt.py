"""A whole prompt, op by op: what a decode plan does for one token, for many.

The layers are the calls of :mod:`.steps`; those ops that are made for a few rows are replaced by what is fast for many:
matrix products of PyTorch's libraries and its fused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import ops
from ..cache import FastpathCache
from ..quantization import FORMATS, PackedWeight
from . import composed, steps
from .attend import Attention, has_tensor_cores
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

    def chunks(self, size: int | None) -> Iterator[Prompt]:
        """Its tokens in chunks of ``size``, or all at once."""
        size = size or max(1, self.tokens.shape[1])
        for tokens, positions in zip(self.tokens.split(size, dim=1), self.positions.split(size, dim=1)):
            yield Prompt(tokens, positions, self.starts)


def is_readable(part: ModelPart, cache: FastpathCache, prompt: Prompt) -> bool:
    """Whether :func:`read` can take it; else stock code has to.

    It cannot where attention is more than softmax and no kernel has that, a window ends inside of the prompt, or MLPs
    are mixtures.
    """
    batch, query_len = prompt.tokens.shape
    if prompt.positions.shape[-1] != query_len or query_len == 0:
        return False
    if cache.get_seq_length() and any(layer.batch_size != batch for layer in cache.layers):
        return False
    length = cache.get_seq_length() + query_len
    for layer in part.layers:
        attention = layer.attention
        if isinstance(layer.mlp, MoEPart):
            return False
        if attention.softcap or attention.sinks is not None:
            if not has_tensor_cores(prompt.tokens.device, part.embedding.weight.dtype, attention.head_dim):
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
        heads, head_dim = layer.attention.cache_shape
        like = torch.empty((batch, heads, 0, head_dim), dtype=dtype, device=device)
        cache.prepare(index, like)
    cache.reserve(query_len)
    lengths = cache.seq_lens(0, query_len)
    emit = ManyRows(Attention(query_len, past + query_len, lengths, prompt.starts))
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


class ManyRows:
    """``emit`` of :mod:`.steps` for many rows: calls at once, ops for few rows replaced.

    Args:
        attention: what takes the place of ``ops.decode_attention``.
    """

    def __init__(self, attention: Attention):
        self._attention = attention
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

    def _attend(self, *arguments):
        return self._attention(*arguments)

    def _attend_capped(self, *arguments):
        return self._attention.capped(*arguments)


#: op for a few rows -> what takes its place
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.gemv.overload: ManyRows._project,
    ops.packed_gemv.overload: ManyRows._project_packed,
    ops.gemv_swiglu.overload: ManyRows._gate,
    ops.packed_gemv_swiglu.overload: ManyRows._gate_packed,
    ops.packed_qkv_rope_append.overload: ManyRows._append_packed,
    ops.qkv_rope_append.overload: ManyRows._append,
    ops.decode_attention.overload: ManyRows._attend,
    composed.soft_capped_attention: ManyRows._attend_capped,
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
