"""A sum over all bytes of tensors, which tells whether one was changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..registry import OpSpec, Sample, nbytes, register

#: an odd number whose multiples are spread over all of 64 bits, as a signed one: ``csrc/bytes_sum/bytes_sum_words.h``
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_WORD_BYTES, _HALF = 8, 0xFFFFFFFF
#: words that the reference multiplies at once
_WORDS = 1 << 20


def reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute ``(low(word) + low(key)) % 2**32 * ((high(word) + high(key)) % 2**32) + word``, summed modulo 2**64.

    Words have eight bytes, and each place has a key of its own. Words that are others, or have changed places, change
    the sum, but for one case in 2**32. The sum is no protection against somebody who wants it to be equal.

    Args:
        tensors: any dtypes and shapes, contiguous, on one device. The last word of a tensor is filled up with zeros.

    Returns:
        int64 [1].

    Raises:
        OpInputError: there are no tensors, or some are not contiguous or on other devices.

    Source: NH of UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure message authentication",
    1999), with keys from the golden ratio as Fibonacci hashing has them (Knuth, TAOCP 3, 6.4).
    """
    sums, place = [], 0
    for tensor in tensors:
        data = tensor.detach().reshape(-1).view(torch.uint8)
        whole = len(data) // _WORD_BYTES * _WORD_BYTES
        for words in (*data[:whole].split(_WORDS * _WORD_BYTES), data[whole:]):
            if len(words):
                words = torch.nn.functional.pad(words, (0, -len(words) % _WORD_BYTES)).view(torch.int64)
                sums.append(_summands(words, place).sum())
                place += len(words)
    return torch.stack(sums).sum().reshape(1) if sums else torch.zeros(1, dtype=torch.int64, device=tensors[0].device)


def _summands(words: torch.Tensor, place: int) -> torch.Tensor:
    """Return what int64 words add to the sum, of which the first is at ``place``."""
    keys = torch.arange(place + 1, place + len(words) + 1, device=words.device) * _FACTOR
    low, high = ((words >> shift) + (keys >> shift) & _HALF for shift in (0, 32))
    return low * high + words


def fake(tensors):
    return tensors[0].new_empty(1, dtype=torch.int64)


def why_not(tensors) -> list[str]:
    if not len(tensors):
        return ["tensors is empty, expected at least one tensor"]
    reasons = []
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            reasons.append(f"tensors[{number}] has strides {tensor.stride()}: make it contiguous")
        if tensor.device != tensors[0].device:
            reasons.append(f"tensors[{number}] is on {tensor.device}, expected {tensors[0].device}: move it")
    return reasons


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def drawn(*counts):
        return [torch.randn(count, device=device, dtype=dtype) for count in counts]

    # parts of a word, words, tiles of a GPU and what lies behind; nothing at all; more tensors than one launch takes
    yield Sample(drawn(1))
    yield Sample(drawn(3, 1, 8, 0, 4096, 40_000, 300_001))
    yield Sample(drawn(0))
    yield Sample(drawn(*(7 + each for each in range(170))))
    yield Sample([each[1:] for each in drawn(70_002, 12, 33_000)])  # not aligned
    yield Sample([torch.arange(13, device=device, dtype=torch.uint8), *drawn(5), torch.ones(3, device=device).bool()])


SPEC = register(
    OpSpec(
        name="bytes_sum",
        schema="(Tensor[] tensors) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda tensors: nbytes(*tensors),
        samples=samples,
    )
)
