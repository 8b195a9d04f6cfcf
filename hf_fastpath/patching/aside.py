"""Modules step aside: our forwards are out of them while a loop of stock code runs that is not faster with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .ledger import Ledger, Out

#: mean bytes of weights of a patched module on a CPU from which on our forwards gain more than Python's calls cost
LEAST_BYTES = 8 << 20


class Aside:
    """The forwards of one model's modules that are out of them now, and how many calls want them so.

    Threads that read a prompt meanwhile run stock's forwards, which give the same.

    Behind a forward over a cache of the user's own they stay out, because the next one is likely to be such a forward
    again: taking them out and putting them back takes 3 to 6 % of a forward of two layers. Only the gates are left
    then, the forwards of the decoder and of the model, which bring them back for any other call. They look at the
    arguments of one forward, and let those of its kind pass.

    Attributes:
        known: of what kind the newest forward is that ran so; None if forwards are not out for such ones.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._count = 0
        self._out: Out = [], []
        self._stay_out = False
        self.known: tuple | None = None
        self._bytes: float | None = None  # of a module's weights, when they were first asked for

    @contextmanager
    def __call__(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Let the model's modules run stock's forwards for the length of a ``with`` block, unless ours are faster.

        Args:
            device: of the call's tokens.
        """
        if not self.is_slower(model, device):
            yield
            return
        with self.out():
            yield

    @contextmanager
    def out(self) -> Iterator[None]:
        """Do so, whether ours are faster or not."""
        self.come_back()
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._out = self._ledger.take_forwards_out()
        try:
            yield
        finally:
            with self._lock:
                self._count = max(0, self._count - 1)  # a fork inside of the block has begun anew
                if self._count == 0:
                    self._put_back()

    def stay_out(self) -> None:
        """Take out all but the gates, until :meth:`come_back` is called."""
        if self._stay_out:
            return
        with self._lock:
            if self._count == 0 and not self._stay_out:  # a call that has them out brings them back itself
                self._out, self._stay_out = self._ledger.take_forwards_out(but_gates=True), True

    def know(self, kind: tuple) -> None:
        """Note of what kind a forward is that has ended, if it has let forwards stay out."""
        with self._lock:
            self.known = kind if self._stay_out else None

    def come_back(self) -> None:
        """Undo :meth:`stay_out`."""
        if not self._stay_out:
            return
        with self._lock:
            if self._stay_out:
                self._stay_out, self.known = False, None
                self._put_back()

    def forget_other_threads(self) -> None:
        """Put the forwards back that threads of another process have taken out."""
        self._lock, self._count, self._stay_out, self.known = threading.Lock(), 0, False, None
        self._put_back()

    def _put_back(self) -> None:
        out, self._out = self._out, ([], [])
        self._ledger.put_forwards_back(out)

    def is_slower(self, model: nn.Module, device: torch.device) -> bool:
        """Whether our forwards of modules are slower than stock's: always on a GPU, which waits for the host."""
        if device.type != "cpu":
            return True
        if self._bytes is None:
            weights = sum(each.nbytes for each in model.parameters())
            self._bytes = weights / max(1, self._ledger.num_forwards)
        return self._bytes < LEAST_BYTES
