"""What tests of batches have in common."""

from __future__ import annotations

import random

import torch
from models import CPU, build, prompt, require_native

import hf_fastpath


def patched(architecture: str = "llama", device=CPU, **changes):
    require_native(device)
    return hf_fastpath.patch(build(architecture, **changes).to(device), quiet=True)


def texts(count: int, device, seed: int = 0) -> list[torch.Tensor]:
    chosen = random.Random(seed)
    return [prompt(device, 1, chosen.randint(1, 40), seed=number) for number in range(count)]


def alone(model, ids, **options) -> list[int]:
    return model.generate(ids, **options)[0, ids.shape[1] :].tolist()
