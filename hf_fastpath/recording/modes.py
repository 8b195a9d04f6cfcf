"""Modes that hear of the calls of a step: PyTorch's functions, its ops, and modules without children."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..choices import NormKind
from ..decode.calls.named_calls import Register, by_name
from ..decode.model.modules import is_packed
from ..linears.packed_experts import DOWN, GATE_UP, PackedExperts
from ..linears.packed_linear import PackedLinear
from . import marks
from .recorded_step import Span, Unrecordable
from .recorder import Recorder
from .text_lengths import computed

_aten = torch.ops.aten

#: calls that compute nothing
_NOTHING = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, torch.ops.prim.device.default}
)
#: calls that look at no number of the tensor that they are given -> what they fill another with; None for an argument
_FILLED = {
    **dict.fromkeys((_aten.zeros_like.default, _aten.new_zeros.default), 0),
    **dict.fromkeys((_aten.ones_like.default, _aten.new_ones.default), 1),
    **dict.fromkeys((_aten.full_like.default, _aten.new_full.default), None),
}
#: calls with a number -> the same with a tensor, of a number that is made of the text's length
_WITH_NUMBERS = {each: each for each in (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)}
_WITH_NUMBERS |= {
    getattr(_aten, name).Scalar: getattr(_aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
#: calls that draw random numbers
_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "multinomial", "uniform_")


class Functions(TorchFunctionMode):
    """A mode that notes functions that are to be one call, whatever ops each is made of."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with compat.unheard():
            try:
                return self._note(func, args, kwargs or {})
            except Exception as error:
                self._recorder.note_refusal(error)
                raise

    def _note(self, func, args, kwargs):
        handler = _HANDLERS.get(func)
        recorder = self._recorder
        if handler is None or recorder.silent:
            return func(*args, **kwargs)
        found = handler(*args, **kwargs)
        if found is None:
            return func(*args, **kwargs)
        op, arguments = found
        with recorder.quiet():
            like = _LIKE.get(op)
            out = like(**arguments) if like is not None else None
            out = func(*args, **kwargs) if out is None else out
        if not recorder.is_rehearsing:
            recorder.emit(op, arguments, out)
        return out


def _product(x, weight, bias) -> torch.Tensor | None:
    """Return a tensor like a product with a weight, which PyTorch makes in four steps; None if the product is odd."""
    is_plain = weight.dim() == 2 and x.dim() > 1 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    if bias is not None:
        is_plain = is_plain and bias.shape == weight.shape[:1] and bias.dtype == x.dtype
    return x.new_empty(*x.shape[:-1], weight.shape[0]) if is_plain else None


def _product_of_two(a, b) -> torch.Tensor | None:
    """Do as :func:`_product` for the product of two tensors; None without sizes that stand for lengths, too. PyTorch up
    to 2.11 takes the numbers behind such sizes."""
    is_plain = a.dim() > 1 and b.dim() > 1 and a.dtype == b.dtype
    if not is_plain or not (a._has_symbolic_sizes_strides or b._has_symbolic_sizes_strides):
        return None
    outer = [list(each.shape[:-2]) for each in (a, b)]
    most = max(map(len, outer))
    pairs = zip(*([1] * (most - len(each)) + each for each in outer))
    return a.new_empty(*(y if type(x) is int and x == 1 else x for x, y in pairs), a.shape[-2], b.shape[-1])


def _linear(input, weight, bias=None):
    return marks.linear, {"x": input, "weight": weight, "bias": bias}


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if len(normalized_shape) != 1:
        return None
    return marks.normed, {"x": input, "norm": (NormKind.LAYER, weight, bias, eps)}


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    if len(normalized_shape) != 1 or eps is None:
        return None
    return marks.normed, {"x": input, "norm": (NormKind.RMS, weight, None, eps)}


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    given = {"q": query, "k": key, "v": value, "mask": attn_mask}
    return marks.sdpa, given | {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}


def _matmul(a, b):
    return (marks.matmul, {"a": a, "b": b}) if isinstance(b, torch.Tensor) else None


