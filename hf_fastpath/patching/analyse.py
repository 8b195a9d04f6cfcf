"""analyse(model, options): find the architecture, and decide which modules can be fast, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from .. import compat, structural
from ..architecture import PARTS, Architecture, architectures
from ..decode.model import parts
from ..decode.model.attention_part import AttentionPart
from ..decode.model.layer_part import LayerPart
from ..decode.model.structure import DecoderPart
from ..decode.placed.shards import ShardedModel
from ..decode.plans.plan_cache import Family
from ..decode.ranks.process_group import Ranks
from ..decode.sources.step_source import StepSource
from ..native import loader
from ..options import Options
from ..reasons import Cause, named
from ..recording.family import Recorded
from ..recording.placed_model import RecordedAlone
from ..recording.sharded_model import RecordedOverRanks
from ..replacing import quantizing
from . import families
from .families import OF_FILES
from .plan import Binding, Declined, PatchPlan


def analyse(model: nn.Module, options: Options, no_kernels: str | None = None) -> PatchPlan:
    """Decide what ``patch(model)`` is to do. The model may be on the meta device; it is only looked at.

    Args:
        no_kernels: why nothing can be fast on the model's devices, or None.

    Raises:
        UnsupportedModelError: the architecture file names a class that the installed transformers lacks.
    """
    if compat.is_tensor_parallel(model):
        return _analyse_shards(model, options, no_kernels)
    known = structural.known_for(model, architectures())
    architecture, bindings, declined = _modules(model, options, known, no_kernels)
    reason = _loop_disabled(options)
    if not (compat.is_multimodal(model) or compat.has_encoder(model)):  # else the step is recorded in any case
        reason = reason or _partial_reason([each for each in declined if each.reason not in OF_FILES])
    family: Family | None = None
    whole: StepSource | None = None
    if reason is None:
        family = _family(model, known)
        whole = None if family is None else family.model_part(model)
        reason = None if whole is None else whole.making_reason()
        reason = reason or _whole_reason(model, whole)
        if whole is not None and whole.reason_of_file is not None:
            declined = [] if reason is None else declined
            if reason in OF_FILES:
                reason = _partial_reason(declined) or (reason if reason in _LASTING else None)
        elif isinstance(family, Recorded) and reason is not None:
            family = whole = None
        elif isinstance(family, Recorded):  # stock code reads its prompts, and the loop all else
            architecture, bindings, declined = None, [], []
    if whole is not None and reason is None:
        # a plan brings the weights of these modules
        declined = [each for each in declined if each.reason != "offloaded"]
        if (head := whole.head_part) is not None and _lasting_reason(head) is None:
            bindings.append(Binding("head", head))
    replacements, refusal = _quantized(model, whole, options, reason)
    return PatchPlan(
        model=model,
        options=options,
        architecture=architecture,
        by_structure=next((each for each in known if each.like), None),
        family=family,
        bindings=tuple(bindings),
        patched=dict(Counter(each.kind for each in bindings if each.kind in PARTS)),
        declined=tuple(declined),
        loop_reason=reason,
        generates=compat.uses_generation_mixin_sample(model),
        replacements=replacements,
        refusal=refusal,
    )


def _quantized(
    model: nn.Module, whole: StepSource | None, options: Options, reason: str | None = None
) -> tuple[tuple[quantizing.Replacement, ...], str | None]:
    """Return the layers to quantize as the options ask for, and why none can be."""
    if options.weights is None:
        return (), None
    refusal = quantizing.why_not_quantized(model, whole, options, reason)
    return quantizing.replacements(whole, options, model) if whole is not None and refusal is None else (), refusal


def _analyse_shards(model: nn.Module, options: Options, no_kernels: str | None) -> PatchPlan:
    """Do as :func:`analyse` for a tensor-parallel model: its modules stay stock's, and the decode loop is ours.

    Every rank has to call this: all come to the same reason.
    """
    ranks = Ranks(compat.rank_group(model))
    reason = _loop_disabled(options) or (None if no_kernels is None else Cause(no_kernels, module=model))
    known = families.of_files(model, architectures(), ranks)
    if compat.can_generate(model):
        known.append(RecordedOverRanks(model, ranks))
    found = ((each, each.model_part(model)) for each in known)
    family, whole = next((pair for pair in found if pair[1] is not None), (None, None))
    reason = reason or _whole_reason(model, whole)
    if isinstance(whole, ShardedModel) and reason is None:
        reason = whole.spread_reason() or _lasting_reason(whole)
    reason = ranks.agreed(reason)
    if isinstance(family, Recorded) and reason is not None:
        family = whole = None
    replacements, refusal = _quantized(model, whole, options, reason)
    return PatchPlan(
        model=model,
        options=options,
        architecture=whole.architecture if isinstance(whole, ShardedModel) else None,
        by_structure=None,
        family=family,
        bindings=(),
        patched={},
        declined=(),
        loop_reason=reason,
        generates=compat.uses_generation_mixin_sample(model),
        replacements=replacements,
        refusal=refusal,
        ranks=ranks,
    )


# ---- modules ------------------------------------------------------------------------------------------------------


def _modules(
    model: nn.Module, options: Options, known: tuple[Architecture, ...], no_kernels: str | None
) -> tuple[Architecture | None, list[Binding], list[Declined]]:
    """Return the architecture of the modules, the modules that get our forwards, and those that are declined.

    Bindings are in the order of ``model.apply``.
    """
    names = {id(module): name for name, module in model.named_modules()}
    bindings: list[Binding] = []
    declined: list[Declined] = []
    last: Architecture | None = None

    def visit(module: nn.Module) -> None:
        nonlocal last
        found = ((architecture, architecture.part_of(module)) for architecture in known)
        architecture, kind = next((pair for pair in found if pair[1] is not None), (None, None))
        if architecture is None or kind is None:
            if (holder := next((each for each in known if each.holds_layers(module)), None)) is not None:
                bindings.append(Binding("decoder", DecoderPart(holder, module)))
            return
        if last is None or architecture.name != last.name:
            architecture.check_classes()
        last = architecture
        part = _part(architecture, kind, module)
        reason: str | None = None
        if kind not in options.ops:
            reason = Cause("module_disabled", f"ops={sorted(options.ops)}")
        elif no_kernels is not None:
            reason = Cause(no_kernels, module=module)
        reason = reason or _lasting_reason(part)
        if reason is None:
            bindings.append(Binding(kind, part))
        else:
            declined.append(Declined(names[id(module)], kind, named(reason, model)))

    model.apply(visit)
    return last, bindings, declined


def _part(architecture: Architecture, kind: str, module: nn.Module) -> parts.Part:
    if kind == "norm":
        return parts.NormPart(architecture, module)
    if kind == "mlp":
        return parts.feed_forward_part(architecture, module)
    if kind == "attention":
        return AttentionPart(architecture, module, _window(module))
    attention = getattr(module, architecture.layer.attention)
    return LayerPart(architecture, module, _window(attention))


def _window(attention: Any) -> int | None:
    """Return the sliding window of an attention module, found in the config by the layer's index.

    A module that has no config or no layer index is none of transformers': it has no window.
    """
    if not hasattr(attention, "config") or not hasattr(attention, "layer_idx"):
        return None
    windows = compat.layer_windows(attention.config)
    return None if windows is None or attention.layer_idx >= len(windows) else windows[attention.layer_idx]


#: reasons that no later call can cure; all other reasons are asked for again at every call
_LASTING = (
    *("unsupported_head_dim", "unsupported_config", "unsupported_activation"),
    *("class_not_supported", "instance_forward", "offloaded"),
)


def _lasting_reason(part: parts.Part) -> str | None:
    """Return why a module keeps its stock forward for good, or None."""
    reason = part.reason()
    own = vars(part.module).get("forward")
    is_replaced = reason == "compressed_tensors" and compat.function_code(own) == reason  # which ours must not replace
    return reason if reason in _LASTING or is_replaced else None


# ---- the decode loop ----------------------------------------------------------------------------------------------


def _loop_disabled(options: Options) -> str | None:
    return None if "loop" in options.ops else Cause("module_disabled", f"ops={sorted(options.ops)}")


def _partial_reason(declined: list[Declined]) -> str | None:
    """Return why transformers' loop has to run because some modules keep their stock forwards, or None."""
    reasons = [each.reason for each in declined if each.reason not in ("module_disabled", "offloaded")]
    if not reasons:
        return None
    missing = next((reason for reason in reasons if reason in loader.NO_KERNELS), None)
    return missing or Cause("partial_patch", f"{reasons[0]}: {reasons[0].what}")


def _family(model: nn.Module, known: tuple[Architecture, ...]) -> Family | None:
    """Return the family of a whole model: its architecture, or the recorder; None if it decodes no text."""
    if described := families.of_files(model, known, None):
        return described[0]
    is_known = compat.is_multimodal(model) or compat.has_encoder(model) or compat.is_decoder_alone(model)
    return RecordedAlone(model) if is_known else None


def _whole_reason(model: nn.Module, whole: StepSource | None) -> str | None:
    """Return why transformers' loop has to run although every module has a forward of ours, or None."""
    if whole is None:
        return Cause("class_not_supported", module=model)
    if (reason := whole.lasting_reason()) is not None:
        return reason
    narrow = [window for window in whole.windows if window is not None and window < compat.MIN_WINDOW]
    if narrow:
        return Cause("unsupported_config", f"sliding_window={narrow[0]}", model)
    if compat.uses_generation_mixin_sample(model):
        return None
    return Cause("custom_sample", compat.name_of(getattr(type(model), "_sample", type(model))))
