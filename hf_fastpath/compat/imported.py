"""What a module was imported from: a digest of its file, if that is still the code which this process runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import marshal
import operator
import os
import stat
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from .folders import OWN, folders_of, is_pythons

_IMPORTED_AT = time.time()
#: PyTorch, and packages in which it has the formulas of sizes
_TORCH = ("torch", "sympy", "mpmath")
#: files of code in Python itself, and of methods that ``dataclasses`` writes
_WRITTEN = ("<frozen ", "<string>")
#: seconds by which clocks of files and of processes may differ
_MARGIN = 1.0


class _File(NamedTuple):
    """A file of Python code.

    Attributes:
        digest: of its content.
        codes: of all functions and classes in it.
    """

    digest: bytes
    codes: frozenset[types.CodeType] = frozenset()


_NO_FILE = _File(b"")


@functools.cache
def is_elsewhere(file: str) -> bool:
    """Whether a file is none of PyTorch's, Python's and this package's."""
    return not (file.startswith(("<frozen", *OWN, *_torch())) or is_pythons(file))


def is_users(file: str) -> bool:
    """Whether a file is of no installed package."""
    return is_elsewhere(file) and "site-packages" not in file and "dist-packages" not in file


@functools.cache
def _torch() -> tuple[str, ...]:
    return tuple(chain.from_iterable(map(folders_of, _TORCH)))


@functools.cache
def _packages() -> tuple[str, ...]:
    """Return the folders that hold transformers and PyTorch, in which other packages are installed as well."""
    found = (str(Path(each).parent) + os.sep for name in ("transformers", "torch") for each in folders_of(name))
    return tuple(dict.fromkeys(found))


def module_digest(name: str) -> bytes | None:
    """Return a digest of a module as this process has imported it: of its file, and of functions and plain values in it
    that come from elsewhere.

    Returns:
        None if the code cannot be known in another process: the module is ``__main__``, it has no file of Python code,
        or its file may be another one by now.
    """
    found = _imported(name)
    return None if found is None else hashlib.sha256(found.digest + found.foreign).digest()


def imported_file_digest(name: str) -> str | None:
    """Return a digest of the file that a module was imported from; None if the file may be another one by now."""
    found = _imported(name)
    return None if found is None else found.digest.hex()


class _Imported(NamedTuple):
    digest: bytes
    foreign: bytes


def _imported(name: str) -> _Imported | None:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if name == "__main__" or not isinstance(path, str) or (found := _file_of(name, path)) is None:
        return None
    if (known := _known.get(path)) is not None and known.is_of(module, found):
        return known.found
    known = _Known(module, found)
    foreign = hashlib.sha256()
    for place, code in _functions(vars(module), name, known):
        if code.co_filename == path:
            if code not in found.codes:  # it was imported from what the file was before
                return None
        elif is_elsewhere(code.co_filename):
            foreign.update(place.encode())
            foreign.update(marshal.dumps(code, 2))  # without marks of objects that are shared just now
    is_of_transformers = name.startswith("transformers.")  # whose values come from files of one version
    if not is_of_transformers:
        for place, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                other = getattr(value, "__file__", None) or ""
                held = _file_of(value.__name__, other) if other.endswith(".py") and is_elsewhere(other) else _NO_FILE
                if held is None:
                    return None
                foreign.update(place.encode() + held.digest)
            elif not place.startswith("__") and _is_plain(value):
                foreign.update(f"{place}={value!r}".encode(errors="surrogatepass"))
    known.found = _Imported(found.digest, foreign.digest())
    if is_of_transformers and known.is_of_packages():
        _known[path] = known
    return known.found


