"""apply(plan, state): do to a model what was decided, or nothing; and undo it."""

from __future__ import annotations

import inspect

from torch import nn

from .. import compat
from ..decode.patched import STATE_KEY
from ..quantization.replacing import quantize_model
from .copies import bind_copying
from .forwards import FORWARDS
from .generation import LOOPS, prepare_cache
from .loops import install_loops, uninstall_loops
from .module_patch import KEY, ModulePatch
from .plan import Binding, PatchPlan
from .state import PatchState


def claim(model: nn.Module, state: PatchState) -> bool:
    """Put ``state`` onto a model whose calls of generate() come to its door from here on.

    Returns:
        False if the model has another state: of two threads, one succeeds.
    """
    install_loops(state, LOOPS)
    return state.ledger.claim(model, STATE_KEY, state)


def apply(plan: PatchPlan, state: PatchState) -> None:
    """Give the plan's modules our forwards, and the model our cache and decode loop.

    One that no architecture covers wholly is only counted. What breaks this off finds it undone.

    Args:
        plan: of a model that has had no other since.
        state: what the model has got; it takes on the plan.
    """
    try:
        state.decide(plan)
        for binding in plan.bindings:
            _bind_forward(state, binding)
        _bind_generate(state, plan)
    except BaseException:
        undo(state)
        raise


def _bind_forward(state: PatchState, binding: Binding) -> None:
    """Bind a forward of :mod:`.forwards` to the part's module."""
    module, ledger = binding.part.module, state.ledger
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]
    ledger.put(module, KEY, ModulePatch(state, binding.part, names))
    ledger.bind(module, compat.forward_attribute(module), FORWARDS[binding.kind])
    bind_copying(ledger, module)


def _bind_generate(state: PatchState, plan: PatchPlan) -> None:
    bind_copying(state.ledger, plan.model)
    if plan.generates:
        state.ledger.bind(plan.model, compat.PREPARE_CACHE, prepare_cache)
        install_loops(state, LOOPS)
    else:
        uninstall_loops(state)


def quantize(plan: PatchPlan, state: PatchState, quiet: bool) -> None:
    """Put quantized layers in the place of those that the plan names; what breaks this off finds all undone."""
    try:
        quantize_model(plan.model, plan.replacements, state.ledger.replaced, quiet)
    except BaseException:
        undo(state)
        raise


def undo(state: PatchState) -> None:
    """Bring a model to what it was. Broken off and called again, it goes on where it was."""
    state.plans.clear()
    state.ledger.bring_layers_back()
    uninstall_loops(state)
    state.ledger.undo()
