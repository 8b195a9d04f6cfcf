"""A recorded step as data, and what passes need to look around in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..decode.calls.named_calls import Call, Register, bound, by_name, read_by, registers_in
from ..decode.model.weight import Weight
from . import marks
from .errors import Misspread as Misspread
from .errors import OwnPadding as OwnPadding
from .errors import Unrecordable as Unrecordable
from .text_lengths import Served


@dataclass
class Span:
    """The calls of one module without children.

    Attributes:
        path: name of the module in the model.
        inputs, outputs: registers of the tensors that the module took and gave.
        calls: what the module called, in order.
    """

    path: str
    inputs: list[Register]
    outputs: list[Register]
    calls: list[Call]


@dataclass(frozen=True)
class EncodedLayer:
    """What a layer of a decoder has made of what an encoder has read.

    Attributes:
        k, v: registers of [batch, num_kv_heads, length, head_dim].
    """

    k: Register
    v: Register


@dataclass(frozen=True)
class BiasTable:
    """What is added to scores by how far a key is behind the query.

    Attributes:
        register: of float32 [num_heads, distances], see ``ops.decode_attention``.
        calls: those that make the biases of one query at the end of the recorded text, of the model's tensors alone.
        scores: register of these, [1 or batch, num_heads, 1, keys].
        shape: num_heads, distances.
    """

    register: Register
    calls: list[Call]
    scores: Register
    shape: tuple[int, int]

    def memory(self, device: torch.device) -> torch.Tensor:
        """Return memory for the table."""
        return torch.zeros(self.shape, dtype=torch.float32, device=device)

    def fill(self, table: torch.Tensor) -> None:
        """Compute the biases into ``table``, as the model's tensors are now."""
        held = (each for call in self.calls for each in call.arguments.values() if isinstance(each, torch.Tensor))
        device = next((each.device for each in held if each.dim()), table.device)  # of the model's table
        table.copy_(_result(self.calls, self.scores, device)[0, :, 0].flip(-1)[:, : table.shape[1]])


@dataclass(frozen=True)
class MadeOfModel:
    """What calls make of the model's tensors alone: a norm of a weight, a product of small matrices. Each recording has
    memory for it, which its calls read as they read a weight.

    Attributes:
        register: of the result.
        calls: that make it.
        tensor: the memory.
    """

    register: Register
    calls: list[Call]
    tensor: torch.Tensor

    def memory(self, device: torch.device) -> torch.Tensor:
        """Return the memory, which is where calls read it."""
        return self.tensor

    def fill(self, memory: torch.Tensor) -> None:
        """Compute the value, as the model's tensors are now."""
        with torch.no_grad():
            memory.copy_(_result(self.calls, self.register))


def _result(calls: Sequence[Call], wanted: Register, device: torch.device | None = None) -> torch.Tensor:
    """Return what calls make of the model's tensors alone; with ``device``, on that."""
    values: dict[int, Any] = {}
    for call in calls:
        arguments = {name: _replaced(each, values) for name, each in call.arguments.items()}
        if device is not None:
            arguments |= {name: device for name, each in arguments.items() if isinstance(each, torch.device)}
        op, ordered = bound(call.op, arguments)
        values[call.out.index] = op(*ordered)
    return values[wanted.index]


