"""Which features of this CPU the kernels use, as the library says: ``csrc/common/cpu_features_cpu.cpp`` chooses."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

from .. import logs, switches

#: a variable that chooses features, and its former name, which is read if the first is not set
VARIABLE, FORMER_VARIABLE = "HF_FASTPATH_CPU", "HF_FASTPATH_CPU_ISA"


@dataclass(frozen=True)
class CpuChoice:
    """What the kernels use of a CPU.

    Attributes:
        found: features that the CPU has, by name.
        used: those of them that ``HF_FASTPATH_CPU`` leaves.
        known: all names of features.
        tuning: name of the kind of CPU that the kernels are tuned for.
    """

    found: tuple[str, ...]
    used: tuple[str, ...]
    known: tuple[str, ...]
    tuning: str

    def __str__(self) -> str:
        left_out = [f"-{name}" for name in self.found if name not in self.used]
        return ", ".join([*self.used, *left_out, f"tune={self.tuning}"])


def choice(library: Path) -> CpuChoice:
    """Return what the kernels of ``library``, which is loaded, use of this CPU.

    Raises:
        ValueError: ``HF_FASTPATH_CPU`` has a word that is no name; the text lists the names.
    """
    ask = ctypes.CDLL(str(library)).hf_fastpath_cpu
    ask.restype = ctypes.c_char_p
    made = json.loads(ask().decode())
    if "error" in made:
        raise ValueError(made["error"])
    if switches.text(FORMER_VARIABLE) and not switches.text(VARIABLE):
        logs.warn(
            f"hf_fastpath: {FORMER_VARIABLE} is now {VARIABLE}: set that one, which takes the same values and more"
        )
    return CpuChoice(tuple(made["found"]), tuple(made["used"]), tuple(made["known"]), made["tuning"])
