"""Find, load and, if asked to, build the native libraries. Prebuilt comes first, then cache, build and references.

``HF_FASTPATH_BUILD`` is ``auto`` (the default: ``patch()`` builds what is missing), ``never`` (use only what is there)
or ``force`` (``patch()`` builds even if something is there). With ``HF_FASTPATH_NATIVE=0`` nothing is loaded, and every
op runs its PyTorch reference. ``HF_FASTPATH_TARGETS`` says which libraries may be built. Importing this module, which
all ops do, loads what came with the package; nothing is built then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import logs, switches
from . import build, build_cache, cpu, cuda, toolchain
from .toolchain import build_mode

#: reason codes of a device without compiled kernels
NO_KERNELS = ("no_native_library", "unsupported_platform", "unsupported_device")


@dataclass(frozen=True)
class Status:
    """Which implementation serves a device, and why.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        source: ``"prebuilt"``, ``"cache"``, ``"built"`` or ``"reference"``.
        detail: the library's path, or one line on why there is none.
        reason: the reason code of a device without kernels, one of ``NO_KERNELS``; empty if there are some.
    """

    device: str
    source: str
    detail: str
    reason: str = ""

    @property
    def native(self) -> bool:
        """Whether compiled kernels serve this device."""
        return self.source != "reference"

    def __str__(self) -> str:
        return f"{self.device}: {self.source} ({self.detail})"


def _without(device: str, detail: str, reason: str = NO_KERNELS[0]) -> Status:
    """Return the status of a device that nothing serves, with the first line of an error's text."""
    return Status(device, "reference", (detail.strip().splitlines() or [""])[0], reason)


_status = {device: _without(device, "not looked for yet") for device in build.TARGETS}
#: builds that failed in this process, by their folder; they are not tried again
_failed: dict[Path, str] = {}


def status() -> dict[str, Status]:
    """Return the present status of both devices."""
    return dict(_status)


def is_native(device: str) -> bool:
    """Whether compiled kernels serve ``device``."""
    found = _status.get(device)
    return found is not None and found.native


def why_not_native(device: str) -> str | None:
    """Return the reason code for which no compiled kernels serve ``device`` ("cpu", "cuda", "mps", ...), or None."""
    return None if is_native(device) else _status.get(device, _unknown(device)).reason or NO_KERNELS[0]


def cause(devices: Iterable[str]) -> str | None:
    """Return a line on why one of ``devices`` has no compiled kernels, or None if all devices have some."""
    device = next((device for device in sorted(devices) if not is_native(device)), None)
    return device and f"no compiled kernels for {device}: {_status.get(device, _unknown(device)).detail}"


def switched_off() -> bool:
    """Whether the user asks for the references with ``HF_FASTPATH_NATIVE=0``."""
    return not switches.is_on("HF_FASTPATH_NATIVE", default=True)


def description(device: str) -> dict | None:
    """Return what the build noted of the library that serves ``device``; None if none does."""
    return build.description(Path(_status[device].detail)) if is_native(device) else None


def cuda_archs() -> tuple[str, ...]:
    """Return what the loaded CUDA library was compiled for, as ``build.build`` takes it; empty without a library."""
    return tuple((description("cuda") or {}).get("cuda_archs", ()))


def has_hopper_code(device: torch.device) -> bool:
    """Whether a GPU has clusters and bulk copies, and the loaded library was made for one that has."""
    made = any(int(arch.rstrip("af")) >= 90 for arch in cuda_archs())
    return made and torch.cuda.get_device_capability(device) >= (9, 0)


def _unknown(device: str) -> Status:
    """Return the status of a kind of device that the project has no kernels for."""
    return _without(device, f"there are kernels for CPUs and NVIDIA GPUs, none for {device}", "unsupported_device")


def _unusable(device: str) -> Status | None:
    """Return why no native library can serve ``device`` in this process, or None."""
    if switched_off():
        return _without(device, f"HF_FASTPATH_NATIVE={switches.word('HF_FASTPATH_NATIVE')}")
    if reason := toolchain.unsupported_platform(device):
        return _without(device, reason, "unsupported_platform")
    if device == "cuda" and torch.version.hip:
        detail = f"torch {torch.__version__} is built for ROCm: there are kernels for CPUs and NVIDIA GPUs"
        return _without(device, detail, "unsupported_device")
    if device == "cuda" and not torch.backends.cuda.is_built():
        return _without(device, "this torch is built without CUDA")
    return None


