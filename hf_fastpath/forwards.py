"""The forwards that ``patch()`` binds to module instances.

Each runs stock code, ``type(self).forward``, whenever the fused ops are not proven to
give the same result, and counts the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import loader, ops
from .cache import FastpathCache
from .cache_layer import FastpathLayer
from .choices import Activation, Approximation
from .compat import (
    below_autograd,
    cache_of,
    is_continuous_batch,
    is_known_code,
    is_sharded,
    name_of,
    order_offloading,
    outputs_are_captured,
    prefetch_waits,
)
from .decode import composed, steps
from .decode.attend import Attention, has_tensor_cores, plain_mask
from .decode.many_rows import ManyRows, few_rows
from .decode.modules import apply_dropout, child
from .decode.parts import AttentionPart, FeedForwardPart, HeadPart, MLPPart, MoEPart, NormPart
from .decode.structure import LayerPart, full_angles
from .ops.gemv import MAX_ROWS
from .ops.kv_cache import KVCache
from .reasons import Cause
from .registry import FLOAT_DTYPES

if TYPE_CHECKING:
    from .patch_state import PatchState

Part = NormPart | FeedForwardPart | AttentionPart | LayerPart | HeadPart
#: where a patched module keeps its ModulePatch, and a model that was given to ``patch()`` its PatchState
KEY, STATE_KEY = "_hf_fastpath_module", "_hf_fastpath"


@dataclass
class ModulePatch:
    """What a patched module knows: the model's state, its part, and the names of its stock forward's arguments."""

    state: PatchState
    part: Part
    argument_names: tuple[str, ...]

    def reason_now(self, x: torch.Tensor) -> str | None:
        """Why this call cannot use the ops on ``x``, whatever the op; None if it can."""
        if not self.state.enabled:
            return "paused"
        if torch.compiler.is_compiling():
            return "compiling"
        if torch.is_autocast_enabled(x.device.type):
            return Cause("autocast", f"torch.autocast({x.device.type!r})")
        if x.dtype not in FLOAT_DTYPES:
            return Cause("dtype", f"called with {x.dtype}", self.part.module)
        forward = type(self.part.module).forward
        if not is_known_code(forward, self.part.architecture.module):
            return Cause("class_forward", f"forward is {name_of(forward)}", self.part.module)
        missing = loader.why_not_native(x.device.type)
        return None if missing is None else Cause(missing, f"device {x.device.type}")

    def parameters_reason(self, x: torch.Tensor) -> str | None:
        """Why the fused ops cannot take the part's parameters together with ``x``; None if they can."""
        grad = torch.is_grad_enabled()
        if grad and x.requires_grad:
            return "gradient"
        for parameter in self.part.parameters():
            if parameter is None:
                continue
            if is_sharded(parameter):
                return Cause("sharded", module=self.part.module)
            if parameter.dtype != x.dtype:
                return Cause("dtype", f"called with {x.dtype}, a weight is {parameter.dtype}", self.part.module)
            if parameter.device != x.device:
                return Cause("device", f"called with {x.device}, a weight is on {parameter.device}", self.part.module)
            if grad and parameter.requires_grad:
                return "gradient"
        return None


_CAPTURED = Cause("attention_outputs", "output_attentions, output_hidden_states or output_router_logits")
#: stock code by design: switched off, or traced, or training with an op that has no backward
_UNCOUNTED = (None, "paused", "compiling", "gradient")


