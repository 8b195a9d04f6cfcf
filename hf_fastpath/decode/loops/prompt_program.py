"""A list of calls that reads prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...cache.fastpath_cache import FastpathCache
from ...cache.layer import FastpathLayer
from ...cache.states import StateLayer
from ...ops.kv_cache import KVCache
from ..calls.named_calls import Call, Register, Step, read_by
from ..lower.attend import Attention
from ..lower.positions import Positions
from ..lower.which_op import Lower
from ..placed.fetch import program_of
from ..plans.angles import has_angles
from ..sources.prompts import PromptInputs
from ..sources.step_source import StepSource

_aten = torch.ops.aten


@dataclass
class Prompt:
    """New tokens that follow what a cache holds.

    Attributes:
        tokens: int64 [batch, query_len].
        positions: int64 [batch or 1, query_len], their position ids.
        starts: int64 [batch], left padding of each row, or None for none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None

    def chunks(self, size: int | None) -> Iterator[Prompt]:
        """Yield the tokens in chunks of ``size``, or all at once."""
        size = size or max(1, self.tokens.shape[1])
        for tokens, positions in zip(self.tokens.split(size, dim=1), self.positions.split(size, dim=1)):
            yield Prompt(tokens, positions, self.starts)

    def of_batch(self, count: int) -> Prompt:
        """Return a prompt of ``count`` sequences without padding: those of this one, again and again."""
        rows = torch.arange(count, device=self.tokens.device) % len(self.tokens)
        return Prompt(self.tokens[rows], self.positions.expand(len(self.tokens), -1)[rows], None)


def keys_and_values(layer: Any) -> KVCache:
    """Return where a layer of a cache keeps keys and values; nowhere if it keeps states alone."""
    return layer.kv_cache() if isinstance(layer, FastpathLayer) else KVCache(None, None)


def states_of(layer: Any) -> list[torch.Tensor]:
    return layer.states if isinstance(layer, StateLayer) else []


def whole_memory(ring: torch.Tensor, length: int) -> torch.Tensor:
    """Return memory like that of a ring for ``length`` positions of each sequence."""
    return ring.new_empty(*ring.shape[:2], length, *ring.shape[3:])


def keep_newest(ring: torch.Tensor, whole: torch.Tensor) -> None:
    """Put the newest positions of a text, of which ``whole`` has all, into a ring."""
    FastpathLayer.store(ring, whole, 0)


def _itself(count: int) -> int:
    return count


def _registers(names: tuple[str, ...], register: Callable[[], Register]) -> KVCache:
    found: dict[str, Any] = {"k": None, "v": None}
    return KVCache(**found | {name: register() for name in names})


