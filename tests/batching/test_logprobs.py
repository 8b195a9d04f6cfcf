"""``hf_fastpath.logprobs``: given tokens are scored as stock's logits score them."""

from __future__ import annotations

import copy

import pytest
import torch
from models import VOCAB, build, prompt, require_native

import hf_fastpath
from hf_fastpath.batching import logprobs as module


@torch.no_grad()
def scored_by_stock(model, ids) -> torch.Tensor:
    """Return float64 [seq_len - 1] of one text, [1, seq_len]."""
    logits = copy.deepcopy(model).double()(ids).logits
    return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("architecture", ("llama", "gpt2", "gemma2"))
@pytest.mark.parametrize("side", ("left", "right"))
def test_given_tokens_are_scored(architecture, side, device, monkeypatch):
    """With padding on a side, one text at a time or all at once, patched or not."""
    require_native(device)
    model = build(architecture).to(device)
    texts = [prompt(device, 1, length, seed=length) for length in (17, 9, 2)]
    padding = [torch.zeros(1, 17 - text.shape[1], dtype=torch.long, device=device) for text in texts]
    pair = (lambda pad, text: (pad, text)) if side == "left" else (lambda pad, text: (text, pad))
    ids = torch.cat([torch.cat(pair(pad, text), 1) for pad, text in zip(padding, texts)])
    mask = torch.cat([torch.cat(pair(pad, torch.ones_like(text)), 1) for pad, text in zip(padding, texts)])
    expected = torch.zeros(3, 16, dtype=torch.float64, device=device)
    for row, text in zip(expected, texts):
        count = text.shape[1] - 1
        if side == "left":
            row[16 - count :] = scored_by_stock(model, text)
        else:
            row[:count] = scored_by_stock(model, text)
    hf_fastpath.patch(model, quiet=True)
    for most in (1, 1 << 30):
        monkeypatch.setattr(module, "_MOST_BYTES", most)
        found = hf_fastpath.logprobs(model, ids, mask)
        assert found.dtype == torch.float32 and not found.requires_grad
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(hf_fastpath.logprobs(model, ids, mask, last=3), found[:, -3:], rtol=1e-4, atol=1e-5)
    hf_fastpath.unpatch(model)
    torch.testing.assert_close(hf_fastpath.logprobs(model, ids, mask), found, rtol=1e-4, atol=1e-4)


def test_they_are_those_of_a_batch(device):
    """What a batch says of the tokens that it has drawn is what these tokens are scored with."""
    require_native(device)
    model, text = hf_fastpath.patch(build("llama").to(device), quiet=True), prompt(device, 1, 9)
    with hf_fastpath.batch(model, logprobs=True, do_sample=True, max_new_tokens=7) as batch:
        result = batch.submit(text, seed=3).result(60)
    ids = torch.cat((text, torch.tensor([result.tokens], device=device)), 1)
    expected = torch.tensor([result.logprobs], device=device)
    torch.testing.assert_close(hf_fastpath.logprobs(model, ids, last=7), expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_scored_is_said():
    model = build("llama")
    for ids in (torch.zeros(3, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match="expected \\[batch, seq_len\\] with at least 2 tokens"):
            hf_fastpath.logprobs(model, ids)
    ids = torch.randint(0, VOCAB, (2, 5))
    with pytest.raises(ValueError, match="attention_mask is"):
        hf_fastpath.logprobs(model, ids, torch.ones(2, 4))
    for last in (0, 5, -1):
        with pytest.raises(ValueError, match=f"last is {last}, expected 1 to 4"):
            hf_fastpath.logprobs(model, ids, last=last)
    assert hf_fastpath.logprobs(model, ids[:0]).shape == (0, 4)
