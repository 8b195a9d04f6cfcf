"""What all graphs of a model's short prompts have together: their memory, and that one runs after the other."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...ops.kv_cache import KVCache
from ..sources.step_source import StepSource
from .prompt_program import keys_and_values

#: multiplications of a layer that take as long as a GPU of 400 TFLOP/s waits for the layer's launches
_OF_LAUNCHES = 70e9
#: the same of a layer with experts, which has more launches; of more tokens, what experts compute takes 200 MB and more
_OF_LAUNCHES_OF_EXPERTS = 120e9


class Unfit(Exception):
    """A list of calls that a graph cannot make for shorter prompts as well."""


@dataclass(eq=False)
class GraphMemory:
    """Memory for keys and values: of each layer, vectors of as many tokens."""

    vectors: Sequence[Sequence[torch.Tensor]]

    def serves(self, of_token: Sequence[Sequence[torch.Tensor]], count: int) -> bool:
        """Whether it has room for so many tokens whose keys and values are like these."""
        if [*map(len, self.vectors)] != [*map(len, of_token)]:
            return False
        pairs = [pair for vectors, asked in zip(self.vectors, of_token) for pair in zip(vectors, asked)]
        is_like = all((vector.dtype, vector.device) == (one.dtype, one.device) for vector, one in pairs)
        return is_like and all(len(vector) >= one.numel() * count for vector, one in pairs)

    def views(self, held: Sequence[Sequence[torch.Tensor]], batch: int, length: int) -> list[KVCache]:
        """Return its beginning as keys and values of so many sequences of ``length`` tokens, like the buffers of a
        cache's layers."""
        made = []
        for buffers, vectors in zip(held, self.vectors):
            shapes = [(batch, each.shape[1], length, *each.shape[3:]) for each in buffers]
            views = [each[: math.prod(shape)].view(shape) for each, shape in zip(vectors, shapes)]
            made.append(KVCache(views[0], views[1]) if views else KVCache(None, None))
        return made


@dataclass
class GraphsOfModel:
    """What graphs of a model have together.

    Attributes:
        elements: of the matrices that a token is multiplied by.
        is_mixture: whether these are not all that there are.
        lock: held while a graph runs, until its keys and values have gone to a cache.
        captured: those that have graphs.
        pool: memory of what these compute, so that they run one after the other.
        memory: for keys and values, for any graph that needs no more of it; as long as a graph has it.
        stream: on which the last one has started.
    """

    elements: int
    is_mixture: bool
    lock: threading.RLock = field(default_factory=threading.RLock)
    captured: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    pool: Any = None
    memory: weakref.ref[GraphMemory] | None = None
    stream: Any = None

    @classmethod
    def of(cls, part: StepSource) -> GraphsOfModel:
        with _graphs_lock:
            if (found := _graphs.get(part.module)) is None:
                found = _graphs[part.module] = cls(*_elements(part))
        return found

    def memory_for(self, buffers: Sequence[Sequence[torch.Tensor]], least: int, usual: int) -> GraphMemory:
        """Return memory for ``least`` tokens at least, like the buffers of a cache's layers. What is allocated has room
        for ``usual`` tokens at least."""
        of_token = [[each[:1, :, :1].flatten() for each in of_layer] for of_layer in buffers]
        found = None if self.memory is None else self.memory()
        if found is None or not found.serves(of_token, least):
            count = max(least, usual)
            found = GraphMemory([[each.new_empty(each.numel() * count) for each in of_layer] for of_layer in of_token])
            self.memory = weakref.ref(found)
        return found

    def is_thin(self, rows: int, layers: int) -> bool:
        """Whether launches of so many rows take longer than their products."""
        return self.elements * rows <= layers * (_OF_LAUNCHES_OF_EXPERTS if self.is_mixture else _OF_LAUNCHES)


_graphs: weakref.WeakKeyDictionary[nn.Module, GraphsOfModel] = weakref.WeakKeyDictionary()
_graphs_lock = threading.Lock()


def _elements(part: StepSource) -> tuple[int, bool]:
    config: Any = part.module.config
    chosen = getattr(config.get_text_config(decoder=True), "num_experts_per_tok", None) or 0
    found, is_mixture = 0, False
    for module in part.module.modules():
        if isinstance(module, nn.Embedding):
            continue
        if features := getattr(module, "in_features", 0) * getattr(module, "out_features", 0):
            found += features  # also of quantized layers
            continue
        for each in module.parameters(recurse=False):
            if chosen and each.dim() == 3 and len(each) > chosen:
                found, is_mixture = found + each[0].numel() * chosen, True
            elif each.dim() > 1:
                found += each.numel()
    return found, is_mixture


def buffers_of(layer: Any) -> list[torch.Tensor]:
    """Return the buffers for keys and values that a layer of a cache has; none if it keeps states alone.

    Raises:
        Unfit: it has scales or pages.
    """
    held = keys_and_values(layer)
    if held.names() not in ((), ("k", "v")):
        raise Unfit("a cache with scales or pages")
    return [getattr(held, name) for name in held.names()]


def bytes_of(layers: Sequence[Any], batch: int, length: int) -> int:
    """Return how much memory keys and values of so many sequences of ``length`` tokens take, in layers of a cache."""
    buffers = [each for layer in layers for each in buffers_of(layer)]
    return sum(each[:1, :, :1].numel() * each.element_size() * batch * length for each in buffers)
