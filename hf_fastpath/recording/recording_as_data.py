"""Recordings as data: numbers, names and lists, of which a later process makes the same recording again.

Tensors of the model are known by their names, its modules by theirs, calls by the names of ops and marks. Where a
recording holds anything else, it is no data, and the step is recorded in each process. What reads the data is
:mod:`.recording_from_data`.
"""

from __future__ import annotations

import enum
import math
import operator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .. import choices, compat
from ..decode.calls.named_calls import Call, HeadNorms, Norm, Register
from ..decode.model.weight import AdaptedWeight, Adapter, PlainWeight
from ..decode.state.named_walk import names_of_tensors
from ..quantization.formats import Format, InputRounding, PackedWeight, ReorderedWeight, RoundedInputWeight
from . import formulas_as_data, marks
from .errors import NotData
from .numbers_of_lengths import FloatOfLength, IntOfLength, sizes_of
from .passes.angle_formulas import AngleFormula
from .recorded_step import BiasTable, EncodedLayer, MadeOfModel, Recording
from .skeleton import home
from .text_lengths import Served
from .token_rows import ROWS

#: namespaces of PyTorch's own ops
OPS = "aten", "prims"
#: most bytes of a tensor of a recording's own
_MOST_BYTES = 1 << 16
_PLAIN = type(None), bool, int, str
#: values that are made of their fields
MADE = {
    each.__name__: each
    for each in (
        *(Norm, HeadNorms, AngleFormula, EncodedLayer, PlainWeight, Adapter, AdaptedWeight, PackedWeight),
        *(BiasTable, MadeOfModel, Call, ReorderedWeight, RoundedInputWeight, InputRounding),
    )
}
#: attributes of a recording that passes alone read
_OF_PASSES = "spans", "live"
#: kinds of values that are attributes of ``torch``
OF_TORCH = torch.dtype, torch.layout, torch.memory_format


def to_data(recording: Recording, model: nn.Module) -> dict[str, Any]:
    """Return a recording, behind all passes, as what JSON holds.

    Args:
        model: of which it was made.

    Raises:
        NotData: something in it is no data.
    """
    return _Writer(recording, model).whole()


