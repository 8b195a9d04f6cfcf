"""The family of models that no architecture describes: their steps are recorded."""

from __future__ import annotations

from torch import nn

from .part import RecordedPart
from .placed_part import PlacedPart, is_placed

#: what a report shows in place of an architecture's name
RECORDED = "recorded"


class Recorded:
    """What takes the place of an architecture for models that have none.

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
        self.first: RecordedPart | None = None

    def model_part(self, model: nn.Module) -> RecordedPart:
        """Return ``model`` as it is now."""
        made = self._part(model)
        self.first = self.first or made
        return made

    def _part(self, model: nn.Module) -> RecordedPart:
        return PlacedPart(self, model) if is_placed(model) else RecordedPart(self, model)

    def __deepcopy__(self, memo: dict) -> Recorded:
        return self
