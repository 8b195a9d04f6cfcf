"""A step, recorded and behind all passes."""

from __future__ import annotations

from .errors import StandInRead
from .passes import passed
from .recorded_step import Recording
from .skeleton import Skeleton
from .step import record


def whole_step(
    skeleton: Skeleton, batch: int, query_len: int, lengths: tuple[int | None, int | None] = (None, None)
) -> Recording:
    """Record the step of ``query_len`` new tokens for each of ``batch`` sequences, and apply all passes.

    Args:
        lengths: see :func:`.step.record`.

    Raises:
        Unrecordable: the model cannot be recorded.
    """
    asked = skeleton, batch, query_len, None, lengths
    try:
        return passed(record(*asked), skeleton.model)
    except StandInRead:  # of a product with adapters, perhaps, whose matrix a call takes for more than a product
        return passed(record(*asked), skeleton.model, without=["adapters"])
