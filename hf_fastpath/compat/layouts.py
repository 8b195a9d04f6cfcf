"""Memory of tensors, and types, sizes and strides of many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is the same of tensors that share memory, and of no others."""
    return tensor.untyped_storage()._cdata


def layouts_hold(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a function that says whether tensors have the type, sizes and strides that they have now: True is certain,
    False is not, as a mode of PyTorch's may be another one. None if the installed torch has no such thing.

    PyTorch's compiler guards its code with it; its name may change with any release.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes = dict(dynamic_dims_sizes=[[*each.shape] for each in tensors])
        strides = dict(dynamic_dims_strides=[[*each.stride()] for each in tensors])
        check = TensorGuards(*tensors, **sizes, **strides).check
        return (lambda: check(*tensors)) if tensors and check(*tensors) is True else None
    except Exception:  # of a name that is not for us
        return None
