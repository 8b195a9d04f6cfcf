"""Prompts by lists of calls: one call's, or those of several calls at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...cache.layer import FastpathLayer
from ...ops.gemv import MAX_ROWS, MAX_WGMMA_ROWS
from ..plans.angles import angles_at, has_angles
from ..run.to_host import wait_for
from ..sources.step_source import StepSource
from . import short_prompts
from .prompt_program import Prompt, PromptProgram, keys_and_values, states_of
from .prompt_turns import PromptTurns, ShortText
from .short_prompts import Text

#: programs kept for one model; there is one for each size of prompt that kernels for a few rows take, and one for each
#: length of ``short_prompts``
MAX_PROGRAMS = 32


def continues(cache: FastpathCache, prompt: Prompt) -> bool:
    """Whether there are new tokens, and their rows are those of what ``cache`` holds."""
    batch, query_len = prompt.tokens.shape
    if prompt.positions.shape[-1] != query_len or query_len == 0:
        return False
    if not cache.get_seq_length():
        return cache.holds_nothing
    batches = [layer.batch_size for layer in cache.key_layers]
    batches += [len(state) for layer in cache.state_layers for state in layer.states]
    return set(batches) == {batch}


def is_readable(part: StepSource, cache: FastpathCache, prompt: Prompt, size: int | None = None) -> bool:
    """Whether :func:`read` can take the prompt, in chunks of ``size``; else stock code has to."""
    if not continues(cache, prompt):
        return False
    past = cache.get_seq_length()
    for chunk in prompt.chunks(size):
        if _form(part, chunk, past) is None:
            return False
        past += chunk.tokens.shape[1]
    return True


def _wraps(layer: Any, length: int) -> bool:
    """Whether a layer has no room for so many positions: it keeps those of a window."""
    return isinstance(layer, FastpathLayer) and layer.is_sliding and length > layer.capacity


def _form(part: StepSource, prompt: Prompt, past: int) -> Any:
    batch, query_len = prompt.tokens.shape
    if past and any(kind.states for kind in part.kinds) and not bool((prompt.positions[:, 0] == past).all()):
        return None  # a text from its beginning, of which a model's own code may begin with other states
    return part.prompts.form(prompt.tokens.device, (batch, query_len), past, prompt.starts is not None)


def _program_of(part: StepSource, form: Any, batch: int, length: int, memory: tuple) -> PromptProgram | None:
    """Return the calls for whole prompts of so many tokens, or None if these are not read as those of ``form`` are."""
    if part.prompts.form(part.embedding.weight.device, (batch, length), 0, False) is not form:
        return None
    return PromptProgram(part, form, False, min(batch * length, MAX_WGMMA_ROWS + 1), batch, False, *memory)


def _memory_names(part: StepSource, cache: FastpathCache) -> tuple:
    """Return what memory the layers of a cache have, which the calls for a prompt follow."""
    layers = cache.layers[: len(part.layers)]
    return tuple(keys_and_values(each).names() for each in layers), tuple(len(states_of(each)) for each in layers)


def _end(cache: FastpathCache, count: int) -> None:
    """Let a cache hold so many tokens more, which have been read."""
    cache.advance(count)
    for layer in cache.state_layers:
        layer.pass_prompt()


def read(part: StepSource, cache: FastpathCache, prompt: Prompt, programs: dict[tuple, Any]) -> torch.Tensor:
    """Run the model over the prompt and append it to ``cache``.

    Args:
        part: the model, without a reason against a decode plan.
        cache: of the same batch, or empty.
        prompt: one that :func:`is_readable`.
        programs: the programs of earlier calls of this model as it is now. A program in use is taken out, and a missing
            one is added.

    Returns:
        [batch, vocab_size] logits of the token that follows.
    """
    batch, query_len = prompt.tokens.shape
    past, dtype, device = cache.get_seq_length(), part.embedding.weight.dtype, prompt.tokens.device
    form = _form(part, prompt, past)
    part.prompts.begin(form)
    if not past:
        part.prompts.prepare(cache, batch)
    cache.reserve(query_len)
    lengths = torch.full((batch,), past + query_len, dtype=torch.int32, device=device)
    starts = None if prompt.starts is None else prompt.starts.to(torch.int32)
    rows = batch * query_len
    # a few tokens of a conversation take one pass over the weights, as one token does
    at_once = device.type == "cpu" and rows <= MAX_ROWS
    memory = _memory_names(part, cache)
    length, logits = short_prompts.length_of(part, prompt, past), None
    if length is not None:
        logits = _read_short(part, form, (batch, length), [(cache, prompt)], programs)
    if logits is None:
        layers = cache.layers[: len(part.layers)]
        wrapped = tuple(place for place, layer in enumerate(layers) if _wraps(layer, query_len))
        how = at_once, min(rows, MAX_WGMMA_ROWS + 1), batch, starts is not None, *memory, wrapped
        program = programs.pop((key := (id(form), *how)), None) or PromptProgram(part, form, *how)
        angles = {}
        if has_angles(part):
            angles = angles_at(part, torch.empty(0, dtype=dtype, device=device), prompt.positions)
        logits = program.run(prompt, past, lengths, starts, cache, angles)
        programs[key] = program
    for oldest in list(programs)[:-MAX_PROGRAMS]:
        programs.pop(oldest, None)  # None: another thread may have taken it
    _end(cache, query_len)
    return logits


def _read_short(
    part: StepSource, form: Any, shape: tuple[int, int], texts: Sequence[Text], programs: dict[tuple, Any]
) -> torch.Tensor | None:
    """Read prompts by a graph for ``shape``, sequences and tokens of each, into caches with room for them.

    Returns:
        [batch, vocab_size] logits, or None if no graph reads such prompts.
    """
    (cache, prompt), (batch, length) = texts[0], shape
    memory = _memory_names(part, cache)
    key = id(form), batch, length, *memory
    if (short := programs.pop(key, None)) is None:
        of_length = functools.partial(_program_of, part, form, batch, length, memory)
        layers = cache.layers[: len(part.layers)]
        short = short_prompts.reader_of(part, prompt.of_batch(batch), layers, length, of_length)
    logits = short.read(texts) if isinstance(short, short_prompts.ShortPrompts) else None
    if short is not None:
        programs[key] = short
    return logits


def read_together(part: StepSource, texts: Sequence[Text], programs: dict[tuple, Any]) -> list[torch.Tensor] | None:
    """Do as :func:`read` with prompts of several calls at once, which begin their texts.

    Args:
        texts: empty caches and prompts, for which :func:`.short_prompts.shape_together` has a shape.

    Returns:
        The logits of each, or None if no graph reads them at once: nothing has been read then.
    """
    prompts = [prompt for _, prompt in texts]
    shape = short_prompts.shape_together(prompts)
    assert shape is not None, "the caller has asked"
    form = part.prompts.form(prompts[0].tokens.device, shape, 0, False)
    if form is None or not all(continues(*text) for text in texts):
        return None
    part.prompts.begin(form)
    for cache, prompt in texts:
        part.prompts.prepare(cache, len(prompt.tokens))
        cache.reserve(prompt.tokens.shape[1])
    if (logits := _read_short(part, form, shape, texts, programs)) is None:
        return None
    for cache, prompt in texts:
        _end(cache, prompt.tokens.shape[1])
    counts = [len(prompt.tokens) for prompt in prompts]
    return [*logits[: sum(counts)].split(counts)]


def short_text(part: StepSource, cache: FastpathCache, prompt: Prompt) -> ShortText | None:
    """Return a prompt as one that may be read together with those of other calls, or None."""
    if cache.get_seq_length() or not part.prompts.any_batch:
        return None
    if short_prompts.length_of(part, prompt, 0) is None or short_prompts.shape_together([prompt, prompt]) is None:
        return None
    device = prompt.tokens.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return ShortText(part, cache, prompt, stream)


def read_with_others(mine: ShortText, programs: dict[tuple, Any], turns: PromptTurns) -> torch.Tensor | None:
    """Read a prompt together with those that wait for their turn, which get their logits; None if there are none, or
    no graph reads so many: nothing has been read then."""
    fits = lambda texts: short_prompts.shape_together([each.prompt for each in texts]) is not None  # noqa: E731
    with turns.others(mine, fits) as others:
        if not others:
            return None
        texts = [mine.text, *(each.text for each in others)]
        device, count = mine.prompt.tokens.device, sum(prompt.tokens.numel() for _, prompt in texts)
        with turns.chunk(device, count, prompts=len(texts)), compat.below_autograd():
            try:
                found = read_together(mine.part, texts, programs)
            except compat.OUT_OF_MEMORY:  # each alone takes less
                found = None
            if found is None:
                return None
            wait_for(device)  # the other calls' threads know of no event
        for each, logits in zip(others, found[1:]):
            each.logits = logits
        return found[0]
