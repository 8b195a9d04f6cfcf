"""The rules that compare a patched model with stock: logits up to the noise floor, tokens exactly.

*ref* is a float64 copy of the stock model that makes the same calls over a cache that rounds as stock's does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from models import SHORT, counting, left_padded
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.ops.kv_cache import dequantized, is_quantized, quantized


class RoundingCache(DynamicCache):
    """A DynamicCache whose entries are rounded to the type that another cache stores.

    For a float64 model the cache rounds as stock does, and for stock as a quantized cache does.
    """

    def __init__(self, config, kv_dtype: torch.dtype):
        super().__init__(config=config)
        self.kv_dtype = kv_dtype

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rounded = [self.rounded(states) for states in (key_states, value_states)]
        return super().update(*rounded, layer_idx, *args, **kwargs)

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        if is_quantized(self.kv_dtype):
            return dequantized(*quantized(states, self.kv_dtype), states.dtype)
        return states.to(self.kv_dtype).to(states.dtype)


class Forced(LogitsProcessor):
    """Makes generate() follow a given text: [batch, seq_len] token ids."""

    def __init__(self, text: torch.Tensor):
        self.text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self.text[:, input_ids.shape[1]]
        return torch.full_like(scores, -1e9).scatter(1, wanted[:, None], 0.0)


def forced_logits(model: PreTrainedModel, text: torch.Tensor, prompt_len: int, **kwargs) -> torch.Tensor:
    """Return [batch, seq_len - prompt_len + 1, vocab_size] logits of generate(), made to follow ``text``.

    The last row belongs to the position after ``text``; its token is not forced.
    """
    given = dict(kwargs)
    given.setdefault("attention_mask", torch.ones_like(text[:, :prompt_len]))
    padded = torch.cat((text, text[:, -1:]), dim=1)
    out = model.generate(
        text[:, :prompt_len],
        max_new_tokens=text.shape[1] - prompt_len + 1,
        do_sample=False,
        logits_processor=LogitsProcessorList([Forced(padded)]),
        return_dict_in_generate=True,
        output_logits=True,
        **given,
    )
    return torch.stack(out.logits, dim=1)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return position ids of a left-padded batch, as generate() makes them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
def walk(
    model: PreTrainedModel,
    text: torch.Tensor,
    lengths: Sequence[int],
    cache: DynamicCache | FastpathCache,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits of ``text``, with a handwritten loop: one forward for each of ``lengths`` tokens over ``cache``.

    Returns:
        [batch, sum(lengths), vocab_size].
    """
    rows, past = [], 0
    mask = torch.ones_like(text) if mask is None else mask
    for length in lengths:
        end = past + length
        out = model(
            text[:, past:end],
            attention_mask=mask[:, :end],
            position_ids=positions(mask[:, :end])[:, past:],
            **{CACHE: cache},
            use_cache=True,
        )
        rows.append(out.logits)
        past = end
    return torch.cat(rows, dim=1)


def float64_attention(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **kwargs):
    """Compute eager attention with its softmax in float64; transformers' own is in float32 whatever the model is."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:  # sinks
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : value.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("float64", float64_attention)
AttentionMaskInterface.register("float64", eager_mask)


def float64_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in float64."""
    made = copy.deepcopy(model).double()
    if made.config._attn_implementation == "eager":
        made.config._attn_implementation = "float64"
    if hasattr(made.config, "num_experts_per_tok"):
        made.set_experts_implementation("eager")  # the other implementations have no float64
    return made


