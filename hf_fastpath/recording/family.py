"""What takes the place of an architecture for models that none describes: their steps are recorded."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..decode.sources.step_source import StepSource
from ..reasons import Cause

#: what a report shows in place of an architecture's name
RECORDED = "recorded"


class Recorded:
    """The family of a model that no architecture describes.

    Attributes:
        name: ``"recorded"``.
        module: transformers module of the model's class.
        twins_difference: difference from stock's logits that a small twin showed, see :mod:`.proof`.
        first: the model when it was looked at first, with the step that was recorded then; None once that is taken.
    """

    name, like = RECORDED, None

    def __init__(self, model: nn.Module):
        self.module = type(model).__module__
        self.twins_difference = 0.0
        self.first: Any = None

    def model_part(self, model: nn.Module) -> StepSource:
        """Return ``model`` as it is now, as a ``RecordedModel``."""
        made = self._part(model)
        made.look()
        self.first = self.first or made
        return made

    def take_reason(self) -> None:
        """Return None: a part keeps its reason itself."""

    def part_instead(self, model: nn.Module, reason: Cause) -> StepSource:
        """Do as :meth:`model_part` for a model that another family does not take now, for a reason: if the step cannot
        be recorded either, that reason is the one that helps, unless it is no more than that a class is not known."""
        made = self._part(model)
        made.reason_of_file = reason
        made.files_reason = None if reason == "class_not_supported" else reason
        made.look()
        return made

    def _part(self, model: nn.Module) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict) -> Recorded:
        return self
