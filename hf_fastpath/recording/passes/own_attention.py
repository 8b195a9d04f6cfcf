"""Pass: attention that a model computes by itself."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from .. import marks
from ..probing import MISFITS, agree, evaluate, seeded, wide
from ..recorded_step import Recording, read_by

_aten = torch.ops.aten

#: products that may be of attention weights and values
_PRODUCTS = (marks.matmul, _aten.bmm.default, _aten.baddbmm.default, marks.sdpa)
#: calls that a query may pass through once it is [batch, heads, query_len, head_dim]
_OF_QUERIES = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default),
        *(_aten.expand.default, _aten._to_copy.default, _aten.clone.default, _aten.mul.Tensor, _aten.div.Tensor),
    }
)


def own_attention(recording: Recording, model: nn.Module) -> None:
    """Pass: replace product, scale, bias, softmax and product over what the cache gives, or over what an encoder has
    read, by attention."""
    producers = recording.producers()
    known: dict[Any, Any] = {}
    instead: dict[int, list[Call]] = {}
    for held in (*_appended(recording), *_encoded(recording)):
        found = _region(recording, producers, held)
        if found is None:
            continue
        calls, q, out = found
        shapes = (tuple(recording.fact(each).shape) for each in (q, held.k, held.v))
        key = (*shapes, *((str(call.op), *_plain_numbers(call), *_contents(call)) for call in calls))
        if key not in known:
            known[key] = _tried(recording, calls, held, q, out)
        if known[key] is None:
            continue
        scale, slopes, seen, mask = known[key]
        if any(each not in (recording.open_masks if held.states is None else recording.masks) for each in mask):
            continue
        windows = [recording.masks.get(each) for each in mask] + [recording.windows[held.layer], seen]
        if recording.query_len > 1 and any(isinstance(each, marks.Chunk) for each in windows):
            continue
        made = []
        if recording.fact(q).dim() == 3:  # heads of all sequences
            size = [recording.batch, -1, *recording.fact(q).shape[1:]]
            made = [recording.call(_aten.view.default, recording.fact(q).view(size), self=q, size=size)]
            q = made[0].out
        batch, heads, query_len, _ = recording.fact(q).shape
        like = recording.fact(q).new_empty(batch, query_len, heads, recording.fact(held.v).shape[-1])
        if held.states is None:
            if slopes is not None or seen is not None:
                continue
            rows = recording.call(_aten.transpose.int, recording.fact(q).transpose(1, 2), self=q, dim0=1, dim1=2)
            given = dict(q=rows.out, k=held.k, v=held.v, layer=held.layer, scale=scale, softcap=0.0)
            made += [rows, recording.call(marks.attend_encoded, like, **given)]
        else:
            window = min((w for w in windows if w is not None), default=0)
            given = dict(q=q, states=held.states, layer=held.layer, scale=scale, window=window)
            made += [recording.call(marks.attend, like, **given, softcap=0.0, sinks=None, slopes=slopes)]
        turned = recording.call(_aten.transpose.int, like.transpose(1, 2), self=made[-1].out, dim0=1, dim1=2)
        view = Call(_aten.view.default, {"self": turned.out, "size": list(recording.fact(out.out).shape)}, out.out)
        instead[id(out)] = [*made, turned, view]
    recording.rewrite(instead, {})


@dataclass(frozen=True)
class _Held:
    """Keys and values that a model's own attention may be over.

    Attributes:
        k, v: registers of [batch, num_kv_heads, length, head_dim].
        layer: of the decoder.
        states: register of what the cache gave, both in one; None for what an encoder has read.
    """

    k: Register
    v: Register
    layer: int
    states: Register | None = None


def _appended(recording: Recording) -> Iterator[_Held]:
    """Yield what the cache gives and no attention reads yet."""
    attended = {call.arguments["states"].index for call in recording.calls if call.op is marks.attend}
    users = recording.users()
    for append in recording.calls:
        if append.op is not marks.append or append.out.index in attended:
            continue
        items = [each for each in users.get(append.out.index, []) if each is not None and each.op is operator.getitem]
        halves = [[each.out for each in items if each.arguments["b"] == place] for place in (0, 1)]
        if all(len(each) == 1 for each in halves):
            yield _Held(halves[0][0], halves[1][0], append.arguments["layer"], append.out)


def _encoded(recording: Recording) -> Iterator[_Held]:
    """Yield what an encoder has read and no attention reads yet."""
    attended = {call.arguments["layer"] for call in recording.calls if call.op is marks.attend_encoded}
    for layer, each in enumerate(recording.encoded):
        if layer not in attended:
            yield _Held(each.k, each.v, layer)


def _plain_numbers(call: Call) -> list[float]:
    return [each for each in call.arguments.values() if isinstance(each, (int, float))]


def _contents(call: Call) -> list[bytes]:
    """Return what tensors of a call hold: masks of layers may differ by nothing else."""
    held = (each for each in call.arguments.values() if isinstance(each, torch.Tensor))
    return [wide(each).contiguous().numpy().tobytes() for each in held]


_Found = tuple[list[Call], Register, Call]


def _region(recording: Recording, producers: dict, held: _Held) -> _Found | None:
    """Return the calls of a model's own attention in order, its queries and its last call; None if there is none."""
    from_k, from_v = _behind(recording, held.k), _behind(recording, held.v)
    products = [call for call in recording.calls if call.op in _PRODUCTS]
    last = next((call for call in products if _of(call, from_v) and _of(call, from_k)), None)
    first = next((call for call in products if _of(call, from_k)), None)
    if first is None or last is None:
        return None
    name = {marks.sdpa: "q", marks.matmul: "a", _aten.bmm.default: "self"}.get(first.op, "batch1")
    q = first.arguments[name]
    if not isinstance(q, Register) or q.index in from_k:
        return None
    wanted = (recording.batch, recording.query_len)
    rows = recording.batch * recording.fact(held.k).shape[1], recording.query_len
    while not _is_heads(recording, q, wanted) and recording.fact(q).shape[:-1] != rows:
        call = producers.get(q.index)
        if call is None or call.op not in _OF_QUERIES or len(read_by(call)) != 1:
            return None
        (q,) = read_by(call)
    inside: dict[int, Call] = {}
    stop = {q.index, held.k.index, held.v.index}

    def visit(register: Register) -> bool:
        call = producers.get(register.index)
        if register.index in stop or register.index in inside or call is None:
            return True
        if call.op in (marks.linear, marks.normed, marks.append) or len(inside) > 120:
            return False
        inside[register.index] = call
        return all(visit(each) for each in read_by(call))

    if not visit(last.out):
        return None
    return [call for call in recording.calls if call.out.index in inside], q, last


