"""Finds, loads and, when asked to, builds the native libraries: prebuilt, cached build, build now, reference.

``HF_FASTPATH_BUILD`` = ``auto`` (default: build what is missing at ``patch()``), ``never`` (use what is there),
``force`` (build at ``patch()`` even if something is there). ``HF_FASTPATH_NATIVE=0`` loads nothing, so that every
op runs its PyTorch reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import build

BUILD_MODES = ("auto", "never", "force")


@dataclass(frozen=True)
class Status:
    """Which implementation serves a device, and why.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        source: ``"prebuilt"``, ``"cache"``, ``"built"`` or ``"reference"``.
        detail: the library's path, or why there is none.
    """

    device: str
    source: str
    detail: str

    @property
    def native(self) -> bool:
        """Whether compiled kernels serve this device."""
        return self.source != "reference"

    def __str__(self) -> str:
        return f"{self.device}: {self.source} ({self.detail})"


_status = {device: Status(device, "reference", "not looked for yet") for device in build.TARGETS}


def status() -> dict[str, Status]:
    """The present state of both devices."""
    return dict(_status)


def is_native(device: str) -> bool:
    """Whether compiled kernels serve ``device``."""
    found = _status.get(device)
    return found is not None and found.native


def cuda_archs() -> tuple[str, ...]:
    """What the loaded CUDA library was compiled for, as ``build.build`` takes it; empty without a library."""
    found = _status["cuda"]
    info = build.description(Path(found.detail)) if found.native else None
    return tuple((info or {}).get("cuda_archs", ()))


def build_mode() -> str:
    """Value of ``HF_FASTPATH_BUILD``.

    Raises:
        ValueError: it is none of auto, never, force.
    """
    mode = os.environ.get("HF_FASTPATH_BUILD", "auto")
    if mode not in BUILD_MODES:
        raise ValueError(f"HF_FASTPATH_BUILD is {mode!r}, expected one of {', '.join(BUILD_MODES)}")
    return mode


def _unusable(device: str) -> str | None:
    """Why no native library can serve ``device`` in this process, or None."""
    if os.environ.get("HF_FASTPATH_NATIVE", "1") == "0":
        return "HF_FASTPATH_NATIVE=0"
    if device == "cuda" and not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    return None


def _cuda_archs() -> Sequence[str]:
    """Architectures to build for: those of the GPUs at hand, or all a wheel carries."""
    if not torch.cuda.is_available():
        return build.WHEEL_CUDA_ARCHS
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return sorted({"90a" if major == 9 else f"{major}{minor}" for major, minor in capabilities})


def _covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a library made for ``archs`` has code for a GPU: its own, or PTX (of the newest architecture, if it is a
    generic one)."""
    major, minor = capability
    if any(f"{major}{minor}{suffix}" in archs for suffix in ("a", "f")):
        return True
    made = sorted((int(arch.rstrip("af")[:-1]), int(arch.rstrip("af")[-1]), arch.isdigit()) for arch in archs)
    same_major = any(generic and major == of and minor >= least for of, least, generic in made)
    return same_major or (bool(made) and made[-1][2] and capability >= made[-1][:2])


def _wrong_gpu(device: str) -> str | None:
    """Why the library that came with the package cannot serve a GPU at hand, or None."""
    path = _packaged(device) if device == "cuda" and build_mode() != "force" and torch.cuda.is_available() else None
    if path is None:
        return None
    archs = (build.description(path) or {}).get("cuda_archs", ())
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if not _covers(archs, capability):
            return (
                f"{path} is made for sm_{', sm_'.join(archs)} and GPU {index} is sm_{capability[0]}{capability[1]}: "
                "HF_FASTPATH_BUILD=force builds one at patch()"
            )
    return None


def _load(device: str, source: str, path: Path) -> bool:
    """Load the library at ``path``; on failure the status says why."""
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _status[device] = Status(device, "reference", f"{path} does not load: {error}")
        return False
    _status[device] = Status(device, source, str(path))
    return True


def _packaged(device: str) -> Path | None:
    """The library that came with the package, unless the sources beside it have moved on."""
    path = build.LIBRARY_DIR / build.library_name(device)
    info = build.description(path)
    if info is None:
        return None
    try:
        return path if info["sources"] == build.sources_hash(device) else None
    except build.BuildError:
        return path  # installed without sources: there is nothing the library could be older than


def load_existing() -> None:
    """Load what came with the package. Called by ``import hf_fastpath``; never builds, never touches the GPU."""
    for device in build.TARGETS:
        reason = _unusable(device)
        if reason is None and os.environ.get("HF_FASTPATH_BUILD") == "force":
            reason = "HF_FASTPATH_BUILD=force: patch() builds one"
        path = _packaged(device) if reason is None else None
        if path is not None:
            _load(device, "prebuilt", path)
        elif not _status[device].native:
            reason = reason or "no up-to-date prebuilt library: patch() looks in the build cache, then builds"
            _status[device] = Status(device, "reference", reason)


def ensure(device: str, progress: Callable[[str], None] = print) -> Status:
    """Make the native library of ``device`` available if that is possible; called by ``patch()``.

    Args:
        device: ``"cpu"`` or ``"cuda"``; others stay on the reference.
        progress: receives a line when something is compiled.

    Returns:
        What serves the device now.
    """
    if device not in _status:
        return Status(device, "reference", f"no kernels for {device}")
    mode = build_mode()
    native = _status[device].native
    reason = (None if native else _unusable(device)) or _wrong_gpu(device)
    if reason is None and native:
        return _status[device]
    if reason is not None:
        _status[device] = Status(device, "reference", reason)
        return _status[device]
    packaged = _packaged(device)
    if mode != "force" and packaged is not None and _load(device, "prebuilt", packaged):
        return _status[device]
    archs = _cuda_archs() if device == "cuda" else ()
    try:
        directory = build.cache_dir(device, archs)
        path = directory / build.library_name(device)
        if mode == "never":
            if build.description(path) is None or not _load(device, "cache", path):
                _status[device] = Status(device, "reference", "no library found and HF_FASTPATH_BUILD=never")
            return _status[device]
        with build.locked(directory):  # another process may be building it: wait, then take that one
            source = "built" if mode == "force" or build.description(path) is None else "cache"
            if source == "built":
                build.build(device, directory, archs, progress)
        _load(device, source, path)
    except (build.BuildError, OSError) as error:
        _status[device] = Status(device, "reference", str(error))
    return _status[device]
