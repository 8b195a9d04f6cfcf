"""Counters of energy: a GPU's by NVML, a CPU's by RAPL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

#: where Linux has the counters of a CPU
RAPL = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Meter:
    """A counter of energy.

    Attributes:
        name: what it counts.
        joules: gives what was used since some time; it grows.
        seconds: time over which a difference means something: the counter advances in steps.
    """

    name: str
    joules: Callable[[], float]
    seconds: float


def meter_of(device: torch.device) -> Meter | str:
    """Return the counter of energy of a device, or why there is none."""
    return _nvml(device) if device.type == "cuda" else rapl()


def _nvml(device: torch.device) -> Meter | str:
    try:
        library = ctypes.CDLL(_NVML)
    except OSError as error:
        return f"the driver's {_NVML} cannot be loaded ({error})"
    library.nvmlErrorString.restype = ctypes.c_char_p

    def failed(status: int, function: str) -> str:
        said = library.nvmlErrorString(status)
        return f"NVML's {function} says {said.decode() if said else status}"

    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if status := library.nvmlInit_v2():
        return failed(status, "nvmlInit")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if status := library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return failed(status, "nvmlDeviceGetHandleByUUID")

    def read() -> int:
        return library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))

    if status := read():
        return failed(status, "nvmlDeviceGetTotalEnergyConsumption")

    def joules() -> float:
        read()
        return millijoules.value / 1e3

    return Meter("the GPU, by NVML", joules, 0.5)


class _Zone:
    """A counter in microjoules that begins anew at its end."""

    def __init__(self, folder: Path):
        self._file, self._end = folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()) + 1
        self._last, self._sum = int(self._file.read_text()), 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._sum += (now - self._last) % self._end
        self._last = now
        return self._sum / 1e6


def rapl(folder: Path = RAPL) -> Meter | str:
    """Return the counter of all packages of this machine and of the memory behind them, or why there is none.

    Args:
        folder: where Linux has the counters.
    """
    found = [each for each in sorted(folder.glob("*rapl:*")) if (each / "name").is_file() and _counts(each)]
    if not found:
        return f"no RAPL counters in {folder}: the machine, or the container, shows none"
    try:
        zones = [_Zone(each) for each in found]
    except PermissionError:
        return f"{found[0]}/energy_uj cannot be read by this user: root may, or chmod a+r for all"
    except (OSError, ValueError) as error:
        return f"{found[0]}/energy_uj cannot be read ({error})"
    names = ", ".join((each / "name").read_text().strip() for each in found)
    return Meter(
        f"the whole machine ({names}), by RAPL, other programs included",
        lambda: sum(zone.joules() for zone in zones),
        0.05,
    )


def _counts(zone: Path) -> bool:
    """Whether a zone counts what no other zone does: a package, or its memory."""
    return (zone / "name").read_text().strip().startswith(("package", "dram"))
