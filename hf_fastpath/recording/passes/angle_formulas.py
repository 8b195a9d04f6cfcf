"""Ways to get the angles of a rotation from what a model has computed of its positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

#: what a table holds of the elements that turn together: both, one, or both in an order where one would do
_AS_IT_IS, _ONE, _FIRST_HALF = "both", "one", "first half"
#: in what cos and sin are
_COMPLEX, _SINCOS, _COSSIN, _PAIR = "complex", "sincos", "cossin", "pair"


@dataclass(frozen=True)
class AngleFormula:
    """Cos and sin of all elements that turn, out of tables.

    Attributes:
        kind: what the tables are: complex numbers, both side by side in one of two orders, or one each.
        tables: places of those that are read, one or two.
        holds: what a table holds of the elements that turn together.
    """

    kind: str
    tables: tuple[int, ...]
    holds: str

    def __call__(self, tables: Sequence[torch.Tensor], pairs: str) -> tuple[torch.Tensor, ...]:
        """Return cos and sin.

        Args:
            pairs: which elements turn together, see ``architecture.AttentionSpec``.
        """
        read = [tables[place] for place in self.tables]
        if self.kind == _COMPLEX:
            read = [read[0].real, read[0].imag]
        elif self.kind != _PAIR:
            read = list(read[0].chunk(2, dim=-1))
            read = read[::-1] if self.kind == _SINCOS else read
        return tuple(_spread(each, pairs, self.holds) for each in read)


def angle_formulas(tables: Sequence[torch.Tensor], dim: int) -> Iterator[AngleFormula]:
    """Yield ways to get cos and sin of all elements that turn from what a model has computed of its positions."""
    for holds in (_AS_IT_IS, _ONE, _FIRST_HALF):
        for one in range(len(tables)):
            if tables[one].is_complex():
                yield AngleFormula(_COMPLEX, (one,), holds)
            elif tables[one].shape[-1:] and tables[one].shape[-1] % 2 == 0:
                yield AngleFormula(_SINCOS, (one,), holds)
                yield AngleFormula(_COSSIN, (one,), holds)
            for other in range(len(tables)):
                if one != other:
                    yield AngleFormula(_PAIR, (one, other), holds)


def _spread(table: torch.Tensor, pairs: str, holds: str) -> torch.Tensor:
    """Return the angles of both elements that turn together."""
    if holds == _AS_IT_IS:
        return table
    if holds == _FIRST_HALF:
        table = table[..., : table.shape[-1] // 2]
    return torch.cat((table, table), dim=-1) if pairs == "halves" else table.repeat_interleave(2, dim=-1)
