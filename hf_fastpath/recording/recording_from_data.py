"""Recordings out of the data that :mod:`.recording_as_data` makes of them. Nothing that is read is evaluated or run."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import choices
from ..decode.calls.named_calls import Call, Register
from ..decode.state.named_walk import names_of_tensors
from ..quantization import FORMATS
from . import formulas_as_data, marks
from .errors import NotData
from .fake_mode import FakeMode
from .numbers_of_lengths import FloatOfLength, IntOfLength
from .recorded_step import MadeOfModel, Recording
from .recording_as_data import MADE, OF_TORCH, OPS
from .skeleton import home
from .text_lengths import Served
from .token_rows import ROWS


def from_data(data: dict[str, Any], model: nn.Module) -> Recording:
    """Return a recording of a model as it is now.

    Args:
        data: what :func:`to_data` gave for a model with tensors of the same names, shapes, types and devices.

    Raises:
        NotData: it is no such data.
    """
    try:
        return _Reader(data, model).whole()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NotData(f"{type(error).__name__}: {error}") from error


class _Reader:
    def __init__(self, data: dict[str, Any], model: nn.Module):
        self._data, self._model, self._device = data, model, home(model)
        names = names_of_tensors(model)
        held = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._tensors = {name: held[index] for index, name in names.items() if index in held}
        self._registers: dict[int, Register] = {}
        self._mode = FakeMode()
        self._kinds = [self._like(each) for each in data["kinds"]]
        self._stand_ins: list[tuple[torch.Tensor, Any]] = []
        self._memories: list[torch.Tensor | None] = []
        symbol = formulas_as_data.symbol
        self._symbols = {"rows": ROWS} | {name: symbol(name) for name in ("past", "encoded", "new")}

    def whole(self) -> Recording:
        data = self._data
        for shape, dtype, weight in data["stand_ins"]:
            matrix = torch.empty(shape, dtype=_of_torch(dtype), device="meta")
            self._stand_ins.append((matrix, self.value(weight)))
        for each in data["values"]:  # memory first, as one may be made of another
            self._memories.append(self._empty(each["memory"]) if "memory" in each else None)
        values = [self._value_of_model(*each) for each in zip(data["values"], self._memories)]
        others = {"stand_ins", "values", "masks", "open_masks", "mutated", "served", "facts", "kinds"}
        found = {name: self.value(each) for name, each in data.items() if name not in others}
        return Recording(
            **found,
            facts={index: self._fact(each) for index, each in enumerate(data["facts"])},
            spans=[],
            masks={index: self.value(window) for index, window in data["masks"]},
            open_masks=frozenset(data["open_masks"]),
            mutated=set(data["mutated"]),
            values=values,
            stand_ins=self._stand_ins,
            served=self._served(data["served"]),
        )

    def _served(self, data: Any) -> Served | None:
        if data is None:
            return None
        conditions = ((formulas_as_data.from_data(each, self._symbols), str(line)) for each, line in data["conditions"])
        new = self._symbols["new"] if data["new"] else None
        return Served(self._symbols["past"], self._symbols["encoded"], tuple(conditions), new)

    def _value_of_model(self, data: Any, memory: torch.Tensor | None) -> Any:
        if memory is None:
            return self.value(data)
        return MadeOfModel(self.value(data["register"]), self.value(data["calls"]), memory)

    def value(self, data: Any) -> Any:
        """Return the value that :meth:`_Writer.data` was given."""
        if isinstance(data, list):
            return [self.value(each) for each in data]
        if not isinstance(data, dict):
            return data
        ((kind, inside),) = data.items()
        return _READ[kind](self, inside)

    def _register(self, index: int) -> Register:
        if not 0 <= index < len(self._data["facts"]):
            raise NotData("a register that there is not")
        return self._registers.setdefault(index, Register(index))

    def _of_length(self, data: Any) -> Any:
        number, formula = data
        made: Any = FloatOfLength(number) if isinstance(number, str) else IntOfLength(number)
        made.formula = formulas_as_data.from_data(formula, self._symbols)
        return made

    def _call(self, data: Any) -> Call:
        op, arguments, out = data
        return Call(_op_of(op), {name: self.value(each) for name, each in arguments.items()}, self._register(out))

    def _made(self, data: Any) -> Any:
        name, inside = data
        return MADE[name](**{field: self.value(each) for field, each in inside.items()})

    def _fact(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self._fact(each) for each in data]
        return None if data is None else self._kinds[data]

    def _like(self, kind: Any) -> torch.Tensor:
        dtype, shape, stride, place = kind
        device = self._device if place == "model" else torch.device(place)
        made = torch.empty_strided(shape, stride, dtype=_of_torch(dtype), device="meta")
        return self._mode.claimed(made, device)

    def _empty(self, kind: int) -> torch.Tensor:
        like = self._kinds[kind]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _view_of(self, base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
        return base.detach().as_strided(size, stride, offset)

    def _view(self, data: Any) -> torch.Tensor:
        name, dtype, size, stride, offset = data
        base = self._tensors[name].detach().view(_of_torch(dtype))
        return self._view_of(base, size, stride, base.storage_offset() + offset)

    def _memory(self, data: Any) -> torch.Tensor:
        place, *view = data
        base = self._memories[place]
        assert base is not None, "a value of the model that has memory"
        is_whole = (list(base.shape), list(base.stride()), 0) == (view[0], view[1], view[2])
        return base if is_whole else self._view_of(base, *view)

    def _stand_in(self, data: Any) -> torch.Tensor:
        place, *view = data
        base = self._stand_ins[place][0]
        return self._view_of(base, *view)

    def _numbers(self, data: Any) -> torch.Tensor:
        kind, numbers = data
        made = self._empty(kind)
        flat = torch.from_numpy(np.frombuffer(bytes.fromhex(numbers), dtype=np.uint8).copy())
        return made.copy_(flat.view(made.dtype).reshape(made.shape))


_READ: dict[str, Callable[[_Reader, Any], Any]] = {
    "float": lambda reader, data: float(data),
    "register": _Reader._register,
    "of_length": _Reader._of_length,
    "chunk": lambda reader, data: marks.Chunk(data),
    "tuple": lambda reader, data: tuple(reader.value(each) for each in data),
    "dict": lambda reader, data: {reader.value(name): reader.value(each) for name, each in data},
    "choice": lambda reader, data: _choice(*data),
    "torch": lambda reader, data: _of_torch(data),
    "device": lambda reader, data: reader._device if data == "model" else torch.device(data),
    "tensor": lambda reader, data: reader._tensors[data],
    "view": _Reader._view,
    "memory": _Reader._memory,
    "stand_in": _Reader._stand_in,
    "numbers": _Reader._numbers,
    "module": lambda reader, data: reader._model.get_submodule(data),
    "call": _Reader._call,
    "format": lambda reader, data: FORMATS[data],
    "made": _Reader._made,
}


def _op_of(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    if name.startswith("mark "):
        op = getattr(marks, name.removeprefix("mark "))
        if not marks.is_mark(op):
            raise NotData(f"{name!r} is none")
        return op
    namespace, packet, overload = name.split(".")
    if namespace not in OPS:
        raise NotData(f"an op of {namespace!r}")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _of_torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, OF_TORCH):
        raise NotData(f"torch.{name} is no type")
    return found


def _choice(kind: str, name: str) -> Any:
    found = getattr(choices, kind)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise NotData(f"{kind!r} is no choice")
    return found[name]
