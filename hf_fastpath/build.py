"""The one build recipe of the native libraries, used by ``pip install`` and by the loader. Never imports torch.

Run as a script: ``python hf_fastpath/build.py cpu cuda --cuda-arch 80 90a --ptxas-report csrc/ptxas_report.csv``.

Two libraries come out, ``libhf_fastpath_cpu.so`` and ``libhf_fastpath_cuda.so``, both on PyTorch's stable ABI, so
one build serves every torch from the floor on and any Python.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TARGETS = ("cpu", "cuda")
#: oldest torch whose stable ABI the libraries use: 2.10
TORCH_TARGET_VERSION = "0x020a000000000000"
#: what a wheel carries; a local build takes the architecture at hand
WHEEL_CUDA_ARCHS = ("80", "86", "89", "90a", "100", "120")
#: what CPU sources of these names are compiled with; which of them runs is decided at run time
CPU_FLAGS = {
    "_avx2.cpp": "-mavx2 -mfma -mf16c",
    "_avx512.cpp": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "_avx512_bf16.cpp": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16",
    "_avx512_vnni.cpp": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni",
}

_PACKAGE = Path(__file__).resolve().parent
#: where installed and in-tree libraries lie
LIBRARY_DIR = _PACKAGE / "lib"


class BuildError(RuntimeError):
    """A native library could not be built; the message says what is missing or what the compiler said."""


def source_dir() -> Path:
    """The folder of native sources: beside the package in a checkout, inside it when installed.

    Raises:
        BuildError: neither exists.
    """
    for candidate in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (candidate / "common").is_dir():
            return candidate
    raise BuildError("the native sources (csrc/) are not installed: reinstall hf_fastpath")


def library_name(target: str) -> str:
    """File name of the library for ``target`` ("cpu" or "cuda")."""
    return f"libhf_fastpath_{target}.so"


def sources(target: str) -> list[Path]:
    """Source files of ``target``, sorted."""
    patterns = ("*_cpu.cpp", *(f"*{end}" for end in CPU_FLAGS)) if target == "cpu" else ("*.cu", "*_cuda.cpp")
    return sorted(path for pattern in patterns for path in source_dir().glob(f"*/{pattern}"))


def sources_hash(target: str) -> str:
    """Hash of everything the library is made from: sources, headers and this recipe."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    headers = [*source_dir().glob("*/*.h"), *source_dir().glob("*/*.cuh")]
    for path in sorted({*sources(target), *headers}):
        digest.update(path.relative_to(source_dir()).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Toolchain:
    """Compilers and torch headers a build uses."""

    cxx: str
    torch_dir: Path
    nvcc: str | None = None


def find_torch() -> Path:
    """Folder of the installed torch, found without importing it.

    pip's isolated build hides the environment's packages from ``import``; they are still on disk where
    ``sysconfig`` says, so torch is never installed a second time for the build.

    Raises:
        BuildError: no torch.
    """
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.submodule_search_locations:
            return Path(list(spec.submodule_search_locations)[0])
    for key in ("platlib", "purelib"):
        candidate = Path(sysconfig.get_paths()[key]) / "torch"
        if (candidate / "include").is_dir():
            return candidate
    raise BuildError("torch is not installed here: pip install 'torch>=2.10', then build again")


def find_nvcc() -> str | None:
    """Path of nvcc: CUDA_HOME, then PATH, then the usual folder."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.path.join(home, "bin", "nvcc") for home in homes]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def find_toolchain(target: str) -> Toolchain:
    """Compilers for ``target``.

    Raises:
        BuildError: names what is missing.
    """
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not cxx:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX")
    nvcc = find_nvcc() if target == "cuda" else None
    if target == "cuda" and nvcc is None:
        raise BuildError("no nvcc: install the CUDA toolkit (12.8 or newer) or set CUDA_HOME")
    return Toolchain(cxx, find_torch(), nvcc)


def _version(command: str) -> str:
    result = None
    with contextlib.suppress(OSError):
        result = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True)
    if result is None or result.returncode:
        raise BuildError(f"`{command} --version` fails: set CXX or CUDA_HOME to compilers that work")
    return result.stdout.strip()


def _cuda_home(nvcc: str) -> Path:
    for line in subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr.splitlines():
        if match := re.match(r"#\$ TOP=(.*)", line):
            return Path(match.group(1)).resolve()
    return Path(nvcc).resolve().parent.parent


def _gencode(archs: Sequence[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = max(archs, key=lambda arch: int(re.match(r"\d+", arch).group()))
    if newest.isdigit():  # PTX of the newest generic architecture, for GPUs not yet made
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return flags


def _ninja_text(target: str, tools: Toolchain, archs: Sequence[str], flags: Sequence[str]) -> str:
    csrc = source_dir()
    include = [f"-I{csrc}", f"-isystem{tools.torch_dir / 'include'}"]
    common = ["-O3", "-std=c++17", "-g0", *flags]
    cxxflags = [*common, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    cxxflags += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *include]
    link = f"$cxx -shared -o $out $in -L{tools.torch_dir / 'lib'} -ltorch_cpu {' '.join(flags)}"
    nvccflags: list[str] = []
    if target == "cuda":
        home = _cuda_home(tools.nvcc)
        cxxflags += ["-DUSE_CUDA", f"-isystem{home / 'include'}"]
        nvccflags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v", f"-I{csrc}"]
        nvccflags += _gencode(archs)
        nvccflags += [flag for flag in flags if flag.startswith("-D")]
        link = (
            f"$nvcc -shared -cudart static -o $out $in -L{tools.torch_dir / 'lib'} -ltorch_cpu "
            "-Xlinker=--exclude-libs=libcudart_static.a"
        )
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {tools.cxx}",
        f"nvcc = {tools.nvcc or 'false'}",
        f"cxxflags = {' '.join(cxxflags)}",
        f"nvccflags = {' '.join(nvccflags)}",
        "rule cxx\n  command = $cxx $cxxflags $extra -MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        "rule nvcc\n  command = $nvcc $nvccflags -c $in -o $out 2> $out.ptxas || (cat $out.ptxas; exit 1)",
        f"rule link\n  command = {link}",
    ]
    objects = []
    for path in sources(target):
        obj = f"{path.parent.name}_{path.name}.o"
        objects.append(obj)
        rule = "nvcc" if path.suffix == ".cu" else "cxx"
        extra = next((flags for end, flags in CPU_FLAGS.items() if path.name.endswith(end)), "")
        lines.append(f"build {obj}: {rule} {path}\n  extra = {extra}")
    lines.append(f"build {library_name(target)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _ninja() -> str:
    path = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        raise BuildError("ninja is not installed: pip install ninja")
    return path


def build(
    target: str,
    output_dir: Path,
    cuda_archs: Sequence[str] = WHEEL_CUDA_ARCHS,
    progress: Callable[[str], None] = print,
    flags: Sequence[str] = (),
) -> Path:
    """Compile the library of ``target`` into ``output_dir``, atomically.

    Args:
        target: ``"cpu"`` or ``"cuda"``.
        output_dir: folder for the library, a ``.json`` that says what it was made from, and for CUDA the
            compiler's resource reports (``.ptxas``).
        cuda_archs: compute capabilities without the dot, e.g. ``("80", "90a")``.
        progress: called with a line when the build starts and when it ends.
        flags: extra compiler and linker flags (sanitizers).

    Returns:
        Path of the library.

    Raises:
        BuildError: a tool is missing or the compiler failed; carries the compiler's output.
    """
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}, expected one of {', '.join(TARGETS)}")
    tools = find_toolchain(target)
    ninja = _ninja()
    output_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    what = "CPU" if target == "cpu" else f"CUDA (sm_{', sm_'.join(cuda_archs)})"
    progress(f"hf_fastpath: building the {what} kernels, {len(sources(target))} files ...")
    with tempfile.TemporaryDirectory(prefix="hf_fastpath_build_") as work:
        Path(work, "build.ninja").write_text(_ninja_text(target, tools, cuda_archs, flags))
        result = subprocess.run([ninja, "-C", work], capture_output=True, text=True)
        if result.returncode:
            raise BuildError(f"building the {what} kernels failed:\n{result.stdout[-6000:]}{result.stderr[-2000:]}")
        info = {
            "target": target,
            "sources": sources_hash(target),
            "cuda_archs": list(cuda_archs) if target == "cuda" else [],
            "compiler": _version(tools.cxx).splitlines()[0],
        }
        for report in Path(work).glob("*.ptxas"):
            shutil.copy(report, output_dir / report.name)
        # A library without a description is never loaded: so whenever this is interrupted, no wrong pair is left.
        description_path = output_dir / f"{library_name(target)}.json"
        description_path.unlink(missing_ok=True)
        _replace(output_dir / library_name(target), Path(work, library_name(target)).read_bytes())
        _replace(description_path, json.dumps(info, indent=1).encode())
    progress(f"hf_fastpath: built in {time.monotonic() - started:.0f} s")
    return output_dir / library_name(target)


def _replace(path: Path, content: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.chmod(0o755)
    os.replace(scratch, path)


def description(library: Path) -> dict | None:
    """What :func:`build` noted beside ``library``, or None if there is no complete library."""
    try:
        return json.loads(Path(f"{library}.json").read_text()) if library.is_file() else None
    except (OSError, ValueError):
        return None


def cache_dir(target: str, cuda_archs: Sequence[str] = ()) -> Path:
    """Folder under the user's cache for a build of the present sources with the present tools."""
    tools = find_toolchain(target)
    parts = [sources_hash(target), TORCH_TARGET_VERSION, _version(tools.cxx), *cuda_archs]
    parts += [_version(tools.nvcc)] if tools.nvcc else []
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hf_fastpath" / key


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``directory``, so that one process builds and the others wait for it."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ---- ptxas report -------------------------------------------------------------------------------------------

PTXAS_COLUMNS = ("source", "kernel", "arch", "registers", "spill_store_bytes", "spill_load_bytes", "smem_bytes")


def parse_ptxas(report: Path) -> list[dict[str, str]]:
    """Rows of ``PTXAS_COLUMNS`` out of one ``-Xptxas -v`` report."""
    rows = []
    kernel = arch = ""
    spills = ("0", "0")
    for line in report.read_text().splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            kernel, arch = match.groups()
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = match.groups()
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            smem = re.search(r"(\d+) bytes smem", line)
            values = (
                report.name.split(".cu")[0],
                kernel,
                arch,
                match.group(1),
                *spills,
                smem.group(1) if smem else "0",
            )
            rows.append(dict(zip(PTXAS_COLUMNS, values)))
    return rows


def write_ptxas_report(directory: Path, path: Path) -> list[str]:
    """Write the resource table of a CUDA build and compare its spills with the table that was there.

    Returns:
        One line for every kernel that spills more than before; empty when all is well.
    """
    rows = [row for report in sorted(directory.glob("*.ptxas")) for row in parse_ptxas(report)]
    rows.sort(key=lambda row: (row["source"], row["kernel"], row["arch"]))
    names = [row["kernel"] for row in rows]
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    for row, name in zip(rows, names):
        name = re.sub(r"\([\w:]+\)(?=\d)", "", name.replace("(anonymous namespace)::", ""))  # enum template arguments
        row["kernel"] = re.sub(r"\(.*", "", name).replace("void ", "")
    before = {}
    if path.is_file():
        with path.open(newline="") as handle:
            before = {(row["kernel"], row["arch"]): int(row["spill_store_bytes"]) for row in csv.DictReader(handle)}
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, PTXAS_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return [
        f"{row['kernel']} (sm_{row['arch']}) spills {row['spill_store_bytes']} bytes"
        for row in rows
        if int(row["spill_store_bytes"]) > before.get((row["kernel"], row["arch"]), 0)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the native libraries of hf_fastpath.")
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--output", type=Path, default=LIBRARY_DIR, help="folder for the libraries")
    parser.add_argument("--cuda-arch", nargs="+", default=list(WHEEL_CUDA_ARCHS), help="e.g. 80 90a")
    parser.add_argument("--ptxas-report", type=Path, help="CSV to write; exit 1 if a kernel spills more than it says")
    parser.add_argument("--flags", nargs="*", default=[], help="extra flags, e.g. -fsanitize=address")
    arguments = parser.parse_args(argv)
    try:
        for target in arguments.targets:
            build(target, arguments.output, arguments.cuda_arch, flags=arguments.flags)
    except BuildError as error:
        print(f"hf_fastpath: {error}", file=sys.stderr)
        return 1
    if arguments.ptxas_report:
        spills = write_ptxas_report(arguments.output, arguments.ptxas_report)
        print("\n".join(f"new spill: {line}" for line in spills) or f"no new spills ({arguments.ptxas_report})")
        return 1 if spills else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
