"""All layers of a step as one call of an op, if the layers are alike and the device has kernels for them."""

from __future__ import annotations

from typing import Any

import torch

from ... import ops
from ...choices import Activation, NormKind
from ...ops.decode_layers import LAYER_TENSORS, weight_reasons
from ...ops.kv_cache import KVCache
from ..calls.named_calls import Call, Norm, Step, read_by
from ..calls.pass_table import CallList

#: the ops of a layer's calls in order
_LAYER = (
    ops.qkv_rope_append.overload,
    ops.decode_attention.overload,
    ops.gemv.overload,
    ops.gemv.overload,
    ops.gemv.overload,
)


class _Layer:
    """A layer as the calls that it is made of, and the arguments of each."""

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
        absent = [self.out["norm"], self.down["norm"], self.up.get("residual"), self.cache.k_scales]
        absent += [self.qkv.get(name) for name in ("cos", "k_weight", "v_weight", "head_norms")]
        absent += [self.attention.get(name) for name in ("sinks", "slopes", "biases")] + [self.cache.block_table]
        return (
            all(found is wanted for found, wanted in taken)
            and all(each is None for each in absent)
            and all(each == Activation.NONE for each in (self.out["activation"], self.down["activation"]))
            and all(call["transposed"] for call in (self.qkv, self.out, self.up, self.down))
            and not self.attention.get("softcap")
            and self.attention["cache"] is self.cache
            and self.attention["seq_lens"] is self.qkv["seq_lens"]
            and all(norm is not None and norm.kind == NormKind.LAYER for norm in self.norms)
            and self.norms[0].eps == self.norms[1].eps
        )

    def constants(self) -> tuple:
        """Return what an op for all layers takes once; registers and tensors stand by their identity."""
        same = self.qkv["seq_lens"], self.attention["starts"], self.cache.table
        numbers = self.qkv["num_heads"], self.attention["scale"], self.up["activation"]
        return (*map(id, same), *numbers, self.norms[0].eps)

    def tensors(self) -> list[torch.Tensor]:
        """Return the layer's tensors as ``ops.decode_layers`` takes them: one that the layer lacks is empty."""
        found: dict[str, torch.Tensor | None] = {}
        calls = {"qkv": self.qkv, "out": self.out, "up": self.up, "down": self.down}
        for role, call in calls.items():
            prefix = "q_" if role == "qkv" else ""
            found |= {f"{role}_weight": call[f"{prefix}weight"], f"{role}_bias": call[f"{prefix}bias"]}
        for role, norm in zip(("attention_norm", "mlp_norm"), self.norms):
            found |= {f"{role}_weight": norm.weight, f"{role}_bias": norm.bias}
        absent = self.out["weight"].new_empty(0)
        return [absent if (tensor := found[name]) is None else tensor for name in LAYER_TENSORS]


def _found(calls: list[Call]) -> tuple[int, list[_Layer]]:
    """Return where the layers begin, and all layers; none if they are not alike, or read in more than one place."""
    start = next((place for place, call in enumerate(calls) if call.op is _LAYER[0]), len(calls))
    size, place = len(_LAYER), start
    layers: list[_Layer] = []
    while [call.op for call in calls[place : place + size]] == list(_LAYER):
        layer = _Layer(calls[place : place + size])
        if not layer.is_sequential(layers[-1].calls[-1].out if layers else layer.qkv["x"]):
            break
        layers.append(layer)
        place += size
    behind = calls[place:]
    read_behind = {register.index for call in behind for register in read_by(call)}
    inside = [call for layer in layers for call in layer.calls][:-1]
    if (
        any(call.op in _LAYER[:2] for call in behind)
        or any(layer.cache.table is not None and layer.cache.layer != row for row, layer in enumerate(layers))
        or any(layer.constants() != layers[0].constants() for layer in layers)
        or any(call.out.index in read_behind for call in inside)
    ):
        return start, []
    return start, layers


def one_call(listing: CallList, step: Step) -> None:
    """Pass: make one call of layers that are alike."""
    calls = listing.calls
    start, layers = _found(calls) if step.one_call else (0, [])
    if layers and (arguments := _decode_layers(layers)) is not None:
        end = start + len(layers) * len(_LAYER)
        made = Call(ops.decode_layers.overload, arguments, calls[end - 1].out)
        listing.calls = [*calls[:start], made, *calls[end:]]


def _decode_layers(layers: list[_Layer]) -> dict[str, Any] | None:
    """Return the arguments of ``ops.decode_layers``, or None if the op does not take these layers."""
    first, caches = layers[0], [layer.cache for layer in layers]
    weights = [tensor for layer in layers for tensor in layer.tensors()]
    num_heads, out = first.qkv["num_heads"], first.out["weight"]
    x = out.new_empty(1, 1, out.shape[1])
    if weight_reasons(x, weights, num_heads, out.shape[0] // num_heads):
        return None
    return dict(
        x=first.qkv["x"],
        weights=weights,
        k_caches=[cache.k for cache in caches],
        v_caches=[cache.v for cache in caches],
        seq_lens=first.qkv["seq_lens"],
        starts=first.attention["starts"],
        num_heads=num_heads,
        scale=first.attention["scale"],
        windows=[layer.attention["window"] for layer in layers],
        norm_eps=first.norms[0].eps,
        activation=first.up["activation"],
        kv_table=first.cache.table,
        programmatic_launch=first.attention["programmatic_launch"],
    )
