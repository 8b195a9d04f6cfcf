"""The forwards that ``patch()`` binds to module instances.

Each forward runs stock code, ``type(self).forward``, and counts the reason, unless the fused ops are proven to give
the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import ops
from ..cache.fastpath_cache import FastpathCache
from ..cache.layer import FastpathLayer
from ..choices import Activation, Approximation
from ..compat import (
    below_autograd,
    cache_of,
    is_continuous_batch,
    is_offloading,
    is_sharded,
    order_offloading,
    outputs_are_captured,
    prefetch_waits,
    replaced_function,
)
from ..decode.calls.named_calls import run
from ..decode.lower import composed
from ..decode.lower.attend import Attention, has_tensor_cores
from ..decode.lower.positions import Positions
from ..decode.lower.which_op import Lower
from ..decode.model.attention_part import AttentionPart
from ..decode.model.layer_part import LayerPart
from ..decode.model.modules import apply_dropout, child
from ..decode.model.parts import MLPPart, MoEPart
from ..decode.model.structure import full_angles
from ..decode.sources import steps
from ..ops.kv_cache import KVCache
from ..reasons import Cause, class_name
from .module_patch import CAPTURED, KEY, ModulePatch, stock
from .over_cache import ByDesign, ForwardCall, is_few


def _at_once(x: torch.Tensor, attention: Attention | None = None) -> Lower:
    """Return what runs ops for as many rows as ``x`` has, with this attention."""
    return Lower(run, x.numel() // max(1, x.shape[-1]), attention=attention)


def _patch_of(module: nn.Module) -> ModulePatch | None:
    """Return a module's patch; None if stock code is to run and nothing is to be counted."""
    patch: ModulePatch | None = vars(module).get(KEY)
    return None if patch is None or patch.state.texts.by_stock else patch


def norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    patch = _patch_of(self)
    if patch is None:
        return stock(self, None, hidden_states)
    reason = patch.reason_now(hidden_states) or patch.parameters_reason(hidden_states) or patch.part.eps_reason()
    if reason is not None:
        return stock(self, reason, hidden_states)
    return steps.norm(_at_once(hidden_states), patch.part, hidden_states)


