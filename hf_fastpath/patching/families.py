"""The families of models that architecture files describe: a file is a shortcut, never a gate."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import compat
from ..architecture import Architecture
from ..decode.placed.offloaded import Described
from ..decode.placed.shards import Sharded
from ..decode.plans.plan_cache import Family
from ..decode.ranks.process_group import Ranks
from ..decode.sources.described import model_part
from ..decode.sources.step_source import StepSource
from ..reasons import Cause
from ..recording.placed_model import RecordedAlone

#: reasons that files have against models which the recorder may know all the same
OF_FILES = frozenset(
    "adapter unsupported_projection quantized_format unsupported_config unsupported_activation unsupported_head_dim "
    "class_not_supported".split()
)


class DescribedOrRecorded:
    """The family of a model that an architecture describes. Where the file does not know what the model has (adapters,
    another package's layers, a class of the user's, an edited config), its step is recorded, as the model then is.

    Attributes:
        first: the part that was recorded when the model was looked at first; None once that is taken.
    """

    def __init__(self, architecture: Architecture, model: nn.Module):
        self._described, self._recorded = Described(architecture), RecordedAlone(model)
        self.first: Any = None
        self._reason: tuple[StepSource, str | None] | None = None

    @property
    def architecture(self) -> Architecture:
        return self._described.architecture

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the architecture's classes."""
        return self._described.module

    def model_part(self, model: nn.Module) -> StepSource | None:
        """Return ``model`` in its roles as it is now, or None if neither the file nor the recorder knows it."""
        part = self._described.model_part(model)
        reason = Cause("class_not_supported", module=model) if part is None else part.reason()
        is_asked_about = reason == "quantized_format" and all(each.is_meta for each in model.parameters())
        if reason not in OF_FILES or is_asked_about or not compat.is_decoder_alone(model):
            self._reason = None if part is None else (part, reason)
            return part  # what packages keep in place of quantized weights is known only once they are there
        made = self._recorded.part_instead(model, reason)
        self.first = self.first or made
        return made

    def take_reason(self) -> tuple[StepSource, str | None] | None:
        asked, self._reason = self._reason, None
        return asked

    def __deepcopy__(self, memo: dict) -> DescribedOrRecorded:
        return self


def of_files(model: nn.Module, known: tuple[Architecture, ...], ranks: Ranks | None) -> list[Family]:
    """Return the families of architecture files that a model may belong to.

    Args:
        known: the architectures that come into question.
        ranks: the processes over which the model is spread, or None.
    """
    if ranks is not None:
        return [Sharded(each, ranks) for each in known]
    return [DescribedOrRecorded(each, model) for each in known if model_part(each, model) is not None]
