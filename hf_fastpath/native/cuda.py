"""By which kernels a GPU computes products, as the library says: ``csrc/products/select_cuda.cu`` has the table."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

from .cpu import frozen


@dataclass(frozen=True)
class CudaRoute:
    """A row of ``csrc/products/select_cuda.cu``: which products of x with a weight a route computes, and where.

    Attributes:
        name: its name; several rows may have it.
        products: what asks for it: ``gemv``, ``packed_gemv`` or ``packed_gemm``.
        weights: ``plain``, ``transposed`` and names of formats.
        dtypes: of x.
        rows: the least and the most rows of x; None for any number.
        code: what the library has to have for the GPU: ``hopper`` (compute capability 9.0 and up), ``wgmma`` (9.0); ""
            for what every library has.
        needs, lacks: what has to be true of a call, and what must not be: ``csrc/common/routes_cuda.h`` explains each.
    """

    name: str
    products: tuple[str, ...]
    weights: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, int | None]
    code: str
    needs: tuple[str, ...]
    lacks: tuple[str, ...]


def routes(library: Path) -> list[CudaRoute]:
    """Return the table of routes of ``library``, of which the first row that fits is taken."""
    ask = ctypes.CDLL(str(library)).hf_fastpath_cuda_routes
    ask.restype = ctypes.c_char_p
    return [CudaRoute(**{key: frozen(value) for key, value in row.items()}) for row in json.loads(ask().decode())]
