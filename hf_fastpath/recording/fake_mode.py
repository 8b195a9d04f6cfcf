"""The mode of tensors without data, of which several threads may read."""

from __future__ import annotations

import threading
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


class FakeMode(FakeTensorMode):
    """PyTorch's mode, whose tensors tell other threads their device while one thread computes with them.

    PyTorch keeps in an attribute of the mode that a kernel is under way, and every tensor of the mode says "meta" when
    it is asked for its device meanwhile. A plan that another thread makes at that moment would have its states there,
    where they hold nothing. So the attribute is one of the thread.
    """

    def __init__(self, **given: Any):
        self._of_thread = threading.local()
        super().__init__(**given)

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return getattr(self._of_thread, "is_in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.is_in_kernel = value
