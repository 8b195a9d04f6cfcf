"""What this machine can build and run: its platform, installed torch, compilers and GPUs; torch is never imported."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import switches

TARGETS = ("cpu", "cuda")
#: architectures of a wheel; a local build takes the architectures of the GPUs at hand
WHEEL_CUDA_ARCHS = ("80", "86", "89", "90a", "100", "120")
#: the oldest compute capability that the CUDA kernels are written for
MIN_CUDA_CAPABILITY = (8, 0)
_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#: kind of processor that CPU kernels are made for -> end of a CPU source's name -> its compiler flags. Which source's
#: code runs is decided at run time; other processors' sources are not compiled.
CPU_FLAGS = {
    "x86_64": {
        "_avx2.cpp": _AVX2,
        "_avx512.cpp": _AVX512,
        "_avx512_bf16.cpp": f"{_AVX512} -mavx512bf16",
        "_avx512_vnni.cpp": f"{_AVX512} -mavx512vnni",
    },
}
_SYSTEMS = {"Darwin": "macOS"}
#: kind of processor -> other names that systems have for it
_PROCESSORS = {"x86_64": ("amd64",), "aarch64": ("arm64",)}
#: bytes of memory that one compiler takes at most
_BYTES_PER_JOB = {"cpu": 1 << 30, "cuda": 2 << 30}
_ASK_SECONDS = 60


class BuildError(RuntimeError):
    """A native library could not be built; the message is one line: what is missing, or the compiler's first error."""


@dataclass(frozen=True)
class Toolchain:
    """The compilers and torch headers that a build uses; ``cxx`` and ``nvcc`` are shell words."""

    cxx: str
    torch_dir: Path
    nvcc: str | None = None


# ---- platforms ---------------------------------------------------------------------------------------------


def processor() -> str:
    """Return the kind of this machine's processor: "x86_64", "aarch64", or what the system calls another."""
    machine = platform.machine().lower()
    return next((name for name, others in _PROCESSORS.items() if machine in others), machine)


def unsupported_platform(target: str) -> str | None:
    """Return why there are no kernels of ``target`` for this operating system and processor; None if there are."""
    system, machine = platform.system(), platform.machine().lower()
    machines = tuple(CPU_FLAGS if target == "cpu" else _PROCESSORS)
    name = target.upper()
    if system != "Linux":
        return f"no {name} kernels for {_SYSTEMS.get(system, system or sys.platform)}: they are made for Linux"
    if processor() not in machines:
        return f"no {name} kernels for {machine or 'this processor'}: they are made for {' and '.join(machines)}"
    return None


# ---- torch -------------------------------------------------------------------------------------------------


def find_torch() -> Path:
    """Return the folder of the installed torch, found without importing torch.

    pip's isolated build hides the environment's packages from ``import``. The packages are still on disk, in folders
    that ``sysconfig`` and ``site`` name, so torch is never installed a second time for the build.

    Raises:
        BuildError: torch is not installed.
    """
    folders: list[str] = []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        folders += (spec and spec.submodule_search_locations) or ()
    paths = sysconfig.get_paths()
    roots = [paths["platlib"], paths["purelib"], *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        roots.append(site.getusersitepackages())
    for folder in (*map(Path, folders), *(Path(root, "torch") for root in roots)):
        if (folder / "version.py").is_file() and (folder / "include").is_dir():
            return folder
    raise BuildError("torch is not installed here: pip install 'torch>=2.10', then build again")


def torch_facts(torch_dir: Path) -> dict[str, str | None]:
    """Return ``__version__``, ``cuda`` and ``hip`` of torch/version.py, None for what is not there."""
    facts: dict[str, str | None] = dict.fromkeys(("__version__", "cuda", "hip"))
    for line in (torch_dir / "version.py").read_text(errors="replace").splitlines():
        match = re.match(r"(__version__|cuda|hip)\b[^=]*=\s*(.+)", line)
        if match:
            with contextlib.suppress(ValueError, SyntaxError):
                facts[match.group(1)] = ast.literal_eval(match.group(2))
    return facts


# ---- compilers ---------------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    """Return the path of nvcc: from CUDA_HOME, then from PATH, then from the usual folder; or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.path.join(home, "bin", "nvcc") for home in homes]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def _words(name: str, command: str) -> list[str]:
    """Split a compiler in an environment variable: a path, which may have spaces, or a command with arguments."""
    if os.path.isfile(command):
        return [command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BuildError(f"{name} is {command!r}, which no shell understands: {error}") from None


def find_toolchain(target: str) -> Toolchain:
    """Find the compilers for ``target``.

    Raises:
        BuildError: the message names what is missing.
    """
    cxx = os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("clang++")
    if not cxx:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX")
    nvcc = find_nvcc() if target == "cuda" else None
    if target == "cuda" and nvcc is None:
        raise BuildError("no nvcc: install the CUDA toolkit (12.8 or newer) or set CUDA_HOME")
    return Toolchain(shlex.join(_words("CXX", cxx)), find_torch(), nvcc and shlex.quote(nvcc))


def version(command: str) -> str:
    """Return what a compiler says about its version.

    Raises:
        BuildError: the compiler does not run.
    """
    asked = [*shlex.split(command), "--version"]
    try:
        result = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS, stdin=subprocess.DEVNULL
        )
        problem = f"exit status {result.returncode}" if result.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = getattr(error, "strerror", None) or "it does not answer"
    if problem is not None:
        raise BuildError(f"`{command} --version` fails ({problem}): set CXX or CUDA_HOME to compilers that work")
    said = result.stdout.strip() or result.stderr.strip()
    if not said:
        raise BuildError(f"`{command} --version` says nothing: set CXX or CUDA_HOME to compilers that work")
    return said


def shared_cxx_library(cxx: str) -> list[str]:
    """Return the flags that link GCC's shared C++ library, if the compiler knows one.

    If a system lacks the file that ``-lstdc++`` means, the linker takes the static library. Then the text of the first
    error ends the process, because the streams of two C++ libraries in a process do not know each other's locales.
    """
    asked = [*shlex.split(cxx), "-print-file-name=libstdc++.so.6"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, errors="replace").stdout.strip())
    return [f"-L{found.parent.resolve()}", f"-l:{found.name}"] if found.is_absolute() else []


