"""batch(model): requests that come and end one by one, in steps that they share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.loops.call_scope import CallScope, Cancelled, in_scope
from ..decode.loops.patched import STATE_KEY
from ..decode.loops.shared_calls import why_model_not_shared
from ..options import MAX_BATCH, bytes_or_share
from .adapters import AdapterTurns
from .beginnings import Beginnings
from .logprobs import logprobs
from .request import Request, Result, Tokens, inputs_of, is_end, most_new_tokens
from .room import BESIDE
from .slots import capacity_for, text_bytes

#: bytes in which beginnings are kept that prompts have in common
_KEPT_BYTES = 256 << 20


def batch(
    model: nn.Module,
    prompts: Iterable[Any] | None = None,
    *,
    slots: int | None = None,
    max_memory: int | float | str | None = None,
    tokenizer: Any = None,
    **defaults: Any,
) -> Batch:
    """Generate for many prompts at once, which may come while others run.

    A request is a call of ``model.generate()`` with the same arguments, and has the same tokens: greedy ones in float32
    exactly, samples by their own ``seed``. Requests share the model's steps, and a free place goes to the next request.

    Args:
        model: a patched model, or a wrapper of one.
        prompts: prompts to submit, which are taken from the iterable when there is room; None to submit them by
            :meth:`Batch.submit`.
        slots: requests that run at once, at most; None for ``patch(max_batch_size=)``.
        max_memory: bytes of keys and values, such as ``"2GB"``, that requests take at most, or a share of the memory
            that is free on the device now, such as ``"50%"`` or 0.5; None for no limit beside ``slots``. Where texts
            grow beyond it, the youngest request gives up its slot, and reads its text again later; a request whose own
            text is too long fails before it starts.
        tokenizer: reads prompts that are text, and makes text of the results; None: prompts are tokens.
        defaults: arguments of :meth:`Batch.submit` for requests that do not give them.

    Returns:
        The batch: iterate over it (``for`` or ``async for``) for the results, in the order in which requests end. It is
        a context manager, which cancels what still runs at its end.

    Raises:
        ValueError: the model is not patched, or an argument has no valid value.
    """
    return Batch(model, prompts, slots=slots, max_memory=max_memory, tokenizer=tokenizer, **defaults)


class Batch:
    """See :func:`batch`. All methods may be called from any thread."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Iterable[Any] | None = None,
        *,
        slots: int | None = None,
        max_memory: int | float | str | None = None,
        tokenizer: Any = None,
        **defaults: Any,
    ):
        inner: Any = model if STATE_KEY in vars(model) else compat.generating_model(model)
        if (state := vars(inner).get(STATE_KEY)) is None:
            raise ValueError(f"this {type(model).__name__} is not patched: call hf_fastpath.patch(model) first")
        most = min(MAX_BATCH, state.options.max_batch_size)
        slots = most if slots is None else slots
        if type(slots) is not int or not 1 <= slots <= most:
            raise ValueError(f"slots is {slots!r}, expected a whole number from 1 to {most}, the max_batch_size")
        self._limit = None if max_memory is None else bytes_or_share(max_memory, inner.device)
        self._model: Any = model
        self._inner, self._state, self._slots = inner, state, slots
        self._tokenizer, self._defaults = tokenizer, defaults
        self._prompts = None if prompts is None else iter(prompts)
        self._lock = threading.Condition()
        self._alone_turn = threading.RLock()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._ended: dict[Request, Result] = {}  # in the order in which they ended; nobody has seen these results
        self._watchers: list[Callable[[], None]] = []
        self._count, self._threads, self._is_closed = 0, 0, False
        self._config = getattr(inner, "generation_config", None)
        self._adapters = AdapterTurns(inner)
        self._beginnings = Beginnings(state, _KEPT_BYTES)
        self._torch_threads = torch.get_num_threads()
        if self._limit is not None:
            with state.sharing.lock:
                state.sharing.room.limits[self] = self._limit

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        *,
        id: str | None = None,
        seed: int | None = None,
        logprobs: bool | None = None,
        stream: bool | None = None,
        adapter: str | None = None,
        **arguments: Any,
    ) -> Request:
        """Add a request.

        Args:
            prompt: tokens, as a list or an int tensor [seq_len] or [1, seq_len]; or a dict of arguments of
                ``generate()`` that hold them (of a processor or tokenizer); or text, if the batch has a tokenizer.
            id: names the request in its result; None for a number.
            seed: of its samples; None to draw from PyTorch's default generator.
            logprobs: whether its result has log-probabilities.
            stream: whether :meth:`.request.Request.tokens` gives its tokens while they come.
            adapter: name of the PEFT adapter that alone is active for the request; None for those that are active when
                the batch has nothing else to do. Requests with different adapters take turns, and share no steps.
            arguments: of ``generate()``: ``max_new_tokens``, ``do_sample``, ``temperature``, ``eos_token_id``,
                processors, stopping criteria, ...

        Raises:
            ValueError: an argument has no valid value.
            RuntimeError: the batch is closed.
        """
        given = self._defaults | arguments
        seed = given.pop("seed", None) if seed is None else seed
        wants = bool(given.pop("logprobs", False)) if logprobs is None else logprobs
        streams = bool(given.pop("stream", False)) if stream is None else stream
        adapter = given.pop("adapter", None) if adapter is None else adapter
        for name in ("seed", "logprobs", "stream", "adapter"):
            given.pop(name, None)
        self._adapters.check(adapter, given)
        if given.get("num_return_sequences", 1) not in (None, 1):
            raise ValueError(
                f"num_return_sequences is {given['num_return_sequences']}, expected 1: submit the prompt several times"
            )
        given |= inputs_of(prompt, self._inner.device, self._tokenizer)
        device = self._inner.device
        scope = CallScope(True, None, wants, self._alone_turn)
        if seed is not None:
            scope.generator = torch.Generator(device).manual_seed(seed)
        known = [] if (ids := given.get("input_ids")) is None else ids[0].tolist()
        scope.prefixes = functools.partial(self._beginnings.of, known)
        streamer = Tokens() if streams else None
        if streamer is not None:
            given["streamer"] = streamer
        with self._lock:
            if self._is_closed:
                raise RuntimeError("submit() to a batch that is closed: make another one")
            name = str(self._count) if id is None else id
            self._count += 1
            made = Request(name, known, given, scope, most_new_tokens(given, self._config), streamer, self, adapter)
            self._waiting.append(made)
            self._beginnings.add(known)
            if self._threads < min(self._slots, len(self._waiting) + len(self._running)):
                self._threads += 1
                threading.Thread(target=self._work, name="hf_fastpath.batch", daemon=True).start()
            self._lock.notify_all()
        return made

    def cancel(self, request: Request) -> None:
        """See :meth:`.request.Request.cancel`."""
        request.scope.is_cancelled = True
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
                self._finish(request, Result(request.id, request.prompt, [], "cancelled"))
        self._state.sharing.wake()

    def close(self) -> None:
        """Cancel all requests that have not ended, wait for them, and take no more."""
        with self._lock:
            self._is_closed, self._prompts = True, None
            unfinished = [*self._waiting, *self._running]
            self._lock.notify_all()
        for request in unfinished:
            self.cancel(request)
        here = threading.current_thread()
        with self._state.sharing.lock:
            self._state.sharing.room.limits.pop(self, None)
        with self._lock:
            while self._threads and here.name != "hf_fastpath.batch":
                self._lock.wait()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- results ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Result]:
        """Yield results in the order in which requests end, until none is left; each is given once, here or by
        ``Request.result()``."""
        while True:
            self._fill()
            with self._lock:
                while not self._ended and (self._waiting or self._running):
                    self._lock.wait()
                if not self._ended:
                    if self._prompts is None:
                        return
                    continue
                result = self._ended.pop(next(iter(self._ended)))
            yield result

    async def __aiter__(self) -> AsyncIterator[Result]:
        """Do as iteration does, without blocking the event loop."""
        while True:
            await asyncio.to_thread(self._fill)
            await self.until(lambda: bool(self._ended) or not (self._waiting or self._running))
            with self._lock:
                result = self._ended.pop(next(iter(self._ended))) if self._ended else None
            if result is not None:
                yield result
            elif self._prompts is None:
                return

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so that the end of a request brings about, without blocking the event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

        with self._lock:
            self._watchers.append(wake)
        try:
            while not is_so():
                await event.wait()
                event.clear()
        finally:
            with self._lock:
                self._watchers.remove(wake)

    def _fill(self) -> None:
        """Submit prompts of the iterable, as long as there is room for more."""
        while (prompts := self._prompts) is not None:
            with self._lock:
                if len(self._waiting) + len(self._ended) >= self._slots:
                    return
            try:
                prompt = next(prompts)
            except StopIteration:
                self._prompts = None
                return
            self.submit(prompt)

    def forget(self, request: Request) -> None:
        """Give a request's result no more by iteration."""
        with self._lock:
            self._ended.pop(request, None)

    def _finish(self, request: Request, result: Result) -> None:
        """Note a result; the caller holds the lock."""
        times = dict(created_at=request.created_at, started_at=request.started_at, ended_at=time.perf_counter())
        vars(result).update(times)
        self._ended[request] = result
        self._beginnings.remove(request.prompt)
        request.finish(result)
        for wake in self._watchers:
            wake()
        self._lock.notify_all()

    # ---- threads ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Run requests until none waits."""
        torch.set_num_threads(self._torch_threads)
        try:
            while (request := self._next()) is not None:
                result = self._run(request)
                with self._lock:
                    self._running.remove(request)
                    if not (self._running or self._waiting):
                        self._adapters.give_back()
                    self._finish(request, result)
        finally:
            with self._lock:
                self._threads -= 1
                self._lock.notify_all()

    def _next(self) -> Request | None:
        """Return the request that is to be run next, once there is room for it; None if none waits."""
        with self._lock:
            while self._waiting:
                request = self._waiting[0]
                too_long = self._too_long(request)
                if too_long is not None:
                    self._waiting.popleft()
                    self._finish(request, _failed(request, too_long))
                elif (found := self._adapters.next_of(self._waiting, self._running)) is not None:
                    self._waiting.remove(found)
                    self._running.append(found)
                    found.started_at = time.perf_counter()
                    return found
                else:
                    self._lock.wait()
            if not self._running:
                self._adapters.give_back()
            return None

    def _too_long(self, request: Request) -> ValueError | None:
        if self._limit is None:
            return None
        part = self._state.plans.part_of(self._inner)
        if part is None or why_model_not_shared(self._state, part) is not None:
            return None
        needed = (1 + BESIDE) * text_bytes(part, self._state.options.kv_dtype, capacity_for(request.length))
        if needed <= self._limit:
            return None
        return ValueError(
            f"request {request.id} has up to {request.length} tokens, whose keys and values take {needed} bytes, and "
            f"max_memory is {self._limit}: ask for fewer tokens, or allow more memory"
        )

    def _run(self, request: Request) -> Result:
        """Make a request's call of ``generate()``; return its result, whatever happens."""
        streamer, scope = request.streamer, request.scope
        seen = [] if streamer is None else streamer.seen
        try:
            with in_scope(scope), torch.no_grad():
                if scope.is_cancelled:
                    raise Cancelled
                request.check_tokens(getattr(self._inner.get_input_embeddings(), "num_embeddings", None))
                given = dict(request.arguments)
                made = compat.sequences_of(self._model.generate(**given))
                count = compat.num_tokens_behind(self._inner, None, given, made)
                tokens = made[0, made.shape[1] - count :].tolist()
                logprobs = self._logprobs(scope, made, len(tokens)) if scope.wants_logprobs else None
        except Cancelled:
            return Result(request.id, request.prompt, seen, "cancelled")
        except BaseException as error:
            return _failed(request, error)
        if scope.is_cancelled:
            return Result(request.id, request.prompt, tokens, "cancelled", logprobs)
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True)
        has_end = bool(tokens) and is_end(tokens[-1], given, self._config)
        reason = "length" if len(tokens) >= request.new_tokens and not has_end else "stop"
        return Result(request.id, request.prompt, tokens, reason, logprobs, text)

    def _logprobs(self, scope: CallScope, ids: torch.Tensor, count: int) -> list[float]:
        """Return the log-probabilities of the last ``count`` tokens; stock code has kept none, so that the text is read
        again."""
        if len(scope.logprobs) == count:
            return torch.stack([each[0] for each in scope.logprobs]).tolist() if count else []
        with self._alone_turn:
            return logprobs(self._model, ids, last=count)[0].tolist()


def _failed(request: Request, error: BaseException) -> Result:
    seen = [] if request.streamer is None else request.streamer.seen
    return Result(request.id, request.prompt, seen, "error", error=error)
