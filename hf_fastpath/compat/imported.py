"""What a module was imported from: a digest of its file, if that is still the code which this process runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import marshal
import os
import stat
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from .folders import OWN, folders_of, is_pythons

_IMPORTED_AT = time.time()
#: PyTorch, and packages in which it has the formulas of sizes
_TORCH = ("torch", "sympy", "mpmath")
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
    foreign = hashlib.sha256()
    for place, code in _functions(vars(module), name, set()):
        if code.co_filename == path:
            if code not in found.codes:  # it was imported from what the file was before
                return None
        elif is_elsewhere(code.co_filename):
            foreign.update(place.encode())
            foreign.update(marshal.dumps(code, 2))  # without marks of objects that are shared just now
    if not name.startswith("transformers."):  # whose values come from files of one version
        for place, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                other = getattr(value, "__file__", None) or ""
                held = _file_of(value.__name__, other) if other.endswith(".py") and is_elsewhere(other) else _NO_FILE
                if held is None:
                    return None
                foreign.update(place.encode() + held.digest)
            elif not place.startswith("__") and _is_plain(value):
                foreign.update(f"{place}={value!r}".encode(errors="surrogatepass"))
    return _Imported(found.digest, foreign.digest())


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


def _functions(space: Any, home: str, seen: set[int]) -> Iterator[tuple[str, types.CodeType]]:
    """Yield the code of functions in a namespace, of methods of its classes, and of what these wrap, by name."""
    for name, value in list(space.items()):
        if isinstance(value, type):
            if value.__module__ == home and id(value) not in seen:
                seen.add(id(value))
                yield from ((f"{name}.{inside}", code) for inside, code in _functions(vars(value), home, seen))
            continue
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for function in parts:
            wrapped: list[Any] = []
            while isinstance(function, types.FunctionType) and function not in wrapped:
                wrapped.append(function)
                yield name, function.__code__
                function = getattr(function, "__wrapped__", None)
