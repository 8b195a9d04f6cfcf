"""A list of op calls that reads weights in host memory on a GPU: they are copied ahead of the calls, through a ring.

Copies are made by a stream of their own, in the order of the calls. A copy starts once the calls have run that read
what lay in its place before; a call waits for its own copies. What starts copies and what waits for them are calls of
the program, so that a captured step holds all of it: a branch of copies beside the kernels. Every run copies anew from
where the model keeps the weights, so that edits take effect; the host waits until a run is over, so that nothing is
edited that is still being read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...compat import below_autograd
from ...reasons import Cause
from ..calls.named_calls import Register, by_name, tensors_in, with_tensors
from ..run.graph import random_numbers_in_turn
from ..run.program import Program
from ..sources.step_source import StepSource
from . import page_lock

#: tensors of fewer bytes (norms, biases) and the ends of others stay on the GPU, and are copied at each ``generate()``:
#: together they are small, and a copy of its own costs each of them microseconds
KEPT_BYTES = 64 << 10
#: the ring holds this many of the largest layers: copies run on while a layer is computed, and while layers without
#: copies are
_LAYERS_AHEAD = 2
#: bytes to a multiple of which tensors begin in the ring
_ALIGNMENT = 256


class Ring:
    """Memory of a GPU through which weights pass, and the stream that copies them.

    Steps on a GPU run one after another (``graph.random_numbers_in_turn``), so that all of them use one ring.
    """

    def __init__(self, device: torch.device, num_bytes: int):
        with torch.inference_mode(False):  # the memory outlives the mode that generate() was called in
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context whose copies run beside the calls, behind the copies and the calls so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Make an event behind the copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the calls to come wait for the copies in front of an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


_rings: weakref.WeakValueDictionary[tuple[torch.device, int], Ring] = weakref.WeakValueDictionary()


def _ring(device: torch.device, sizes: list[int]) -> Ring:
    """Return a ring of the first of ``sizes`` for which there is memory.

    Raises:
        torch.OutOfMemoryError: there is not even memory for the last.
    """
    for size in sizes:
        if (found := _rings.get((device, size))) is not None:
            return found
        try:
            return _rings.setdefault((device, size), Ring(device, size))
        except torch.OutOfMemoryError:
            if size == sizes[-1]:
                raise
    raise AssertionError("no sizes")


@dataclass
class _Load:
    """What one call reads of the ring.

    Attributes:
        first, end: place in the ring.
        copies: for each tensor, its bytes in the ring and in host memory.
        behind: number of the call behind which the copies may start; -1 if no call of the step has to run before.
        arrived: event behind the copies; None on the CPU.
    """

    first: int
    end: int
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    behind: int
    arrived: torch.cuda.Event | None = None


@dataclass
class _Copies:
    """The copies of a step.

    Attributes:
        loads: one for each call that reads of the ring.
        pages: the page-locked memory that is copied from.
    """

    ring: Ring
    loads: list[_Load]
    pages: list[page_lock.Pages]


def start_copies(copies: _Copies, behind: int) -> None:
    """Start the copies that may start behind the call of this number."""
    due = [load for load in copies.loads if load.behind == behind]
    if due:
        with copies.ring.beside():
            for load in due:
                for target, source in load.copies:
                    target.copy_(source, non_blocking=True)
                load.arrived = copies.ring.mark()


def await_copies(copies: _Copies, number: int) -> None:
    """Let the call of this number wait for its copies."""
    copies.ring.wait(copies.loads[number].arrived)


class KeptCopies:
    """Copies of a model's small tensors on other devices than the tensors', made anew by :meth:`renew`."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the copy on a device; the first time it holds no data yet."""
        key = id(tensor), device
        if key not in self._pairs:  # the tensor is kept, so that no other gets its id
            with torch.inference_mode(False):
                self._pairs[key] = tensor, torch.empty_like(tensor, device=device, requires_grad=False)
        return self._pairs[key][1]

    def renew(self) -> None:
        """Copy the tensors as they are now."""
        for pair in self._pairs.values():
            for source, copy in by_pages(*pair):
                copy.copy_(source.detach())


