"""Passes: products with a matrix for each head or group of channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ...ops.head_products import MAX_INPUTS
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..recorded_step import Recording

_aten = torch.ops.aten


def products_of_heads(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.head_products`` multiply columns, one of each head and sequence, by a matrix of each head."""
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        weight: Any = call.arguments.get("a")
        columns = call.arguments.get("b")
        if call.op is not marks.matmul or not _is_of_heads(weight) or not isinstance(columns, Register):
            continue
        x, out = recording.fact(columns), recording.fact(call.out)
        heads, _, outputs, inputs = weight.shape
        if x.dim() != 4 or x.shape[0] != heads or x.shape[3] != 1 or x.dtype != weight.dtype or inputs > MAX_INPUTS:
            continue
        rows = recording.call(_aten.squeeze.dim, x[..., 0], self=columns, dim=3)
        turned = recording.call(_aten.transpose.int, x[..., 0].transpose(0, 1), self=rows.out, dim0=0, dim1=1)
        made = x.new_empty(x.shape[1], heads, outputs)
        product = recording.call(marks.head_products, made, x=turned.out, weight=weight.detach().squeeze(1))
        back = recording.call(_aten.transpose.int, made.transpose(0, 1), self=product.out, dim0=0, dim1=1)
        seen = Call(_aten.unsqueeze.default, {"self": back.out, "dim": out.dim() - 1}, call.out)
        instead[id(call)] = [rows, turned, product, back, seen]
    recording.rewrite(instead, {})


def convolutions(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.head_products`` compute convolutions over tokens, a product of each group of channels with the
    tokens that an output sees."""
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.convolution.default or not _is_over_tokens(recording, **call.arguments):
            continue
        weight, bias, groups = (call.arguments[name] for name in ("weight", "bias", "groups"))
        x, (batch, channels, count) = recording.fact(call.arguments["input"]), recording.fact(call.out).shape
        width, inputs = weight.shape[2], weight.shape[1] * weight.shape[2]
        seen = recording.call(
            _aten.unfold.default, x.unfold(2, width, 1), self=call.arguments["input"], dimension=2, size=width, step=1
        )
        shape = [batch, groups, -1, count, width]
        grouped = recording.call(
            _aten.view.default, x.new_empty(shape[:2] + [inputs // width, count, width]), self=seen.out, size=shape
        )
        ordered = recording.call(
            _aten.permute.default,
            recording.fact(grouped.out).permute(0, 3, 1, 2, 4),
            self=grouped.out,
            dims=[0, 3, 1, 2, 4],
        )
        rows = x.new_empty(batch * count, groups, inputs)
        flat = recording.call(_aten.view.default, rows, self=ordered.out, size=list(rows.shape))
        of_groups = weight.detach().view(groups, channels // groups, inputs)
        product = recording.call(
            marks.head_products, rows.new_empty(batch * count, groups, channels // groups), x=flat.out, weight=of_groups
        )
        back = recording.call(
            _aten.view.default, x.new_empty(batch, count, channels), self=product.out, size=[batch, count, channels]
        )
        made = [seen, grouped, ordered, flat, product, back]
        if bias is not None:
            made.append(recording.call(_aten.add.Tensor, recording.fact(back.out), self=back.out, other=bias))
        turned = Call(_aten.transpose.int, {"self": made[-1].out, "dim0": 1, "dim1": 2}, call.out)
        instead[id(call)] = [*made, turned]
    recording.rewrite(instead, {})


def _is_over_tokens(recording: Recording, input, weight, stride, padding, dilation, transposed, **_) -> bool:
    """Whether a convolution is over one dimension in steps of one, of what ``ops.head_products`` takes."""
    x = recording.fact(input)
    plain = not transposed and list(stride) == list(dilation) == [1] and list(padding) == [0] and x.dim() == 3
    if not plain or not isinstance(input, Register) or type(weight) not in PLAIN_TENSORS or not weight.is_contiguous():
        return False
    return weight.dtype in FLOAT_DTYPES and x.dtype == weight.dtype and weight.shape[1] * weight.shape[2] <= MAX_INPUTS


def _is_of_heads(value: Any) -> bool:
    """Whether a value is a matrix for each head, and the same for all sequences: [heads, 1, outputs, inputs]. Single
    columns are none: rotary modules multiply frequencies by positions in that form."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] != 1 or value.stride(3) != 1:
        return False
    return value.dtype in FLOAT_DTYPES and value.shape[3] > 1
