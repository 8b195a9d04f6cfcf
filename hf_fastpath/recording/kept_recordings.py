"""Recordings that files hold, so that a later process need not make them.

``<cache folder>/recordings/<key>`` is a recording as data (:mod:`.recording_as_data`), or says why a model could not be
recorded. The key is a hash of all that is known before code runs, its facts: versions, the device, this package's code,
the code of the model's classes, and every Python value that the model holds (:class:`.named_walk.NamedWalk`). The file
says which modules' code ran besides, with a digest of each, and what the names stood for that this code reads. Where
any of it is another one, the step is recorded. A folder that ``save_plan()`` has written holds the same of all
recordings of one model, with its facts.
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
from ..known_code import code_of, read_note, surroundings, write_note
from ..native import build_cache
from ..native.toolchain import BuildError
from .errors import NotData, Unrecordable
from .noted_code import NotedCode, digests_of_names
from .recorded_step import Recording
from .recording_as_data import to_data
from .recording_from_data import from_data
from .skeleton import home

#: most bytes of a file
_MOST_BYTES = 1 << 26
#: names that a message has at most
_SHOWN = 4
#: characters of a key
_LETTERS = 32
#: what the values of a model are called among the facts
_VALUES = "values that the model holds"
#: modules whose errors say that a number was asked of a tensor without data
_OF_CODE = "torch._subclasses.", "torch.fx."
_logger = logging.getLogger("hf_fastpath")
#: True while recordings are made in any case
_are_made: ContextVar[bool] = ContextVar("recordings_are_made", default=False)
#: whatever is wrong with a file or the folder, a step can be recorded
ERRORS = (
    BuildError,
    NotData,
    Unnamed,
    OSError,
    ImportError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
)


@contextmanager
def made_anew() -> Iterator[None]:
    """Make recordings of models that are to be tried, in a ``with`` block, whatever files hold."""
    token = _are_made.set(True)
    try:
        yield
    finally:
        _are_made.reset(token)


class Saved:
    """A plan that ``save_plan()`` has written.

    Attributes:
        path: the file.
        facts: what was known of the model before code ran, by name.
        recordings: name of a recording -> what files of recordings hold.
        difference: what a small twin of the model showed, see :mod:`.proof`.
        is_taken: whether a recording of it was taken.
        others: what differs now; empty if nothing does, or nothing was looked up.
    """

    def __init__(self, path: Path, data: dict[str, Any]):
        self.path, self.facts, self.recordings = path, dict(data["facts"]), dict(data["recordings"])
        self.difference = float(data["difference"])
        self.is_taken, self.others = False, ""

    def find(self, what: str, facts: dict[str, str], model: nn.Module, code: NotedCode) -> Recording | None:
        """Return a recording, or None; :attr:`others` says why it is none of the model as it is."""
        if what not in self.recordings:
            return None
        try:
            if others := differing(self.facts, facts):
                raise NotData(others)
            made = _read(self.recordings[what], model, code)
        except ERRORS as error:
            self.others = self.others or str(error)
            return None
        self.is_taken = True
        return made


#: the plan that the ``patch()`` that runs was given
_given: ContextVar[Saved | None] = ContextVar("plan_of_patch", default=None)


@contextmanager
def taking_from(saved: Saved | None) -> Iterator[None]:
    """Let models that are looked at in a ``with`` block take recordings of a plan."""
    token = _given.set(saved)
    try:
        yield
    finally:
        _given.reset(token)


def of_patch() -> Saved | None:
    """Return the plan that the ``patch()`` that runs was given, or None."""
    return None if _are_made.get() else _given.get()


def made_or_kept(
    model: nn.Module,
    code: NotedCode,
    what: str,
    make: Callable[[], Recording],
    saved: Saved | None = None,
    is_wrong: bool = False,
) -> Recording:
    """Return a recording from a file, or make one and keep it in the cache folder.

    Args:
        model: whose step it is, as it is now.
        code: what has run of the model's code.
        what: the recording's name among those of the model.
        make: makes the recording, and notes in ``code`` what runs.
        saved: a plan that may have the recording.
        is_wrong: what is kept of the model is another one's, so that the recording is made and takes its place.

    Raises:
        Unrecordable: the model cannot be recorded.
    """
    if _are_made.get() or switches.text(DUMP):  # to be tried, or for their passes to be seen
        return make()
    path = None
    try:
        with compat.uncollected():  # a collection takes as long as all else
            facts = facts_of(model)
            if not is_wrong and saved is not None and (found := saved.find(what, facts, model, code)) is not None:
                return found
            key = hashlib.sha256(json.dumps([what, facts]).encode()).hexdigest()[:_LETTERS]
            path = build_cache.root() / build_cache.RECORDINGS / key
            if not is_wrong:
                found = _read(json.loads(read_note(path, _MOST_BYTES)), model, code)
                build_cache.used(path)
                return found
    except ERRORS as error:
        _tell(what, error)
        if saved is not None and what in saved.recordings:
            saved.others = saved.others or str(error)
    made: Recording | Unrecordable
    try:
        made = make()
    except Unrecordable as error:
        if type(error) is not Unrecordable or not _is_of_code(error.__cause__):
            raise
        made = error
    if path is not None:
        try:
            write_note(path, json.dumps(written(model, code, made)))
        except ERRORS as error:
            _tell(what, error)
    if isinstance(made, Unrecordable):
        raise made
    return made


def _is_of_code(cause: BaseException | None) -> bool:
    """Whether a model could not be recorded because of its code, rather than of the moment."""
    return cause is None or type(cause).__module__.startswith(_OF_CODE)


def _tell(what: str, error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):
        _logger.debug("%s: no file in the cache folder serves: %s", what, error)


def facts_of(model: nn.Module) -> dict[str, str]:
    """Return all that is known of a recording before code runs, by name.

    Raises:
        NotData, Unnamed: another process cannot tell whether its model is the same.
    """
    if (code := code_of(model)) is None:
        raise NotData("code of the model's classes or of this package may be another one in a later process")
    if (mode := compat.foreign_mode() or compat.replaced_function(model)) is not None:
        raise NotData(f"{mode} takes part")
    walk = NamedWalk(model)
    walk.enter(model)
    walk.classes()
    walk.functions_of(walk.configs())
    held = {_VALUES: walk.digest(), "the default dtype": str(torch.get_default_dtype())}
    return surroundings(home(model)) | code | held


def differing(one: dict[str, str], other: dict[str, str]) -> str:
    """Return the first few names for which two dicts hold other values."""
    found = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read(data: dict[str, Any], model: nn.Module, code: NotedCode) -> Recording:
    """Return the recording that :func:`written` was given.

    Raises:
        NotData: other code would run now, or it is no such data.
        Unrecordable: the model could not be recorded.
    """
    for name, (_, digest) in data["modules"].items():
        if digest != _digest_of(name):
            raise NotData(name)
    if others := differing(data["values"], digests_of_names(data["names"], model)):
        raise NotData(others)
    made = None if "reason" in data else from_data(data["recording"], model)
    code.take_over(data["names"], data["read"], [(name, file) for name, (file, _) in data["modules"].items()])
    if made is None:
        raise Unrecordable(str(data["reason"]))
    return made


def written(model: nn.Module, code: NotedCode, made: Recording | Unrecordable) -> dict[str, Any]:
    """Return a recording, or why there is none, and what it depends on beside the facts, as data.

    Raises:
        NotData, Unnamed: it is no data, or code has run that a later process may have otherwise.
    """
    modules: dict[str, Any] = {}
    for name, file in sorted(code.modules):
        if (file and not compat.is_file_of(name, file)) or (digest := _digest_of(name)) is None:
            raise NotData(f"code of {name} ran that is in no file, or in one that has changed")
        modules[name] = file, digest
    names = code.names()
    values = digests_of_names(names, model)
    if not code.holds():
        raise NotData("names stand for other values than when the code ran")
    data: dict[str, Any] = dict(modules=modules, names=names, values=values, read=code.read)
    if isinstance(made, Unrecordable):
        return data | {"reason": str(made)}
    return data | {"recording": to_data(made, model)}


def _digest_of(name: str) -> str | None:
    """Return a digest of a module's code; a module of transformers that was not imported yet is imported."""
    if name not in sys.modules and name.startswith("transformers."):
        __import__(name)
    found = compat.module_digest(name)
    return None if found is None else found.hex()
