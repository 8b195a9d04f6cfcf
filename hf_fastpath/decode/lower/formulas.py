"""What steps are made of, and what there are several ops for: products, gated MLPs, projections, attention and
experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...choices import Activation
from ...ops.kv_cache import KVCache
from ...quantization import PackedWeight
from ..calls.named_calls import HeadNorms, Norm
from ..model.weight import PlainWeight, Weight

#: what is known of a request's weights, where a row of a table takes no others
W = TypeVar("W", bound=Weight)


@dataclass
class Product(Generic[W]):
    """``activation(norm(x) @ weight.T + bias) + residual``.

    Attributes:
        fits: whether ``x`` and the weight are what the ops for a few rows take.
    """

    x: Any
    weight: W
    bias: Any = None
    residual: Any = None
    activation: Activation = Activation.NONE
    norm: Norm | None = None
    fits: bool = True


@dataclass
class Gated(Generic[W]):
    """``activation(norm(x) @ gate.T) * (norm(x) @ up.T)``, each product with its bias.

    Attributes:
        together: quantized weights of both as one, if they lie side by side.
    """

    x: Any
    gate: W
    up: W
    activation: Activation
    norm: Norm | None = None
    biases: tuple[Any, Any] = (None, None)
    together: PackedWeight | None = None

    @property
    def has_bias(self) -> bool:
        return any(each is not None for each in self.biases)


@dataclass
class Queries(Generic[W]):
    """Products of queries, keys and values, of which keys and values are appended to a cache.

    Attributes:
        weights, biases: of queries, keys and values, or one of all three.
        store: arguments of ``ops.rope_append``: the cache, lengths, angles, number of heads.
        norm, head_norms: of the input, and of queries and keys.
        together: as of :class:`Gated`.
    """

    x: Any
    weights: Sequence[W]
    biases: Sequence[Any]
    store: dict[str, Any]
    norm: Norm | None = None
    head_norms: HeadNorms | None = None
    together: PackedWeight | None = None

    @property
    def is_plain(self) -> bool:
        return all(isinstance(each, PlainWeight) for each in self.weights)


@dataclass
class Scores:
    """Attention of queries ``q`` over a cache.

    Attributes:
        new: where keys and values wait that ``ops.quantizing_attention`` puts into the cache, or None.
        seen: the other arguments of ``ops.decode_attention``.
    """

    q: Any
    cache: KVCache
    new: KVCache | None
    seen: dict[str, Any]


@dataclass
class Mixture:
    """Experts of which each row has chosen some.

    Attributes:
        op: for a few rows: ``ops.routed_experts``, or what is composed of ``ops.fused_experts``.
        given: its arguments but ``programmatic_launch``.
    """

    op: Callable[..., Any]
    given: dict[str, Any]
