"""Whether a call of an attention module or a layer is of new tokens behind others that our cache holds, and the kernels
can take it. The checks stand in the order in which they are asked; each may rely on what the checks before it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache.fastpath_cache import FastpathCache
from ..cache.layer import FastpathLayer
from ..compat import cache_of, is_continuous_batch, is_flash_attention, outputs_are_captured
from ..decode.lower.attend import has_tensor_cores, plain_mask
from ..decode.model.attention_part import AttentionPart
from ..decode.model.layer_part import LayerPart
from ..decode.model.parts import MoEPart
from ..ops.gemv import MAX_ROWS
from ..reasons import Cause, class_name
from .module_patch import CAPTURED, ModulePatch


class ByDesign:
    """The finding that a call is not of new tokens over our cache: stock code runs, and no reason is counted."""


BY_DESIGN = ByDesign()
Finding = str | ByDesign | None


@dataclass
class ForwardCall:
    """A call of an attention module's or a layer's forward.

    Attributes:
        patch: the patch of the module.
        part: the attention that the call is of.
        x: hidden states.
        args, kwargs: the other arguments of the call.
        named: all arguments by name.
        cache: the KV cache among the arguments.
        starts: left padding of each row that the mask asks for, or None.
    """

    patch: ModulePatch
    part: AttentionPart
    x: torch.Tensor
    args: tuple
    kwargs: dict[str, Any]
    named: dict[str, Any] = field(init=False)
    cache: Any = field(init=False)
    starts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.named = dict(zip(self.patch.argument_names, self.args), **self.kwargs)
        self.cache = cache_of(self.named, self.part.spec.cache)

    @property
    def query_len(self) -> int:
        """New tokens of each row."""
        return self.x.shape[1]

    @property
    def index(self) -> int:
        """The index of the module's layer in the cache."""
        return self.part.module.layer_idx

    @property
    def layer(self) -> FastpathLayer:
        """The module's layer of the cache."""
        return self.cache.layers[self.index]

    def finding(self) -> Finding:
        """Return a reason code if the call is of new tokens over our cache but stock code has to run, None if the ops
        can take it, and BY_DESIGN for every other call (prompts without a past, no cache)."""
        for check in _CHECKS:
            if (found := check(self)) is not None:
                return found
        return None


def is_few(hidden_states: torch.Tensor) -> bool:
    """Whether the ops for 1 to MAX_ROWS rows take these hidden states."""
    return 0 < hidden_states.numel() <= MAX_ROWS * hidden_states.shape[-1]


def _of_one_request_a_row(call: ForwardCall) -> Finding:
    return (call.patch.reason_now(call.x) or "continuous_batching") if is_continuous_batch(call.kwargs) else None


def _of_tokens(call: ForwardCall) -> Finding:
    return BY_DESIGN if call.x.dim() != 3 or call.query_len == 0 else None


def _of_the_known_class(call: ForwardCall) -> Finding:
    return call.part.other_reason()


def _behind_others(call: ForwardCall) -> Finding:
    length = 0 if call.cache is None else call.cache.get_seq_length(call.index)
    # the length of a static cache lies on the device, and is not brought to the host
    return BY_DESIGN if isinstance(length, int) and length == 0 else None


def _one_token_or_what_ops_take(call: ForwardCall) -> Finding:
    if call.query_len == 1 or isinstance(call.cache, FastpathCache) and _takes_many(call):
        return None
    return BY_DESIGN


def _takes_many(call: ForwardCall) -> bool:
    """Whether the ops take several tokens at once: as few rows as the ops of a token step take, or attention that
    :mod:`..decode.lower.attend` has a kernel for."""
    x, part = call.x, call.part
    if is_few(x):
        return True
    if isinstance(call.patch.part, LayerPart) and isinstance(call.patch.part.mlp, MoEPart):
        return False
    return x.device.type == "cpu" or has_tensor_cores(x.device, x.dtype, part.head_dim)


def _with_tensors_that_fit(call: ForwardCall) -> Finding:
    return call.patch.reason_now(call.x) or call.patch.parameters_reason(call.x)


def _over_our_cache(call: ForwardCall) -> Finding:
    if isinstance(call.cache, FastpathCache):
        return None
    if call.patch.state.stats.is_left_to_stock:  # there is a reason already, for which stock code got its own cache
        return call.patch.part.reason() or BY_DESIGN
    return Cause("other_cache", class_name(call.cache))


def _of_what_kernels_compute(call: ForwardCall) -> Finding:
    return call.patch.part.reason()


def _over_a_layer_of_this_model(call: ForwardCall) -> Finding:
    layer, window = call.layer, call.part.window
    if layer.sliding_window not in (None, window):
        return Cause("other_cache", f"its window is {layer.sliding_window}, not {window}", call.part.module)
    shape = call.x.shape[0], *call.part.cache_shape
    return None if layer.admit(shape, shape, call.x.dtype, call.x.device) else "edited_cache"


def _of_few_sequences(call: ForwardCall) -> Finding:
    if call.query_len > 1 or (batch := call.x.shape[0]) <= MAX_ROWS:
        return None
    return Cause("batch_size", f"{batch} sequences, {MAX_ROWS} at most outside of generate()")


def _with_a_plain_mask(call: ForwardCall) -> Finding:
    mask, query_len = call.named.get("attention_mask"), call.query_len
    if mask is None:
        # flash attention alone takes no mask for "causal, behind what the cache holds"; other attention begins anew, as
        # it does in a layer that comes twice in a forward
        is_plain = query_len == 1 or is_flash_attention(call.part.module)
        return None if is_plain else BY_DESIGN
    seen = None
    if query_len > 1:
        seen = plain_mask(mask, call.layer.cumulative_length, query_len, call.layer.sliding_window)
    if seen is None:
        return Cause("attention_mask", f"{mask.dtype} {tuple(mask.shape)} for {query_len} tokens")
    call.starts = seen.starts
    return None


def _with_known_inputs(call: ForwardCall) -> Finding:
    others = [name for name in call.named if name == "encoder_hidden_states" or name.startswith("cu_seq_lens")]
    other = next((name for name in others if call.named[name] is not None), None)
    return None if other is None else Cause("unsupported_input", other)


def _for_its_result_alone(call: ForwardCall) -> Finding:
    return CAPTURED if call.named.get("output_attentions") or outputs_are_captured() else None


_CHECKS = (
    _of_one_request_a_row,
    _of_tokens,
    _of_the_known_class,
    _behind_others,
    _one_token_or_what_ops_take,
    _with_tensors_that_fit,
    _over_our_cache,
    _of_what_kernels_compute,
    _over_a_layer_of_this_model,
    _of_few_sequences,
    _with_a_plain_mask,
    _with_known_inputs,
    _for_its_result_alone,
)
