"""Sampling as an argmax: temperature, top-k, top-p and min-p, and a race of the tokens that they keep."""

from __future__ import annotations

import torch

from ..registry import FLOAT_DTYPES, OpSpec, Sample, nbytes, register, shape_reason


def reference(
    logits: torch.Tensor, noise: torch.Tensor, settings: torch.Tensor, programmatic_launch: bool = False
) -> torch.Tensor:
    """Compute ``exp(score - max(score)) / noise`` for the tokens that the warpers keep, and 0 for the others.

    If the noise is distributed exponentially, the argmax of a row is a sample of the softmax over the kept scores; if
    it is the noise that ``torch.multinomial`` draws, the argmax is the token that ``torch.multinomial`` gives.

    Args:
        logits: [rows, vocab_size] float32, float16 or bfloat16; ``scores = logits.float() / temperature``.
        noise: float32 [rows, vocab_size].
        settings: float64 [4], read on the device: ``temperature`` > 0; ``top_k``, the number of largest scores to keep,
            and all scores equal to the last of them, or 0 for all; ``top_p`` in [0, 1], the mass to keep, 1 for all (of
            equal scores those of lower index go first); ``min_p`` in [0, 1], the least probability to keep as a share
            of the largest, 0 for all.
        programmatic_launch: CUDA may launch while the kernel in front on this stream still runs. The result does not
            depend on it.

    Returns:
        float32 [rows, vocab_size]; the largest value of a row is positive and belongs to a kept token.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.
        RuntimeError: a row holds inf or NaN, or only -inf, so that its softmax is undefined. On CUDA this is an
            assertion on the device, as in ``torch.multinomial``.

    Source: transformers ``generation/logits_process.py@5.17``, ``TemperatureLogitsWarper``, ``TopKLogitsWarper``,
    ``TopPLogitsWarper``, ``MinPLogitsWarper``; PyTorch ``aten/src/ATen/native/Distributions.cpp``, ``multinomial``.
    """
    temperature, top_k, top_p, min_p = settings.unbind()
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    ascending, indices = scores.sort(stable=True)
    vocab_size = logits.shape[-1]
    num_kept = torch.where(top_k >= 1, top_k, vocab_size).clamp(max=vocab_size).long()
    least = ascending.index_select(-1, (vocab_size - num_kept)[None])
    ascending = ascending.masked_fill(ascending < least, -torch.inf)
    removed = (ascending.softmax(-1).cumsum(-1) <= 1 - top_p) & (top_p < 1)
    removed[..., -1] = False
    removed = removed.scatter(-1, indices, removed) | (scores < least)
    scores = scores.masked_fill(removed, -torch.inf)
    probabilities = scores.softmax(-1)
    removed = probabilities < min_p.clamp(max=1) * probabilities.amax(-1, keepdim=True)
    scores = scores.masked_fill(removed, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    torch._assert_async(
        (weights.amax(-1) == 1).all(),
        "hf_fastpath::exponential_race: a row of logits holds inf or nan, or only -inf",
    )
    return torch.where(weights > 0, weights / noise, 0.0)


def fake(noise):
    return torch.empty_like(noise, memory_format=torch.contiguous_format)


def why_not(logits, noise, settings) -> list[str]:
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES or logits.shape[1] == 0:
        return [f"logits is {logits.dtype} {tuple(logits.shape)}, expected float32, float16 or bfloat16 [rows, vocab]"]
    reasons = shape_reason("noise", noise, tuple(logits.shape)) + shape_reason("settings", settings, (4,))
    for name, tensor, dtype in (("noise", noise, torch.float32), ("settings", settings, torch.float64)):
        if tensor.dtype != dtype:
            reasons.append(f"{name} has dtype {tensor.dtype}, expected {dtype}: cast it")
        if tensor.device != logits.device:
            reasons.append(f"{name} is on {tensor.device}, expected {logits.device}: move it")
    return reasons


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, vocab_size, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **options):
        logits = 3 * torch.randn(rows, vocab_size, device=device)
        noise = torch.empty(rows, vocab_size, device=device).exponential_()
        settings = torch.tensor([temperature, top_k, top_p, min_p], dtype=torch.float64, device=device)
        return Sample(logits.to(dtype), noise, settings, **options)

    yield call(1, 2000, 0.8, 50, 0.9, 0.05)
    yield call(2, 111)
    yield call(3, 1000, top_p=0.7)
    yield call(16, 307, temperature=5.0, top_k=11, programmatic_launch=True)
    yield call(1, 32000, 0.7, 2000, 0.95)
    yield call(2, 50257, min_p=0.1)
    yield call(1, 1, 0.5, 3, 0.5, 0.5)


SPEC = register(
    OpSpec(
        name="exponential_race",
        schema="(Tensor logits, Tensor noise, Tensor settings, bool programmatic_launch=False) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda logits, noise, settings, programmatic_launch=False: (
            nbytes(logits, noise, settings) + nbytes(noise)
        ),
        samples=samples,
    )
)
