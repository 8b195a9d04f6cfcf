"""A recorded list as calls of a plan: marks become ops of ours, and what is left stays PyTorch's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from .. import ops
from ..choices import Activation, NormKind, Rotation
from ..decode.calls.named_calls import Call, Register
from ..decode.lower import composed, many_rows
from ..decode.lower.attend import attend_latents
from ..decode.lower.positions import Positions
from ..decode.lower.which_op import Lower
from ..ops.gemv import MAX_ROWS
from ..ops.head_products import MAX_INPUTS
from ..ops.kv_cache import KVCache
from ..ops.latent_attention import MAX_RANK, MAX_ROPE_DIM
from ..registry import FLOAT_DTYPES, PLAIN_TENSORS
from . import marks
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
    """

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
        self._recording, self._to, self._emit, self._caches = recording, to, to.emit, caches
        self._all, self._last, self._size = to, last, size
        self._at, self._attentions = at[part.devices[0]], [layer.attention for layer in part.layers]
        self._values: dict[int, Any] = dict(given)
        self._pending: dict[int, tuple[Any, Any]] = {}  # layer -> keys and values that are not in its cache yet
        self._stand_ins = StandIns(recording)
        self._chunk_starts: dict[int, Any] = {}  # size of windows that begin anew -> where the newest tokens' begin

    def run(self) -> Any:
        """Emit all calls; return what stands for the logits."""
        windows = (call.arguments.get("window") for call in self._recording.calls)
        for size in {each for each in windows if isinstance(each, marks.Chunk)}:  # first, as attention reads it early
            at = dict(seq_lens=self._at.seq_lens, starts=self._at.starts)
            self._chunk_starts[size] = self._emit(composed.chunk_starts, **at, size=int(size))
        for place, call in enumerate(self._recording.calls):
            self._come_to(place)
            if self._last is not None:
                self._to = self._last if self._is_of_last_token(call) else self._all
            arguments = {name: self._value(value) for name, value in call.arguments.items()}
            rule = _RULES.get(call.op)
            if rule is not None:
                self._values[call.out.index] = rule(self, call, **arguments)
            elif call.op is not operator.getitem or call.arguments["a"].index in self._values:
                self._values[call.out.index] = self._emit(call.op, **arguments)
        if self._pending:
            raise Unrecordable("keys and values that no attention reads")
        return self._values[self._recording.logits.index]

    def _is_of_last_token(self, call: Call) -> bool:
        fact = self._recording.fact(call.out)
        return isinstance(fact, torch.Tensor) and fact.dim() == 3 and fact.shape[1] == 1

    def _come_to(self, place: int) -> None:
        """Note that the calls to come are those of the list's call at this place."""

    def _value(self, value: Any) -> Any:
        if isinstance(value, Register):
            if value.index not in self._values:
                if value.index in self._recording.masks:
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
        fits = weight in self._stand_ins or takes_product(self._recording, call)
        return self._to.product(x, self._stand_ins.weight(weight, transposed), bias=bias, fits=fits, **others)

    def _normed(self, call: Call, x, norm, unit_offset=False, residual=None, factor=None) -> Any:
        if norm.kind == NormKind.LAYER and unit_offset:
            op = composed.unit_offset_layer_norm
            return self._emit(op, x=x, weight=norm.weight, bias=norm.bias, eps=norm.eps)
        norm = replace(norm, kind=NormKind.RMS_OFFSET) if unit_offset else norm
        return self._to.normed(x, norm, residual, factor)

    def _add_normed(self, call: Call, x, residual, norm) -> Any:
        how = dict(weight=norm.weight, eps=norm.eps, programmatic_launch=self._to.early)
        return self._emit(ops.add_rms_norm.overload, x=x, residual=residual, **how)

    def _view(self, call: Call, /, **arguments) -> Any:
        # the tensor that is viewed may lie in another order than the recorded one did
        given, size = arguments.values()
        return self._emit(_aten.reshape.default, given, size)

    def _append(self, call: Call, k, v, layer) -> None:
        self._pending[layer] = k, v
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
        fact = self._recording.fact(call.arguments["q"])
        batch, heads, query_len, head_dim = fact.shape
        queries: Any
        if layer in self._pending:
            new = (self._emit(_aten.transpose.int, each, 1, 2) for each in (q, *self._pending.pop(layer)))
            given = dict(zip(("qkv", "k", "v"), new), bias=None, cos=None, sin=None, num_heads=heads)
            queries = self._emit(ops.rope_append.overload, **given, **self.store(layer))
        else:
            queries = self._emit(_aten.transpose.int, q, 1, 2)
        bias = bias if row_biases is None else row_biases
        return self.attention(queries, layer, scale, window, softcap, sinks, slopes, bias, encoded, **others)

    def _attend_encoded(self, call: Call, q, k, v, layer, scale, softcap=0.0) -> Any:
        return self._over_encoded(q, layer, scale, softcap)

    def _over_encoded(self, queries: Any, layer: int, scale: float, softcap: float, **others: Any) -> Any:
        at, places = self._at, self._at.encoded
        seen = dict(seq_lens=places.ends, starts=places.starts, scale=scale, softcap=softcap, workspace=at.workspace)
        return self._to.attend(queries, places.caches[layer], None, **seen, **others)

    def _latent_attend(
        self, call: Call, q, states, layer, scale, window, weight, cos=None, sin=None, rotation=Rotation.HALVES
    ) -> Any:
        at, cache, attention = self._at, self._caches[layer], self._attentions[layer]
        fact, (_, rank), turned = self._recording.fact(call.arguments["q"]), attention.cache_shape, attention.value_dim
        new, angles = self._pending.pop(layer, None), None if cos is None else dict(cos=cos, sin=sin, rotation=rotation)
        seen = dict(seq_lens=at.seq_lens, starts=self._starts(window), scale=scale)
        fits = rank <= MAX_RANK and turned <= MAX_ROPE_DIM and fact.shape[3] - turned <= MAX_INPUTS
        is_plain = at.kv_dtype == fact.dtype == weight.dtype and not cache.is_paged
        if fits and is_plain and fact.shape[2] == 1 and not window:
            return self._over_latents(fact, q, layer, weight, new, angles, seen)
        if new is not None:
            k, v = new
            v = v if angles is None else self._emit(composed.turned, x=v, **angles)
            self._emit(composed.append_states, k=k, v=v, cache=cache, seq_lens=at.seq_lens)
        q = q if angles is None else self._emit(composed.with_turned_end, q=q, **angles)
        if self._to.attention is not None:
            return self._emit(
                attend_latents, attention=self._to.attention, q=q, weight=weight, cache=cache, scale=scale
            )
        return self._emit(composed.latent_attention, q=q, weight=weight, cache=cache, **seen, window=window)

    def _over_latents(self, fact, q, layer, weight, new, angles, seen) -> Any:
        """Emit attention of one token as ops: queries at the latent, what they see of it, and the values of that."""
        batch, heads, _, dim = fact.shape
        attention, cache = self._attentions[layer], self._at.placed(self._caches[layer], layer)
        turned, by_head = attention.value_dim, weight.detach().view(heads, -1, attention.cache_shape[1])
        how = dict(programmatic_launch=self._to.early)
        q, border = self._emit(_aten.select.int, q, 2, 0), dim - turned
        plain, end = (self._emit(_aten.narrow.default, q, 2, *part) for part in ((0, border), (border, turned)))
        keys, values = by_head[:, :border], by_head[:, border:]
        at_latent = self._emit(ops.head_products.overload, x=plain, weight=keys, transposed=True, **how)
        given: dict[str, Any] = {}
        if new is not None:
            rows = [self._emit(_aten.reshape.default, each, [batch, -1]) for each in new]
            given["new_latent"], given["new_rope"] = rows
        if angles is not None:
            given |= angles | {name: self._emit(_aten.select.int, angles[name], 1, 0) for name in ("cos", "sin")}
        seen_of_it = self._emit(
            ops.latent_attention.overload,
            q_latent=at_latent,
            q_rope=end,
            latents=cache.k,
            rope_keys=cache.v,
            kv_table=cache.table,
            layer=cache.layer,
            **seen,
            **given,
            **how,
        )
        made = self._emit(ops.head_products.overload, x=seen_of_it, weight=values, **how)
        return self._emit(_aten.unsqueeze.default, made, 1)

    def _starts(self, window: int) -> Any:
        """Return the first positions that tokens see, whatever the length of their window."""
        return self._chunk_starts[window] if isinstance(window, marks.Chunk) else self._at.starts

    def store(self, layer: int) -> dict[str, Any]:
        """Return where keys and values of a layer are appended."""
        staging = self._at.staging
        if staging is not None:
            return {"cache": staging.of(self._attentions[layer]), "seq_lens": staging.seq_lens}
        return {"cache": self._at.placed(self._caches[layer], layer), "seq_lens": self._at.seq_lens}

    def attention(self, queries, layer, scale, window, softcap, sinks, slopes, bias, encoded, **others) -> Any:
        at, cache = self._at, self._at.placed(self._caches[layer], layer)
        how = dict(
            seq_lens=at.seq_lens,
            starts=self._starts(window),
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
            lse = self._emit(composed.log_sums, queries=queries)
            how |= dict(other=self._over_encoded(queries, encoded, scale, softcap, lse=lse), other_lse=lse)
        new = None if at.staging is None else at.staging.of(self._attentions[layer])
        return self._to.attend(queries, cache, new, **how)

    def _gated(self, call: Call, x, gate_weight, up_weight, activation, norm=None) -> Any:
        gate, up = map(self._stand_ins.weight, (gate_weight, up_weight))
        return self._to.gated(x, gate, up, activation, norm=norm)

    def _angles(self, call: Call, tables, formula, dtype, pairs) -> Any:
        shape = [-1, self._value(self._recording.query_len)]
        return self._emit(composed.run_angles, tables=tables, formula=formula, dtype=dtype, pairs=pairs, shape=shape)

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
        rows = [self._recording.batch, self._value(self._recording.query_len)]
        of_each = [[-1]] if len(sources) == 1 else [[heads, head_dim] for heads in (num_heads, *[num_kv_heads] * 2)]
        given = {
            name: self._emit(_aten.reshape.default, each, rows + sizes)
            for name, each, sizes in zip(("qkv", "k", "v"), sources, of_each)
        }
        if grouped:
            given["qkv"] = self._emit(
                composed.ungrouped, qkv=given["qkv"], head_dim=head_dim, group=num_heads // num_kv_heads
            )
        store = self.store(attend["layer"]) | _turned_by(cos, sin, pairs)
        queries = self._to.append(given, store | dict(num_heads=num_heads), head_norms)
        return self.attention(self._times(queries, factor), **attend)

    def _times(self, queries: Any, factor: Any) -> Any:
        if factor is None:
            return queries
        query_len = self._value(self._recording.query_len)
        return self._emit(composed.scaled_queries, queries=queries, factor=factor, query_len=query_len)

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
        store = self.store(attend["layer"]) | _turned_by(cos, sin, pairs) | dict(num_heads=num_heads)
        found = [self._stand_ins.weight(each, transposed) for each in weights]
        queries = self._to.queries(x, found, biases, store, norm=norm, head_norms=head_norms)
        if queries is None:
            sources, sizes = self._to.projections(x, found, biases, norm), (num_heads, num_kv_heads, head_dim)
            return self._rotated(call, sources, False, cos, sin, pairs, *sizes, head_norms, factor, **attend)
        return self.attention(self._times(queries, factor), **attend)

    def _experts(self, call: Call, x, ids, weights, **arguments) -> Any:
        return self._emit(composed.run_experts, x=x, ids=ids, weights=weights, **arguments)

    def _routed_experts(self, call: Call, residual=None, **arguments) -> Any:
        others = dict(gate_up_bias=None, down_bias=None, transposed=False) | arguments
        return self._to.experts(residual=residual, **others)

    def _scaled_experts(self, call: Call, **arguments) -> Any:
        return self._to.experts(composed.scaled_experts, **arguments)

    def _activated(self, call: Call, x, activation) -> Any:
        return self._emit(many_rows.finished, out=x, residual=None, activation=activation)


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


def _turned_by(cos: Any, sin: Any, pairs: str) -> dict[str, Any]:
    """Return the arguments of ``ops.rope_append`` that describe a rotation."""
    return {"cos": cos, "sin": sin, "neighbors": pairs == "neighbors"}


def _as_given(op: Any) -> Callable[..., Any]:
    """Make the rule of a mark whose arguments are those of an op."""
    return lambda self, call, **arguments: self._emit(op.overload, **arguments)


def _overlapping(op: Any) -> Callable[..., Any]:
    """Make the rule of a mark whose arguments are those of an op that may start while the kernel in front runs."""
    return lambda self, call, **arguments: self._emit(op.overload, **arguments, programmatic_launch=self._to.early)


_RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: Lowering._view,
    _aten._unsafe_view.default: Lowering._view,
    marks.text_positions: lambda self, call, query_len: self._emit(
        marks.text_positions, lengths=self._at.seq_lens, query_len=query_len
    ),
    marks.linear: Lowering._linear,
    marks.joined_linear: lambda self, call, x, weights, norm=None: self._to.joined_products(x, weights, norm),
    marks.head_products: _overlapping(ops.head_products),
    marks.router_logits: _overlapping(ops.router_logits),
    marks.normed: Lowering._normed,
    marks.add_normed: Lowering._add_normed,
    marks.append: Lowering._append,
    marks.attend: Lowering._attend,
    marks.attend_encoded: Lowering._attend_encoded,
    marks.latent_attend: Lowering._latent_attend,
    marks.gated: Lowering._gated,
    marks.sigmoid_gated: lambda self, call, x, gate: self._emit(
        ops.fused_swiglu.overload, gate=gate, up=x, activation=Activation.SIGMOID
    ),
    marks.glu: _as_given(ops.fused_swiglu),
    marks.angles: Lowering._angles,
    marks.rotated_attention: Lowering._rotated,
    marks.projected_attention: Lowering._projected,
    marks.short_convolution: _as_given(ops.short_convolution),
    marks.gated_delta_step: _overlapping(ops.gated_delta_step),
    marks.selective_state_step: _as_given(ops.selective_state_step),
    marks.gated_norm: _overlapping(ops.gated_rms_norm),
    marks.experts: Lowering._experts,
    marks.routed_experts: Lowering._routed_experts,
    marks.scaled_experts: Lowering._scaled_experts,
    marks.activated: Lowering._activated,
}
