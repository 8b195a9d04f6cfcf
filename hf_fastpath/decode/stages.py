"""A list of op calls over several devices: a program for each stretch of calls on one device, and copies in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..compat import below_autograd
from .named_calls import Register, Step, by_name
from .program import Program


@dataclass
class _Copy:
    """A value that one device makes and another one reads.

    Attributes:
        source, target: registers of the value and of its copy.
        is_constant: the value changes only between calls of ``generate()``.
    """

    source: Register
    target: Register
    is_constant: bool


@dataclass
class _Stage:
    """Calls on one device, and the copies that are made before them."""

    device: torch.device
    program: Program
    copies: list[_Copy] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph | None = None


class Stages(Program):
    """Calls that move from device to device. Its registers are those of all stages.

    A call that reads what a call on another device has made reads a copy of it, which every run makes anew: from
    device to device, without the host. So do calls that read a shared tensor.

    Args:
        device: where the first calls run.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._stages: list[_Stage] = []
        self._home = device
        self._made_on: dict[int, torch.device] = {}  # register -> where its value is made
        self._shared: dict[int, tuple[torch.Tensor, Register]] = {}
        self._constants: set[int] = set()
        self._carried: dict[tuple[int, torch.device], Register] = {}
        self._has_stale_constants = True
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        if self._stages and self._stages[-1].device == device:
            return
        program = Program()
        program.values = self.values
        self._stages.append(_Stage(device, program))

    def shared(self, tensor: torch.Tensor, is_constant: bool = False) -> Register:
        register = self.register(tensor)
        self._made_on[register.index] = self._home
        if is_constant:
            self._constants.add(register.index)
        return register

    def renew(self) -> None:
        self._has_stale_constants = True

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        stage = self._stages[-1]
        arguments = {name: self._here(value) for name, value in by_name(op, positional, named).items()}
        out = stage.program.emit(op, **arguments)
        self._made_on[out.index] = stage.device
        return out

    def _here(self, value: Any) -> Any:
        """Return an argument as a call of the newest stage is to take it."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._here, value))
        if not isinstance(value, Register):
            return value
        stage = self._stages[-1]
        made_on = self._made_on.get(value.index, stage.device)  # else it is a buffer, which lies where it is read
        if made_on == stage.device:
            return value
        key = value.index, stage.device
        if key not in self._carried:
            self._carried[key] = self.register()
            stage.copies.append(_Copy(value, self._carried[key], value.index in self._constants))
        return self._carried[key]

    def optimize(self, step: Step) -> None:
        for stage in self._stages:
            stage.program.optimize(replace(step, one_call=False))

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
            stage.graph = capture(stage.program.run, stage.device)
        return self

    def replay(self) -> None:
        """Run the calls as they were captured."""
        self._run(lambda stage: stage.graph.replay())

    def _run(self, run: Callable[[_Stage], None]) -> None:
        copies_constants, self._has_stale_constants = self._has_stale_constants, False
        for stage in self._stages:
            with torch.cuda.device(stage.device) if stage.device.type == "cuda" else nullcontext():
                for copy in stage.copies:
                    if copies_constants or not copy.is_constant:
                        self._carry(copy, stage.device)
                run(stage)

    def _carry(self, copy: _Copy, device: torch.device) -> None:
        made = self.values[copy.source.index]
        target = self.values[copy.target.index]
        if target is None or target.shape != made.shape:
            with torch.inference_mode(False):  # it outlives the mode that generate() was called in
                target = self.values[copy.target.index] = torch.empty_like(made, device=device)
        with below_autograd():
            target.copy_(made, non_blocking=True)
