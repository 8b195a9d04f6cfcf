"""Compile every torch-facing source against the oldest and the newest torch that pyproject.toml admits.

    python tests/compile_check.py               # both; downloads their headers once, into the environment
    python tests/compile_check.py 2.12.1        # one version
    python tests/compile_check.py --headers     # only downloads both

No compiler runs for longer than it takes to check the types: the headers that all files share are read once for each
torch and kept in a precompiled header. CUDA's glue is checked if the toolkit's headers are there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_fastpath.native import build, toolchain

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(sys.prefix, "torch-headers")
#: wheels for other systems hold the same headers, and are far smaller than those with CUDA's libraries
PLATFORMS = [f"macosx_{major}_0_arm64" for major in (11, 12, 13, 14, 15)]
#: the header that every file of a target includes first
SHARED = {"cpu": "common/cpu_glue.h", "cuda": "common/cuda_glue.h"}


def floor() -> str:
    """Return the oldest torch that pyproject.toml admits."""
    return re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1) + ".0"


def pip(*arguments: str) -> str:
    """Run pip for a wheel of another system; return what it prints."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", *(f"--platform={name}" for name in PLATFORMS)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def newest() -> str:
    """Return the newest torch on the index."""
    found = pip("install", "--dry-run", "--ignore-installed", "--target", str(CACHE), "--report", "-", "torch")
    (torch,) = json.loads(found)["install"]
    return torch["metadata"]["version"]


def headers(version: str) -> Path:
    """Return a folder like torch's with the headers of ``version``."""
    folder = CACHE / version / "torch"
    if not (folder / "version.py").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            pip("download", "--dest", scratch, f"torch=={version}")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.startswith("torch/include/torch/")]
                archive.extractall(CACHE / version, wanted)
                archive.extract("torch/version.py", CACHE / version)  # the last file: it says that all are there
    return folder


def errors(version: str) -> list[str]:
    """Return what a compiler says about the sources with the headers of torch ``version``, for each file that fails."""
    tools = toolchain.Toolchain(shlex.join(shlex.split(os.environ.get("CXX") or "g++")), headers(version))
    targets = {"cpu": tools}
    if (nvcc := toolchain.find_nvcc()) is not None:
        targets["cuda"] = toolchain.Toolchain(tools.cxx, tools.torch_dir, shlex.quote(nvcc))
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = []
        for target, each in targets.items():
            flags, folders = build.compile_flags(target, each)
            command = [*shlex.split(each.cxx), "-O0", *flags[1:], *folders]
            shared = Path(scratch, target, SHARED[target])
            shared.parent.mkdir(parents=True)
            shared.write_text(f'#include "{build.source_dir() / SHARED[target]}"\n')
            run([*command, "-x", "c++-header", str(shared), "-o", f"{shared}.gch"])
            sources = [path for path in build.sources(target) if path.name.endswith(f"_{target}.cpp")]
            checks = [
                [*command, "-include", str(shared), "-fsyntax-only", "-Winvalid-pch", str(path)] for path in sources
            ]
            found += pool.map(run, checks)
            print(f"torch {version}: {len(sources)} files of the {target} library checked", flush=True)
        return [text for text in found if text]


def run(command: list[str]) -> str:
    """Run a compiler; return what it says if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return result.stderr if result.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of torch; none: the oldest and the newest")
    parser.add_argument("--headers", action="store_true", help="download the headers, and compile nothing")
    failed, given = 0, parser.parse_args()
    for version in given.versions or (floor(), newest()):
        if given.headers:
            headers(version)
            continue
        for text in errors(version):
            failed += 1
            print(f"torch {version}: {build.first_error(text)}\n{text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
