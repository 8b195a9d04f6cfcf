"""Whether a recorded step with several adapters is one in which each row may leave some of them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import compat
from ..decode.calls.named_calls import tensors_in
from ..decode.model.weight import AdaptedWeight
from ..reasons import Cause


def reason_against(self: Any, batch: int, numbers: Mapping[int, int]) -> Cause | None:
    """Do as ``StepSource.row_adapters_reason``: everything that the step reads of adapters has to be in its products.

    Args:
        self: a ``RecordedModel`` with these adapters active.
        batch, numbers: see there.
    """
    recording = self.recording(batch, 1)
    of_adapters = {compat.memory_of(each) for layer in self._looked_at.adapters.values() for each in layer.tensors}
    calls = [*recording.calls, *(call for value in recording.values for call in value.calls)]
    if any(
        compat.memory_of(each) in of_adapters
        for call in calls
        for each in tensors_in(call.arguments)
        if not each.is_meta
    ):
        return Cause("adapter_names", "an adapter that is more than LoRA beside a product", self.source)
    weights = [weight for _, weight in recording.stand_ins if isinstance(weight, AdaptedWeight)]
    if any(adapter.down.data_ptr() not in numbers for weight in weights for adapter in weight.adapters):
        return Cause("adapter_names", "an adapter that the call does not know", self.source)
    return None
