"""A model as it is when its steps are recorded: a copy that runs without data, and the Python values that it holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.sources.step_source import StepSource
from ..decode.state.python_state import Walk
from ..decode.state.snapshot import walk_of
from .kept_recordings import made_or_kept, of_patch
from .noted_code import NotedCode
from .recorded_step import Recording
from .skeleton import Skeleton


class LookedAt:
    """A model whose steps are recorded, as it was when it was looked at.

    Args:
        module: the model.

    Attributes:
        code: what has run of the model's code.
        held: all Python values of the model, at the time of :meth:`look`; None before.
        adapters: the active adapters of its layers then.
        recordings: all that were made or found of the whole model, by their names.
        saved: the plan that ``patch()`` was given, or None.
        lock: of threads that make a recording, which share :attr:`code`; a plan asks for its recording more than once,
            and two of the same step have registers and memory of their own.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self.code = NotedCode()
        self.held: Walk | None = None
        self.adapters: dict[str, compat.ActiveAdapters] = {}
        self.recordings: dict[str, Recording] = {}
        self.saved = of_patch()
        self.lock = threading.RLock()
        self._skeleton: Skeleton | None = None
        self._is_new, self._is_whole = True, False
        self.have_served = self._are_wrong = False  # recordings that files hold

    def look(self, part: StepSource) -> None:
        """Note the Python values that the model holds now.

        Args:
            part: the model in its roles.
        """
        self.held, self._is_whole = walk_of(part), part.source is self._module
        self.adapters = compat.active_adapters(part.source)

    def age(self) -> None:
        """Note that time has gone by, in which attributes may have changed that no recorded code has read."""
        self._is_new = False

    @property
    def skeleton(self) -> Skeleton:
        """The newest copy of the model."""
        if self._skeleton is None:
            walk = self.held if self._is_new and self._is_whole else None
            self._skeleton = Skeleton(self._module, code=self.code, walk=walk)
        return self._skeleton

    @property
    def skeleton_as_now(self) -> Skeleton:
        """A copy of the model as it is, with which other code may run than before."""
        if not self._is_new:
            quantized = None if self._skeleton is None else self._skeleton.quantized
            if self._skeleton is None or not self._skeleton.is_as_model():
                self._skeleton = Skeleton(self._module, code=self.code, quantized=quantized)
            self._is_new = True
        return self.skeleton

    def recorded(self, make: Callable[..., Recording], *how: Any) -> Recording:
        """Return a recording of the model as it is; it is made if no file holds it.

        Args:
            make: makes it of a skeleton, and of ``how``, which are numbers.

        Raises:
            Unrecordable: the model cannot be recorded.
        """

        is_kept = True

        def made() -> Recording:
            nonlocal is_kept
            is_kept = False
            return make(self.skeleton_as_now, *how)

        with self.lock:
            if not self._is_whole:
                return made()
            what = f"{make.__name__} {how}"
            found = made_or_kept(self._module, self.code, what, made, self.saved, self._are_wrong)
            self.have_served |= is_kept
            self.recordings[what] = found
            return found

    def leave_files(self) -> bool:
        """Make recordings of which files hold another one's; return whether any has come out of a file until now."""
        with self.lock:
            have_served, self.have_served, self._are_wrong = self.have_served, False, True
            self.recordings.clear()
            return have_served

    def tried(
        self,
        known: dict[tuple[int, int], Recording | Exception],
        make: Callable[..., Recording],
        key: tuple[int, int],
        *how: Any,
    ) -> Recording | Exception:
        """Return what ``known`` has by a key: a recording, or the error that another try would raise again. It is made
        once, whichever threads ask."""
        with self.lock:
            if key not in known:
                try:
                    known[key] = self.recorded(make, *key, *how)
                except compat.OUT_OF_MEMORY:
                    raise
                except Exception as error:  # nobody has tried this code: anything may be raised
                    known[key] = error
            return known[key]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the model and the names of its code hold."""
        found = [] if self.held is None else list(self.held.tensors.values())
        return [*found, *self.code.tensors()]
