"""A recorded model that accelerate has put onto several devices, or some weights of which wait in host memory.

The step is recorded from a local model without accelerate's hooks, as if all tensors were on the device of the
embeddings. :class:`Placement` then says where each call runs.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.calls.named_calls import Call, Register, by_name, read_by, tensors_in, with_tensors
from ..decode.lower.which_op import Lower
from ..decode.placed.offloaded import Waiting, in_whole, local_model
from ..decode.run.program import Program
from . import marks
from .family import Recorded
from .local_model import LocalRecordedModel
from .lowering import Lowering
from .recorded_model import RecordedModel
from .recorded_step import Recording, Unrecordable, is_mutable
from .stand_ins import StandIns

#: a parameter of at most so many bytes (norms, biases) may be copied to another device when ``generate()`` begins
_COPIED_BYTES = 1 << 20
#: of a module in a list, the list's name and the place in it
_IN_LIST = re.compile(r".*?\.\d+(?=\.)")


class Misplaced(Unrecordable):
    """A step that cannot be divided among the devices of its weights."""

    code = "device"


def is_placed(model: nn.Module) -> bool:
    """Whether a model's weights are on several devices, or accelerate brings them for every call."""
    return any(map(compat.brought, model.modules())) or len({each.device for each in model.parameters()}) > 1


class Placement:
    """Where the calls of a recorded step run.

    A call runs where the largest parameter is that it reads; a call without parameters where the cache's layer is that
    it reads, or else where the call before it runs.

    Args:
        weight: gives the number of bytes of a parameter and the device where calls read it; None for another tensor.
        home: where the first call runs.

    Attributes:
        calls: device of each call, in the list's order.
        layers: device of each layer of the cache that a call reads, and of what an encoder has read ("encoded", layer).

    Raises:
        Misplaced: a call reads large parameters, or writes, on several devices.
    """

    def __init__(
        self,
        recording: Recording,
        weight: Callable[[torch.Tensor], tuple[int, torch.device] | None],
        home: torch.device,
    ):
        self._recording, self._weight, self._stand_ins = recording, weight, StandIns(recording)
        self._owners = {each.index: layer for layer, states in enumerate(recording.states) for each in states}
        self._made: dict[int, torch.device] = {}  # register -> where its value is made
        self._last_writes = self._find_last_writes()
        self.calls: list[torch.device] = []
        self.layers: dict[Any, torch.device] = {}
        here = home
        for call in recording.calls:
            here = self._device(call, here)
            self.calls.append(here)
            self._made[call.out.index] = here

    def _find_last_writes(self) -> dict[int | None, int]:
        """Return a dict of memory -> place of the last call that may write there."""
        found: dict[int | None, int] = {}
        for place, call in enumerate(self._recording.calls):
            if is_mutable(call.op):
                found |= dict.fromkeys((self._memory(each) for each in read_by(call)), place)
        return found

    def _memory(self, register: Register) -> int | None:
        fact = self._recording.fact(register)
        return compat.memory_of(fact) if isinstance(fact, torch.Tensor) else None

    def _is_final(self, register: Register) -> bool:
        """Whether no call from here on writes where a register's value is, so that a copy of the value serves."""
        return self._last_writes.get(self._memory(register), -1) < len(self.calls)

    def _layers(self, call: Call) -> list[Any]:
        """Return the keys of what :attr:`layers` has for the caches that a call reads."""
        layer, encoded = (call.arguments.get(name) for name in ("layer", "encoded"))
        if call.op is marks.attend_encoded:
            layer, encoded = None, layer
        found: list[Any] = [self._owners[each.index] for each in read_by(call) if each.index in self._owners]
        return found + [layer] * (layer is not None) + [("encoded", encoded)] * (encoded is not None)

    def _device(self, call: Call, here: torch.device) -> torch.device:
        found = filter(None, map(self._weight, self._stand_ins.tensors_in(call)))
        weights = sorted(found, key=operator.itemgetter(0), reverse=True)
        layers = self._layers(call)
        made = [each for each in read_by(call) if each.index in self._made]
        fixed = {self.layers[each] for each in layers if each in self.layers}
        fixed |= {self._made[each.index] for each in made if not self._is_final(each)}
        if call.op is operator.getitem:  # out of several results, which no copy carries together
            fixed.add(self._made.get(call.arguments["a"].index, here))
        fixed |= {device for num_bytes, device in weights if num_bytes > _COPIED_BYTES}
        if len(fixed) > 1:
            where = " and ".join(sorted(map(str, fixed)))
            raise Misplaced(f"{call.name} reads what is on {where}: put each layer onto one device")
        there = next(iter(fixed), weights[0][1] if weights else here)
        for each in layers:
            self.layers[each] = there
        return there


class _There:
    """A program whose calls read on the device where they run.

    Args:
        part: the model.
        program: gets the calls.
        given: what the plan has for registers; tensors among it are where the calls are that read them.
    """

    def __init__(self, part: PlacedModel, program: Program, given: Iterable[Any]):
        self._part, self._program, self._device = part, program, part.home
        self._given = set(map(id, given))

    def move_to(self, device: torch.device) -> None:
        """Let the calls to come run on a device."""
        self._device = device
        self._program.move_to(device)

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        arguments = by_name(op, positional, named)
        copies = {id(each): self._program.copied_here(each) for each in self._elsewhere(arguments)}
        arguments = with_tensors(arguments, copies) if copies else arguments
        devices = {name: self._device for name, each in arguments.items() if self._is_home(each)}
        return self._program.emit(op, **arguments | devices)

    def _elsewhere(self, arguments: dict[str, Any]) -> Iterator[torch.Tensor]:
        for tensor in tensors_in(arguments):
            if id(tensor) not in self._given and self._part.read_at(tensor) not in (None, self._device):
                yield tensor

    def _is_home(self, value: Any) -> bool:
        """Whether an argument is the device on which all was recorded."""
        home = self._part.home
        return isinstance(value, torch.device) and value.type == home.type and value.index in (None, home.index)


