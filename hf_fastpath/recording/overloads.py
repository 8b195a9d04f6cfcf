"""Overloads of PyTorch's own ops."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten

#: calls that give what they are given
COPIES = (_aten._to_copy.default, _aten.view.default)


def functional_overload(func: Any) -> Any | None:
    """Return the overload that gives what an in-place one writes, or None."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(_aten, name[:-1], None)
    return None if packet is None else getattr(packet, func._overloadname, None)