class LogitRule:
    """mean|ours - ref| <= 1.1 * mean|stock - ref|, with means over every sequence that was added."""

    def __init__(self) -> None:
        self.errors: list[torch.Tensor] = []
        self.stock_errors: list[torch.Tensor] = []

    def add(self, ours: torch.Tensor, stock: torch.Tensor, ref: torch.Tensor) -> None:
        """Add logits [..., vocab_size] of the same positions."""
        assert ours.shape == stock.shape == ref.shape, f"shapes {ours.shape}, {stock.shape}, {ref.shape}"
        assert ref.dtype == torch.float64, f"ref is {ref.dtype}"
        assert torch.isfinite(ours).all(), "ours has non-finite logits"
        self.errors.append((ours.double() - ref).abs().flatten(0, -2))
        self.stock_errors.append((stock.double() - ref).abs().flatten(0, -2))
        assert self.stock_errors[-1].mean() <= 0.1 * ref.abs().mean(), "ref computes something else than stock does"

    def means(self) -> tuple[float, float, int]:
        """Return the mean errors of ours and of stock, and the number of positions."""
        errors, stock_errors = torch.cat(self.errors), torch.cat(self.stock_errors)
        return errors.mean().item(), stock_errors.mean().item(), len(errors)

    def check(self, what: str, least_positions: int = 256) -> None:
        """Assert the rule over at least ``least_positions`` positions."""
        ours, stock, count = self.means()
        assert count >= least_positions, f"only {count} positions were compared"
        assert stock > 0, f"{what}: stock equals float64, so the comparison means nothing"
        assert ours <= 1.1 * stock, f"{what}: mean error {ours:.3e}, stock's {stock:.3e} ({ours / stock:.2f}x)"


@torch.no_grad()
def _last_logits(model: PreTrainedModel, text: torch.Tensor, cache, mask: torch.Tensor) -> torch.Tensor:
    lengths = [text.shape[1] - 1, 1] if text.shape[1] > 1 else [1]
    return walk(model, text, lengths, cache, mask)[0, -1].double()


def assert_same_tokens(
    ours: torch.Tensor,
    stock: torch.Tensor,
    model: PreTrainedModel | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    """Assert that two greedy generations are equal, up to ties.

    Args:
        ours, stock: [batch, seq_len] token ids, prompts included.
        model: the stock model if its weights are random: a row may part from stock's if the float64 margin of the best
            two tokens is below twice stock's own error there. With None, no row may part.
        mask: [batch, prompt_len] attention mask of the prompts; None for no padding.

    Raises:
        AssertionError: the message says which row parts where, and by what margin.
    """
    if ours.shape == stock.shape and torch.equal(ours, stock):
        return
    assert model is not None, f"tokens differ:\nours  {ours.tolist()}\nstock {stock.tolist()}"
    shared = min(ours.shape[1], stock.shape[1])
    for row in range(len(stock)):
        different = (ours[row, :shared] != stock[row, :shared]).nonzero()
        if not len(different):
            continue
        first = int(different[0])
        text = stock[row : row + 1, :first]
        prompt_mask = torch.ones_like(text) if mask is None else mask[row : row + 1]
        ones = text.new_ones(1, max(0, first - prompt_mask.shape[1]))
        row_mask = torch.cat((prompt_mask, ones), dim=1)[:, :first]
        ref_model = float64_copy(model)
        ref = _last_logits(ref_model, text, RoundingCache(model.config, model.dtype), row_mask)
        own = _last_logits(model, text, DynamicCache(config=model.config), row_mask)
        best, second = ref.topk(2).values.tolist()
        error = (own - ref).abs().max().item()
        assert best - second < 2 * error, (
            f"row {row} parts from stock at {first} ({ours[row, first]} for {stock[row, first]}), where the "
            f"float64 margin is {best - second:.3e} and stock's error {error:.3e}"
        )
    assert ours.shape == stock.shape, f"lengths differ: {list(ours.shape)}, stock {list(stock.shape)}"


def assert_equal_generation(ours: PreTrainedModel, stock: PreTrainedModel, fast: bool | None = True, **options) -> None:
    """Assert that greedy tokens of both are equal; ``fast`` says whether our loop makes them (None: either loop)."""
    inputs = left_padded(stock.device, 2)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **(SHORT | options))
    assert fast is None or bool(counts.fast) == fast, counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **(SHORT | options)), stock, inputs["attention_mask"])


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that generate() draws from on ``device``."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def both(stock: PreTrainedModel, ours: PreTrainedModel, seed: int = 7, **kwargs) -> list:
    """Return [ours, stock] of the same generate() call from the same seed; the generators must end alike."""
    results, states = [], []
    for model in (ours, stock):
        torch.manual_seed(seed)
        results.append(model.generate(**kwargs))
        states.append(rng_state(stock.device))  # that of ours may be where weights wait
    assert torch.equal(*states), "the random number generators ended in different states"
    return results
