"""Whether calls compute what a formula says: both are run on random numbers, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from ..decode.calls.named_calls import Call, Register, bound
from . import marks
from .recorded_step import registers_in

_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
#: relative difference of two float64 results of one formula
_TOLERANCE = 1e-9


#: what calls may raise if they are run on numbers that do not fit them
MISFITS = (RuntimeError, TypeError, KeyError, NotImplementedError, ValueError)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Draw the same random numbers on the CPU in each such ``with`` block, and leave all generators as they were."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed GPUs, too
        yield


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the widest dtype of its kind, on the CPU."""
    return tensor.detach().to("cpu", _WIDE.get(tensor.dtype, tensor.dtype))


def evaluate(
    calls: Sequence[Call], given: Mapping[int, Any], constants: Mapping[int, torch.Tensor] = {}
) -> dict[int, Any]:
    """Return what registers hold once ``calls`` were made in float64.

    Args:
        calls: in order.
        given: register -> value.
        constants: id of a tensor in the calls -> what is taken instead; other tensors are converted.
    """
    values = dict(given)

    def value(thing: Any) -> Any:
        if isinstance(thing, Register):
            return values[thing.index]
        if isinstance(thing, torch.Tensor):
            return constants[id(thing)] if id(thing) in constants else wide(thing)
        if isinstance(thing, torch.dtype):
            return _WIDE.get(thing, thing)
        if isinstance(thing, torch.device):
            return torch.device("cpu")
        if isinstance(thing, (list, tuple)) and any(isinstance(each, (torch.Tensor, Register)) for each in thing):
            return [value(each) for each in thing]
        if is_dataclass(thing) and not isinstance(thing, type):
            return replace(thing, **{each.name: value(getattr(thing, each.name)) for each in fields(thing)})
        return thing

    for call in calls:
        if call.out.index in values:
            continue
        if call.op in marks.OF_RANKS:
            raise NotImplementedError("no other rank takes part")
        arguments = {name: value(each) for name, each in call.arguments.items()}
        if "pin_memory" in arguments:
            arguments["pin_memory"] = False
        if getattr(call.op, "__name__", "").startswith(("view", "_unsafe_view")) and "size" in arguments:
            values[call.out.index] = arguments["self"].reshape(arguments["size"])
        elif call.op is torch.ops.aten.convolution.default and _is_depthwise(**arguments):
            values[call.out.index] = _depthwise(**arguments)
        elif not isinstance(call.op, torch._ops.OpOverload):
            values[call.out.index] = (
                call.op(*arguments.values()) if call.op.__module__ == "_operator" else call.op(**arguments)
            )
        else:
            op, ordered = bound(call.op, arguments)
            values[call.out.index] = op(*ordered)
    return values


def _is_depthwise(input, weight, stride, dilation, transposed, output_padding, groups, **_) -> bool:
    """Whether a convolution is over one dimension, of each channel by itself, in steps of one."""
    plain = not transposed and list(stride) == list(dilation) == [1]
    return plain and input.dim() == 3 and groups == len(weight) == input.shape[1] and weight.shape[1] == 1


def _depthwise(input, weight, bias, padding, **_) -> torch.Tensor:
    """Compute a depthwise convolution in float64, for which PyTorch takes a thousand times as long."""
    padded = torch.nn.functional.pad(input, (padding[0], padding[0]))
    out = (padded.unfold(-1, weight.shape[-1], 1) * weight[:, 0, None]).sum(-1)
    return out if bias is None else out + bias[:, None]


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are of one formula."""
    if one.shape != other.shape or not bool(torch.isfinite(one).all()):
        return False
    scale = float(one.abs().amax()) + 1e-300
    return float((one - other).abs().amax()) <= _TOLERANCE * scale


def structure(
    calls: Sequence[Call], given: Iterable[Register], of_tensor: Callable[[torch.Tensor], Any], made: Any = ()
) -> tuple:
    """Return what is the same in lists of calls that compute the same, which layers have that are alike.

    Args:
        calls: in order.
        given: registers that the calls are given; all others are taken for the same.
        of_tensor: returns what is the same in tensors that the calls hold.
        made: registers that are asked for.
    """
    places = {each.index: place for place, each in enumerate((*given, *(call.out for call in calls)))}

    def plain(value: Any) -> Any:
        if isinstance(value, Register):
            return "r", places.get(value.index, -1)
        if isinstance(value, torch.Tensor):
            return "t", of_tensor(value)
        if isinstance(value, (list, tuple)):
            return tuple(plain(each) for each in value)
        if is_dataclass(value) and not isinstance(value, type):
            return tuple(plain(getattr(value, each.name)) for each in fields(value))
        return str(value)

    found = ((call.op, *((name, plain(value)) for name, value in call.arguments.items())) for call in calls)
    return (*found, plain(made))


def inner_only(calls: Sequence[Call], inputs: Sequence[Register]) -> bool:
    """Whether calls read nothing but ``inputs`` and each other."""
    known = {register.index for register in inputs}
    for call in calls:
        if any(register.index not in known for value in call.arguments.values() for register in registers_in(value)):
            return False
        known.add(call.out.index)
    return True
