"""Which module of a model each call of a step comes from."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from .. import ops
from ..decode.calls.named_calls import Call, HeadNorms, Norm, read_by, tensors_in

_aten = torch.ops.aten
#: calls that read rows of a table of embeddings; with a weight that a head shares, other calls are the head's
_LOOKUPS = (ops.step_inputs.overload, _aten.embedding.default, _aten.index_select.default, _aten.index.Tensor)


class Places:
    """The modules of a model, found by where their tensors lie in memory.

    Args:
        model: the model whose paths are given.
        embedding, head: the modules that a step uses, if others share their weights.
    """

    def __init__(self, model: nn.Module, embedding: object = None, head: object = None):
        self._modules = dict(model.named_modules())
        named = {id(module): path for path, module in self._modules.items()}
        self._embedding, self._head = named.get(id(embedding)), named.get(id(head))
        #: address of a storage -> (first byte, end, path of the module) of each parameter and buffer in it
        self._owners: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for path, module in self._modules.items():
            own = module._parameters, module._buffers
            for tensor in (each for held in own for each in held.values() if each is not None):
                if (extent := _extent(tensor)) is not None:
                    self._owners[extent[0]].append((*extent[1:], path))

    def main(self, call: Call) -> list[str]:
        """Return the paths of the modules that a call computes: of norms only if there is nothing else, and not of what
        the call fetches for the next one."""
        read = [each for name, each in call.arguments.items() if name != "next_weight"]
        norms = tuple(each for each in read if isinstance(each, (Norm, HeadNorms)))
        others = [each for each in read if not isinstance(each, (Norm, HeadNorms))]
        return list(dict.fromkeys(self._of_tensors(call, others) or self._of_tensors(call, norms)))

    def _of_tensors(self, call: Call, arguments: object) -> list[str]:
        found: list[str] = []
        for tensor in tensors_in(arguments):
            if (extent := _extent(tensor)) is None:
                continue
            storage, first, end = extent
            paths = [path for low, high, path in self._owners.get(storage, ()) if low < end and first < high]
            found += paths if len(paths) < 2 else self._used(paths, call.op in _LOOKUPS)
        return found

    def _used(self, paths: list[str], is_lookup: bool) -> list[str]:
        """Return which of the modules that share memory a call uses, as far as that is known."""
        used = self._embedding if is_lookup else self._head
        if used in paths:
            return [path for path in paths if path == used]
        alike = [path for path in paths if isinstance(self._modules[path], nn.Embedding) == is_lookup]
        return alike or paths

    def of_calls(self, calls: Sequence[Call]) -> list[list[str]]:
        """Return the paths of the modules that each call of a step comes from; an empty path is the whole model.

        A call without weights belongs to the module around the newest call of a layer whose result it reads: attention
        to the module that holds the projections, a sum to the one that holds what is added. If it reads no result, it
        belongs to what the calls that read its own have in common.
        """
        makers = {call.out.index: place for place, call in enumerate(calls)}
        reads = [[makers[each.index] for each in read_by(call) if each.index in makers] for call in calls]
        found = [self.main(call) for call in calls]
        around = [self._around(own) for own in found]  # the module of a call on its result without weights
        for place, own in enumerate(found):
            if not own:
                paths = [around[each] for each in sorted(reads[place], reverse=True) if around[each]]
                around[place] = next((path for path in paths if layer_of([path])), paths[0] if paths else "")
        readers: list[list[int]] = [[] for _ in calls]
        for place, read in enumerate(reads):
            for each in read:
                readers[each].append(place)
        for place in reversed(range(len(calls))):
            if not found[place] and not around[place]:
                paths = [around[each] for each in readers[place] if around[each]]
                around[place] = common(paths) if paths else ""
        return [own or [path] for own, path in zip(found, around)]

    def _around(self, paths: list[str]) -> str:
        """Return the module around some: of one that holds others, itself."""
        if len(paths) != 1:
            return common(paths)
        is_leaf = next(self._modules[paths[0]].children(), None) is None
        return parent(paths[0]) if is_leaf else paths[0]


def _extent(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the address of a tensor's storage, and its first byte and end; None for a tensor without elements."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided:
        return None
    first = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().data_ptr(), first, first + (last + 1) * tensor.element_size()


def parent(path: str) -> str:
    """Return the path of the module that holds the one at ``path``."""
    return path.rpartition(".")[0]


def common(paths: Sequence[str]) -> str:
    """Return the path of the innermost module that is, or holds, all of ``paths``."""
    return ".".join(os.path.commonprefix([path.split(".") for path in paths]))


def shown(paths: Sequence[str]) -> str:
    """Return paths as one: ``model.layers.0.self_attn.{q_proj, k_proj}``."""
    if len(paths) == 1:
        return paths[0]
    around = common(paths)
    around = parent(around) if around in paths else around
    inner = [path[len(around) + 1 :] if around else path for path in paths]
    return f"{around}.{{{', '.join(inner)}}}" if around else f"{{{', '.join(inner)}}}"


def layer_of(paths: Sequence[str]) -> str:
    """Return the path of the layer that modules are in, up to its number (``model.layers.0``); empty for none."""
    parts = common(paths).split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])
