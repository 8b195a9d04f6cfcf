"""verify(model, inputs): a patched model against itself unpatched, beside stock's own noise floor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .cache import FastpathCache
from .compat import DynamicCache
from .patching import patch, paused, state_of, unpatch


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found; all differences are of logits, over ``positions`` of every sequence.

    Attributes:
        positions: decoded positions compared.
        mean_error, max_error: |ours - stock|, both decoding token by token through a cache.
        mean_floor, max_floor: |stock decoding - stock in one pass|: what the same model differs from itself by.
        top1_agreement: share of positions where both name the same token.
        tokens_equal: greedy ``generate()`` gives the same tokens.
        ok: the mean error is within twice the noise floor; or tokens and the most likely token at every position are
            equal.
    """

    positions: int
    mean_error: float
    max_error: float
    mean_floor: float
    max_floor: float
    top1_agreement: float
    tokens_equal: bool
    ok: bool

    def to_dict(self) -> dict:
        """Plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"hf_fastpath.verify: {'ok' if self.ok else 'DIFFERENT'} over {self.positions} positions: "
            f"|ours - stock| mean {self.mean_error:.2e} max {self.max_error:.2e}; stock's own noise mean "
            f"{self.mean_floor:.2e} max {self.max_floor:.2e}; top-1 agreement {self.top1_agreement:.4f}; "
            f"greedy tokens {'equal' if self.tokens_equal else 'differ'}"
        )


def _sequences(inputs: Any) -> torch.Tensor:
    ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
    if ids.dim() != 2 or ids.shape[1] < 2:
        raise ValueError(f"verify() got input_ids of shape {tuple(ids.shape)}, expected [batch, at least 2 tokens]")
    return ids


@torch.no_grad()
def decode_logits(model: nn.Module, input_ids: torch.Tensor, prefill: int, fast: bool) -> torch.Tensor:
    """Logits of a given text, decoded token by token through a KV cache.

    Args:
        model: a patched model (``fast=True``), or any.
        input_ids: [batch, seq_len] without padding.
        prefill: tokens that go in one pass first, at least 1.
        fast: use the decode plan and a FastpathCache; else the model's forward and a DynamicCache.

    Returns:
        [batch, seq_len - prefill, vocab_size] logits after the tokens ``prefill`` on.

    Raises:
        ValueError: ``fast`` on a model without a decode plan.
    """
    state = state_of(model)
    part = None if state is None else state.part_of(model)
    if fast and part is None:
        raise ValueError(f"this {type(model).__name__} has no decode plan: patch it and see report(model)")
    made = DynamicCache(config=model.config)
    cache = FastpathCache.from_dynamic(made, state.options.kv_dtype) if fast else made
    model(input_ids[:, :prefill], past_key_values=cache, use_cache=True, logits_to_keep=1)
    rows = []
    if fast:
        plan = state.plan(part, input_ids.shape[0], cache)
        first = torch.full((input_ids.shape[0],), prefill, dtype=torch.long, device=input_ids.device)
        plan.begin(cache, first, None)
        for position in range(prefill, input_ids.shape[1]):
            rows.append(plan.step(input_ids[:, position]).clone())
        plan.end()
    else:
        for position in range(prefill, input_ids.shape[1]):
            step = model(input_ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            rows.append(step.logits[:, -1])
    return torch.stack(rows, dim=1)


@torch.no_grad()
def verify(model: nn.Module, inputs: Any, max_new_tokens: int = 32) -> Verification:
    """Compare this model patched with itself unpatched on ``inputs``, beside stock's own noise floor.

    An unpatched model is patched for the comparison and unpatched afterwards.

    Args:
        model: a causal LM.
        inputs: input_ids [batch, seq_len] without padding, or a mapping that holds them (a tokenizer's output).
        max_new_tokens: length of the greedy generation that is compared.

    Returns:
        The differences and whether they are within bounds.

    Raises:
        ValueError: inputs that are too short; a model whose decode loop is not patched.
    """
    ids = _sequences(inputs).to(next(model.parameters()).device)
    was_patched = state_of(model) is not None
    if not was_patched:
        patch(model, quiet=True)
    try:
        generate = {"max_new_tokens": max_new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        prefill = ids.shape[1]
        fast_tokens = model.generate(ids, **generate)
        with paused(model):
            stock_tokens = model.generate(ids, **generate)
            text = stock_tokens
            stock = decode_logits(model, text, prefill, fast=False).float()
            one_pass = model(text, use_cache=False).logits[:, prefill:].float()
        ours = decode_logits(model, text, prefill, fast=True).float()
    finally:
        if not was_patched:
            unpatch(model)
    error, floor = (ours - stock).abs(), (one_pass - stock).abs()
    tokens_equal = torch.equal(fast_tokens, stock_tokens)
    agreement = (ours.argmax(-1) == stock.argmax(-1)).float().mean().item()
    return Verification(
        positions=ours.shape[1],
        mean_error=error.mean().item(),
        max_error=error.max().item(),
        mean_floor=floor.mean().item(),
        max_floor=floor.max().item(),
        top1_agreement=agreement,
        tokens_equal=tokens_equal,
        ok=error.mean().item() <= 2 * floor.mean().item() or (tokens_equal and agreement == 1),
    )
