"""How prompts of a model with an architecture file are read op by op."""

from __future__ import annotations

from typing import Any

import torch

from ...cache.fastpath_cache import FastpathCache
from ..lower.attend import has_tensor_cores
from ..lower.which_op import Lower
from ..model.structure import ModelInRoles
from ..run.program import Program
from . import steps
from .prompts import PromptInputs, empty_states


class DescribedPrompts:
    """The calls of a step for all tokens of a prompt.

    Args:
        part: the model in its roles.
    """

    any_batch = True

    def __init__(self, part: ModelInRoles):
        self._part = part

    def form(self, device: torch.device, shape: tuple[int, int], past: int, is_padded: bool) -> Any:
        """Return the model, or None: ops do not read a prompt if scores have a soft-cap and no kernel of many tokens
        does that, if a window ends inside of a later part of a text, or if layers are on several devices."""
        return self._part if self._are_read(device, past, past + shape[1]) else None

    def _are_read(self, device: torch.device, past: int, length: int) -> bool:
        part = self._part
        if len(part.devices) > 1:
            return False
        for layer in part.layers:
            attention = layer.attention
            if attention.softcap:
                if not has_tensor_cores(device, part.embedding.weight.dtype, attention.head_dim):
                    return False
            if past and attention.window is not None and length > attention.window:
                return False
        return True

    def begin(self, form: Any) -> None:
        """Do nothing: calls read the model's tensors."""

    def prepare(self, cache: FastpathCache, batch: int) -> None:
        for index, layer in enumerate(self._part.layers):
            cache.prepare(index, *empty_states(layer.attention, self._part.embedding.weight, batch))

    def record(self, program: Program, to: Lower, last: Lower, given: PromptInputs) -> Any:
        part = self._part
        hidden, _ = steps.step_inputs(to, part, given.tokens, given.positions, [])
        for index, (layer, cache) in enumerate(zip(part.layers, given.caches)):
            hidden = steps.decoder_layer(to, layer, hidden, cache, given.at, index)
        hidden = to.emit(torch.ops.aten.narrow.default, hidden, 1, -1, 1)
        return steps.scaled_logits(last, part, steps.head(last, part, hidden))