_HANDLERS: dict[Any, Callable[..., Any]] = {
    nn.functional.linear: _linear,
    nn.functional.layer_norm: _layer_norm,
    torch.layer_norm: lambda input, shape, weight=None, bias=None, eps=1e-5, *_: _layer_norm(
        input, shape, weight, bias, eps
    ),
    nn.functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    nn.functional.scaled_dot_product_attention: _sdpa,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
}

#: marks -> a function that returns a tensor like what the call returns, or None where PyTorch is to find out
_LIKE: dict[Any, Callable[..., torch.Tensor | None]] = {marks.linear: _product, marks.matmul: _product_of_two}


class Dispatch(TorchDispatchMode):
    """A mode that notes every other call."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return self._note(func, args, kwargs or {})
        except Exception as error:
            self._recorder.note_refusal(error)
            raise

    def _note(self, func, args, kwargs):
        recorder = self._recorder
        shaped = _SHAPES.get(func) if recorder.lengths.counts_any else None
        out = func(*args, **kwargs) if shaped is None else shaped(*args)
        if recorder.silent:
            return out
        if func in _NOTHING:
            if isinstance(out, torch.Tensor):
                _same(recorder, args[0], out)
            return out
        if not _holds_tensor(out) and not func._schema.is_mutable:
            return out  # a number that was known
        if any(word in func._schema.name for word in _RANDOM):
            raise Unrecordable(f"{func} draws random numbers")
        arguments = by_name(func, args, kwargs)
        if func in _FILLED:
            number = _FILLED[func] if _FILLED[func] is not None else arguments["fill_value"]
            how = dict(dtype=out.dtype, device=out.device)
            func, arguments = _aten.full.default, by_name(_aten.full.default, (list(out.shape), number), how)
        recorder.trace.append((func, args, kwargs))
        if (number := _number_of_length(recorder, func, arguments, out)) is not None:
            with self, recorder.without_trace():
                return _computed(recorder, func, arguments, number, out)
        if func._schema.is_mutable:
            recorder.write(func, arguments, args[0], out)
        else:
            recorder.emit(func, arguments, out)
        return out


def _padded(x: torch.Tensor, pad: list[Any], *_: Any) -> torch.Tensor:
    sizes = list(x.shape)
    for place, (before, behind) in enumerate(zip(pad[::2], pad[1::2])):
        sizes[-1 - place] = sizes[-1 - place] + before + behind
    return x.new_empty(sizes)


#: ops that have no rule for sizes with symbols -> a function that returns a tensor like the result
_SHAPES: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.constant_pad_nd.default: _padded,
    _aten.baddbmm.default: lambda x, a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[2]),
}


def _number_of_length(recorder: Recorder, func: Any, arguments: dict[str, Any], out: Any) -> Any:
    """Return the number made of the text's length with which a call computes; None if it is computed otherwise."""
    if func not in _WITH_NUMBERS and func is not _aten.full.default:
        return None
    number = recorder.lengths.noted(arguments["other" if func in _WITH_NUMBERS else "fill_value"])
    is_counted = func in (_aten.add.Tensor, _aten.mul.Tensor) and recorder.lengths.counts_tokens(number)
    is_left = is_counted and not out.is_floating_point()  # passes look for these
    return number if recorder.lengths.is_made_of(number) and not is_left else None


def _computed(recorder: Recorder, func: Any, arguments: dict[str, Any], number: Any, out: torch.Tensor) -> torch.Tensor:
    """Note a call with a number that is made of the text's length, which is computed in every step.

    Raises:
        Unrecordable: the step is of several tokens, of which stock code may give others at once.
    """
    if recorder.lengths.query_len > 1:
        raise Unrecordable("several tokens at once, with a number that is made of the length of the text")
    with recorder.quiet():
        place = torch.empty(1, dtype=torch.int64, device=out.device)
    recorder.emit(marks.text_positions, {"query_len": 1}, place)
    number = computed(number.formula, recorder.lengths.values(_aten.select.int(place, 0, 0)))
    if func is _aten.full.default:
        return _aten.clone.default(_aten.expand.default(number.to(out.dtype), list(out.shape)))
    if out.dtype == torch.bool:
        return _WITH_NUMBERS[func](arguments["self"], number)
    # as PyTorch computes with numbers, which it takes in float32 beside tensors of 16 bits
    wide = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
    alpha = {name: value for name, value in arguments.items() if name == "alpha"}
    return _WITH_NUMBERS[func](arguments["self"].to(wide), number.to(wide), **alpha).to(out.dtype)


