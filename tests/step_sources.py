"""All kinds of sources of steps, for mypy: each has every member of ``StepSource``, with its type."""

from __future__ import annotations

from hf_fastpath.decode.placed.local_models import LocalPart
from hf_fastpath.decode.placed.offloaded import OffloadedPart
from hf_fastpath.decode.placed.shards import ShardedPart
from hf_fastpath.decode.sources.described import DescribedPart
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
from hf_fastpath.recording.local_part import LocalRecordedPart
from hf_fastpath.recording.part import RecordedPart
from hf_fastpath.recording.placed_part import PlacedPart
from hf_fastpath.recording.recorded_step import BiasTable, MadeOfModel
from hf_fastpath.recording.spread_part import SpreadPart

DESCRIBED = (DescribedPart, LocalPart, ShardedPart, OffloadedPart)
RECORDED = (RecordedPart, LocalRecordedPart, SpreadPart, PlacedPart)


def sources(
    described: DescribedPart,
    local: LocalPart,
    sharded: ShardedPart,
    offloaded: OffloadedPart,
    recorded: RecordedPart,
    local_recorded: LocalRecordedPart,
    spread: SpreadPart,
    placed: PlacedPart,
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
