"""A model as it was when it was looked at closely, and whether it still is.

Every ``generate()`` has to know that nothing was put into the model since it was patched, and what a decode plan would
record. To ask every module takes milliseconds; to see that all modules hold what they held takes a fraction of one.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from .. import compat
from . import structure

#: dicts of a module that hold what the module is made of
_CONTENTS = itemgetter("_modules", "_parameters", "_buffers")
#: attributes of every module of which all but one are bookkeeping, what forwards write by themselves, and the defaults
#: of ``generate()``, which come with each call
_BOOKKEEPING = (frozenset(vars(nn.Module())) - {"training"}) | compat.FORWARD_NOTES | {compat.GENERATION_DEFAULTS}
_FACTS = methodcaller("data_ptr"), methodcaller("stride"), attrgetter("dtype")
#: stands for any parameter on "meta" whose hook brings another tensor: the hook puts a new one there at every call
_ON_META = object()


class Snapshot:
    """What :meth:`ModelPart.reason` and :func:`structure.fingerprint` depend on, as it was at one time.

    Everything that a module holds is known by its identity, so that a replaced module, parameter, hook, method, class
    or setting is noticed. Of parameters the snapshot also knows where their data are, and of configurations the values.
    Modules and tensors are not kept alive.

    Args:
        part: a model without a reason against a decode plan.

    Attributes:
        prompt_programs: the programs that ``prompt.read`` keeps while the model is as it was.
    """

    def __init__(self, part: structure.ModelPart):
        self.part = part
        self.prompt_programs: dict[tuple, Any] = {}
        self._is_brought = bool(part.sources)
        modules = list(part.source.modules())
        self._attributes = [itemgetter("_modules", *(vars(module).keys() - _BOOKKEEPING)) for module in modules]
        known = nn.Module.__mro__
        classes = {base: None for module in modules for base in type(module).__mro__ if base not in known}
        self._namespaces = [*map(vars, classes), vars(sys.modules[part.architecture.module])]
        configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
        self._configs = [(each, copy.deepcopy(compat.config_entries(each))) for each in configs.values()]
        values = self._values(modules)
        self._ids = list(map(id, values))
        # An identity is certain only while its object lives: modules and tensors are held weakly, all else is kept.
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        self._modules, self._tensors = (list(map(weakref.ref, things)) for things in (modules, tensors.values()))
        self._kept = [value for value in values if not isinstance(value, (nn.Module, torch.Tensor))]
        self._facts = self._facts_of(tensors.values())

    def holds(self) -> bool:
        """Whether everything is as it was."""
        modules, tensors = ([reference() for reference in each] for each in (self._modules, self._tensors))
        if any(thing is None for thing in (*modules, *tensors)):
            return False
        if any(compat.config_entries(config) != values for config, values in self._configs):
            return False
        try:
            return list(map(id, self._values(modules))) == self._ids and self._facts_of(tensors) == self._facts
        except KeyError:  # a module has lost an attribute
            return False

    @cached_property
    def fingerprint(self) -> tuple:
        """:func:`structure.fingerprint` of the model."""
        return self.part.fingerprint()

    def _values(self, modules: list) -> list:
        """Return the modules' attributes, their number, what the modules' own dicts hold, the code that runs, and the
        modules' classes."""
        spaces = list(map(vars, modules))
        held = [attributes(space) for attributes, space in zip(self._attributes, spaces)]
        functions = [
            *_all_values(self._namespaces),
            *compat.functions_of_configs(config for config, _ in self._configs),
        ]
        # a function that ``kernels`` may replace is a module
        inner = [vars(function).get("forward") for function in functions if isinstance(function, nn.Module)]
        inside = _all_values(filter(None, chain.from_iterable(map(_CONTENTS, spaces))))
        if self._is_brought:
            inside = (_ON_META if isinstance(each, torch.Tensor) and each.is_meta else each for each in inside)
        sizes = [len(space) - sum(note in space for note in compat.FORWARD_NOTES) for space in spaces]
        hooks = chain.from_iterable(map(compat.hooks_with_effect, spaces))
        return [*chain.from_iterable(held), *sizes, *inside, *hooks, *functions, *inner, *map(type, modules)]

    def _facts_of(self, tensors: Iterable[torch.Tensor]) -> list:
        """Return where tensors are and of which type, what the angles of positions depend on, and what stands behind
        parameters on "meta"."""
        rotary = self.part.rotary
        angles = None if rotary is None else structure.angle_facts(rotary)
        local = list(map(compat.local_tensor, tensors))
        return [*chain.from_iterable(map(fact, local) for fact in _FACTS), angles, *self.part.sources]


def _all_values(dicts: Iterable[Any]) -> Iterable[Any]:
    return chain.from_iterable(map(methodcaller("values"), dicts))
