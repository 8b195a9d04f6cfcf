"""Whether a recorded step gives what the model's own forward gives: a few tokens of both, side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..cache.fastpath_cache import FastpathCache
from ..decode.loops import prompt
from ..decode.loops.patched import paused
from ..decode.plans.encoded import Encoded, Seen
from ..decode.plans.plan_cache import PlanCache
from ..errors import RankError
from ..ops.gemv import MAX_ROWS
from ..reasons import Cause
from .recorded_step import Unrecordable
from .text_lengths import Served

#: tokens of the prompt, or more where a step is of longer texts, and steps after it
_PROMPT, _STEPS = 8, 3
#: tokens before a prompt that does not begin its text, and tokens of a prompt where one of few is read otherwise
_BEFORE, _MORE_TOKENS = 3, (40, 67, 131, 262, 523, 1031)
#: tokens of the prompt at most
_LONGEST = 16384
#: how many times the twin's difference from stock, or stock's own noise, a model may show
_TIMES = 3.0
#: a larger difference is no rounding, whatever the twin showed
MOST = 0.25
#: nor is one that is larger than this, whatever noise stock itself shows: logits of other weights are 1.4 away
_MOST_OF_NOISE = 1.0
#: layers of the twin, and features of its embeddings
_TWINS_LAYERS, _TWINS_WIDTH = 2, 64
#: places of an encoder's output that is random, too
_ENCODED = 12
#: roundings of a logit's size that say nothing, however few the twin showed
_ROUNDINGS = 4
#: sums that a product in float32 puts together at the end, at least
_PARTS_OF_SUMS = 8
#: parts of the names of ops that sum products
_ROUNDED = "mm", "gemv", "linear", "convolution", "attention"


class _WideAttention(TorchFunctionMode):
    """Runs PyTorch's attention of 16 bits in float32.

    cuDNN, which has 16 bits alone, builds an engine for every new length, and the few lengths of a proof take it longer
    than all else takes. PyTorch's switches between kernels are the whole process's, but a mode is this thread's.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        out = func(*map(_in_float32, args), **{name: _in_float32(each) for name, each in kwargs.items()})
        return out.to(query.dtype)


class _OtherRoundings(TorchDispatchMode):
    """Rounds what matrix products and attention return otherwise, as another order of their sums would: by up to half a
    unit in the last place where sums are rounded once, in 16 bits; in float32 by the root of the number of roundings
    of a sum in eight parts. A model with many experts makes more of that than of the rounding itself: routers choose
    others."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if not any(each in func._schema.name for each in _ROUNDED):
            return out
        terms = max((each.shape[-1] for each in args if isinstance(each, torch.Tensor) and each.dim() > 1), default=1)
        size = 0.5 * max(1.0, terms / _PARTS_OF_SUMS) ** 0.5
        return (
            type(out)(self._rounded(each, size) for each in out)
            if isinstance(out, (tuple, list))
            else self._rounded(out, size)
        )

    def _rounded(self, out: Any, size: float) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        size = 0.5 if out.dtype in (torch.float16, torch.bfloat16) else size
        noise = torch.empty_like(out, dtype=torch.float64).uniform_(-size, size, generator=self._generator)
        return (out * noise.mul_(torch.finfo(out.dtype).eps).add_(1)).to(out.dtype)


def _in_float32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value


class _Trial:
    """Random tokens for a model, and a random output of its encoder if it has one.

    Attributes:
        tokens: [1, prompt and steps, ...].
        output: [1, places, features] of the encoder, or None.
    """

    def __init__(self, part: Any):
        self.part, self.device = part, part.embedding.weight.device
        self.prompt, self.steps, places = _lengths(part)
        generator = torch.Generator().manual_seed(0)
        shape = 1, self.prompt + self.steps, *part.token_shape
        self.tokens = torch.randint(part.vocab_size, shape, generator=generator, device="cpu").to(self.device)
        self.output = None
        if part.has_encoder:
            shape = 1, places, compat.encoder_width(part.source)
            output = torch.randn(shape, generator=generator, device="cpu")
            self.output = output.to(self.device, part.embedding.weight.dtype)

    def caches(self) -> tuple[FastpathCache, Any]:
        """Make an empty cache; return it, and what the model's forward takes for it."""
        cache = FastpathCache(self.part.source.config)
        del cache.layers[len(self.part.kinds) :]
        cache.is_kept = True  # the forward of a patched model leaves such a cache to the model's own code
        return cache, cache if self.output is None else compat.over_encoder(cache)

    def stock(self, first: int, end: int, whole: Any) -> torch.Tensor:
        """Run the model's own forward over some of the tokens; return their logits."""
        return self.stock_over(self.tokens[:, first:end], whole)

    def stock_over(self, tokens: torch.Tensor, whole: Any) -> torch.Tensor:
        """Run the model's own forward over tokens; return their logits."""
        with _WideAttention() if self.device.type == "cuda" else nullcontext(), self._stock_code():
            bare = self.part.is_cast_down  # a trainer's autocast, which our steps leave out, has roundings of its own
            return compat.forward_over(self.part.source, tokens, whole, self.output, bare).float()

    def _stock_code(self) -> AbstractContextManager[Any]:
        """A ``with`` block for stock code. Only of a model with an architecture file modules have forwards of ours."""
        return nullcontext() if self.part.reason_of_file is None else paused(self.part.source)

    def mean_of(self, differences: list[float]) -> float:
        """Return the mean of the steps' differences; of a model with experts the smallest, since a router may choose
        otherwise between two experts whose scores are equal but for rounding."""
        return min(differences) if self.part.has_experts else sum(differences) / len(differences)


