"""A step, recorded and behind all passes."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from .. import compat
from .errors import StandInRead, Unrecordable
from .passes import passed
from .recorded_step import Recording
from .skeleton import Skeleton
from .step import record

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
    return _passed(skeleton, lambda: recorded_prompt(skeleton, batch, count, begins))


def recorded_prompt(skeleton: Skeleton, batch: int, count: int, begins: bool, with_mask: bool = False) -> Recording:
    """Do as :func:`whole_prompt` before all passes.

    Args:
        with_mask: the forward is given a mask of all tokens, which hides none.
    """
    kept = {compat.LOGITS_TO_KEEP: 1} if compat.takes_logits_to_keep(skeleton.model) else None
    return record(skeleton, batch, count, kept, with_mask=with_mask, is_any=True, begins=begins)


def _passed(skeleton: Skeleton, recorded: Callable[[], Recording]) -> Recording:
    try:
        return passed(recorded(), skeleton.model)
    except StandInRead:  # of a product with adapters, perhaps, whose matrix a call takes for more than a product
        return passed(recorded(), skeleton.model, without=["adapters"])


def count_like(wanted: int, model: nn.Module) -> int:
    """Return a number of new tokens to record a prompt with: a prime from about ``wanted`` on, so that a size is a
    multiple only if it is made of the number; no size of the model's tensors is one.

    Raises:
        Unrecordable: there is none.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    first = min(max(wanted, _LEAST_COUNT), _MOST_COUNT)
    for count in range(first, 2 * _MOST_COUNT):
        if all(count % each for each in range(2, math.isqrt(count) + 1)) and all(size % count for size in sizes):
            return count
    raise Unrecordable("tensors of too many sizes")
