"""The mode of tensors without data, which several threads may read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    in_kernel_invocation_manager,
)

from .. import compat
from ..decode.calls.named_calls import tensors_in

#: types of arguments that are as they look
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
#: of ops whose result depends on more than sizes, or that change an argument's
_BY_MORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class FakeMode(FakeTensorMode):
    """PyTorch's mode, which looks up what it has found of plain sizes in less time, and whose tensors tell other
    threads their device while one thread computes with them.

    Most of a recording's time is this mode's, and most layers call what another one has called before. PyTorch's own
    table takes two to three times as long as this one, which leaves out what models rarely have: sizes that are
    symbols, tensors that hold numbers, that are no plain memory or that need gradients. A call that comes for the first
    time goes to the op's kernel for tensors without data where that says all, and PyTorch's table is not filled
    besides: of a view that takes a tenth of the time.

    PyTorch keeps in an attribute of the mode that a kernel is under way, and every tensor of the mode says "meta" when
    it is asked for its device meanwhile. A plan that another thread makes at that moment would have its states there,
    where they hold nothing. So the attribute is one of the thread.
    """

    #: call -> what it gives, as far as that follows from the call
    _known: ClassVar[dict[Any, _Result | None]] = {}

    def __init__(self, **given: Any):
        self._of_thread = threading.local()
        self._usual: dict[torch.device, dict[str, Any]] = {}  # attributes of tensors that claim to be on a device
        super().__init__(**given)

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return getattr(self._of_thread, "is_in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.is_in_kernel = value

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs) if _is_by_sizes(func) else None
        result = None if key is None else self._known.get(key)
        if result is not None:
            return result.again(self, args)
        if key is None or key in self._known:
            return super().dispatch(func, types, args, kwargs)
        out = self._direct(func, args, kwargs)
        if out is None:
            with disable_fake_tensor_cache(self):  # which takes as long as to find out
                out = super().dispatch(func, types, args, kwargs)
        is_as_before = self._key(func, args, kwargs) == key
        self._known[key] = self._result(args, kwargs, out) if is_as_before else None
        return out

    def claimed(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return a tensor of this mode that claims to be on ``device``, of one on no device: what PyTorch's constructor
        returns, whose attributes are the same each time."""
        if (usual := self._usual.get(device)) is None:
            first = FakeTensor(self, made, device)
            self._usual[device] = {name: value for name, value in vars(first).items() if value is not self}
            return first
        found: Any = torch.Tensor._make_subclass(
            FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        vars(found).update(usual, fake_mode=self)
        return found

    def _direct(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an op's own kernel for tensors without data gives, where PyTorch's mode has nothing to add; else
        None."""
        tensors: list[Any] = [*tensors_in((args, kwargs))]
        devices = {each.fake_device for each in tensors}
        if len(devices) != 1 or not _has_kernel(func):
            return None
        try:
            with in_kernel_invocation_manager(self):
                out = func(*args, **kwargs)
        except Exception:  # PyTorch's mode raises its own
            return None
        if isinstance(out, FakeTensor):  # which the op has written to
            return out
        if isinstance(out, torch.Tensor):
            return self.claimed(out, *devices)
        return type(out)(self.claimed(each, *devices) for each in out)

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple | None:
        """Return what a call's result depends on; None if it depends on more."""
        found = [func, *kwargs, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        return tuple(found) if self._enter(found, args) and self._enter(found, kwargs.values()) else None

    def _enter(self, found: list[Any], values: Iterable[Any]) -> bool:
        """Put arguments into ``found``; return whether they are nothing but what is put there."""
        for value in values:
            kind = type(value)
            found.append(kind)
            if kind is FakeTensor:
                if not self._is_plain(value):
                    return False
                found += value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
            elif kind in _PLAIN:
                found.append(value)
            elif kind is list or kind is tuple:
                found.append(len(value))
                if not self._enter(found, value):
                    return False
            else:
                return False
        return True

    def _is_plain(self, tensor: Any) -> bool:
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self or tensor.constant is not None:
            return False
        if tensor._has_symbolic_sizes_strides or tensor.layout is not torch.strided:
            return False
        return not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())

    def _result(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> _Result | None:
        """Return what a call has given, by which it can be made again; None if it cannot."""
        several = type(out) if isinstance(out, (list, tuple)) else None
        made = [out] if several is None else list(out)
        first = args[0] if args else None
        if several is None and out is first:
            return _Result((), None, is_first=True)
        if several not in (None, list, tuple) or not all(map(self._is_plain, made)):
            return None
        memory = set(map(compat.memory_of, made))
        shared = memory & set(map(compat.memory_of, tensors_in((args, kwargs))))
        is_view = bool(shared) and isinstance(first, torch.Tensor) and memory == {compat.memory_of(first)}
        if not is_view and (shared or len(memory) < len(made)):
            return None
        likes = tuple(
            (tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, each.fake_device) for each in made
        )
        return _Result(likes, several, is_view=is_view)


@dataclass(frozen=True)
class _Result:
    """What a call gives.

    Attributes:
        likes: sizes, strides, offset, dtype and device of each tensor.
        several: the type of what holds them; None for a tensor alone.
        is_view: they are views of the first argument.
        is_first: the call gives its first argument.
    """

    likes: tuple[tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device], ...]
    several: type | None
    is_view: bool = False
    is_first: bool = False

    def again(self, mode: FakeMode, args: Sequence[Any]) -> Any:
        """Return tensors like those of the call that was seen, of a call with ``args``."""
        if self.is_first:
            return args[0]
        made: Any = [mode.claimed(each, like[-1]) for like, each in zip(self.likes, self._without_device(args))]
        return made[0] if self.several is None else self.several(made)

    def _without_device(self, args: Sequence[Any]) -> Iterator[torch.Tensor]:
        storage = args[0].untyped_storage() if self.is_view else None
        for shape, strides, offset, dtype, _ in self.likes:
            with torch._C._DisableTorchDispatch():
                made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                if storage is not None:
                    made.set_(storage, offset, shape, strides)
            yield made


@functools.cache
def _is_by_sizes(func: Any) -> bool:
    """Whether the sizes, types and memory of what an op gives follow from those that it is given."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in FakeTensorMode.lift_fns:
        return False
    written = [each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments]
    return _BY_MORE.isdisjoint(func.tags) and not any(written[1:])


@functools.cache
def _has_kernel(func: Any) -> bool:
    """Whether an op has a kernel for tensors without data that gives what the op gives on any device: views, and those
    that compute each element of itself."""
    is_whole = not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return is_whole and (func.is_view or torch.Tag.pointwise in func.tags)
