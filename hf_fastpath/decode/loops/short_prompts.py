"""Short prompts on a GPU: one launch reads a whole prompt, where the calls from Python take longer than their kernels.

A graph reads prompts of one length, so there are graphs for a few lengths, and a shorter prompt is filled up on the
right with tokens that no token of the prompt sees. Keys and values go into memory of the graph, and from there into the
cache of the call. The sequences of a graph may be prompts of several calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ..calls.named_calls import Call, registers_in
from ..lower import composed
from ..lower.attend import Attention
from ..lower.many_experts import waits_for_choice
from ..lower.prepared_inputs import mixes_rows
from ..plans.angles import angles_at, has_angles
from ..run import graph
from ..sources.step_source import StepSource
from .graphs_of_model import GraphsOfModel, Unfit, buffers_of, bytes_of
from .prompt_program import Prompt, PromptProgram, keep_newest

_aten = torch.ops.aten

#: a cache, and a prompt that goes into it
Text = tuple[FastpathCache, Prompt]

#: devices on which a graph is one launch
DEVICES = frozenset({"cuda"})
#: types whose products may have more rows than the prompt: in float32 cuBLAS sums 64 rows up with 1.1 to 1.2 times the
#: error of 18, and what a stock model gives is wanted there
DTYPES = frozenset({torch.float16, torch.bfloat16})
#: lengths that prompts are filled up to; behind the last the kernels take longer than their launches
LENGTHS = 32, 64, 96, 128, 192, 256, 384, 512
#: further lengths, for models of which a token takes so few weights a layer that kernels still take less time
LENGTHS_OF_THIN = 768, 1024, 1536, 2048
#: bytes of keys and values of a graph at most
MOST_BYTES = 128 << 20
#: with which prompt of a length its calls are captured; a capture takes as long as reading a few prompts
CAPTURED_WITH = 2
#: arguments that say how large a tensor is, or where it ends
_OF_SHAPES = frozenset({"size", "shape", "repeats", "end", "length", "query_len"})


def length_of(part: StepSource, prompt: Prompt, past: int) -> int | None:
    """Return the length that a prompt is filled up to for a graph, or None: it is read by single calls."""
    batch, count = prompt.tokens.shape
    if past or prompt.starts is not None or prompt.tokens.device.type not in DEVICES:
        return None
    if part.embedding.weight.dtype not in DTYPES:
        return None
    if prompt.positions.shape[-1] != count:
        return None
    if part.ranks is not None or any(part.host_weights) or any(kind.states for kind in part.kinds):
        return None
    for lengths in (LENGTHS, LENGTHS_OF_THIN):
        found = next((each for each in lengths if count <= each and batch * each <= lengths[-1]), None)
        if found is not None:
            model = GraphsOfModel.of(part)
            if lengths is LENGTHS or model.is_thin(batch * found, len(part.layers)):
                return found
            return None
    return None


def shape_together(prompts: Sequence[Prompt]) -> tuple[int, int] | None:
    """Return the sequences and their length of a graph that reads prompts of several calls, or None: they are too many
    tokens. There are few such shapes."""
    batch = _power_of_two(sum(len(each.tokens) for each in prompts))
    length = max(LENGTHS[0], _power_of_two(max(each.tokens.shape[1] for each in prompts)))
    return (batch, length) if batch * length <= LENGTHS[-1] else None


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class SingleCalls:
    """Stands for a reader where single calls read prompts of a length as they come."""


class ShortPrompts:
    """Reads prompts of up to ``length`` tokens that begin their texts, without padding: by single calls, and by a graph
    of the same calls from the prompt ``CAPTURED_WITH`` on, so that all prompts get the same bits.

    Args:
        part: the model.
        program: the calls for such prompts, which have not run yet.
        batch: sequences.
        length: tokens of a sequence.
        like: the layers of a cache that has room for a prompt of any number of sequences.

    Raises:
        Unfit: the calls take more than the last token from the end, or wait for what the GPU has computed.
    """

    def __init__(self, part: StepSource, program: PromptProgram, batch: int, length: int, like: Sequence[Any]):
        device = part.embedding.weight.device
        self._part, self._program, self._length = part, program, length
        self._graph: Any = None
        self._num_read = 0
        self._of_model = GraphsOfModel.of(part)
        usual = LENGTHS[-1] if bytes_of(like, 1, LENGTHS[-1]) <= MOST_BYTES else 0
        with torch.inference_mode(False):
            self._tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
            self._positions = torch.zeros(batch, length, dtype=torch.long, device=device)
            self._last = torch.zeros(batch, dtype=torch.long, device=device)
            self._lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
            buffers = [buffers_of(layer) for layer in like]
            self._shared = self._of_model.memory_for(buffers, batch * length, usual)
            self._memory = self._shared.views(buffers, batch, length)
            self._angles: dict[Any, tuple[torch.Tensor, ...]] = {}
        self._logits: torch.Tensor | None = None
        for call in program.program.calls:
            _refuse_counting(call, program.size_registers)
            if waits_for_choice(call):
                raise Unfit("experts that the host waits for")
            if mixes_rows(call):
                raise Unfit("inputs that are rounded by those of all tokens")
        last = program.program.register()
        _take_from(program.program.calls, last)
        self._given = [(last, self._last)]

    def hides_what_is_behind(self, prompt: Prompt) -> bool:
        """Whether other tokens behind the first half of a prompt change nothing of that half: bit for bit, as the same
        calls are made."""
        half = max(1, prompt.tokens.shape[1] // 2)
        cut = Prompt(prompt.tokens[:, :half], prompt.positions[:, :half], None)
        found = []
        with self._of_model.lock:
            for behind in (0, self._part.num_embeddings - 1):
                logits = self._run([cut], behind)
                found.append([logits, *(each[:, :, :half].clone() for each in self._held())])
        return all(map(torch.equal, *found))

    def _held(self) -> list[torch.Tensor]:
        """Return keys and values of each layer that has them, in turns."""
        return [each for memory in self._memory if memory.k is not None for each in (memory.k, memory.v)]

    def _run(self, prompts: Sequence[Prompt], behind: int | None = None) -> torch.Tensor:
        """Return [batch, vocab_size] logits of the token that follows each sequence of prompts. The caller holds the
        lock of the model.

        Args:
            prompts: of no more sequences together than there are; those behind them may be anything.
            behind: the token that fills the prompts up; None for the last one of each.
        """
        self._wait()
        row = 0
        for prompt in prompts:
            batch, count = prompt.tokens.shape
            rows, row = slice(row, row + batch), row + batch
            positions = prompt.positions.expand(batch, -1)
            for memory, values in ((self._tokens[rows], prompt.tokens), (self._positions[rows], positions)):
                memory[:, :count].copy_(values)
                memory[:, count:] = values[:, -1:]  # tokens and positions that the model knows
            if behind is not None:
                self._tokens[rows, count:] = behind
            self._last[rows] = count - 1
        self._fill_angles()
        if self._graph is None:
            self._make_calls()
        else:
            self._graph.replay()
        assert self._logits is not None
        return self._logits.clone()

    def read(self, texts: Sequence[Text]) -> torch.Tensor:
        """Return [batch, vocab_size] logits of the token that follows each sequence of prompts, and put keys and values
        of each prompt into its cache, which has room for them. The prompts' calls may be those that are captured."""
        self._num_read += 1
        if self._num_read == CAPTURED_WITH:
            try:
                self.capture()
            except compat.OUT_OF_MEMORY:  # there may be more next time
                self._num_read = 0
            except RuntimeError:  # CUDA cannot capture something in them, which is then called from Python
                pass
        with self._of_model.lock:
            logits, row = self._run([prompt for _, prompt in texts]), 0
            for cache, prompt in texts:
                self._store(cache, prompt.tokens.shape[1], row)
                row += len(prompt.tokens)
        return logits

    def _store(self, cache: FastpathCache, count: int, row: int) -> None:
        """Put keys and values of ``count`` tokens of the last prompts, from a row on, into a cache."""
        buffers = [each for layer in cache.layers[: len(self._memory)] for each in buffers_of(layer)]
        to, read = [], []
        for buffer, held in zip(buffers, self._held()):
            new = held[row : row + len(buffer), :, :count]
            if count <= buffer.shape[2]:
                to.append(buffer[:, :, :count])
                read.append(new)
            else:  # of a window that ends inside of the prompt
                keep_newest(buffer, new)
        if to:
            torch._foreach_copy_(to, read)

    def capture(self) -> None:
        """Capture the calls, which have run once.

        Raises:
            RuntimeError: CUDA cannot capture something in them.
        """
        model = self._of_model
        with model.lock:
            others = list(model.captured)  # PyTorch lets no graph use memory whose last graph is gone
            if not others:
                model.pool = graph.new_pool(self._tokens.device)
            self._graph = graph.capture(self._make_calls, self._tokens.device, model.pool)
            model.captured.add(self)

    def _make_calls(self) -> None:
        attention = Attention(self._length, self._length, self._lengths, None)
        given = self._program.given(self._tokens, self._positions, self._lengths, attention)
        given += [*self._given, *self._program.of_memory(self._memory, self._angles)]
        self._logits = self._program.program.run_once(given)

    def _wait(self) -> None:
        """Let the calls to come wait for the last prompt, which another thread may have read on another stream."""
        if self._tokens.device.type != "cuda":
            return
        current, model = torch.cuda.current_stream(self._tokens.device), self._of_model
        if model.stream is not None and model.stream != current:
            current.wait_stream(model.stream)
        model.stream = current

    def _fill_angles(self) -> None:
        if not has_angles(self._part):
            return
        empty = torch.empty(0, dtype=self._part.embedding.weight.dtype, device=self._tokens.device)
        for kind, found in angles_at(self._part, empty, self._positions).items():
            if kind not in self._angles:
                with torch.inference_mode(False):
                    self._angles[kind] = tuple(map(torch.empty_like, found))
            for memory, values in zip(self._angles[kind], found):
                memory.copy_(values)


