"""State that has to be made anew in the child of a fork, where only the thread that forked goes on."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork(renew: Callable[[], None]) -> Callable[[], None]:
    """Call ``renew`` in every child of a fork: locks may be held there by threads that the child does not have."""
    if hasattr(os, "register_at_fork"):  # other systems do not fork
        os.register_at_fork(after_in_child=renew)
    return renew
