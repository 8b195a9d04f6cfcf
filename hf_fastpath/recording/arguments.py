"""Whether a step is the same if the model's forward is given more arguments, which say what the prompt was."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from .. import compat
from ..decode.calls.named_calls import Call
from .recorded_step import OwnPadding, Recording, Unrecordable, read_by, registers_in
from .skeleton import Skeleton
from .step import record

#: values that decide which way a forward takes, and hold nothing else
_PLAIN = (bool, int, float, str)


def described(value: Any) -> Hashable:
    """Return what :func:`why_it_matters` may make of an argument, other than its numbers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    found: Any = value if isinstance(value, _PLAIN) else type(value)
    return found


def why_it_matters(skeleton: Skeleton, batch: int, arguments: dict[str, Any]) -> str | None:
    """Return why a step of a token for each of ``batch`` sequences is another one if the model's forward is given
    ``arguments`` by name, besides what every step is given; None if the step makes the same calls and none reads them.

    Raises:
        Unrecordable: the step cannot be recorded so.
    """
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            with skeleton.lock, torch.inference_mode(False):
                given[name] = skeleton.mode.from_tensor(value.detach().clone(), static_shapes=True)
        elif isinstance(value, _PLAIN):
            given[name] = value
        else:
            return f"{name} is a {type(value).__name__}"
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    return _how_they_differ(record(skeleton, batch, 1, given), record(skeleton, batch, 1), tensors)


def why_padding_matters(with_mask: Recording, without: Recording) -> str | None:
    """Return why padding matters to more than attention, given a step that was recorded with a mask of the text and
    without one; or None."""
    return _how_they_differ(with_mask, without, ["attention_mask"])


def _how_they_differ(with_them: Recording, without: Recording, tensors: list[str]) -> str | None:
    """Return in what recordings with further arguments and without them differ, or None.

    Args:
        tensors: names of the arguments that are tensors, in their order.
    """
    for recording in (with_them, without):
        recording.drop_unread()
    numbers = dict(enumerate(tensors, with_them.positions.index + 1))
    read = {numbers[each.index] for call in with_them.calls for each in read_by(call) if each.index in numbers}
    if read:
        return f"{', '.join(sorted(read))} is read with every token"
    if list(map(_known, with_them.calls)) != list(map(_known, without.calls)):
        return "the forward makes other calls with them"
    return None


def hides_other_places(skeleton: Skeleton) -> str | None:
    """Return why padding is not where the mask of the text that a step is given has it, or None: a line makes a mask of
    its own for the cache, or attention is given none."""
    try:
        record(skeleton, 1, 1, with_mask=True)
    except OwnPadding as error:
        return str(error)
    except Unrecordable:  # a mask that is looked at takes other ways, which say nothing of the cache
        return None
    return None


def _known(call: Call) -> tuple:
    """Return what is called, and with which numbers and weights."""
    held = {name: value for name, value in call.arguments.items() if not registers_in(value)}
    return call.op, {name: _identity(value) for name, value in held.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_identity(each) for each in value]
    if isinstance(value, torch.Tensor):  # views of a weight are made anew in each recording
        return compat.memory_of(value), value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return value
