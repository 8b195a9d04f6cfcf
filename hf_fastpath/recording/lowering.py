"""A recorded list as calls of a plan: marks become ops of ours, and what is left stays PyTorch's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from .. import ops
from ..choices import Activation, NormKind
from ..decode.calls.named_calls import Call, Register
from ..decode.lower import composed, many_rows
from ..decode.lower.positions import Positions
from ..decode.lower.which_op import Lower
from ..ops.gemv import MAX_ROWS
from ..ops.kv_cache import KVCache
from ..registry import FLOAT_DTYPES, PLAIN_TENSORS
from . import marks
from .latent_lowering import latent_attend
from .numbers_of_lengths import follows_length
from .recorded_step import Recording, Unrecordable, registers_in
from .stand_ins import StandIns

_aten = torch.ops.aten


class Lowering:
    """One walk over a recorded list.

    Args:
        part: the model.
        program: is told nothing but by subclasses, which go from device to device.
        to: gets what the list computes, and makes the calls of it.
        recording: the list, after its passes.
        given: register -> what the plan has for it.
        caches: the cache of each layer.
        at: of each device, where the new tokens stand.
        last: makes the calls of a prompt's last token.
        size: gives what stands for a number that is made of the number of new tokens, of its formula.

    Attributes:
        rows_are_tokens: the list's sequences are tokens of a text, see :mod:`.token_rows`.
        recording, to, caches: see the arguments.
        emit: takes the calls.
        at: where the new tokens stand on the embeddings' device.
        attentions: of each layer.
        pending: layer -> keys and values that are not in its cache yet.
    """

    rows_are_tokens = False

    def __init__(
        self,
        part: Any,
        program: Any,
        to: Lower,
        recording: Recording,
        given: Mapping[int, Any],
        caches: Sequence[KVCache],
        at: Mapping[torch.device, Positions],
        last: Lower | None = None,
        size: Callable[[Any], Any] | None = None,
    ):
        self.recording, self.to, self.emit, self.caches = recording, to, to.emit, caches
        self._all, self._last, self._size = to, last, size
        self.at, self.attentions = at[part.devices[0]], [layer.attention for layer in part.layers]
        self._values: dict[int, Any] = dict(given)
        self.pending: dict[int, tuple[Any, Any]] = {}  # layer -> keys and values that are not in its cache yet
        self._stand_ins = StandIns(recording)
        self._chunk_starts: dict[int, Any] = {}  # size of windows that begin anew -> where the newest tokens' begin

    def run(self) -> Any:
        """Emit all calls; return what stands for the logits."""
        windows = (call.arguments.get("window") for call in self.recording.calls)
        for size in {each for each in windows if isinstance(each, marks.Chunk)}:  # first, as attention reads it early
            at = dict(seq_lens=self.at.seq_lens, starts=self.at.starts)
            self._chunk_starts[size] = self.emit(composed.chunk_starts, **at, size=int(size))
        for place, call in enumerate(self.recording.calls):
            self._come_to(place)
            if self._last is not None:
                self.to = self._last if self._is_of_last_token(call) else self._all
            arguments = {name: self._value(value) for name, value in call.arguments.items()}
            rule = _RULES.get(call.op)
            if rule is not None:
                self._values[call.out.index] = rule(self, call, **arguments)
            elif call.op is not operator.getitem or call.arguments["a"].index in self._values:
                self._values[call.out.index] = self.emit(call.op, **arguments)
        if self.pending:
            raise Unrecordable("keys and values that no attention reads")
        return self._values[self.recording.logits.index]

    def _is_of_last_token(self, call: Call) -> bool:
        fact = self.recording.fact(call.out)
        return isinstance(fact, torch.Tensor) and fact.dim() == 3 and fact.shape[1] == 1

    def _come_to(self, place: int) -> None:
        """Note that the calls to come are those of the list's call at this place."""

    # ---- where tokens of a text lie -----------------------------------------------------------------------------

    @property
    def _shape(self) -> list[Any]:
        """What stands for the number of sequences, and of new tokens of each."""
        return [self.recording.batch, self._value(self.recording.query_len)]

    def _by_text(self, x: Any) -> Any:
        """Return [batch, query_len, ...] of what the list has as [rows, columns, ...]."""
        return x

    def by_head(self, x: Any) -> Any:
        """Return [batch, heads, query_len, ...] of what the list has as [rows, heads, columns, ...]."""
        return x

    def by_row(self, x: Any) -> Any:
        """Return [rows, columns, ...] of [batch, query_len, ...]."""
        return x

    def _in_turn(self) -> dict[str, Any]:
        """Return arguments of an op over states that tell of several tokens."""
        return {}

    def _turned_by(self, cos: Any, sin: Any, pairs: str) -> dict[str, Any]:
        """Return the arguments of ``ops.rope_append`` that describe a rotation."""
        return {"cos": self._by_text(cos), "sin": self._by_text(sin), "neighbors": pairs == "neighbors"}

    def _value(self, value: Any) -> Any:
        if isinstance(value, Register):
            if value.index not in self._values:
                if value.index in self.recording.masks:
                    raise Unrecordable("a mask that is read outside of attention")
                return None
            return self._values[value.index]
        if isinstance(value, (list, tuple)) and (registers_in(value) or follows_length(value)):
            return [self._value(each) for each in value]
        if self._size is not None and follows_length(value):
            return self._size(value.formula)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: self._value(getattr(value, each.name)) for each in fields(value)})
        return value

    # ---- rules ------------------------------------------------------------------------------------------------

    def _linear(self, call: Call, x, weight, bias, transposed=False, **others) -> Any:
        fits = weight in self._stand_ins or takes_product(self.recording, call)
        return self.to.product(x, self._stand_ins.weight(weight, transposed), bias=bias, fits=fits, **others)

    def _normed(self, call: Call, x, norm, unit_offset=False, residual=None, factor=None) -> Any:
        if norm.kind == NormKind.LAYER and unit_offset:
            op = composed.unit_offset_layer_norm
            return self.emit(op, x=x, weight=norm.weight, bias=norm.bias, eps=norm.eps)
        norm = replace(norm, kind=NormKind.RMS_OFFSET) if unit_offset else norm
        return self.to.normed(x, norm, residual, factor)

    def _add_normed(self, call: Call, x, residual, norm) -> Any:
        how = dict(weight=norm.weight, eps=norm.eps, programmatic_launch=self.to.early)
        return self.emit(ops.add_rms_norm.overload, x=x, residual=residual, **how)

    def _view(self, call: Call, /, **arguments) -> Any:
        # the tensor that is viewed may lie in another order than the recorded one did
        given, size = arguments.values()
        return self.emit(_aten.reshape.default, given, size)

    def _append(self, call: Call, k, v, layer) -> None:
        self.pending[layer] = k, v
        return None

    def _attend(
        self,
        call: Call,
        q,
        states,
        layer,
        scale,
        window,
        softcap=0.0,
        sinks=None,
        slopes=None,
        bias=None,
        encoded=None,
        row_biases=None,
        **others,
    ) -> Any:
        fact = self.recording.fact(call.arguments["q"])
        batch, heads, query_len, head_dim = fact.shape
        queries: Any
        if layer in self.pending:
            new = (self._by_text(self.emit(_aten.transpose.int, each, 1, 2)) for each in (q, *self.pending.pop(layer)))
            given = dict(zip(("qkv", "k", "v"), new), bias=None, cos=None, sin=None, num_heads=heads)
            queries = self.emit(ops.rope_append.overload, **given, **self.store(layer))
        else:
            queries = self._by_text(self.emit(_aten.transpose.int, q, 1, 2))
        bias = bias if row_biases is None else row_biases
        return self.attention(queries, layer, scale, window, softcap, sinks, slopes, bias, encoded, **others)

    def _attend_encoded(self, call: Call, q, k, v, layer, scale, softcap=0.0) -> Any:
        return self._over_encoded(q, layer, scale, softcap)

    def _over_encoded(self, queries: Any, layer: int, scale: float, softcap: float, **others: Any) -> Any:
        at, places = self.at, self.at.encoded
        seen = dict(seq_lens=places.ends, starts=places.starts, scale=scale, softcap=softcap, workspace=at.workspace)
        return self.to.attend(queries, places.caches[layer], None, **seen, **others)

    def starts(self, window: int) -> Any:
        """Return the first positions that tokens see, whatever the length of their window."""
        return self._chunk_starts[window] if isinstance(window, marks.Chunk) else self.at.starts

    def store(self, layer: int) -> dict[str, Any]:
        """Return where keys and values of a layer are appended."""
        staging = self.at.staging
        if staging is not None:
            return {"cache": staging.of(self.attentions[layer]), "seq_lens": staging.seq_lens}
        return {"cache": self.at.placed(self.caches[layer], layer), "seq_lens": self.at.seq_lens}

    def attention(self, queries, layer, scale, window, softcap, sinks, slopes, bias, encoded, **others) -> Any:
        at, cache = self.at, self.at.placed(self.caches[layer], layer)
        how = dict(
            seq_lens=at.seq_lens,
            starts=self.starts(window),
            scale=scale,
            window=int(window),
            workspace=at.workspace,
            sinks=sinks,
            softcap=softcap,
            slopes=slopes,
            biases=bias,
            **others,
        )
        if encoded is not None:
            lse = self.emit(composed.log_sums, queries=queries)
            how |= dict(other=self._over_encoded(queries, encoded, scale, softcap, lse=lse), other_lse=lse)
        new = None if at.staging is None else at.staging.of(self.attentions[layer])
        return self.to.attend(queries, cache, new, **how)

    def _gated(self, call: Call, x, gate_weight, up_weight, activation, norm=None) -> Any:
        gate, up = map(self._stand_ins.weight, (gate_weight, up_weight))
        return self.to.gated(x, gate, up, activation, norm=norm)

    def _angles(self, call: Call, tables, formula, dtype, pairs) -> Any:
        shape = [-1, self._value(self.recording.query_len)]
        return self.emit(composed.run_angles, tables=tables, formula=formula, dtype=dtype, pairs=pairs, shape=shape)

    def _rotated(
        self,
        call: Call,
        sources,
        grouped,
        cos,
        sin,
        pairs,
        num_heads,
        num_kv_heads,
        head_dim,
        head_norms=None,
        factor=None,
        **attend,
    ):
        rows = self._shape
        of_each = [[-1]] if len(sources) == 1 else [[heads, head_dim] for heads in (num_heads, *[num_kv_heads] * 2)]
        given = {
            name: self.emit(_aten.reshape.default, each, rows + sizes)
            for name, each, sizes in zip(("qkv", "k", "v"), sources, of_each)
        }
        if grouped:
            given["qkv"] = self.emit(
                composed.ungrouped, qkv=given["qkv"], head_dim=head_dim, group=num_heads // num_kv_heads
            )
        store = self.store(attend["layer"]) | self._turned_by(cos, sin, pairs)
        queries = self.to.append(given, store | dict(num_heads=num_heads), head_norms)
        return self.attention(self._times(queries, factor), **attend)

    def _times(self, queries: Any, factor: Any) -> Any:
        if factor is None:
            return queries
        return self.emit(composed.scaled_queries, queries=queries, factor=factor, query_len=self._shape[1])

    def _projected(
        self,
        call: Call,
        x,
        weights,
        biases,
        transposed,
        cos,
        sin,
        pairs,
        num_heads,
        num_kv_heads,
        head_dim,
        head_norms=None,
        norm=None,
        factor=None,
        **attend,
    ):
        store = self.store(attend["layer"]) | self._turned_by(cos, sin, pairs) | dict(num_heads=num_heads)
        x = self._by_text(x)
        found = [self._stand_ins.weight(each, transposed) for each in weights]
        queries = self.to.queries(x, found, biases, store, norm=norm, head_norms=head_norms)
        if queries is None:
            sources, sizes = self.to.projections(x, found, biases, norm), (num_heads, num_kv_heads, head_dim)
            return self._rotated(call, sources, False, cos, sin, pairs, *sizes, head_norms, factor, **attend)
        return self.attention(self._times(queries, factor), **attend)

    def _experts(self, call: Call, x, ids, weights, **arguments) -> Any:
        given = self._with_stacks(arguments)
        return self.to.experts(composed.run_experts, x=x, ids=ids, weights=weights, **given)

    def _routed_experts(self, call: Call, residual=None, **arguments) -> Any:
        others = dict(gate_up_bias=None, down_bias=None, transposed=False) | arguments
        return self.to.experts(residual=residual, **self._with_stacks(others))

    def _with_stacks(self, arguments: dict[str, Any]) -> dict[str, Any]:
        stacks = {name: self._stand_ins.stack(arguments[name]) for name in ("gate_up_weight", "down_weight")}
        return arguments | stacks

    def _scaled_experts(self, call: Call, **arguments) -> Any:
        return self.to.experts(composed.scaled_experts, **arguments)

    def _activated(self, call: Call, x, activation) -> Any:
        return self.emit(many_rows.finished, out=x, residual=None, activation=activation)


