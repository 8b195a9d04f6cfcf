"""All kinds of sources of steps, for mypy: each has every member of ``StepSource``, with its type."""

from __future__ import annotations

from hf_fastpath.decode.placed.local_models import LocalModel
from hf_fastpath.decode.placed.offloaded import OffloadedModel
from hf_fastpath.decode.placed.shards import ShardedModel
from hf_fastpath.decode.sources.described import DescribedModel
from hf_fastpath.decode.sources.step_source import (
    AnyLength,
    CachedAttention,
    Origin,
    ServedLengths,
    StepSource,
    ValueOfModel,
)
from hf_fastpath.recording.by_length import ByLength
from hf_fastpath.recording.family import Recorded
from hf_fastpath.recording.layers import RecordedAttention
from hf_fastpath.recording.local_model import LocalRecordedModel
from hf_fastpath.recording.placed_model import PlacedModel
from hf_fastpath.recording.recorded_model import RecordedModel
from hf_fastpath.recording.recorded_step import BiasTable, MadeOfModel
from hf_fastpath.recording.sharded_model import ShardedRecordedModel

DESCRIBED = (DescribedModel, LocalModel, ShardedModel, OffloadedModel)
RECORDED = (RecordedModel, LocalRecordedModel, ShardedRecordedModel, PlacedModel)


def sources(
    described: DescribedModel,
    local: LocalModel,
    sharded: ShardedModel,
    offloaded: OffloadedModel,
    recorded: RecordedModel,
    local_recorded: LocalRecordedModel,
    spread: ShardedRecordedModel,
    placed: PlacedModel,
) -> list[StepSource]:
    """Return what is given; that each is a source of steps mypy knows by the types alone."""
    return [described, local, sharded, offloaded, recorded, local_recorded, spread, placed]


def lengths(described: AnyLength, recorded: ByLength) -> list[ServedLengths]:
    """Do as :func:`sources` for the lengths that steps serve."""
    return [described, recorded]


def parts(
    attention: RecordedAttention, value: BiasTable | MadeOfModel, family: Recorded
) -> tuple[CachedAttention, ValueOfModel, Origin]:
    """Do as :func:`sources` for what sources hold."""
    return attention, value, family
