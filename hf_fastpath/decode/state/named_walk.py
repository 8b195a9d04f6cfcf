"""Python values that a forward may read, known by names and contents that are the same in every process."""

from __future__ import annotations

import functools
import hashlib
import logging
import marshal
import threading
import types
import weakref
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ... import compat
from .python_state import OF_CLASSES, PLAIN, ROWS, Walk

#: plain tensors of more bytes have no name of their own
_MOST_BYTES = 1 << 16
#: characters of a hash of one of many values
_SHORT = 16
#: objects that nothing is computed with
_BOOKKEEPING = type(threading.Lock()), type(threading.RLock()), weakref.WeakSet
#: decorators whose objects hold nothing but the mode that was there before
_MODES = torch.no_grad, torch.enable_grad, torch.inference_mode
#: kinds of values whose text is all that they are
_TEXTS = types.GenericAlias, types.UnionType, torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic
#: what classes of built-in types hold
_DESCRIPTORS = (
    *(types.MethodDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, types.MemberDescriptorType),
)
#: the package whose frozen dataclasses are known by what they hold
_OWN = "hf_fastpath."
_PARAMS = "__dataclass_params__"
#: id of code -> the code and its hash
_digests: dict[int, tuple[types.CodeType, str]] = {}


class Unnamed(Exception):
    """A value of which another process could not tell whether it has the same."""


class NamedWalk(Walk):
    """A walk that knows modules and their tensors by where they are in a model, code by what it does, and other objects
    by their names.

    Args:
        model: whose modules and tensors have names.

    Attributes:
        unnamed: a value without a name, or None.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.unnamed: str | None = None
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._names = names_of_tensors(model)
        self._memories: dict[int, tuple[str, int]] = {}  # storage -> the first tensor with it, and where it begins

    def digest(self) -> str:
        """Return a hash of all values.

        Raises:
            Unnamed: one has no name that is the same in every process.
        """
        self._check()
        return _hash(self.values)

    def digests(self) -> dict[str, str]:
        """Return where each value is -> a hash of it.

        Raises:
            Unnamed: see :meth:`digest`.
        """
        self._check()
        return {where: _hash(value)[:_SHORT] for where, value in self.values.items()}

    def _check(self) -> None:
        if self.unnamed is not None:
            raise Unnamed(self.unnamed)

    def functions_of(self, configs: Iterable[Any]) -> None:
        """Freeze the functions that configurations of the model choose."""
        self.note("functions of the configuration", compat.functions_of_configs(configs))

    # ---- what the base class knows by its identity --------------------------------------------------------------

    def _identity(self, value: Any) -> Any:
        self._kept.append(value)
        if (named := _name_of(value)) is not None:
            return named
        if isinstance(value, property):
            return "property", [self.frozen(each) for each in (value.fget, value.fset, value.fdel)]
        if isinstance(value, (classmethod, staticmethod)):
            return type(value), self.frozen(value.__func__)
        if isinstance(value, functools.cached_property):
            return type(value), self.frozen(value.func)
        if isinstance(value, types.FunctionType):
            return self._code(value.__code__)
        if type(value).__module__.startswith(_OWN) and is_dataclass(value) and getattr(type(value), _PARAMS).frozen:
            return type(value), [(each.name, self.frozen(getattr(value, each.name))) for each in fields(value)]
        if _holds_nothing(type(value)):
            return type(value)
        self.unnamed = self.unnamed or f"a value of {type(value).__module__}.{type(value).__qualname__}"
        return "unnamed"

    def _freeze_class(self, cls: type, by_identity: bool = False) -> None:
        if not by_identity:
            super()._freeze_class(cls)
            return
        self._classes.add(cls)
        entries = [(name, _entry(value)) for name, value in list(vars(cls).items()) if name not in OF_CLASSES]
        self.values[f"{cls.__module__}.{cls.__qualname__}"] = entries

    def _child(self, module: nn.Module | None) -> Any:
        return None if module is None else self._paths.get(id(module), type(module))

    def _code(self, code: types.CodeType) -> Any:
        return digest_of_code(code)

    def _contents(self, value: Any, where: str) -> Any:
        found = super()._contents(value, where)
        if isinstance(value, (set, frozenset)) and isinstance(found, tuple):  # in an order of this process
            return sorted(map(repr, found[0])), found[1]
        return found

    def _frozen_tensor(self, value: torch.Tensor) -> Any:
        self.tensors[id(value)] = value
        facts = str(value.dtype), value.device.type, str(value.layout), tuple(value.shape)
        name = self._names.get(id(value))
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            self.unnamed = self.unnamed or f"a {type(value).__name__} of layout {value.layout}"
        elif name is not None:
            if value.is_meta:
                return name, facts, value.stride()
            offset = int(value.storage_offset())
            first, begin = self._memories.setdefault(compat.memory_of(value), (name, offset))
            return name, facts, value.stride(), first, offset - begin
        elif value.nbytes <= _MOST_BYTES and not value.is_meta:
            return facts, value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            self.unnamed = self.unnamed or f"a tensor of {value.nbytes} bytes that is no parameter and no buffer"
        return "unnamed"


def _holds_nothing(cls: type) -> bool:
    """Whether objects of a class have neither attributes nor slots; from Python 3.12 on, attributes add nothing to an
    object's size."""
    return cls.__basicsize__ == object.__basicsize__ and not cls.__dictoffset__ and not cls.__itemsize__


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogatepass")).hexdigest()


def _entry(value: Any) -> Any:
    """Return what is known of an entry of a class: code, numbers and texts, and of others the type."""
    if codes := [each.__code__ for each in compat.functions_of(value) if isinstance(each, types.FunctionType)]:
        return type(value), list(map(digest_of_code, codes))
    if isinstance(value, (*ROWS, dict)):
        inside = list(map(_entry, value.items() if isinstance(value, dict) else value))
        return type(value), sorted(map(repr, inside)) if isinstance(value, (set, frozenset)) else inside
    return (type(value), repr(value)) if type(value) in (*PLAIN, float) else type(value)


def names_of_tensors(model: nn.Module) -> dict[int, str]:
    """Return a dict of id of a parameter or buffer -> its first name."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    found.setdefault(id(tensor), f"{path}.{name}" if path else name)
    return found


def digest_of_code(code: types.CodeType) -> str:
    """Return a hash of what code does, and of where it stands."""
    if id(code) not in _digests:
        digest = hashlib.sha256(marshal.dumps(code, 2)).hexdigest()  # without marks of objects that are shared just now
        _digests[id(code)] = code, digest
    return _digests[id(code)][1]


def _name_of(value: Any) -> Any:
    """Return what an object is called in every process, or None."""
    if isinstance(value, type):
        return "type", value.__module__, value.__qualname__
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        is_free = owner is None or isinstance(owner, (types.ModuleType, type))
        return ("built-in", value.__module__, value.__qualname__) if is_free else None
    if isinstance(value, _DESCRIPTORS):
        return "built-in", value.__objclass__.__module__, value.__objclass__.__qualname__, value.__name__
    if isinstance(value, logging.Logger):
        return type(value).__qualname__, value.name
    if isinstance(value, _TEXTS) or type(value).__module__ == "typing":
        return type(value).__qualname__, repr(value)
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "op", str(value)
    if isinstance(value, (*_BOOKKEEPING, *_MODES)):
        return type(value).__qualname__
    return None
