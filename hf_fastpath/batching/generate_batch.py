"""``model.generate_batch()`` of a patched model: its prompts are requests of a batch."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from .. import compat
from ..decode.loops import counted
from ..decode.loops.eligibility import uncovered_reason
from ..decode.loops.generate_calls import for_patched_models
from ..decode.loops.patched import Patched
from ..decode.loops.shared_calls import why_model_not_shared
from ..reasons import Cause
from .engine import Batch

#: arguments that are taken
_KNOWN = frozenset(
    {
        *("inputs", "generation_config", "continuous_batching_config", "record_timestamps", "progress_bar"),
        *("persistent_manager", "warmup", "max_new_tokens"),
    }
)


@for_patched_models
def generate_batch(state: Patched, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``ContinuousMixin.generate_batch`` does, with its arguments, while a patched model is alive."""
    named = compat.named_arguments(original, model, args, kwargs)
    others = [name for name in named if name not in _KNOWN]
    inputs: Any = named.get("inputs")
    config = named.get("generation_config") or model.generation_config
    settings = named.get("continuous_batching_config")
    new_tokens = config.max_new_tokens if named.get("max_new_tokens") is None else named["max_new_tokens"]
    what = ", ".join(others) or _why_not(state, model, inputs, config, settings, named, new_tokens)
    if what is not None:
        state.stats.note(Cause("continuous_batching", what))
        return counted.generate_batch(original, model, *args, **kwargs)
    copies, seed = compat.copies_of(config), getattr(settings, "seed", None)
    given = compat.batch_arguments(model, config) | dict(max_new_tokens=new_tokens)
    results: dict[str, Any] = {}
    with (
        Batch(model, logprobs=bool(getattr(settings, "return_logprobs", False)), **given) as batch,
        tqdm(total=len(inputs) * copies, disable=not named.get("progress_bar"), unit="request") as bar,
    ):
        requests = [
            batch.submit(prompt, id=name, seed=None if seed is None else seed + copies * number + copy)
            for number, prompt in enumerate(inputs)
            for copy, name in enumerate(_names(number, copies))
        ]
        for result in batch:
            times = result.created_at, (result.started_at, result.ended_at)
            found = result.prompt, result.tokens, result.logprobs, result.error
            results[result.id] = compat.generation_output(result.id, *found, *times)
            bar.update()
    return {request.id: results[request.id] for request in requests}


def _names(number: int, copies: int) -> list[str]:
    """Return the names of the requests of a prompt, as transformers has them: its copies, then itself."""
    return [*(f"req_{number}__child#{copy}" for copy in range(copies - 1)), f"req_{number}"]


def _why_not(
    state: Patched, model: Any, inputs: Any, config: Any, settings: Any, named: dict[str, Any], new_tokens: Any
) -> str | None:
    """Return what of a call a batch of ours does not do as ``generate_batch()`` does, or None."""
    part = state.plans.part_of(model) if state.loop_reason is None else None
    reason = uncovered_reason(state.loop_reason, model, part)
    if reason is not None or part is None:
        return str(reason)
    if (reason := state.plans.reason_of(part) or why_model_not_shared(state, part)) is not None:
        return str(reason)
    for name in ("persistent_manager", "record_timestamps"):
        if named.get(name):
            return name
    if new_tokens is None:
        return "no max_new_tokens"
    if not inputs or not all(isinstance(prompt, list) and prompt for prompt in inputs):
        return "an empty prompt" if inputs else "no prompts"
    if getattr(settings, "return_logprobs", False) and config.do_sample:
        return "return_logprobs of samples"
    return compat.why_not_batch_arguments(model, config)
