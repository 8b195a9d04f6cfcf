"""Comparing a patched model with itself, its patch switched off, beside stock's own noise floor: the rows and the
measurements of ``verify()`` and of the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..cache.fastpath_cache import FastpathCache
from ..compat import CACHE, Cache, DynamicCache, GenerationConfig, eager_experts, known_positions
from ..ops.gemv import MAX_ROWS
from ..patching.state import paused, state_of
from ..progress import counted
from ..reasons import explained, named
from ..tables import table

SHORT_TOKENS, PADDED_TOKENS, LONG_TOKENS = 16, 64, 512
#: seed of the row that samples
SEED = 0


@dataclass(frozen=True)
class Row:
    """One comparison of logits over ``positions`` of every sequence; both sides are given stock's tokens.

    *ref* is stock in one pass, computed in float32 for half precision and in float64 for float32.

    Attributes:
        name: ``"short"``, ``"padded"``, ``"long"``, ``"window edge"`` or ``"sampling"``.
        batch, prompt_len, positions: number of sequences, tokens of their prompts with padding, tokens that follow.
        mean_error, max_error: |ours - ref|; ours decodes token by token through a cache.
        mean_floor, max_floor: |stock - ref|; stock decodes in the same way, so this is stock's own noise.
        kl: mean Kullback-Leibler divergence of our next token's distribution from stock's, in nats.
        top1_agreement: share of positions at which both name the same token.
        first_divergence: the first new token (from 0) in which ``generate()`` differs, or None.
        margin: distance of stock's two best logits at that token, or None.
        ok: whether the mean error is within twice the noise floor, or the generated tokens and the most likely token at
            every position are equal; and whether our logits explain a token that differs from stock's: its margin is
            within twice |ours - stock| at that token. In the row that samples, the seed has to draw all tokens from the
            logits of that very call, whose mean distance from ours of the same text is within twice the noise floor.
    """

    name: str
    batch: int
    prompt_len: int
    positions: int
    mean_error: float
    max_error: float
    mean_floor: float
    max_floor: float
    kl: float
    top1_agreement: float
    first_divergence: int | None
    margin: float | None
    ok: bool

    @property
    def tokens_equal(self) -> bool:
        """Whether ``generate()`` gives the same tokens."""
        return self.first_divergence is None

    def cells(self) -> tuple[str, ...]:
        """Return this row of the table that a Verification prints."""
        parted = "none" if self.tokens_equal else f"{self.first_divergence} (margin {self.margin:.1e})"
        sizes = f"{self.batch} x {self.prompt_len}", str(self.positions)
        errors = f"{self.max_error:.2e}", f"{self.max_floor:.2e}", f"{self.kl:.1e}"
        return self.name, *sizes, *errors, parted, "ok" if self.ok else "DIFFERENT"


_COLUMNS = ("row", "prompts", "new", "max error", "stock noise", "KL", "first other token", "verdict")


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        rows: the comparisons. All other attributes are over all rows.
    """

    rows: tuple[Row, ...]

    def _mean(self, name: str) -> float:
        counts = [row.batch * row.positions for row in self.rows]
        return sum(count * getattr(row, name) for count, row in zip(counts, self.rows)) / sum(counts)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def tokens_equal(self) -> bool:
        return all(row.tokens_equal for row in self.rows)

    @property
    def positions(self) -> int:
        return sum(row.positions for row in self.rows)

    @property
    def mean_error(self) -> float:
        return self._mean("mean_error")

    @property
    def max_error(self) -> float:
        return max(row.max_error for row in self.rows)

    @property
    def mean_floor(self) -> float:
        return self._mean("mean_floor")

    @property
    def max_floor(self) -> float:
        return max(row.max_floor for row in self.rows)

    @property
    def top1_agreement(self) -> float:
        return self._mean("top1_agreement")

    def row(self, name: str) -> Row | None:
        """Return the row called ``name``, or None."""
        return next((row for row in self.rows if row.name == name), None)

    def to_dict(self) -> dict:
        """Return plain data, ready for JSON."""
        names = ("ok", "tokens_equal", "positions", "mean_error", "max_error", "mean_floor", "max_floor")
        overall = {name: getattr(self, name) for name in (*names, "top1_agreement")}
        return overall | {"rows": [asdict(row) | {"tokens_equal": row.tokens_equal} for row in self.rows]}

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "DIFFERENT"
        head = (
            f"hf_fastpath.verify: {verdict} over {self.positions} positions: mean logit error {self.mean_error:.2e}, "
            f"stock's own\n{self.mean_floor:.2e}; top-1 agreement {self.top1_agreement:.4f}; "
            f"tokens {'equal' if self.tokens_equal else 'differ'}"
        )
        return f"{head}\n{table(_COLUMNS, [row.cells() for row in self.rows], left=('row', 'verdict'), indent=2)}"