def _is_heads(recording: Recording, register: Register, wanted: tuple[int, int]) -> bool:
    shape = recording.fact(register).shape
    return len(shape) == 4 and (shape[0], shape[2]) == wanted


def _behind(recording: Recording, register: Register) -> set[int]:
    """Return the registers that depend on ``register``."""
    found = {register.index}
    for call in recording.calls:
        if any(each.index in found for each in read_by(call)):
            found.add(call.out.index)
    return found


def _of(call: Call, registers: set[int]) -> bool:
    return any(each.index in registers for each in read_by(call))


def _tried(recording: Recording, calls: list[Call], held: _Held, q: Register, out: Call) -> Any:
    """Return scale, slopes, the window and the masks that are read if the calls compute attention, or None."""
    read = {register.index for call in calls for register in read_by(call)}
    masks = sorted(each for each in read if each in recording.masks or each in recording.open_masks)
    made = {call.out.index for call in calls}
    known = made | set(masks) | {q.index, held.k.index, held.v.index}
    if any(each not in known and each != recording.positions.index for each in read):
        return None
    facts = [recording.fact(each) for each in (q, held.k, held.v)]
    with seeded():
        given = [torch.randn(each.shape, dtype=torch.float64) for each in facts]
    values = dict(zip((q.index, held.k.index, held.v.index), given))
    values |= {each: torch.zeros(recording.facts[each].shape, dtype=torch.float64) for each in masks}
    try:
        ran = evaluate(calls, values)
    except MISFITS:
        return None
    expected = ran[out.out.index]
    (q_values, k, v), size = given, facts[0].shape[-1]
    queries = q_values.view(recording.batch, -1, *facts[0].shape[-2:])
    numbers = {abs(each) for call in calls for each in _plain_numbers(call) if each}
    scales = dict.fromkeys([size**-0.5, 1.0, *numbers, *(1 / each for each in numbers)])
    length = facts[1].shape[2]
    biases = [None, *_biases([*ran.values(), *_constants(calls)], length, queries.shape[1])]
    windows = [None, length, *_windows(recording, calls, length)]
    for scale, slopes, window in itertools.product(scales, biases, windows):
        found = _attention(queries, k, v, scale, slopes, window)
        if expected.numel() == found.numel() and agree(expected, found.reshape(expected.shape)):
            device = next((each.device for each in facts), None)
            slopes = None if slopes is None else slopes.to(device, torch.float32)
            return float(scale), slopes, None if window == length else window, masks
    return None


def _windows(recording: Recording, calls: list[Call], length: int) -> set[int]:
    """Return the windows that calls take out of tables of the model, [positions, positions], which say for each
    position which others it sees."""
    found = set()
    for value in _constants(calls):
        if value.dtype != torch.bool or value._base is None:
            continue
        table, size = value._base, math.isqrt(value._base.numel())
        if size**2 != table.numel() or tuple(value.shape[-2:]) != (recording.query_len, length):
            continue
        if value.storage_offset() - table.storage_offset() != recording.past * size or not table.is_contiguous():
            continue  # else the rows would be those of other tokens
        table = table.reshape(size, size)
        window, all_ = int(table[-1].sum()), torch.ones_like(table).tril()
        if torch.equal(table, all_ & ~all_.tril(-window)):
            found.add(window)
    return found - {0}


def _constants(calls: list[Call]) -> Iterator[torch.Tensor]:
    """Yield tensors that calls hold, and the whole tensor of one that is a part."""
    for value in (each for call in calls for each in call.arguments.values()):
        if isinstance(value, torch.Tensor):
            yield from (value, value if value._base is None else value._base)


def _biases(values: list[Any], length: int, heads: int) -> Iterator[torch.Tensor]:
    """Yield the slopes of each value that rises with the position of a key, over all keys or more, as ALiBi does."""
    for value in values:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[-1] < length:
            continue
        if value.numel() == heads * value.shape[-1] and value.is_floating_point():
            rows = wide(value).reshape(heads, -1)
            steps = rows[:, 1:] - rows[:, :-1]
            if bool((steps - steps[:, :1]).abs().amax() <= 1e-6 * (steps.abs().amax() + 1e-30)) and bool(steps.any()):
                yield steps.mean(-1)


def _attention(q, k, v, scale, slopes, window) -> torch.Tensor:
    """Return attention over the newest ``window`` positions of each token, over all, also later ones, if it is None."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * torch.arange(k.shape[2])
    if window is not None:
        apart = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
        scores = scores.masked_fill((apart < 0) | (apart >= window), -torch.inf)
    return scores.softmax(-1) @ v
