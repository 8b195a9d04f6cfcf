"""What a machine is taken to build and run: platforms, torch's build, compilers, GPUs, variables. Stand-ins take the
part of machines unlike this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fastpath.native import toolchain
from hf_fastpath.native.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = ("HF_FASTPATH_TARGETS", "HF_FASTPATH_CUDA_ARCHS", "MAX_JOBS", "CXX", "CUDA_HOME", "CUDA_PATH")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


PLATFORMS = (
    ("Linux", "x86_64", None, None),
    ("Linux", "AMD64", None, None),
    (
        "Linux",
        "arm64",
        None if "aarch64" in toolchain.CPU_FLAGS else "no CPU kernels for arm64: they are made for x86_64",
        None,
    ),
    (
        "Linux",
        "ppc64le",
        "no CPU kernels for ppc64le",
        "no CUDA kernels for ppc64le: they are made",
    ),
    ("Darwin", "arm64", "no CPU kernels for macOS: they are made for Linux", "no CUDA kernels for macOS"),
    ("Windows", "AMD64", "no CPU kernels for Windows: they are made for Linux", "no CUDA kernels for Windows"),
)


@pytest.mark.parametrize(("system", "machine", "cpu", "cuda"), PLATFORMS)
def test_platforms_say_what_they_are(system, machine, cpu, cuda, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for target, expected in (("cpu", cpu), ("cuda", cuda)):
        found = toolchain.unsupported_platform(target)
        assert found is None if expected is None else found.startswith(expected)


HIDDEN = """
import sys
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None  # importing it fails, as on Windows
import os, platform
for name in ("uname", "geteuid", "sched_getaffinity", "getuid"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"
platform.system = lambda: "Windows"
platform.machine = lambda: "AMD64"
import types, importlib
package = types.ModuleType("recipe")
package.__path__ = [sys.argv[1]]
sys.modules["recipe"] = package
build = importlib.import_module("recipe.native.build")
try:
    build.build("cpu", build.Path("nowhere"))
except build.BuildError as error:
    print(error)
print(importlib.import_module("recipe.native.toolchain").jobs("cpu") > 0)
print("torch" in sys.modules)
"""


def test_the_recipe_can_be_imported_on_windows():
    """It imports no module that only POSIX has, and nothing of torch; a build first says what is missing."""
    command = [sys.executable, "-c", HIDDEN, str(ROOT / "hf_fastpath")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["no CPU kernels for Windows: they are made for Linux", "True", "False"]


def torch_of(folder: Path, **facts: str | None) -> Path:
    """Make a folder like torch's, whose version.py says ``facts``."""
    (folder / "torch" / "include").mkdir(parents=True, exist_ok=True)
    lines = ["from typing import Optional", "__version__ = '2.11.0'", "debug = False"]
    lines += [f"{name}: Optional[str] = {value!r}" for name, value in facts.items()]
    (folder / "torch" / "version.py").write_text("\n".join(lines) + "\n")
    return folder / "torch"


def test_torch_is_found_without_importing_it():
    code = (
        "import sys, types; sys.modules['recipe'] = made = types.ModuleType('recipe'); made.__path__ = sys.argv[1:]; "
    )
    code += "from recipe.native import toolchain; print(toolchain.find_torch()); "
    code += "print('torch' in sys.modules, toolchain.torch_facts(toolchain.find_torch())['__version__'])"
    command = [sys.executable, "-c", code, str(ROOT / "hf_fastpath")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    import torch

    assert Path(said[0]) == Path(torch.__file__).parent and said[1] == f"False {torch.__version__}"


def test_missing_torch_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: dict.fromkeys(("platlib", "purelib"), str(tmp_path)))
    monkeypatch.setattr(toolchain.site, "getsitepackages", lambda: [])
    monkeypatch.setattr(toolchain.site, "ENABLE_USER_SITE", False)
    with pytest.raises(BuildError, match="torch is not installed here: pip install 'torch>=2.10'"):
        toolchain.find_torch()
    made = torch_of(tmp_path, cuda=None)
    assert toolchain.find_torch() == made


def smi(monkeypatch, tmp_path, text: str, status: int = 0) -> None:
    """Make an nvidia-smi that prints ``text``, first on PATH."""
    (tmp_path / "smi").mkdir()
    path = tmp_path / "smi" / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("facts", "said", "expected"),
    (
        ({"cuda": None, "hip": None}, "9.0", "torch 2.11.0 is built without CUDA"),
        ({"cuda": None, "hip": "6.4"}, "9.0", "torch 2.11.0 is built for ROCm"),
        ({"cuda": "13.0", "hip": None}, "", "no GPU at hand to build for: HF_FASTPATH_CUDA_ARCHS="),
        ({"cuda": "13.0", "hip": None}, "7.5\\n6.1", "GPUs of compute capability 7.5, 6.1: 8.0 is the least"),
        ({"cuda": "13.0", "hip": None}, "7.5\\n9.0\\n", None),
        ({"cuda": "13.0"}, "8.9\\n", None),
    ),
)
def test_no_cuda_target_for_what_cannot_run_it(facts, said, expected, monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, said)
    monkeypatch.setattr(toolchain, "find_torch", lambda: torch_of(tmp_path, **facts))
    reason = toolchain.why_not("cuda")
    assert reason is None if expected is None else reason.startswith(expected)
    assert toolchain.why_not("cpu") is None
    if facts.get("cuda"):
        monkeypatch.setenv("HF_FASTPATH_CUDA_ARCHS", "90a")
        assert toolchain.why_not("cuda") is None, "architectures that are named need no GPU"


