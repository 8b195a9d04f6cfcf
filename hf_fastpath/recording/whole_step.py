"""A step, recorded and behind all passes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .. import compat
from .errors import StandInRead, Unrecordable
from .passes import passed
from .recording import Recording
from .skeleton import Skeleton
from .step import record

#: numbers of new tokens with which a prompt is recorded: primes, so that a size is a multiple only if it is made of the
#: number; more than kernels for a few rows take
_COUNTS = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 79, 83, 89, 97, 101, 103, 107, 109, 113)


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


def whole_prompt(skeleton: Skeleton, batch: int, begins: bool) -> Recording:
    """Do as :func:`whole_step` for any number of new tokens but 1; the logits are those of the last token.

    Args:
        begins: the new tokens are the first of their text; else there may be others before them.

    Raises:
        Unrecordable: the model cannot be recorded so.
    """
    if not compat.takes_logits_to_keep(skeleton.model):
        raise Unrecordable("logits of all tokens of a prompt")
    count = _unlike_all_sizes(skeleton.model)
    kept = {compat.LOGITS_TO_KEEP: 1}
    return _passed(skeleton, lambda: record(skeleton, batch, count, kept, is_any=True, begins=begins))


def _passed(skeleton: Skeleton, recorded: Callable[[], Recording]) -> Recording:
    try:
        return passed(recorded(), skeleton.model)
    except StandInRead:  # of a product with adapters, perhaps, whose matrix a call takes for more than a product
        return passed(recorded(), skeleton.model, without=["adapters"])


def _unlike_all_sizes(model: nn.Module) -> int:
    """Return a number that divides no size of the model's tensors.

    Raises:
        Unrecordable: there is none.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for count in _COUNTS:
        if all(size % count for size in sizes):
            return count
    raise Unrecordable("tensors of too many sizes")
