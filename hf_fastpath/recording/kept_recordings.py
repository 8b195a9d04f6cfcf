"""Recordings that files in the cache folder hold, so that a later process need not make them.

``<root>/recordings/<key>`` is a recording as data (:mod:`.recording_as_data`). The key is a hash of all that is known
before code runs: versions, the device, this package's code, the code of the model's classes, and every Python value
that the model holds (:class:`.named_walk.NamedWalk`). The file says which modules' code ran besides, with a digest of
each, and what the names stood for that this code reads. Where any of it is another one, the step is recorded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import compat, switches
from ..decode.calls.pass_dump import DUMP
from ..decode.state.named_walk import NamedWalk, Unnamed
from ..known_code import digest_of_classes, read_note, surroundings, write_note
from ..native import build_cache
from ..native.toolchain import BuildError
from .errors import NotData
from .noted_code import NotedCode, digest_of_names
from .recorded_step import Recording
from .recording_as_data import to_data
from .recording_from_data import from_data

#: most bytes of a file
_MOST_BYTES = 1 << 26
_logger = logging.getLogger("hf_fastpath")
#: characters of a key
_LETTERS = 32
#: True while recordings are made in any case
_are_made: ContextVar[bool] = ContextVar("recordings_are_made", default=False)
#: whatever is wrong with a file or the folder, a step can be recorded
_ERRORS = BuildError, NotData, Unnamed, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError


@contextmanager
def made_anew() -> Iterator[None]:
    """Make recordings of models that are to be tried, in a ``with`` block, whatever files hold."""
    token = _are_made.set(True)
    try:
        yield
    finally:
        _are_made.reset(token)


def made_or_kept(model: nn.Module, code: NotedCode, what: str, make: Callable[[], Recording]) -> Recording:
    """Return a recording from the cache folder, or make one and keep it there.

    Args:
        model: whose step it is, as it is now.
        code: what has run of the model's code.
        what: the recording's name among those of the model.
        make: makes the recording, and notes in ``code`` what runs.

    Raises:
        Unrecordable: the model cannot be recorded.
    """
    if _are_made.get() or switches.text(DUMP):  # to be tried, or for their passes to be seen
        return make()
    key = None
    try:
        with compat.uncollected():  # a collection takes as long as all else
            key = _key_of(model, what)
            return _find(key, model, code)
    except _ERRORS as error:
        _tell(what, error)
    made = make()
    if key is not None:
        try:
            _keep(key, model, code, made)
        except _ERRORS as error:
            _tell(what, error)
    return made


def _tell(what: str, error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        _logger.debug("%s: no file in the cache folder serves: %s", what, error)


def _key_of(model: nn.Module, what: str) -> str:
    """Return the key of a recording.

    Raises:
        NotData: another process cannot tell whether its model is the same.
    """
    if (of_code := digest_of_classes(model)) is None:
        raise NotData("code of the model's classes or of this package may be another one in a later process")
    if (mode := compat.foreign_mode() or compat.replaced_function(model)) is not None:
        raise NotData(f"{mode} takes part")
    walk = NamedWalk(model)
    walk.enter(model)
    walk.classes()
    walk.functions_of(walk.configs())
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    known = [what, walk.digest(), str(torch.get_default_dtype()), *surroundings(device)]
    return hashlib.sha256(json.dumps(known).encode() + of_code).hexdigest()[:_LETTERS]


def _path(key: str) -> Path:
    return build_cache.root() / build_cache.RECORDINGS / key


def _find(key: str, model: nn.Module, code: NotedCode) -> Recording:
    """Return the recording of a file.

    Raises:
        OSError: there is no file that may be read.
        NotData: other code would run now, or the file holds no recording.
    """
    data = json.loads(read_note(_path(key), _MOST_BYTES))
    for name, (_, digest) in data["modules"].items():
        if digest != _digest_of(name):
            raise NotData(f"{name} is another one")
    if data["values"] != digest_of_names(data["names"], model):
        raise NotData("names stand for other values")
    made = from_data(data["recording"], model)
    code.take_over(data["names"], data["read"], [(name, file) for name, (file, _) in data["modules"].items()])
    build_cache.used(_path(key))
    return made


def _keep(key: str, model: nn.Module, code: NotedCode, recording: Recording) -> None:
    """Write a recording to its file.

    Raises:
        NotData: it is no data, or code has run that a later process may have otherwise.
        OSError, BuildError: the folder cannot be written.
    """
    modules: dict[str, Any] = {}
    for name, file in sorted(code.modules):
        if (file and not compat.is_file_of(name, file)) or (digest := _digest_of(name)) is None:
            raise NotData(f"code of {name} ran that is in no file, or in one that has changed")
        modules[name] = file, digest
    names = code.names()
    values = digest_of_names(names, model)
    if not code.holds():
        raise NotData("names stand for other values than when the code ran")
    data = dict(modules=modules, names=names, values=values, read=code.read, recording=to_data(recording, model))
    write_note(_path(key), json.dumps(data))


def _digest_of(name: str) -> str | None:
    """Return a digest of a module's code; a module of transformers that was not imported yet is imported."""
    if name not in sys.modules and name.startswith("transformers."):
        __import__(name)
    found = compat.module_digest(name)
    return None if found is None else found.hex()