def _capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of the GPUs that this process sees."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _covers(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a library made for ``archs`` has code for a GPU.

    The code may be the GPU's own, or PTX; a library has PTX of its newest architecture if that one is generic.
    """
    major, minor = capability
    archs = tuple(archs)
    if any(f"{major}{minor}{suffix}" in archs for suffix in ("a", "f")):
        return True
    made = sorted((int(arch.rstrip("af")[:-1]), int(arch.rstrip("af")[-1]), arch.isdigit()) for arch in archs)
    same_major = any(generic and major == of and minor >= least for of, least, generic in made)
    return same_major or (bool(made) and made[-1][2] and capability >= made[-1][:2])


def _wrong_gpu(device: str) -> Status | None:
    """Return why the library that came with the package cannot serve one of the GPUs, or None."""
    path = _packaged(device) if device == "cuda" and build_mode() != "force" else None
    if path is None:
        return None
    archs = (build.description(path) or {}).get("cuda_archs", ())
    for index, capability in enumerate(_capabilities()):
        if not _covers(archs, capability):
            return _without(
                device,
                f"{path} is made for sm_{', sm_'.join(archs)} and GPU {index} is sm_{capability[0]}{capability[1]}: "
                "HF_FASTPATH_BUILD=force builds one at patch()",
            )
    return None


def _load(device: str, source: str, path: Path) -> bool:
    """Load the library at ``path`` if it is whole; if it cannot be loaded, the status says why."""
    try:
        reason = build_cache.why_damaged(path)
        if reason is None:
            torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        reason = f"{path} does not load: {error.__cause__ or error}"
    _status[device] = Status(device, source, str(path)) if reason is None else _without(device, reason)
    return reason is None


def _packaged(device: str) -> Path | None:
    """Return the library that came with the package, unless the sources beside it have changed since."""
    path = build.LIBRARY_DIR / build.library_name(device)
    info = build.description(path)
    if info is None:
        return None
    try:
        return path if info["sources"] == build.sources_hash(device) else None
    except build.BuildError:
        return path  # there are no sources that could be newer than the library


def load_existing() -> None:
    """Load what came with the package. Importing this module calls it; it never builds, and never touches the GPU."""
    for device in build.TARGETS:
        found = _unusable(device)
        if found is None and switches.word("HF_FASTPATH_BUILD") == "force":
            found = _without(device, "HF_FASTPATH_BUILD=force: patch() builds one")
        path = _packaged(device) if found is None else None
        if path is not None:
            _load(device, "prebuilt", path)
        elif not _status[device].native:
            detail = "no up-to-date prebuilt library: patch() looks in the build cache, then builds"
            _status[device] = found or _without(device, detail)


def ensure(device: str, progress: Callable[[str], None] | None = logs.say) -> Status:
    """Make the native library of ``device`` available if that is possible; ``patch()`` calls it.

    Args:
        device: ``"cpu"`` or ``"cuda"``; any other device stays on the references.
        progress: receives a line when something is compiled; with None, nothing is said.

    Returns:
        What serves the device now.

    Raises:
        ValueError: ``HF_FASTPATH_BUILD``, ``HF_FASTPATH_TARGETS``, ``HF_FASTPATH_CUDA_ARCHS`` or ``HF_FASTPATH_CPU``
            has no valid value.
    """
    status = _ensure(device, progress)
    if device == "cpu":
        cpu_choice()
    return status


def cpu_choice() -> cpu.CpuChoice | None:
    """Return what the CPU kernels use of this CPU, or None if there are no CPU kernels.

    Raises:
        ValueError: ``HF_FASTPATH_CPU`` has no valid value.
    """
    return cpu.choice(Path(_status["cpu"].detail)) if is_native("cpu") else None


def cpu_routes() -> list[cpu.CpuRoute]:
    """Return the table of routes by which products are computed on the CPU; empty if there are no CPU kernels."""
    return cpu.routes(Path(_status["cpu"].detail)) if is_native("cpu") else []


def cuda_routes() -> list[cuda.CudaRoute]:
    """Return the table of routes by which products are computed on a GPU; empty if there are no kernels for it."""
    return cuda.routes(Path(_status["cuda"].detail)) if is_native("cuda") else []


def _ensure(device: str, progress: Callable[[str], None] | None) -> Status:
    if device not in _status:
        return _unknown(device)
    mode, targets, wanted = build_mode(), toolchain.wanted_targets(), toolchain.wanted_cuda_archs()
    native = _status[device].native
    reason = (None if native else _unusable(device)) or _wrong_gpu(device)
    if reason is None and native:
        return _status[device]
    if reason is not None:
        _status[device] = reason
        return reason
    packaged = _packaged(device)
    if mode != "force" and packaged is not None and _load(device, "prebuilt", packaged):
        return _status[device]
    archs: tuple[str, ...] = ()
    if device == "cuda":
        archs = wanted or toolchain.cuda_archs_of(_capabilities())
        if not archs:
            least = ".".join(map(str, toolchain.MIN_CUDA_CAPABILITY))
            _status[device] = _without(device, f"no GPU of compute capability {least} or newer at hand to build for")
            return _status[device]
    try:
        _find_or_build(device, build.cache_dir(device, archs), archs, mode, targets, progress)
    except (build.BuildError, OSError) as error:
        _status[device] = _without(device, str(error))
    return _status[device]


def _find_or_build(
    device: str,
    directory: Path,
    archs: Iterable[str],
    mode: str,
    targets: tuple[str, ...] | None,
    progress: Callable[[str], None] | None,
) -> None:
    """Load the library in ``directory`` of the build cache; if none loads, build one if that is allowed.

    Raises:
        BuildError: the library has to be built, and the build fails.
    """
    path = directory / build.library_name(device)
    if mode != "force" and _load_cached(device, path):
        return
    allowed = "HF_FASTPATH_BUILD=never" if mode == "never" else None
    if allowed is None and targets is not None and device not in targets:
        allowed = f"HF_FASTPATH_TARGETS={' '.join(targets) or 'none'}"
    if allowed is not None:
        _status[device] = _without(device, f"no library found and {allowed}")
        return
    if directory in _failed:
        raise build.BuildError(_failed[directory])
    with build.locked(directory, progress):
        # another process may have built the library while this one waited
        if mode != "force" and _load_cached(device, path):
            return
        try:
            build.build(device, directory, tuple(archs), progress)
        except build.BuildError as error:
            _failed[directory] = str(error)
            raise
    _load(device, "built", path)


def _load_cached(device: str, path: Path) -> bool:
    """Load a library of the build cache if it is there, is whole, and belongs to nobody else.

    Raises:
        BuildError: another user may have written the library.
    """
    if build.description(path) is None:
        return False
    for each in (path, build_cache.note_file(path)):
        if reason := build_cache.why_unsafe(each):
            raise build.BuildError(reason)
    build_cache.used(build_cache.note_file(path))
    return _load(device, "cache", path)


load_existing()
