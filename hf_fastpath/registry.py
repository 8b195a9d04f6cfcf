"""The op registry: every custom op is one :class:`OpSpec`, which is checked when it is defined.

An op's schema and its PyTorch reference are registered here through ``torch.library``. Native libraries (see
:mod:`hf_fastpath.native.loader`) only *implement* these schemas for the CPU and CUDA dispatch keys, so that
``torch.ops.hf_fastpath.<name>`` can be called with or without a native library.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .choices import Choice

NAMESPACE = "hf_fastpath"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: types of weights that are not quantized, sharded or otherwise special
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_library = torch.library.Library(NAMESPACE, "DEF")
_specs: dict[str, OpSpec] = {}


class OpInputError(ValueError):
    """An op was called with arguments that it does not take; the message lists every reason and remedy."""


class Sample:
    """One call of an op: positional and keyword arguments, as tests and benchmarks use them."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor argument, also those in lists."""
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    yield item

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        """Return a copy in which ``function`` was applied to every tensor argument, also to those in lists."""

        def convert(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [convert(item) for item in value]
            return function(value) if isinstance(value, torch.Tensor) else value

        return Sample(*map(convert, self.args), **{name: convert(value) for name, value in self.kwargs.items()})


@dataclass(frozen=True)
class OpSpec:
    """Everything the project knows about one op.

    ``fake``, ``why_not`` and ``bytes`` are called with all of the op's arguments, and name only those that they use. If
    ``reference`` annotates an argument with a :class:`.choices.Choice`, the argument is an integer in the schema;
    callers of the spec, its reference or its checks may also pass the name.

    Attributes:
        name: the op's name in the ``hf_fastpath`` namespace, also the name of its files.
        schema: argument list and return, in ``torch.library`` syntax, without the name.
        reference: PyTorch implementation, written with the same calls and roundings as transformers'. In float64 the
            reference is the truth of the numerics rule; in the working dtype it is "stock".
        fake: shape and dtype propagation for ``torch.compile`` and ``opcheck``.
        why_not: gives the reasons why arguments are not taken; an empty list if they are.
        bytes: gives the least number of bytes of device memory that the call has to move.
        samples: ``samples(device, dtype)`` yields small calls, odd sizes among them.
        backward, setup_context: optional autograd formula, as ``torch.library.register_autograd`` takes it.
        native: devices that have kernels; on other devices the reference is the op.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    why_not: Callable[..., list[str]]
    bytes: Callable[..., int]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., Any] | None = None
    native: tuple[str, ...] = ("cpu", "cuda")
    choices: dict[str, type[Choice]] = field(init=False, compare=False, default_factory=dict)
    overload: Any = field(init=False, compare=False, default=None)

    def __post_init__(self) -> None:
        signature = inspect.signature(self.reference, eval_str=True).parameters
        found = {name: each.annotation for name, each in signature.items() if isinstance(each.annotation, type)}
        self.choices.update({name: kind for name, kind in found.items() if issubclass(kind, Choice)})
        for name in ("fake", "why_not", "bytes", "reference"):
            function = _of_all_arguments(self.name, getattr(self, name), self.reference, self.choices)
            object.__setattr__(self, name, function)
        samples = self.samples
        object.__setattr__(self, "samples", lambda device, dtype: map(self.numbered, samples(device, dtype)))

    def numbered(self, call: Sample) -> Sample:
        """Return ``call`` with members in place of the names of choices, as ``overload`` takes them."""
        if not self.choices:
            return call
        names = [argument.name for argument in self.overload._schema.arguments]
        args = [
            self.choices[name].of(value) if name in self.choices else value for name, value in zip(names, call.args)
        ]
        named = {name: kind.of(call.kwargs[name]) for name, kind in self.choices.items() if name in call.kwargs}
        return Sample(*args, **call.kwargs | named)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then call the op.

        Raises:
            OpInputError: the message says what is wrong with which argument, what is expected, and the remedy.
        """
        call = self.numbered(Sample(*args, **kwargs))
        reasons = self.why_not(*call.args, **call.kwargs)
        if self.backward is None and torch.is_grad_enabled() and _needs_grad(call):
            reasons.append("it has no backward and an argument requires grad: call it under torch.no_grad()")
        if reasons:
            raise OpInputError(f"hf_fastpath.ops.{self.name}: " + "; ".join(reasons))
        return self.overload(*call.args, **call.kwargs)


def _of_all_arguments(
    op: str, function: Callable[..., Any], reference: Callable[..., Any], choices: dict[str, type[Choice]]
) -> Callable[..., Any]:
    """Give ``function`` the signature of ``reference``.

    ``function`` then gets the arguments that its own signature names, with members in place of the names of choices.
    The wrapper is compiled from text, as ``collections.namedtuple`` is, because binding arguments in Python code takes
    as long as most checks of them.

    Raises:
        ValueError: ``function`` names an argument that the reference lacks.
    """
    given, wanted = (inspect.signature(each).parameters for each in (reference, function))
    if unknown := [name for name in wanted if name not in given]:
        known = ", ".join(given)
        raise ValueError(f"op {op!r}: {function.__name__} takes {', '.join(unknown)}, the reference only {known}")
    if list(wanted) == list(given) and not choices:
        return function
    defaults = {name: each.default for name, each in given.items() if each.default is not each.empty}
    arguments = ", ".join(f"{name}=defaults[{name!r}]" if name in defaults else name for name in given)
    passed = ", ".join(f"choices[{name!r}].of({name})" if name in choices else name for name in wanted)
    scope: dict[str, Any] = {"defaults": defaults, "function": function, "choices": choices}
    exec(f"def {op}({arguments}): return function({passed})", scope)
    scope[op].__doc__, scope[op].__annotations__ = function.__doc__, inspect.get_annotations(function, eval_str=True)
    return scope[op]


def _needs_grad(call: Sample) -> bool:
    return any(tensor.requires_grad for tensor in call.tensors())


def _outside_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Run the reference with autocast off: else the functions that it calls would cast, unlike native kernels."""

    @functools.wraps(reference)
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device_type = first.device.type
        if not torch.is_autocast_enabled(device_type):
            return reference(first, *args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return reference(first, *args, **kwargs)

    return call


def register(spec: OpSpec) -> OpSpec:
    """Define ``spec`` with ``torch.library`` and add it to the registry.

    Raises:
        ValueError: the name is taken, or a backward lacks its ``setup_context``.
        RuntimeError: the schema does not parse (from ``torch.library``).
    """
    if spec.name in _specs:
        raise ValueError(f"op {spec.name!r} is registered already: pick another name")
    if (spec.backward is None) != (spec.setup_context is None):
        raise ValueError(f"op {spec.name!r}: give both backward and setup_context, or neither")
    _library.define(spec.name + spec.schema)
    _library.impl(spec.name, _outside_autocast(spec.reference), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", spec.fake, lib=_library)
    if spec.backward is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{spec.name}", spec.backward, setup_context=spec.setup_context, lib=_library
        )
    object.__setattr__(spec, "overload", getattr(getattr(torch.ops, NAMESPACE), spec.name).default)
    _specs[spec.name] = spec
    return spec


def define(schema: str) -> Any:
    """Define what only native libraries implement, and nothing but this package calls; return its overload."""
    name = _library.define(schema)
    return getattr(getattr(torch.ops, NAMESPACE), name.rpartition("::")[2]).default


def get(name: str) -> OpSpec:
    """Return the op called ``name``.

    Raises:
        KeyError: there is no such op; the message names the known ops and the closest match.
    """
    if name in _specs:
        return _specs[name]
    close = difflib.get_close_matches(name, _specs, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise KeyError(f"unknown op {name!r}; known: {', '.join(sorted(_specs))}.{hint}")


def all_ops() -> dict[str, OpSpec]:
    """Return every registered op by name."""
    return dict(_specs)


# ---- argument rules shared by the ops' why_not() ------------------------------------------------------------


def tensor_reasons(reference: torch.Tensor, **tensors: torch.Tensor | None) -> list[str]:
    """Return reasons why the tensors do not fit ``reference``, whose dtype and device are expected of all."""
    reasons = []
    if reference.dtype not in FLOAT_DTYPES:
        reasons.append(f"dtype {reference.dtype} is not one of float32, float16, bfloat16: cast the inputs")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != reference.dtype:
            reasons.append(f"{name} has dtype {tensor.dtype}, expected {reference.dtype}: cast it")
        if tensor.device != reference.device:
            reasons.append(f"{name} is on {tensor.device}, expected {reference.device}: move it")
    return reasons


def shape_reason(name: str, tensor: torch.Tensor | None, expected: tuple[int, ...]) -> list[str]:
    """Return a reason if ``tensor`` is given and its shape is not ``expected``."""
    if tensor is None or tuple(tensor.shape) == expected:
        return []
    return [f"{name} has shape {tuple(tensor.shape)}, expected {expected}"]


def choice_reason(name: str, value: Any, choices: Iterable[Choice]) -> list[str]:
    """Return a reason if ``value`` is not among ``choices``."""
    choices = tuple(choices)
    if value in choices:
        return []
    given = value.label if isinstance(value, Choice) else value
    return [f"{name} is {given!r}, expected one of {', '.join(choice.label for choice in choices)}"]


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether values may be looked at without waiting; kernels of other devices keep within bounds by themselves."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of the elements of these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
