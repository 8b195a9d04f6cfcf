"""Tiny models run on one thread: handing a microsecond of work to a pool takes longer than doing it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(repeatable):
    """One thread for the test; ``repeatable`` restores the number."""
    torch.set_num_threads(1)
