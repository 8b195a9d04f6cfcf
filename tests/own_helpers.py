"""What :mod:`own_decoders` reads from another file."""

from __future__ import annotations

NUMBER, TABLE = 1.0, {"factor": 1.0}


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