def takes_product(recording: Recording, call: Call) -> bool:
    """Whether ``ops.gemv`` takes a product of a recorded list."""
    x: Any = call.arguments.get("x")
    weight: Any = call.arguments.get("weight")
    bias: Any = call.arguments.get("bias")
    fact = recording.fact(x)
    if type(weight) not in PLAIN_TENSORS or weight.dim() != 2 or weight.stride(-1) != 1:
        return False
    if bias is not None and (isinstance(bias, Register) or bias.dtype != weight.dtype):
        return False
    if weight.dtype not in FLOAT_DTYPES or fact.dtype != weight.dtype:
        return False
    return 0 < fact.numel() <= MAX_ROWS * fact.shape[-1] or fact.shape[0] == recording.batch and fact.dim() == 3


def _as_given(op: Any) -> Callable[..., Any]:
    """Make the rule of a mark whose arguments are those of an op."""
    return lambda self, call, **arguments: self.emit(op.overload, **arguments)


def _overlapping(op: Any) -> Callable[..., Any]:
    """Make the rule of a mark whose arguments are those of an op that may start while the kernel in front runs."""
    return lambda self, call, **arguments: self.emit(op.overload, **arguments, programmatic_launch=self.to.early)


def _over_states(op: Any, is_early: bool = False) -> Callable[..., Any]:
    """Make the rule of a mark whose arguments are those of an op over states, which may take several tokens in turn."""

    def rule(self: Lowering, call: Call, **arguments: Any) -> Any:
        early = {"programmatic_launch": self.to.early} if is_early else {}
        return self.emit(op.overload, **arguments, **early, **self._in_turn())

    return rule


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: Lowering._view,
    _aten._unsafe_view.default: Lowering._view,
    marks.text_positions: lambda self, call, query_len: self.emit(
        marks.text_positions, lengths=self.at.seq_lens, query_len=query_len
    ),
    marks.linear: Lowering._linear,
    marks.joined_linear: lambda self, call, x, weights, norm=None: self.to.joined_products(x, weights, norm),
    marks.head_products: _overlapping(ops.head_products),
    marks.router_logits: _overlapping(ops.router_logits),
    marks.normed: Lowering._normed,
    marks.add_normed: Lowering._add_normed,
    marks.append: Lowering._append,
    marks.attend: Lowering._attend,
    marks.attend_encoded: Lowering._attend_encoded,
    marks.latent_attend: latent_attend,
    marks.gated: Lowering._gated,
    marks.sigmoid_gated: lambda self, call, x, gate: self.emit(
        ops.fused_swiglu.overload, gate=gate, up=x, activation=Activation.SIGMOID
    ),
    marks.glu: _as_given(ops.fused_swiglu),
    marks.angles: Lowering._angles,
    marks.rotated_attention: Lowering._rotated,
    marks.projected_attention: Lowering._projected,
    marks.short_convolution: _over_states(ops.short_convolution),
    marks.gated_delta_step: _over_states(ops.gated_delta_step, is_early=True),
    marks.selective_state_step: _over_states(ops.selective_state_step),
    marks.gated_norm: _overlapping(ops.gated_rms_norm),
    marks.experts: Lowering._experts,
    marks.routed_experts: Lowering._routed_experts,
    marks.scaled_experts: Lowering._scaled_experts,
    marks.activated: Lowering._activated,
}