def _same(recorder: Recorder, given: torch.Tensor, out: torch.Tensor) -> None:
    """Note that ``out`` is another name of ``given``, which may hold data."""
    value = recorder.value(given)
    if isinstance(value, Register):
        recorder.name(out, value)
    else:
        recorder.skeleton.real[id(out)] = value
        recorder._kept.append(out)


def _holds_tensor(out: Any) -> bool:
    each = out if isinstance(out, (list, tuple)) else [out]
    return any(isinstance(thing, torch.Tensor) for thing in each)


@contextmanager
def spans(recorder: Recorder) -> Iterator[None]:
    """Note which calls modules without children make, for the length of a ``with`` block."""
    bound = []
    try:
        for path, module in recorder.skeleton.copy.named_modules():
            if type(module) is PackedExperts:
                vars(module)["forward"] = _packed_experts_forward(recorder, path)
            elif compat.loops_over_experts(module):
                vars(module)["forward"] = functools.partial(recorder.experts, module)
            elif is_packed(module):
                vars(module)["forward"] = _packed_forward(recorder, module, path)
            elif type(module) is nn.Linear:
                vars(module)["forward"] = _linear_forward(recorder, module, path)
            elif not any(True for _ in module.children()) and type(module) is not nn.Embedding:
                vars(module)["forward"] = _noting(recorder, module, path)
            else:
                continue
            bound.append(module)
        for module in compat.expanding_modules(recorder.skeleton.copy):
            vars(module)[compat.EXPAND] = functools.partial(recorder.expand, getattr(module, compat.EXPAND))
            bound.append(module)
        yield
    finally:
        for module in bound:
            vars(module).pop("forward", None)
            vars(module).pop(compat.EXPAND, None)


def _noting(recorder: Recorder, module: nn.Module, path: str) -> Callable[..., Any]:
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        first = len(recorder.calls)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        inputs = [recorder.value(each) for each in given]
        out = forward(*args, **kwargs)
        made = [each for each in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(each, torch.Tensor)]
        outputs = [recorder.value(each) for each in made]
        if all(isinstance(each, Register) for each in (*inputs, *outputs)):
            recorder.spans.append(Span(path, inputs, outputs, recorder.calls[first:]))
        return out

    return noted


def _linear_forward(recorder: Recorder, module: nn.Linear, path: str) -> Callable[..., Any]:
    forward = module.forward

    def noted(x: torch.Tensor) -> torch.Tensor:
        if isinstance(given := recorder.value(x), Register):
            recorder.linears.append((path, given))
        return forward(x)

    return noted


def _packed_forward(recorder: Recorder, module: PackedLinear, path: str) -> Callable[..., Any]:
    real = recorder.skeleton.model.get_submodule(path)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with recorder.quiet():
            out = x.new_empty(*x.shape[:-1], real.out_features)
        recorder.emit(marks.linear, {"x": x, "weight": recorder.skeleton.quantized[path], "bias": real.bias}, out)
        return out

    return forward


def _packed_experts_forward(recorder: Recorder, path: str) -> Callable[..., Any]:
    real = recorder.skeleton.model.get_submodule(path)
    assert isinstance(real, PackedExperts)
    biases = dict(zip(("gate_up_bias", "down_bias"), real.biases))
    given: dict[str, Any] = {name: each for name, each in biases.items() if each is not None}
    with compat.without_modes():
        for role, name in (("gate_up", GATE_UP), ("down", DOWN)):
            stack = recorder.skeleton.quantized[f"{path}.{name}"]
            given[f"{role}_weight"] = stack.unflatten(0, (real.num_experts, -1))
    given |= {each.name: getattr(real.how, each.name) for each in fields(real.how)}

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if recorder.is_rehearsing:
            return torch.empty_like(hidden_states)
        with recorder.quiet():
            out = torch.empty_like(hidden_states)
        chosen = dict(x=hidden_states, ids=top_k_index, weights=top_k_weights)
        recorder.emit(marks.experts, chosen | given, out)
        return out

    return forward