def by_pages(tensor: torch.Tensor, copy: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a tensor and its copy in parts, if the tensor is a part of another in host memory: one that lies on pages
    of which some are locked and some are not cannot be copied at once."""
    is_part = tensor.device.type == "cpu" and tensor.nbytes < tensor.untyped_storage().nbytes()
    if not is_part or not tensor.is_contiguous():
        return [(tensor, copy)]
    borders = [each - tensor.data_ptr() for each in page_lock.whole_pages(tensor)]
    pair = (each.detach().reshape(-1).view(torch.uint8).tensor_split(borders) for each in (tensor, copy))
    return [parts for parts in zip(*pair) if parts[0].numel()]


class Fetching(Program):
    """A list of calls on one GPU, some of which read weights in host memory.

    Args:
        part: the model.
        values: values of registers, see ``Program``.

    Raises:
        torch.OutOfMemoryError: there is no memory for the largest layer.
    """

    def __init__(self, part: StepSource, values: list[Any] | None = None):
        super().__init__(values)
        self._device = part.embedding.weight.device
        # a tensor may be read in halves, each of which begins at a multiple
        sizes = [sum(_room(each) + _ALIGNMENT for each in group if _passes(each)) for group in part.host_weights]
        tensors = {id(each): each for group in part.host_weights for each in group}.values()
        self._storages = {each.untyped_storage().data_ptr() for each in tensors}
        self._kept = KeptCopies()
        self._graph: Any = None
        self._notes = [Cause("over_the_bus", f"{host_bytes(part) / 1e9:.4g} GB a step")]
        pages: list[page_lock.Pages] = []
        try:
            pages = page_lock.lock(filter(_passes, tensors), self._device)
        except RuntimeError as error:
            self._notes.append(Cause("not_page_locked", str(error)))
        ring = _ring(self._device, [min(sum(sizes), _LAYERS_AHEAD * max(sizes)), max(sizes)])
        self._copies = _Copies(ring, [], pages)
        super().emit(start_copies, copies=self._copies, behind=-1)

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        arguments = by_name(op, positional, named)
        waiting = [each for each in {id(each): each for each in tensors_in(arguments)}.values() if self._waits(each)]
        here = {id(each): self._copy_of(each) for each in waiting if not _passes(each)}
        passing = list(filter(_passes, waiting))
        if not passing:
            return super().emit(op, **with_tensors(arguments, here))
        number = len(self._copies.loads)
        here |= self._load(passing)
        super().emit(await_copies, copies=self._copies, number=number)
        if "programmatic_launch" in arguments:  # the kernel waits for copies, and not for the kernel in front alone
            arguments = arguments | {"programmatic_launch": False}
        out = super().emit(op, **with_tensors(arguments, here))
        super().emit(start_copies, copies=self._copies, behind=number)
        return out

    def renew(self) -> None:
        self._kept.renew()

    @property
    def notes(self) -> Sequence[Cause]:
        return self._notes

    def run(self) -> None:
        super().run()
        self._wait()

    def run_once(self, given: Iterable[tuple[Any, Any]]) -> Any:
        self.renew()
        with random_numbers_in_turn(self._device):  # a step runs in turn as well, and its copies use the same ring
            result = super().run_once(given)
            self._wait()
        return result

    def captured(self, capture: Callable[[Callable[[], None], torch.device], Any], device: torch.device) -> Any:
        if "not_page_locked" not in self._notes:  # copies of other memory wait for the host
            self._graph = capture(super().run, device)
        return self

    def replay(self) -> None:
        """Run the calls, as they were captured if they could be."""
        if self._graph is None:
            with below_autograd():
                self.run()
        else:
            self._graph.replay()
            self._wait()

    def _wait(self) -> None:
        """Let the host wait until nothing reads its memory any more."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    # ---- where tensors are --------------------------------------------------------------------------------------

    def _waits(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor that stays on the device."""
        return self._kept.of(tensor, self._device)

    def _load(self, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Give tensors that a call reads the next place in the ring; return by id where the call finds them."""
        memory, loads = self._copies.ring.memory, self._copies.loads
        room = sum(map(_room, tensors))
        first = loads[-1].end if loads else 0
        if first + room > memory.numel():
            first = 0
        made = _Load(first, first + room, [], loads[-1].behind if loads else -1)
        for number, other in enumerate(loads):
            if other.first < made.end and made.first < other.end:
                made.behind = max(made.behind, number)
        loads.append(made)
        here = {}
        for tensor in tensors:
            place = memory[first : first + page_lock.extent(tensor)]
            here[id(tensor)] = place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            made.copies += self._parts(place, tensor)
            first += _room(tensor)
        return here

    def _parts(self, place: torch.Tensor, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the copies of one tensor, as bytes: what lies on its own pages comes from there, and the ends, of less
        than a page, from the device's memory."""
        elements = place.numel() // tensor.element_size()
        source = tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)
        first, end = (each - source.data_ptr() for each in page_lock.whole_pages(tensor))
        # PyTorch asks whether the first page of a tensor's storage is locked: one that begins behind is needed
        inside = torch.from_numpy(source[first:end].numpy())
        parts = zip(place.tensor_split((first, end)), (source[:first], inside, source[end:]))
        return [(target, each if each is inside else self._copy_of(each)) for target, each in parts if each.numel()]


def host_bytes(part: StepSource) -> int:
    """Return the bytes that a step copies from host memory."""
    return sum(each.nbytes for group in part.host_weights for each in group if _passes(each))


def program_of(part: StepSource, device: torch.device, values: list[Any] | None = None) -> Program:
    """Make an empty program for calls of a model on one device.

    Args:
        values: values of registers, see ``Program``.
    """
    is_home = any(part.host_weights) and device == part.embedding.weight.device
    return Fetching(part, values) if is_home else Program(values)


def _passes(tensor: torch.Tensor) -> bool:
    first, end = page_lock.whole_pages(tensor)
    return page_lock.extent(tensor) >= KEPT_BYTES and first < end


def _room(tensor: torch.Tensor) -> int:
    return -(-page_lock.extent(tensor) // _ALIGNMENT) * _ALIGNMENT
