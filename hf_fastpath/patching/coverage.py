"""What patch() says if it can patch nothing, or only a part of a model."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

from torch import nn

from .. import compat, logs, structural
from ..architecture import architectures
from ..errors import UnsupportedModelError
from ..native import loader
from ..reasons import REASONS, Cause, named
from .plan import PatchPlan


def _declined(plan: PatchPlan) -> tuple[str, str, list[Cause]]:
    """Return which modules were declined, what helps, and the reason codes that the user has not asked for."""
    why = "; ".join(f"{kind}: {reason} ({reason.what or name})" for name, kind, reason in plan.declined[:3])
    partial = sorted({reason for *_, reason in plan.declined} - {"module_disabled", *loader.NO_KERNELS})
    remedies = "; ".join(f"{reason}: {REASONS[reason].remedy}" for reason in partial)
    return why, f" What helps: {remedies}." if partial else "", partial


def check_whole(model: nn.Module) -> None:
    """Fail if this process has only a part of the model's weights.

    Raises:
        UnsupportedModelError: the message names how the weights are spread.
    """
    how = None if compat.is_tensor_parallel(compat.generating_model(model)) else compat.sharding(model)
    if how is not None:
        cause = f"the weights of this {type(model).__name__} are spread over processes ({how})"
        raise unsupported(cause, REASONS["sharded"].remedy)


#: characters of what an exception of a model's own code may say; names of functions and modules are shorter
_MOST = 1500
_FAMILIES = "`python -m hf_fastpath info` lists the families that are made fast; other models run as they are, by stock"


def unsupported(cause: str, helps: str, *more: str, why: str = "") -> UnsupportedModelError:
    """Make an error that says what the model is in its first line, then why nothing can be done, and what helps.

    Args:
        cause: the model and a reason code, which fit into a line.
        why: names of modules and functions, and what exceptions say, in full.
    """
    why = textwrap.shorten(why, _MOST, placeholder=" ...")
    lines = (f"patch() can do nothing: {cause}.", why and f"{why}.", f"What helps: {helps}.", *more)
    return UnsupportedModelError("\n".join(filter(None, lines)))


def check_kernels(devices: Iterable[str], strict: bool, quiet: bool) -> None:
    """Load or build the kernels for a model's devices; report that there are none, so that it would run stock code.

    Args:
        quiet: say nothing of a build.

    Raises:
        UnsupportedModelError: there are none. If HF_FASTPATH_NATIVE=0 asks for that, a warning is given instead.
    """
    devices = sorted(devices)
    for device in devices:
        loader.ensure(device, None if quiet else logs.say)
    cause = loader.cause(devices)
    if cause is None:
        return
    if strict or not loader.switched_off():
        hint = "HF_FASTPATH_NATIVE=0 runs stock code instead; `python -m hf_fastpath info` says what each device has"
        raise UnsupportedModelError(f"{cause}\n{hint}")
    logs.warn(f"hf_fastpath: {cause}\nEvery module runs stock code.")


def check_anything(plan: PatchPlan) -> None:
    """Fail if nothing is to be patched.

    Raises:
        UnsupportedModelError: the message says what the model is, and the one cause.
    """
    if plan.patched or plan.loop_reason in (None, *loader.NO_KERNELS):
        return
    model = plan.model
    reasons = Counter(reason for *_, reason in plan.declined if reason != "module_disabled")
    if reasons:
        ((code, count),) = reasons.most_common(1)
        name, kind, first = next(each for each in plan.declined if each.reason == code)
        others = f" and {count - 1} more" if count > 1 else ""
        where = f"{name or type(model).__name__} ({kind}){others}"
        raise unsupported(f"{code} in this {type(model).__name__}, {where}", REASONS[code].remedy, why=_why(first))
    if plan.declined:  # the user asked for nothing but the loop
        reason = REASONS[plan.loop_reason]
        cause = f"ops leaves only the loop of this {type(model).__name__}, the decode loop: {plan.loop_reason}"
        raise unsupported(cause, reason.remedy, why=_why(named(plan.loop_reason, model)))
    more: list[str] = []
    what = _kind(model)
    if what is None and plan.loop_reason != "class_not_supported":
        cause = named(plan.loop_reason, model)
        raise unsupported(f"{_named(model)}: {cause}", REASONS[cause].remedy, why=_why(cause))
    if what is None:
        what = f"{_named(model)} is a causal LM of a family without an architecture file"
        nearest = structural.match(model)
        if nearest is not None and nearest.differences:
            more.append(str(nearest))
    raise unsupported(what, _FAMILIES, *more)


def _why(reason: Cause) -> str:
    """Return what a reason means, and what it is about."""
    return f"{REASONS[reason].meaning} ({reason.what})" if reason.what else REASONS[reason].meaning


def _named(model: nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return f"{type(model).__name__} ({kind})" if kind else type(model).__name__


def _kind(model: nn.Module) -> str | None:
    """Return why a model without any module of a listed family could not have one; None if it is a causal LM."""
    name, config = _named(model), getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return f"{name} is no transformers model"
    if not compat.can_generate(model):
        return f"{name} is an encoder, or another model that generates no tokens"
    listed = {(architecture.module, architecture.causal_lm) for architecture in architectures()}
    base = next((cls for cls in type(model).__mro__[1:] if (cls.__module__, cls.__name__) in listed), None)
    if base is not None:
        return f"{name} is a subclass of {base.__name__} whose layers are classes of its own"
    return None


def check_coverage(plan: PatchPlan) -> None:
    """Report that little or nothing of a model can be patched.

    Raises:
        UnsupportedModelError: nothing can be patched, or with ``strict=True`` not all of the model.
    """
    check_anything(plan)
    why, helps, partial = _declined(plan)
    if partial:
        text = f"{len(plan.declined)} modules keep stock code ({', '.join(partial)}): {why}"
        if plan.options.strict:
            raise UnsupportedModelError(f"{text}. strict=True forbids that.{helps}")
        logs.warn(f"hf_fastpath: {text}.{helps} See report(model).")
