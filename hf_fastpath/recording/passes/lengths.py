"""Passes: what a model makes of the length of its cache, or of what an encoder has read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call
from .. import marks
from ..numbers_of_lengths import FloatOfLength, IntOfLength, follow_sizes
from ..recorded_step import Recording, Unrecordable, read_by

_aten = torch.ops.aten

_INTEGERS = (torch.int32, torch.int64)


def positions_in_text(recording: Recording, model: nn.Module) -> None:
    """Pass: count places of the new tokens in every step, if the model counts these from the length of its cache."""
    past, count = recording.past, recording.query_len
    instead: dict[int, list[Call]] = {}
    first = set()  # registers that hold 0, 1, ... for the new tokens
    ones = {call.out.index for call in recording.calls if call.op is _aten.ones.default}
    for call in recording.calls:
        if call.op is _aten.arange.default and call.arguments["end"] == count:
            first.add(call.out.index)
        elif call.op is _aten.add.Tensor and _adds(call, past) and recording.fact(call.out).dtype in _INTEGERS:
            if getattr(call.arguments["self"], "index", -1) in first:
                call.op, call.arguments = marks.text_positions, {"query_len": count}
            elif count == 1:  # whatever it is, it is counted from the length of the cache
                like = recording.fact(call.out).new_empty(1)
                place = recording.call(marks.text_positions, like.long(), query_len=1)
                made = [place, recording.call(_aten._to_copy.default, like, self=place.out, dtype=like.dtype)]
                call.arguments = {"self": call.arguments["self"], "other": made[-1].out}
                instead[id(call)] = [*made, call]
        if call.op is _aten.mul.Tensor and _counts_tokens(recording, call, ones, past + count):
            like = recording.fact(call.out)
            place = recording.call(marks.text_positions, like.new_empty(1), query_len=1)
            behind = recording.call(_aten.add.Tensor, like.new_empty(1), self=place.out, other=1)
            view = Call(_aten.view.default, {"self": behind.out, "size": list(like.shape)}, call.out)
            instead[id(call)] = [place, behind, view]
        if _is_slice_of_positions(call, past, count):
            like = recording.fact(call.out)
            place = recording.call(marks.text_positions, like.new_empty(count), query_len=count)
            instead[id(call)] = [
                place,
                Call(_aten.view.default, {"self": place.out, "size": list(like.shape)}, call.out),
            ]
        elif _takes_places(call, past, count):
            table, dim = call.arguments["self"], call.arguments.get("dim", 0)
            place = recording.call(
                marks.text_positions, recording.fact(call.out).new_empty(count).long(), query_len=count
            )
            given = {"self": table, "dim": dim, "index": place.out}
            instead[id(call)] = [place, Call(_aten.index_select.default, given, call.out)]
            if recording.served is not None:
                recording.served = recording.served.up_to(table.shape[dim] - count)
        if call.op not in (_aten.arange.start, _aten.arange.start_step):
            continue
        given = call.arguments
        if _are_places(given, past, count):
            if given.get("dtype", torch.int64) in (None, torch.int64):
                call.op, call.arguments = marks.text_positions, {"query_len": count}
    recording.rewrite(instead, {})


def _counts_tokens(recording: Recording, call: Call, ones: set[int], number: int) -> bool:
    """Whether a call multiplies one whole 1 by how many tokens there are."""
    is_one = getattr(call.arguments["self"], "index", -1) in ones and recording.fact(call.out).numel() == 1
    return is_one and _is_length(call.arguments["other"], number) and recording.fact(call.out).dtype == torch.int64


def _is_slice_of_positions(call: Call, past: int, count: int) -> bool:
    """Whether a call takes the places of the new tokens out of one row of numbers 0, 1, ..."""
    if call.op is not _aten.slice.Tensor or not isinstance(call.arguments["self"], torch.Tensor):
        return False
    row, given = call.arguments["self"], call.arguments
    if row.dtype != torch.int64 or row.numel() != row.shape[-1] or given.get("dim", 0) % row.dim() != row.dim() - 1:
        return False
    return _are_places(given, past, count) and (
        row.is_meta or torch.equal(row.flatten().cpu(), torch.arange(row.numel()))
    )


def _takes_places(call: Call, past: int, count: int) -> bool:
    """Whether a call takes the places of the new tokens out of a table of numbers, which has one for each place."""
    if call.op is not _aten.slice.Tensor or not isinstance(call.arguments["self"], torch.Tensor):
        return False
    return _are_places(call.arguments, past, count) and call.arguments["self"].is_floating_point()


def _are_places(given: dict[str, Any], past: int, count: int) -> bool:
    """Whether a call is given the places of the new tokens as start and end."""
    ends = _is_length(given.get("start"), past) and _is_length(given.get("end"), past + count)
    return ends and given.get("step", 1) == 1


def _is_length(value: Any, number: int) -> bool:
    """Whether a number is made of the length of the text, and was ``number`` when the step was recorded."""
    return isinstance(value, IntOfLength) and value == number


def _adds(call: Call, number: int) -> bool:
    """Whether a sum adds one number, and no tensor."""
    other = call.arguments["other"]
    return _is_length(other, number) and call.arguments.get("alpha", 1) == 1


def at_position(recording: Recording, position: int) -> dict[int, torch.Tensor]:
    """Return what registers of positions hold at ``position``."""
    shape = (recording.batch, recording.query_len)
    counted = [call for call in recording.calls if call.op is marks.text_positions]
    here = {call.out.index: torch.full(shape[1:], position) for call in counted}
    return {recording.positions.index: torch.full(shape, position)} | here


def check_lengths(recording: Recording) -> None:
    """Refuse a list with sizes that follow the length of the text.

    Raises:
        Unrecordable: a call has such a size, or reads the encoder's output; the message names it.
    """
    encoded = {register.index for each in recording.encoded for register in (each.k, each.v)}
    for call in recording.calls:
        if call.op not in marks.OF_CACHES and _follows_text(recording, call):
            raise Unrecordable(f"{call.name} with a size that follows the length of the text")
        read = {register.index for register in read_by(call)}
        if recording.encoder_output is not None and recording.encoder_output.index in read:
            raise Unrecordable(f"{call.name} reads the encoder's output with every token")
        if call.op is not marks.attend_encoded and read & encoded:
            raise Unrecordable(f"{call.name} reads what the encoder has read outside of attention")


def follows_length(recording: Recording, call: Call) -> bool:
    """Whether a call is given a number that is made of the length of the text, of the number of new tokens, or of the
    encoder's output; also one that only is the same as a length, as a size of a tensor, unless the step was recorded
    for a length that other sizes may have, too."""
    return any(True for _ in _lengths_in(recording, call))


def _follows_text(recording: Recording, call: Call) -> bool:
    """Do as :func:`follows_length`, but for the number of new tokens, which the calls of a prompt are given."""
    formulas = (getattr(each, "formula", None) for each in _lengths_in(recording, call))
    return any(formula is None or formula.free_symbols != {recording.count} for formula in formulas)


def _lengths_in(recording: Recording, call: Call) -> Iterator[int | FloatOfLength]:
    lengths = {recording.past, recording.past + recording.query_len, recording.encoded_length} - {0}
    if recording.is_of_given_length:
        lengths = set()
    for each in call.arguments.values():
        yield from _numbers(each, lengths)


def follow_count(recording: Recording) -> None:
    """Let sizes that passes have found in tensors follow the number of new tokens, in the calls of a prompt."""
    for call in recording.calls:
        if isinstance(call.op, torch._ops.OpOverload):
            follow_sizes(call.arguments, int(recording.query_len), recording.count)


def _numbers(value: Any, wanted: set[int]) -> Iterator[int | FloatOfLength]:
    if isinstance(value, (IntOfLength, FloatOfLength)) or (type(value) is int and value in wanted):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each, wanted)
