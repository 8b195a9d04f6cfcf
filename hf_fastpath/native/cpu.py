"""Which features of this CPU the kernels use, as the library says: ``csrc/common/cpu_features_cpu.cpp`` chooses."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class CpuRoute:
    """A row of ``csrc/products/select_cpu.cpp``: which products of x with a weight a route computes, and where.

    Attributes:
        name: its name; several rows may have it.
        products: what asks for it: ``linear`` (the kernels of gemv), ``linear_of_floats`` (the same over x in float32),
            ``gemm``, ``packed_gemv`` and ``packed_gemm``.
        weights: ``plain``, ``transposed`` and names of formats.
        dtypes: of x.
        rows: the least and the most rows of x; None for any number.
        needs, lacks: features that a CPU has to have, and those of which it has to lack one.
        tuning: what the tuning has to say; "" for any.
    """

    name: str
    products: tuple[str, ...]
    weights: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, int | None]
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    tuning: str


def routes(library: Path) -> list[CpuRoute]:
    """Return the table of routes of ``library``; the first row that fits is taken, and the next one if it declines."""
    ask = ctypes.CDLL(str(library)).hf_fastpath_routes
    ask.restype = ctypes.c_char_p
    rows = json.loads(ask().decode())
    return [CpuRoute(**{key: frozen(value) for key, value in row.items()}) for row in rows]


def frozen(value: Any) -> Any:
    """Return a tuple for a list, and anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


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
