"""All layers of a step as one call of an op, if the layers are alike."""

from __future__ import annotations

from typing import Any

import torch

from ... import ops
from ...choices import Activation
from ...ops.decode_layers import LAYER_TENSORS, OUTER_TENSORS, sizes, weight_reasons
from ...ops.kv_cache import KVCache
from ..calls.named_calls import Call, Norm, Step, read_by
from ..calls.pass_table import CallList

#: the ops of a layer's calls in order
_LAYER = (
    (ops.qkv_rope_append.overload,),
    (ops.decode_attention.overload,),
    (ops.gemv.overload,),
    (ops.gemv_swiglu.overload, ops.gemv.overload),
    (ops.gemv.overload,),
)


class _Layer:
    """A layer as the five calls that it is made of, and the arguments of each."""

    def __init__(self, calls: list[Call]):
        self.calls = calls
        self.qkv, self.attention, self.out, self.up, self.down = (call.arguments for call in calls)

    @property
    def cache(self) -> KVCache:
        return self.qkv["cache"]

    @property
    def norms(self) -> list[Norm]:
        """Of the inputs of both blocks; a layer that :meth:`is_sequential` has them."""
        return [self.qkv["norm"], self.up["norm"]]

    def is_sequential(self, x: Any) -> bool:
        """Whether the layer is norm, attention, norm and MLP in turn on ``x``, each block added to its input."""
        qkv, attention, out, up, _ = (call.out for call in self.calls)
        taken = [
            (self.qkv["x"], x),
            (self.attention["q"], qkv),
            (self.out["x"], attention),
            (self.out["residual"], x),
            (self.up["x"], out),
            (self.down["x"], up),
            (self.down["residual"], out),
        ]
        plain = [self.out["norm"], self.down["norm"], self.attention["sinks"], self.up.get("residual")]
        plain += [self.cache.k_scales, self.cache.block_table, self.qkv.get("head_norms")]
        plain += [self.attention.get("slopes"), self.attention.get("biases")]
        none = [self.out["activation"], self.down["activation"]]
        return (
            all(found is wanted for found, wanted in taken)
            and all(each is None for each in plain)
            and all(each == Activation.NONE for each in none)
            and not self.qkv["neighbors"]
            and not self.attention.get("softcap")
            and self.attention["cache"] is self.cache
            and self.attention["seq_lens"] is self.qkv["seq_lens"]
            and None not in self.norms
        )

    def constants(self) -> tuple:
        """Return what an op for all layers takes once; registers and tensors stand by their identity."""
        kinds = {call.get("transposed", False) for call in (self.qkv, self.out, self.down)}
        kinds |= {self.up["transposed"]} if "transposed" in self.up else set()
        same = self.qkv["cos"], self.qkv["sin"], self.qkv["seq_lens"], self.attention["starts"], self.cache.table
        numbers = self.qkv["num_heads"], self.attention["scale"], self.up["activation"], self.calls[3].op
        norms = [(norm.kind, norm.eps) for norm in self.norms]
        return (*map(id, same), *numbers, frozenset(kinds), *norms)


def _found(calls: list[Call]) -> tuple[int, list[_Layer]]:
    """Return where the layers begin, and all layers; none if some call between there and the head is no part of one."""
    start = next((place for place, call in enumerate(calls) if call.op in _LAYER[0]), len(calls))
    if start == len(calls):
        return start, []
    layers, place = [], start
    x = calls[start].arguments["x"]
    while len(group := calls[place : place + 5]) == 5 and all(c.op in ops_ for c, ops_ in zip(group, _LAYER)):
        layer = _Layer(group)
        if not layer.is_sequential(x):
            return start, []
        layers.append(layer)
        place, x = place + 5, group[-1].out
    head = calls[place] if place < len(calls) else None
    if head is None or head.op is not ops.gemv.overload:
        return start, []
    if head.arguments["x"] is not x or head.arguments["norm"] is None:
        return start, []
    if head.arguments["activation"] != Activation.NONE or head.arguments["residual"] is not None:
        return start, []  # a product between the layers and the head
    final = head.arguments["norm"]
    alike = layers[0].constants()
    if (
        any(layer.constants() != alike for layer in layers)
        or (final.kind, final.eps) != alike[-1]
        or alike[-2] != alike[-1]
    ):
        return start, []
    return start, layers