@dataclass
class Recording:
    """The calls of a step.

    Attributes:
        batch, query_len: sequences, and new tokens of each; of a step of any number, that of the recording.
        calls: in order.
        facts: register -> a tensor without data of the register's shape, dtype and strides.
        tokens, positions: registers of int64 [batch, query_len]; of several tokens at a position [batch, query_len,
            channels].
        logits: register of [batch, query_len, vocab_size]; of several tokens [batch * channels, query_len, vocab_size];
            of a step of any number of tokens, those of the last, [batch, 1, vocab_size].
        spans: the calls of each module without children.
        masks: register of an attention mask -> the window that it stands for, None for full causal attention.
        open_masks: registers of masks that hide nothing.
        mutated: registers that a call writes to, or whose memory it shares.
        past: number of tokens that the cache said it holds.
        windows: sliding window of each of the cache's layers.
        states: registers of the states of each of the cache's layers; calls read and write these.
        state_places: where each layer's states are in the layer, see ``compat.RecordingCache.states``.
        encoded: of each layer of a decoder behind an encoder, what it attends to; empty without an encoder.
        values: what calls read that is made of the model's tensors alone: tables, and results of other calls.
        encoder_output: register of the encoder's output itself, or None.
        encoded_length: places of the encoder's output when the step was recorded; 0 without an encoder.
        linears: names of linear layers whose weights only their own calls read, those of one input together; none of a
            block with a mixture of experts.
        readers: names of modules with a tensor that the step reads.
        is_unpadded: whether the step is of sequences without padding in front alone.
        live: storages of tensors that are no parameters or buffers, but may change all the same.
        served: lengths of the text, and of what an encoder has read, for which the step is the model's.
        rows_are_tokens: the sequences are the tokens of prompts, see :mod:`.token_rows`.
        is_of_given_length: the length was not chosen as one that no other size is likely to be.
        stand_ins: a matrix without data, and the weight that it stands for, see :mod:`.stand_ins`.
    """

    batch: int
    query_len: int
    calls: list[Call]
    facts: dict[int, torch.Tensor]
    tokens: Register
    positions: Register
    logits: Register
    spans: list[Span]
    masks: dict[int, int | None]
    open_masks: frozenset[int] = frozenset()
    mutated: set[int] = field(default_factory=set)
    past: int = 0
    windows: tuple[int | None, ...] = ()
    states: list[list[Register]] = field(default_factory=list)
    state_places: list[list[tuple[str, int]]] = field(default_factory=list)
    encoded: list[EncodedLayer] = field(default_factory=list)
    values: list[BiasTable | MadeOfModel] = field(default_factory=list)
    encoder_output: Register | None = None
    encoded_length: int = 0
    linears: list[list[str]] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    is_unpadded: bool = False
    live: set[int] = field(default_factory=set)
    stand_ins: list[tuple[torch.Tensor, Weight]] = field(default_factory=list)
    served: Served | None = None
    is_of_given_length: bool = False
    rows_are_tokens: bool = False
    _read: list[tuple[Call, dict[str, Any]]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def count(self) -> Any:
        """The symbol of the number of new tokens; None if the step is of a given number."""
        return None if self.served is None else self.served.new

    def register(self, like: torch.Tensor) -> Register:
        """Return a new register for a tensor of the shape and dtype of ``like``."""
        made = Register(len(self.facts))
        self.facts[made.index] = like
        return made

    def fact(self, value: Any) -> torch.Tensor:
        """Return a tensor without data like what a register holds; return any other value as it is."""
        return self.facts[value.index] if isinstance(value, Register) else value

    def call(self, op: Callable[..., Any], like: torch.Tensor, /, **arguments: Any) -> Call:
        """Return a call that is not in the list yet, whose result is as ``like``."""
        return Call(op, by_name(op, (), arguments), self.register(like))

    def producers(self) -> dict[int, Call]:
        """Return a dict of register -> the call that gives it."""
        return {call.out.index: call for call in self.calls}

    def users(self) -> dict[int, list[Call]]:
        """Return a dict of register -> the calls that read it; None reads the logits, and memory that is written to."""
        found: dict[int, list[Any]] = {index: [None] for index in (self.logits.index, *self.mutated)}
        for call in self.calls:
            for register in read_by(call):
                found.setdefault(register.index, []).append(call)
        return found

    def lone_factors(self) -> Iterator[tuple[Call, Call, Any]]:
        """Yield multiplications, each with a call whose result is a factor there and read nowhere else, and the other
        factor."""
        producers, users = self.producers(), self.users()
        for call in self.calls:
            if call.op is not torch.ops.aten.mul.Tensor:
                continue
            for one, other in (("self", "other"), ("other", "self")):
                made = producers.get(getattr(call.arguments[one], "index", -1))
                if made is not None and len(users[made.out.index]) == 1:
                    yield call, made, call.arguments[other]

    def rewrite(self, instead: dict[int, list[Call]], values: dict[int, Any]) -> None:
        """Put calls in the place of others, and values in the place of registers.

        Args:
            instead: id of a call -> the calls that take its place; none to leave it out.
            values: register -> what calls read instead, which may be a register that is replaced, too.
        """
        if instead:
            self.calls = [new for call in self.calls for new in instead.get(id(call), [call])]
        if values:
            for call in self.calls:
                if any(register.index in values for register in read_by(call)):
                    call.arguments = {name: _replaced(each, values) for name, each in call.arguments.items()}
            logits = _replaced(self.logits, values)
            assert isinstance(logits, Register), "the logits became a constant"
            self.logits = logits

    def drop_unread(self) -> None:
        """Leave out calls whose results nothing reads; calls that write stay if anything reads the memory.

        Where all calls and the dicts of their arguments are those of the last time, nothing is looked at.
        """
        if len(self._read) == len(self.calls) and all(
            call is known and call.arguments is given for call, (known, given) in zip(self.calls, self._read)
        ):
            return
        needed, kept = {self.logits.index}, []
        for call in reversed(self.calls):
            if call.out.index in needed or call.out.index in self.mutated or is_effect(call):
                for register in read_by(call):
                    needed.add(register.index)
                kept.append(call)
        self.calls = kept[::-1]
        self._read = [(call, call.arguments) for call in self.calls]

    def forget_read(self) -> None:
        """Let go of what :meth:`drop_unread` has seen."""
        self._read = []


def is_effect(call: Call) -> bool:
    """Whether a call changes what lies outside of its result."""
    return call.op in marks.EFFECTS or is_mutable(call.op)


@functools.cache
def is_mutable(op: Callable[..., Any]) -> bool:
    """Whether an op writes to a tensor that it is given."""
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.is_mutable


def behind(calls: Sequence[Call], register: Register) -> list[Call]:
    """Return the calls that a register is made by, in order."""
    needed, found = {register.index}, []
    for call in reversed(calls):
        if call.out.index in needed:
            needed.update(each.index for each in read_by(call))
            found.append(call)
    return found[::-1]


def between_marks(
    calls: Sequence[Call], wanted: Sequence[Register], allowed: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> tuple[list[Register], list[Call]] | None:
    """Return the results of marks that ``wanted`` are made of, and the calls between; None if these read more.

    Args:
        allowed: whether the calls may hold a tensor of several elements, which may be the model's own, and change.
    """
    producers = {call.out.index: call for call in calls}
    found: set[int] = set()
    of_marks: dict[int, Register] = {}

    def visit(register: Register) -> bool:
        call = producers.get(register.index)
        if call is None:
            return False
        if register.index in found or register.index in of_marks:
            return True
        if marks.is_mark(call.op):
            of_marks[register.index] = register
            return True
        tensors = (each for each in call.arguments.values() if isinstance(each, torch.Tensor) and each.numel() > 1)
        if not all(map(allowed, tensors)):
            return False
        found.add(register.index)
        return all(map(visit, read_by(call)))

    if not all(map(visit, wanted)):
        return None
    return list(of_marks.values()), [call for call in calls if call.out.index in found]


def _replaced(value: Any, values: dict[int, Any]) -> Any:
    while isinstance(value, Register) and value.index in values:
        value = values[value.index]
    if isinstance(value, (list, tuple)) and registers_in(value):
        return [_replaced(each, values) for each in value]
    return value
