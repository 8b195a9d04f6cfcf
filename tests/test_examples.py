"""Example scripts whose figures could be wrong without anybody seeing it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from models import require_native
from transformers import GPT2Config

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str, monkeypatch) -> ModuleType:
    """``examples/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_profile_gelu_times_the_operators_themselves(device, monkeypatch, capsys):
    """However noisy a forward is, GELU takes time, and ours is one kernel a layer."""
    require_native(device)
    example, layers = load("profile_gelu", monkeypatch), 3
    small = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=100, bos_token_id=None, eos_token_id=None)
    monkeypatch.setattr(example, "GPT2Config", lambda: small)
    results = example.measure(torch.float32, device, 32, 1)
    assert set(results) == set(example.VARIANTS)
    assert sum(results["patched"].gelu.values()) == layers
    assert sum(results["stock"].gelu.values()) > layers
    assert results["stock"].gelu_seconds > 0 and results["patched"].gelu_seconds > 0
    assert not results["no GELU"].gelu and results["no GELU"].gelu_seconds == 0
    assert results["stock"].count > results["patched"].count > results["no GELU"].count
    example.show(results, "fp32", 32, device)
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert all(float(shown[name][3]) > 0 for name in ("stock", "patched"))
