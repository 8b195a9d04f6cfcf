"""What a patched module knows, and why it runs stock code in a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import foreign_mode, is_known_code, is_sharded, layer_windows, name_of
from ..decode.loops.patched import Patched
from ..decode.model.attention_part import AttentionPart
from ..decode.model.layer_part import LayerPart
from ..decode.model.modules import odd_tensor
from ..decode.model.parts import FeedForwardPart, HeadPart, NormPart
from ..decode.model.structure import DecoderPart
from ..native import loader
from ..reasons import Cause
from ..registry import FLOAT_DTYPES
from .families import OF_FILES
from .plan import PatchPlan

PatchedPart = NormPart | FeedForwardPart | AttentionPart | LayerPart | HeadPart | DecoderPart
#: where a patched module keeps its ModulePatch
KEY = "_hf_fastpath_module"

#: the reason for a forward that is to give more than its result
CAPTURED = Cause("attention_outputs", "output_attentions, output_hidden_states or output_router_logits")
#: stock code that runs by design: patching is switched off, the module is traced, or it is trained with an op that has
#: no backward
_UNCOUNTED = (None, "paused", "compiling", "gradient")


@dataclass
class ModulePatch:
    """What a patched module knows: the model's state, its part, and the names of its stock forward's arguments."""

    state: Patched
    part: PatchedPart
    argument_names: tuple[str, ...]

    def reason_now(self, x: torch.Tensor) -> str | None:
        """Return why this call cannot use any op on ``x``; None if it can."""
        if not self.state.enabled:
            return "paused"
        if (self.state.has_trained or self.part.module.training) and not self.state.texts.over_cache:
            return "gradient"
        if torch.compiler.is_compiling():
            return "compiling"
        if torch.is_autocast_enabled(x.device.type):
            return Cause("autocast", f"torch.autocast({x.device.type!r})")
        if (mode := foreign_mode()) is not None:
            return Cause("torch_mode", mode)
        if self.state.texts.aside is not None:
            return self.state.texts.aside
        if x.dtype not in FLOAT_DTYPES:
            return Cause("dtype", f"called with {x.dtype}", self.part.module)
        forward = type(self.part.module).forward
        if not is_known_code(forward, self.part.architecture.module):
            return Cause("class_forward", f"forward is {name_of(forward)}", self.part.module)
        missing = loader.why_not_native(x.device.type)
        return None if missing is None else Cause(missing, f"device {x.device.type}")

    def parameters_reason(self, x: torch.Tensor) -> str | None:
        """Return why the fused ops cannot take the part's parameters together with ``x``; None if they can."""
        grad = torch.is_grad_enabled()
        if grad and x.requires_grad:
            return "gradient"
        parameters = self.part.parameters()
        if (odd := odd_tensor(parameters)) is not None:
            return self.part.reason() or Cause("unsupported_projection", odd, self.part.module)
        for parameter in parameters:
            if parameter is None:
                continue
            if is_sharded(parameter):
                return Cause("sharded", module=self.part.module)
            if parameter.dtype != x.dtype:
                what = f"called with {x.dtype}, a weight is {parameter.dtype}"
                # the weights of a quantized layer are of other types, and to load it in one type would not help
                return self.part.reason() or Cause("dtype", what, self.part.module)
            if parameter.device != x.device:
                return Cause("device", f"called with {x.device}, a weight is on {parameter.device}", self.part.module)
            if grad and parameter.requires_grad:
                return "gradient"
        return None


def _decodes(state: Patched) -> bool:
    """Whether a step that was recorded where a file knows no better decodes in a call that runs, whatever the prompt's
    forward runs."""
    snapshot = state.plans.snapshot  # another thread may replace it at any time
    is_running = bool(state.plans.running) and snapshot is not None and not snapshot.reason
    return is_running and snapshot.part.reason_of_file is not None


def stock(module: nn.Module, reason: str | None, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward; a reason is counted, and raises under ``strict=True``.

    A module without a patch runs it too: other code may have wrapped our forward and may hold it after ``unpatch()``.
    """
    patch: ModulePatch | None = vars(module).get(KEY)
    if patch is not None and reason not in _UNCOUNTED and not (reason in OF_FILES and _decodes(patch.state)):
        patch.state.fall_back(reason)
    return type(module).forward(module, *args, **kwargs)


def has_layers_of_ours(model: nn.Module, plan: PatchPlan) -> bool:
    """Whether each layer that the config tells of has an attention of ours, at its own place in the cache."""
    windows = layer_windows(model.config)
    if windows is None:
        return False
    decoders = [binding.part for binding in plan.bindings if binding.kind == "decoder"]
    if len(decoders) != 1:
        return False
    architecture = decoders[0].architecture
    layers = getattr(decoders[0].module, architecture.layers)
    attentions = [getattr(layer, architecture.layer.attention, None) for layer in layers]
    places = [getattr(each, "layer_idx", place) for place, each in enumerate(attentions)]
    is_ours = all(_is_of_ours(layer) or _is_of_ours(each) for layer, each in zip(layers, attentions))
    return is_ours and places == list(range(len(windows)))


def _is_of_ours(module: Any) -> bool:
    return KEY in getattr(module, "__dict__", ())
