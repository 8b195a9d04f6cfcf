"""Which code ran while a step was recorded, and what the names that it reads stood for.

Guarded by value is what code of the model's and of transformers' finds under the names of its globals: numbers, flags,
containers, objects, functions with what they enclose, entries of classes and of other modules. PyTorch's own functions
are looked at as a whole (``compat.replaced_function``).
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.state.named_walk import NamedWalk
from ..decode.state.python_state import Walk
from ..decode.state.snapshot import differences
from ..decode.state.watch import Watch
from .errors import NotData
from .first_uses import FirstUses

#: packages whose names are not looked up in code that reads names of them
_LEFT_OUT = sys.stdlib_module_names | {"torch", "hf_fastpath"}
#: kinds of values of these packages that are noted all the same
_NUMBERS_AND_TEXTS = frozenset({bool, int, float, complex, str, bytes})
#: names by which code reads the environment
_OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
#: names by which code reads files
_FILES = frozenset({"open", "read_text", "read_bytes", "load", "load_file", "safe_open", "fromfile", "memmap"})
#: attributes of modules that PyTorch reads
_OF_TORCH = frozenset(dir(nn.Module)) | {"forward"}


class NotedCode:
    """The code that ran while steps of one model were recorded.

    Attributes:
        first_uses: notes what code may fill when it runs first; or None.
        values: where a name is -> what it stood for when the code was first seen, frozen.
        modules: names of the modules whose code ran, and the files with this code.
    """

    def __init__(self) -> None:
        self._seen: dict[int, types.CodeType] = {}
        self._noted: dict[int, set[str]] = {}  # id of a namespace -> names of it that are noted
        self._spaces: list[tuple[str, Mapping[str, Any], list[str]]] = []
        self._owners: list[type | str] = []  # the class, or the name of the module, of each namespace
        self.modules: set[tuple[str, str]] = set()
        self._read_before: set[str] = set()  # names that code has read in the process that made a recording
        self._walk = Walk()
        self._watch: Watch | None = None
        self._late: list[tuple[types.CodeType, Mapping[str, Any]]] = []  # code that had not imported all of its modules
        self.first_uses: FirstUses | None = None
        self._error: Exception | None = None

    @property
    def values(self) -> Mapping[str, Any]:
        return self._walk.values

    # ---- while code runs ----------------------------------------------------------------------------------------

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note which code runs in this thread, for the length of a ``with`` block."""
        with compat.hearing(self._hear):
            yield
        late, self._late = self._late, []
        for code, space in late:
            self._note_imports(code, space)
        if self._error is not None:
            raise self._error

    def _hear(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if id(code) in self._seen:
            return
        if compat.is_elsewhere(code.co_filename) and compat.is_logging(frame):
            return
        self._seen[id(code)] = code
        if (ran := compat.module_of(frame)) is None:
            return
        try:
            space = frame.f_globals
            self.modules.add(ran)
            if self.first_uses is not None:
                self.first_uses.note(space.get("__name__", code.co_filename), space, space)
            self._note_code(code, space)
            self._watch = None
        except Exception as error:  # an exception in here would end the noting
            self._error = error

    def _note(self, where: str, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note what ``names`` of a namespace stand for, and what they stand for in modules and classes among these."""
        for name in self._take(where, where, space, names):
            value = space[name]
            if isinstance(value, types.ModuleType):
                self._note_module(value, names)
            elif isinstance(value, type):
                self._note_class(value, names)
            elif isinstance(value, functools._lru_cache_wrapper):  # which may have run before, and will not again
                self._note_function(value.__wrapped__)

    def _note_function(self, function: Any) -> None:
        """Note what a function of the user's reads, as if it ran."""
        code = getattr(function, "__code__", None)
        if code is not None and id(code) not in self._seen and compat.is_users(code.co_filename):
            self._seen[id(code)] = code
            self._note_code(code, function.__globals__)

    def _note_code(self, code: types.CodeType, space: Mapping[str, Any]) -> None:
        """Note what the names that code reads stand for."""
        self._note(space.get("__name__", code.co_filename), space, code.co_names)
        self._note_imports(code, space)

    def _note_module(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Note what ``names`` of a module stand for; of PyTorch's and Python's, numbers and texts alone."""
        home, space = module.__name__.partition(".")[0], vars(module)
        if home not in _LEFT_OUT:
            self._note(module.__name__, space, names)
        elif home != "hf_fastpath" and sys.modules.get(module.__name__) is module:
            plain = (name for name in names if type(space.get(name)) in _NUMBERS_AND_TEXTS)
            self._take(module.__name__, module.__name__, space, plain)

    def _note_imports(self, code: types.CodeType, space: Mapping[str, Any]) -> None:
        """Note the names that code reads of modules which it imports itself, or looks up by their names, and of the
        environment."""
        imported = compat.modules_imported(code, space.get("__package__"))
        for name in imported & sys.modules.keys():
            self._note_module(sys.modules[name], code.co_names)
        if not imported <= sys.modules.keys():
            self._late.append((code, space))
        if "/transformers/" not in code.co_filename and not _OF_ENVIRONMENT.isdisjoint(code.co_names):
            self._take("os", "os", vars(os), ["environ"])

    def _take(self, where: str, owner: type | str, space: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """Freeze what ``names`` of a namespace stand for; return those that are new."""
        known = self._noted.setdefault(id(space), set())
        found = [name for name in names if name in space and name not in known]
        known.update(found)
        if found:
            self._spaces.append((where, space, found))
            self._owners.append(owner)
            self._walk.names(where, space, found)
            if self.first_uses is not None:
                self.first_uses.follow(self._walk)
        return found

    def _note_class(self, cls: type, names: Iterable[str]) -> None:
        """Note entries of a class that code may read by its name."""
        for base in cls.__mro__[:-1]:
            home = base.__module__.partition(".")[0]
            if home not in ("torch", "builtins", "hf_fastpath") and not issubclass(base, nn.Module):
                own = (name for name in names if not name.startswith("__"))
                self._take(f"{base.__module__}.{base.__qualname__}", base, vars(base), own)

    def asks_for_types(self) -> bool:
        """Whether code that is no package's may have asked whether something is an ``int``."""
        theirs = (code for code in list(self._seen.values()) if compat.is_elsewhere(code.co_filename))
        own = (code.co_names for code in theirs if "/transformers/" not in code.co_filename)
        return any("int" in names and not {"isinstance", "type", "issubclass"}.isdisjoint(names) for names in own)

    # ---- afterwards ---------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether all names stand for what they stood for."""
        if self._watch is None:
            if self.what_differs():
                return False
            self._watch = Watch(self._again())
        if self._watch.holds():
            return True
        self._watch = None
        return False

    def what_differs(self) -> list[str]:
        """Return the names that stand for other values than when their code was first seen."""
        return differences(self.values, self._again().values)

    def _again(self) -> Walk:
        walk = Walk()
        for where, space, names in self._spaces:
            walk.names(where, space, names)
        return walk

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors that names stand for, or what these hold."""
        return self._walk.tensors.values()

    def that_matter(self, places: list[str], modules: Iterable[nn.Module]) -> list[str]:
        """Return which of the attributes that differ may matter to a recorded step: not those that methods of the
        model's classes write and the recorded code does not read.

        Args:
            places: of attributes, each as the name of a module and of its attribute.
            modules: of the model.
        """
        if not places:
            return []
        read = self._names_read()
        classes = {base for module in modules for base in type(module).__mro__ if base not in nn.Module.__mro__}
        written = set().union(*map(compat.names_written, classes)) - read - _OF_TORCH
        return [place for place in places if place.rpartition(".")[2] not in written]

    def _names_read(self) -> set[str]:
        theirs = (code for code in list(self._seen.values()) if compat.is_elsewhere(code.co_filename))
        return self._read_before.union(*map(compat.names_read, theirs))

    # ---- what another process may know --------------------------------------------------------------------------

    def names(self) -> list[tuple[str, str, list[str]]]:
        """Return the names that code has read, with the module and the class that has them, "" for a module's own.

        Raises:
            NotData: a namespace is none that another process would find, or code may have read files.
        """
        found = []
        for code in list(self._seen.values()):
            if compat.is_users(code.co_filename) and (read := _FILES.intersection(code.co_names)):
                raise NotData(f"{code.co_name} in {code.co_filename} names {min(read)}, so that it may read files")
        for (_, space, names), owner in zip(self._spaces, self._owners, strict=True):
            place = (owner, "") if isinstance(owner, str) else (owner.__module__, owner.__qualname__)
            if _space_of(*place) is None or (isinstance(owner, str) and _space_of(*place) is not space):
                raise NotData(f"code ran in a namespace that is not {'.'.join(filter(None, place))}")
            found.append((*place, names))
        return found

    @property
    def read(self) -> list[str]:
        """All names that code reads, attributes among them."""
        return sorted(self._names_read())

    def take_over(self, names: Iterable[tuple[str, str, list[str]]], read: Iterable[str], modules: Iterable) -> None:
        """Know what another process has noted of the same code, as values are now.

        Args:
            names, read, modules: as :meth:`names`, :attr:`read` and :attr:`modules` gave them there.
        """
        for module, name, inside in names:
            owner = _owner_of(module, name)
            space = _space_of(module, name)
            assert owner is not None and space is not None, "the names were found before"
            self._take(f"{module}.{name}" if name else module, owner, space, inside)
        self._read_before |= set(read)
        self.modules |= set(map(tuple, modules))
        self._watch = None


def _owner_of(module: str, name: str) -> type | str | None:
    """Return a class, or the name of a module that was imported; None if there is none."""
    found = sys.modules.get(module)
    if found is None or not name:
        return None if found is None else module
    for each in name.split("."):
        found = getattr(found, each, None)
    return found if isinstance(found, type) else None


def _space_of(module: str, name: str) -> Mapping[str, Any] | None:
    owner = _owner_of(module, name)
    if owner is None:
        return None
    return vars(owner) if isinstance(owner, type) else vars(sys.modules[module])


def digests_of_names(names: Iterable[tuple[str, str, list[str]]], model: nn.Module) -> dict[str, str]:
    """Return where a name is -> a hash of what it stands for.

    Args:
        names: as :meth:`NotedCode.names` gives them.
        model: whose modules and tensors are known by their names.

    Raises:
        NotData: there is no such namespace, or another name in it.
        Unnamed: another process could not tell.
    """
    walk = NamedWalk(model)
    for module, name, inside in names:
        where, space = ".".join(filter(None, (module, name))), _space_of(module, name)
        absent = inside if space is None else [each for each in inside if each not in space]
        if space is None or absent:
            raise NotData(f"{where} has no {', '.join(absent)}")
        walk.names(where, space, (each for each in inside if (module, each) not in compat.REGISTRIES))
    return walk.digests()
