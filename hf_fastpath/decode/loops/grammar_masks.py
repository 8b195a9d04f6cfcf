"""Masks of grammars that the host fills while a device runs the step whose logits they are for."""

from __future__ import annotations

from typing import Any

import torch

from ... import compat

#: scores of a step at most for which a mask is filled ahead: the host writes one float for each
_MOST_SCORES = 1 << 22


def fills_masks_ahead(device: torch.device) -> bool:
    """Whether the host is free while a step runs on a device."""
    return device.type == "cuda"


class GrammarMask:
    """A grammar's processor in two parts: what it forbids, which the tokens tell, and the scores behind that.

    A grammar forbids tokens by their scores alone: of zeros it makes zeros and ``-inf``, which are its mask.

    Args:
        processor: see :func:`compat.is_grammar`.
    """

    def __init__(self, processor: Any):
        self._processor = processor
        self._zeros: torch.Tensor | None = None  # [rows, vocab_size] in host memory
        self._mask: torch.Tensor | None = None  # bool [rows, vocab_size] in host memory
        self._on_device: torch.Tensor | None = None
        self._is_filled = False

    def fill(self, input_ids: torch.Tensor) -> None:
        """Ask the grammar which tokens it forbids next.

        Args:
            input_ids: int64 [rows, seq_len] in host memory, with the newest tokens. The first call of the processor has
                shown how many scores there are.
        """
        if self._zeros is None or self._mask is None or self._on_device is None:
            return
        found = self._processor(input_ids, self._zeros.zero_())
        torch.lt(found, 0, out=self._mask)
        self._on_device.copy_(self._mask, non_blocking=True)
        self._is_filled = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Do as the processor."""
        if not self._is_filled or self._on_device is None:
            self._make_room(scores)
            return self._processor(input_ids, scores)
        self._is_filled = False
        return scores.masked_fill_(self._on_device, -torch.inf)  # in place, as the processor does

    def _make_room(self, scores: torch.Tensor) -> None:
        if scores.numel() <= _MOST_SCORES and scores.dtype == torch.float32:
            self._zeros = torch.zeros(scores.shape, device="cpu")
            pinned = scores.device.type == "cuda"
            self._mask = torch.zeros(scores.shape, dtype=torch.bool, device="cpu", pin_memory=pinned)
            self._on_device = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)


class MasksAhead:
    """The grammars of a call whose masks the host fills while the device runs a step.

    Args:
        processors: of the call.
        input_ids: of its prompt, [rows, seq_len].

    Attributes:
        processors: with a :class:`GrammarMask` in the place of each grammar's.
    """

    def __init__(self, processors: Any, input_ids: torch.Tensor):
        made = [GrammarMask(each) if compat.is_grammar(each) else each for each in processors]
        self.processors = type(processors)(made)
        self._masks = [each for each in made if isinstance(each, GrammarMask)]
        self._ids = input_ids.cpu()

    def take(self, tokens: torch.Tensor) -> None:
        """Note the newest tokens, [rows]; the host waits for them, before it launches the step that reads them."""
        self._ids = torch.cat((self._ids, tokens.cpu()[:, None]), dim=1)

    def fill(self) -> None:
        """Fill the masks for the logits of the step that runs."""
        for each in self._masks:
            each.fill(self._ids)
