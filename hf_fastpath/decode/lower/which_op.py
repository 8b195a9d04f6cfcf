"""Which op computes what: the one place where products, norms, attention, MLPs and experts become calls.

Architecture files (:mod:`..sources.steps`) and recordings (``recording.lowering``) say what a step computes, in the
terms of :class:`Lower`. The tables below say by which call, for one token as for whole prompts: the first row that
takes what is asked for makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ... import ops
from ...choices import Activation
from ...compat import ShardStyle
from ...ops.gemv import MAX_ROWS, MAX_WGMMA_ROWS, most_rows
from ...ops.joined_gemv import MAX_WEIGHTS
from ...ops.kv_cache import KVCache
from ...quantization import PackedWeight, PreparedInputWeight
from ..calls.named_calls import Emit, HeadNorms, Norm, parameters
from ..model.weight import AdaptedWeight, Adapters, PlainWeight, RowOwners, Weight, has_adapters, joined
from ..ranks.rank_calls import Shard, gathered, own_inputs, summed
from . import composed, many_experts, many_rows
from .attend import attend
from .formulas import Gated, Mixture, Product, Queries, Scores
from .packed_experts import packed_mixture
from .prepared_inputs import prepared_input, prepared_product


class Route(NamedTuple):
    """A row of a table: what makes something.

    Attributes:
        name: of the op, or of what else computes it.
        takes: whether it can be had, given a :class:`Lower` and the row's request.
        make: emits the calls.
    """

    name: str
    takes: Callable[[Lower, Any], bool]
    make: Callable[[Lower, Any], Any]


@dataclass
class Lower:
    """Emits the calls of a step, for inputs of so many rows.

    Args:
        emit: takes the calls, as ``Program.emit`` does, or runs them at once (``named_calls.run``).
        rows: tokens of all sequences.
        many: whether ops for a few rows are left aside; None: if there are more rows than these take. Some devices have
            kernels for up to 64 rows, see ``gemv.most_rows``.
        beside: whether projections of one input may run beside each other, as those behind the first have few rows
            each and leave most of a GPU idle.
        attention: the ``attend.Attention`` that replaces attention over a cache, or its register; or None.
        early: whether kernels use programmatic dependent launch: they start before the kernels in front are complete.
        device: where calls run; None for where their weights are.
        owners: which rows take which adapters; None if all rows take all.
    """

    emit: Emit
    rows: int
    many: bool | None = None
    beside: bool = False
    attention: Any = None
    early: bool = False
    device: torch.device | None = None
    owners: RowOwners | None = None
    _side: Any = field(default_factory=many_rows.SideStream, repr=False)
    _shared: tuple[Any, Any, Any] = (None, None, None)

    def __post_init__(self) -> None:
        self.many = self.rows > MAX_ROWS if self.many is None else self.many

    def runs_on(self, weight: Weight) -> str:
        """Return the type of the device where a product with ``weight`` runs."""
        return (weight.device if self.device is None else self.device).type

    def takes_few(self, *weights: Weight) -> bool:
        """Whether the ops for a few rows take products with these weights."""
        if not self.many:
            return True
        plain = [each for each in weights if isinstance(each, PlainWeight)]
        if len(plain) < len(weights) or self.rows > MAX_WGMMA_ROWS:
            return False
        return self.rows <= most_rows(*(each.matrix for each in plain), transposed=plain[0].transposed)

    # ---- what steps are made of ----------------------------------------------------------------------------------

    def product(self, x: Any, weight: Weight, shard: Shard | None = None, **others: Any) -> Any:
        """Emit a :class:`Product`; what all ranks make of it if the layer is spread over ranks."""
        style = None if shard is None else shard.style
        if style is ShardStyle.SPLIT_ROWS:
            x = self.emit(own_inputs, x=x, shard=shard)
        is_summed = style in (ShardStyle.ROWS, ShardStyle.SPLIT_ROWS)
        residual = others.pop("residual", None)
        made = self._by(PRODUCTS, Product(x, weight, residual=None if is_summed else residual, **others))
        if is_summed:
            return self.emit(summed, x=made, residual=residual, shard=shard)
        return self.emit(gathered, x=made, shard=shard) if style is ShardStyle.GATHERED else made

    def gated(self, x: Any, gate: Weight, up: Weight, activation: Activation, **others: Any) -> Any:
        """Emit a :class:`Gated`."""
        x, (gate, up), others["norm"] = prepared_input(self, x, (gate, up), others.get("norm"))
        asked = Gated(x, gate, up, activation, **others)
        asked.together = None if asked.has_bias else joined((gate, up))
        return self._by(GATED, asked)

    def queries(
        self, x: Any, weights: Sequence[Weight], biases: Sequence[Any], store: dict[str, Any], **others: Any
    ) -> Any:
        """Emit :class:`Queries`; return what stands for rotated queries, or None if no row of the table takes them."""
        x, weights, others["norm"] = prepared_input(self, x, weights, others.get("norm"))
        asked = Queries(x, weights, biases, store, **others)
        is_bare = all(each is None for each in biases) and asked.head_norms is None and not store["cache"].is_paged
        asked.together = joined(weights) if is_bare else None
        return self._by(QUERIES, asked)

    def projections(
        self, x: Any, weights: Sequence[Weight], biases: Sequence[Any], norm: Norm | None, shards: Sequence[Any] = ()
    ) -> list[Any]:
        """Emit products of one input; a single one if the weights lie side by side."""
        x, weights, norm = prepared_input(self, x, weights, norm)
        together = None if any(each is not None for each in biases) else joined(weights)
        if together is not None:
            return [self.product(x, together, norm=norm)]
        shards = shards or [None] * len(weights)
        pairs = zip(weights, biases, shards)
        return [self.product(x, weight, shard, bias=bias, norm=norm) for weight, bias, shard in pairs]

    def joined_products(self, x: Any, matrices: Sequence[Any], norm: Norm | None = None) -> Any:
        """Emit products of one input with up to MAX_WEIGHTS plain matrices, the features side by side."""
        how = dict(norm=norm, programmatic_launch=self.early)
        return self.emit(ops.joined_gemv.overload, x=x, weights=list(matrices), **how)

    def append(self, sources: dict[str, Any], store: dict[str, Any], head_norms: HeadNorms | None) -> Any:
        """Emit the rotation of queries and keys, and the append of keys and values.

        Args:
            sources: as ``ops.rope_append`` names them: ``qkv``, or ``qkv`` (of queries), ``k`` and ``v``.
            store: as of :class:`Queries`.
        """
        how = dict(head_norms=head_norms, programmatic_launch=self.early)
        return self.emit(ops.rope_append.overload, **sources, bias=None, **store, **how)

    def attend(self, q: Any, cache: KVCache, new: KVCache | None, **seen: Any) -> Any:
        """Emit attention over a cache, see :class:`Scores`."""
        return self._by(ATTENTION, Scores(q, cache, new, seen))

    def experts(self, op: Any = ops.routed_experts.overload, **given: Any) -> Any:
        """Emit a :class:`Mixture`."""
        return self._by(EXPERTS, Mixture(op, given))

    def normed(self, x: Any, norm: Norm, residual: Any = None, factor: Any = None, is_early: bool | None = None) -> Any:
        """Emit ``factor * (residual + norm(x))``.

        Args:
            is_early: see ``early``; None for that.
        """
        by = dict(weight=norm.weight, eps=norm.eps, residual=residual)
        if not norm.kind.is_rms:
            return self.emit(ops.layer_norm.overload, x=x, **by, bias=norm.bias)
        how = dict(factor=factor, programmatic_launch=self.early if is_early is None else is_early)
        return self.emit(ops.rms_norm.overload, x=x, **by, weight_offset=norm.kind.weight_offset, **how)

    # ---- adapters ------------------------------------------------------------------------------------------------

    def _adapted(self, asked: Product[AdaptedWeight]) -> Any:
        bare = Product(asked.x, asked.weight.base, asked.bias, norm=asked.norm, fits=asked.fits)
        adapters = Adapters.of([asked.weight])
        how = dict(residual=asked.residual, activation=asked.activation)
        return self._with_adapters(asked.x, asked.norm, adapters, lambda: self._by(PRODUCTS, bare), **how)

    def _gated_adapted(self, asked: Gated) -> Any:
        weights = [asked.gate, asked.up]
        base = lambda: self._side_by_side(asked.x, weights, asked.biases, asked.norm)  # noqa: E731
        how = dict(activation=asked.activation, gated=True)
        return self._with_adapters(asked.x, asked.norm, Adapters.of(weights), base, **how)

    def _queries_adapted(self, asked: Queries) -> Any:
        base = lambda: self._side_by_side(asked.x, asked.weights, asked.biases, asked.norm)  # noqa: E731
        qkv = self._with_adapters(asked.x, asked.norm, Adapters.of(asked.weights), base)
        return self.append(dict(qkv=qkv), asked.store, asked.head_norms)

    def _with_adapters(
        self, x: Any, norm: Norm | None, adapters: Adapters, base: Callable[[], Any], **behind: Any
    ) -> Any:
        """Emit a base product with adapters; products by ``down`` come first, as nothing waits for the base product."""
        added, owned = adapters.added, adapters.of_rows(self.owners)
        if self.many or not adapters.are_alike or not adapters.are_few:
            given = dict(base=base(), x=self.input_behind(x, norm), down=adapters.down)  # in this order
            return self.emit(many_rows.with_adapters, **given, **added, **owned, **behind)
        how = dict(programmatic_launch=self.early, **owned)
        hidden = self.emit(ops.lora_down.overload, x=x, weights=adapters.down, norm=norm, **how)
        return self.emit(ops.lora_up.overload, base=base(), hidden=hidden, **added, **behind, **how)

    def _side_by_side(self, x: Any, weights: Sequence[Weight], biases: Sequence[Any], norm: Norm | None) -> Any:
        """Emit products of one input without their adapters, the features side by side."""
        bare = [each.base if isinstance(each, AdaptedWeight) else each for each in weights]
        matrices = [each.matrix for each in bare if isinstance(each, PlainWeight) and not each.transposed]
        is_bare = all(each is None for each in biases) and len({each.dtype for each in matrices}) == 1
        if 1 < len(bare) == len(matrices) <= MAX_WEIGHTS and is_bare and self.takes_few(*bare):
            return self.joined_products(x, matrices, norm)
        made = self.projections(x, bare, biases, norm)
        return made[0] if len(made) == 1 else self.emit(torch.ops.aten.cat.default, made, -1)

    # ---- rows of the tables --------------------------------------------------------------------------------------

    def _by(self, table: Sequence[Route], asked: Any) -> Any:
        for route in table:
            if route.takes(self, asked):
                return route.make(self, asked)
        return None

    def input_behind(self, x: Any, norm: Norm | None) -> Any:
        """Return an input behind its norm; what takes the same input in a row shares the result."""
        if norm is None:
            self._shared = None, None, None  # the next norm is of another input
            return x
        known_x, known_norm, normed = self._shared
        if x is not known_x or norm.key != known_norm:
            normed = self.normed(x, norm, is_early=False)
            self._shared = x, norm.key, normed
        return normed

    def _of_few(self, op: Any, asked: Product, **weight: Any) -> Any:
        behind = dict(residual=asked.residual, activation=asked.activation, norm=asked.norm)
        return self.emit(op.overload, x=asked.x, **weight, bias=asked.bias, **behind, programmatic_launch=self.early)

    def _gemv(self, asked: Product[PlainWeight]) -> Any:
        weight = asked.weight
        return self._of_few(ops.gemv, asked, weight=weight.matrix, transposed=weight.transposed)

    def _packed_gemv(self, asked: Product[PackedWeight]) -> Any:
        return self._of_few(ops.packed_gemv, asked, packed=asked.weight)

    def _packed_gemm(self, asked: Product[PackedWeight]) -> Any:
        x = self.input_behind(asked.x, asked.norm)
        out = self.emit(ops.packed_gemm.overload, x=x, packed=asked.weight, bias=asked.bias)
        if asked.activation == Activation.NONE and asked.residual is None:
            return out
        return self.emit(many_rows.finished, out=out, residual=asked.residual, activation=asked.activation)

    def _dequantized(self, asked: Product[PackedWeight]) -> Any:
        how = dict(packed=asked.weight, bias=asked.bias, residual=asked.residual, activation=asked.activation)
        return self.emit(many_rows.dequantized_product, x=self.input_behind(asked.x, asked.norm), **how)

    def _dense(self, op: Any, asked: Product[PlainWeight]) -> Any:
        weight = dict(weight=asked.weight.matrix, bias=asked.bias, transposed=asked.weight.transposed)
        behind = dict(residual=asked.residual, activation=asked.activation)
        return self.emit(op, x=self.input_behind(asked.x, asked.norm), **weight, **behind)

    def _gated_in_one(self, asked: Gated[PlainWeight]) -> Any:
        how = dict(activation=asked.activation, norm=asked.norm, programmatic_launch=self.early)
        if asked.together is not None:
            return self.emit(ops.packed_gemv_swiglu.overload, x=asked.x, packed=asked.together, **how)
        weights = dict(gate_weight=asked.gate.matrix, up_weight=asked.up.matrix)
        return self.emit(ops.gemv_swiglu.overload, x=asked.x, **weights, **how)

    def _gated_halves(self, asked: Gated) -> Any:
        assert asked.together is not None, "the row takes no others"
        both = self.product(asked.x, asked.together, norm=asked.norm)
        return self.emit(many_rows.gated_halves, both=both, activation=asked.activation)

    def _gated_apart(self, asked: Gated) -> Any:
        x, weights = asked.x, zip((asked.gate, asked.up), asked.biases)
        gate, up = (self.product(x, weight, bias=bias, norm=asked.norm) for weight, bias in weights)
        self._shared = None, None, None  # a long prompt's normed input is as large as the result of the next call
        return self.emit(ops.fused_swiglu.overload, gate=gate, up=up, activation=asked.activation)

    def _queries_in_one(self, asked: Queries[PlainWeight]) -> Any:
        how: dict[str, Any] = dict(norm=asked.norm, programmatic_launch=self.early)
        if asked.together is not None:
            op = ops.packed_qkv_rope_append.overload
            return self.emit(op, x=asked.x, packed=asked.together, **asked.store, **how)
        absent = [None] * (3 - len(asked.weights))  # one projection may hold q, k and v
        kinds = ("weight", [each.matrix for each in asked.weights]), ("bias", list(asked.biases))
        given = {f"{role}_{kind}": each for kind, found in kinds for role, each in zip("qkv", found + absent)}
        how |= dict(transposed=asked.weights[0].transposed, head_norms=asked.head_norms)
        return self.emit(ops.qkv_rope_append.overload, x=asked.x, **given, **asked.store, **how)

    def _queries_of_many(self, asked: Queries[PlainWeight]) -> Any:
        x, weights, biases, norm = asked.x, asked.weights, asked.biases, asked.norm
        if asked.together is not None:
            qkv = self.product(x, asked.together, norm=norm)
        elif len(weights) > 1 and self.beside and self.runs_on(weights[0]) == "cuda":
            x = x if norm is None else self.normed(x, norm, is_early=False)
            given = dict(weights=[each.matrix for each in weights], biases=list(biases), beside=self._side)
            qkv = self.emit(many_rows.side_by_side, x=x, **given, transposed=weights[0].transposed)
        else:
            made = self.projections(x, weights, biases, norm)
            self._shared = None, None, None
            qkv = made[0] if len(made) == 1 else self.emit(composed.concatenated, *made)
        return self.append(dict(qkv=qkv), asked.store, asked.head_norms)

    def _attend_by_other(self, asked: Scores) -> Any:
        known = {name: asked.seen.get(name) for name in ("scale", "window", "sinks", "slopes")}
        softcap = asked.seen.get("softcap", 0.0)
        return self.emit(attend, attention=self.attention, q=asked.q, cache=asked.cache, **known, softcap=softcap)

    def _attend_over_new(self, asked: Scores) -> Any:
        assert asked.new is not None, "the row takes no others"
        return self._over_cache(ops.quantizing_attention, asked, k=asked.new.k, v=asked.new.v)

    def _over_cache(self, op: Any, asked: Scores, **new: Any) -> Any:
        return self.emit(op.overload, q=asked.q, **new, cache=asked.cache, **asked.seen, programmatic_launch=self.early)

    def _experts_of_few(self, asked: Mixture) -> Any:
        how = dict(programmatic_launch=self.early) if "programmatic_launch" in parameters(asked.op) else {}
        return self.emit(asked.op, **asked.given, **how)

    def _experts_of_many(self, asked: Mixture) -> Any:
        given = dict(asked.given)
        x = self.input_behind(given.pop("x"), given.pop("norm", None))
        gate, up, down, shut = (given.pop(name, None) for name in many_experts.OF_SHARED)
        product = ops.gemm.overload if self.runs_on(given["down_weight"]) in ops.gemm.native else many_rows.linear
        made = self.emit(many_experts.OF_MANY[asked.op], x=x, product=product, **given)
        if gate is None:
            return made
        hidden = self.gated(x, PlainWeight(gate), PlainWeight(up), given["activation"])
        if shut is not None:
            hidden = self.emit(ops.fused_swiglu.overload, gate=shut, up=hidden, activation=Activation.SIGMOID)
        return self.product(hidden, PlainWeight(down), residual=made)


def _is_packed(to: Lower, asked: Product) -> bool:
    return isinstance(asked.weight, PackedWeight)


#: products, see :class:`Product`
PRODUCTS: tuple[Route, ...] = (
    Route("product, and lora_up", lambda to, asked: has_adapters(asked.weight), Lower._adapted),
    Route(
        "index_select or fake_quantize, and the product",
        lambda to, asked: isinstance(asked.weight, PreparedInputWeight),
        prepared_product,
    ),
    Route("packed_gemv", lambda to, asked: _is_packed(to, asked) and not to.many, Lower._packed_gemv),
    Route(
        "packed_gemm",
        lambda to, asked: _is_packed(to, asked) and to.runs_on(asked.weight) in ops.packed_gemm.native,
        Lower._packed_gemm,
    ),
    Route("product with the dequantized weight", _is_packed, Lower._dequantized),
    Route("gemv", lambda to, asked: asked.fits and to.takes_few(asked.weight), Lower._gemv),
    Route(
        "gemm",
        lambda to, asked: asked.fits and to.runs_on(asked.weight) in ops.gemm.native,
        lambda to, asked: to._dense(ops.gemm.overload, asked),
    ),
    # the op's reference would go through Python
    Route("PyTorch's product", lambda to, asked: True, lambda to, asked: to._dense(many_rows.linear, asked)),
)
#: gated MLPs up to their activation, see :class:`Gated`
GATED: tuple[Route, ...] = (
    Route("products, and lora_up", lambda to, asked: has_adapters(asked.gate, asked.up), Lower._gated_adapted),
    Route("packed_gemv_swiglu", lambda to, asked: asked.together is not None and not to.many, Lower._gated_in_one),
    Route("product, and fused_swiglu of its halves", lambda to, asked: asked.together is not None, Lower._gated_halves),
    Route(
        "gemv_swiglu",
        lambda to, asked: (
            not asked.has_bias
            and isinstance(asked.gate, PlainWeight)
            and isinstance(asked.up, PlainWeight)
            and to.takes_few(asked.gate, asked.up)
        ),
        Lower._gated_in_one,
    ),
    Route("two products, and fused_swiglu", lambda to, asked: True, Lower._gated_apart),
)
#: projections of attention with rotation and append, see :class:`Queries`
QUERIES: tuple[Route, ...] = (
    Route("products, lora_up, and rope_append", lambda to, asked: has_adapters(*asked.weights), Lower._queries_adapted),
    Route(
        "packed_qkv_rope_append", lambda to, asked: asked.together is not None and not to.many, Lower._queries_in_one
    ),
    Route("qkv_rope_append", lambda to, asked: asked.is_plain and to.takes_few(*asked.weights), Lower._queries_in_one),
    Route(
        "products, and rope_append",
        lambda to, asked: asked.together is not None or asked.is_plain,
        Lower._queries_of_many,
    ),
)
#: attention over a cache, see :class:`Scores`
ATTENTION: tuple[Route, ...] = (
    Route(
        "a prompt's attention", lambda to, asked: to.attention is not None and asked.new is None, Lower._attend_by_other
    ),
    Route("quantizing_attention", lambda to, asked: asked.new is not None, Lower._attend_over_new),
    Route("decode_attention", lambda to, asked: True, lambda to, asked: to._over_cache(ops.decode_attention, asked)),
)
#: experts, see :class:`Mixture`
EXPERTS: tuple[Route, ...] = (
    Route("packed_experts", lambda to, asked: isinstance(asked.given["down_weight"], PackedWeight), packed_mixture),
    Route("routed_experts, or fused_experts", lambda to, asked: to.rows <= MAX_ROWS, Lower._experts_of_few),
    Route("choose_experts, and products of each expert's rows", lambda to, asked: True, Lower._experts_of_many),
)
