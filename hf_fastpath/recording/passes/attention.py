"""Passes: rotation, and the projections in front of attention."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...choices import NormKind
from ...decode.calls.named_calls import Call, HeadNorms, Register
from ...decode.lower import composed
from ...ops.rope_append import rotate
from .. import marks
from ..lowering import takes_product
from ..probing import agree, structure
from ..recorded_step import Recording, read_by
from .angle_formulas import AngleFormula, angle_formulas
from .regions import Memory
from .showing import alike, shown
from .views import RESHAPES

_aten = torch.ops.aten

_VIEWS = frozenset({_aten.unsqueeze.default, _aten.view.default, _aten.expand.default, _aten.slice.Tensor})


def positional(recording: Recording) -> set[int]:
    """Return the registers whose values depend on the positions alone."""
    memory = Memory(recording)
    others: set[int] = set()
    while True:  # until no memory is left that something else is written to
        found = _positional(recording, memory, others)
        writers = ((number, call) for number, calls in memory.writers.items() for call in calls)
        more = {number for number, call in writers if call.out.index not in found} - others
        if not more:
            return found
        others |= more


def _positional(recording: Recording, memory: Memory, others: set[int]) -> set[int]:
    """Return what :func:`positional` gives if ``others`` is the memory that something else is written to."""
    found = {recording.positions.index}
    for call in recording.calls:
        read = read_by(call)
        tensors = [each for each in call.arguments.values() if isinstance(each, torch.Tensor)]
        learned = any(isinstance(each, nn.Parameter) for each in tensors)
        writes = call.op in (marks.append, *marks.OVER_CACHES) or memory.of(call.out) in others
        if all(each.index in found for each in read) and not learned and not writes:
            found.add(call.out.index)
    return found


def rotations(recording: Recording, model: nn.Module) -> None:
    """Pass: make what lies between projections and attention ``ops.rope_append``, if it turns queries and keys as the
    op does, or only views them as heads; norms of heads without weights may come before or behind."""
    readers = Counter(call.arguments["layer"] for call in recording.calls if call.op is marks.attend)
    angles: dict[tuple, tuple[Register, Register]] = {}
    instead: dict[int, list[Call]] = {}
    for attend, append, (sources, tables, _), found in fronts(recording, model, marks.attend, _tried, (True, False)):
        if readers[append.arguments["layer"]] > 1:
            continue
        layout, make_angles, pairs, eps, factor = found
        made: list[Call] = []
        turned: tuple[Any, Any] = (None, None)
        if make_angles is not None:
            place = tuple(each.index for each in tables), make_angles, pairs
            if place not in angles:
                angles[place] = emit_angles(
                    recording, make_angles, tables, made, recording.fact(sources[0]).dtype, pairs
                )
            turned = angles[place]
        arguments = {name: attend.arguments[name] for name in ("layer", "scale", "window", "softcap", "sinks")}
        arguments |= {name: attend.arguments.get(name) for name in ("slopes", "bias", "encoded")}
        q, k = recording.fact(attend.arguments["q"]), recording.fact(append.arguments["k"])
        arguments |= dict(
            sources=list(sources),
            grouped=layout == "grouped",
            cos=turned[0],
            sin=turned[1],
            pairs=pairs,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
        )
        if factor is not None:
            arguments["factor"] = tables[factor]
        if eps is not None:
            ones = torch.ones(q.shape[3], dtype=q.dtype, device=q.device)
            arguments["head_norms"] = HeadNorms(ones, ones, eps)
        made.append(Call(marks.rotated_attention, arguments, attend.out))
        instead |= {id(append): [], id(attend): made}
    recording.rewrite(instead, {})


def fronts(
    recording: Recording, model: nn.Module, op: Any, tried: Callable[..., Any], with_norms: tuple[bool, ...] = (False,)
) -> Iterator[tuple[Call, Call, Any, Any]]:
    """Yield the attention calls of ``op`` whose front an op computes, each with the append, the front, and how.

    Args:
        tried: returns how an op computes a front, or None; called once for layers that are alike.
        with_norms: whether norms without weights are parts of a front; if there are both, in the order of trying.
    """
    at_positions, producers = positional(recording), recording.producers()
    known: dict[Any, Any] = {}
    for attend in recording.calls:
        if attend.op is not op or attend.arguments.get("other") is not None:
            continue
        append = producers[attend.arguments["states"].index]
        for norms, by_heads in itertools.product(with_norms, (False, True)):
            front = front_of(recording, producers, at_positions, append, attend, norms, by_heads)
            if front is None:
                continue
            key = structure_of(recording, *front)
            if key not in known:
                known[key] = tried(recording, model, at_positions, front, append, attend)
            if known[key] is not None:
                yield attend, append, front, known[key]
                break


def front_of(recording, producers, at_positions, append: Call, attend: Call, with_norms: bool, by_heads: bool = False):
    """Return what queries, keys and values are made of: projections, norms or what other calls make with a tensor of
    the model's; the angles; and the calls between, which are also norms without weights if ``with_norms``.

    With ``by_heads``, they are made of whatever is viewed as heads: a projection with something behind it."""
    sources: dict[int, Register] = {}
    tables: dict[int, Register] = {}
    calls: dict[int, Call] = {}

    def visit(register: Register) -> bool:
        if register.index in calls or register.index in sources or register.index in tables:
            return True
        call = producers.get(register.index)
        if call is None or register.index in recording.mutated:
            return False
        if register.index in at_positions:
            while call.op in _VIEWS and read_by(call)[0].index != recording.positions.index:
                calls[call.out.index] = call
                register = read_by(call)[0]
                call = producers.get(register.index)
                if call is None:
                    return False
            tables[register.index] = register
            return True
        is_inside = with_norms and _is_plain_norm(call)
        if call.op in (marks.linear, marks.normed) and not is_inside:
            sources[register.index] = register
            return True
        if (marks.is_mark(call.op) and not is_inside) or len(calls) > 200:
            return False
        if by_heads and call.op in RESHAPES and _splits(recording, call):
            calls[call.out.index] = call
            flat = read_by(call)[0]
            sources[flat.index] = flat
            return True
        if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in call.arguments.values()):
            sources[register.index] = register  # the tensor may be the model's own, and change
            return True
        calls[call.out.index] = call
        return all(visit(each) for each in read_by(call))

    if not all(visit(each) for each in (attend.arguments["q"], append.arguments["k"], append.arguments["v"])):
        return None
    dtype = recording.fact(attend.arguments["q"]).dtype  # a cast between would be left out
    if len(sources) not in (1, 3) or any(recording.fact(each).dtype != dtype for each in sources.values()):
        return None
    ordered = [call for call in recording.calls if call.out.index in calls]
    return list(sources.values()), list(tables.values()), ordered


def _splits(recording: Recording, call: Call) -> bool:
    """Whether a view makes heads of features."""
    before, behind = recording.fact(call.arguments["self"]).shape, recording.fact(call.out).shape
    return len(behind) == len(before) + 1 and behind[:-2] == before[:-1]


def _is_plain_norm(call: Call) -> bool:
    if call.op is not marks.normed or call.arguments.get("residual") is not None:
        return False
    return call.arguments["norm"].kind == NormKind.RMS and call.arguments["norm"].weight is None


def structure_of(recording, sources, tables, calls) -> tuple:
    """Return what is the same in layers that are alike."""
    given = [*sources, *tables]
    facts = tuple((recording.fact(each).shape, recording.fact(each).dtype) for each in given)
    tables = tuple(each.index for each in tables)
    return facts, tables, structure(calls, given, lambda tensor: (tensor.shape, tensor.dtype))


def _tried(
    recording: Recording, model: nn.Module, at_positions: set[int], front: Any, append: Call, attend: Call
) -> Any:
    """Return layout, angles, pairs, the epsilon of norms and the table that queries are multiplied by of a front if
    ``ops.rope_append`` computes all but the factor, or None."""
    sources, tables, calls = front
    q, k, v = attend.arguments["q"], append.arguments["k"], append.arguments["v"]
    heads, kv_heads, dim = recording.fact(q).shape[1], recording.fact(k).shape[1], recording.fact(q).shape[3]
    if recording.fact(v).shape[3] != dim or recording.fact(k).shape[3] != dim:
        return None
    sizes = [recording.fact(each).numel() // (recording.batch * recording.query_len) for each in sources]
    if len(sources) == 3:
        if sizes != [heads * dim, kv_heads * dim, kv_heads * dim]:
            return None
        layouts = ["apart"]
    elif sizes == [(heads + 2 * kv_heads) * dim]:
        layouts = ["apart", "grouped"]
    else:
        return None
    found = shown(recording, model, at_positions, front, [q, k, v])
    if found is None:
        return None
    eps = {call.arguments["norm"].eps for call in calls if _is_plain_norm(call)}
    if len(eps) > 1:
        return None
    factors = [
        place for place, table in enumerate(found[0][1]) if table.numel() in (recording.query_len, len(found[0][2][0]))
    ]
    for layout in layouts:
        for angles in (None, *angle_formulas(found[0][1], dim)) if tables else (None,):
            for pairs in ("halves", "neighbors") if angles is not None else ("halves",):
                for factor in (None, *factors):
                    how = layout, angles, pairs, next(iter(eps), None), factor
                    if all(_is_turned(*one, *how, heads, kv_heads, dim) for one in found):
                        used = () if angles is None else alike(found, angles.tables)
                        again = shown(recording, model, at_positions, front, [q, k, v], used)
                        if again and all(_is_turned(*one, *how, heads, kv_heads, dim) for one in again):
                            return how
    return None


def _is_turned(values, tables, out, layout, angles, pairs, eps, factor, heads, kv_heads, dim) -> bool:
    batch, _, query_len, _ = out[0].shape
    rows = [each.reshape(batch, query_len, -1) for each in values]
    if len(rows) == 1:
        (qkv,) = rows
        qkv = composed.ungrouped(qkv, dim, heads // kv_heads) if layout == "grouped" else qkv
        rows = list(qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=-1))
    q, k, v = (each.unflatten(-1, (-1, dim)) for each in rows)
    if eps is not None:
        q, k = (nn.functional.rms_norm(each, (dim,), None, eps) for each in (q, k))
    if angles is not None:
        try:
            cos, sin = (each.reshape(-1, query_len, each.shape[-1]) for each in angles(tables, pairs))
        except (RuntimeError, ValueError):
            return False
        if cos.shape[0] not in (1, batch) or cos.shape != sin.shape or cos.shape[-1] > dim or cos.shape[-1] % 2:
            return False
        q, k = (rotate(each, cos, sin, pairs == "neighbors") for each in (q, k))
    if factor is not None:
        q = q * tables[factor].reshape(-1, query_len, 1, 1)
    return all(agree(one, other.transpose(1, 2)) for one, other in zip(out, (q, k, v)))


def emit_angles(
    recording: Recording,
    formula: AngleFormula,
    tables: list[Register],
    made: list[Call],
    dtype: torch.dtype,
    pairs: str,
) -> tuple[Register, Register]:
    """Return calls that give cos and sin, [batch or 1, query_len, rotary_dim]."""
    shape = (recording.batch, recording.query_len)
    like = recording.fact(tables[0]).new_empty(*shape, 1)
    given = {"tables": list(tables), "formula": formula, "dtype": dtype, "pairs": pairs}
    both = Call(marks.angles, given, recording.register(like))
    made.append(both)
    registers = []
    for place in range(2):
        call = Call(operator.getitem, {"a": both.out, "b": place}, recording.register(like))
        made.append(call)
        registers.append(call.out)
    return registers[0], registers[1]


def projections(recording: Recording, model: nn.Module) -> None:
    """Pass: make one call of projections and the rotation and attention behind them, if nothing else reads these."""
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.rotated_attention or call.arguments["grouped"]:
            continue
        products = [producers[each.index] for each in call.arguments["sources"]]
        if not all(_is_projection(recording, each, users) for each in products):
            continue
        first = products[0].arguments
        if any(each.arguments["x"].index != first["x"].index for each in products):
            continue
        if len({bool(each.arguments.get("transposed")) for each in products}) > 1:
            continue
        others = {name: value for name, value in call.arguments.items() if name not in ("sources", "grouped")}
        made = Call(
            marks.projected_attention,
            others
            | {
                "x": first["x"],
                "weights": [each.arguments["weight"] for each in products],
                "biases": [each.arguments.get("bias") for each in products],
                "transposed": bool(first.get("transposed")),
            },
            call.out,
        )
        instead |= {id(each): [] for each in products} | {id(call): [made]}
    recording.rewrite(instead, {})


def _is_projection(recording: Recording, call: Call, users: dict) -> bool:
    if call.op is not marks.linear or len(users[call.out.index]) != 1 or not takes_product(recording, call):
        return False
    return call.arguments.get("residual") is None and not call.arguments.get("activation")


def flat_attention(recording: Recording, model: nn.Module) -> None:
    """Pass: let attention give features side by side, as the projection behind it takes them."""
    kinds = (marks.attend, marks.attend_encoded, marks.rotated_attention, marks.projected_attention)
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        fact = recording.fact(call.out) if call.op in kinds else None
        if fact is not None and fact.dim() == 4:
            flat = recording.register(fact.new_empty(*fact.shape[:2], fact.shape[2] * fact.shape[3]))
            heads = Call(_aten.view.default, {"self": flat, "size": list(fact.shape)}, call.out)
            call.out = flat
            instead[id(call)] = [call, heads]
    recording.rewrite(instead, {})
