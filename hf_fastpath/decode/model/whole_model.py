"""What a source of steps answers if one process and device have all of a decoder of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import compat
from ...reasons import Cause
from ..ranks.process_group import Ranks
from .modules import model_code_reason


class WholeModel:
    """What both kinds of sources answer if nothing is special: one process and device have all of a decoder of text."""

    module: nn.Module
    architecture: Any
    is_passing: bool = False
    reason_of_file: Cause | None = None

    @property
    def source(self) -> nn.Module:
        return self.module

    @property
    def ranks(self) -> Ranks | None:
        return None

    @property
    def host_weights(self) -> Sequence[list[torch.Tensor]]:
        return ()

    @property
    def sources(self) -> Sequence[tuple[int, int]]:
        return ()

    @property
    def is_cast_down(self) -> bool:
        if model_code_reason(self.module, self.architecture.module) != "autocast":
            return False
        # of a prompt that modules read under autocast, a cache converts keys and values, but no states
        keeps_states = any(kind.states for kind in compat.layer_kinds(self.module.config) or ())
        return not keeps_states and all(parameter.dtype == torch.float32 for parameter in self.module.parameters())

    def owner(self, module: nn.Module) -> nn.Module:
        return module

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where calls of a step read a tensor of the model."""
        return tensor.device

    def look_again(self) -> None:
        """Note nothing: nothing is kept that would be of the past."""

    def row_adapters_reason(self, batch: int, numbers: Mapping[int, int]) -> str | None:
        return Cause("adapter_names", module=self.source)

    def lasting_reason(self) -> str | None:
        return None

    def making_reason(self) -> Cause | None:
        return None

    def reason_of_ranks(self, plans: Any, batch: int) -> str | None:
        return None