def cuda_home(nvcc: str) -> Path:
    """Return the toolkit that nvcc belongs to; nvcc may be a script or a link in another folder."""
    asked = [*shlex.split(nvcc), "--dryrun", "-c", "x.cu"]
    for line in subprocess.run(asked, capture_output=True, text=True, errors="replace").stderr.splitlines():
        if match := re.match(r"#\$ TOP=(.*)", line):
            return Path(match.group(1)).resolve()
    return Path(shlex.split(nvcc)[0]).resolve().parent.parent


def jobs(target: str) -> int:
    """Return how many compilers run side by side: one for each core, fewer if memory is short, or ``MAX_JOBS``.

    Raises:
        BuildError: MAX_JOBS is no whole number from 1 on.
    """
    wanted = os.environ.get("MAX_JOBS", "").strip()
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise BuildError(f"MAX_JOBS is {wanted!r}, expected a whole number from 1 on")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = _free_memory()
    return cores if free is None else max(1, min(cores, free // _BYTES_PER_JOB[target]))


def _free_memory() -> int | None:
    """Return the bytes that new processes may take by the kernel's and the container's limit; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024)
    with contextlib.suppress(OSError, ValueError):  # the file holds "max" if there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        found.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(found) if found else None


# ---- what the environment asks for -------------------------------------------------------------------------

#: what ``HF_FASTPATH_BUILD`` may name; switched on is "auto", switched off "never"
BUILD_MODES = ("auto", "never", "force")


def build_mode() -> str:
    """Return the value of ``HF_FASTPATH_BUILD``, one of :data:`BUILD_MODES`.

    Raises:
        ValueError: the value is none of them, and no switch.
    """
    return switches.mode("HF_FASTPATH_BUILD", BUILD_MODES, on="auto", off="never")


def wanted_targets() -> tuple[str, ...] | None:
    """Return the value of ``HF_FASTPATH_TARGETS``: what to build, ``()`` for ``none``, or None if it is not set.

    Raises:
        ValueError: the value is neither ``none`` nor some of cpu and cuda.
    """
    given = os.environ.get("HF_FASTPATH_TARGETS", "").replace(",", " ").split()
    if not given:
        return None
    if given == ["none"]:
        return ()
    if not set(given) <= set(TARGETS):
        raise ValueError(f"HF_FASTPATH_TARGETS is {' '.join(given)!r}, expected 'cpu', 'cuda', 'cpu cuda' or 'none'")
    return tuple(target for target in TARGETS if target in given)


def wanted_cuda_archs() -> tuple[str, ...] | None:
    """Return the value of ``HF_FASTPATH_CUDA_ARCHS``, with a wheel's for ``all``; None if it is not set.

    Raises:
        ValueError: the value is neither ``all`` nor a list of architectures.
    """
    given = os.environ.get("HF_FASTPATH_CUDA_ARCHS", "").replace(",", " ").split()
    if given == ["all"]:
        return WHEEL_CUDA_ARCHS
    if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in given):
        raise ValueError(f"HF_FASTPATH_CUDA_ARCHS is {' '.join(given)!r}, expected 'all' or a list such as '80 90a'")
    return tuple(dict.fromkeys(given)) or None


def cuda_arch(major: int, minor: int) -> str:
    """Return the architecture that serves GPUs of a compute capability best."""
    return "90a" if major == 9 else f"{major}{minor}"


def cuda_archs_of(capabilities: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Return the architectures to build for these GPUs, the oldest first, without those that no kernel serves."""
    served = sorted({each for each in capabilities if each >= MIN_CUDA_CAPABILITY})
    return tuple(dict.fromkeys(cuda_arch(*each) for each in served))


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the GPUs at hand, from nvidia-smi; empty if nvidia-smi names none."""
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS)
        if result.returncode == 0:
            return [
                (int(major), int(minor)) for major, minor in re.findall(r"^\s*(\d+)\.(\d+)\s*$", result.stdout, re.M)
            ]
    return []


def why_not(target: str) -> str | None:
    """Return why this machine could not run a library of ``target``, as far as is known before a build; or None.

    Raises:
        BuildError: torch is missing.
        ValueError: an environment variable has no valid value.
    """
    if reason := unsupported_platform(target):
        return reason
    if target == "cpu":
        return None
    facts = torch_facts(find_torch())
    if facts["hip"]:
        return f"torch {facts['__version__']} is built for ROCm: the kernels are CUDA's"
    if not facts["cuda"]:
        return f"torch {facts['__version__']} is built without CUDA"
    if wanted_cuda_archs() is None:
        found = gpu_capabilities()
        if not found:
            return "no GPU at hand to build for: HF_FASTPATH_CUDA_ARCHS='90a' (or 'all') names architectures"
        if not cuda_archs_of(found):
            known = ", ".join(f"{major}.{minor}" for major, minor in found)
            return f"GPUs of compute capability {known}: {'.'.join(map(str, MIN_CUDA_CAPABILITY))} is the least"
    return None
