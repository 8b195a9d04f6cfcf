"""Calls of a program that follow one another, made by the native library without the way back to Python.

The library has a table of its ops, and of PyTorch's views that lie between them (``csrc/run_calls``). A run of such
calls becomes numbers once, which the library reads into a list of its own; a step then passes the tensors that change,
and gets those that calls behind the run read. The calls are the same functions that the dispatcher would find, in the
same order.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...native import call_lists, loader
from ...registry import NAMESPACE, PLAIN_TENSORS, define
from ..calls.named_calls import Register, Step, tensors_in
from ..calls.pass_table import CallList

#: function, arguments, where values go (a list, a place in it, a register), register of the result
Bound = tuple[Callable[..., Any], list[Any], list[tuple[list, int, int]], int]

#: calls that are worth a run of their own: one by itself takes longer than from Python
LEAST_CALLS = 2
_run_calls = define("run_calls(Tensor on, Tensor[] given, int calls, Tensor(a!)? times=None) -> Tensor[]")
_give_to_calls = define("give_to_calls(Tensor on, Tensor[] given, int calls) -> ()")
_left_by_calls = define("left_by_calls(Tensor on, int calls) -> Tensor[]")
_hold_in_calls = define("hold_in_calls(Tensor on, Tensor[] tensors, int calls) -> ()")
#: type in a schema -> number of the kind of argument, as ``csrc/common/callable_ops.h`` has it
_TENSOR, _OPTIONAL_TENSOR, _TENSORS, _INT, _OPTIONAL_INT, _BOOL, _FLOAT, _INTS, _FLOATS = range(9)
_KINDS = {
    "Tensor": _TENSOR,
    "Optional[Tensor]": _OPTIONAL_TENSOR,
    "List[Tensor]": _TENSORS,
    "int": _INT,
    "SymInt": _INT,
    "Optional[int]": _OPTIONAL_INT,
    "Optional[SymInt]": _OPTIONAL_INT,
    "bool": _BOOL,
    "float": _FLOAT,
    "List[int]": _INTS,
    "List[SymInt]": _INTS,
    "List[float]": _FLOATS,
}
_ABSENT = -1


def native_calls(listing: CallList, step: Step) -> None:
    """Pass: let the native library make calls that follow one another."""
    listing.in_native_code = True


@dataclass(frozen=True)
class _Op:
    """An op as the library's table has it.

    Attributes:
        name: in the table.
        kinds: of its arguments.
        defaults: of its arguments, where the schema has some.
        gives: ``"Tensor"``, ``"List[Tensor]"`` or nothing.
    """

    name: str
    kinds: tuple[int, ...]
    defaults: tuple[Any, ...]
    gives: str


@dataclass
class _Call:
    """A call that the library can make.

    Attributes:
        place: of the call in the program.
        arguments: of each argument its kind and its value; kind _ABSENT for none.
    """

    place: int
    op: _Op
    arguments: list[tuple[int, Any]]
    out: int

    def reads(self) -> Iterator[int]:
        """Yield the registers that the call reads."""
        for _, value in self.arguments:
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if type(each) is Register:
                    yield each.index


@dataclass
class _Numbers:
    """The description of a run's calls."""

    names: dict[str, int] = field(default_factory=dict)
    code: list[int] = field(default_factory=list)
    reals: list[float] = field(default_factory=list)


@functools.cache
def _op_of(op: Callable[..., Any], path: str) -> _Op | None:
    """Return what a library's table has of an op; None if it has nothing."""
    if op is operator.getitem:
        return _Op("getitem", (_TENSORS, _INT), (None, None), "Tensor")
    if not isinstance(op, torch._ops.OpOverload):
        return None
    schema = op._schema
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    name = full.removeprefix(f"{NAMESPACE}::")
    kinds = [_KINDS.get(str(each.type), _ABSENT) for each in schema.arguments]
    gives = [str(each.type) for each in schema.returns]
    if _ABSENT in kinds or len(gives) > 1 or not call_lists.functions_of(path).hf_fastpath_is_callable(name.encode()):
        return None
    defaults = tuple(each.default_value if each.has_default_value() else None for each in schema.arguments)
    return _Op(name, tuple(kinds), defaults, gives[0] if gives else "")


def _argument(kind: int, value: Any, device: str) -> tuple[int, Any] | None:
    """Return the kind and the value of an argument as the library takes it, None if it does not."""
    if value is None:
        return (_ABSENT, None) if kind in (_OPTIONAL_TENSOR, _OPTIONAL_INT) else None
    if kind in (_TENSOR, _OPTIONAL_TENSOR):
        return (kind, value) if _is_tensor(value, device) else None
    if kind == _TENSORS:
        is_list = isinstance(value, (list, tuple)) and all(_is_tensor(each, device) for each in value)
        return (kind, value) if is_list or type(value) is Register else None
    if kind in (_INTS, _FLOATS):
        wanted = int if kind == _INTS else (int, float)
        is_list = isinstance(value, (list, tuple)) and all(isinstance(each, wanted) for each in value)
        return (kind, value) if is_list else None
    return (kind, value) if isinstance(value, (int, float) if kind == _FLOAT else int) else None


