"""What stands where a layer with a quantized weight would have its weight."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

#: what helps whoever wants to read or change a weight that is quantized
REMEDY = "unpatch(model) brings the model's own layers back"


class AbsentWeight:
    """Tells type, device and shape of a weight that is quantized, and refuses all else.

    transformers' models ask a layer for its weight's type and device. It is no tensor: a model's own code must not
    compute with it, and what is written into it would be lost.

    Args:
        dtype: type of the weights that were quantized.
        device: device of the quantized ones.
        shape: out_features and in_features.
    """

    requires_grad, grad, ndim, is_meta = False, None, 2, False

    def __init__(self, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]):
        self.dtype, self.device, self.shape = dtype, device, torch.Size(shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def new_empty(self, *shape: int) -> torch.Tensor:
        """Return a tensor of the weight's type, on its device."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{_TEXT} has no {name!r}: {REMEDY}", name=name, obj=self)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(f"{_TEXT} has no rows to read: {REMEDY}")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(f"{_TEXT} cannot be written: {REMEDY}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise TypeError(f"{name}() got a weight that hf_fastpath has quantized, expected a tensor: {REMEDY}")

    def __repr__(self) -> str:
        return f"AbsentWeight(dtype={self.dtype}, device={str(self.device)!r}, shape={tuple(self.shape)})"


_TEXT = "a weight that hf_fastpath has quantized"
