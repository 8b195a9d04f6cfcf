"""Prompts of a recorded model: the step of any number of new tokens, recorded once for a number of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..decode.lower import Lower
from ..decode.named_calls import Call
from ..decode.plan_cache import PlanCache
from ..decode.program import Program
from ..decode.source import PromptInputs
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
        self._known: dict[int, Recording | None] = {}  # number of sequences -> what is recorded and proven
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
            return found.served.serves(past) and all(map(_is_of_prompts, found.calls))
        if batch not in self._asked:
            self._asked.add(batch)
            return False
        if batch not in self._known:
            self._known[batch] = self._recorded(batch)
            if self._known[batch] is not None and not self._is_proven(batch):
                self._known[batch] = None
        found = self._known[batch]
        return found is not None and found.served is not None and found.served.serves_prompt(past, count)

    def _may_be_read(self, rows: int, length: int) -> bool:
        """Whether a prompt of so many rows, which ends at ``length`` tokens, may be read by a list."""
        part = self._part
        if part.ranks is not None or part.is_placed or part.source is not part.module or len(part.devices) > 1:
            return False
        if part.has_encoder or part.token_shape or any(kind.states or not kind.keys for kind in part.kinds):
            return False
        if part.has_experts and rows > MAX_ROWS:
            return False
        return all(window is None or length <= window for window in part.windows)

    def _recorded(self, batch: int) -> Recording | None:
        """Return the recording of prompts of so many sequences; None if there is none that can be lowered."""
        try:
            found = whole_prompt(self._looked_at.skeleton_as_now, batch)
        except Exception:  # nobody has tried this code: anything may be raised, and stock's modules read prompts, too
            return None
        return found if all(map(_is_of_prompts, found.calls)) else None

    def _is_proven(self, batch: int) -> bool:
        try:
            return prompts_agree(self._part, batch)
        except Exception:  # as above
            return False

    def record(self, program: Program, to: Lower, last: Lower, given: PromptInputs) -> Any:
        """Emit the calls of a prompt; return the register of the last token's logits."""
        part = self._part
        found = part.recording(given.batch, 1) if given.is_single else self._known[given.batch]
        assert found is not None, "are_read() has found it"
        held = {found.tokens.index: given.tokens, found.positions.index: given.positions}
        size = lambda formula: given.size(_Size(formula, found.count))  # noqa: E731
        at = {device: given.at for device in part.devices}
        return Lowering(part, program, to, found, held, given.caches, at, last, size).run()
