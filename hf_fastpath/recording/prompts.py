"""Prompts of a recorded model: the step of any number of new tokens, recorded once for a number of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..cache.fastpath_cache import FastpathCache
from ..decode.lower import Lower
from ..decode.named_calls import Call
from ..decode.plan_cache import PlanCache
from ..decode.program import Program
from ..decode.source import PromptInputs, empty_states
from ..ops.gemv import MAX_ROWS
from . import marks
from .looked_at import LookedAt
from .lowering import Lowering
from .proof import prompts_agree
from .recording import Recording
from .whole_step import whole_prompt

#: what attention of a prompt does not add to its scores
_OTHER_SCORES = "bias", "row_biases", "encoded"


@dataclass(frozen=True)
class _Size:
    """A number that is made of the number of new tokens.

    Attributes:
        formula: of sympy.
        count: the symbol of the number of new tokens.
    """

    formula: Any
    count: Any

    def __call__(self, count: int) -> Any:
        return sympy_interp(PythonReferenceAnalysis, {self.count: count}, self.formula)


def _is_of_prompts(call: Call) -> bool:
    """Whether a call of a step has a counterpart in a prompt: all but some attention has."""
    given = call.arguments
    if call.op not in marks.OF_CACHES:
        return True
    return not isinstance(given["window"], marks.Chunk) and all(given.get(name) is None for name in _OTHER_SCORES)


class RecordedPrompts:
    """How prompts of a recorded model are read: which of them by a list of calls, and which.

    A recording takes as long as stock's modules take for many prompts. So the first prompt of a number of sequences is
    left to these modules.

    Args:
        part: the model.
        looked_at: the model's values, of which recordings are.
    """

    def __init__(self, part: Any, looked_at: LookedAt):
        self._part, self._looked_at = part, looked_at
        #: number of sequences, whether prompts begin their texts -> what is recorded and proven; None if nothing is
        self._known: dict[tuple[int, bool], Recording | None] = {}
        self._asked: set[int] = set()  # numbers of sequences of which there was a prompt

    def are_read(self, plans: PlanCache, batch: int, count: int, past: int) -> bool:
        """Return whether there is a list for ``count`` new tokens of each sequence behind ``past`` others.

        Args:
            plans: of the model.
        """
        if not self._may_be_read(batch * count, past + count):
            return False
        if count == 1:
            found = self._part.recording(batch, 1)
            return not self._has_states and found.served.serves(past) and all(map(_is_of_prompts, found.calls))
        if batch not in self._asked:
            self._asked.add(batch)
            return False
        recording = self._proven(batch, past)
        return recording is not None and recording.served is not None and recording.served.serves_prompt(past, count)

    @property
    def _has_states(self) -> bool:
        return any(kind.states for kind in self._part.kinds)

    def _may_be_read(self, rows: int, length: int) -> bool:
        """Whether a prompt of so many rows, which ends at ``length`` tokens, may be read by a list."""
        part = self._part
        if part.ranks is not None or part.is_placed or part.source is not part.module or len(part.devices) > 1:
            return False
        if part.has_encoder or part.token_shape or not all(kind.keys or kind.states for kind in part.kinds):
            return False
        if part.has_experts and rows > MAX_ROWS:
            return False
        return all(window is None or length <= window for window in part.windows)

    def _proven(self, batch: int, past: int) -> Recording | None:
        """Return the recording for prompts of so many sequences behind ``past`` tokens, or None: what serves any number
        of these, or else what begins texts."""
        ways = [False] if past else [True] if self._has_states else [False, True]
        for begins in ways:
            key = batch, begins
            if key not in self._known:
                self._known[key] = self._recorded(*key)
                if self._known[key] is not None and not self._is_proven(*key):
                    self._known[key] = None
            if self._known[key] is not None:
                return self._known[key]
        return None

    def _recorded(self, batch: int, begins: bool) -> Recording | None:
        """Return a recording of prompts; None if there is none that can be lowered."""
        try:
            found = whole_prompt(self._looked_at.skeleton_as_now, batch, begins)
        except Exception:  # nobody has tried this code: anything may be raised, and stock's modules read prompts, too
            return None
        return found if all(map(_is_of_prompts, found.calls)) else None

    def _is_proven(self, batch: int, begins: bool) -> bool:
        try:
            return prompts_agree(self._part, batch, begins)
        except Exception:  # as above
            return False

    def prepare(self, cache: FastpathCache, batch: int) -> None:
        """Make an empty cache ready for a prompt."""
        part, recording = self._part, self._part.recording(batch, 1)
        for index, (layer, kind) in enumerate(zip(part.layers, part.kinds)):
            if layer.attention is not None:
                cache.prepare(index, *empty_states(layer.attention, part.embedding.weight, batch))
            if kind.states:
                like = [
                    part.embedding.weight.new_empty(each.shape, dtype=each.dtype)
                    for each in map(recording.fact, recording.states[index])
                ]
                cache.layers[index].begin(dict(zip(recording.state_places[index], like, strict=True)))

    def record(self, program: Program, to: Lower, last: Lower, given: PromptInputs) -> Any:
        """Emit the calls of a prompt; return the register of the last token's logits."""
        part, key = self._part, (given.batch, given.begins)
        found = (
            part.recording(given.batch, 1) if given.is_single else self._known.get(key) or self._known[key[0], False]
        )
        assert found is not None, "are_read() has found it"
        held = {found.tokens.index: given.tokens, found.positions.index: given.positions}
        for registers, memory in zip(found.states, given.states):
            held |= {register.index: each for register, each in zip(registers, memory, strict=True)}
        size = lambda formula: given.size(_Size(formula, found.count))  # noqa: E731
        at = {device: given.at for device in part.devices}
        return Lowering(part, program, to, found, held, given.caches, at, last, size).run()
