"""apply(plan, state): do all that was decided to a model, or nothing of it; and undo it."""

from __future__ import annotations

import inspect

from torch import nn

from .. import compat
from ..decode.loops.patched import STATE_KEY
from ..recording.family import Recorded
from ..replacing.quantizing import quantize_model
from . import own_forward
from .copies import bind_copying
from .families import DescribedOrRecorded
from .forwards import FORWARDS
from .generation import LOOPS, prepare_cache
from .loops import install_loops, uninstall_loops
from .module_patch import KEY, ModulePatch
from .plan import Binding, PatchPlan
from .state import PatchState


def claim(model: nn.Module, state: PatchState) -> bool:
    """Put ``state`` onto a model; from then on calls of its generate() come to the state's door.

    Returns:
        False if the model has another state already; of two threads, only one succeeds.
    """
    install_loops(state, LOOPS)
    return state.ledger.claim(model, STATE_KEY, state)


def apply(plan: PatchPlan, state: PatchState) -> None:
    """Give the plan's modules our forwards, and the model our cache and decode loop.

    A model that no architecture covers wholly only has its calls counted. If an exception breaks this function off, it
    undoes what it did.

    Args:
        plan: made of a model to which no other plan was applied since.
        state: the state that the model has got; it takes on the plan.
    """
    try:
        state.decide(plan)
        if plan.ranks is not None and plan.loop_reason is None:
            plan.ranks.connect(next(plan.model.parameters()).device)
        for binding in plan.bindings:
            _bind_forward(state, binding)
        _bind_generate(state, plan)
    except BaseException:
        undo(state)
        raise


def keep_recording(plan: PatchPlan, state: PatchState) -> None:
    """Keep the step that was recorded when the model was looked at, so that the first call need not record it again.

    Args:
        plan: applied to a model that lies in memory as its calls will find it.
    """
    family = plan.family
    if isinstance(family, (Recorded, DescribedOrRecorded)) and family.first is not None and plan.loop_reason is None:
        state.plans.reason_of(family.first)
        family.first = None


def _bind_forward(state: PatchState, binding: Binding) -> None:
    """Bind a forward of :mod:`.forwards` to the part's module."""
    module, ledger = binding.part.module, state.ledger
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]
    ledger.put(module, KEY, ModulePatch(state, binding.part, names))
    ledger.bind(module, compat.forward_attribute(module), FORWARDS[binding.kind], binding.kind == "decoder")
    bind_copying(ledger, module)


def _bind_generate(state: PatchState, plan: PatchPlan) -> None:
    bind_copying(state.ledger, plan.model)
    install_loops(state, LOOPS)  # a class with a loop of its own passes through them to be counted
    if own_forward.is_due(plan):
        own = own_forward.forward_for(plan.model)
        state.ledger.bind(plan.model, compat.forward_attribute(plan.model), own, is_gate=True)
    if plan.generates:
        state.ledger.bind(plan.model, compat.PREPARE_CACHE, prepare_cache)


def quantize(plan: PatchPlan, state: PatchState, quiet: bool) -> None:
    """Put quantized layers in the place of those that the plan names; an exception undoes all of it."""
    try:
        quantize_model(plan.model, plan.replacements, state.ledger.replaced, quiet)
    except BaseException:
        undo(state)
        raise


def undo(state: PatchState) -> None:
    """Bring a model back to what it was. A call that was broken off can be made again and goes on from there."""
    state.plans.clear()
    state.own_loops.clear()
    if state.prefixes is not None:
        state.prefixes.clear()
    state.ledger.bring_layers_back(state.model)
    uninstall_loops(state)
    state.ledger.undo()
