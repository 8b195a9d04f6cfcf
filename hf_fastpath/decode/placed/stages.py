"""A list of op calls over several devices: a program for each stretch of calls on one device, and copies in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...compat import below_autograd
from ...reasons import Cause
from ..calls.named_calls import Register, Step, by_name
from ..run.program import Program
from ..sources.step_source import StepSource
from .fetch import KeptCopies, program_of

#: bytes to a multiple of which values begin in memory
_ALIGNMENT = 256


class _Parcel:
    """Values that go from one device to another with one copy, laid side by side first.

    Args:
        values: the values of all registers.
        pairs: indices of the registers of each value and of its copy.
        device: where the copies are read.
    """

    def __init__(self, values: list[Any], pairs: list[tuple[int, int]], device: torch.device):
        self._values, self._pairs = values, pairs
        made = [values[source] for source, _ in pairs]
        ends = [0]
        for value in made:
            ends.append(-(-(ends[-1] + value.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        with torch.inference_mode(False):  # the memory outlives the mode that generate() was called in
            self._sent = torch.zeros(ends[-1], dtype=torch.uint8, device=made[0].device)
            self._received = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        places = list(zip(made, ends))
        self._views = [_view(self._sent, value, at) for value, at in places]
        self.copies = [_view(self._received, value, at) for value, at in places]

    def send(self) -> None:
        for view, (source, _) in zip(self._views, self._pairs):
            view.copy_(self._values[source])
        self._received.copy_(self._sent, non_blocking=True)
        for copy, (_, target) in zip(self.copies, self._pairs):
            self._values[target] = copy


def _view(memory: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
    return memory[at : at + like.nbytes].view(like.dtype).view(like.shape)


@dataclass
class _Stage:
    """Calls on one device, and what they read of other devices.

    Attributes:
        reads: for each other device, registers of values and of their copies.
        reads_once: the same for values that only change between calls of ``generate()``.
        parcels: what carries the values, made when these are there.
    """

    device: torch.device
    program: Program
    reads: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict)
    reads_once: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict)
    parcels: dict[tuple[torch.device, bool], _Parcel] = field(default_factory=dict)
    graph: Any = None


class Stages(Program):
    """Calls that move from device to device, with the registers of all stages.

    A call that reads what a call on another device has made, or a shared tensor, reads a copy, which every run makes
    anew: from device to device, without the host.

    Args:
        part: the model.
        device: where the first calls run.
    """

    def __init__(self, part: StepSource, device: torch.device):
        super().__init__()
        self._part = part
        self._stages: list[_Stage] = []
        self._home = device
        self._made_on: dict[int, torch.device] = {}  # register -> where its value is made
        self._shared: dict[int, tuple[torch.Tensor, Register]] = {}
        self._constants: set[int] = set()
        self._carried: dict[tuple[int, torch.device], Register] = {}
        self._has_stale_constants = True
        self._copies = KeptCopies()
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        if self._stages and self._stages[-1].device == device:
            return
        self._stages.append(_Stage(device, program_of(self._part, device, self.values)))

    def shared(self, tensor: torch.Tensor, is_constant: bool = False) -> Register:
        register = self.register(tensor)
        self._made_on[register.index] = self._home
        if is_constant:
            self._constants.add(register.index)
        return register

    def copied_here(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies.of(tensor, self._stages[-1].device)

    def renew(self) -> None:
        self._copies.renew()
        self._has_stale_constants = True
        for stage in self._stages:
            stage.program.renew()

    @property
    def notes(self) -> Sequence[Cause]:
        return next((stage.program.notes for stage in self._stages if stage.program.notes), ())

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        stage = self._stages[-1]
        arguments = {name: self._here(value) for name, value in by_name(op, positional, named).items()}
        out = stage.program.keep(stage.program.emit(op, **arguments))  # another stage may read it
        self._made_on[out.index] = stage.device
        return out

    def _here(self, value: Any) -> Any:
        """Return an argument as a call of the newest stage is to take it."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._here, value))
        if not isinstance(value, Register):
            return value
        stage = self._stages[-1]
        made_on = self._made_on.get(value.index, stage.device)  # a buffer lies where it is read
        if made_on == stage.device:
            return value
        key = value.index, stage.device
        if key not in self._carried:
            self._carried[key] = self.register()
            reads = stage.reads_once if value.index in self._constants else stage.reads
            reads.setdefault(made_on, []).append((value.index, self._carried[key].index))
        return self._carried[key]

    def optimize(self, step: Step, what: str = "step") -> None:
        for stage in self._stages:
            stage.program.optimize(replace(step, one_call=False), what)

    @property
    def calls(self) -> list:
        return [call for stage in self._stages for call in stage.program.calls]

    @calls.setter
    def calls(self, given: list) -> None:
        assert not given, "calls are recorded by emit()"

    def run(self) -> None:
        self._run(lambda stage: stage.program.run())

    def run_once(self, given: Iterable[tuple[Any, Any]]) -> Any:
        raise NotImplementedError("a prompt over several devices runs through the modules")

    def release(self) -> None:
        for stage in self._stages:
            stage.program.release()

    def captured(self, capture: Callable[[Callable[[], None], torch.device], Any], device: torch.device) -> Any:
        for stage in self._stages:
            stage.graph = stage.program.captured(capture, stage.device)
        return self

    def replay(self) -> None:
        """Run the calls as they were captured."""
        self._run(lambda stage: stage.graph.replay())

    def _run(self, run: Callable[[_Stage], None]) -> None:
        reads_constants, self._has_stale_constants = self._has_stale_constants, False
        for stage in self._stages:
            with _at(stage.device):
                self._carry(stage, stage.reads, False)
                if reads_constants:
                    self._carry(stage, stage.reads_once, True)
                run(stage)

    def _carry(self, stage: _Stage, reads: dict[torch.device, list[tuple[int, int]]], is_constant: bool) -> None:
        for source, pairs in reads.items():
            key = source, is_constant
            if key not in stage.parcels:
                stage.parcels[key] = _Parcel(self.values, pairs, stage.device)
            with _at(source), below_autograd():
                stage.parcels[key].send()


def _at(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
