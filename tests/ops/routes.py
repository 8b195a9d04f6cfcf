"""Kernels that this CPU does not choose by itself: a test file runs once more, as a program that is limited to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import fresh_process
import pytest
import torch
from checks import is_native
from first_scales import first_scales

from hf_fastpath.native import loader
from hf_fastpath.registry import OpSpec

LIMIT = "HF_FASTPATH_CPU"

over_instruction_sets = pytest.mark.parametrize("isa", ("baseline", "avx2", "avx512"))


def program(file: str) -> str:
    """Return a script that runs a test file as a program, with the files beside it."""
    return (
        f"import runpy, sys; sys.path.insert(0, {str(Path(file).parent)!r}); "
        f"runpy.run_path({file!r}, run_name='__main__')"
    )


def run_limited(spec: OpSpec, file: str, isa: str, *arguments: object) -> None:
    """Run ``file``, which ends in :func:`main`, in a process whose kernels go no further than ``isa``."""
    if not is_native(spec, torch.device("cpu")):
        pytest.skip("no library for the CPU")
    if isa == "avx512" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this CPU has no AVX-512: it would run what avx2 runs")
    result = fresh_process.run(program(file), *map(str, arguments), **{LIMIT: isa})
    assert result.returncode == 0, result.stderr[-2000:]


def main(spec: OpSpec, check: Callable[..., None]) -> None:
    """Call ``check(isa, *arguments)`` in a process that :func:`run_limited` started."""
    loader.ensure("cpu")
    assert is_native(spec, torch.device("cpu"))
    torch.manual_seed(1729)
    with torch.no_grad(), first_scales():
        check(os.environ[LIMIT], *sys.argv[1:])
