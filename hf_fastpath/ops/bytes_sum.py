"""A sum over all bytes of tensors, which tells whether one was changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..registry import OpSpec, Sample, nbytes, register

#: an odd number whose multiples are spread over all of 64 bits, as a signed one: ``csrc/bytes_sum/bytes_sum_words.h``
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_WORD_BYTES = 8
#: words that the reference multiplies at once
_WORDS = 1 << 20


def reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the sum of ``(word ^ (word >> 32)) * factor`` modulo 2**64 over words of eight bytes.

    Each place has an odd factor of its own. A word that is another one therefore changes the sum, and so do, as far as
    chance goes, several of them or words that have changed places. The sum is no protection against somebody who wants
    it to be equal.

    Args:
        tensors: any dtypes and shapes, contiguous, on one device. The last word of a tensor is filled up with zeros.

    Returns:
        int64 [1].

    Raises:
        OpInputError: there are no tensors, or some are not contiguous or on other devices.

    Source: multilinear hashing of words modulo 2**64 (Lemire and Kaser, "Strongly universal string hashing is fast",
    2014), with multipliers from the golden ratio as Fibonacci hashing has them (Knuth, TAOCP 3, 6.4).
    """
    sums, place = [], 0
    for tensor in tensors:
        data = tensor.detach().reshape(-1).view(torch.uint8)
        whole = len(data) // _WORD_BYTES * _WORD_BYTES
        for words in (*data[:whole].split(_WORDS * _WORD_BYTES), data[whole:]):
            if len(words):
                words = torch.nn.functional.pad(words, (0, -len(words) % _WORD_BYTES)).view(torch.int64)
                mixed = words ^ _upper(words)
                sums.append((mixed * _factors(place, len(words), data.device)).sum())
                place += len(words)
    return torch.stack(sums).sum().reshape(1) if sums else torch.zeros(1, dtype=torch.int64, device=tensors[0].device)


def _factors(place: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int64 [count], odd numbers, another one for every place from ``place`` on."""
    multiples = torch.arange(place + 1, place + count + 1, device=device) * _FACTOR
    return (multiples ^ _upper(multiples)) | 1


def _upper(words: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of words in the places of the lower ones."""
    return (words >> 32) & 0xFFFFFFFF


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