def _lengths(part: Any) -> tuple[int, int, int]:
    """Return the tokens of a prompt, steps behind it and places of an encoder's output that a part serves.

    Raises:
        Unrecordable: there are none up to a length that is too much to ask of stock code.
    """
    served = part.recording(1, 1).served
    for places in (_ENCODED, part.recording(1, 1).encoded_length):
        found = served.among(_PROMPT, _LONGEST, places).nonzero().flatten()
        if len(found):
            first = int(found[0])
            steps = served.among(_PROMPT + first, _PROMPT + first + _STEPS, places).long()
            return _PROMPT + first, int(steps.cumprod(0).sum()), places
    raise Unrecordable(f"steps behind {_LONGEST} tokens and more, which are not compared with stock's")


def _ratio(found: torch.Tensor, stock: torch.Tensor) -> float:
    return float((found - stock).abs().mean() / stock.abs().mean().clamp_min(1e-30))


def difference(part: Any, plans: PlanCache) -> float:
    """Return mean|ours - stock| of logits over mean|stock|, of random tokens and, if the model has an encoder, behind a
    random output of it."""
    trial = _Trial(part)
    with torch.no_grad():
        cache, whole = trial.caches()
        trial.stock(0, trial.prompt, whole)
        stock_cache = copy.deepcopy(whole)
        return _of_steps(trial, plans, cache, whole, lambda at: trial.stock(at, at + 1, stock_cache)[:, -1])


def _difference_at_once(part: Any, plans: PlanCache) -> float | None:
    """Do as :func:`difference`, beside one forward of stock's over all tokens instead of one for each.

    Returns:
        None if a cache cannot give tokens back, as states cannot.
    """
    trial = _Trial(part)
    with torch.no_grad():
        cache, whole = trial.caches()
        if cache is not whole or cache.state_layers:
            return None
        stock = trial.stock(0, trial.prompt + trial.steps, whole)
        if stock.shape[1] != trial.prompt + trial.steps:
            return None
        try:
            cache.crop(-trial.steps)
        except RuntimeError:  # a window has moved on
            return None
        return _of_steps(trial, plans, cache, whole, lambda at: stock[:, at])


def _of_steps(
    trial: _Trial, plans: PlanCache, cache: FastpathCache, whole: Any, stock_at: Callable[[int], torch.Tensor]
) -> float:
    """Return by how much the logits of a plan's steps differ from stock's.

    Args:
        cache, whole: see :meth:`_Trial.caches`; they hold the prompt.
        stock_at: gives stock's logits behind the token at a place, [1, vocab_size].
    """
    found, read = [], None
    plan = plans.plan_of(trial.part, 1, cache)
    try:
        if trial.output is not None:
            read = Encoded.of(whole, Seen.all_of(trial.output.shape[1], 1, trial.device))
        plan.begin(cache, torch.tensor([trial.prompt], device=trial.device), None, encoded=read)
        for place in range(trial.prompt, trial.prompt + trial.steps):
            ours = plan.step(trial.tokens[:, place]).float()
            found.append(_ratio(ours, stock_at(place)))
    finally:
        plan.end()
    return trial.mean_of(found)


class _PromptTrial(_Trial):
    """Random tokens for a prompt of several sequences, which begins the texts or not.

    Attributes:
        new: [batch, count], the prompt.
        past: how many tokens are before it.
    """

    def __init__(self, part: Any, batch: int, begins: bool, served: Served):
        super().__init__(part)
        self.past = 0 if begins else _BEFORE
        least = max(2, MAX_ROWS // batch + int(not part.gathers_experts))  # more rows than kernels for a few take
        count = next(each for each in (least, *_MORE_TOKENS) if served.serves_prompt(self.past, each))
        generator, shape = torch.Generator().manual_seed(0), (batch, self.past + count)
        tokens = torch.randint(part.vocab_size, shape, generator=generator, device="cpu").to(self.device)
        self._before, self.new = tokens.split((self.past, count), dim=1)

    def cache_before(self) -> FastpathCache:
        """Make a cache that holds what is before the prompt."""
        cache, _ = self.caches()
        if self.past:
            self.stock_over(self._before, cache)
        return cache

    def held(self, cache: FastpathCache) -> list[torch.Tensor]:
        """Return all keys, values and states of a cache that holds the prompt, too."""
        return [each.float() for each in _held(cache, self.past + self.new.shape[1])]


def _difference(one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]) -> float:
    """Return the larger one of what logits show and what all keys, values and states show in the mean."""
    of_states = [_ratio(*pair) for pair in zip(one[1], other[1], strict=True)]
    return max(_ratio(one[0].float(), other[0]), sum(of_states) / len(of_states))


