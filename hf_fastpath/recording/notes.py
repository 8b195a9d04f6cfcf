"""What is noted of the calls of one step: registers for its tensors, and the calls that give them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import compat
from ..decode.calls.named_calls import Call, Register, read_by
from ..decode.ranks.rank_calls import shard_of
from ..ops.decode_attention import MAX_QUERY_LEN
from . import marks
from .latent import Expansion
from .masks import POSITIONS
from .numbers_of_lengths import follows_length
from .overloads import functional_overload
from .recorded_step import EncodedLayer, Span, Unrecordable, behind
from .skeleton import Skeleton, past_tokens
from .text_lengths import Lengths

#: places of an encoder's output
_ENCODED = 1009


class Notes:
    """What is noted of the calls of one step."""

    def __init__(
        self,
        skeleton: Skeleton,
        past: int | None = None,
        encoded: int | None = None,
        is_plain: bool = False,
        most: int = MAX_QUERY_LEN,
        begins: bool = False,
    ):
        self.skeleton = skeleton
        self.calls: list[Call] = []
        self.facts: dict[int, Any] = {}
        self.spans: list[Span] = []
        self.linears: list[tuple[str, Register]] = []  # name of a called linear layer -> its input
        self.masks: dict[int, Callable[..., Any]] = {}  # register of a mask -> its function
        self.text_mask: Register | None = None  # of the mask of tokens that the forward is given, if it is given one
        self.masks_over_encoded: set[int] = set()  # registers of those over what an encoder has read
        self.expansions: dict[tuple[int, int], Expansion] = {}  # ids of keys and values that were made of a latent
        self.read: set[int] = set()  # ids of the model's tensors that calls were given
        self.mutated: set[int] = set()
        self.silent = 0
        self.trace: list[tuple] = []  # ops, with their arguments
        self.refused: Exception | None = None  # the first error that a call has raised, whatever the model did about it
        self.is_rehearsing = False  # see rehearsing()
        self.is_unpadded = False  # see Recording
        self.most = most
        self.begins = begins
        longest = past_tokens(skeleton.model.config, most) if past is None else past
        self.rows = min(longest, POSITIONS) if past is None else past  # of a mask that are looked at
        self.past = 0 if begins else longest
        self.encoded_length = _ENCODED if encoded is None else encoded
        are_given = past is not None or begins
        self.lengths = Lengths(skeleton.env, self.past, self.encoded_length, is_plain, are_given, begins)
        self._registers: dict[int, Register] = {}  # id of a tensor -> what stands for it
        self._kept: list[Any] = []  # kept alive, so that no other tensor gets one of these ids
        self._storages: dict[int, list[int]] = {}
        self._written: set[int] = set()  # storages that calls write to
        self._states: dict[tuple[int, ...], tuple[Register, int]] = {}  # registers of keys, values -> of both, layer
        self._encoded: dict[tuple[int, ...], int] = {}  # the same of what an encoder has read -> layer
        self._is_spread = any(shard_of(module) is not None for module in skeleton.model.modules())
        self._paths = {id(module): path for path, module in skeleton.copy.named_modules()}

    def path_of(self, module: torch.nn.Module) -> str:
        """Return the name of a module of the copy that is run."""
        return self._paths[id(module)]

    # ---- values -----------------------------------------------------------------------------------------------

    def given(self, tensor: torch.Tensor) -> Register:
        """Return a register for a tensor that no call makes."""
        register = Register(len(self.facts))
        self.facts[register.index] = tensor
        self.name(tensor, register)
        return register

    def name(self, tensor: torch.Tensor, register: Register) -> None:
        """Note that ``tensor`` is what ``register`` holds from here on."""
        self._registers[id(tensor)] = register
        self._kept.append(tensor)
        storage = compat.memory_of(tensor)
        self._storages.setdefault(storage, []).append(register.index)
        if storage in self._written:
            self.mutated.add(register.index)

    def state(self, tensor: torch.Tensor) -> Register:
        """Return a register for a state, which calls of the step read and write in place."""
        self._written.add(compat.memory_of(tensor))
        return self.given(tensor)

    def encoded(self, k: torch.Tensor, v: torch.Tensor) -> EncodedLayer:
        """Return registers for what the next layer of the decoder attends to of what an encoder has read."""
        made = EncodedLayer(self.given(k), self.given(v))
        self._encoded[made.k.index, made.v.index] = len(self._encoded)
        return made

    def value(self, thing: Any) -> Any:
        """Return an argument as calls hold it: registers and the model's tensors instead of tensors without data."""
        if isinstance(thing, torch.Tensor):
            if (register := self._registers.get(id(thing))) is not None:
                return register
            if (real := self.skeleton.real.get(id(thing))) is not None:
                self.read.add(id(real))
                return real
            if isinstance(thing, FakeTensor):
                raise Unrecordable("a tensor that was made before this step")
            return thing
        if isinstance(thing, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in thing):
            return [self.value(each) for each in thing]
        return self.lengths.noted(thing)

    def emit(self, op: Callable[..., Any], arguments: dict[str, Any], out: Any) -> Call:
        """Note a call that gave ``out``."""
        found = {name: self.value(value) for name, value in arguments.items()}
        register = Register(len(self.facts))
        call = Call(op, found, register)
        self.calls.append(call)
        if isinstance(out, torch.Tensor):
            self.facts[register.index] = out
            self.name(out, register)
        elif isinstance(out, (list, tuple)):
            self.facts[register.index] = out
            for place, each in enumerate(out):
                if isinstance(each, torch.Tensor):
                    self._take(register, place, each)
        else:
            self.facts[register.index] = out
        return call

    def _take(self, whole: Register, place: int, out: torch.Tensor) -> None:
        register = Register(len(self.facts))
        self.calls.append(Call(operator.getitem, {"a": whole, "b": place}, register))
        self.facts[register.index] = out
        self.name(out, register)

    def write(self, func: Any, arguments: dict[str, Any], target: torch.Tensor, out: Any) -> None:
        """Note a call that writes into ``target``; if nothing else shares the memory, one that gives a new tensor."""
        storage = compat.memory_of(target)
        if id(target) not in self._registers:
            raise Unrecordable(f"{func} writes into a tensor of the model")
        sharing = set(self._storages[storage])
        functional = None if storage in self._written else functional_overload(func)
        if len(sharing) == 1 and functional is not None and tuple(out.shape) == tuple(target.shape):
            before = self._registers[id(target)]
            made = self.emit(functional, arguments, target.clone()).out
            self.facts[made.index] = target
            for name in [each for each, register in self._registers.items() if register is before]:
                self._registers[name] = made
            self._storages[storage] = [made.index]
            return
        self._written.add(storage)
        self.emit(func, arguments, out)
        self.mutated.update(self._storages[storage])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Note nothing for the length of a ``with`` block."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Note nothing for the length of a ``with`` block, in which a forward reads into an empty cache."""
        self.is_rehearsing = True
        try:
            yield
        finally:
            self.is_rehearsing = False

    def is_constant(self, value: Any) -> bool:
        """Whether a tensor is made of numbers and of the model's tensors alone, whatever the text is."""
        register = self._registers.get(id(value)) if isinstance(value, torch.Tensor) else None
        if register is None:
            return False
        calls = behind(self.calls, register)
        made = {call.out.index for call in calls}
        if register.index not in made or any(call.op is marks.text_positions for call in calls):
            return False
        given = [each for call in calls for each in call.arguments.values()]
        return all(each.index in made for call in calls for each in read_by(call)) and not any(
            map(follows_length, given)
        )

    def refuse(self, name: str) -> None:
        """Note that the model asks a cache for something that only real ones have."""
        self.refused = self.refused or Unrecordable(f"a cache of a class of its own, with {name}")

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Leave what is called in a ``with`` block out of the trace."""
        trace, self.trace = self.trace, []
        try:
            yield
        finally:
            self.trace = trace

    def note_refusal(self, error: Exception) -> None:
        """Note that a call was refused: the model may catch the error and take another way."""
        self.refused = self.refused or error