class _Known:
    """A module as it was when its functions were looked at, so that they need not be looked at again.

    Attributes:
        found: what the look gave.
    """

    def __init__(self, module: types.ModuleType, file: _File):
        self.module, self.file = module, file
        self.found: _Imported | None = None
        self._spaces: list[tuple[Mapping[str, Any], list[str], list[Any]]] = []
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []
        self._wrapped: list[Any] = []
        self._classes: set[int] = set()

    def enter(self, space: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the entries of a namespace, which are compared from now on."""
        items = list(space.items())
        self._spaces.append((space, [name for name, _ in items], [value for _, value in items]))
        return items

    def is_new(self, cls: type) -> bool:
        """Whether a class was not entered before."""
        is_new = id(cls) not in self._classes
        self._classes.add(id(cls))
        return is_new

    def add(self, function: types.FunctionType) -> Any:
        """Take in a function; return what it wraps, or None."""
        wrapped = getattr(function, "__wrapped__", None)
        self._functions.append(function)
        self._codes.append(function.__code__)
        self._wrapped.append(wrapped)
        return wrapped

    def is_of(self, module: Any, file: _File) -> bool:
        """Whether a module is this one and has the same entries, in its classes too, and the same code in each
        function."""
        return (
            module is self.module
            and file is self.file
            and all(list(space) == names for space, names, _ in self._spaces)
            and all(_are_same(space.values(), values) for space, _, values in self._spaces)
            and _are_same([each.__code__ for each in self._functions], self._codes)
            and _are_same([getattr(each, "__wrapped__", None) for each in self._functions], self._wrapped)
        )

    def is_of_packages(self) -> bool:
        """Whether all functions are those of installed packages: what a program has put in their place may hold a
        model, and is not held here."""
        files = {each.co_filename for each in self._codes}
        return all(each.startswith((*_packages(), *_WRITTEN)) or is_pythons(each) for each in files)


#: file of a module of transformers -> the module when it was last looked at
_known: dict[str, _Known] = {}


def _are_same(some: Iterable[Any], others: list[Any]) -> bool:
    found = list(some)
    return len(found) == len(others) and all(map(operator.is_, found, others))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or text, or a container of such; it may come from another file."""
    if isinstance(value, dict):
        return all(map(_is_plain, chain(value, value.values())))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def file_digest(name: str) -> bytes | None:
    """Return a digest of the file that a module was or will be imported from; None if there is none."""
    try:
        path = importlib.util.find_spec(name).origin
        return _read(path)[0]
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return None


def unchanged_digest(path: str) -> bytes | None:
    """Return a digest of a file; None if it is no longer what it was when this process began."""
    try:
        content, changed = _read(path)
    except OSError:
        return None
    return None if changed > _started() - _MARGIN else content


def is_file_of(name: str, file: str) -> bool:
    """Whether a module was imported from a file."""
    return getattr(sys.modules.get(name), "__file__", None) == file


@functools.cache
def _file_of(name: str, path: str) -> _File | None:
    try:
        content = unchanged_digest(path)
        loader = sys.modules[name].__spec__.loader
        return None if content is None else _File(content, frozenset(_codes_in(loader.get_code(name))))
    except (AttributeError, ImportError, KeyError, SyntaxError, ValueError):
        return None


def _read(path: str) -> tuple[bytes, float]:
    """Return a digest of a plain file, and when it was last changed, renamed or replaced."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no plain file")
        with open(handle, "rb", closefd=False) as file:
            return hashlib.sha256(file.read()).digest(), found.st_ctime
    finally:
        os.close(handle)


@functools.cache
def _started() -> float:
    """Return a time at which this process, or the one that it was forked from, had imported nothing yet."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        if ticks > 0:
            age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
            return min(_IMPORTED_AT, time.time() - age)
    return _IMPORTED_AT


def _codes_in(code: types.CodeType | None) -> Iterator[types.CodeType]:
    if code is not None:
        yield code
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                yield from _codes_in(each)


def functions_of(value: Any) -> tuple[Any, ...]:
    """Return the functions of an entry of a namespace: those of a property, the one that a method is around, or the
    entry itself. No attribute of anything else is asked for: a module that is imported when it is needed would be."""
    if isinstance(value, property):
        return value.fget, value.fset
    return (value.__func__ if isinstance(value, (classmethod, staticmethod, types.MethodType)) else value,)


def _functions(space: Mapping[str, Any], home: str, known: _Known) -> Iterator[tuple[str, types.CodeType]]:
    """Yield the code of functions in a namespace, of methods of its classes, and of what these wrap, by name; ``known``
    takes in all of them."""
    for name, value in known.enter(space):
        if isinstance(value, type):
            if value.__module__ == home and known.is_new(value):
                yield from ((f"{name}.{inside}", code) for inside, code in _functions(vars(value), home, known))
            continue
        for function in functions_of(value):
            wrapped: list[Any] = []
            while isinstance(function, types.FunctionType) and function not in wrapped:
                wrapped.append(function)
                yield name, function.__code__
                function = known.add(function)