class PromptProgram:
    """The calls that run a model over a prompt, recorded without a prompt.

    Args:
        part: the model.
        form: see ``Prompts.form``.
        at_once: ops for a few rows take all tokens of the prompt.
        rows: tokens of all sequences; the number does not matter if it is more than kernels for a few rows take.
        batch: sequences.
        has_padding: whether rows begin with padding.
        caches: names of the buffers of each layer's cache.
        states: number of states of each layer.
        wrapped: layers whose windows end inside of the prompts: see :meth:`_keep_newest`.
    """

    def __init__(
        self,
        part: StepSource,
        form: Any,
        at_once: bool,
        rows: int,
        batch: int,
        has_padding: bool,
        caches: tuple[tuple[str, ...], ...],
        states: tuple[int, ...],
        wrapped: tuple[int, ...] = (),
    ):
        self.program = program_of(part, part.embedding.weight.device)
        emit = self.program.emit
        register = self.program.register
        self._tokens, self._positions, self._lengths, self._attention = (register() for _ in range(4))
        self._starts = register() if has_padding else None
        self._caches = [_registers(names, register) for names in caches]
        whole = {layer: _registers(caches[layer], register) for layer in wrapped}
        self._states = [[register() for _ in range(count)] for count in states]
        self._angles = {kind: (register(), register()) for kind in (part.rope_kinds if has_angles(part) else ())}
        self._sizes: dict[Callable[[int], Any], Register] = {}
        to = Lower(emit, rows, many=not at_once, attention=None if at_once else self._attention)
        at = Positions(self._angles, self._lengths, self._starts)
        memory = [whole.get(layer, cache) for layer, cache in enumerate(self._caches)], self._states
        given = PromptInputs(form, batch, self._tokens, self._positions, *memory, at, self._size)
        logits = part.prompts.record(self.program, to, Lower(emit, batch), given)
        emit(_aten.select.int, logits, 1, 0)
        for layer, cache in whole.items():
            self._keep_newest(self._caches[layer], cache)
        self.program.optimize(Step(rows), "prompt")

    def _keep_newest(self, ring: KVCache, whole: KVCache) -> None:
        """Give the calls of a layer memory for keys and values of all tokens, of which the newest then go to the ring
        of the cache. The memory is let go of behind the layer's last call."""
        calls = self.program.calls
        held = {getattr(whole, name).index: name for name in whole.names()}
        reading = [place for place, call in enumerate(calls) if any(each.index in held for each in read_by(call))]
        if not reading:
            return
        length = self._size(_itself)
        rings = [(getattr(ring, name), getattr(whole, name)) for name in whole.names()]
        made = [Call(whole_memory, {"ring": one, "length": length}, all_) for one, all_ in rings]
        kept = [Call(keep_newest, {"ring": one, "whole": all_}, self.program.register()) for one, all_ in rings]
        first, behind = reading[0], reading[-1] + 1
        calls[:] = [*calls[:first], *made, *calls[first:behind], *kept, *calls[behind:]]

    def _size(self, formula: Callable[[int], Any]) -> Register:
        """Return a register that holds what ``formula`` makes of the number of new tokens."""
        if formula not in self._sizes:
            self._sizes[formula] = self.program.register()
        return self._sizes[formula]

    @property
    def size_registers(self) -> set[int]:
        """The registers of numbers that are made of the number of new tokens."""
        return {register.index for register in self._sizes.values()}

    def run(
        self,
        prompt: Prompt,
        past: int,
        lengths: torch.Tensor,
        starts: torch.Tensor | None,
        cache: FastpathCache,
        angles: dict,
    ) -> torch.Tensor:
        """Append the prompt to a cache; return [batch, vocab_size] logits of the token that follows.

        Args:
            prompt: the tokens.
            past: tokens that a row of the cache holds before the prompt.
            lengths: int32 [batch], tokens that the cache holds with the prompt.
            starts: int32 [batch], left padding of each row, or None for none.
            cache: with room for the prompt.
            angles: see ``Positions``.
        """
        batch, query_len = prompt.tokens.shape
        attention = Attention(query_len, past + query_len, lengths, starts)
        given = self.given(prompt.tokens, prompt.positions.expand(batch, -1), lengths, attention)
        if self._starts is not None:
            given.append((self._starts, starts))
        given += self.of_memory(map(keys_and_values, cache.layers), angles)
        for registers, layer in zip(self._states, cache.layers):
            given += zip(registers, states_of(layer))
        return self.program.run_once(given)

    def given(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attention: Attention
    ) -> list[tuple[Any, Any]]:
        """Return pairs of a register and its value, for tokens and positions [batch, query_len] and what goes with
        these."""
        found = [(self._tokens, tokens), (self._positions, positions), (self._lengths, lengths)]
        sizes = [(register, formula(tokens.shape[1])) for formula, register in self._sizes.items()]
        return [*found, (self._attention, attention), *sizes]

    def of_memory(self, caches: Iterable[KVCache], angles: dict) -> list[tuple[Any, Any]]:
        """Do as :meth:`given` for keys and values of each layer and tables of angles."""
        found: list[tuple[Any, Any]] = list(zip(self._caches, caches))
        for kind in angles:
            found += zip(self._angles[kind], angles[kind])
        return found
