"""Make the folder that Hugging Face's ``kernels`` loads: ``python release/make_hub.py dist/*.whl dist/hub``.

Layout: ``build/<variant>/`` with ``metadata.json``, ``__init__.py``, ``layers.py`` and the package. A variant names the
oldest torch whose stable ABI the libraries use, CPU or CUDA's version, and the platform.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import sys
import tempfile
import types
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_package = types.ModuleType("hf_fastpath_recipe")  # importing the package itself would import torch
_package.__path__ = [str(ROOT / "hf_fastpath")]
sys.modules[_package.__name__] = _package
recipe = importlib.import_module("hf_fastpath_recipe.native.build")
toolchain = importlib.import_module("hf_fastpath_recipe.native.toolchain")

NAME = "hf-fastpath"
#: the oldest release of kernels that the layout was tried with
KERNELS_MINVER = "0.17.0"


def stable_abi() -> str:
    """Return the oldest torch whose stable ABI the libraries use, as variants write it: "210" for 2.10."""
    number = int(recipe.TORCH_TARGET_VERSION, 16)
    return f"{number >> 56}{number >> 48 & 0xFF}"


def cuda_version() -> str:
    """Return the version of the CUDA compiler at hand, as variants write it: "130" for 13.0.

    Raises:
        ValueError: there is no nvcc, or it does not say its version.
    """
    nvcc = toolchain.find_nvcc()
    said = toolchain.version([nvcc]) if nvcc else ""
    if match := re.search(r"release (\d+)\.(\d+)", said):
        return "".join(match.groups())
    raise ValueError("no nvcc says which CUDA made the library: install the one that did, or set CUDA_HOME")


def capability(arch: str) -> str:
    """Return an architecture as a compute capability: "9.0a" for "90a"."""
    digits, suffix = re.fullmatch(r"(\d+)([af]?)", arch).groups()
    return f"{digits[:-1]}.{digits[-1]}{suffix}"


def variants(package: Path, platform: str) -> dict[str, dict]:
    """Return the variants that a package's libraries make: name -> the backend that its metadata states.

    Raises:
        ValueError: the package has no libraries.
    """
    found = {}
    for target in recipe.TARGETS:
        note = recipe.description(package / "lib" / recipe.library_name(target))
        if note is None:
            continue
        if target == "cpu":
            backend, word = {"type": "cpu"}, "cpu"
        else:
            backend = {"type": "cuda", "archs": [capability(arch) for arch in note["cuda_archs"]]}
            word = f"cu{cuda_version()}"
        found[f"torch-stable-abi{stable_abi()}-{word}-{platform}"] = backend
    if not found:
        raise ValueError("the wheel has no compiled kernels: make one with `make wheel`")
    return found


def make(wheel: Path, folder: Path) -> list[Path]:
    """Write the folder of a wheel anew; return the variants' folders.

    Raises:
        ValueError: the wheel is for any platform, or has no libraries.
    """
    version, tag = wheel.stem.split("-")[1], wheel.stem.rpartition("-")[2]
    machine = re.search(r"linux_(?:\d+_\d+_)?(\w+?)(?:\.|$)", tag)
    if machine is None:
        raise ValueError(f"{wheel.name} is for {tag}, expected a wheel for Linux: make one with `make wheel`")
    made = []
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
        package = Path(scratch, "hf_fastpath")
        shutil.rmtree(folder, ignore_errors=True)
        for name, backend in variants(package, f"{machine[1]}-linux").items():
            target = folder / "build" / name
            shutil.copytree(package, target / "hf_fastpath")
            if backend["type"] == "cpu":  # with a GPU, both libraries serve: a model may be on the CPU
                for path in (target / "hf_fastpath" / "lib").glob(f"{recipe.library_name('cuda')}*"):
                    path.unlink()
            for path in (ROOT / "release" / "hub").glob("*.py"):
                shutil.copy(path, target)
            (target / "VERSION").write_text(f"{version}\n")
            facts = {
                "name": NAME,
                "id": f"{NAME.replace('-', '_')}_{name.replace('-', '_')}",
                "version": int(version.split(".")[0]) or 1,
                "kernels-minver": KERNELS_MINVER,
                "license": "Apache-2.0",
                "python-depends": [],
                "backend": backend,
            }
            (target / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
            made.append(target)
    shutil.copy(ROOT / "release" / "hub" / "card.md", folder / "README.md")
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        for path in make(args.wheel, args.folder):
            print(path)
    except ValueError as error:
        raise SystemExit(f"make_hub: {error}") from None
