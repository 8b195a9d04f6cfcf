"""Functions and forwards: who defined them, what wraps them, and which threads run them."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.nn.modules import module as torch_module
from transformers.generation import GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from .imported import functions_of

#: packages whose functions our ops were compared with; ``kernels`` wraps functions of transformers
_LIBRARIES = ("transformers", "torch", "kernels")
#: (id of a function, its second home) -> the function, if it is known; kept because every call asks for every module
_known_code: dict[tuple[int, str], Callable[..., Any]] = {}


def is_known_code(function: Callable[..., Any] | None, home: str = "") -> bool:
    """Whether transformers, torch or ``home`` defines a function, and every function that its decorators wrap.

    Args:
        home: module of the model's architecture, whose code ``patch()`` may have compared with a listed one's.
    """
    key, outermost = (id(function), home), function
    if function is None or _known_code.get(key) is function:
        return True
    while function is not None:
        if isinstance(function, nn.Module):  # a function that ``kernels`` may replace by one from the hub
            function = vars(function).get("forward", type(function).forward)
        function = getattr(function, "func", function)  # functools.partial
        defined_in = getattr(function, "__globals__", {}).get("__name__", "")
        if defined_in != home and defined_in.partition(".")[0] not in _LIBRARIES:
            return False
        function = getattr(function, "__wrapped__", None)
    if not isinstance(outermost, nn.Module):  # a module is not remembered, because its forward may change
        _known_code[key] = outermost
    return True


def is_all_known(model: nn.Module) -> bool:
    """Whether all modules of a model run code of transformers, torch or ours."""
    return all(map(_is_known_module, model.modules()))


def _is_known_module(module: nn.Module) -> bool:
    held = vars(module).get("forward")
    is_known = held is None or is_ours(held) or is_known_code(held)
    return is_known and is_known_code(type(module).forward, "hf_fastpath.linears.packed_linear")


def is_wrapped_by(function: Callable[..., Any] | None, outer: Callable[..., Any] | None) -> bool:
    """Whether ``function`` is ``outer``, or a function that a decorator of ``outer`` wraps."""
    while outer is not None and outer is not function:
        outer = getattr(outer, "__wrapped__", None)
    return outer is not None


def name_of(function: Any) -> str:
    """Return where a function, method or callable is defined, as a user may look for it."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):  # a wrapper has taken on the wrapped name
        code = function.__code__
        return f"{function.__globals__.get('__name__', 'somewhere')}.{getattr(code, 'co_qualname', code.co_name)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def is_ours(function: Any) -> bool:
    """Whether a function is one that ``patch()`` binds, and no wrapper of other code that has taken on its name."""
    is_wrapper = getattr(function, "__wrapped__", None) is not None
    return not is_wrapper and getattr(function, "__module__", "").startswith("hf_fastpath.")


def converted_to_float32(function: Any) -> Any:
    """Return the forward that accelerate's ConvertOutputsToFp32 wraps; None for any other function."""
    known = type(function).__module__ == "accelerate.utils.operations"
    return function.model_forward if known and type(function).__name__ == "ConvertOutputsToFp32" else None


def run_under_autocast(function: Any) -> Any:
    """Return the function that ``torch.autocast`` has decorated; None for any other function."""
    code = getattr(function, "__code__", None)
    if code is None or code not in (found for found in _AUTOCAST_CODE.co_consts if hasattr(found, "co_code")):
        return None
    return function.__closure__[code.co_freevars.index("func")].cell_contents


_AUTOCAST_CODE = autocast_mode.autocast_decorator.__code__


def _does_nothing(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of transformers' or PyTorch's that has no effect on a forward without gradients."""
    # The first output_hidden_states=True leaves these hooks on the modules; alone they do nothing.
    # FlopCounterMode tracks in which module an operator is called.
    if getattr(hook, "__module__", None) in (output_capturing.__name__, "torch.utils.module_tracker"):
        return True
    # The hook of enable_input_require_grads() comes with activation checkpointing.
    name = getattr(hook, "__qualname__", "")
    return is_known_code(hook) and name.endswith("enable_input_require_grads.<locals>.make_inputs_require_grads")


def hook_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a hook with an effect that calling ``module`` without gradients would run, or None."""
    contents = module.__dict__
    of_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    if not contents["_forward_hooks"] and not contents["_forward_pre_hooks"] and not any(of_all):
        return None
    return next(chain(hooks_with_effect(contents), _hooks_of_all()), None)


def _hooks_of_all() -> Iterator[Callable[..., Any]]:
    """Yield the hooks of all modules that have an effect on a forward without gradients."""
    of_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return (hook for hooks in of_all for hook in hooks.values() if not _does_nothing(hook))


def hooks_with_effect(contents: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Yield the hooks among the ``contents`` of a module that have an effect on a forward without gradients."""
    hooks = chain(contents["_forward_hooks"].values(), contents["_forward_pre_hooks"].values())
    return (hook for hook in hooks if not _does_nothing(hook))


def functions_of_configs(configs: Iterable[Any]) -> list[Any]:
    """Return the functions for attention and experts in modules of these configurations, and all modules' hooks."""
    found: list[Any] = list(_hooks_of_all())
    for config in configs:
        found.append(ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)))
        found.append(ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None)))
    return found


