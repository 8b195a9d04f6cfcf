"""The forward of a whole patched model, for loops of the user's own: the first forward hands out our cache, and those
of new tokens over it are steps of a decode plan. In every other call the class's own forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from .. import compat
from ..cache.fastpath_cache import FastpathCache
from ..decode.loops.eligibility import is_left_padding
from ..decode.loops.new_tokens import NewTokens
from ..decode.loops.patched import STATE_KEY
from ..ops.decode_attention import MAX_QUERY_LEN
from ..ops.kv_cache import is_quantized
from ..options import MAX_BATCH
from ..reasons import Cause, class_name
from .plan import PatchPlan
from .state import PatchState

#: arguments that tell of the text, or of nothing that a step would do otherwise
_KNOWN = compat.CACHES | {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"),
}
#: those of them that are tensors in a step
_TENSORS = frozenset({"attention_mask", "position_ids", "cache_position"})
#: entries of a config that ask every forward for more than logits
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def is_due(plan: PatchPlan) -> bool:
    """Whether a model's own forward can be a step: it decodes text alone, in one process, and there are plans of it. A
    forward that other code has put on the model stays."""
    model = plan.model
    held = vars(model).get(compat.forward_attribute(model))
    if held is not None and getattr(held, "__func__", None) is not type(model).forward:
        return False
    if plan.loop_reason is not None or plan.family is None or plan.ranks is not None:
        return False
    if compat.is_multimodal(model) or compat.has_encoder(model) or compat.token_shape(model):
        return False
    return compat.cache_name(model) in compat.CACHES and compat.is_known_code(type(model).forward, plan.family.module)


def forward_for(model: nn.Module) -> Callable[..., Any]:
    """Make the forward that takes the place of that of the model's class, with the same signature: ``generate()`` and
    trainers ask it which arguments there are."""
    original = type(model).forward
    signature = inspect.signature(original)
    call = _Calls(signature, compat.cache_name(model))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or self.training or torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        state: PatchState | None = vars(self).get(STATE_KEY)
        if state is None or not state.enabled or state.stats.is_left_to_stock:
            return type(self).forward(self, *args, **kwargs)
        if (kind := _kind_by_stock(state, args, kwargs)) is None:
            return call.run(self, state, args, kwargs)
        if state.aside.known != kind:
            found = call.run(self, state, args, kwargs)
            state.aside.know(kind)
            return found
        texts = state.texts
        texts.by_stock = True
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            texts.by_stock = False

    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.__doc__
    return forward


class _Calls:
    """Calls of a model's forward, without gradients.

    Args:
        signature: of the forward.
        cache_name: how the cache is called among the arguments, and in the output.
    """

    #: arguments that decorators of forwards take
    _taken_besides = compat.CACHES | {"return_dict"}

    def __init__(self, signature: inspect.Signature, cache_name: str):
        _, *others = signature.parameters.values()
        self._names = tuple(each.name for each in others if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in others)
        self._cache_name = cache_name
        #: class of the output that stock code has given for what a step gives; None before
        self._output: type | None = None

    def run(self, model: nn.Module, state: PatchState, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Do as the forward of the model's class."""
        if len(args) > len(self._names) or not kwargs.keys().isdisjoint(self._names[: len(args)]):
            return type(model).forward(model, *args, **kwargs)  # which raises
        named = dict(zip(self._names, args), **kwargs) if args else kwargs
        cache = compat.cache_of(named, None)
        ids = named.get("input_ids")
        is_ours = cache is None or type(cache) is FastpathCache
        if not is_ours or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or _is_captured(ids):
            return type(model).forward(model, *args, **kwargs)
        if cache is None:
            return self._first(model, state, ids, named, args, kwargs)
        past = cache.get_seq_length()
        is_step = not cache.is_kept and _is_few(ids) and past > 0
        if not is_step and self._output is not None:
            return type(model).forward(model, *args, **kwargs)
        reason = self._reason(model, named)
        if reason is None and self._output is None:
            return self._learned(type(model).forward(model, *args, **kwargs))
        if not is_step:
            return type(model).forward(model, *args, **kwargs)
        if reason is None and not _counts_on(past, ids, named.get("cache_position")):
            reason = Cause("unsupported_input", "cache_position")
        if reason is None and _masks_states(cache, ids, named.get("attention_mask")):
            reason = Cause("unsupported_input", "attention_mask of a model without attention")
        if reason is None:
            state.aside.come_back()
            mask, position_ids = named.get("attention_mask"), named.get("position_ids")
            found = state.own_loops.logits(state, model, NewTokens(ids, cache, mask, position_ids, past))
            if isinstance(found, torch.Tensor):
                keep = named.get("logits_to_keep", 0)
                return self._made(model, found[:, -keep:], cache, named.get("return_dict"))
            reason = found
        if reason is not None and not state.has_patched_modules:  # patched modules tell their reasons themselves
            state.fall_back(reason)
        return type(model).forward(model, *args, **kwargs)

    def _reason(self, model: nn.Module, named: dict[str, Any]) -> Cause | None:
        """Return why a forward with these arguments is more than a step, or None."""
        for name, value in named.items():
            is_plain = name in _KNOWN or value is None or value is False
            if not is_plain or not (name in self._names or name in self._taken_besides or self._takes_any):
                is_output = name.startswith("output_")
                return Cause("attention_outputs" if is_output else "unsupported_input", name)
            if value is not None and name in ("position_ids", "logits_to_keep") and name not in self._names:
                return Cause("unsupported_input", name)
            if name in _TENSORS and not (value is None or isinstance(value, torch.Tensor)):  # a mask for each layer
                return Cause("unsupported_input", f"{name} is a {class_name(value)}")
        keep = named.get("logits_to_keep", 0)
        if type(keep) is not int or keep < 0:
            return Cause("unsupported_input", "logits_to_keep")
        if named.get("use_cache") is False:
            return Cause("no_cache", "use_cache=False")
        config: Any = model.config
        asked = next((name for name in _OUTPUTS if getattr(config, name, False)), None)
        if asked is None and compat.outputs_are_captured():
            asked = "of a model around it"
        return None if asked is None else Cause("attention_outputs", asked)

    # ---- the first forward of a text ------------------------------------------------------------------------------

    def _first(
        self,
        model: nn.Module,
        state: PatchState,
        ids: torch.Tensor,
        named: dict[str, Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Read a text without a past, and hand out our cache if ``generate()`` would have used one."""
        cache = self._made_cache(model, state, ids, named)
        if cache is None:
            return type(model).forward(model, *args, **kwargs)
        others = {name: value for name, value in named.items() if name not in compat.CACHES}
        with cache.reading_prompt():
            found = type(model).forward(model, **others, **{self._cache_name: cache})
        return self._learned(found)

    def _made_cache(
        self, model: nn.Module, state: PatchState, ids: torch.Tensor, named: dict[str, Any]
    ) -> FastpathCache | None:
        """Make the cache for a text, or return None if stock code makes one or none is asked for."""
        asked = named.get("use_cache")
        if not (getattr(model.config, "use_cache", False) if asked is None else asked):
            return None
        mask, options = named.get("attention_mask"), state.options
        if ids.numel() == 0 or ids.is_meta:
            return None
        is_large = len(ids) > min(MAX_BATCH, options.max_batch_size)
        if is_large or self._reason(model, named) is not None or compat.foreign_mode() is not None:
            return None
        # a text without a word of decoding may be scored: in training as with gradients, and as exactly as stock does
        is_exact = options.kv_dtype is None or not is_quantized(options.kv_dtype)
        if asked is None and (state.has_trained or not is_exact):
            return None
        if torch.is_autocast_enabled(ids.device.type) or not compat.makes_dynamic_caches(model):
            return None
        if mask is not None and (mask.shape != ids.shape or not (bool(mask.all()) or is_left_padding(mask))):
            return None
        state.aside.come_back()
        return state.own_cache(model, len(ids))

    # ---- outputs --------------------------------------------------------------------------------------------------

    def _learned(self, output: Any) -> Any:
        """Note the class of an output of stock code over our cache; return the output."""
        if self._output is None and isinstance(output, dict) and set(output) == {"logits", self._cache_name}:
            self._output = type(output)
        return output

    def _made(self, model: nn.Module, logits: torch.Tensor, cache: FastpathCache, return_dict: bool | None) -> Any:
        if return_dict is None:
            return_dict = model.config.return_dict
        if not return_dict:
            return logits, cache
        assert self._output is not None, "it is learned before the first step"
        return self._output(logits=logits, **{self._cache_name: cache})


def _kind_by_stock(state: PatchState, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Return what tells forwards apart that all run stock code if one does: over a cache of the user's own, which is
    counted already, or over none. None if the arguments have to be looked at."""
    cache = compat.cache_of(kwargs, None)
    if len(args) > 1 or state.is_compared or isinstance(cache, FastpathCache) or compat.is_offloading(cache):
        return None
    if cache is not None:
        if state.options.strict or not state.stats.has_noted("other_cache"):
            return None
    elif kwargs.get("use_cache") is not False or any(name.startswith("output_") for name in kwargs):
        return None
    return get_ident(), len(args), type(cache), *kwargs


def _is_few(ids: torch.Tensor) -> bool:
    """Whether there is one new token of each sequence, or a few of one."""
    return ids.shape[1] == 1 or (len(ids) == 1 and 0 < ids.shape[1] <= MAX_QUERY_LEN)


def _counts_on(past: int, ids: torch.Tensor, places: torch.Tensor | None) -> bool:
    """Whether new tokens are to go behind all that a cache holds, as they do if nobody says where."""
    return places is None or places.tolist() == list(range(past, past + ids.shape[1]))


def _masks_states(cache: FastpathCache, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a model of states alone is given a mask of the whole text, which its forward applies to the new tokens of
    a batch. ``generate()`` passes none there."""
    return mask is not None and len(ids) > 1 and not cache.key_layers and mask.shape != ids.shape


def _is_captured(ids: torch.Tensor) -> bool:
    """Whether other code captures a forward into a CUDA graph, where nothing may be asked of the host."""
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()
