"""Errors of recording."""

from __future__ import annotations


class Unrecordable(Exception):
    """A step that cannot be written down as a list of calls; the message says which line did it.

    Attributes:
        code: of the reason for stock code.
    """

    code = "not_recorded"


class Misspread(Unrecordable):
    """A step of a model whose ranks compute something else than the model does."""

    code = "sharded"


class LengthTaken(Unrecordable):
    """A step that takes the number behind a length.

    Attributes:
        is_known: code of transformers' does it, of which the recorder knows what it is for.
    """

    is_known = False


class OwnPadding(Unrecordable):
    """A step that hides other places of a cache than those that its mask of the text says."""


class StandInRead(Unrecordable):
    """A call that reads the matrix of a weight of several tensors, which no matrix holds."""


class NotData(Exception):
    """Something of a recording that is no data, or data that is nothing of a recording."""
