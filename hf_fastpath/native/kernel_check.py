"""Compile the CUDA sources that have changed since the table of their kernels' resources was written.

A source has changed if it, a file that it includes, the compiler or its flags are others. All of them take two cores 20
minutes, most of which would compile what was compiled before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import build, build_cache, generated, toolchain
from .ptxas_report import made_from, write_made_from, write_ptxas_report
from .toolchain import find_toolchain


def check_kernels(cuda_archs: Sequence[str], table: Path, progress: Callable[[str], None] | None = print) -> list[str]:
    """Compile what has changed since a table was written, and renew the table; without one, all sources are compiled.

    Args:
        cuda_archs: compute capabilities without the dot.
        table: as :func:`.ptxas_report.write_ptxas_report` writes it.
        progress: as for :func:`.build.build`.

    Returns:
        One line for every kernel that spills more than it did.

    Raises:
        BuildError: as of :func:`.build.build`.
    """
    tools, jobs = find_toolchain("cuda"), toolchain.jobs("cuda")
    generated.update(build.source_dir())
    with build_cache.workshop() as (work, objects):
        plan = build.Plan("cuda", tools, cuda_archs, (), objects)
        plan.steps = [step for step in plan.steps if step.rule == "nvcc"]
        hashes = {f"{step.source.parent.name}_{step.source.stem}": step.made.suffixes[-2][1:] for step in plan.steps}
        known = made_from(table)
        unchanged = {source for source, made in hashes.items() if known.get(source) == made}
        plan.steps = [step for step, source in zip(plan.steps, hashes) if source not in unchanged]
        if plan.steps:
            build.run_plan(plan, work, jobs, f"changed CUDA (sm_{', sm_'.join(cuda_archs)})", progress, links=False)
        build.copy_reports(plan, work)
        spills = write_ptxas_report(work, table, unchanged)
    write_made_from(table, hashes)
    return spills