def test_architectures_of_the_gpus_at_hand(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, "9.0\\n8.0\\n9.0\\n7.5\\n12.0\\n10.3\\n8.9\\n")
    found = toolchain.gpu_capabilities()
    assert toolchain.cuda_archs_of(found) == ("80", "89", "90a", "103", "120")


@pytest.mark.parametrize(("text", "status"), (("9.0", 9), ("No devices were found", 0), ("[N/A]", 0), ("", 0)))
def test_an_nvidia_smi_that_knows_no_gpu(text, status, monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, text, status)
    assert toolchain.gpu_capabilities() == []


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.gpu_capabilities() == []


@pytest.mark.parametrize(
    ("value", "expected"),
    (("", None), ("cpu", ("cpu",)), ("cuda", ("cuda",)), ("cuda cpu", ("cpu", "cuda")), ("cpu,cuda", ("cpu", "cuda")))
    + (("none", ()),),
)
def test_targets_that_are_asked_for(value, expected, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_TARGETS", value)
    assert toolchain.wanted_targets() == expected


@pytest.mark.parametrize("value", ("gpu", "cpu none", "all", "CPU"))
def test_targets_that_do_not_exist_are_named(value, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_TARGETS", value)
    with pytest.raises(ValueError, match=f"HF_FASTPATH_TARGETS is '{value}', expected 'cpu', 'cuda', 'cpu cuda' or"):
        toolchain.wanted_targets()


def test_architectures_that_are_asked_for(monkeypatch):
    assert toolchain.wanted_cuda_archs() is None
    for value, expected in (("all", toolchain.WHEEL_CUDA_ARCHS), ("80 90a 80", ("80", "90a")), ("100f", ("100f",))):
        monkeypatch.setenv("HF_FASTPATH_CUDA_ARCHS", value)
        assert toolchain.wanted_cuda_archs() == expected
    for value in ("sm_80", "all 80", "9", "80;90"):
        monkeypatch.setenv("HF_FASTPATH_CUDA_ARCHS", value)
        with pytest.raises(ValueError, match=f"HF_FASTPATH_CUDA_ARCHS is '{value}', expected 'all' or a list"):
            toolchain.wanted_cuda_archs()


def test_jobs_fit_into_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    for gigabytes, cpu, cuda in ((64, 16, 16), (9, 9, 4), (1, 1, 1), (0, 1, 1)):
        monkeypatch.setattr(toolchain, "_free_memory", lambda gigabytes=gigabytes: gigabytes << 30)
        assert (toolchain.jobs("cpu"), toolchain.jobs("cuda")) == (cpu, cuda)
    monkeypatch.setattr(toolchain, "_free_memory", lambda: None)
    assert toolchain.jobs("cuda") == 16
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.jobs("cuda") == 3
    for value in ("0", "many", "-1"):
        monkeypatch.setenv("MAX_JOBS", value)
        with pytest.raises(BuildError, match=f"MAX_JOBS is '{value}', expected a whole number from 1 on"):
            toolchain.jobs("cpu")


def test_free_memory_is_known_here():
    free = toolchain._free_memory()
    assert free is None or 0 < free < 1 << 50


COMPILERS = {
    "not there": ("/no/such/compiler", r"`/no/such/compiler --version` fails \(No such file or directory\): set CXX"),
    "no program": ("/etc/hostname", r"`/etc/hostname --version` fails \((Permission denied|Exec format error)\)"),
    "failing": ("false", r"`false --version` fails \(exit status 1\)"),
    "silent": ("sh -c true", "`sh -c true --version` says nothing"),
    "a quote too many": ("g++ 'x", 'CXX is "g\\+\\+ \'x", which no shell understands'),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_odd_compilers_are_named(kind, monkeypatch):
    command, message = COMPILERS[kind]
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=message):
        toolchain.version(toolchain.find_toolchain("cpu").cxx)


def test_a_compiler_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(toolchain, "_ASK_SECONDS", 0.2)
    with pytest.raises(BuildError, match=r"fails \(it does not answer\)"):
        toolchain.version("sh -c 'sleep 20'")
