"""Small twins that decode as stock does: this process remembers them, and files in the cache folder tell others.

``<root>/heard/<key>`` has the names of the modules whose code ran when a twin with this key was tried, where the key is
a hash of all that is known before. ``<root>/twins/<hash>`` has the twin's difference, a number; this hash is one of the
key and of the code of these modules, so that the note is not found once any of them is another one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import marshal
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from .. import compat
from ..known_code import classes_of, is_lasting, modules_of, own_code, read_note, surroundings, write_note
from ..native import build_cache
from ..native.toolchain import BuildError
from ..recording import proof
from ..recording.kept_recordings import made_anew

#: most bytes of a note
_MOST_BYTES = 1 << 17
_NAME = re.compile(r"\+?\w+(\.\w+)*")
#: marks the name of a module that a twin's run has imported
_LATE = "+"
_known: dict[str, float] = {}


class _Heard(threading.local):
    """What was heard in this thread when a twin was last tried.

    Attributes:
        modules: names of modules, and files with their code that ran; None if nothing could be heard.
        before: the modules that were imported before.
    """

    modules: set[tuple[str, str]] | None = set()
    before: frozenset[str] | None = None


_heard = _Heard()


def find(key: str) -> float | None:
    """Return the difference that a twin with this key showed, here or in another process; None if none has passed."""
    if key not in _known:
        with suppress(OSError, BuildError, ValueError):  # no such file, or none that may be trusted or read
            names = read_note(_heard_file(key), _MOST_BYTES).split()
            if (path := _file(key, names)) is not None:
                found = float(read_note(path, _MOST_BYTES))
                if 0 <= found <= proof.MOST:
                    _known[key] = found
                    build_cache.used(path)
                    build_cache.used(_heard_file(key))
    return _known.get(key)


def keep(key: str, difference: float, twin: nn.Module) -> None:
    """Note that a twin has passed; for this process alone if the cache cannot be written, or if a part of the code that
    ran is in no file, or in one that changes under its name, so that a later process may have other code."""
    _known[key] = difference
    heard, before = _heard.modules, _heard.before or frozenset(sys.modules)
    forget()
    modules = {each.__module__ for each in classes_of(twin)} | {name for name, _ in heard or ()}
    if heard is None or not is_lasting() or any(compat.module_digest(name) is None for name in modules):
        return
    if any(file and not compat.is_file_of(name, file) for name, file in heard):
        return
    names = sorted((name if name in before else _LATE + name) for name in modules)
    with suppress(OSError, BuildError):
        if (path := _file(key, names)) is not None:
            for note, content in ((_heard_file(key), "\n".join(names)), (path, repr(difference))):
                write_note(note, content)


def forget() -> None:
    """Forget what was heard when a twin was last tried."""
    _heard.modules, _heard.before = set(), None


@contextmanager
def hearing() -> Iterator[None]:
    """Note which modules' code runs in this thread in a ``with`` block, or in the function so decorated, which tries a
    twin."""
    _heard.modules, _heard.before = None, frozenset(sys.modules)
    if sys.getprofile() is not None:  # a profiler of the user's, which would hear nothing meanwhile
        with made_anew():
            yield
        return
    codes: dict[int, types.CodeType] = {}
    found: set[tuple[str, str]] = set()

    def hear(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and id(frame.f_code) not in codes and not compat.is_logging(frame):
            codes[id(frame.f_code)] = frame.f_code
            if (ran := compat.module_of(frame)) is not None:
                found.add(ran)

    try:
        with made_anew(), compat.hearing(hear):
            yield
    finally:
        _heard.modules = found


def key_of(twin: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return a hash of a twin's config and sizes, of the code of its classes, of this package and of transformers'
    loops and caches, of the kernels, of versions, of the passes that are switched off, and of the device and the dtype
    that the twin is tried on."""
    config = {name: value for name, value in twin.config.to_dict().items() if name != "_name_or_path"}
    sizes = {name: list(each.shape) for name, each in twin.named_parameters()}
    chosen = [getattr(twin.config, f"_{seam}_implementation", None) for seam in ("attn", "experts")]
    known = [config, sizes, chosen, str(dtype), surroundings(device)]
    digest = hashlib.sha256(json.dumps(known, default=str).encode())
    digest.update(own_code() or b"")
    for name in modules_of(twin):
        digest.update(name.encode())
        digest.update(compat.module_digest(name) or b"")
    for each in classes_of(twin):
        digest.update(f"{each.__module__}.{each.__qualname__}".encode())
        forward = inspect.unwrap(each.forward)
        if hasattr(forward, "__code__"):  # it may have been put into the class since
            digest.update(marshal.dumps(forward.__code__, 2))  # without marks of objects that are shared just now
    return digest.hexdigest()[:32]


def _heard_file(key: str) -> Path:
    return build_cache.root() / build_cache.HEARD / key


def _file(key: str, names: list[str]) -> Path | None:
    """Return the note of a twin with this key and code of the modules with these names; None if the code of one is not
    known."""
    digest = hashlib.sha256(key.encode())
    for name in names:
        if _NAME.fullmatch(name) is None:
            return None
        is_late = name.startswith(_LATE)
        found = compat.file_digest(name[1:]) if is_late else compat.module_digest(name)
        if found is None:
            return None
        digest.update(name.encode())
        digest.update(found)
    return build_cache.root() / build_cache.TWINS / digest.hexdigest()[:32]
