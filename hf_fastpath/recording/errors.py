"""Errors that say nothing of a model."""

from __future__ import annotations

import torch

#: there may be more memory next time
OUT_OF_MEMORY = MemoryError, torch.OutOfMemoryError