def _take_from(calls: list[Call], last: Any) -> None:
    """Let calls that take the last token of each sequence take the one at the place that the register ``last`` has.

    Raises:
        Unfit: there is no such call, or one whose place is computed, or several of a list whose rows are no tokens.
    """
    of_rows = [place for place, call in enumerate(calls) if call.op is composed.last_rows]
    found = [place for place, call in enumerate(calls) if _is_of_the_last(call)]
    if len(found) + bool(of_rows) != 1:
        raise Unfit("no call takes the last token alone")
    for place in found:
        call = calls[place]
        if registers_in([value for name, value in call.arguments.items() if name != "self"]):
            raise Unfit("a call whose place is computed")
        calls[place] = replace(call, op=composed.token_at, arguments={"x": call.arguments["self"], "place": last})
    for place in of_rows:
        calls[place] = replace(calls[place], op=composed.row_at, arguments={**calls[place].arguments, "place": last})


def _refuse_counting(call: Call, sizes: set[int]) -> None:
    """Refuse a call that computes with the number of new tokens: it is another one in a prompt that is filled up.

    Raises:
        Unfit: it does.
    """
    for name, value in call.arguments.items():
        if name not in _OF_SHAPES and any(each.index in sizes for each in registers_in(value)):
            raise Unfit(f"{call.name} computes with the number of tokens")


def _is_of_the_last(call: Call) -> bool:
    given = call.arguments
    if call.op is _aten.narrow.default:
        return (given["dim"], given["start"], given["length"]) == (1, -1, 1)
    return call.op is _aten.slice.Tensor and (given.get("dim", 0), given.get("start")) == (1, -1)


def reader_of(
    part: StepSource,
    prompt: Prompt,
    layers: Sequence[Any],
    length: int,
    program: Callable[[], PromptProgram | None],
) -> ShortPrompts | SingleCalls | None:
    """Return what reads a prompt that is the first one of its length; None if there is no memory for it now.

    Args:
        part: the model.
        prompt: like those that will be read, of as many sequences.
        layers: of a cache with room for a prompt.
        length: that the prompt is filled up to.
        program: makes the calls for so many tokens, or None.
    """
    try:
        batch = len(prompt.tokens)
        if bytes_of(layers, batch, length) > MOST_BYTES or (calls := program()) is None:
            return SingleCalls()
        made = ShortPrompts(part, calls, batch, length, layers)
        return made if made.hides_what_is_behind(prompt) else SingleCalls()
    except compat.OUT_OF_MEMORY:  # there may be more next time
        return None
    except (Unfit, RuntimeError):
        return SingleCalls()
