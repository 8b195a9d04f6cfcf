"""Comparing a patched model with itself, its patch switched off, beside stock's own noise floor: the rows and the
measurements of ``verify()`` and of the self-test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cache.fastpath_cache import FastpathCache
from ..compat import (
    CACHE,
    Cache,
    DynamicCache,
    GenerationConfig,
    encoder_output,
    generate_over,
    has_encoder,
    inputs_behind,
    known_positions,
    over_encoder,
    text_cache,
    text_name,
    token_shape,
)
from ..decode.loops.patched import STATE_KEY, Patched, compared, paused
from ..decode.plans.encoded import Encoded, seen
from ..ops.gemv import MAX_ROWS
from ..progress import counted
from ..reasons import Cause, explained, named
from .precision import in_higher_precision, wider
from .rows import Row, Verification

SHORT_TOKENS, PADDED_TOKENS, LONG_TOKENS = 16, 64, 512
#: lengths of which each gets a row; of more, each that is twice as long as the one before
MOST_BOUNDS = 8
#: seed of the row that samples
SEED = 0


@dataclass(frozen=True)
class _Case:
    """The inputs of a row.

    Attributes:
        ids: [batch, prompt_len], the beginning of the text.
        mask: [batch, prompt_len] of ``ids``; with an encoder [batch, length] of ``encoded``.
        encoded: [batch, length, features], the output of the model's encoder; None if the model has none.
    """

    name: str
    ids: torch.Tensor
    mask: torch.Tensor
    do_sample: bool = False
    encoded: torch.Tensor | None = None

    @property
    def padding(self) -> torch.Tensor | None:
        """The mask of ``ids``, or None without padding."""
        return None if self.encoded is not None or bool(self.mask.all()) else self.mask

    def over(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return what a forward is given of a copy of the encoder's output, in ``dtype``."""
        if self.encoded is None:
            return {}
        return {"encoder_outputs": encoder_output(self.encoded.to(dtype)), "attention_mask": self.mask}


def sequences(inputs: Any) -> torch.Tensor:
    """Return the input_ids in what ``verify`` takes.

    Raises:
        ValueError: the inputs are too short, too many or padded.
    """
    ids = inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]
    if ids.dim() != 2 or ids.shape[1] < 2 or not 1 <= ids.shape[0] <= MAX_ROWS:
        expected = f"[1 to {MAX_ROWS} sequences, at least 2 tokens]"
        raise ValueError(f"verify() got input_ids of shape {tuple(ids.shape)}, expected {expected}")
    mask = None if isinstance(inputs, torch.Tensor) else inputs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError(
            "verify() got a padded batch, expected sequences of one length: a row of its own tests padding"
        )
    return ids


