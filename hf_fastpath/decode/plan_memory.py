"""Memory that the calls of a plan need on each device beside weights, caches and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops.decode_attention import workspace_bytes
from ..ops.kv_cache import is_quantized, table_columns
from . import steps
from .structure import ModelPart


@dataclass
class PlanMemory:
    """What the layers on one device need.

    Attributes:
        kv_tables: of layers with pages (True) and of other layers (False), a row for every layer of the model; empty on
            the CPU, where calls are given the buffers themselves.
        workspace: see ``ops.decode_attention``; None on the CPU.
        staging: see ``steps.Positions``.
    """

    kv_tables: dict[bool, torch.Tensor]
    workspace: torch.Tensor | None = None
    staging: steps.Staging | None = None

    @classmethod
    def of(
        cls,
        part: ModelPart,
        device: torch.device,
        batch: int,
        query_len: int,
        kv_dtype: torch.dtype,
        page_sizes: tuple[int | None, ...],
    ) -> PlanMemory:
        """Allocate the memory for ``query_len`` new tokens of each of ``batch`` sequences."""
        made = cls({})
        if device.type != "cuda":
            return made
        heads = {(layer.attention.num_heads, layer.attention.head_dim) for layer in part.layers}
        size = max(workspace_bytes(batch, query_len, *each) for each in heads)
        made.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        for paged in {size is not None for size in page_sizes}:
            shape = len(part.layers), table_columns(kv_dtype, paged)
            made.kv_tables[paged] = torch.zeros(shape, dtype=torch.long, device=device)
        # Several blocks compute a head's keys and values, so attention quantizes them, not the projection.
        if is_quantized(kv_dtype):
            lens = torch.full((batch,), query_len, dtype=torch.int32, device=device)
            shapes = {layer.attention.cache_shape for layer in part.layers}
            made.staging = steps.Staging(lens, query_len, shapes)
        return made

    def bind(self, layers: Any, page_sizes: tuple[int | None, ...]) -> None:
        """Note where the buffers of a cache's layers are."""
        for paged, table in self.kv_tables.items():
            rows = []  # a layer that the other table serves has zeros here
            for layer, size in zip(layers, page_sizes):
                k, v, *others = (buffer.data_ptr() for buffer in layer.buffers if buffer is not None)
                row = [k, v, layer.capacity, *others]
                rows.append(row if (size is not None) == paged else [0] * table.shape[1])
            table.copy_(torch.tensor(rows, dtype=torch.long, device="cpu"))
