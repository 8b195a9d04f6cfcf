"""What of PyTorch's own may stand between a call and its result: modes that see every call, and replaced functions."""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.utils.flop_counter
import typing_extensions
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import (
    _pop_mode as _pop_dispatch_mode,
)
from torch.utils._python_dispatch import (
    _push_mode as _push_dispatch_mode,
)

from .code import name_of, names_read
from .folders import folders_of
from .imported import functions_of

#: errors that say nothing of a model: there may be more memory next time
OUT_OF_MEMORY = MemoryError, torch.OutOfMemoryError
#: modes that change no result, and whose counts nobody takes for those of a fast call
_HARMLESS = (DeviceContext, torch.utils.flop_counter._FlopCounterMode)
#: where the functions are that forwards and loops call
_SPACES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.nn.functional", nn.functional),
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.Module", nn.Module),
)
#: transformers adds a method to ``nn.Module``
_FOLDERS = (*folders_of("torch"), *folders_of("transformers"))
#: what PyTorch takes from Python, and its decorator for what is deprecated
_OF_PYTHON = Path(typing.__file__), Path(typing_extensions.__file__)
_FILES = frozenset(map(str, chain.from_iterable((each, each.resolve()) for each in _OF_PYTHON)))
#: modules of transformers whose functions run for every token, beside those of a model
_SHARED = (
    "transformers.generation.utils",
    "transformers.generation.logits_process",
    "transformers.generation.stopping_criteria",
    "transformers.activations",
    "transformers.integrations.moe",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "torch.nn.functional",
)
#: functions that these modules name and no forward calls
_NEVER_CALLED = frozenset({"compile", "load", "save", "__repr__", "__deepcopy__", "__reduce_ex__"})
#: namespaces and the values that they held, and which functions in them are not PyTorch's: (namespace, name, function)
_seen: list[tuple[Any, list[Any]]] = []
_replaced: list[tuple[str, str, Any]] = []


def foreign_mode() -> str | None:
    """Return the class of a mode that has to see or change every call of PyTorch's, or None."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return None
    found = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return next((name_of(type(each)) for each in found if not _is_harmless(each)), None)


def _is_harmless(mode: Any) -> bool:
    return isinstance(mode, _HARMLESS) or type(mode).__module__.startswith("hf_fastpath.")


@contextmanager
def without_foreign_modes() -> Iterator[None]:
    """Switch such modes off for the length of a ``with`` block."""
    if foreign_mode() is None:
        yield
        return
    functions, dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
    for _ in functions:
        _pop_mode()
    for _ in dispatches:
        _pop_dispatch_mode()
    kept = [each for each in functions if _is_harmless(each)]
    for each in kept:
        _push_mode(each)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for each in functions:
            _push_mode(each)
        for each in dispatches:
            _push_dispatch_mode(each)


def _is_of_torch(value: Any) -> bool:
    """Whether a function is a builtin of PyTorch's, or Python code in its folder or transformers'."""
    if isinstance(value, (type, types.ModuleType)) or not callable(value):
        return True  # classes are told by what models hold
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is not None:
        return code.co_filename.startswith(_FOLDERS) or code.co_filename in _FILES
    if isinstance(value, functools._lru_cache_wrapper):
        return _is_of_torch(value.__wrapped__)
    if isinstance(value, functools.partial):
        return _is_of_torch(value.func)
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        homes = [value.__module__, type(owner).__module__]
        homes += [owner.__name__] if isinstance(owner, types.ModuleType) else [getattr(owner, "__module__", None)]
        return any(str(home).partition(".")[0] in ("torch", "_operator") for home in homes)
    return type(value).__module__.partition(".")[0] in ("torch", "builtins", "typing", "typing_extensions")


def _look() -> list[tuple[str, str, Any]]:
    """Return the functions in PyTorch's namespaces that are not its own, as (namespace, name, function)."""
    # values are compared in their order, which takes a third of what dictionaries take
    if not _seen or any(list(space.values()) != before for space, before in _seen):
        _seen[:] = [(vars(space), list(vars(space).values())) for _, space in _SPACES]
        _replaced[:] = [
            (where, name, value)
            for where, space in _SPACES
            for name, value in list(vars(space).items())
            if not _is_of_torch(value)
        ]
    return _replaced


@functools.lru_cache(maxsize=256)
def _names_in(module: str) -> frozenset[str]:
    """Return the names that functions and methods of a module read."""
    found: set[str] = set()
    for value in list(vars(sys.modules.get(module, types.ModuleType(module))).values()):
        if getattr(value, "__module__", None) != module:
            continue
        for each in vars(value).values() if isinstance(value, type) else [value]:
            function = functions_of(each)[0]
            while function is not None:
                if (code := getattr(function, "__code__", None)) is not None:
                    found |= names_read(code)
                function = getattr(function, "__wrapped__", None)
    return frozenset(found)


def replaced_function(model: nn.Module) -> str | None:
    """Return which function of PyTorch's that a model's forward or ``generate()`` may call is another one now, and what
    has taken its place; None if there is none."""
    if not (found := _look()):
        return None
    names = set().union(*map(_names_in, {*_SHARED, *(type(each).__module__ for each in model.modules())}))
    for where, name, value in found:
        is_called = name in names or (where == "torch.nn.Module" and name.startswith("__"))
        if is_called and name not in _NEVER_CALLED:
            return f"{where}.{name} is {name_of(value)}"
    return None
