"""Loops of the user's own, which call a model's forward for every token: each new token is a step of a decode plan,
which waits between two forwards over the same cache."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import nn

from ...cache.fastpath_cache import FastpathCache
from ...cache.layer import FastpathLayer
from ...ops.decode_attention import MAX_QUERY_LEN
from ...options import MAX_BATCH
from ...reasons import Cause
from ..plans.decode_plan import DecodePlan
from ..plans.draft_plan import DraftReader, moves_windows
from ..sources.step_source import StepSource
from ..state.snapshot import Snapshot
from .eligibility import model_reason, torch_reason
from .forward_answers import count_on
from .generate_calls import settling
from .new_tokens import NewTokens
from .patched import Patched

#: plans of a model that wait for the next forward, each over a cache of its own
MAX_WAITING = 4
#: forwards in a row that found another model, from which on a plan is made only now and then
_FEW = 3
#: forwards of stock code between two looks at a model that changes all the time, at most
_MOST_LEFT_OUT = 64


class WaitingPlan(DecodePlan):
    """A decode plan that waits for the next forward over its cache, and does not keep the cache alive meanwhile.

    Args:
        part, batch, kv_dtype: as of :class:`..plans.decode_plan.DecodePlan`.

    Attributes:
        part: the model.
        snapshot: the model as it was when the plan began.
    """

    def __init__(self, part: StepSource, batch: int, kv_dtype: torch.dtype | None):
        super().__init__(part, batch, kv_dtype)
        self.part = part
        self.snapshot: Snapshot | None = None
        self._waits_for: weakref.ref[FastpathCache] | None = None
        self._noted: tuple | None = None  # the snapshot's fingerprint, which is another one once tensors have moved
        self._starts: list[int] | None = None
        self._is_told = False  # whether positions were given
        self._buffers: list[torch.Tensor] = []

    def begin_at(self, snapshot: Snapshot, new: NewTokens, positions: list[int], starts: list[int] | None) -> None:
        """Begin as :meth:`..plans.decode_plan.DecodePlan.begin` does, at positions that the host knows."""
        self.snapshot, self._starts, self._is_told = snapshot, starts, new.position_ids is not None
        self._noted = snapshot.fingerprint
        self.begin(new.cache, _on_host(positions), _on_host(starts))

    def bind(self) -> None:
        super().bind()
        self._buffers = _buffers_of(self.cache.key_layers)

    def is_of_now(self) -> bool:
        """Whether the model is as it was when the plan began."""
        snapshot = self.snapshot
        return snapshot is not None and snapshot.holds() and snapshot.fingerprint is self._noted

    def has_waited_for(self, cache: FastpathCache) -> bool:
        """Whether it has served ``cache`` last."""
        return self._waits_for is not None and self._waits_for() is cache

    @property
    def is_free(self) -> bool:
        """Whether there is no cache that the plan waits for."""
        return self._waits_for is None or self._waits_for() is None

    @property
    def can_wait(self) -> bool:
        """Whether nothing of what was written when the plan began can change between two forwards: values of the model
        are of its weights."""
        return not self._values

    def wait(self, on_loss: Any) -> None:
        """Let go of the cache until the next forward over it.

        Args:
            on_loss: called with the plan's reference to the cache once the cache is gone.
        """
        self._waits_for = weakref.ref(vars(self).pop("cache"), on_loss)

    def waits_by(self, reference: Any) -> bool:
        """Whether ``reference`` is the plan's reference to its cache."""
        return self._waits_for is reference

    def goes_on(self, new: NewTokens, positions: list[int], starts: list[int] | None) -> bool:
        """Take a cache up again if it is as the plan has left it, and the new tokens are the next ones."""
        cache = new.cache
        if self._is_told != (new.position_ids is not None):
            return False
        if starts != self._starts or positions != [self._held + ahead for ahead in self._ahead]:
            return False
        if (known := self.part.computed_positions) is not None and max(positions) >= known:
            return False
        keys, states = cache.key_layers, cache.state_layers
        if not all([layer.take() for layer in keys]) or any(layer.record_past for layer in states):
            return False
        counting: Sequence[Any] = keys or states
        if any(layer.cumulative_length != self._held for layer in counting):
            return False
        now = _buffers_of(keys)
        if len(now) != len(self._buffers) or any(one is not other for one, other in zip(now, self._buffers)):
            return False
        self.cache, self._waits_for = cache, None
        self._hold_states()
        self.program.renew()
        return True

    def end(self) -> None:
        """Let go of the cache, also of one that the plan waits for."""
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is not None and (cache := waits_for()) is not None:
            self.cache = cache
        self.snapshot, self._buffers = None, []
        super().end()


@overload
def _on_host(numbers: list[int]) -> torch.Tensor: ...
@overload
def _on_host(numbers: list[int] | None) -> torch.Tensor | None: ...
def _on_host(numbers: list[int] | None) -> torch.Tensor | None:
    return None if numbers is None else torch.tensor(numbers, device="cpu")