def _is_tensor(value: Any, device: str) -> bool:
    return type(value) is Register or _is_taken(value, device)


def _call_of(place: int, bound: Bound, path: str, device: str) -> _Call | None:
    """Return a call as the library can make it; None if it cannot."""
    op, given, holes, out = bound
    found = _op_of(op, path)
    if found is None:
        return None
    # a list that is an argument is a copy with room for values, see Program._bind
    lists = {id(each): list(each) for each in given if isinstance(each, list)}
    ordered = [*given, *found.defaults[len(given) :]]
    for target, at, index in holes:
        (ordered if target is given else lists[id(target)])[at] = Register(index)
    ordered = [lists.get(id(each), each) for each in ordered]
    arguments = [_argument(kind, value, device) for kind, value in zip(found.kinds, ordered)]
    return None if None in arguments else _Call(place, found, arguments, out)  # type: ignore[arg-type]


def runs_of(bound: Sequence[Bound], kept: Collection[int]) -> list[NativeCalls]:
    """Return the runs of calls of a program that the library can make.

    Args:
        bound: the calls of the program, as it makes them itself.
        kept: registers that are read from outside of the program.
    """
    device = "cuda" if any(each.is_cuda for _, given, *_ in bound for each in tensors_in(given)) else "cpu"
    status = loader.status().get(device)
    if status is None or not status.native:
        return []
    path = status.detail
    calls = [_call_of(place, each, path, device) for place, each in enumerate(bound)]
    readers: dict[int, list[int]] = {}
    for place, (*_, holes, _) in enumerate(bound):
        for *_, index in holes:
            readers.setdefault(index, []).append(place)
    while True:
        found = list(_in_a_row(calls))
        odd = next(filter(None, (_odd_one(each, readers, kept) for each in found)), None)
        if odd is None:
            break
        calls[odd.place] = None
    makers = {out for *_, out in bound}
    made = (NativeCalls(path, device, each, readers, kept, makers) for each in found if len(each) >= LEAST_CALLS)
    return [each for each in made if each.on is not None]


def _in_a_row(calls: Sequence[_Call | None]) -> Iterator[list[_Call]]:
    row: list[_Call] = []
    for call in calls:
        if call is not None:
            row.append(call)
        elif row:
            yield row
            row = []
    if row:
        yield row


def _odd_one(row: list[_Call], readers: dict[int, list[int]], kept: Collection[int]) -> _Call | None:
    """Return a call of a list of tensors that lies inside of the row in part only; or None."""
    lists = {call.out for call in row if call.op.gives == "List[Tensor]"}
    end = row[-1].place
    for call in row:
        if call.out in lists and (call.out in kept or any(place > end for place in readers.get(call.out, ()))):
            return call
        for kind, value in call.arguments:
            if kind == _TENSORS and type(value) is Register and value.index not in lists:
                return call
            if kind in (_TENSOR, _OPTIONAL_TENSOR) and type(value) is Register and value.index in lists:
                return call
    return None


