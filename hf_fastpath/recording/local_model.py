"""A recorded model for which a local model stands, whose tensors are those that calls read."""

from __future__ import annotations

from torch import nn

from ..decode.placed.local_models import owner_of
from .family import Recorded
from .recorded_model import RecordedModel


class LocalRecordedModel(RecordedModel):
    """A local model, which is recorded.

    Attributes:
        module: the local model.
        whole: the model that was given to ``patch()``.
    """

    def __init__(self, architecture: Recorded, whole: nn.Module, local: nn.Module):
        super().__init__(architecture, local)
        self.whole = whole

    @property
    def source(self) -> nn.Module:
        return self.whole

    def owner(self, module: nn.Module) -> nn.Module:
        return owner_of(self.whole, self.module, module)