@dataclass(frozen=True)
class _Case:
    """The inputs of a row: [batch, prompt_len] token ids and attention mask."""

    name: str
    ids: torch.Tensor
    mask: torch.Tensor
    do_sample: bool = False


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


def _cases(ids: torch.Tensor, windows: tuple[int | None, ...], limit: int, new_tokens: int) -> Iterator[_Case]:
    """Make the rows' prompts out of ``ids``; ``limit`` is the number of positions that the model knows."""

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
    yield unpadded("sampling", short, do_sample=True)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Return position ids of a left-padded batch, as generate() makes them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
def decode_logits(
    model: nn.Module, input_ids: torch.Tensor, prefill: int, fast: bool, prompt_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits of a given text, decoded token by token through a KV cache.

    Args:
        model: a patched model if ``fast``, else any model.
        input_ids: [batch, seq_len].
        prefill: tokens that go first, in one pass; at least 1.
        fast: use the decode plan and a FastpathCache; else the model's forward and, unless the model was patched with a
            ``kv_dtype``, a DynamicCache.
        prompt_mask: [batch, prefill] attention mask of left-padded prompts; None without padding.

    Returns:
        [batch, seq_len - prefill + 1, vocab_size] logits after the tokens from ``prefill - 1`` on.

    Raises:
        ValueError: ``fast`` is set and the model has no decode plan.
    """
    state = state_of(model)
    part = None if state is None else state.plans.part_of(model)
    reason = None if part is None else part.reason()
    if fast and (part is None or reason is not None):
        why = "" if reason is None else f" ({explained(named(reason, model))})"
        raise ValueError(f"this {type(model).__name__} has no decode plan{why}: patch it and see report(model)")
    cache = _cache_for(model, fast)
    mask = torch.ones_like(input_ids[:, :prefill]) if prompt_mask is None else prompt_mask
    mask = torch.cat((mask, torch.ones_like(input_ids[:, prefill:])), dim=1)
    positions = _positions(mask)

    def forward(begin: int, end: int) -> torch.Tensor:
        padding = (
            {} if prompt_mask is None else {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        )
        text = input_ids[:, begin:end]
        return model(text, **{CACHE: cache}, use_cache=True, logits_to_keep=1, **padding).logits[:, -1]

    rows = [forward(0, prefill)]
    if fast:
        plan = state.plans.decode_plan(part, input_ids.shape[0], cache)
        plan.begin(cache, positions[:, prefill - 1] + 1, None if prompt_mask is None else (mask == 0).sum(1))
        rows += [plan.step(input_ids[:, position]).clone() for position in range(prefill, input_ids.shape[1])]
        plan.end()
    else:
        rows += [forward(position, position + 1) for position in range(prefill, input_ids.shape[1])]
    return torch.stack(rows, dim=1)


def _cache_for(model: nn.Module, fast: bool) -> Cache:
    """Make an empty cache. If the patched model's cache rounds keys and values, so does the one for stock code."""
    made, state = DynamicCache(config=model.config), state_of(model)
    kv_dtype, page_size = (None, None) if state is None else (state.options.kv_dtype, state.options.page_size)
    return FastpathCache.from_dynamic(made, kv_dtype, page_size) if fast or kv_dtype is not None else made


def _compare(model: nn.Module, case: _Case, new_tokens: int) -> Row:
    options = {"max_new_tokens": new_tokens, "do_sample": case.do_sample, "attention_mask": case.mask}
    options |= {"top_k": 0} if case.do_sample else {}  # generate() would take 50 by default
    prefill = case.ids.shape[1]
    prompt_mask = None if bool(case.mask.all()) else case.mask

    def generate(fast: bool, **output: bool) -> Any:
        torch.manual_seed(SEED)
        return model.generate(case.ids, **{CACHE: _cache_for(model, fast)}, **options, **output)

    fast_tokens = generate(True)
    with paused(model):
        stock_tokens = generate(False)
        text = stock_tokens[:, :-1]
        stock = decode_logits(model, text, prefill, False, prompt_mask).float()
        mask = torch.cat((case.mask, torch.ones_like(text[:, prefill:])), dim=1)
        with _in_higher_precision(model):
            given = {"attention_mask": mask, "position_ids": _positions(mask), "logits_to_keep": new_tokens}
            ref = model(text, use_cache=False, **given).logits[:, -new_tokens:]  # some know no logits_to_keep
    ours = decode_logits(model, text, prefill, True, prompt_mask).float()
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
            again = decode_logits(model, fast_tokens[:, :-1], prefill, True, prompt_mask).float()
            is_near = (made - again).abs().mean().item() <= 2 * mean_floor
            is_explained = is_near and torch.equal(_drawn(made), fast_tokens[:, prefill:])
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


@contextmanager
def _in_higher_precision(model: nn.Module) -> Iterator[None]:
    """Let modules compute in float32, or in float64 if parameters are float32. Parameters are copied for each call, so
    that only one module's copies take memory at a time."""
    wide = torch.float64 if next(model.parameters()).dtype == torch.float32 else torch.float32
    kept: dict[int, dict[str, nn.Parameter | None]] = {}

    def widen(module: nn.Module, *arguments: Any) -> None:
        kept[id(module)] = dict(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(wide), requires_grad=False)

    def narrow(module: nn.Module, *arguments: Any) -> None:
        module._parameters.update(kept.pop(id(module), {}))

    owners = [module for module in model.modules() if module._parameters]
    handles = [owner.register_forward_pre_hook(widen) for owner in owners]
    handles += [owner.register_forward_hook(narrow, always_call=True) for owner in owners]
    try:
        with eager_experts(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for owner in owners:
            narrow(owner)


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    """Return [batch, positions] tokens that the seed draws from [batch, positions, vocab_size] logits."""
    torch.manual_seed(SEED)
    steps = logits.float().softmax(-1).unbind(1)
    return torch.cat([torch.multinomial(probabilities, num_samples=1) for probabilities in steps], dim=1)


@contextmanager
def _plain_generation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Generate without end token and logits processors, and with a generator that may be seeded."""
    kept = model.generation_config
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.generation_config = GenerationConfig(pad_token_id=0)
        try:
            yield
        finally:
            model.generation_config = kept


@torch.no_grad()
def different_tokens(model: nn.Module, ids: torch.Tensor, max_new_tokens: int) -> str | None:
    """Return the first case of :func:`compare`, of the same arguments, with other tokens than stock's, or None."""
    part = state_of(model).plans.part_of(model)
    limit = min(known_positions(model.config), default=LONG_TOKENS + max_new_tokens)
    with _plain_generation(model, ids.device):
        for case in _cases(ids, () if part is None else part.windows, limit, max_new_tokens):
            options = {"max_new_tokens": max_new_tokens, "do_sample": case.do_sample, "attention_mask": case.mask}
            made = []
            for fast in (True, False):
                torch.manual_seed(SEED)
                with nullcontext() if fast else paused(model):
                    made.append(model.generate(case.ids, **{CACHE: _cache_for(model, fast)}, **options))
            if not torch.equal(*made):
                first = int((made[0] != made[1]).any(0).nonzero()[0]) - case.ids.shape[1]
                return f"{case.name}: other tokens from number {first + 1} on"
    return None


@torch.no_grad()
def compare(model: nn.Module, ids: torch.Tensor, max_new_tokens: int) -> Verification:
    """Do what ``verify()`` does, for a patched model.

    Args:
        model: the patched model.
        ids: [batch, seq_len] without padding, on the model's device.
        max_new_tokens: length of the generations that are compared.

    Raises:
        ValueError: the inputs are too short or too many, or the model's decode loop is not patched.
    """
    part = state_of(model).plans.part_of(model)
    windows = () if part is None else part.windows
    limit = min(known_positions(model.config), default=LONG_TOKENS + max_new_tokens)
    rows, cases = [], list(_cases(ids, windows, limit, max_new_tokens))
    with _plain_generation(model, ids.device), counted(len(cases), "hf_fastpath: verify") as bar:
        for case in cases:
            bar.set_description_str(f"hf_fastpath: verify, {case.name}", refresh=False)
            rows.append(_compare(model, case, max_new_tokens))
            bar.update()
    return Verification(tuple(rows))