def one_call(listing: CallList, step: Step) -> None:
    """Pass: make one call of layers that are alike, and of the head behind them."""
    calls = listing.calls
    start, layers = _found(calls) if step.one_call else (0, [])
    if not layers:
        return
    end = start + 5 * len(layers)
    arguments = _decode_layers(layers, calls[end].arguments)
    if arguments is None:
        return
    inside, behind = calls[start:end], calls[end + 1 :]
    read_behind = {register.index for call in behind for register in read_by(call)}
    if any(call.out.index in read_behind for call in inside):
        return  # a product that the layers' result is added to behind it, and no head
    made = Call(ops.decode_layers.overload, arguments, calls[end].out)
    listing.calls = [*calls[:start], made, *behind]


def _layer_tensors(layer: _Layer) -> dict[str, torch.Tensor | None]:
    """Return a layer's tensors by the names that ``ops.decode_layers`` gives them."""
    found = {name: layer.qkv[name] for name in layer.qkv if name.endswith(("_weight", "_bias"))}
    for role, norm in zip(("attention_norm", "mlp_norm"), layer.norms):
        found |= {f"{role}_weight": norm.weight, f"{role}_bias": norm.bias}
    for role, call in (("out", layer.out), ("down", layer.down)):
        found |= {f"{role}_weight": call["weight"], f"{role}_bias": call["bias"]}
    if "gate_weight" in layer.up:
        return found | {"gate_weight": layer.up["gate_weight"], "up_weight": layer.up["up_weight"]}
    return found | {"up_weight": layer.up["weight"], "up_bias": layer.up["bias"]}


def _decode_layers(layers: list[_Layer], head: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of ``ops.decode_layers``, or None if the op does not take these layers."""
    kinds = {call["transposed"] for layer in layers for call in (layer.qkv, layer.out, layer.down)}
    if len(kinds) > 1 or "weight" not in head or head["transposed"]:
        return None
    (transposed,) = kinds
    absent = head["weight"].new_empty(0)
    final = head["norm"]
    outer = dict(zip(OUTER_TENSORS, (final.weight, final.bias, head["weight"], head["bias"])))
    found = [layer.get(name) for layer in map(_layer_tensors, layers) for name in LAYER_TENSORS]
    weights = [absent if p is None else p for p in (*found, *(outer[name] for name in OUTER_TENSORS))]
    first = layers[0]
    caches = [layer.cache for layer in layers]
    num_heads, out = first.qkv["num_heads"], first.out["weight"]
    q_features = out.shape[0 if transposed else 1]
    model, head_dim = sizes(weights, q_features, transposed), q_features // num_heads
    num_kv_heads = (model.qkv_features - model.q_features) // (2 * head_dim)
    x = head["weight"].new_empty(1, 1, model.hidden_size)
    kind, activation = first.norms[0].kind, first.up["activation"]
    if weight_reasons(x, weights, num_heads, num_kv_heads, head_dim, kind, activation, transposed):
        return None
    return dict(
        x=first.qkv["x"],
        weights=weights,
        k_caches=[cache.k for cache in caches],
        v_caches=[cache.v for cache in caches],
        cos=first.qkv["cos"],
        sin=first.qkv["sin"],
        seq_lens=first.qkv["seq_lens"],
        starts=first.attention["starts"],
        num_heads=num_heads,
        scale=first.attention["scale"],
        windows=[layer.attention["window"] for layer in layers],
        norm=kind,
        norm_eps=first.norms[0].eps,
        activation=activation,
        transposed=transposed,
        kv_table=first.cache.table,
        workspace=first.attention["workspace"],
        programmatic_launch=first.attention["programmatic_launch"],
    )
