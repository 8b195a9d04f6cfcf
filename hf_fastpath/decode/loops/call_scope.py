"""What the thread of a call of ``generate()`` asks of our loop beside the call's arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


class Cancelled(Exception):
    """The request of a call has been cancelled."""


@dataclass(eq=False)
class CallScope:
    """What a call is asked for by who runs it in a thread of its own.

    Attributes:
        shares: the call shares steps from the beginning, also if no other call is under way.
        generator: draws the call's samples; None for the default one of the device.
        wants_logprobs: keep log-probabilities of the tokens, by the model's own logits.
        alone_turn: entered by a call that shares no steps, while it runs.
        logprobs: float32 [rows], of each new token.
        prefixes: asked when the prompt is read; gives what is known of prompts that begin alike
            (:class:`.prefixes.Prefixes`), or None. It does not matter with ``patch(prefix_cache=)``.
        is_cancelled: the call is to end with :class:`Cancelled`.
    """

    shares: bool = False
    generator: torch.Generator | None = None
    wants_logprobs: bool = False
    alone_turn: AbstractContextManager[Any] = field(default_factory=nullcontext)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    prefixes: Callable[[], Any] = lambda: None
    is_cancelled: bool = False


class _Here(threading.local):
    scope: CallScope | None = None


_here = _Here()


def scope_here() -> CallScope | None:
    """Return the scope of the call that this thread is in, or None."""
    return _here.scope


@contextmanager
def in_scope(scope: CallScope) -> Iterator[CallScope]:
    """Let calls of ``generate()`` of this thread have a scope, for the length of a ``with`` block."""
    before, _here.scope = _here.scope, scope
    try:
        yield scope
    finally:
        _here.scope = before


@contextmanager
def alone(draws_by_default: bool = False) -> Iterator[None]:
    """Run a call that shares no steps, for the length of a ``with`` block: such calls of one queue take turns.

    Args:
        draws_by_default: the call draws with the default generator, which is seeded for it.
    """
    scope = _here.scope
    if scope is None:
        yield
        return
    with scope.alone_turn:
        if scope.generator is None or not draws_by_default:
            yield
            return
        device = scope.generator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(scope.generator.initial_seed())
            yield
