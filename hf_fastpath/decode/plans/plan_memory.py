"""Memory that the calls of a plan need on each device beside weights, caches and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...compat import LayerKind
from ...ops.decode_attention import workspace_bytes
from ...ops.kv_cache import is_quantized, table_columns
from ..lower.positions import Staging
from ..sources.step_source import StepSource


@dataclass
class PlanMemory:
    """What the layers on one device need.

    Attributes:
        kv_tables: of layers with pages (True) and of other layers (False), a row for every layer of the model; empty on
            the CPU, where calls are given the buffers themselves.
        workspace: see ``ops.decode_attention``; None on the CPU.
        staging: see ``Positions``.
    """

    kv_tables: dict[bool, torch.Tensor]
    workspace: torch.Tensor | None = None
    staging: Staging | None = None

    @classmethod
    def of(
        cls,
        part: StepSource,
        device: torch.device,
        batch: int,
        query_len: int,
        kv_dtype: torch.dtype | None,
        page_sizes: tuple[int | None, ...],
    ) -> PlanMemory:
        """Allocate the memory for ``query_len`` new tokens of each of ``batch`` sequences."""
        made = cls({})
        if device.type != "cuda":
            return made
        size = max((workspace_bytes(batch, query_len, *each) for each in part.query_heads), default=0)
        made.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        for paged in {size is not None for size in page_sizes}:
            shape = len(part.layers), table_columns(kv_dtype, paged)
            made.kv_tables[paged] = torch.zeros(shape, dtype=torch.long, device=device)
        # Several blocks compute a head's keys and values, so attention quantizes them, not the projection.
        if is_quantized(kv_dtype):
            lens = torch.full((batch,), query_len, dtype=torch.int32, device=device)
            shapes = {attention.cache_shape for attention in part.attentions}
            made.staging = Staging(lens, query_len, shapes)
        return made

    def bind(self, layers: Any, kinds: list[LayerKind], page_sizes: tuple[int | None, ...]) -> None:
        """Note where the buffers of a cache's layers are."""
        for paged, table in self.kv_tables.items():
            rows = []  # a layer that this table does not serve has zeros here
            for layer, kind, size in zip(layers, kinds, page_sizes):
                if not kind.keys or (size is not None) != paged:
                    rows.append([0] * table.shape[1])
                    continue
                k, v, *others = (buffer.data_ptr() for buffer in layer.buffers if buffer is not None)
                rows.append([k, v, layer.capacity, *others])
            table.copy_(torch.tensor(rows, dtype=torch.long, device="cpu"))


def like(fact: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor of the shape, strides, dtype and device of ``fact``."""
    return torch.empty_strided(fact.shape, fact.stride(), dtype=fact.dtype, device=fact.device)
