"""What a plan asks of the layers of a recorded step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..decode.calls.named_calls import Call
from . import marks
from .recorded_step import Recording, Unrecordable


@dataclass(frozen=True)
class RecordedAttention:
    """What a plan asks of a layer's attention.

    Attributes:
        cache_shape: KV heads, and elements of a head.
        num_heads, head_dim: number of the queries' heads, and elements of a head.
        value_dim: if the cache holds a latent, elements of the rotated keys, which it holds as values; else None.
    """

    cache_shape: tuple[int, int]
    num_heads: int
    head_dim: int
    value_dim: int | None = None

    @property
    def value_shape(self) -> tuple[int, int]:
        """Return the number of KV heads, and of elements of a value."""
        return self.cache_shape[0], self.value_dim or self.cache_shape[1]


@dataclass(frozen=True)
class RecordedLayer:
    """A layer of the cache, and the attention that reads its keys and values; None if the layer holds none."""

    attention: RecordedAttention | None
    window: int | None


#: a layer with fewer outputs than this share of its inputs gives numbers for heads (gates, decays)
_LEAST_OUTPUTS = 1 / 16


def without_narrow(linears: list[Any]) -> list[nn.Module]:
    """Return the linear layers that may be quantized: not those that give numbers for heads."""
    return [each for each in linears if each.out_features >= _LEAST_OUTPUTS * each.in_features]


def attention_of(recording: Recording, producers: dict[int, Call], call: Call) -> RecordedAttention | None:
    """Return how a call reads a layer of the cache, or None if it reads none."""
    if call.op in (marks.rotated_attention, marks.projected_attention):
        given = call.arguments
        shape = given["num_kv_heads"], given["head_dim"]
        return RecordedAttention(shape, given["num_heads"], shape[1])
    if call.op not in (marks.attend, marks.latent_attend):
        return None
    states = producers[call.arguments["states"].index]
    heads, _, head_dim = recording.fact(states.arguments["k"]).shape[1:]
    values, queries = (recording.fact(each).shape for each in (states.arguments["v"], call.arguments["q"]))
    if call.op is marks.latent_attend:
        return RecordedAttention((heads, head_dim), queries[1], head_dim, values[-1])
    if values[-1] != head_dim:
        raise Unrecordable("keys and values of different sizes")
    return RecordedAttention((heads, head_dim), queries[1], head_dim)
