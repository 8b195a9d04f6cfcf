"""Copies of patched modules: pickles and DataParallel's replicas are stock, deep copies of a model stay patched."""

from __future__ import annotations

import copy
import sys

from torch import nn

from .. import compat
from ..decode.loops.patched import STATE_KEY
from .aside import Aside
from .generation import LOOPS
from .ledger import Ledger
from .loops import install_loops
from .module_patch import KEY
from .state import PatchState, state_of


def bind_copying(ledger: Ledger, module: nn.Module) -> None:
    """Bind the methods that pickle, ``copy`` and DataParallel look up on the instance."""
    ledger.bind(module, compat.REPLICATE, _replicate)
    ledger.bind(module, "__getstate__", _getstate)
    ledger.bind(module, "__deepcopy__", _deepcopy)


def _getstate(self: nn.Module) -> dict:
    """Return the module's ``__dict__`` as it was before ``patch()``, for pickle and ``copy.copy``."""
    state = state_of(self) or vars(self)[KEY].state
    return state.ledger.before(self)


def _replicate(self: nn.Module) -> nn.Module:
    """Make a replica for another GPU as the module's class does, without what is bound to the module itself."""
    made = getattr(type(self), compat.REPLICATE)(self)
    for name, value in list(vars(made).items()):
        if name.startswith(STATE_KEY) or compat.is_ours(getattr(value, "__func__", None)):
            del vars(made)[name]
    return made


def _deepcopy(self: nn.Module, memo: dict) -> nn.Module:
    """Copy a patched model as patched, and one of its modules alone as stock."""
    wrapper = compat.object_of_deepcopy(sys._getframe(1))
    if wrapper is not None and wrapper is not self:  # a model of PEFT's hands on what the model inside has
        return compat.plain_deepcopy(wrapper, memo)
    state = state_of(self)
    if state is not None:
        state.aside.come_back()
    made = self.__class__.__new__(self.__class__)
    memo[id(self)] = made
    contents = vars(self)
    if state is not None:
        memo[id(state)] = PatchState(state.options)  # the modules' patches are copied next, and refer to the state
    elif id(contents[KEY].state) not in memo:
        contents = _getstate(self)
    vars(made).update(copy.deepcopy(contents, memo))
    if state is not None:
        _copy_into(memo[id(state)], state, memo)
    return made


def _copy_into(made: PatchState, state: PatchState, memo: dict) -> None:
    """Fill the state of a deep copy of the model: its ledger names the copy's modules; plans and counts start empty."""
    made.ledger, made.lost = copy.deepcopy(state.ledger, memo), state.lost
    made.aside = Aside(made.ledger)
    if state.decided is not None:
        made.decide(copy.deepcopy(state.decided, memo))
        install_loops(made, LOOPS)