#: id of code -> the code, names that it reads, and attributes that it writes
_names: dict[int, tuple[types.CodeType, frozenset[str], frozenset[str]]] = {}


def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code reads, those in its strings among them, and the attributes that it writes."""
    if id(code) not in _names:
        read, written = set(), set()
        for each in dis.get_instructions(code):
            if each.opcode in dis.hasname and isinstance(each.argval, str):
                (written if each.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL") else read).add(each.argval)
        constants = list(code.co_consts)
        while constants:
            each = constants.pop()
            if isinstance(each, str):
                read.add(each)
            elif isinstance(each, (tuple, frozenset)):
                constants += each
            elif isinstance(each, types.CodeType):
                inner_read, inner_written = _names_in(each)
                read |= inner_read
                written |= inner_written
        _names[id(code)] = code, frozenset(read), frozenset(written)
    return _names[id(code)][1:]


def names_read(code: types.CodeType) -> frozenset[str]:
    """Return the names that code reads: of globals and attributes, and in its strings."""
    return _names_in(code)[0]


#: names by which code imports modules, or looks them up
_BY_NAME = frozenset({"import_module", "__import__", "modules"})


@functools.lru_cache(maxsize=4096)
def modules_imported(code: types.CodeType, package: str | None) -> frozenset[str]:
    """Return the absolute names of the modules that code imports itself, or may look up by names in its strings.

    Args:
        package: to which relative names refer.
    """
    found: set[str] = set()
    before: list[Any] = [None, None]
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":  # behind its level and the names that are taken from it
            level, name = before[0], each.argval
            found.add(f"{_parent(package or '', level)}.{name}".strip(".") if level else name)
        before = [before[1], each.argval]
    if not _BY_NAME.isdisjoint(code.co_names):
        found |= {each for each in code.co_consts if isinstance(each, str) and each in sys.modules}
    return frozenset(found)


def _parent(package: str, level: int) -> str:
    return package.rsplit(".", level - 1)[0] if level > 1 else package


def names_written(cls: type) -> frozenset[str]:
    """Return the attributes that methods of a class write, other than ``__init__``."""
    found: set[str] = set()
    for name, value in vars(cls).items():
        function = functions_of(value)[0]
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if code is not None and name != "__init__":
            found |= _names_in(code)[1]
    return frozenset(found)


#: method by which DataParallel makes the module of another GPU
REPLICATE = "_replicate_for_data_parallel"
#: attributes in which a module may keep the forward that computes
FORWARD_ATTRIBUTES = ("forward", "_old_forward")


def forward_attribute(module: nn.Module) -> str:
    """Return the attribute of the forward that computes; under an accelerate hook it is ``_old_forward``."""
    return "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in vars(module) else "forward"


def object_of_deepcopy(frame: types.FrameType) -> Any:
    """Return what ``copy.deepcopy`` copies, if a frame is one of it; else None."""
    return frame.f_locals.get("x") if frame.f_code is copy.deepcopy.__code__ else None


def plain_deepcopy(thing: Any, memo: dict) -> Any:
    """Copy an object as ``copy.deepcopy`` does whose class and ``__dict__`` say nothing of it."""
    reduced = thing.__reduce_ex__(4)
    return copy._reconstruct(thing, memo, *reduced)  # type: ignore[attr-defined]


def below_autograd() -> Any:
    """Return a context in which ops skip the autograd dispatch keys; only for code that needs no gradients."""
    return torch._C._AutoDispatchBelowAutograd()


def is_run_elsewhere(model: nn.Module, waiting: Container[int] = ()) -> bool:
    """Whether another thread is inside a ``generate()`` or a forward of ``model``.

    Args:
        waiting: threads whose last ``generate()`` waits at the door and does not count.
    """
    codes = {inspect.unwrap(GenerationMixin.generate).__code__, nn.Module._call_impl.__code__}
    here = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        counted = 0
        while frame is not None and thread != here:
            if not isinstance(frame, types.FrameType):  # seen once in Python 3.11: the other thread had gone on
                return True
            counted += frame.f_code in codes and frame.f_locals.get("self") is model
            frame = frame.f_back
        if counted > (thread in waiting):
            return True
    return False
