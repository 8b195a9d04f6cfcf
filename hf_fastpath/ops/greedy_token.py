"""The end of a greedy step: choose the next tokens and prepare the next step, without the host."""

from __future__ import annotations

import torch

from ..registry import FLOAT_DTYPES, OpSpec, Sample, nbytes, register, shape_reason


def reference(
    logits: torch.Tensor,
    unfinished: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    record: torch.Tensor,
    eos_tokens: torch.Tensor | None = None,
    pad_token: torch.Tensor | None = None,
    programmatic_launch: bool = False,
) -> None:
    """Choose ``argmax(logits)`` for every row, or the pad token for a row that has finished.

    Args:
        logits: [batch, vocab_size] float32, float16 or bfloat16; of equal values the first wins, and NaN is the
            largest.
        unfinished: int64 [batch], 1 for a row that goes on; set to 0 if the choice is an end token.
        tokens: int64 [batch, 1], receives the choice.
        positions: int64 [batch, 1], increased by one.
        seq_lens: int32 [batch], increased by one.
        record: int64 [slots, 2, batch] on any device that this device can write to, such as pinned host memory; slot
            ``seq_lens mod slots`` (after the increase) receives the choice and ``unfinished``.
        eos_tokens: int64 [count] end tokens, or None: rows never finish.
        pad_token: int64 with one element, needed with ``eos_tokens``.
        programmatic_launch: CUDA may read all but ``logits`` while the kernel in front on this stream still runs. It is
            allowed only if that kernel writes none of that. The result does not depend on it.

    Returns:
        Nothing.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``generation/utils.py@5.17``, ``GenerationMixin._sample``; ``EosTokenCriteria``.
    """
    chosen = logits.argmax(-1)
    if eos_tokens is not None and pad_token is not None:
        chosen = torch.where(unfinished == 1, chosen, pad_token)
        unfinished.mul_(torch.isin(chosen, eos_tokens, invert=True))
    tokens.copy_(chosen[:, None])
    positions.add_(1)
    seq_lens.add_(1)
    slots, rows = seq_lens.long() % record.shape[0], torch.arange(len(chosen), device=logits.device)
    record[slots.to(record.device), :, rows.to(record.device)] = torch.stack([chosen, unfinished], 1).to(record.device)


def fake():
    return None


def why_not(logits, unfinished, tokens, positions, seq_lens, record, eos_tokens, pad_token) -> list[str]:
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES or logits.shape[1] == 0:
        return [f"logits is {logits.dtype} {tuple(logits.shape)}, expected float32, float16 or bfloat16 [batch, vocab]"]
    batch, reasons = logits.shape[0], []
    expected = {
        "unfinished": (unfinished, (batch,), torch.int64),
        "tokens": (tokens, (batch, 1), torch.int64),
        "positions": (positions, (batch, 1), torch.int64),
        "seq_lens": (seq_lens, (batch,), torch.int32),
    }
    if eos_tokens is not None:
        expected["eos_tokens"] = eos_tokens, (eos_tokens.numel(),), torch.int64
    if pad_token is not None:
        expected["pad_token"] = pad_token.reshape(-1), (1,), torch.int64
    for name, (tensor, shape, dtype) in expected.items():
        reasons += shape_reason(name, tensor, shape)
        if tensor.dtype != dtype:
            reasons.append(f"{name} has dtype {tensor.dtype}, expected {dtype}: cast it")
        if tensor.device != logits.device:
            reasons.append(f"{name} is on {tensor.device}, expected {logits.device}: move it")
        if name not in ("eos_tokens", "pad_token") and not tensor.is_contiguous():
            reasons.append(f"{name} is written and has strides {tensor.stride()}: pass it contiguous")
    if (eos_tokens is None) != (pad_token is None):
        reasons.append("eos_tokens and pad_token go together: pass both or neither")
    if record.dim() != 3 or record.shape[0] == 0 or record.shape[1:] != (2, batch) or record.dtype != torch.int64:
        reasons.append(f"record is {record.dtype} {tuple(record.shape)}, expected torch.int64 [slots, 2, {batch}]")
    elif not record.is_contiguous() or not (record.device == logits.device or record.is_pinned()):
        reasons.append(f"record has to be contiguous, on {logits.device} or in pinned memory")
    return reasons


def moved(logits, unfinished, tokens, positions, seq_lens) -> int:
    return nbytes(logits, tokens) + 2 * nbytes(unfinished, positions, seq_lens)


def samples(device: torch.device, dtype: torch.dtype):
    def call(batch, vocab_size, finished=(), eos=None, seq_len=5, slots=4, programmatic_launch=False):
        unfinished = torch.tensor([int(row not in finished) for row in range(batch)], device=device)
        end = {} if eos is None else {"eos_tokens": torch.tensor(eos, device=device)}
        pad = {} if eos is None else {"pad_token": torch.tensor(1, device=device)}
        return Sample(
            torch.randn(batch, vocab_size, device=device, dtype=dtype),
            unfinished,
            torch.zeros(batch, 1, device=device, dtype=torch.long),
            torch.full((batch, 1), seq_len - 1, device=device),
            torch.full((batch,), seq_len, device=device, dtype=torch.int32),
            torch.zeros(slots, 2, batch, device=device, dtype=torch.long),
            **end,
            **pad,
            programmatic_launch=programmatic_launch,
        )

    yield call(1, 1)
    yield call(1, 32000)
    yield call(3, 50257, finished=[1], eos=[7, 50256])
    yield call(16, 111, finished=[0, 15], eos=list(range(111)), seq_len=1000, slots=32, programmatic_launch=True)


SPEC = register(
    OpSpec(
        name="greedy_token",
        schema=(
            "(Tensor logits, Tensor(a!) unfinished, Tensor(b!) tokens, Tensor(c!) positions, Tensor(d!) seq_lens, "
            "Tensor(e!) record, Tensor? eos_tokens=None, Tensor? pad_token=None, bool programmatic_launch=False) -> ()"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
