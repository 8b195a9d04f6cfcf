"""Prompts of more than tokens: embeddings, images, sound, what an encoder reads. The model's own code reads them, and
is asked here what it would be given with the tokens that follow, which a plan then reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ... import compat
from ...reasons import Cause
from ..plans import encoded
from ..sources.step_source import StepSource


def has_more_than_tokens(part: StepSource, model_kwargs: dict) -> bool:
    """Whether the prompt of a call may be more than its token ids."""
    return part.is_multimodal or part.has_encoder or model_kwargs.get("inputs_embeds") is not None


def prompt_shape(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of sequences, and the length of the prompt, which may be given as embeddings."""
    embeds = model_kwargs.get("inputs_embeds")
    batch, length = (input_ids if embeds is None else embeds).shape[:2]
    return batch, length


@dataclass(frozen=True)
class Behind:
    """What the tokens behind a prompt of more than tokens are given.

    Attributes:
        positions: [batch or 1], the position of the first; None if the positions go on from the prompt's.
        seen: what of its encoder's output the decoder sees; None without an encoder.
    """

    positions: torch.Tensor | None = None
    seen: encoded.Seen | None = None


def looked_at(part: StepSource, input_ids: torch.Tensor, model_kwargs: dict) -> tuple[Cause | None, Behind]:
    """Return why the tokens behind a prompt depend on more than themselves, their positions and the cache, or None; and
    what they are given.

    Args:
        part: the model.
        input_ids: [batch, seq_len] int64 or int32.
        model_kwargs: of the call of ``generate()``.
    """
    try:
        given = compat.inputs_behind(part.module, input_ids, model_kwargs)
        seen = encoded.seen(part, input_ids, model_kwargs, given) if part.has_encoder else None
    except Exception as error:  # methods of any model's class, which expect the outputs of a forward
        what = f"{type(error).__name__}: {error}"
        return Cause("unsupported_input", f"what a token behind the prompt is given is not known, {what}"), Behind()
    positions = given.get(compat.text_name(part.module, "position_ids"))
    axes = None if positions is None else compat.rotary_positions(part.module, positions)
    batch = len(seen.starts) if seen is not None else len(input_ids)
    reason = _reason_against(part, given, axes, seen, batch)
    return reason, Behind(None if axes is None else axes[0, :, -1].long(), seen)


def _reason_against(
    part: StepSource, given: dict[str, Any], axes: torch.Tensor | None, seen: encoded.Seen | None, batch: int
) -> Cause | None:
    if given.get(compat.CACHE) is None:
        return Cause("no_cache", f"{compat.name_of(type(part.module))} leaves the cache out behind so long a prompt")
    if part.has_encoder and axes is None:
        pass  # the decoder counts from the length of its cache
    elif part.takes_positions != (axes is not None):
        return Cause("position_ids", "None" if axes is None else "a forward that does not name them")
    if axes is not None and (axes.shape[-1] != 1 or not bool((axes == axes[:1]).all())):
        return Cause("position_ids", f"axes of {tuple(axes.shape)} go on from different places")
    if axes is not None and not bool((axes == axes.long()).all()):
        return Cause("position_ids", "the text goes on between two whole numbers")
    if part.has_encoder and seen is None:
        return Cause("attention_mask", "more than one run of ones over what the encoder has read")
    if not (part.is_multimodal or part.has_encoder):  # no other argument comes here
        return None
    known = compat.FORWARD_ARGUMENTS | compat.WITHOUT_EFFECT | compat.ENCODED_ARGUMENTS | {"tokenizer"}
    others = {name: value for name, value in given.items() if name not in known and value is not None}
    others = {name: value for name, value in others.items() if not (name.startswith("output_") and value is False)}
    return part.arguments_reason(others, batch) if others else None
