"""Pass: the rotation of queries and keys in front of attention over a latent is a part of that attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...choices import Rotation
from ...decode.calls.named_calls import Call, Register
from ...decode.lower import composed
from .. import marks
from ..probing import agree
from ..recorded_step import Recording
from .angle_formulas import angle_formulas
from .attention import emit_angles, fronts
from .showing import alike, shown

_aten = torch.ops.aten

#: ways to turn -> the order of angles that they take
_WAYS = {Rotation.HALVES: "halves", Rotation.NEIGHBORS: "neighbors", Rotation.NEIGHBORS_TO_HALVES: "halves"}


def latent_rotations(recording: Recording, model: nn.Module) -> None:
    """Pass: let attention over a latent rotate queries and keys, if the op computes what lies in front."""
    angles: dict[tuple, tuple[Register, Register]] = {}
    instead: dict[int, list[Call]] = {}
    for attend, append, (sources, tables, _), (formula, rotation) in fronts(
        recording, model, marks.latent_attend, _tried
    ):
        made: list[Call] = []
        place = tuple(each.index for each in tables), formula, rotation
        if place not in angles:
            dtype = recording.fact(sources[0]).dtype
            angles[place] = emit_angles(recording, formula, tables, made, dtype, _WAYS[rotation])
        q, turned = recording.fact(attend.arguments["q"]), append.arguments["v"]
        batch, heads, query_len, dim = q.shape
        rows = recording.call(
            _aten.view.default,
            q.new_empty(batch, query_len, heads, dim),
            self=sources[0],
            size=[batch, query_len, heads, dim],
        )
        queries = recording.call(_aten.transpose.int, q, self=rows.out, dim0=1, dim1=2)
        size = list(recording.fact(turned).shape)
        keys = recording.call(_aten.view.default, recording.fact(turned), self=sources[2], size=size)
        append.arguments = append.arguments | {"v": keys.out}
        cos, sin = angles[place]
        attend.arguments = attend.arguments | dict(q=queries.out, cos=cos, sin=sin, rotation=rotation)
        instead |= {id(append): [*made, rows, queries, keys, append]}
    recording.rewrite(instead, {})


def _tried(recording: Recording, model: nn.Module, at_positions: set[int], front: Any, append: Call, attend: Call):
    """Return the formula of the angles and the way to turn with which the op computes what is in front, or None."""
    sources, tables, _ = front
    if len(sources) != 3 or not tables:
        return None
    outputs = [attend.arguments["q"], *(append.arguments[name] for name in "kv")]
    (batch, heads, query_len, dim), (_, one, _, rope) = (recording.fact(outputs[place]).shape for place in (0, 2))
    sizes = [recording.fact(each).numel() for each in (sources[0], sources[2])]
    if one != 1 or sizes != [batch * query_len * heads * dim, batch * query_len * rope]:
        return None
    found = shown(recording, model, at_positions, front, outputs)
    if found is None:
        return None
    for rotation, pairs in _WAYS.items():
        for formula in angle_formulas(found[0][1], rope):
            how = formula, pairs, rotation
            if all(_is_turned(*each, *how) for each in found):
                again = shown(recording, model, at_positions, front, outputs, alike(found, formula.tables))
                return (formula, rotation) if again and all(_is_turned(*each, *how) for each in again) else None
    return None


def _is_turned(values, given, out, formula, pairs, rotation) -> bool:
    (batch, heads, query_len, dim), rope = out[0].shape, out[2].shape[-1]
    if not agree(out[1], values[1].reshape(out[1].shape)):
        return False
    try:
        cos, sin = (each.reshape(-1, query_len, each.shape[-1]) for each in formula(given, pairs))
    except (RuntimeError, ValueError):
        return False
    if cos.shape[0] not in (1, batch) or cos.shape != sin.shape or cos.shape[-1] != rope:
        return False
    q = values[0].reshape(batch, query_len, heads, dim).transpose(1, 2)
    plain, part = q.split((dim - rope, rope), dim=-1)
    k = values[2].reshape(batch, 1, query_len, rope)
    q = torch.cat((plain, composed.rotated(part, cos, sin, rotation)), dim=-1)
    return agree(out[0], q) and agree(out[2], composed.rotated(k, cos, sin, rotation))
