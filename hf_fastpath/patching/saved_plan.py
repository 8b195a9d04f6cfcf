"""``save_plan()``: what ``patch()`` has found of a model, for later processes; and how ``patch(plan=)`` reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

from .. import logs
from ..known_code import read_note
from ..native.build_cache import replace
from ..recording.kept_recordings import ERRORS, Saved, facts_of, written
from .state import patched_model, state_of

#: the file of a plan, and its most bytes
_FILE, _MOST_BYTES = "hf_fastpath_plan.json", 1 << 28
_VERSION = 1


def save_plan(model: nn.Module, directory: str | os.PathLike) -> None:
    """Write the recorded steps of a patched model for ``patch(model, plan=directory)``, beside ``save_packed``'s files
    or anywhere else.

    The plan holds the steps that were recorded so far: call ``generate()`` twice before, so that the one of prompts is
    among these. Nothing of weights is in it, and nothing that is run: names of ops, of tensors and of modules, numbers,
    and hashes of the code, the versions and the model's values that the steps were recorded with. A model of a listed
    family needs no plan, as its steps are not recorded; its plan is empty.

    Args:
        model: a patched model.
        directory: where the file goes; it is made if it is not there.

    Raises:
        ValueError: the model is not patched, or holds what no other process could compare; the message says what.
        OSError: the file cannot be written.
    """
    whole = patched_model(model)
    state = state_of(whole)
    if state is None:
        raise ValueError(f"save_plan() got a {type(model).__name__} that is not patched: patch(model) first")
    family = None if state.decided is None else state.decided.recorded
    part = None if family is None else state.plans.part_of(whole)
    made = {} if part is None else part.recorded
    try:
        recordings = {} if part is None else {what: written(whole, part.code, each) for what, each in made.items()}
        data = {
            "version": _VERSION,
            "difference": 0.0 if family is None else family.twins_difference,
            "facts": facts_of(whole) if recordings else {},
            "recordings": recordings,
        }
    except ERRORS as error:
        raise ValueError(f"save_plan() cannot write the steps of {type(whole).__name__}: {error}") from error
    Path(directory).mkdir(parents=True, exist_ok=True)
    replace(Path(directory) / _FILE, json.dumps(data).encode(), 0o644)


def read_plan(directory: str | os.PathLike) -> Saved:
    """Return what :func:`save_plan` has written.

    Raises:
        ValueError: there is no such file, or another program has written it.
    """
    path = Path(directory) / _FILE
    try:
        data = json.loads(read_note(path, _MOST_BYTES))
        if data["version"] != _VERSION:
            raise ValueError(f"of version {data['version']}, expected {_VERSION}")
        return Saved(path, data)
    except ERRORS as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ValueError(f"plan is {os.fspath(directory)!r}, but {path} {what}; save_plan() writes it") from error


def tell(saved: Saved) -> None:
    """Warn if nothing of a plan was taken though there was something in it."""
    if saved.others and not saved.is_taken:
        folder = os.fspath(saved.path.parent)
        logs.warn(f"patch(plan={folder!r}): the steps were recorded anew; other than in the plan are: {saved.others}")
