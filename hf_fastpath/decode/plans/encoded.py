"""What an encoder has read, as a decoder attends to it: keys and values that the prompt's forward has left in the
cache, and which of them each sequence sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import compat
from ...ops.kv_cache import KV_TABLE_COLUMNS, KVCache
from ..run.program import Program
from ..sources.step_source import StepSource


@dataclass(frozen=True)
class Seen:
    """Places of an encoder's output that sequences see.

    Attributes:
        starts, ends: int32 [batch], the first place, and the one behind the last.
    """

    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def all_of(cls, length: int, batch: int, device: torch.device) -> Seen:
        """Return all of ``length`` places."""
        starts = torch.zeros(batch, dtype=torch.int32, device=device)
        return cls(starts, torch.full_like(starts, length))

    @classmethod
    def by_mask(cls, mask: torch.Tensor) -> Seen | None:
        """Return the places at which a mask, [batch, length], holds ones; None if they are not one run in every row."""
        seen = (mask != 0).int()
        starts, counts = seen.argmax(1).int(), seen.sum(1).int()
        ends = starts + counts
        places = torch.arange(mask.shape[1], device=mask.device)
        run = (places >= starts[:, None]) & (places < ends[:, None])
        fits = (run == seen.bool()).all() & (counts > 0).all() & ((mask == 0) | (mask == 1)).all()
        return cls(starts, ends) if bool(fits) else None


@dataclass(frozen=True)
class Encoded:
    """Keys and values of an encoder's output.

    Attributes:
        layers: of each layer of the decoder, both [batch, num_kv_heads, length, head_dim].
        seen: what of them the sequences see.
    """

    layers: list[KVCache]
    seen: Seen

    @classmethod
    def of(cls, cache: Any, seen: Seen) -> Encoded:
        """Return what an encoder-decoder's ``cache`` holds behind a prompt."""
        found = [each for each in compat.encoded_states(cache) if each is not None]
        return cls([KVCache(k.contiguous(), v.contiguous()) for k, v in found], seen)


def seen(
    part: StepSource, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], behind: dict[str, Any]
) -> Seen | None:
    """Return what of its encoder's output a model's decoder sees in a call of ``generate()``; None if it is more than
    one run of places.

    Args:
        part: the model, which has an encoder.
        input_ids: [batch, seq_len], the beginning of the text.
        model_kwargs: of the call.
        behind: what the model's forward would be given behind the prompt.
    """
    (batch, length), mask = compat.encoded_shape(model_kwargs), model_kwargs.get("attention_mask")
    if mask is not None:  # it may be of what the encoder was given, of which it makes fewer places
        mask = part.mask_over_encoded(behind)
    if mask is None:
        return Seen.all_of(length, batch, input_ids.device)
    return Seen.by_mask(mask) if tuple(mask.shape) == (batch, length) else None


@dataclass(frozen=True)
class EncodedPlaces:
    """Where calls on a device find what an encoder has read.

    Attributes:
        starts, ends: as of :class:`Seen`, at addresses that stay.
        caches: keys and values of each layer, as registers; on CUDA with a ``kv_table`` that holds their addresses, so
            that a captured graph serves any encoder's output.
    """

    starts: Any
    ends: Any
    caches: list[KVCache]


class EncodedMemory:
    """Memory of a plan for what an encoder has read.

    Args:
        program: of the plan.
        num_layers: of the decoder.
        batch: number of sequences.
        devices: of the plan, the first of which makes the first calls.
    """

    def __init__(self, program: Program, num_layers: int, batch: int, devices: Sequence[torch.device]):
        self._program = program
        self._seen = [torch.zeros(batch, dtype=torch.int32, device=devices[0]) for _ in range(2)]
        self._given = [program.shared(each, is_constant=True) for each in self._seen]
        self._caches = [KVCache(program.register(), program.register()) for _ in range(num_layers)]
        shape, gpus = (num_layers, KV_TABLE_COLUMNS), [device for device in devices if device.type == "cuda"]
        self._tables = {device: torch.zeros(shape, dtype=torch.long, device=device) for device in gpus}

    def on(self, device: torch.device) -> EncodedPlaces:
        """Return where calls on a device find it."""
        table, (starts, ends) = self._tables.get(device), self._given
        caches = [replace(each, table=table, layer=layer) for layer, each in enumerate(self._caches)]
        return EncodedPlaces(starts, ends, caches)

    def bind(self, encoded: Encoded) -> None:
        """Let the calls attend to ``encoded``, which is kept alive until :meth:`release`."""
        for memory, seen in zip(self._seen, (encoded.seen.starts, encoded.seen.ends)):
            memory.copy_(seen)
        for registers, layer in zip(self._caches, encoded.layers, strict=True):
            self._program.put(registers, layer)
        rows = [[each.k.data_ptr(), each.v.data_ptr(), each.k.shape[2]] for each in encoded.layers]
        for table in self._tables.values():
            table.copy_(torch.tensor(rows, dtype=torch.long, device="cpu"))

    def release(self) -> None:
        """Let go of keys and values."""
        for registers in self._caches:
            self._program.put(registers, None)
