"""Functions that run in threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

#: seconds in which everything that is waited for has long happened
LONG = 60


class Call(threading.Thread):
    """A function in a thread of its own, begun ``after`` seconds; :meth:`result` returns or raises what it did."""

    def __init__(self, function: Callable, *args, after: float = 0.0, **kwargs):
        super().__init__(daemon=True)
        self.function, self.given, self.after, self.error = function, (args, kwargs), after, None
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        time.sleep(self.after)
        try:
            self.value = self.function(*self.given[0], **self.given[1])
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(LONG)
        assert not self.is_alive(), "a thread hangs"
        if self.error is not None:
            raise self.error
        return self.value
