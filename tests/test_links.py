"""Packages behind a symbolic link, as in an environment whose folder was moved to another disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import require_native

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys, torch, transformers
assert torch.__file__.startswith(sys.argv[1]) and transformers.__file__.startswith(sys.argv[1])
import hf_fastpath
from causal_lm_types import small_model
assert hf_fastpath.__file__.startswith(sys.argv[1])
for name in ("llama", "glm4"):
    model = hf_fastpath.patch(small_model(name), quiet=True)
    model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4, do_sample=False)
    found = hf_fastpath.report(model)
    print(name, found.loop, found.stats["fast_tokens"], found.stats["reasons"])
"""


def test_models_are_fast_behind_links(tmp_path):
    require_native(torch.device("cpu"))
    folders = {"packages": Path(torch.__file__).parents[1], "project": ROOT}
    for name, folder in folders.items():
        (tmp_path / name).symlink_to(folder, target_is_directory=True)
    if Path(torch.__file__).parents[1] != Path(sys.modules["transformers"].__file__).parents[1]:
        pytest.skip("torch and transformers are not in one folder")
    path = [tmp_path / "project", tmp_path / "project" / "tests", tmp_path / "packages"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert found.stdout.splitlines() == ["llama fast 4 {}", "glm4 fast 4 {}"], found.stderr[-2000:]