def difference_of_prompt(part: Any, batch: int, begins: bool, served: Served) -> float:
    """Do as :func:`difference` for a prompt of ``batch`` sequences, which begins the texts or not. The result is the
    larger one of what logits show and what all keys, values and states show in the mean."""
    trial = _PromptTrial(part, batch, begins, served)
    positions = torch.arange(trial.past, trial.past + trial.new.shape[1], device=trial.device)[None]
    with torch.no_grad():
        stocks = trial.cache_before()
        ours = copy.deepcopy(stocks)
        logits = prompt.read(part, ours, prompt.Prompt(trial.new, positions, None), {})
        of_stock = trial.stock_over(trial.new, stocks)[:, -1]
        return _difference((logits, trial.held(ours)), (of_stock, trial.held(stocks)))


def own_difference_of_prompt(part: Any, batch: int, begins: bool, served: Served) -> float:
    """Return what :func:`difference_of_prompt` returns, of stock whose products are rounded otherwise, in the place of
    ours."""
    trial, found = _PromptTrial(part, batch, begins, served), []
    with torch.no_grad():
        before = trial.cache_before()
        for roundings in (nullcontext(), _OtherRoundings(trial.device)):
            cache = copy.deepcopy(before)
            with roundings:
                logits = trial.stock_over(trial.new, cache)[:, -1]
            found.append((logits, trial.held(cache)))
    return _difference(found[1], found[0])


def _held(cache: FastpathCache, length: int) -> list[torch.Tensor]:
    """Return all keys and values of ``length`` tokens, and all states."""
    both = ((layer.k_buffer, layer.v_buffer) for layer in cache.key_layers)
    found = [each[:, :, :length] for pair in both for each in pair if each is not None]
    return found + [state for layer in cache.state_layers for state in layer.states]


def prompts_agree(part: Any, batch: int, begins: bool, served: Served) -> bool:
    """Whether a list of calls reads a prompt of so many sequences as the model's own forward does; or is as near to it
    as the same forward with other roundings, by which a router chooses other experts."""
    given = part, batch, begins, served
    if (found := difference_of_prompt(*given)) <= _allowed(part):
        return True
    return found <= min(_TIMES * own_difference_of_prompt(*given), _MOST_OF_NOISE)


def own_difference(part: Any) -> float:
    """Return what :func:`difference` returns, of stock whose products are rounded otherwise, in the place of ours."""
    trial, found = _Trial(part), []
    with torch.no_grad():
        _, whole = trial.caches()
        trial.stock(0, trial.prompt, whole)
        other_cache, roundings = copy.deepcopy(whole), _OtherRoundings(trial.device)
        for place in range(trial.prompt, trial.prompt + trial.steps):
            with roundings:
                other = trial.stock(place, place + 1, other_cache)[:, -1]
            found.append(_ratio(other, trial.stock(place, place + 1, whole)[:, -1]))
    return trial.mean_of(found)


def reason_against(part: Any, plans: PlanCache, is_kept: bool = False) -> Cause | None:
    """Return why the recorded step of a model is not used, or None. The steps are compared once for a part.

    Args:
        part: the model, without another reason.
        plans: of the model.
        is_kept: a file has held the step, of a model of the same code that was compared token by token. This one is
            compared at once, and token by token if it differs.
    """
    if part.verdict is None:
        try:
            allowed = _allowed(part)
            at_once = _difference_at_once(part, plans) if is_kept and part.ranks is None else None
            found = difference(part, plans) if at_once is None or not at_once <= allowed else at_once
            if found > allowed and part.ranks is None:  # all ranks would have to run the model's forward
                allowed = max(allowed, min(_TIMES * own_difference(part), _MOST_OF_NOISE))
        except compat.OUT_OF_MEMORY as error:  # no verdict: there may be more next time
            return Cause("not_proven", f"{type(error).__name__}: {error}", part.module)
        except RankError:  # no verdict: other ranks are lost
            raise
        except Exception as error:  # nobody has tried this model's steps: anything may be raised
            part.verdict = (Cause("not_proven", f"{type(error).__name__}: {error}", part.module),)
            return part.verdict[0]
        text = f"its logits differ from stock's by {found:.1e} of their size, {allowed:.1e} are allowed"
        part.verdict = (None if found <= allowed else Cause("not_proven", text, part.module),)
    return part.verdict[0]


def _allowed(part: Any) -> float:
    """Return the difference that the twin's own and the model's size allow."""
    dtype, width = part.embedding.weight.dtype, part.embedding.weight.shape[1]
    growth = max(1.0, len(part.layers) / _TWINS_LAYERS) ** 0.5  # so roundings of successive layers add up
    if dtype == torch.float32:  # and those of long sums, which are rounded once in 16 bits
        growth *= max(1.0, width / _TWINS_WIDTH) ** 0.5
    growth *= max(1.0, math.log2(_lengths(part)[0] / _PROMPT)) ** 0.5  # and those of sums over more tokens, in pairs
    least = _ROUNDINGS * torch.finfo(dtype).eps
    return min(MOST, _TIMES * growth * max(part.architecture.twins_difference, least))