def _buffers_of(layers: Sequence[FastpathLayer]) -> list[torch.Tensor]:
    return [buffer for layer in layers for buffer in layer.buffers]


class OwnLoops:
    """The plans of one model that wait for the next forward of a loop of the user's own."""

    def __init__(self) -> None:
        self._plans: list[WaitingPlan] = []  # the last used one first
        self._changes = 0  # forwards in a row that found another model than the one before
        self._defaults: dict[bool, bool] = {}  # whether there is padding -> see forward_answers.count_on()
        self._defaults_of: Snapshot | None = None
        self._left_out = 0  # forwards that stock code runs before the model is looked at again
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Let go of all plans."""
        with self._lock:
            plans, self._plans = self._plans, []
        for plan in plans:
            plan.end()

    def let_go(self, cache: FastpathCache) -> None:
        """Let the plan go that waits for a cache, of which it holds buffers that another call may replace."""
        if (plan := self._taken(cache)) is not None:
            self._put_back(plan, ends=True)

    def logits(self, state: Patched, model: nn.Module, new: NewTokens) -> torch.Tensor | str | None:
        """Read new tokens, and append them to the cache: one of each sequence, or several of one.

        Returns:
            [batch, count, vocab_size] logits in memory of the caller's, or the reason why stock code has to read the
            tokens; None if there is nothing to say of it.
        """
        if self._left_out:
            self._left_out -= 1
            return None
        starts = new.starts()
        if isinstance(starts, Cause):
            return starts
        positions = new.positions()
        if isinstance(positions, Cause):
            return positions
        read = self._step if new.ids.shape[1] == 1 else self._read_several
        return read(state, model, new, positions, starts)

    def _step(
        self, state: Patched, model: nn.Module, new: NewTokens, positions: list[int], starts: list[int] | None
    ) -> torch.Tensor | str | None:
        plan, has_changed = self._taken(new.cache), False
        if plan is not None:
            has_changed = _has_changed(plan, model, new)
            if not has_changed and plan.goes_on(new, positions, starts):
                self._changes = 0
                plan.part.look_again()
                return self._run(plan, new, plan.part)
            self._put_back(plan, ends=True)
        with state.plans.place() as is_free:
            return self._first_step(state, model, new, positions, starts, has_changed) if is_free else "busy"

    def _first_step(
        self,
        state: Patched,
        model: nn.Module,
        new: NewTokens,
        positions: list[int],
        starts: list[int] | None,
        has_changed: bool,
    ) -> torch.Tensor | str | None:
        """Step by a plan that has not served the cache last, of the model as it is now."""
        part = state.plans.part_of(model)
        reason = self._reason(state, part, new, starts, positions)
        self._changes = self._changes + 1 if has_changed or reason is not None else 0
        if self._changes > _FEW:
            self._left_out = min(2 ** (self._changes - _FEW), _MOST_LEFT_OUT)
        if reason is not None or part is None:
            return reason
        if part.by_length.is_bounded(len(new.ids)) or any(new.cache.page_sizes) or part.host_weights:
            return self._step_once(state, part, new, positions, starts)
        plan = self._plan_for(state, part, new)
        plan.begin_at(state.plans.snapshot_of(part), new, positions, starts)
        return self._run(plan, new, part)

    def _step_once(
        self, state: Patched, part: StepSource, new: NewTokens, positions: list[int], starts: list[int] | None
    ) -> torch.Tensor | str:
        """Step by a plan that does not wait for the next forward."""
        plan = state.plans.decode_plan(part, len(new.ids), new.cache)
        try:
            with settling(new.cache, part):
                plan.begin(new.cache, _on_host(positions), _on_host(starts))
                return _logits(plan, new)
        finally:
            plan.end()

    def _read_several(
        self, state: Patched, model: nn.Module, new: NewTokens, positions: list[int], starts: list[int] | None
    ) -> torch.Tensor | str | None:
        """Read several new tokens of one sequence as drafts are read; return what :meth:`logits` returns."""
        (batch, count), cache = new.ids.shape, new.cache
        if batch > 1 or count > MAX_QUERY_LEN or cache.state_layers:
            return None
        part, past = state.plans.part_of(model), cache.get_seq_length()
        # to record a step of so many tokens is too much for a turn of a conversation
        if part is None or part.takes_long or moves_windows(part, past):
            return None
        if (reason := self._reason(state, part, new, starts, positions)) is not None:
            return reason
        learned = part.learned_positions
        if learned is not None and positions[0] + count > learned[0]:
            return Cause("position_ids", "positions that the model has not learned")
        plan_of = functools.partial(state.plans.draft_plan, part, cache)
        reader = DraftReader(plan_of, cache, _on_host(positions), _on_host(starts))
        try:
            with settling(cache, part):
                return reader.read_piece(new.ids[0].tolist())[None].clone(memory_format=torch.contiguous_format)
        finally:
            reader.end()

    def _run(self, plan: WaitingPlan, new: NewTokens, part: StepSource) -> torch.Tensor | str:
        is_done = False
        try:
            with settling(new.cache, part):
                found = _logits(plan, new)
            is_done = not isinstance(found, str) and plan.can_wait
            return found
        finally:
            if is_done:
                plan.wait(self._on_loss)
            self._put_back(plan, ends=not is_done)

    def _reason(
        self, state: Patched, part: StepSource | None, new: NewTokens, starts: list[int] | None, positions: list[int]
    ) -> str | None:
        """Return why a decode plan does not read new tokens of a model as it is now, or None."""
        batch = len(new.ids)
        if batch > (most := min(MAX_BATCH, state.options.max_batch_size)):
            return Cause("batch_size", f"{batch} sequences, {most} at most")
        if part is not None and (part.is_multimodal or part.has_encoder or part.token_shape or part.ranks is not None):
            return Cause("generation_mode", "forwards that are given more than tokens of a text")
        if (reason := model_reason(state, part, new.ids, new.cache)) is not None or part is None:
            return reason
        if starts is not None and new.mask is not None and (reason := part.padding_reason(new.mask)) is not None:
            return reason
        known = part.computed_positions
        if known is not None and max(positions) >= known:
            return Cause("position_ids", f"position {max(positions)}, the model's table has {known} positions")
        if new.position_ids is None and not self._count_on(state, part, starts is not None):
            return Cause("position_ids", "None, where the model's forward does not count on from the cache")
        if new.position_ids is not None and not part.takes_positions:
            return Cause("position_ids", "given to a forward that is recorded without")
        past = new.cache.get_seq_length()
        return part.by_length.reason(state.plans, batch, past, past + 1, None)

    def _count_on(self, state: Patched, part: StepSource, is_padded: bool) -> bool:
        """Whether tokens without position ids are behind all that the cache holds; asked once of a model as it is."""
        if (snapshot := state.plans.snapshot_of(part)) is not self._defaults_of:
            self._defaults, self._defaults_of = {}, snapshot
        if is_padded not in self._defaults:
            self._defaults[is_padded] = count_on(part, is_padded)
        return self._defaults[is_padded]

    # ---- plans that wait ------------------------------------------------------------------------------------------

    def _taken(self, cache: FastpathCache) -> WaitingPlan | None:
        """Take the plan that waits for a cache, or None."""
        with self._lock:
            found = next((plan for plan in self._plans if plan.has_waited_for(cache)), None)
            if found is not None:
                self._plans.remove(found)
        return found

    def _plan_for(self, state: Patched, part: StepSource, new: NewTokens) -> WaitingPlan:
        """Take or make a plan that is to begin; plans of the model as it was before are dropped."""
        fingerprint, key = state.plans.fingerprint_of(part), (len(new.ids), new.cache.stored_dtype)
        with self._lock:
            gone = [plan for plan in self._plans if plan.fingerprint != fingerprint]
            self._plans = [plan for plan in self._plans if plan.fingerprint == fingerprint]
            fitting = [plan for plan in self._plans if (plan.batch, plan.kv_dtype) == key]
            found = next((plan for plan in fitting if plan.is_free), None)
            if found is None and len(self._plans) >= MAX_WAITING:
                found = fitting[-1] if fitting else None
            if found is not None:
                self._plans.remove(found)
        for plan in gone:
            plan.end()
        if found is None:
            return WaitingPlan(part, *key)
        found.end()
        found.part = part
        return found

    def _put_back(self, plan: WaitingPlan, ends: bool) -> None:
        """Keep a plan for the next forward, in front of the others."""
        if ends:
            plan.end()
        with self._lock:
            self._plans, dropped = [plan, *self._plans][:MAX_WAITING], self._plans[MAX_WAITING - 1 :]
        for each in dropped:
            each.end()

    def _on_loss(self, reference: Any) -> None:
        """Let the plan go that has waited for a cache which is gone: its registers hold the cache's memory."""
        if not self._lock.acquire(blocking=False):
            return  # garbage is collected at any time: another thread must not have to wait for that
        try:
            for plan in self._plans:
                if plan.waits_by(reference):
                    plan.end()
        finally:
            self._lock.release()


def _has_changed(plan: WaitingPlan, model: nn.Module, new: NewTokens) -> bool:
    """Whether a model may have changed since a plan began."""
    if not plan.is_of_now() or torch_reason(model) is not None:
        return True
    return torch.is_autocast_enabled(new.ids.device.type)


def _logits(plan: Any, new: NewTokens) -> torch.Tensor | str:
    if not plan.has_positions():
        return Cause("position_ids", "positions that the model has not learned")
    logits = plan.step(new.ids[:, 0])
    return logits[:, None].clone(memory_format=torch.contiguous_format)
