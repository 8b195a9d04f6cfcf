"""The one build recipe of the native libraries; ``pip install`` and the loader use it; torch is never imported.

The recipe is also a script: ``python hf_fastpath/native/build.py cpu cuda --cuda-arch 80 90a --ptxas-report FILE``.

The build makes two libraries, ``libhf_fastpath_cpu.so`` and ``libhf_fastpath_cuda.so``. Both use PyTorch's stable ABI,
so one build serves every torch from the oldest supported one on, and any Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # as a script: the package would import torch, and modules of this folder shadow those of others
    __package__ = "hf_fastpath_recipe.native"
    _folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != str(_folder)]
    sys.modules["hf_fastpath_recipe"] = types.ModuleType("hf_fastpath_recipe")
    sys.modules["hf_fastpath_recipe"].__path__ = [str(_folder.parent)]

from ..progress import counted
from . import build_cache, generated, ninja, old_glibc, toolchain
from .build_cache import description, locked, why_damaged
from .compiler_output import first_error
from .ptxas_report import made_from, write_made_from, write_ptxas_report
from .toolchain import TARGETS, WHEEL_CUDA_ARCHS, BuildError, Toolchain, find_toolchain

__all__ = ["TARGETS", "WHEEL_CUDA_ARCHS", "BuildError", "build", "cache_dir", "description", "locked", "why_damaged"]

#: the oldest torch whose stable ABI the libraries use: 2.10
TORCH_TARGET_VERSION = "0x020a000000000000"

_PACKAGE = Path(__file__).resolve().parent.parent
#: where installed libraries and those built in the tree lie
LIBRARY_DIR = _PACKAGE / "lib"


def source_dir() -> Path:
    """Return the folder of native sources: beside the package in a checkout, inside the package if installed.

    Raises:
        BuildError: neither folder exists.
    """
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (candidate / "common").is_dir():
            return candidate
    raise BuildError("the native sources (csrc/) are not installed: reinstall hf_fastpath")


def library_name(target: str) -> str:
    """Return the file name of the library for ``target`` ("cpu" or "cuda")."""
    return f"libhf_fastpath_{target}.so"


def feature_flags() -> dict[str, str]:
    """Return the ends of names of CPU sources that this machine's processors may run, with their compiler flags."""
    return toolchain.CPU_FLAGS.get(toolchain.processor(), {})


def sources(target: str) -> list[Path]:
    """Return the source files of ``target``, sorted."""
    patterns = ("*_cpu.cpp", *(f"*{end}" for end in feature_flags())) if target == "cpu" else ("*.cu", "*_cuda.cpp")
    patterns += ("old_systems.cpp", "same_objects.cpp")
    return sorted(path for pattern in patterns for path in source_dir().glob(f"*/{pattern}"))


