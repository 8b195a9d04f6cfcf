"""A recorded step is lowered once without a plan, which shows whether all of it has a place in one."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..decode.lower.positions import Positions
from ..decode.lower.which_op import Lower
from ..decode.plans.encoded import EncodedMemory
from ..decode.run.program import Program
from ..decode.sources.step_source import StepInputs, StepSource
from ..ops.kv_cache import KVCache


def dry_run(part: StepSource) -> None:
    """Lower the step without a plan.

    Raises:
        Unrecordable: something in it has no place in a plan.
    """
    program = Program()
    caches = [KVCache(program.register(), program.register()) for _ in part.kinds]
    at = {device: Positions({}, program.register(), program.register()) for device in part.devices}
    if part.has_encoder:
        encoded = EncodedMemory(program, len(part.kinds), 1, [torch.device("cpu")])
        at = {device: replace(each, encoded=encoded.on(device)) for device, each in at.items()}
    shape = torch.zeros(1, 1, dtype=torch.long)
    values = [each.memory(shape.device) for each in part.values_of_model(1, 1)]
    tokens = torch.zeros(1, 1, *part.token_shape, dtype=torch.long)
    given = StepInputs(tokens, shape, {}, caches, part.states(1), values, at)
    part.record(program, Lower(program.emit, 1), given)
