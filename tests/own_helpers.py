"""What :mod:`own_decoders` reads from another file."""

from __future__ import annotations

import contextvars
import enum
import threading

import torch

NUMBER, TABLE = 1.0, {"factor": 1.0}


class Number(float):
    """A number of a class of its own."""


class Mode(enum.Enum):
    ONE = [1.0]


#: what stands for a number that is elsewhere
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
OF_THREAD = threading.local()


def factor():
    return TABLE["factor"]


def replaceable():
    return 1.0


class Constants:
    FACTOR = 1.0


class Holder:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


class Reading(torch.nn.Module):
    """Looks at a number of its input, if it is asked to."""

    def __init__(self, inside: torch.nn.Module, reads: bool):
        super().__init__()
        self.inside, self.reads = inside, reads

    def forward(self, x):
        return self.inside(x * 2 if self.reads and float(x.sum()) > 0 else x)
