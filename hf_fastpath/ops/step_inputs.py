"""The inputs of a decode step: the new tokens' embeddings, and rows of tables at their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..registry import OpSpec, Sample, in_host_memory, nbytes, register, tensor_reasons

#: number of ``tables`` of a call at most; the same as kMaxGathered - 1 in csrc/step_inputs/step_inputs.h
MAX_TABLES = 8


def reference(
    embedding: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    position_embedding: torch.Tensor | None,
    position_offset: int,
    tables: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Compute ``embedding[tokens] + position_embedding[positions + position_offset]``, and each ``table[positions]``.

    Args:
        embedding: [vocab_size, hidden_size] float32, float16 or bfloat16.
        tokens: int64 [batch, query_len].
        positions: int64 [batch, query_len].
        position_embedding: [rows, hidden_size] in embedding's dtype, or None.
        position_offset: added to positions for ``position_embedding``.
        tables: at most MAX_TABLES of [rows, width] each, in embedding's dtype: cosines and sines, for example.

    Returns:
        [batch, query_len, hidden_size], then [batch, query_len, width] for every table.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit; on the CPU also if a token or position is outside its table.
        IndexError: without the Python checks, a token or position is outside its table; CUDA stops with a device-side
            assert, as PyTorch does.

    Source: transformers ``models/gpt2/modeling_gpt2.py@5.17``, ``GPT2Model``.
    """
    hidden = F.embedding(tokens, embedding)
    if position_embedding is not None:
        hidden = hidden + F.embedding(positions + position_offset, position_embedding)
    return [hidden, *(F.embedding(positions, table) for table in tables)]


def fake(embedding, tokens, tables):
    return [table.new_empty(*tokens.shape, table.shape[1]) for table in (embedding, *tables)]


def _row_reasons(name: str, indices: torch.Tensor, offset: int, tables: dict[str, torch.Tensor | None]) -> list[str]:
    """Return reasons why indices in host memory are not rows of the tables."""
    if not indices.numel() or not in_host_memory(indices):
        return []
    lowest, highest = (int(index) + offset for index in indices.aminmax())
    found = []
    for table_name, table in tables.items():
        if table is not None and (lowest < 0 or highest >= len(table)):
            row = lowest if lowest < 0 else highest
            found.append(f"{name} asks for row {row} of {table_name}, expected 0 to {len(table) - 1}")
    return found


def why_not(embedding, tokens, positions, position_embedding, position_offset, tables) -> list[str]:
    given = {"embedding": embedding, "position_embedding": position_embedding}
    given |= {f"tables[{number}]": table for number, table in enumerate(tables)}
    reasons = tensor_reasons(embedding, **given)
    for name, table in given.items():
        if table is not None and (table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1)):
            reasons.append(f"{name} has shape {tuple(table.shape)}, expected [rows, width] with contiguous rows")
    if not reasons and position_embedding is not None and position_embedding.shape[1] != embedding.shape[1]:
        reasons.append(f"position_embedding has width {position_embedding.shape[1]}, expected {embedding.shape[1]}")
    for name, indices in (("tokens", tokens), ("positions", positions)):
        if indices.dim() != 2 or indices.shape != tokens.shape or indices.dtype != torch.int64:
            reasons.append(f"{name} is {indices.dtype} {tuple(indices.shape)}, expected torch.int64 [batch, query_len]")
        if indices.device != embedding.device:
            reasons.append(f"{name} is on {indices.device}, expected {embedding.device}: move it")
    if not reasons:
        reasons += _row_reasons("tokens", tokens, 0, {"embedding": embedding})
        reasons += _row_reasons("positions", positions, position_offset, {"position_embedding": position_embedding})
        reasons += _row_reasons("positions", positions, 0, {f"tables[{i}]": table for i, table in enumerate(tables)})
    if len(tables) > MAX_TABLES:
        reasons.append(f"{len(tables)} tables, expected at most {MAX_TABLES}: take the others in another call")
    return reasons


def moved(embedding, tokens, positions, position_embedding, tables) -> int:
    rows = sum(table.shape[1] for table in (embedding, *tables)) * 2
    rows += 0 if position_embedding is None else embedding.shape[1]
    return nbytes(tokens, positions) + tokens.numel() * rows * embedding.element_size()


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(vocab_size, hidden_size, batch, query_len=1, learned=0, offset=0, widths=(), rows=40):
        return Sample(
            randn(vocab_size, hidden_size),
            torch.randint(vocab_size, (batch, query_len), device=device),
            torch.randint(rows - offset, (batch, query_len), device=device),
            randn(rows, hidden_size) if learned else None,
            offset,
            [randn(rows, width) for width in widths],
        )

    yield call(503, 768, 3, learned=True)
    yield call(501, 256, 1, widths=(64, 64))
    yield call(77, 111, 2, 4, learned=True, offset=2, widths=(24, 5, 1))
    yield call(1, 1, 1, rows=1)
    yield call(50, 64, 8, 2, widths=[32] * MAX_TABLES)


SPEC = register(
    OpSpec(
        name="step_inputs",
        schema=(
            "(Tensor embedding, Tensor tokens, Tensor positions, Tensor? position_embedding, int position_offset, "
            "Tensor[] tables) -> Tensor[]"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
