"""Python values that a forward may read, as they were at one time: attributes of modules and all that these hold.

A decode plan holds what a forward made of such values. :class:`Walk` goes through them and freezes each by value, but
tensors and modules by identity, as plans read these live. :class:`Watch` sees in a fraction of a millisecond whether
anything may have changed; only then is the walk made again, and the frozen values compared.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from .. import compat

#: values that are what they are; a float is known by its text, which tells -0.0 from 0.0 and makes nan equal to nan
_PLAIN = frozenset({type(None), bool, int, str, bytes, complex, type(...), slice, range})
_ROWS = (list, tuple, set, frozenset, deque)
#: kinds of values that are known by their identity, whatever they hold
_LEAVES = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, property, classmethod, staticmethod),
    *(enum.Enum, logging.Logger, functools.cached_property, torch.dtype, torch.device, compat.Tokenizer),
)
#: packages whose objects are known by their identity: bookkeeping of their own, which no forward computes with
_PACKAGES = frozenset(
    {"torch", "hf_fastpath", "accelerate", "tokenizers", "sentencepiece", "threading", "_thread", "weakref", "logging"}
)
#: containers of more plain values than these are compared as a whole
_MANY = 256
#: plain tensors of more bytes are known by their identity
_MOST_NUMBERS = 1 << 16
#: attributes of every module of which all but one are bookkeeping
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
#: classes of PyTorch's whose forwards read no attribute but tensors and children -> attributes that say their sizes
_SIZES_ALONE: dict[type, frozenset[str]] = {
    nn.Linear: frozenset({"in_features", "out_features", "training"}),
    **dict.fromkeys((nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential), frozenset({"training"})),
    **dict.fromkeys((nn.ParameterList, nn.ParameterDict), frozenset({"training", "_size", "_keys"})),
}
#: entries of a class that no code reads while it computes
_OF_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __abstractmethods__ _abc_impl __orig_bases__ "
    "__parameters__ __type_params__ __firstlineno__ __static_attributes__ __annotate__ __annotate_func__ "
    "__annotations_cache__".split()
)
#: where transformers has classes of single models; other classes of it are known by what their namespaces hold
_MODELS = "transformers.models."
#: classes of PyTorch's that only hold others
_NEVER_CALLED = frozenset({nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict})
#: what modules hold of each other and of tensors, and their hooks
_HELD, _HOOKS = ("_parameters", "_buffers", "_modules"), ("_forward_hooks", "_forward_pre_hooks")
#: attributes that change and do not matter
_NOTES = compat.FORWARD_NOTES | {compat.GENERATION_DEFAULTS}
_OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _is_left_out(name: str) -> bool:
    return name in _BOOKKEEPING or name.startswith("_hf_fastpath") or name == compat.GENERATION_DEFAULTS


class Walk:
    """A walk through Python values.

    Args:
        are_brought: tensors on "meta" are placeholders, of which hooks put new ones in place at every call.
        host_numbers: plain tensors in host memory are known by their numbers, as steps on another device hold copies.

    Attributes:
        values: where a value is -> the value, frozen.
        modules: modules in the order in which they were met, those that only Python containers hold among them.
        tensors: id -> tensor, of parameters, buffers and plain tensors.
    """

    def __init__(self, are_brought: bool = False, host_numbers: bool = False):
        self.values: dict[str, Any] = {}
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.namespaces: list[Mapping[str, Any]] = []
        self.getters: list[tuple[Callable[[Any], tuple], Any, nn.Module | None]] = []
        self.dicts: list[dict] = []
        self.rows: list[Any] = []
        self.cells: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.many: list[Any] = []
        self.numbers: list[tuple[Callable[[], bytes], bytes]] = []
        self.readers: list[Callable[[], Iterable[Any]]] = []
        self._are_brought, self._host_numbers = are_brought, host_numbers
        self._places: dict[int, Any] = {}  # id of what was met -> where, and what number it has there
        self._counts: Counter[str] = Counter()
        self._of_modules: set[int] = set()  # ids of parameters and buffers
        self._kept: list[Any] = []  # an id is certain only while its object lives
        self._waiting: list[tuple[str, nn.Module]] = []

    # ---- where values are ---------------------------------------------------------------------------------------

    def enter(self, model: nn.Module) -> None:
        """Go through a model's modules, and through the classes that they are of."""
        for path, module in model.named_modules():
            self._meet(path, module)
        self._visit_modules()

    def classes(self) -> None:
        """Go through the classes of the modules that were met."""
        known = {*nn.Module.__mro__, compat.GenerationMixin}
        found = {base: None for module in self.modules for base in type(module).__mro__ if base not in known}
        for cls in found:
            space = vars(cls)
            self.namespaces.append(space)
            is_base = cls.__module__.startswith("transformers.") and not cls.__module__.startswith(_MODELS)
            for name, value in space.items():
                if name not in _OF_CLASSES:
                    where = f"{cls.__module__}.{cls.__qualname__}.{name}"
                    self.values[where] = ("is", id(value)) if is_base else self.frozen(value, where)
            self._visit_modules()

    def note(self, where: str, value: Any) -> None:
        """Freeze a value."""
        self.values[where] = self.frozen(value, where)
        if self._waiting:
            self._visit_modules()

    def names(self, where: str, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Freeze what names of a namespace stand for; a name that is gone is another value."""
        found = [name for name in names if name in space]
        for name in found:
            self.note(f"{where}.{name}", space[name])
        self._get(space, found)

    def identities(self, where: str, read: Callable[[], Iterable[Any]]) -> None:
        """Note objects that a function gives, which are known by their identity.

        Args:
            read: is called again and again.
        """
        found = list(read())
        self._kept.append(found)
        self.values[where] = list(map(id, found))
        self.readers.append(read)

    def configs(self) -> list[Any]:
        """Return the configurations that modules hold."""
        return list(
            {id(each): each for each in (vars(m).get("config") for m in self.modules) if each is not None}.values()
        )

    def _get(self, space: Mapping[str, Any], names: list[str], module: nn.Module | None = None) -> None:
        if names:
            self.getters.append((itemgetter(*names, names[0]), space, module))  # of one name it would be no tuple

    # ---- modules ------------------------------------------------------------------------------------------------

    def _meet(self, path: str, module: nn.Module) -> None:
        if id(module) not in self._places:
            self._places[id(module)] = path
            self.modules.append(module)
            self._waiting.append((path, module))

    def _visit_modules(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            for path, module in waiting:
                self._visit(path, module)

    def _visit(self, path: str, module: nn.Module) -> None:
        space = vars(module)
        held = [space[name] for name in ("_parameters", "_buffers")]
        tensors = [(name, self._of_module(tensor)) for each in held for name, tensor in each.items()]
        children = [(name, id(child)) for name, child in space["_modules"].items()]
        hooks = [self.frozen(hook) for hook in compat.hooks_with_effect(space)]
        self.values[path] = type(module), tensors, children, hooks
        sizes = _SIZES_ALONE.get(type(module), ())
        names = [name for name in space if not _is_left_out(name) and name not in sizes]
        for name in names:
            if name not in compat.FORWARD_NOTES and not compat.is_ours(getattr(space[name], "__func__", None)):
                self.values[f"{path}.{name}"] = self.frozen(space[name], f"{path}.{name}")
        self._get(space, [name for name in names if name not in compat.FORWARD_NOTES], module)
        for name, child in space["_modules"].items():
            if child is not None:
                self._meet(f"{path}.{name}" if path else name, child)

    # ---- values -------------------------------------------------------------------------------------------------

    def frozen(self, value: Any, where: str = "") -> Any:
        """Return what a value is, which stays as it is when the value is changed in place."""
        cls = type(value)
        if cls in _PLAIN:
            return cls, value
        if cls is float:
            return cls, repr(value)
        if isinstance(value, torch.Tensor):
            is_here = value.device.type == "cpu" and id(value) not in self._of_modules
            if self._host_numbers and is_here and value.nbytes <= _MOST_NUMBERS:
                return self._frozen_numbers(value, functools.partial(_bytes_of, value))
            return self._frozen_tensor(value)
        if isinstance(value, nn.Module):
            self._meet(f"{where} ({cls.__name__})", value)
            return "module", id(value)
        if isinstance(value, _LEAVES) or (
            cls.__module__.partition(".")[0] in _PACKAGES and not isinstance(value, (*_ROWS, dict))
        ):
            self._kept.append(value)
            return "is", id(value)
        if (place := self._places.get(id(value))) is not None:
            return "again", place
        self._places[id(value)] = where, self._counts[where]
        self._counts[where] += 1
        self._kept.append(value)
        return cls, self._contents(value, where)

    def _contents(self, value: Any, where: str) -> Any:
        if isinstance(value, types.MappingProxyType):
            self.namespaces.append(value)
            return [(name, self.frozen(each, where)) for name, each in value.items()]
        if isinstance(value, (*_ROWS, dict)) and len(value) > _MANY and _is_plain(value):
            copied = dict(value) if isinstance(value, dict) else list(value)
            self.many.append((value, copied))
            return copied
        if isinstance(value, dict):
            self.dicts.append(value)
            inside = [(self.frozen(name, where), self.frozen(each, where)) for name, each in value.items()]
            return inside, self._attributes(value, where)
        if isinstance(value, _ROWS):
            if not isinstance(value, (tuple, frozenset)):
                self.rows.append(value)
            inside = [self.frozen(each, where) for each in value]
            return inside, self._attributes(value, where)
        if isinstance(value, types.FunctionType):
            return self._frozen_function(value, where)
        if isinstance(value, types.MethodType):
            return self.frozen(value.__func__, where), self.frozen(value.__self__, where)
        if isinstance(value, functools.partial):
            return [self.frozen(each, where) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, np.ndarray):
            return self._frozen_numbers(value, value.tobytes)
        found = self._attributes(value, where)
        return ("is", id(value)) if found is None else found

    def _of_module(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        self._of_modules.add(id(tensor))
        return self._frozen_tensor(tensor)

    def _frozen_numbers(self, value: Any, read: Callable[[], bytes]) -> Any:
        self._kept.append(value)
        self.numbers.append((read, read()))
        return str(value.dtype), tuple(value.shape), self.numbers[-1][1]

    def _frozen_tensor(self, value: torch.Tensor) -> Any:
        if self._are_brought and value.is_meta:
            return "brought", value.dtype, tuple(value.shape)
        self.tensors[id(value)] = value
        local = compat.local_tensor(value)
        address = 0 if is_fake(local) else local.data_ptr()
        return ("tensor", id(value), address, local.dtype, local.device, local.stride(), *local.shape)

    def _frozen_function(self, function: types.FunctionType, where: str) -> Any:
        self.functions.append(function)
        code, defaults, named = _OF_FUNCTIONS(function)
        inside = []
        for cell in function.__closure__ or ():
            self.cells.append(cell)
            try:
                inside.append(self.frozen(cell.cell_contents, where))
            except ValueError:  # nothing is in it yet
                inside.append(None)
        self._kept.append(code)
        return id(code), self.frozen(defaults, where), self.frozen(named, where), inside

    def _attributes(self, value: Any, where: str) -> Any:
        """Return the frozen attributes of an object; None if it has none of its own."""
        space = getattr(value, "__dict__", None)
        slots = [name for base in type(value).__mro__ for name in _slots(base)]
        if not isinstance(space, dict) and not slots:
            return None
        found = []
        if isinstance(space, dict):
            self.dicts.append(space)
            found += [(name, self.frozen(each, where)) for name, each in space.items()]
        if slots:
            read = functools.partial(_read_slots, value, tuple(slots))
            self.readers.append(read)
            found += [(name, self.frozen(each, where)) for name, each in zip(slots, read())]
        return found


def _slots(cls: type) -> list[str]:
    names = vars(cls).get("__slots__", ())
    names = [names] if isinstance(names, str) else names
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _read_slots(value: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(value, name, None) for name in names]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_number(value: Any) -> bool:
    """Whether a value is a tensor of which ``==`` may come to a result without an error, or does more than compare."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.numel() <= 1 or type(value) not in (torch.Tensor, nn.Parameter)


def _more_than_sizes(module: nn.Module) -> bool:
    """Whether a module has attributes that its forward may read."""
    sizes = _SIZES_ALONE.get(type(module))
    return sizes is None or not vars(module).keys() <= sizes | _BOOKKEEPING


def _is_by_name(space: dict[str, Any]) -> bool:
    """Whether attributes of a module are looked at one by one: others change, or are tensors of one element."""
    return not _NOTES.isdisjoint(space) or any(map(_is_number, space.values()))


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _copied(container: Any) -> Any:
    """Return a shallow copy that ``==`` compares with the container."""
    for kind in (dict, list, set):
        if isinstance(container, kind):
            return kind(container)
    return container.copy()


def _is_plain(container: Any) -> bool:
    values = chain(container, container.values()) if isinstance(container, dict) else container
    return all(type(each) in _PLAIN or type(each) is float for each in values)


class Watch:
    """Whether what a walk has met is as it was: True is certain, False is not.

    Values are compared by ``==``, which looks at identities first and takes a tenth of the time that Python code would
    take. Of tensors that are not identical ``==`` raises an error, which is a change; where a tensor is or has one
    element, identities are compared.

    Args:
        walk: just made.
        facts: gives further values, which are compared.
        restless: ids of modules with attributes that change and do not matter.
    """

    def __init__(self, walk: Walk, facts: Callable[[], Any] = lambda: None, restless: Iterable[int] = ()):
        self._walk, self._more_facts = walk, facts
        spaces = list(map(vars, walk.modules))
        by_name = {*restless, *(id(each) for each, space in zip(walk.modules, spaces) if _is_by_name(space))}
        called = [place for place, each in enumerate(walk.modules) if type(each) not in _NEVER_CALLED]
        self._called = [walk.modules[place] for place in called]
        self._types = list(map(type, self._called))
        whole = [place for place in called if _more_than_sizes(walk.modules[place])]
        whole = [place for place in whole if id(walk.modules[place]) not in by_name]
        sized = [spaces[place] for place in sorted({*called}.difference(whole))]
        held = [space[name] for space in spaces for name in _HELD]
        held += [spaces[place][name] for place in called for name in _HOOKS]
        containers = [*held, *walk.dicts, *walk.rows]
        self._empty = [each for each in containers if not each]
        self._full = [*filter(None, containers), *(spaces[place] for place in whole)]
        self._before = list(map(_copied, self._full))
        self._ordered = [each for each in (*(space["_modules"] for space in spaces), *walk.dicts) if len(each) > 1]
        self._keys = list(chain.from_iterable(self._ordered))
        self._exact = [each for each in containers if any(map(_is_number, _values(each)))]
        self._sized = [*sized, *walk.namespaces]
        self._sizes = list(map(len, self._sized))
        named = (each for each in walk.getters if each[2] is None or id(each[2]) in by_name)
        self._getters = [(getter, space) for getter, space, _ in named]
        self._tensors = list(walk.tensors.values())
        self._is_local = all(map(_is_ordinary, self._tensors))
        self._elements_before = list(self._elements())
        self._facts = self._facts_now()

    def restless(self) -> Iterator[int]:
        """Yield the ids of modules with an attribute that is another object than before."""
        before = {id(full): each for full, each in zip(self._full, self._before)}
        for module in self._walk.modules:
            known, now = before.get(id(vars(module))), vars(module)
            if known is not None and any(now.get(name) is not each for name, each in known.items()):
                yield id(module)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if any(self._empty):
            return False
        try:
            return (
                all(map(is_, self._elements(), self._elements_before))  # first, as ``==`` of a DTensor asks other ranks
                and self._full == self._before
                and list(chain.from_iterable(self._ordered)) == self._keys
                and list(map(len, self._sized)) == self._sizes
                and list(map(type, self._called)) == self._types
                and all(now == before for now, before in self._walk.many)
                and all(read() == before for read, before in self._walk.numbers)
                and self._facts_now() == self._facts
            )
        except Exception:  # something is gone, or was replaced by what cannot be compared
            return False

    def _elements(self) -> Iterator[Any]:
        walk = self._walk
        return chain(
            chain.from_iterable([getter(space) for getter, space in self._getters]),
            chain.from_iterable(map(_values, self._exact)),
            chain.from_iterable([space.values() for space in walk.namespaces]),
            [cell.cell_contents for cell in walk.cells] if walk.cells else (),
            chain.from_iterable(map(_OF_FUNCTIONS, walk.functions)),
            chain.from_iterable([read() for read in walk.readers]),
        )

    def _facts_now(self) -> tuple:
        """Return where tensors are and of which type."""
        tensors = self._tensors if self._is_local else list(map(compat.local_tensor, self._tensors))
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        return addresses, list(map(torch.Tensor.stride, tensors)), [each.dtype for each in tensors], self._more_facts()


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return compat.local_tensor(tensor) is tensor
