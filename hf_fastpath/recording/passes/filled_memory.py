"""Pass: new memory that one write fills, as what was written.

A loop over the tokens of a text that writes each result to its place in memory of zeros (Kimi Linear) is one write of
everything in a step of one token.
"""

from __future__ import annotations

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register, read_by
from ..recorded_step import Recording, is_effect

_aten = torch.ops.aten

#: calls that make memory of given sizes
_MAKERS = frozenset(
    {
        *(_aten.zeros.default, _aten.empty.memory_format, _aten.new_zeros.default, _aten.new_empty.default),
        *(_aten.ones.default, _aten.zeros_like.default, _aten.empty_like.default),
        *(_aten.ones_like.default, _aten.full.default, _aten.full_like.default),
    }
)
#: views that keep the order of elements, of all of them
_VIEWS = frozenset(
    {
        *(_aten.select.int, _aten.slice.Tensor, _aten.view.default, _aten._unsafe_view.default),
        *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.default, _aten.alias.default),
    }
)


def filled_memory(recording: Recording, model: nn.Module) -> None:
    """Pass: a write that fills new memory, before anything reads this, is a view of what is written."""
    producers, users = recording.producers(), recording.users()
    order = {id(call): place for place, call in enumerate(recording.calls)}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.copy_.default or len(users.get(call.out.index, [])) > (
            call.out.index in recording.mutated
        ):
            continue
        to, source = call.arguments["self"], call.arguments["src"]
        if not isinstance(source, Register) or source.index in recording.mutated or not isinstance(to, Register):
            continue
        if (views := _views_of_new(recording, producers, users, to)) is None:
            continue
        maker = views[-1]
        memory, written, value = (recording.fact(each) for each in (maker.out, to, source))
        alike = memory.numel() == written.numel() == value.numel() and value.shape == written.shape
        if not alike or value.dtype != memory.dtype:
            continue
        inside = set(map(id, (*views, call)))
        readers = [each for each in users[maker.out.index] if each is not None and id(each) not in inside]
        if any(order[id(each)] < order[id(call)] for each in readers):
            continue
        if any(is_effect(each) for each in _sharing(recording, users, maker.out) if each is not call):
            continue
        view = Call(_aten.view.default, {"self": source, "size": list(memory.shape)}, maker.out)
        instead |= {id(each): [] for each in views} | {id(call): [view]}
        recording.mutated -= {each.out.index for each in (*views, call)}
    recording.rewrite(instead, {})


def _views_of_new(
    recording: Recording, producers: dict[int, Call], users: dict[int, list[Call]], to: Register
) -> list[Call] | None:
    """Return the calls that view new memory as ``to``, which nothing else reads, and last the one that makes it."""
    found = []
    while (call := producers.get(to.index)) is not None:
        found.append(call)
        if call.op in _MAKERS:
            return found
        if call.op not in _VIEWS or sum(each is not None for each in users[call.out.index]) > 1:
            return None
        (to,) = read_by(call)
    return None


def _sharing(recording: Recording, users: dict[int, list[Call]], memory: Register) -> list[Call]:
    """Return the calls that read memory, or what shares it."""
    found, waiting = [], [memory]
    while waiting:
        readers = [each for each in users.get(waiting.pop().index, ()) if each is not None]
        found += readers
        waiting += [each.out for each in readers if each.out.index in recording.mutated and not is_effect(each)]
    return found
