"""Attention over a latent: what the cache holds is one narrow head, of which keys and values are made by a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decode.calls.named_calls import Call, Register
from . import marks
from .probing import agree, evaluate, seeded, structure
from .recorded_step import Unrecordable


@dataclass(frozen=True)
class Expansion:
    """Keys and values that were made of what a cache gave.

    Attributes:
        states: register of what :func:`.marks.append` gave: the latent, and keys that are rotated.
        layer: index of the layer in the cache.
        calls: those that make keys and values of a few tokens.
        given: registers of the latent and of the rotated keys, [batch, 1, tokens, dim], in ``calls``.
        made: registers of keys and values, [batch, num_heads, tokens, dim], in ``calls``.
        facts: tensors without data like these four.
    """

    states: Register
    layer: int
    calls: list[Call]
    given: list[Register]
    made: list[Register]
    facts: list[torch.Tensor]

    @property
    def weight(self) -> torch.Tensor:
        """Return [num_heads * (plain + value_dim), latent_dim]: for each head, the rows that make the part of a key
        that is not rotated, then the rows that make a value.

        Raises:
            Unrecordable: there is no such weight.
        """
        products = [call.arguments for call in self.calls if call.op is marks.linear]
        (_, heads, _, key_dim), value_dim = self.facts[2].shape, self.facts[3].shape[-1]
        latent_dim, rotated = (fact.shape[-1] for fact in self.facts[:2])
        if len(products) == 1 and products[0]["bias"] is None and isinstance(products[0]["weight"], torch.Tensor):
            weight = products[0]["weight"]
            if tuple(weight.shape) == (heads * (key_dim - rotated + value_dim), latent_dim):
                return weight
        raise Unrecordable("keys and values that are not made of a latent by one product")

    @property
    def structure(self) -> tuple:
        """Return what is the same in layers whose keys and values are made in the same way."""
        weight, shapes = self.weight, tuple(fact.shape for fact in self.facts)
        of_tensor = lambda tensor: "weight" if tensor is weight else id(tensor)  # noqa: E731
        return shapes, weight.shape, structure(self.calls, self.given, of_tensor, self.made)

    def check(self) -> None:
        """Check that the calls compute what :func:`expanded` does.

        Raises:
            Unrecordable: the calls compute something else.
        """
        weight = self.weight
        with seeded():
            latent, rotated = (torch.randn(fact.shape, dtype=torch.float64) for fact in self.facts[:2])
            wide = torch.randn(weight.shape, dtype=torch.float64)
        given = {register.index: each for register, each in zip(self.given, (latent, rotated))}
        values = evaluate(self.calls, given, {id(weight): wide})
        expected = expanded(latent, rotated, wide, *self.facts[2].shape[1::2])
        if not all(agree(values[each.index], one) for each, one in zip(self.made, expected)):
            raise Unrecordable("keys and values that are made of a latent by more than a product")


def expanded(
    latent: torch.Tensor, rotated: torch.Tensor, weight: torch.Tensor, heads: int, key_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [batch, heads, tokens, dim] of a latent and rotated keys [batch, 1, tokens, dim]."""
    both = torch.nn.functional.linear(latent, weight).squeeze(1).unflatten(-1, (heads, -1)).transpose(1, 2)
    plain = both[..., : key_dim - rotated.shape[-1]]
    keys = torch.cat((plain, rotated.expand(-1, heads, -1, -1)), dim=-1)
    return keys, both[..., plain.shape[-1] :]
