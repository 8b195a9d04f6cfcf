"""What notes in the cache folder depend on beside a model: code, versions, the device; and how such a note is read."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
from pathlib import Path

import sympy
import torch
import transformers
from torch import nn

from . import compat
from .compat import transformers_version
from .decode.calls.pass_table import switched_off
from .native import build_cache, loader

_PACKAGE = Path(__file__).resolve().parent


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that forwards and recordings are made with, by name."""
    found = {each.__name__: str(each.__version__) for each in (transformers, torch, sympy)}
    return {"Python": sys.version, **found, "transformers as installed": str(transformers_version())}


def surroundings(device: torch.device) -> dict[str, str]:
    """Return versions, the device with its kernels, and the passes that are switched off, by name."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    kernels = (loader.description(device.type) or {}).get("sha256", "")
    others = {"the device": f"{device.type}, {name}", "the kernels": kernels}
    return versions() | others | {"HF_FASTPATH_PASSES": ",".join(sorted(switched_off()))}


def is_lasting() -> bool:
    """Whether a later process has the same code under the same versions: this package was not edited while the process
    ran, and no library is a development version."""
    return own_code() is not None and not any(map(compat.is_development, (transformers.__version__, torch.__version__)))


@functools.cache
def own_code() -> bytes | None:
    """Return a digest of this package; None if it was edited while this process ran."""
    found = [compat.unchanged_digest(str(path)) for path in sorted(_PACKAGE.rglob("*.py"))]
    return None if None in found else b"".join(filter(None, found))


def classes_of(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules but for PyTorch's, by name."""
    found = {type(each) for each in model.modules()}
    ours = (each for each in found if each.__module__.partition(".")[0] != "torch")
    return sorted(ours, key=lambda each: (each.__module__, each.__qualname__))


def modules_of(model: nn.Module) -> list[str]:
    """Return the names of the Python modules with code of a model's classes, and of what all models call."""
    found = {base.__module__ for each in classes_of(model) for base in each.__mro__[:-1]}
    return [*compat.CORE_MODULES, *sorted(name for name in found if name.partition(".")[0] != "torch")]


def code_of(model: nn.Module) -> dict[str, str] | None:
    """Return digests of this package, and of the Python modules with code of a model's classes, as they run in this
    process, by name; None if a later process may have other code under the same names."""
    ours = own_code()
    found = {name: compat.module_digest(name) for name in modules_of(model)}
    if ours is None or not is_lasting() or None in found.values():
        return None
    code = {name: digest.hex() for name, digest in found.items() if digest is not None}
    return code | {"hf_fastpath": hashlib.sha256(ours).hexdigest()}


def write_note(path: Path, text: str) -> None:
    """Put a note in place, in a folder of the cache.

    Raises:
        OSError, BuildError: the folder cannot be written.
    """
    build_cache.make_folder(path.parent)
    build_cache.replace(path, text.encode(), 0o644)


def read_note(path: Path, most: int) -> str:
    """Return the text of a note of at most so many bytes.

    Raises:
        OSError: there is none, or a link, a pipe or something else is in its place.
        ValueError: others may have written it, or it is no text of a note's length.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(f"{path} is no note")
        if (reason := build_cache.why_unsafe(path)) is not None:
            raise ValueError(reason)
        with open(handle, "rb", closefd=False) as file:
            return file.read(most).decode()
    finally:
        os.close(handle)
