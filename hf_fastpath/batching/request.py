"""A request of a batch: its prompt and settings, what has come of it so far, and its result."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat import BaseStreamer
from ..decode.loops.call_scope import CallScope

#: tokens that generate() makes if nobody says how many
_DEFAULT_TOKENS = 20


@dataclass(frozen=True)
class Result:
    """What has come of a request.

    Attributes:
        id: of the request.
        prompt: its tokens, where they were given as such; else none.
        tokens: the new tokens; of a cancelled or failed request those that were streamed.
        finish_reason: ``"stop"`` (an end token, or a stopping criterion), ``"length"``, ``"cancelled"`` or ``"error"``.
        logprobs: of each new token, its log-probability by the model's own logits, in float32; None if not asked for.
        text: the tokens as text, if the batch has a tokenizer; else None.
        error: what the request has raised, or None.
        seconds: from the submission to the end.
        created_at, started_at, ended_at: ``time.perf_counter()`` when it was submitted, when a thread began with it,
            and when it ended.
    """

    id: str
    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    text: str | None = None
    error: BaseException | None = None
    created_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_at - self.created_at


class Tokens(BaseStreamer):
    """A streamer that hands new tokens to who reads a request; ``generate()`` gives it the prompt first."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.seen: list[int] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        for token in value.flatten().tolist():
            self.seen.append(token)
            self.waiting.put(token)

    def end(self) -> None:
        self.waiting.put(None)


@dataclass(eq=False)
class Request:
    """A prompt in a batch; :func:`.engine.Batch.submit` makes it.

    Attributes:
        id: given, or ``"0"``, ``"1"``, ...
    """

    id: str
    prompt: list[int]
    arguments: dict[str, Any]
    scope: CallScope
    new_tokens: int
    streamer: Tokens | None
    owner: Any
    adapter: str | None = None
    created_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    _result: Result | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what may follow."""
        ids = self.arguments.get("input_ids")
        return (0 if ids is None else ids.shape[1]) + self.new_tokens

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self._done.is_set()

    def check_tokens(self, count: int | None) -> None:
        """Refuse tokens that no embedding has: a GPU would stop all requests of the process.

        Args:
            count: of embeddings; None if it is not known.

        Raises:
            IndexError: the prompt has such tokens.
        """
        if count is not None and (wrong := [token for token in self.prompt if not 0 <= token < count]):
            raise IndexError(
                f"request {self.id} has token {wrong[0]}, and the model knows tokens from 0 to {count - 1}: "
                "make its tokens with the model's own tokenizer"
            )

    def cancel(self) -> None:
        """End the request, if it has not ended. Its result says ``"cancelled"``; no other request is touched."""
        self.owner.cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: the request has not ended in time.
            Exception: what the request has raised.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"request {self.id} has not ended in {timeout} s")
        assert self._result is not None, "it is set before"
        self.owner.forget(self)
        if self._result.error is not None:
            raise self._result.error
        return self._result

    async def wait(self) -> Result:
        """Do as :meth:`result` without blocking the event loop."""
        await self.owner.until(lambda: self.is_done)
        return self.result()

    def tokens(self) -> Iterator[int]:
        """Yield the new tokens as they come; the request was submitted with ``stream=True``.

        Raises:
            ValueError: it was not.
            Exception: what the request has raised.
        """
        if self.streamer is None:
            raise ValueError(f"tokens() of request {self.id}, which has no stream: submit it with stream=True")
        yield from iter(self.streamer.waiting.get, None)
        self.result()

    async def stream(self) -> Any:
        """Do as :meth:`tokens` without blocking the event loop."""
        if self.streamer is None:
            raise ValueError(f"stream() of request {self.id}, which has no stream: submit it with stream=True")
        read = self.streamer.waiting.get
        while (token := await asyncio.to_thread(read)) is not None:
            yield token
        self.result()

    def finish(self, result: Result) -> None:
        """Note the result, and wake who waits for it."""
        self._result = result
        self._done.set()
        if self.streamer is not None:
            self.streamer.end()  # also behind a failure, where generate() does not


def inputs_of(prompt: Any, device: torch.device, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of ``generate()`` that hold a prompt.

    Raises:
        ValueError: it is none.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a prompt is text, and the batch has no tokenizer: pass tokenizer=, or tokens")
        prompt = tokenizer(prompt, return_tensors="pt")
    if hasattr(prompt, "keys"):
        given = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in prompt.items()}
    else:
        ids = torch.as_tensor(prompt)
        given = {"input_ids": (ids[None] if ids.dim() == 1 else ids).to(device)}
    found = given.get("input_ids")
    if found is not None and (found.dim() != 2 or len(found) != 1 or found.is_floating_point()):
        what = f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"a prompt is {what}, expected whole numbers [seq_len] or [1, seq_len]: submit rows apart")
    return given


def most_new_tokens(given: dict[str, Any], config: Any) -> int:
    """Return how many tokens a request may get.

    Args:
        given: arguments of ``generate()``.
        config: the model's own configuration of generation, or None.
    """
    configs = [given.get("generation_config"), config]
    for name in ("max_new_tokens", "max_length"):
        for each in (given.get(name), *(getattr(config, name, None) for config in configs)):
            if each is not None:
                ids = given.get("input_ids")
                return max(0, each - (0 if name == "max_new_tokens" or ids is None else ids.shape[1]))
    return _DEFAULT_TOKENS


def is_end(token: int, given: dict[str, Any], config: Any) -> bool:
    """Whether a token ends the text of a request; arguments are those of :func:`most_new_tokens`."""
    ends = given.get("eos_token_id", getattr(given.get("generation_config") or config, "eos_token_id", None))
    known = ends if isinstance(ends, (list, tuple)) else [ends]
    return token in [int(each) for each in known if each is not None]
