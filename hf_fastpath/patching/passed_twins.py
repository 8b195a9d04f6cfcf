"""Small twins that decode as stock does: this process remembers them, and a file in the cache folder tells others.

``<root>/twins/<key>`` has the twin's difference, a number. The key is a hash of all that a twin's steps are made of.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import marshal
import math
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from ..compat import transformers_version
from ..native import build_cache, loader
from ..native.toolchain import BuildError

_PACKAGE = Path(__file__).resolve().parent.parent
_known: dict[str, float] = {}


def find(key: str) -> float | None:
    """Return the difference that a twin with this key showed, here or in another process; None if none has passed."""
    if key not in _known:
        with suppress(OSError, BuildError, ValueError):  # no such file, or none that may be trusted or read
            path = _file(key)
            if build_cache.why_unsafe(path) is None:
                found = float(path.read_text())
                if math.isfinite(found):
                    _known[key] = found
                    build_cache.used(path)
    return _known.get(key)


def keep(key: str, difference: float, twin: nn.Module) -> None:
    """Note that a twin has passed; for this process alone if the cache cannot be written, or if a part of the twin's
    code is in no file, so that a later process may have other code by the same name."""
    _known[key] = difference
    if all(_source(each) is not None for each in _classes(twin)):
        with suppress(OSError, BuildError):
            path = _file(key)
            build_cache.make_folder(path.parent)
            build_cache.replace(path, repr(difference).encode(), 0o644)


def key_of(twin: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return a hash of a twin's config and sizes, of the code of its classes and of this package, of the kernels, of
    versions, and of the device and the dtype that the twin is tried on."""
    config = {name: value for name, value in twin.config.to_dict().items() if name != "_name_or_path"}
    sizes = {name: list(each.shape) for name, each in twin.named_parameters()}
    chosen = [getattr(twin.config, f"_{seam}_implementation", None) for seam in ("attn", "experts")]
    versions = [transformers_version(), torch.__version__, sys.version]
    known = [config, sizes, chosen, versions, _device(device), str(dtype)]
    digest = hashlib.sha256(json.dumps(known, default=str).encode())
    digest.update(_own_code())
    for each in _classes(twin):
        digest.update(f"{each.__module__}.{each.__qualname__}".encode())
        digest.update(_source(each) or b"")
        forward = inspect.unwrap(each.forward)
        if hasattr(forward, "__code__"):  # it may have been put into the class since
            digest.update(marshal.dumps(forward.__code__, 2))  # without marks of objects that are shared just now
    return digest.hexdigest()[:32]


def _file(key: str) -> Path:
    return build_cache.root() / build_cache.TWINS / key


def _device(device: torch.device) -> list[str]:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return [device.type, name, (loader.description(device.type) or {}).get("sha256", "")]


def _classes(twin: nn.Module) -> list[type]:
    """Return the classes of the twin's modules but for PyTorch's, by name."""
    found = {type(each) for each in twin.modules()}
    return sorted((each for each in found if each.__module__.partition(".")[0] != "torch"), key=_name_of)


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _source(kind: type) -> bytes | None:
    """Return a hash of the file with a class; None if there is none."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return None if path is None else _hash_of(path)


@functools.cache
def _hash_of(path: str) -> bytes | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return None


@functools.cache
def _own_code() -> bytes:
    files = sorted(_PACKAGE.rglob("*.py"))
    return b"".join(filter(None, (_hash_of(str(path)) for path in files)))