def stock(module: nn.Module, reason: str | None, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward; a reason is counted, and refused under ``strict=True``.

    A module without a patch runs it too: other code may have wrapped our forward and hold it after ``unpatch()``.
    """
    patch: ModulePatch | None = vars(module).get(KEY)
    if patch is not None and reason not in _UNCOUNTED:
        patch.state.fall_back(reason)
    return type(module).forward(module, *args, **kwargs)


def norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None:
        return stock(self, None, hidden_states)
    reason = patch.reason_now(hidden_states) or patch.parameters_reason(hidden_states)
    if reason is not None:
        return stock(self, reason, hidden_states)
    return steps.norm(steps.run, patch.part, hidden_states)


def _activate(op: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Call an op that has a backward; its Python autograd kernel is skipped where nothing is recorded."""
    if torch.is_grad_enabled():
        return op(*arguments)
    with below_autograd():
        return op(*arguments)


def _is_few(hidden_states: torch.Tensor) -> bool:
    """Whether the ops for 1 to MAX_ROWS rows take it."""
    return 0 < hidden_states.numel() <= MAX_ROWS * hidden_states.shape[-1]


def _mixture(patch: ModulePatch, part: MoEPart, hidden_states: torch.Tensor) -> torch.Tensor:
    reason = None
    if _is_few(hidden_states):  # prompts are stock code's by design
        reason = patch.reason_now(hidden_states) or part.reason() or patch.parameters_reason(hidden_states)
        reason = reason or (_CAPTURED if outputs_are_captured() else None)
        if reason is None:
            if not part.spec.returns_weights:
                return steps.mixture(steps.run, part, hidden_states)
            out, weights = steps.mixture(steps.run, part, hidden_states, experts=composed.experts_and_weights)
            return out, weights.to(hidden_states.dtype)
    return stock(part.module, reason, hidden_states)


def mlp(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None:
        return stock(self, None, hidden_states)
    if isinstance(patch.part, MoEPart):
        return _mixture(patch, patch.part, hidden_states)
    part: MLPPart = patch.part
    reason = patch.reason_now(hidden_states) or part.activation_reason()
    if reason is None and any(map(is_sharded, part.parameters())):
        reason = Cause("sharded", module=self)
    if reason is not None:
        return stock(self, reason, hidden_states)
    if _is_few(hidden_states):
        if part.reason() is None and patch.parameters_reason(hidden_states) is None:
            return steps.mlp(steps.run, part, hidden_states)
    # Many rows, gradients, or projections with a life of their own (LoRA, quantized): only the activation is fused.
    if part.gate is None:
        if part.activation not in (Activation.GELU, Activation.GELU_TANH):
            return stock(self, Cause("unsupported_activation", module=child(self, part.spec.activation)), hidden_states)
        up = part.up(hidden_states)
        form = Approximation.TANH if part.activation == Activation.GELU_TANH else Approximation.NONE
        out = part.down(_activate(ops.fused_gelu.overload, up, form))
    else:
        joined = part.up(hidden_states)
        gate, up = joined.chunk(2, dim=-1) if part.is_joined else (part.gate(hidden_states), joined)
        out = part.down(_activate(ops.fused_swiglu.overload, gate, up, part.activation))
    return apply_dropout(self, part.spec.dropout, out)


@dataclass
class _OverCache:
    """New tokens over one layer of a FastpathCache.

    Attributes:
        emit: of :mod:`.decode.steps`: what runs the ops.
    """

    layer: FastpathLayer
    at: steps.Positions
    emit: steps.Emit
    num_tokens: int

    @property
    def buffers(self) -> KVCache:
        return self.layer.kv_cache()


def _over_cache(
    patch: ModulePatch, part: AttentionPart, x: torch.Tensor, args: tuple, kwargs: dict
) -> _OverCache | str | None:
    """Whether this call is of new tokens behind others that our cache holds, and the kernels can take it.

    Returns:
        What the fused ops need; a reason code if stock code has to run though it is such a call; None for every
        other call (prompts without a past, no cache), which are stock code's by design.
    """
    if is_continuous_batch(kwargs):
        return patch.reason_now(x) or "continuous_batching"
    if x.dim() != 3 or x.shape[1] == 0:
        return None
    query_len = x.shape[1]
    if (reason := part.other_reason()) is not None:
        return reason
    named = dict(zip(patch.argument_names, args), **kwargs)
    cache, index = cache_of(named, part.spec.cache), part.module.layer_idx
    length = 0 if cache is None else cache.get_seq_length(index)
    if isinstance(length, int) and length == 0:  # a static cache's lies on the device: it is not brought to the host
        return None
    if query_len > 1 and not (isinstance(cache, FastpathCache) and _takes_many(patch, part, x)):
        return None
    reason = patch.reason_now(x) or patch.parameters_reason(x)
    if reason is not None:
        return reason
    if not isinstance(cache, FastpathCache):
        return Cause("other_cache", type(cache).__name__)
    if (reason := patch.part.reason()) is not None:
        return reason
    layer = cache.layers[index]
    if layer.sliding_window not in (None, part.window):
        return Cause("other_cache", f"its window is {layer.sliding_window}, not {part.window}", part.module)
    shape = x.shape[0], *part.cache_shape
    if not layer.admit(shape, shape, x.dtype, x.device):
        return "edited_cache"
    if x.shape[0] > MAX_ROWS and query_len == 1:
        return Cause("batch_size", f"{x.shape[0]} sequences, {MAX_ROWS} at most outside of generate()")
    mask, starts = named.get("attention_mask"), None
    if mask is not None:
        seen = None
        if query_len > 1:
            seen = plain_mask(mask, layer.cumulative_length, query_len, layer.sliding_window)
        if seen is None:
            return Cause("attention_mask", f"{mask.dtype} {tuple(mask.shape)} for {query_len} tokens")
        starts = seen.starts
    others = [name for name in named if name == "encoder_hidden_states" or name.startswith("cu_seq_lens")]
    if (other := next((name for name in others if named[name] is not None), None)) is not None:
        return Cause("unsupported_input", other)
    if named.get("output_attentions") or outputs_are_captured():
        return _CAPTURED
    layer.reserve(query_len)
    lengths, emit = cache.seq_lens(index, query_len), steps.run
    starts = None if starts is None else starts.expand(len(x)).contiguous()
    total = layer.cumulative_length + query_len
    if query_len > 1 and total > layer.capacity:  # a window's ring: the newest tokens take the oldest slots
        if not _is_few(x) or layer.sliding_window + query_len - 1 > layer.capacity:
            return None
    elif query_len > 1 and (not _is_few(x) or has_tensor_cores(x.device, x.dtype, part.head_dim)):
        attention = Attention(query_len, total, lengths, starts)
        emit = few_rows(attention) if _is_few(x) else ManyRows(attention, x.shape[0] * query_len)
    angles = named.get("position_embeddings")
    if angles is not None:
        angles = {part.layer_type: tuple(full_angles(part.architecture, table.to(x.dtype)) for table in angles)}
    return _OverCache(layer, steps.Positions(angles or {}, lengths, starts), emit, query_len)


def _takes_many(patch: ModulePatch, part: AttentionPart, x: torch.Tensor) -> bool:
    """Whether several tokens at once are for the ops: as few rows as those of a token step take, or attention that
    :mod:`.decode.attend` has a kernel for."""
    if _is_few(x):
        return True
    if isinstance(patch.part, LayerPart) and isinstance(patch.part.mlp, MoEPart):
        return False
    if x.device.type == "cpu":
        return not part.softcap
    return has_tensor_cores(x.device, x.dtype, part.head_dim)


def _stock_over_cache(patch: ModulePatch, reason: str | None, x: torch.Tensor, args: tuple, kwargs: dict) -> Any:
    """:func:`stock` of an attention module or a layer."""
    if not prefetch_waits():
        named = dict(zip(patch.argument_names, args), **kwargs)
        order_offloading(cache_of(named, patch.part.architecture.attention.cache), x.device)
    return stock(patch.part.module, reason, x, *args, **kwargs)


def attention(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None:
        return stock(self, None, hidden_states, *args, **kwargs)
    found = _over_cache(patch, patch.part, hidden_states, args, kwargs)
    if not isinstance(found, _OverCache):
        return _stock_over_cache(patch, found, hidden_states, args, kwargs)
    out = steps.attention(found.emit, patch.part, hidden_states, found.buffers, found.at, self.layer_idx)
    found.layer.advance(found.num_tokens)
    return out, None


def layer(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None:
        return stock(self, None, hidden_states, *args, **kwargs)
    part: LayerPart = patch.part
    found = _over_cache(patch, part.attention, hidden_states, args, kwargs)
    if not isinstance(found, _OverCache):
        return _stock_over_cache(patch, found, hidden_states, args, kwargs)
    index = part.attention.module.layer_idx
    out = steps.decoder_layer(found.emit, part, hidden_states, found.buffers, found.at, index)
    found.layer.advance(found.num_tokens)
    return (out, None) if part.spec.returns_weights else out


def head(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Of a model that the decode loop serves; on a GPU cuBLAS is as fast."""
    patch: ModulePatch | None = vars(self).get(KEY)
    x = hidden_states
    if patch is None or x.device.type != "cpu" or x.numel() == 0:
        return stock(self, None, x)
    if patch.reason_now(x) or patch.part.reason() or patch.parameters_reason(x):
        return stock(self, None, x)  # nothing but the product is lost, in a forward that counts its own reasons
    emit = steps.run if _is_few(x) else ManyRows(None, x.numel() // x.shape[-1])
    return steps.projection(emit, self, x)


def decoder(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """All layers: a FastpathCache that is given is left as it was if the call is broken off."""
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None or torch.compiler.is_compiling():
        return type(self).forward(self, *args, **kwargs)
    cache = cache_of(dict(zip(patch.argument_names, args[1:]), **kwargs), None)
    if not isinstance(cache, FastpathCache):
        return type(self).forward(self, *args, **kwargs)
    with cache.kept():
        return type(self).forward(self, *args, **kwargs)


#: part of an architecture -> the forward that takes the place of stock's
FORWARDS: dict[str, Callable[..., Any]] = {"norm": norm, "mlp": mlp, "attention": attention, "layer": layer}
