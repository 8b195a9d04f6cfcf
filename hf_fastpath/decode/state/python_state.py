"""Python values that a forward may read, as they were at one time: attributes of modules and all that these hold.

A decode plan holds what a forward made of such values. :class:`Walk` goes through them and freezes each by value, but
tensors and modules by identity, as plans read these live. :class:`Watch` sees in a fraction of a millisecond whether
anything may have changed; only then is the walk made again, and the frozen values compared.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from ... import compat
from .hidden_values import behind, hides, is_reference, read_slots, slots_of, text_of

#: values that are what they are; a float is known by its text, which tells -0.0 from 0.0 and makes nan equal to nan
PLAIN = frozenset({type(None), bool, int, str, bytes, complex, type(...), slice, range})
ROWS = (list, tuple, set, frozenset, deque)
#: kinds of values that are known by their identity, whatever they hold
_LEAVES = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, property, classmethod, staticmethod),
    *(logging.Logger, functools.cached_property, torch.dtype, torch.device, compat.Tokenizer),
)
#: packages whose objects are known by their identity: bookkeeping of their own, which no forward computes with
_PACKAGES = frozenset(
    {"torch", "hf_fastpath", "accelerate", "tokenizers", "sentencepiece", "threading", "_thread", "weakref", "logging"}
)
#: containers of more plain values than these are compared as a whole
_MANY = 256
#: plain tensors of more bytes are known by their identity
_MOST_NUMBERS = 1 << 16
#: values inside of so many others are known by their identity
_DEEPEST = 100
#: attributes of every module of which all but one are bookkeeping, and a mark that transformers leaves
BOOKKEEPING = (frozenset(vars(nn.Module())) - {"training"}) | {compat.INITIALIZED}
#: entries of a class that no code reads while it computes
OF_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __abstractmethods__ _abc_impl __orig_bases__ "
    "__parameters__ __type_params__ __firstlineno__ __static_attributes__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __slotnames__".split()
)
#: where transformers has classes of single models; other classes of it are known by what their namespaces hold
_MODELS = "transformers.models."
OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def is_left_out(name: str) -> bool:
    """Whether an attribute of a module is bookkeeping."""
    return name in BOOKKEEPING or name.startswith("_hf_fastpath") or name == compat.GENERATION_DEFAULTS


class Walk:
    """A walk through Python values.

    Args:
        are_brought: tensors on "meta" are placeholders, of which hooks put new ones in place at every call.
        host_numbers: plain tensors in host memory are known by their numbers, as steps on another device hold copies.

    Attributes:
        values: where a value is -> the value, frozen.
        modules: modules in the order in which they were met, those that only Python containers hold among them.
        owners: objects with attributes, but for modules.
        tensors: id -> tensor, of parameters, buffers and plain tensors.
        num_entered: how many of ``values``, the first ones, are those of :meth:`enter`.
    """

    def __init__(self, are_brought: bool = False, host_numbers: bool = False):
        self.values: dict[str, Any] = {}
        self.num_entered = 0
        self.modules: list[nn.Module] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.namespaces: list[Mapping[str, Any]] = []
        self.owners: list[Any] = []
        self.named: list[tuple[list[str], Mapping[str, Any], nn.Module | None]] = []
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
        self._depth = 0
        self._classes: set[type] = set()  # that were met
        self._of_modules: set[int] = set()  # ids of parameters and buffers
        self._kept: list[Any] = []  # an id is certain only while its object lives
        self._waiting: list[tuple[str, nn.Module]] = []

    # ---- where values are ---------------------------------------------------------------------------------------

    def enter(self, model: nn.Module) -> None:
        """Go through a model's modules, and through the classes that they are of."""
        for path, module in model.named_modules():
            self._meet(path, module)
        self._visit_modules()
        self.num_entered = len(self.values)

    def entered_alike(self, other: Walk) -> bool:
        """Whether another walk has found the same values when it entered its model."""
        mine, its = (dict(islice(walk.values.items(), walk.num_entered)) for walk in (self, other))
        return mine == its

    def classes(self) -> None:
        """Go through the classes of the modules that were met."""
        known = {*nn.Module.__mro__, compat.GenerationMixin}
        found = {base: None for module in self.modules for base in type(module).__mro__ if base not in known}
        for cls in found:
            if cls not in self._classes:
                is_base = cls.__module__.startswith("transformers.") and not cls.__module__.startswith(_MODELS)
                self._freeze_class(cls, by_identity=is_base)
                self._visit_modules()

    def names_of_classes(self) -> set[str]:
        """Return where the values of the classes are that were met."""
        return {f"{cls.__module__}.{cls.__qualname__}" for cls in self._classes}

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

    def attributes(self, places: Iterable[str]) -> set[tuple[int, str]]:
        """Return which attributes are at ``places``, as ids of their modules and names."""
        modules = {self._places[id(module)]: id(module) for module in self.modules}
        found = (place.rpartition(".") for place in places)
        return {(modules[path], name) for path, _, name in found if path in modules}

    def _get(self, space: Mapping[str, Any], names: list[str], module: nn.Module | None = None) -> None:
        if names:
            self.named.append((names, space, module))

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
        own = vars(module)
        space = dict(own)  # another thread's call may take forwards out meanwhile
        held = [space[name] for name in ("_parameters", "_buffers")]
        tensors = [(name, self._of_module(tensor)) for each in held for name, tensor in each.items()]
        children = [(name, self._child(child)) for name, child in space["_modules"].items()]
        hooks = [self.frozen(hook) for hook in compat.hooks_with_effect(space)]
        self.values[f"{path} itself"] = type(module), tensors, children, hooks
        names = [name for name in space if not is_left_out(name)]
        for name in names:
            if name not in compat.FORWARD_NOTES and not _is_our_method(space[name]):
                self.values[f"{path}.{name}"] = self.frozen(space[name], f"{path}.{name}")
        self._get(own, [name for name in names if name not in compat.FORWARD_NOTES], module)
        for name, child in space["_modules"].items():
            if child is not None:
                self._meet(f"{path}.{name}" if path else name, child)

    # ---- values -------------------------------------------------------------------------------------------------

    def frozen(self, value: Any, where: str = "") -> Any:
        """Return what a value is, which stays as it is when the value is changed in place."""
        cls = type(value)
        if cls in PLAIN:
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
            return "module", self._child(value)
        if isinstance(value, type):
            self._meet_class(value)
        if is_reference(value):
            self._kept.append(value)
            self.readers.append(functools.partial(behind, value))
            return cls, [self.frozen(each, where) for each in behind(value)]
        if isinstance(value, _LEAVES) or (
            cls.__module__.partition(".")[0] in _PACKAGES and not isinstance(value, (*ROWS, dict))
        ):
            return self._identity(value)
        if (place := self._places.get(id(value))) is not None:
            return "again", place
        self._places[id(value)] = where, self._counts[where]
        self._counts[where] += 1
        self._kept.append(value)
        if self._depth == _DEEPEST:
            return self._identity(value)
        self._depth += 1
        try:
            return cls, self._contents(value, where)
        except Exception:  # of a property, or of ``__iter__``: anybody's class may raise
            return self._identity(value)
        finally:
            self._depth -= 1

    def _meet_class(self, cls: type) -> None:
        """Freeze what a class of the user's holds, and what classes that it inherits from hold."""
        for base in cls.__mro__:
            if base not in self._classes and _is_users(base.__module__):
                self._freeze_class(base)

    def _freeze_class(self, cls: type, by_identity: bool = False) -> None:
        self._classes.add(cls)
        self.namespaces.append(vars(cls))
        for name, value in list(vars(cls).items()):
            if name not in OF_CLASSES:
                where = f"{cls.__module__}.{cls.__qualname__}.{name}"
                self.values[where] = self._identity(value) if by_identity else self.frozen(value, where)

    def _contents(self, value: Any, where: str) -> Any:
        if not isinstance(value, types.FunctionType):
            self._meet_class(type(value))
        if isinstance(value, types.MappingProxyType):
            self.namespaces.append(value)
            return [(name, self.frozen(each, where)) for name, each in list(value.items())]
        if isinstance(value, (*ROWS, dict)) and len(value) > _MANY and _is_plain(value):
            copied = dict(value) if isinstance(value, dict) else list(value)
            self.many.append((value, copied))
            return copied
        if isinstance(value, dict):
            self.dicts.append(value)
            inside = [(self.frozen(name, where), self.frozen(each, where)) for name, each in items_of(value)]
            if isinstance(value, defaultdict):
                inside.append(("default_factory", self.frozen(value.default_factory, where)))
                self.readers.append(lambda: [value.default_factory])
            return inside, self._attributes(value, where)
        if isinstance(value, ROWS):
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
        if isinstance(value, (np.ndarray, array)):
            return self._frozen_numbers(value, value.tobytes)
        if isinstance(value, bytearray):
            return self._frozen_numbers(value, functools.partial(bytes, value))
        found = self._attributes(value, where)
        if found is None:
            return self._identity(value)
        hidden = self._identity(value) if (text := text_of(value)) is None and hides(value) else text
        return hidden, found

    # ---- what is known by its identity --------------------------------------------------------------------------

    def _identity(self, value: Any) -> Any:
        self._kept.append(value)
        return "is", id(value)

    def _child(self, module: nn.Module | None) -> Any:
        return id(module)

    def _code(self, code: types.CodeType) -> Any:
        self._kept.append(code)
        return id(code)

    def _of_module(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        self._of_modules.add(id(tensor))
        return self._frozen_tensor(tensor)

    def _frozen_numbers(self, value: Any, read: Callable[[], bytes]) -> Any:
        self._kept.append(value)
        self.numbers.append((read, read()))
        kind = getattr(value, "dtype", getattr(value, "typecode", type(value)))
        return str(kind), tuple(getattr(value, "shape", ())), self.numbers[-1][1]

    def _frozen_tensor(self, value: torch.Tensor) -> Any:
        if self._are_brought and value.is_meta:
            return "brought", value.dtype, tuple(value.shape)
        self.tensors[id(value)] = value
        if own := [name for name in list(vars(value)) if not is_left_out(name)]:
            self._get(vars(value), own)
            for name in own:
                self.values[f"{self._identity(value)}.{name}"] = self.frozen(vars(value)[name])
        local = compat.local_tensor(value)
        address = 0 if is_fake(local) else local.data_ptr()
        return ("tensor", id(value), address, local.dtype, local.device, local.stride(), *local.shape)

    def _frozen_function(self, function: types.FunctionType, where: str) -> Any:
        self.functions.append(function)
        code, defaults, named = OF_FUNCTIONS(function)
        inside = []
        for cell in function.__closure__ or ():
            try:
                inside.append(self.frozen(cell.cell_contents, where))
                self.cells.append(cell)
            except ValueError:  # nothing is in it yet
                inside.append(None)
        attributes: Any = ()
        if "/transformers/" not in code.co_filename and compat.is_elsewhere(code.co_filename):
            self.dicts.append(vars(function))
            attributes = [(name, self.frozen(each, where)) for name, each in list(vars(function).items())]
        return self._code(code), self.frozen(defaults, where), self.frozen(named, where), inside, attributes

    def _attributes(self, value: Any, where: str) -> Any:
        """Return the frozen attributes of an object; None if it has none of its own."""
        space = getattr(value, "__dict__", None)
        slots = [name for base in type(value).__mro__ for name in slots_of(base)]
        if not isinstance(space, dict) and not slots:
            return None
        found = []
        if isinstance(space, dict):
            self.dicts.append(space)
            self.owners.append(value)
            found += [(name, self.frozen(each, where)) for name, each in list(space.items())]
        if slots:
            read = functools.partial(read_slots, value, tuple(slots))
            self.readers.append(read)
            found += [(name, self.frozen(each, where)) for name, each in zip(slots, read())]
        return found


def _is_our_method(value: Any) -> bool:
    return isinstance(value, types.MethodType) and compat.is_ours(value.__func__)


@functools.cache
def _is_users(module: str) -> bool:
    """Whether a module is of no installed package."""
    if module.partition(".")[0] in sys.stdlib_module_names | {"hf_fastpath"}:
        return module == "__main__"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def items_of(container: dict) -> Iterable[tuple[Any, Any]]:
    """Return the items that a dict holds: a subclass may make another value each time that it is asked for one."""
    return OrderedDict.items(container) if isinstance(container, OrderedDict) else dict.items(container)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_plain(container: Any) -> bool:
    values = chain(container, container.values()) if isinstance(container, dict) else container
    return all(type(each) in PLAIN or type(each) is float for each in values)