def sources_hash(target: str) -> str:
    """Return a hash of everything that the library is made from: sources, headers and this recipe.

    Raises:
        BuildError: there are no sources, or they cannot be read.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(generated.files()).encode())
    headers = [*source_dir().glob("*/*.h"), *source_dir().glob("*/*.cuh")]
    try:
        for path in sorted({*sources(target), *headers}):
            digest.update(path.relative_to(source_dir()).as_posix().encode())
            digest.update(path.read_bytes())
    except OSError as error:
        raise BuildError(f"the native sources cannot be read: {error}") from None
    return digest.hexdigest()[:16]


def compile_flags(target: str, tools: Toolchain, flags: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return what every C++ source of ``target`` is compiled with: flags for the object, and folders of headers."""
    csrc = source_dir()
    made = ["-O3", "-std=c++17", "-g0", *flags, "-fPIC", "-fvisibility=hidden"]
    made += ["-Wall", "-Wextra", "-Wno-unused-parameter", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    folders = [f"-I{csrc}", f"-isystem{tools.torch_dir / 'include'}"]
    if target == "cuda":
        made.append("-DUSE_CUDA")
        folders.append(f"-isystem{toolchain.cuda_home(tools.nvcc) / 'include'}")
    # the text of an error names the source's place in the project, and no folder of the machine that compiled it
    return made, [*folders, f"-ffile-prefix-map={csrc}=csrc", f"-ffile-prefix-map={tools.torch_dir}=torch"]


def _gencode(archs: Sequence[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = max(archs, key=lambda arch: int(re.match(r"\d+", arch).group()))
    if newest.isdigit():  # PTX of the newest generic architecture serves GPUs that do not exist yet
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    if _travels(archs):
        flags.append("--compress-mode=size")
    return flags


def _travels(archs: Sequence[str]) -> bool:
    """Whether a library is for other machines too, so that it has to be small and to load on older systems."""
    return len(archs) > 1


# ---- one build ---------------------------------------------------------------------------------------------

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def included(source: Path, found: dict[Path, bytes] | None = None) -> dict[Path, bytes]:
    """Return ``source`` and every file of the project that it includes, under any condition, with their contents."""
    found = {} if found is None else found
    source = source.resolve()
    if source not in found:
        found[source] = source.read_bytes()
        for name in _INCLUDE.findall(found[source]):
            for candidate in (source.parent / name.decode(), source_dir() / name.decode()):
                if candidate.is_file():
                    included(candidate, found)
                    break
    return found


@dataclass(frozen=True)
class _Step:
    """One source and the object that is made of it; the object's name has a hash of all that it is made from."""

    source: Path
    rule: str
    extra: str
    made: Path


class _Plan:
    """The work of ninja for one library."""

    def __init__(self, target: str, tools: Toolchain, archs: Sequence[str], flags: Sequence[str], objects: Path):
        self.target, self.tools = target, tools
        cxx, folders = compile_flags(target, tools, flags)
        nvcc: list[str] = []
        link = [*shlex.split(tools.cxx), "-shared"]
        versions = [toolchain.version(tools.cxx), (tools.torch_dir / "version.py").read_text(errors="replace")]
        if target == "cuda":
            nvcc = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v", *_gencode(archs)]
            nvcc += [flag for flag in flags if flag.startswith("-D")]
            link = [*shlex.split(tools.nvcc), "-shared", "-cudart", "static"]
            link.append("-Xlinker=--exclude-libs=libcudart_static.a")
            versions.append(toolchain.version(tools.nvcc))  # the last one, and all that matters to kernels
        self.variables = {"cxx": [*shlex.split(tools.cxx), *cxx, *folders]}
        if tools.nvcc:
            self.variables["nvcc"] = [*shlex.split(tools.nvcc), *nvcc, f"-I{source_dir()}"]
        self.variables["link"] = link
        self.variables["libraries"] = [f"-L{tools.torch_dir / 'lib'}", "-ltorch_cpu"]
        self.variables["libraries"] += toolchain.shared_cxx_library(tools.cxx)
        self.variables["libraries"] += [] if target == "cuda" else flags
        self.steps = []
        for source in sources(target):
            rule = "nvcc" if source.suffix == ".cu" else "cxx"
            extra = next((flags for end, flags in feature_flags().items() if source.name.endswith(end)), "")
            tool = (nvcc, extra, versions[-1:]) if rule == "nvcc" else (cxx, extra, versions)
            digest = hashlib.sha256(repr((rule, *tool)).encode())
            for path, content in sorted(included(source).items()):
                digest.update(repr((path.relative_to(source_dir().resolve()).as_posix(), content)).encode())
            made = objects / f"{source.parent.name}_{source.name}.{digest.hexdigest()[:24]}.o"
            self.steps.append(_Step(source, rule, extra, made))

    def missing(self) -> list[_Step]:
        """Return the steps whose objects do not exist yet."""
        return [step for step in self.steps if not step.made.is_file()]

    def ninja_text(self, links: bool = True) -> str:
        """Return ninja's input for the missing steps and the link. An object gets its name only when it is whole, so
        that a build which was broken off leaves no broken object."""
        lines = ["ninja_required_version = 1.5"]
        for name, words in self.variables.items():
            lines.append(f"{name} = {' '.join(shlex.quote(word) for word in words).replace('$', '$$')}")
        lines += [
            "rule cxx\n  command = $cxx $extra -c $in -o $scratch && mv -f $scratch $out\n  description = $name",
            "rule nvcc\n  command = $nvcc -c $in -o $scratch 2> $scratch.ptxas || (cat $scratch.ptxas; exit 1); "
            "mv -f $scratch.ptxas $out.ptxas && mv -f $scratch $out\n  description = $name",
            "rule link\n  command = $link -o $out $in $libraries\n  description = $name",
        ]
        for number, step in enumerate(self.missing()):
            lines.append(f"build {_escaped(step.made)}: {step.rule} {_escaped(step.source)}")
            lines.append(f"  extra = {step.extra}\n  scratch = {number}.o\n  name = {_name(step.source)}")
        made, name = " ".join(_escaped(step.made) for step in self.steps), library_name(self.target)
        lines.append(f"build {name}: link {made}\n  name = {name}" if links else f"build all: phony {made}")
        return "\n".join(lines) + "\n"


def _name(source: Path) -> str:
    return f"{source.parent.name}/{source.name}"


def _escaped(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def build(
    target: str,
    output_dir: Path,
    cuda_archs: Sequence[str] = WHEEL_CUDA_ARCHS,
    progress: Callable[[str], None] | None = print,
    flags: Sequence[str] = (),
) -> Path:
    """Compile the library of ``target`` into ``output_dir``, atomically.

    Objects that an earlier build made of the same sources with the same compiler are taken from the cache folder, so a
    build that was broken off goes on from there.

    Args:
        target: ``"cpu"`` or ``"cuda"``.
        output_dir: folder for the library, a ``.json`` that says what it was made from, and for CUDA the compiler's
            resource reports (``.ptxas``).
        cuda_archs: compute capabilities without the dot, e.g. ``("80", "90a")``.
        progress: called with a line when the build starts and when it ends; meanwhile a bar counts files if stderr is a
            terminal. With None, nothing is printed.
        flags: extra compiler and linker flags (sanitizers).

    Returns:
        Path of the library.

    Raises:
        BuildError: one line that says what is missing, or the compiler's first error and where its whole output lies.
    """
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}, expected one of {', '.join(TARGETS)}")
    if reason := toolchain.unsupported_platform(target):
        raise BuildError(reason)
    tools, jobs = find_toolchain(target), toolchain.jobs(target)
    ninja.path()
    started = time.monotonic()
    what = "CPU" if target == "cpu" else f"CUDA (sm_{', sm_'.join(cuda_archs)})"
    try:
        generated.update(source_dir())
        output_dir.mkdir(parents=True, exist_ok=True)
        with build_cache.workshop() as (work, objects):
            plan = _Plan(target, tools, cuda_archs, flags, objects)
            if target == "cuda" and _travels(cuda_archs) and old_glibc.applies():
                plan.variables["libraries"][:0] = old_glibc.stand_ins(tools.cxx, work)
            library = _make(plan, work, jobs, what, progress)
            _install(plan, library, output_dir, cuda_archs)
    except OSError as error:
        raise BuildError(f"building the {what} kernels failed: {error}") from None
    build_cache.clean()
    if progress is not None:
        progress(f"hf_fastpath: built in {time.monotonic() - started:.0f} s")
    return output_dir / library_name(target)


def check_kernels(cuda_archs: Sequence[str], table: Path, progress: Callable[[str], None] | None = print) -> list[str]:
    """Compile the CUDA sources that have changed since a table of their kernels' resources was written, and renew the
    table; without one, all sources are compiled. A source has changed if it, a file that it includes, the compiler or
    its flags are others.

    Args:
        cuda_archs: compute capabilities without the dot.
        table: as :func:`.ptxas_report.write_ptxas_report` writes it.
        progress: as for :func:`build`.

    Returns:
        One line for every kernel that spills more than it did.

    Raises:
        BuildError: as of :func:`build`.
    """
    tools, jobs = find_toolchain("cuda"), toolchain.jobs("cuda")
    generated.update(source_dir())
    with build_cache.workshop() as (work, objects):
        plan = _Plan("cuda", tools, cuda_archs, (), objects)
        plan.steps = [step for step in plan.steps if step.rule == "nvcc"]
        hashes = {f"{step.source.parent.name}_{step.source.stem}": step.made.suffixes[-2][1:] for step in plan.steps}
        known = made_from(table)
        unchanged = {source for source, made in hashes.items() if known.get(source) == made}
        plan.steps = [step for step, source in zip(plan.steps, hashes) if source not in unchanged]
        if plan.steps:
            _make(plan, work, jobs, f"changed CUDA (sm_{', sm_'.join(cuda_archs)})", progress, links=False)
        _copy_reports(plan, work)
        spills = write_ptxas_report(work, table, unchanged)
    write_made_from(table, hashes)
    return spills


def _make(
    plan: _Plan, work: Path, jobs: int, what: str, progress: Callable[[str], None] | None, links: bool = True
) -> Path:
    """Run the plan in the folder ``work``; return the library there, if the plan links one."""
    missing, total = len(plan.missing()), len(plan.steps)
    for step in plan.steps:
        if step.made.is_file():
            build_cache.used(step.made)
    if progress is not None:
        count = f"{total} files" if missing == total else f"{missing} of {total} files, the others are there"
        progress(f"hf_fastpath: building the {what} kernels, {count} ...")
    Path(work, "build.ninja").write_text(plan.ninja_text(links))
    with counted(missing + links, f"hf_fastpath: {what} kernels, files", quiet=progress is None) as bar:
        status, said = ninja.run(work, jobs, lambda done: bar.update(done - bar.n))
    if status and missing < total and not plan.missing():
        for step in plan.steps:  # an old object does not link, perhaps because a disk was full or a machine crashed
            step.made.unlink(missing_ok=True)
        return _make(plan, work, jobs, what, progress, links)
    if status:
        log = build_cache.keep_log(f"build_{plan.target}", said)
        raise BuildError(f"building the {what} kernels failed: {first_error(said)} (the whole output: {log})")
    return work / library_name(plan.target)


def _install(plan: _Plan, library: Path, output_dir: Path, cuda_archs: Sequence[str]) -> None:
    """Put the library, its description and the compiler's reports into ``output_dir``."""
    target = plan.target
    info = {
        "target": target,
        "sources": sources_hash(target),
        "cuda_archs": list(cuda_archs) if target == "cuda" else [],
        "compiler": toolchain.version(plan.tools.cxx).splitlines()[0],
        "size": library.stat().st_size,
        "sha256": build_cache.sha256(library),
    }
    for report in output_dir.glob("*.ptxas"):
        report.unlink()
    _copy_reports(plan, output_dir)
    # A library without a description is never loaded, so an interrupt at any time leaves no wrong pair.
    note = build_cache.note_file(output_dir / library_name(target))
    note.unlink(missing_ok=True)
    build_cache.replace(output_dir / library_name(target), library.read_bytes())
    build_cache.replace(note, json.dumps(info, indent=1).encode())


def _copy_reports(plan: _Plan, folder: Path) -> None:
    """Copy the compiler's reports of the resources of kernels into a folder."""
    for step in plan.steps:
        report = step.made.with_name(f"{step.made.name}.ptxas")
        if step.rule == "nvcc" and report.is_file():
            shutil.copy(report, folder / f"{step.source.parent.name}_{step.source.name}.o.ptxas")


def cache_dir(target: str, cuda_archs: Sequence[str] = ()) -> Path:
    """Return the folder in the user's cache for a build of the present sources with the present tools."""
    tools = find_toolchain(target)
    parts = [sources_hash(target), TORCH_TARGET_VERSION, platform.machine(), toolchain.version(tools.cxx), *cuda_archs]
    parts += [toolchain.version(tools.nvcc)] if tools.nvcc else []
    return build_cache.root() / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the native libraries of hf_fastpath.")
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--output", type=Path, default=LIBRARY_DIR, help="folder for the libraries")
    parser.add_argument("--cuda-arch", nargs="+", default=list(WHEEL_CUDA_ARCHS), help="e.g. 80 90a")
    parser.add_argument(
        "--ptxas-report",
        type=Path,
        help="build nothing: renew this CSV of kernels; exit 1 if one spills more than it says",
    )
    parser.add_argument("--flags", nargs="*", default=[], help="extra flags, e.g. -fsanitize=address")
    arguments = parser.parse_args(argv)
    try:
        if arguments.ptxas_report:
            spills = check_kernels(arguments.cuda_arch, arguments.ptxas_report)
            print("\n".join(f"new spill: {line}" for line in spills) or f"no new spills ({arguments.ptxas_report})")
            return 1 if spills else 0
        for target in arguments.targets:
            build(target, arguments.output, arguments.cuda_arch, flags=arguments.flags)
    except BuildError as error:
        print(f"hf_fastpath: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