class NativeCalls:
    """A run of calls that the library makes.

    Args:
        path: of the library.
        device: of the library, ``"cpu"`` or ``"cuda"``.
        row: the calls.
        readers: of each register the places of the calls that read it.
        kept: see :func:`runs_of`.
        makers: registers that calls of the program fill.

    Attributes:
        device: see above.
        begin, end: places of the first call, and behind the last one.
        on: a tensor on the device that the calls read, and that is known already; None if there is none.

    Raises:
        RuntimeError: the library refuses the calls; that is a fault of this package.
    """

    def __init__(
        self,
        path: str,
        device: str,
        row: list[_Call],
        readers: dict[int, list[int]],
        kept: Collection[int],
        makers: Collection[int],
    ):
        self.device, self.begin, self.end = device, row[0].place, row[-1].place + 1
        made = {call.out: call for call in row}
        taken = list(dict.fromkeys(index for call in row for index in call.reads() if index not in made))
        self._given = [index for index in taken if index in makers]  # another call of the program fills it anew
        self._watched = [index for index in taken if index not in makers]
        self._results = [
            call.out
            for call in row
            if call.op.gives == "Tensor"
            and (call.out in kept or call.out not in readers or self._is_read_outside(readers[call.out]))
        ]
        self._constants: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # register of the program, or id of a constant -> register of the list
        self._last: list[Any] | None = None  # what is held of the watched registers
        said, library = self._described(row), call_lists.functions_of(path)
        self._handle = call_lists.make(path, list(said.names), said.code, said.reals)
        self.on = next((each for each in self._constants if each.device.type == device), None)
        self._release_calls = library.hf_fastpath_release_calls
        weakref.finalize(self, library.hf_fastpath_drop_calls, self._handle)

    def _is_read_outside(self, places: list[int]) -> bool:
        return any(place < self.begin or place >= self.end for place in places)

    def _described(self, row: list[_Call]) -> _Numbers:
        numbers = self._numbers
        for index in (*self._watched, *self._given, *(call.out for call in row)):
            numbers.setdefault(index, len(numbers))
        constants: dict[int, int] = {}

        def register(value: Any) -> int:
            if type(value) is Register:
                return numbers[value.index]
            if id(value) not in constants:
                constants[id(value)] = len(numbers) + len(constants)
                self._constants.append(value)
            return constants[id(value)]

        said = _Numbers()
        last = {numbers[index]: call for call in row for index in (call.out, *call.reads())}
        stays = {numbers[index] for index in (*self._results, *self._watched)}
        calls: list[int] = []
        for call in row:
            calls += [said.names.setdefault(call.op.name, len(said.names)), numbers[call.out], len(call.arguments)]
            for kind, value in call.arguments:
                calls += _encoded(kind, value, register, said.reals)
            seen = dict.fromkeys(numbers[index] for index in (call.out, *call.reads()))
            done = [each for each in seen if last[each] is call and each not in stays]
            calls += [len(done), *done]
        held = [*(numbers[index] for index in self._watched), *constants.values()]
        said.code = [len(numbers) + len(constants), len(held), *held]
        for group in (self._given, self._results):
            said.code += [len(group), *(numbers[index] for index in group)]
        said.code += [len(row), *calls]
        return said

    def run(self, values: list[Any], times: torch.Tensor | None = None, emptied: Collection[int] = ()) -> bool:
        """Make the calls.

        Args:
            values: of the program's registers.
            emptied: registers that no later call of the program reads: the library alone lets go of what they hold,
                behind the last call that reads it.
            times: int64 [calls + 1] in host memory or None; gets nanoseconds at the begin and behind each call.

        Returns:
            Whether the calls were made: the library takes plain tensors on its device alone.
        """
        watched = [values[index] for index in self._watched]
        if self._last is None or not all(map(operator.is_, watched, self._last)):
            if not self._hold(watched):
                return False
        given = [values[index] for index in self._given]
        if not all(_is_taken(each, self.device) for each in given):
            return False
        if emptied:
            _give_to_calls(self.on, given, self._handle)
            given = []
            for index in emptied:
                values[index] = None
        results: Sequence[torch.Tensor] = ()
        try:
            results = _run_calls(self.on, given, self._handle, times)
        except BaseException:
            results = _left_by_calls(self.on, self._handle)  # of the calls in front of the one that has failed
            raise
        finally:
            for index, result in zip(self._results, results):
                values[index] = None if index in emptied else result
        return True

    def _hold(self, watched: list[Any]) -> bool:
        """Give the library what stays from run to run."""
        tensors = [*watched, *self._constants]
        self._last = None
        if not all(_is_taken(each, self.device) for each in tensors):
            return False
        _hold_in_calls(self.on, tensors, self._handle)
        self._last = watched
        return True

    def release(self) -> None:
        """Let go of all tensors that the library holds."""
        if self._last is not None:
            self._last = None
            self._release_calls(self._handle)


def _is_taken(value: Any, device: str) -> bool:
    """Whether the library takes a value; a step on a GPU also has tensors in host memory, which ops check."""
    return type(value) in PLAIN_TENSORS and (value.is_cpu or (device == "cuda" and value.is_cuda))


def _encoded(kind: int, value: Any, register: Callable[[Any], int], reals: list[float]) -> list[int]:
    """Return an argument as numbers."""
    if kind == _ABSENT:
        return [_ABSENT]
    if kind in (_TENSOR, _OPTIONAL_TENSOR):
        return [kind, register(value)]
    if kind == _TENSORS and type(value) is Register:
        return [kind, -1, register(value)]
    if kind == _TENSORS:
        return [kind, len(value), *map(register, value)]
    if kind == _INTS:
        return [kind, len(value), *map(int, value)]
    if kind in (_FLOAT, _FLOATS):
        each = value if kind == _FLOATS else [value]
        reals += map(float, each)
        places = range(len(reals) - len(each), len(reals))
        return [kind, *([len(each)] if kind == _FLOATS else []), *places]
    return [kind, int(value)]