class PlacedLowering(Lowering):
    """A walk over a recorded list that goes from device to device."""

    def __init__(
        self, part: PlacedModel, program: Program, to: Lower, recording: Recording, given: Mapping[int, Any], caches, at
    ):
        self._there = _There(part, program, given.values())
        super().__init__(part, program, replace(to, emit=self._there.emit), recording, given, caches, at)
        self._everywhere, self._places = at, part.placement(recording).calls

    def _come_to(self, place: int) -> None:
        self.to.device = device = self._places[place]
        self._there.move_to(device)
        self.at = self._everywhere[device]


class PlacedModel(LocalRecordedModel):
    """A recorded model that accelerate has placed."""

    is_placed = True
    lowering = PlacedLowering

    def __init__(self, architecture: Recorded, whole: nn.Module):
        super().__init__(architecture, whole, local_model(whole))
        self._placements: dict[int, Placement] = {}  # id of a recording -> of its calls

    # ---- where things are ---------------------------------------------------------------------------------------

    @property
    def home(self) -> torch.device:
        """The device of the embeddings."""
        return self.embedding.weight.device

    @functools.cached_property
    def _waiting(self) -> Waiting:
        return Waiting(self.whole, self.home)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return self.home if tensor in self._waiting else tensor.device

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(dict.fromkeys((self.home, *map(self.device_of, self.module.parameters()))))

    @functools.cached_property
    def _weights(self) -> dict[int, tuple[int, torch.device]]:
        """Storage of each parameter, and of quants in the place of one -> bytes, and where calls read it."""
        found = {compat.memory_of(each): (each.nbytes, self.device_of(each)) for each in self.module.parameters()}
        for path in self._looked_at.skeleton.quantized:
            layer: Any = self.module.get_submodule(path)
            quants = layer.quants
            found[compat.memory_of(quants)] = quants.nbytes, self.device_of(quants)
        return found

    @functools.cached_property
    def _buffers(self) -> dict[int, torch.device]:
        """Storage of each buffer -> where calls read it."""
        return {compat.memory_of(each): self.device_of(each) for each in self.module.buffers()}

    def placement(self, recording: Recording) -> Placement:
        """Return where the calls of one of the model's recordings run.

        Raises:
            Misplaced: the weights lie so that there is no such place.
        """
        if id(recording) not in self._placements:
            weight = lambda tensor: self._weights.get(compat.memory_of(tensor))  # noqa: E731
            self._placements[id(recording)] = Placement(recording, weight, self.home)
        return self._placements[id(recording)]

    def read_at(self, tensor: torch.Tensor) -> torch.device | None:
        """Return where calls read a tensor that they hold; None if a call on any device can read it."""
        storage = compat.memory_of(tensor)
        if (weight := self._weights.get(storage)) is not None:
            return weight[1]
        is_number = tensor.dim() == 0 and tensor.device.type == "cpu"
        return self._buffers.get(storage, None if is_number or tensor.is_meta else tensor.device)

    @functools.cached_property
    def layer_devices(self) -> list[torch.device]:
        found = self.placement(self.recording(1, 1)).layers
        return [found.get(layer, self.home) for layer in range(len(self.kinds))]

    def states(self, batch: int) -> list[list[torch.Tensor]]:
        skeleton = self._looked_at.skeleton
        with skeleton.lock, skeleton.mode:
            return [
                [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device) for each in found]
                for found, device in zip(super().states(batch), self.layer_devices)
            ]

    # ---- weights in host memory ---------------------------------------------------------------------------------

    @functools.cached_property
    def _read(self) -> set[int]:
        """Storages of what the calls of a step hold."""
        recording = self.recording(1, 1)
        held = map(StandIns(recording).tensors_in, recording.calls)
        return {compat.memory_of(each) for tensors in held for each in tensors}

    @functools.cached_property
    def host_weights(self) -> list[list[torch.Tensor]]:
        """Of each module in a list of layers, and of all else, the tensors that a step has to bring to a GPU."""
        groups: dict[str, list[torch.Tensor]] = {}
        for path, module in self.module.named_modules():
            own = (*module._parameters.values(), *module._buffers.values())
            waiting = [each for each in own if each is not None and each in self._waiting]
            layer = _IN_LIST.match(f"{path}.")
            group = groups.setdefault("" if layer is None else layer.group(), [])
            group += [each for each in waiting if compat.memory_of(each) in self._read]
        return list(groups.values())

    @property
    def sources(self) -> list[tuple[int, int]]:
        return self._waiting.sources

    # ---- reasons ------------------------------------------------------------------------------------------------

    def lasting_reason(self) -> str | None:
        reason = self.other_reason() or self._waiting.reason() or super().lasting_reason() or self._table_reason()
        return in_whole(self, reason)

    def reason(self) -> str | None:
        return in_whole(self, super().reason())

    def _table_reason(self) -> str | None:
        tables = (each for each in self.module.modules() if isinstance(each, nn.Embedding))
        return self._waiting.table_reason(each for each in tables if compat.memory_of(each.weight) in self._read)


class RecordedAlone(Recorded):
    """The family of a model that one process has, on one device or on several."""

    def _part(self, model: nn.Module) -> RecordedModel:
        return PlacedModel(self, model) if is_placed(model) else RecordedModel(self, model)
