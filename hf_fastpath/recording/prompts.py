"""Prompts of a recorded model: the step of any number of new tokens, recorded once for a number of sequences."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from .. import compat
from ..cache.fastpath_cache import FastpathCache
from ..decode.calls.named_calls import Call
from ..decode.lower.which_op import Lower
from ..decode.run.program import Program
from ..decode.sources.prompts import PromptInputs, empty_states
from ..ops.gemv import MAX_ROWS
from . import marks
from .arguments import why_padding_matters
from .looked_at import LookedAt
from .lowering import Lowering
from .proof import prompts_agree
from .recorded_step import Recording
from .row_lowering import RowLowering
from .text_lengths import Served
from .token_rows import ROWS, last_rows
from .whole_step import count_like, recorded_prompt, whole_prompt, whole_rows

#: which prompt of a number of sequences is the first that is recorded
FIRST_RECORDED = 2
#: recordings of a number of sequences, each of other numbers of new tokens
_MOST = 3
#: rows of a prompt at most that are read as sequences of one token: grids of some kernels have no more
_MOST_ROWS = 1 << 15
#: what attention of a prompt does not add to its scores
_OTHER_SCORES = "bias", "row_biases", "encoded"


@functools.lru_cache(maxsize=1024)
def _computed(size: _Size, count: int) -> Any:
    found = sympy_interp(PythonReferenceAnalysis, {size.count: count}, size.formula)
    if isinstance(found, sympy.Basic):
        return int(found) if found.is_Integer else float(found)
    return found


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
        return _computed(self, count)


#: the same few lengths are asked for again and again
_serves = functools.lru_cache(maxsize=1024)(Served.serves_prompt)


def _is_of_prompts(call: Call) -> bool:
    """Whether a call of a step has a counterpart in a prompt: all but some attention has."""
    given = call.arguments
    if call.op not in marks.OF_CACHES:
        return True
    return not isinstance(given["window"], marks.Chunk) and all(given.get(name) is None for name in _OTHER_SCORES)


class RecordedPrompts:
    """The recordings that prompts of a recorded model are read by.

    A recording takes as long as stock's modules take for many prompts, so that a single call would lose time by it. So
    these modules read the first prompt of a number of sequences, and the second one is recorded.

    Args:
        part: the model.
        looked_at: the model's values, of which recordings are.
    """

    any_batch = False  # a recording is of so many sequences

    def __init__(self, part: Any, looked_at: LookedAt):
        self._part, self._looked_at = part, looked_at
        #: number of sequences, whether prompts begin their texts -> what is recorded and proven
        self._known: dict[tuple[int, bool], list[Recording]] = {}
        self._declined: set[tuple[int, bool]] = set()  # of which a recording was tried, and came to nothing
        #: number of sequences, number of new tokens when recorded, whether prompts begin their texts -> whether padding
        #: matters to attention alone
        self._padded: dict[tuple[int, int, bool], bool] = {}
        self._rows: Any = None  # the step of many sequences that reads prompts as its rows, once it is recorded
        #: number of sequences, whether prompts begin their texts -> whether it gives what the model's own forward gives
        self._rows_agree: dict[tuple[int, bool], bool] = {}
        #: see count_like(), which goes through all tensors of the model
        self._count_like = functools.cache(lambda wanted: count_like(wanted, part.module))
        self._are_left = False
        self._asked: Counter[int] = Counter()  # number of sequences -> prompts of so many
        self._trials: dict[int, Recording] = {}  # a thread -> the recording that it compares with the model's own code

    def like(self, other: RecordedPrompts, change: Callable[[Recording], Recording]) -> RecordedPrompts:
        """Return what is known of prompts of a model that differs from another one in what ``change`` changes."""
        made = RecordedPrompts(self._part, self._looked_at)
        made._known = {key: [change(each) for each in found] for key, found in other._known.items()}
        made._rows = None if other._rows is None else change(other._rows)
        made._rows_agree, made._declined = dict(other._rows_agree), set(other._declined)
        made._padded, made._asked = dict(other._padded), Counter(other._asked)
        return made

    def leave(self) -> None:
        """Leave prompts to the model's modules from now on."""
        self._are_left = True

    def form(self, device: torch.device, shape: tuple[int, int], past: int, is_padded: bool) -> Recording | None:
        """Return the recording that reads a prompt, or None."""
        batch, count = shape
        if (trial := self._trials.get(threading.get_ident())) is not None:
            return trial
        if not self._may_be_read(batch * count, past, past + count):
            return None
        if count == 1 and not self._has_states:
            found = self._part.recording(batch, 1)
            is_alike = found.served.serves(past) and all(map(_is_of_prompts, found.calls))
            return found if is_alike else None
        self._asked[batch] += 1
        if self._are_left or self._asked[batch] < FIRST_RECORDED:
            return None
        for begins in self._ways(past):
            known = (each for each in self._known.get((batch, begins), []) if _serves(each.served, past, count))
            found = next(known, None) or self._proven(batch, begins, count)
            if found is not None and _serves(found.served, past, count):
                return found if not is_padded or self._hides_padding(found, begins) else None
        return None if is_padded else self._of_rows(batch, past, count)

    def _ways(self, past: int) -> list[bool]:
        """Return whether recordings of prompts begin their texts, in the order of trying."""
        if self._has_states:  # a forward of several tokens begins a text, and :meth:`_of_rows` goes on with one
            return [] if past or self._has_recurrence else [True]
        return [False] if past else [False, True]  # one behind any number of tokens is the best

    def _of_rows(self, batch: int, past: int, count: int) -> Recording | None:
        """Return the step of one token of each of many sequences if it reads a prompt, or None."""
        if batch * count > _MOST_ROWS:
            return None
        key = batch, not past
        if key not in self._rows_agree:
            self._rows_agree[key] = False  # until there is another result, as in _proven()
            try:
                self._rows_agree[key] = self._agree_by_rows(*key)
            except BaseException as error:
                if isinstance(error, compat.OUT_OF_MEMORY) or not isinstance(error, Exception):
                    del self._rows_agree[key]
                if not isinstance(error, Exception):
                    raise
        return self._rows if self._rows_agree.get(key) and _serves(self._rows.served, past, count) else None

    def _agree_by_rows(self, batch: int, begins: bool) -> bool:
        if not compat.is_all_known(self._part.module):  # other code may read long prompts by other rules than tokens
            return False
        with self._looked_at.lock:
            if self._rows is None:
                made = self._looked_at.recorded(whole_rows, self._count_like(0))
                if not all(map(_is_of_prompts, made.calls)):
                    return False
                last_rows(made)
                self._rows = made
        return self._agrees(self._rows, batch, begins)

    def _agrees(self, recording: Recording, batch: int, begins: bool) -> bool:
        """Whether a recording gives what the model's own forward gives; in this thread, prompts are read by it."""
        assert recording.served is not None, "a recorded step has them"
        self._trials[threading.get_ident()] = recording
        try:
            return prompts_agree(self._part, batch, begins, recording.served)
        finally:
            del self._trials[threading.get_ident()]

    def _hides_padding(self, recording: Recording, begins: bool) -> bool:
        """Whether nothing but attention is to see which tokens are padding."""
        key = recording.batch, int(recording.query_len), begins
        if key not in self._padded:
            skeleton = self._looked_at.skeleton_as_now
            try:
                without, with_mask = (recorded_prompt(skeleton, *key, with_mask=each) for each in (False, True))
                self._padded[key] = why_padding_matters(with_mask, without) is None
            except Exception:  # as in _proven()
                self._padded[key] = False
        return self._padded[key]

    @functools.cached_property
    def _has_recurrence(self) -> bool:
        """Whether a layer has a recurrent state, of which stock code makes hundreds of small calls a layer: a list of
        these takes long to record, and is as slow."""
        places = self._part.recording(1, 1).state_places if self._has_states else []
        return any(name == "recurrent_states" for layer in places for name, _ in layer)

    @property
    def _has_states(self) -> bool:
        return any(kind.states for kind in self._part.kinds)

    def _may_be_read(self, rows: int, past: int, length: int) -> bool:
        """Whether a prompt of so many rows, behind ``past`` tokens up to ``length``, may be read by a list."""
        part = self._part
        if part.ranks is not None or part.is_placed or part.source is not part.module or len(part.devices) > 1:
            return False
        if part.has_encoder or part.token_shape or not all(kind.keys or kind.states for kind in part.kinds):
            return False
        if part.gathers_experts and rows > MAX_ROWS:
            return False
        return not past or all(window is None or length <= window for window in part.windows)

    @compat.uncollected()
    def _proven(self, batch: int, begins: bool, count: int) -> Recording | None:
        """Return a further recording, and keep it; None if none was made that can be lowered and gives what the model's
        own forward gives."""
        key = batch, begins
        known = self._known.setdefault(key, [])
        if key in self._declined or len(known) == _MOST:
            return None
        self._declined.add(key)  # until there is another result; threads that come meanwhile leave prompts to modules
        try:
            tokens = self._count_like(count if known else 0)
            if tokens in [each.query_len for each in known]:
                self._declined.discard(key)
                return None
            made = self._looked_at.recorded(whole_prompt, batch, tokens, begins)
            if not all(map(_is_of_prompts, made.calls)):
                return None
            if made.served is None or not self._agrees(made, batch, begins):
                return None
        except compat.OUT_OF_MEMORY:  # there may be more next time
            self._declined.discard(key)
            return None
        except Exception:  # nobody has tried this code: anything may be raised, and stock's modules read prompts, too
            return None
        except BaseException:  # the user has broken it off
            self._declined.discard(key)
            raise
        known.append(made)
        self._declined.discard(key)
        return made

    def begin(self, form: Recording) -> None:
        """Make ready for a prompt what its recording makes of the model alone."""
        for value in form.values:
            value.fill(value.memory(self._part.embedding.weight.device))

    def prepare(self, cache: FastpathCache, batch: int) -> None:
        """Make an empty cache ready for a prompt."""
        part, recording = self._part, self._part.recording(batch, 1)
        weight = part.embedding.weight
        for index, (layer, kind) in enumerate(zip(part.layers, part.kinds)):
            if layer.attention is not None:
                cache.prepare(index, *empty_states(layer.attention, weight, batch))
            if kind.states:
                facts = map(recording.fact, recording.states[index])
                cache.layers[index].begin(dict(zip(recording.state_places[index], facts, strict=True)), weight.device)

    def record(self, program: Program, to: Lower, last: Lower, given: PromptInputs) -> Any:
        """Emit the calls of a prompt; return the register of the last token's logits."""
        part, found = self._part, given.form
        held = {found.tokens.index: given.tokens, found.positions.index: given.positions}
        for registers, memory in zip(found.states, given.states):
            held |= {register.index: each for register, each in zip(registers, memory, strict=True)}
        at = {device: given.at for device in part.devices}
        count = ROWS if found.rows_are_tokens else found.count
        walk = part, program, to, found, held, given.caches, at, last
        size = lambda formula: given.size(_Size(formula, count))  # noqa: E731
        if found.rows_are_tokens:
            return RowLowering(*walk, batch=given.batch, size=size).run()
        logits = Lowering(*walk, size).run()
        is_last = found.fact(found.logits).shape[1] == 1
        return logits if is_last else to.emit(torch.ops.aten.narrow.default, logits, 1, -1, 1)