def _cases_over(encoded: torch.Tensor, ids: torch.Tensor, limit: int) -> Iterator[_Case]:
    """Make the rows' inputs of an encoder's output, [batch, length, features], and the beginning of a text; ``limit``
    is the number of positions that the model knows."""
    short, length = encoded[:, :SHORT_TOKENS], max(min(LONG_TOKENS, limit), encoded.shape[1])
    long = encoded.repeat(1, -(-length // encoded.shape[1]), 1)[:, :length]
    pair = encoded[:1, :PADDED_TOKENS].repeat(2, 1, 1)
    masks = [torch.ones(each.shape[:2], dtype=torch.long, device=ids.device) for each in (short, pair, long)]
    masks[1][1, -(-pair.shape[1] // 2) :] = 0
    yield _Case("short", ids, masks[0], encoded=short)
    yield _Case("padded", torch.cat([ids[:1]] * 2), masks[1], encoded=pair)
    yield _Case("long", ids, masks[2], encoded=long)
    yield _Case("sampling", ids, masks[0], True, short)


def _all_cases(model: nn.Module, ids: torch.Tensor, new_tokens: int, encoded: torch.Tensor | None) -> list[_Case]:
    limit = min(known_positions(model.config), default=LONG_TOKENS + new_tokens)
    if encoded is not None:
        return list(_cases_over(encoded, ids, limit))
    part = vars(model)[STATE_KEY].plans.part_of(model)
    bounds = [] if part is None or part.reason() is not None else part.length_bounds(limit)
    return list(_cases(ids, () if part is None else part.windows, limit, new_tokens, bounds))


def _generated(model: nn.Module, case: _Case, **options: Any) -> Any:
    """Return what ``generate()`` gives for a case."""
    options |= {"attention_mask": case.mask, "do_sample": case.do_sample}
    if case.encoded is not None:
        return generate_over(model, case.encoded, case.ids, **options)
    return model.generate(case.ids, **options)


def _cases(
    ids: torch.Tensor, windows: tuple[int | None, ...], limit: int, new_tokens: int, bounds: Sequence[int] = ()
) -> Iterator[_Case]:
    """Make the rows' prompts out of ``ids``; ``limit`` is the number of positions that the model knows, ``bounds`` are
    the lengths of the text from which on its step is another one."""

    def of_length(length: int) -> torch.Tensor:
        return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]

    def unpadded(name: str, prompts: torch.Tensor, do_sample: bool = False) -> _Case:
        return _Case(name, prompts, torch.ones_like(prompts), do_sample)

    short = ids[:, :SHORT_TOKENS]
    yield unpadded("short", short)
    row = ids[:1, :PADDED_TOKENS].repeat(2, 1)
    mask = torch.ones_like(row)
    mask[1, : row.shape[1] // 2] = 0
    yield _Case("padded", row, mask)
    yield unpadded("long", of_length(max(ids.shape[1], min(LONG_TOKENS, limit - new_tokens))))
    window = min((window for window in windows if window is not None), default=None)
    if window is not None and window + new_tokens <= limit:  # the first tokens lie before the edge, the last behind it
        yield unpadded("window edge", of_length(max(2, window - new_tokens // 2)))
    covered, apart = short.shape[1] + new_tokens, 1 if len(bounds) <= MOST_BOUNDS else 2
    for bound in bounds:
        if covered < bound <= limit - new_tokens:
            yield unpadded(f"length {bound}", of_length(max(2, bound - new_tokens // 2)))
            covered = max(covered * apart, bound + new_tokens // 2)
    yield unpadded("sampling", short, do_sample=True)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Return position ids of a left-padded batch, as generate() makes them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
def decode_logits(
    model: nn.Module,
    input_ids: torch.Tensor,
    prefill: int,
    fast: bool,
    prompt_mask: torch.Tensor | None = None,
    over: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Return the logits of a given text, decoded token by token through a KV cache.

    Args:
        model: a patched model if ``fast``, else any model.
        input_ids: [batch, seq_len].
        prefill: tokens that go first, in one pass; at least 1.
        fast: use the decode plan and a FastpathCache or, of a model that has no plan, its patched modules; else the
            model's forward and, unless the model was patched with a ``kv_dtype``, a DynamicCache.
        prompt_mask: [batch, prefill] attention mask of left-padded prompts; None without padding.
        over: of an encoder-decoder, the encoder's output and its mask, as the forward takes these; else None.

    Returns:
        [batch, seq_len - prefill + 1, vocab_size] logits after the tokens from ``prefill - 1`` on.

    Raises:
        ValueError: ``fast`` is set and the model has neither a decode plan nor patched modules.
    """
    state: Patched | None = vars(model).get(STATE_KEY)
    by_plan = fast and why_no_plan(model) is None
    cache = _cache_for(model, fast)
    mask = torch.ones_like(input_ids[:, :prefill]) if prompt_mask is None else prompt_mask
    mask = torch.cat((mask, torch.ones_like(input_ids[:, prefill:])), dim=1)
    positions = _positions(mask)

    def forward(begin: int, end: int) -> torch.Tensor:
        padding = (
            {} if prompt_mask is None else {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        )
        padding |= over or {"logits_to_keep": 1}
        text = {text_name(model, "input_ids"): input_ids[:, begin:end]}
        return model(**text, **{CACHE: cache}, use_cache=True, **padding).logits[:, -1]

    with compared(model) if fast else nullcontext():
        rows = [forward(0, prefill)]
    if by_plan:
        part = state.plans.part_of(model)
        plan = state.plans.decode_plan(part, input_ids.shape[0], text_cache(cache))
        starts = None if prompt_mask is None else (mask == 0).sum(1)
        read = None
        if over:
            known = {CACHE: cache, **over}
            read = Encoded.of(cache, seen(part, input_ids, known, inputs_behind(model, input_ids, known)))
        plan.begin(text_cache(cache), positions[:, prefill - 1] + 1, starts, encoded=read)
        rows += [plan.step(input_ids[:, position]).clone() for position in range(prefill, input_ids.shape[1])]
        plan.end()
    else:
        with compared(model) if fast else nullcontext():
            rows += [forward(position, position + 1) for position in range(prefill, input_ids.shape[1])]
    return torch.stack(rows, dim=1)


def why_no_plan(model: nn.Module) -> Cause | None:
    """Return why a patched model has no decode plan, so that its patched modules are all that there is, or None.

    Raises:
        ValueError: the model has neither.
    """
    state: Patched | None = vars(model).get(STATE_KEY)
    if state is None:
        raise ValueError(f"this {type(model).__name__} has no decode plan: patch it and see report(model)")
    part = state.plans.part_of(model)
    reason = (state.loop_reason or "class_not_supported") if part is None else part.reason()
    if reason is None:
        return None
    why = named(reason, model)
    if not state.has_patched_modules:
        raise ValueError(
            f"nothing of this {type(model).__name__} runs our code, so there is nothing to compare: {explained(why)}"
        )
    return why


def _cache_for(model: nn.Module, fast: bool) -> Cache:
    """Make an empty cache. If the patched model's cache rounds keys and values, so does the one for stock code."""
    state: Patched | None = vars(model).get(STATE_KEY)
    made = DynamicCache(config=model.config)
    part = None if state is None or state.loop_reason is not None else state.plans.part_of(model)
    if state is not None and not state.serves(model, part):
        return made
    kv_dtype, page_size = (None, None) if state is None else (state.options.kv_dtype, state.options.page_size)
    if fast or kv_dtype is not None:
        made = FastpathCache.from_dynamic(made, kv_dtype, page_size)
        if part is not None:
            del made.layers[len(part.kinds) :]  # a config may tell of more layers than its decoder has
    return over_encoder(made) if has_encoder(model) else made


def _compare(model: nn.Module, case: _Case, new_tokens: int) -> Row:
    options = {"max_new_tokens": new_tokens}
    options |= {"top_k": 0} if case.do_sample else {}  # generate() would take 50 by default
    prefill, prompt_mask, dtype = case.ids.shape[1], case.padding, model.dtype

    def generate(fast: bool, **output: bool) -> Any:
        torch.manual_seed(SEED)
        return _generated(model, case, **{CACHE: _cache_for(model, fast)}, **options, **output)

    fast_tokens = generate(True)
    with paused(model):
        stock_tokens = generate(False)
        text = stock_tokens[:, :-1]
        stock = decode_logits(model, text, prefill, False, prompt_mask, case.over()).float()
        with in_higher_precision(model):
            given = case.over(wider(dtype))
            if case.encoded is None:
                mask = torch.cat((case.mask, torch.ones_like(text[:, prefill:])), dim=1)
                given = {"attention_mask": mask, "position_ids": _positions(mask), "logits_to_keep": new_tokens}
            given[text_name(model, "input_ids")] = text
            ref = model(use_cache=False, **given).logits[:, -new_tokens:]  # some know no logits_to_keep
    ours = decode_logits(model, text, prefill, True, prompt_mask, case.over()).float()
    error, floor = (ours - ref).abs(), (stock - ref).abs()
    agreement = (ours.argmax(-1) == stock.argmax(-1)).float().mean().item()
    mean_error, mean_floor = error.mean().item(), floor.mean().item()
    different = fast_tokens != stock_tokens
    divergence, margin, is_explained = None, None, True
    if bool(different.any()):
        position = int(different.any(0).nonzero()[0])
        row, divergence = int(different[:, position].nonzero()[0]), position - prefill
        best, second = stock[row, divergence].topk(2).values.tolist()
        margin = best - second
        if case.do_sample:
            # The logits of decode_logits() do not do: its prompt goes through the modules, which round differently.
            made = torch.stack(generate(True, output_logits=True, return_dict_in_generate=True).logits, dim=1)
            again = decode_logits(model, fast_tokens[:, :-1], prefill, True, prompt_mask, case.over()).float()
            is_near = (made - again).abs().mean().item() <= 2 * mean_floor
            with paused(model):  # stock's tokens have to come of its logits by the same rule
                stocks = torch.stack(generate(False, output_logits=True, return_dict_in_generate=True).logits, dim=1)
            pairs = (made, fast_tokens), (stocks, stock_tokens)
            is_explained = is_near and all(torch.equal(drawn(each), tokens[:, prefill:]) for each, tokens in pairs)
        else:
            is_explained = margin <= 2 * (ours - stock)[row, divergence].abs().max().item()
    within = mean_error <= 2 * mean_floor or (divergence is None and agreement == 1)
    log_stock, log_ours = stock.double().log_softmax(-1), ours.double().log_softmax(-1)
    return Row(
        name=case.name,
        batch=len(ours),
        prompt_len=prefill,
        positions=ours.shape[1],
        mean_error=mean_error,
        max_error=error.max().item(),
        mean_floor=mean_floor,
        max_floor=floor.max().item(),
        kl=(log_stock.exp() * (log_stock - log_ours)).sum(-1).mean().item(),
        top1_agreement=agreement,
        first_divergence=divergence,
        margin=margin,
        ok=within and is_explained,
    )


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Return [batch, positions] tokens that the seed draws from [batch, positions, vocab_size] logits."""
    torch.manual_seed(SEED)
    steps = logits.float().softmax(-1).unbind(1)
    return torch.cat([torch.multinomial(probabilities, num_samples=1) for probabilities in steps], dim=1)


@contextmanager
def plain_generation(model: nn.Module, ids: torch.Tensor) -> Iterator[None]:
    """Generate behind ``ids`` without end token and logits processors, and with a generator that may be seeded."""
    kept = model.generation_config
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
        # else transformers puts the token that starts a decoder in front
        model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=int(ids.flatten()[0]))
        try:
            yield
        finally:
            model.generation_config = kept


@torch.no_grad()
def different_tokens(
    model: nn.Module, ids: torch.Tensor, max_new_tokens: int, encoded: torch.Tensor | None = None
) -> str | None:
    """Return the first case of :func:`compare`, of the same arguments, with other tokens than stock's, or None."""
    with plain_generation(model, ids):
        for case in _all_cases(model, ids, max_new_tokens, encoded):
            made = []
            for fast in (True, False):
                torch.manual_seed(SEED)
                cache = {CACHE: _cache_for(model, fast)}
                with nullcontext() if fast else paused(model):
                    made.append(_generated(model, case, max_new_tokens=max_new_tokens, **cache))
            if not torch.equal(*made):
                first = int((made[0] != made[1]).any(0).nonzero()[0, 0]) - case.ids.shape[1]
                return f"{case.name}: other tokens from number {first + 1} on"
    return None


@torch.no_grad()
def compare(
    model: nn.Module, ids: torch.Tensor, max_new_tokens: int, encoded: torch.Tensor | None = None
) -> Verification:
    """Do what ``verify()`` does, for a patched model.

    Args:
        model: the patched model.
        ids: [batch, seq_len] without padding, on the model's device.
        max_new_tokens: length of the generations that are compared.
        encoded: of an encoder-decoder, [batch, length, features] of the encoder's output; else None.

    Raises:
        ValueError: the inputs are too short or too many, or nothing of the model is patched.
    """
    if token_shape(model):
        raise ValueError(
            f"verify() got a {type(model).__name__}, which generates {token_shape(model)[0]} tokens at a position, "
            "expected a model that generates one: compare its generate() before patch() and behind it"
        )
    stock_loop = why_no_plan(model)
    rows, cases = [], _all_cases(model, ids, max_new_tokens, encoded)
    with plain_generation(model, ids), counted(len(cases), "hf_fastpath: verify") as bar:
        for case in cases:
            bar.set_description_str(f"hf_fastpath: verify, {case.name}", refresh=False)
            rows.append(_compare(model, case, max_new_tokens))
            bar.update()
    return Verification(tuple(rows), "" if stock_loop is None else explained(stock_loop))