def _activate(op: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Call an op that has a backward; if nothing is recorded, the op's Python autograd kernel is skipped."""
    if torch.is_grad_enabled():
        return op(*arguments)
    with below_autograd():
        return op(*arguments)


def _mixture(patch: ModulePatch, part: MoEPart, hidden_states: torch.Tensor) -> torch.Tensor:
    reason = None
    if is_few(hidden_states):  # prompts run stock code by design
        reason = patch.reason_now(hidden_states) or part.reason() or patch.parameters_reason(hidden_states)
        reason = reason or (CAPTURED if outputs_are_captured() else None)
        if reason is None:
            if not part.spec.returns_weights:
                return steps.mixture(_at_once(hidden_states), part, hidden_states)
            out, weights = steps.mixture(
                _at_once(hidden_states), part, hidden_states, experts=composed.experts_and_weights
            )
            return out, weights.to(hidden_states.dtype)
    return stock(part.module, reason, hidden_states)


def mlp(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    patch = _patch_of(self)
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
    if is_few(hidden_states):
        if part.reason() is None and patch.parameters_reason(hidden_states) is None:
            return steps.mlp(_at_once(hidden_states), part, hidden_states)
    # With many rows, gradients, or projections with code of their own (LoRA, quantized), only the activation is fused.
    if part.gate is None:
        if part.activation not in (Activation.GELU, Activation.GELU_TANH):
            return stock(self, Cause("unsupported_activation", module=child(self, part.spec.activation)), hidden_states)
        up = part.up(hidden_states)
        approximation = Approximation.TANH if part.activation == Activation.GELU_TANH else Approximation.NONE
        out = part.down(_activate(ops.fused_gelu.overload, up, approximation))
    else:
        both = part.up(hidden_states)
        gate, up = both.chunk(2, dim=-1) if part.is_fused else (part.gate(hidden_states), both)
        out = part.down(_activate(ops.fused_swiglu.overload, gate, up, part.activation))
    return apply_dropout(self, part.spec.dropout, out)


@dataclass
class _OverCache:
    """New tokens over one layer of a FastpathCache.

    Attributes:
        to: runs the ops.
    """

    layer: FastpathLayer
    at: Positions
    to: Lower
    num_tokens: int

    @property
    def buffers(self) -> KVCache:
        return self.layer.kv_cache()


def _over_cache(
    patch: ModulePatch, part: AttentionPart, x: torch.Tensor, args: tuple, kwargs: dict
) -> _OverCache | str | None:
    """Decide whether this call is of new tokens behind others that our cache holds, and the kernels can take it.

    Returns:
        What the fused ops need; a reason code if the call is such a one and stock code has to run all the same; None
        for every other call (prompts without a past, no cache), which runs stock code by design.
    """
    call = ForwardCall(patch, part, x, args, kwargs)
    if (found := call.finding()) is not None:
        return None if isinstance(found, ByDesign) else found
    cache, index, layer, named, starts = call.cache, call.index, call.layer, call.named, call.starts
    query_len = call.query_len
    layer.reserve(query_len)
    lengths, to = cache.seq_lens(index, query_len), _at_once(x)
    starts = None if starts is None else starts.expand(len(x)).contiguous()
    total = layer.cumulative_length + query_len
    if query_len > 1 and total > layer.capacity:  # the newest tokens take the oldest slots of a window's ring buffer
        if not is_few(x) or layer.sliding_window + query_len - 1 > layer.capacity:
            return None
    elif query_len > 1 and (not is_few(x) or has_tensor_cores(x.device, x.dtype, part.head_dim)):
        attention = Attention(query_len, total, lengths, starts)
        to = _at_once(x, attention)
    angles = named.get("position_embeddings")
    if angles is not None:
        angles = {part.layer_type: tuple(full_angles(part.architecture, table.to(x.dtype)) for table in angles)}
    return _OverCache(layer, Positions(angles or {}, lengths, starts), to, query_len)


def _stock_over_cache(patch: ModulePatch, reason: str | None, x: torch.Tensor, args: tuple, kwargs: dict) -> Any:
    """Run :func:`stock` of an attention module or a layer."""
    if not prefetch_waits():
        named = dict(zip(patch.argument_names, args), **kwargs)
        order_offloading(cache_of(named, patch.part.architecture.attention.cache), x.device)
    return stock(patch.part.module, reason, x, *args, **kwargs)


def attention(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    patch = _patch_of(self)
    if patch is None:
        return stock(self, None, hidden_states, *args, **kwargs)
    found = _over_cache(patch, patch.part, hidden_states, args, kwargs)
    if not isinstance(found, _OverCache):
        return _stock_over_cache(patch, found, hidden_states, args, kwargs)
    out = steps.attention(found.to, patch.part, hidden_states, found.buffers, found.at, self.layer_idx)
    found.layer.advance(found.num_tokens)
    return out, None


def layer(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    patch = _patch_of(self)
    if patch is None:
        return stock(self, None, hidden_states, *args, **kwargs)
    part: LayerPart = patch.part
    found = _over_cache(patch, part.attention, hidden_states, args, kwargs)
    if not isinstance(found, _OverCache):
        return _stock_over_cache(patch, found, hidden_states, args, kwargs)
    index = part.attention.module.layer_idx
    out = steps.decoder_layer(found.to, part, hidden_states, found.buffers, found.at, index)
    found.layer.advance(found.num_tokens)
    return (out, None) if part.spec.returns_weights else out


def head(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Make the logits of a model that the decode loop serves. On a GPU stock code does it: cuBLAS is as fast."""
    patch = _patch_of(self)
    x = hidden_states
    if patch is None or x.device.type != "cpu" or x.numel() == 0 or patch.state.texts.was_by_stock:
        return stock(self, None, x)
    if patch.reason_now(x) or replaced_function(self) or patch.part.reason() or patch.parameters_reason(x):
        return stock(self, None, x)  # only the product is lost, in a forward that counts its own reasons
    return steps.projection(_at_once(x), self, x)


def decoder(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run all layers; if the call is broken off, a FastpathCache that was given is left as it was."""
    patch: ModulePatch | None = vars(self).get(KEY)
    if patch is None or patch.state.texts.by_stock or torch.compiler.is_compiling():
        return type(self).forward(self, *args, **kwargs)
    state, texts = patch.state, patch.state.texts
    if not state.has_trained and torch.is_grad_enabled():
        state.has_trained = any(each.requires_grad for each in self.parameters())
    cache = cache_of(dict(zip(patch.argument_names, args[1:]), **kwargs) if len(args) > 1 else kwargs, None)
    is_by_stock = _is_faster_by_stock(patch, cache, args, kwargs)
    if is_by_stock:
        state.aside.stay_out()
    else:
        state.aside.come_back()
    before = texts.aside, texts.over_cache, texts.by_stock
    is_ours = isinstance(cache, FastpathCache)
    function = None if is_by_stock else replaced_function(self)
    texts.over_cache, texts.by_stock = is_ours, is_by_stock
    texts.aside = None if function is None else Cause("replaced_function", function)
    try:
        if not is_ours:
            return type(self).forward(self, *args, **kwargs)
        with cache.kept():
            return type(self).forward(self, *args, **kwargs)
    finally:
        texts.was_by_stock = is_by_stock
        texts.aside, texts.over_cache, texts.by_stock = before


def _is_faster_by_stock(patch: ModulePatch, cache: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a forward over a cache of another class, or over none, runs stock code in all modules, which is then
    faster. Its reason is counted here, once.

    Raises:
        FallbackError: the model was patched with ``strict=True``.
    """
    state, model = patch.state, patch.state.model
    if isinstance(cache, FastpathCache) or model is None:
        return False
    if cache is None and any(kwargs[name] for name in kwargs if name.startswith("output_")):  # modules tell the reason
        return False
    if state.loop_reason is not None:  # the user has chosen these modules, perhaps
        return False
    if torch.is_grad_enabled() or state.has_trained or model.training:  # by design stock code, which is not counted
        return False
    # modules are compared, or their forwards have more to do than to compute
    if state.is_compared or is_continuous_batch(kwargs) or is_offloading(cache):
        return False
    given = args[0] if args else kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    if not isinstance(given, torch.Tensor) or given.dim() < 2 or not state.aside.is_slower(model, given.device):
        return False
    if cache is not None and given.shape[1] == 1 and state.enabled and not state.stats.is_left_to_stock:
        length = cache.get_seq_length()
        is_new = state.options.strict or not state.stats.has_noted("other_cache")
        if is_new and not (isinstance(length, int) and length == 0):  # a static cache's length lies on the device
            state.fall_back(Cause("other_cache", class_name(cache)))
    return True


#: kind of a binding -> the forward that replaces stock's
FORWARDS: dict[str, Callable[..., Any]] = {
    "norm": norm,
    "mlp": mlp,
    "attention": attention,
    "layer": layer,
    "head": head,
    "decoder": decoder,
}
