"""A step, recorded and behind all passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import compat
from .errors import StandInRead, Unrecordable
from .numbers_of_lengths import holds_multiple, is_multiple
from .passes import passed
from .recorded_step import Recording
from .skeleton import Skeleton
from .step import record
from .text_lengths import Served
from .token_rows import check_rows

#: numbers of new tokens with which prompts are recorded: more than kernels for a few rows take, and not so many that
#: passes, which compute with them, take long
_LEAST_COUNT, _MOST_COUNT = 29, 521


def whole_step(
    skeleton: Skeleton, batch: int, query_len: int, lengths: tuple[int | None, int | None] = (None, None)
) -> Recording:
    """Record the step of ``query_len`` new tokens for each of ``batch`` sequences, and apply all passes.

    Args:
        lengths: see :func:`.step.record`.

    Raises:
        Unrecordable: the model cannot be recorded.
    """
    return _passed(skeleton, lambda: record(skeleton, batch, query_len, None, lengths))


def whole_prompt(skeleton: Skeleton, batch: int, count: int, begins: bool) -> Recording:
    """Do as :func:`whole_step` for any number of new tokens but 1; the logits are those of the last token, if the model
    can make these alone.

    Args:
        count: number of new tokens when it is recorded, of :func:`count_like`.
        begins: the new tokens are the first of their text; else there may be others before them.

    Raises:
        Unrecordable: the model cannot be recorded so.
    """
    served = _served_alike(skeleton, batch, count, begins)
    if served is not None:
        return _passed(skeleton, lambda: recorded_prompt(skeleton, batch, count, begins, known_of=served))
    return _passed(skeleton, lambda: _checked(recorded_prompt(skeleton, batch, count, begins)))


def whole_rows(skeleton: Skeleton, rows: int) -> Recording:
    """Do as :func:`whole_prompt` by the step of one token of each of many sequences, see :mod:`.token_rows`.

    Args:
        rows: number of sequences when it is recorded, of :func:`count_like`.

    Raises:
        Unrecordable: the step is not that of a token alone.
    """
    made = _passed(skeleton, lambda: record(skeleton, rows, 1))
    check_rows(made)
    return made


def _checked(recording: Recording) -> Recording:
    """Refuse a recording with a number that is no size, but looks like one that is made of the number of new tokens.

    Raises:
        Unrecordable: it has one.
    """
    numbers = (each for call in recording.calls for each in call.arguments.values())
    if any(holds_multiple(each, int(recording.query_len)) for each in numbers):
        raise Unrecordable("a number that is a multiple of the number of recorded tokens")
    return recording


def recorded_prompt(skeleton: Skeleton, batch: int, count: int, begins: bool, **how: Any) -> Recording:
    """Do as :func:`whole_prompt` before all passes.

    Args:
        how: further arguments of :func:`.step.record`.
    """
    kept = {compat.LOGITS_TO_KEEP: 1} if compat.takes_logits_to_keep(skeleton.model) else None
    return record(skeleton, batch, count, kept, is_any=True, begins=begins, **how)


def _served_alike(skeleton: Skeleton, batch: int, count: int, begins: bool) -> Served | None:
    """Return for which prompts a recording is the model's, found by one of layers that are alike, as sizes with symbols
    take several times as long as plain ones. The result is None if all layers have to be looked at: only of
    transformers' own classes it is known that no layer asks which one it is.
    """
    if not compat.is_of_transformers(skeleton.model):
        return None
    try:
        found = _checked(recorded_prompt(skeleton, batch, count, begins, one_of_alike=True))
    except Exception:  # a layer may take what another one has left outside of the cache
        return None
    numbers = (each for call in found.calls for each in call.arguments.values())
    return found.served if all(is_multiple(each, found.count) for each in numbers) else None


def _passed(skeleton: Skeleton, recorded: Callable[[], Recording]) -> Recording:
    with skeleton.lock:  # passes compute with tensors of the copy's mode
        try:
            return passed(recorded(), skeleton.model)
        except StandInRead:  # of a product with adapters, perhaps, whose matrix a call takes for more than a product
            return passed(recorded(), skeleton.model, without=["adapters"])


def count_like(wanted: int, model: nn.Module) -> int:
    """Return a number of new tokens to record a prompt with: a prime from about ``wanted`` on, so that a size is a
    multiple only if it is made of the number. No size of the model's tensors is one, and no layer's number is as large.

    Raises:
        Unrecordable: there is none.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    layers = max((len(each) for each in model.modules() if isinstance(each, nn.ModuleList)), default=0)
    for count in range(max(min(wanted, _MOST_COUNT), _LEAST_COUNT, layers), layers + 2 * _MOST_COUNT):
        if all(count % each for each in range(2, math.isqrt(count) + 1)) and all(size % count for size in sizes):
            return count
    raise Unrecordable("tensors of too many sizes")