class _Writer:
    def __init__(self, recording: Recording, model: nn.Module):
        self._recording, self._device = recording, home(model)
        self._names = names_of_tensors(model)
        self._modules = {id(module): path for path, module in model.named_modules()}
        named = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._bases: dict[int, torch.Tensor] = {}  # storage -> the first named tensor with it
        for index in self._names:
            if index in named and not named[index].is_meta:
                self._bases.setdefault(compat.memory_of(named[index]), named[index])
        self._stand_ins = {compat.memory_of(matrix): place for place, (matrix, _) in enumerate(recording.stand_ins)}
        self._made_of_model = {
            compat.memory_of(each.tensor): place
            for place, each in enumerate(recording.values)
            if isinstance(each, MadeOfModel)
        }
        self._registers: dict[int, int] = {}  # as it is numbered now -> its number in the data
        self._facts: list[Any] = []  # of registers, as places of kinds
        self._kinds: dict[tuple, int] = {}
        served = recording.served
        self._symbols = {ROWS: "rows"}
        if served is not None:
            found = {"past": served.past, "encoded": served.encoded, "new": served.new}
            self._symbols |= {symbol: name for name, symbol in found.items() if symbol is not None}

    def whole(self) -> dict[str, Any]:
        recording = self._recording
        left_out = {*_OF_PASSES, "facts", "masks", "open_masks", "mutated", "served", "values", "stand_ins"}
        stand_ins = [
            (list(matrix.shape), str(matrix.dtype)[6:], self.data(weight)) for matrix, weight in recording.stand_ins
        ]
        found: dict[str, Any] = {"stand_ins": stand_ins}
        found["values"] = [self._value_of_model(each) for each in recording.values]
        for each in fields(recording):
            if each.init and each.name not in left_out:
                found[each.name] = self.data(getattr(recording, each.name))
        known = self._registers  # what lies behind is no part of the step
        masks = ((index, window) for index, window in recording.masks.items() if index in known)
        found["masks"] = [[known[index], self.data(window)] for index, window in masks]
        for name in ("open_masks", "mutated"):
            found[name] = sorted(known[index] for index in getattr(recording, name) if index in known)
        found["served"] = self._served(recording.served)
        found["facts"], found["kinds"] = self._facts, list(map(list, self._kinds))
        return found

    def _served(self, served: Served | None) -> Any:
        if served is None:
            return None
        conditions = [[formulas_as_data.to_data(each, self._symbols), line] for each, line in served.conditions]
        return {"conditions": conditions, "new": served.new is not None}

    def _value_of_model(self, value: BiasTable | MadeOfModel) -> Any:
        if not isinstance(value, MadeOfModel):
            return self.data(value)
        kind = self._kind(value.tensor)
        return {"memory": kind, "register": self.data(value.register), "calls": self.data(value.calls)}

    def data(self, value: Any) -> Any:
        """Return a value as data.

        Raises:
            NotData: it is none.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is Register:
            return {"register": self._register(value)}
        if kind in (IntOfLength, FloatOfLength):
            number = repr(float(value)) if kind is FloatOfLength else int(value)
            return {"of_length": [number, formulas_as_data.to_data(value.formula, self._symbols)]}
        if kind is marks.Chunk:
            return {"chunk": int(value)}
        if kind in (list, torch.Size):
            return [self.data(each) for each in value]
        if kind is tuple:
            return {"tuple": [self.data(each) for each in value]}
        if kind is dict:
            return {"dict": [[self.data(name), self.data(each)] for name, each in value.items()]}
        if isinstance(value, enum.Enum) and getattr(choices, kind.__name__, None) is kind:
            return {"choice": [kind.__name__, value.name]}
        if isinstance(value, OF_TORCH):
            return {"torch": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": self._place(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return {"module": self._modules[id(value)]}
        if kind is Call:
            arguments = {name: self.data(each) for name, each in value.arguments.items()}
            return {"call": [_name_of_op(value.op), arguments, self._register(value.out)]}
        if kind is Format:
            return {"format": value.name}
        if MADE.get(kind.__name__) is kind and is_dataclass(value):
            return {
                "made": [kind.__name__, {each.name: self.data(getattr(value, each.name)) for each in fields(value)}]
            }
        raise NotData(f"a value of {kind.__module__}.{kind.__qualname__}")

    def _register(self, register: Register) -> int:
        if register.index not in self._registers:
            self._registers[register.index] = len(self._facts)
            self._facts.append(None)
            self._facts[-1] = self._fact(self._recording.facts.get(register.index))
        return self._registers[register.index]

    def _fact(self, fact: Any) -> Any:
        if isinstance(fact, torch.Tensor):
            return self._kind(fact)
        if isinstance(fact, (list, tuple)):
            return [self._fact(each) for each in fact]
        if fact is None:
            return None
        raise NotData(f"a register of {type(fact).__name__}")

    def _kind(self, tensor: torch.Tensor) -> int:
        """Return the place of what a tensor is but for its numbers."""
        if tensor.layout is not torch.strided:
            raise NotData(f"a tensor of layout {tensor.layout}")
        shape, stride = map(tuple, sizes_of(tensor))
        device = "model" if isinstance(tensor, FakeTensor) or tensor.is_meta else self._place(tensor.device)
        kind = str(tensor.dtype)[6:], shape, stride, device
        return self._kinds.setdefault(kind, len(self._kinds))

    def _place(self, device: torch.device) -> str:
        if device == self._device or (device.type == self._device.type and device.index is None):
            return "model"
        if device.type == "cpu":
            return "cpu"
        raise NotData(f"a tensor on {device}")

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if (name := self._names.get(id(tensor))) is not None:
            return {"tensor": name}
        if isinstance(tensor, FakeTensor) or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise NotData(f"a tensor of {type(tensor).__name__}")
        memory = compat.memory_of(tensor)
        if tensor.is_meta:
            if memory not in self._stand_ins:
                raise NotData("a tensor without data")
            return {"stand_in": [self._stand_ins[memory], *_view(tensor)]}
        if memory in self._made_of_model:
            return {"memory": [self._made_of_model[memory], *_view(tensor)]}
        base = self._bases.get(memory)
        if base is not None and base.itemsize == tensor.itemsize:  # scales are bits of integers, for one
            size, stride, offset = _view(tensor)
            return {
                "view": [self._names[id(base)], str(tensor.dtype)[6:], size, stride, offset - base.storage_offset()]
            }
        if memory in self._recording.live:  # an edit in place is to be seen
            raise NotData("a tensor of the model's that is neither a parameter nor a buffer")
        if base is not None or tensor.nbytes > _MOST_BYTES:
            raise NotData(f"a tensor of {tensor.nbytes} bytes of its own")
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"numbers": [self._kind(tensor), numbers.hex()]}


def _view(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    return list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())


def _name_of_op(op: Any) -> str:
    if op is operator.getitem:
        return "getitem"
    if isinstance(op, torch._ops.OpOverload) and op.namespace in OPS:
        return str(op)
    if getattr(marks, name := getattr(op, "__name__", ""), None) is op and marks.is_mark(op):
        return f"mark {name}"
    raise NotData(f"a call of {name or op}")
