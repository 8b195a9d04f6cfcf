"""A recorded model that a ``tp_plan`` spreads over processes: this rank's step, with what ranks put together."""

from __future__ import annotations

import zlib

from torch import nn

from .. import compat
from ..compat import ShardStyle
from ..decode.model.modules import is_packed
from ..decode.placed.shards import EXPERT_STYLES, local_model, spread_reason
from ..decode.plans.plan_cache import PlanCache
from ..decode.ranks.process_group import Ranks
from ..decode.ranks.rank_calls import COLLECTIVES, shard_of
from ..reasons import Cause
from .family import Recorded
from .local_model import LocalRecordedModel
from .proof import reason_against


class ShardedRecordedModel(LocalRecordedModel):
    """What this rank has of a recorded model."""

    def __init__(self, architecture: RecordedOverRanks, whole: nn.Module):
        super().__init__(architecture, whole, local_model(whole, architecture.ranks))
        self._ranks = architecture.ranks
        self._joint: dict[int, int] = {}  # number of sequences -> see _together()

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def num_embeddings(self) -> int:
        shard = shard_of(self.embedding)
        return super().num_embeddings if shard is None else shard.total

    def lasting_reason(self) -> str | None:
        return self.other_reason() or spread_reason(self.whole, self._fits) or super().lasting_reason()

    def _fits(self, name: str, style: ShardStyle) -> bool:
        """Whether a module may be spread in a way; what is around it the proof looks at."""
        module = self.module.get_submodule(name)
        if style in EXPERT_STYLES:
            return compat.expert_stacks(module) is not None
        if style is ShardStyle.VOCABULARY:
            return isinstance(module, nn.Embedding)
        if style in (ShardStyle.PICKING, ShardStyle.OWN):
            return True
        return type(module) is nn.Linear or is_packed(module)

    def proof_reason(self, plans: PlanCache, batch: int) -> str | None:
        """Return why there is no step of so many sequences, or None; :meth:`reason_of_ranks` has the proof."""
        return self.shape_reason(batch, 1)

    def reason_of_ranks(self, plans: PlanCache, batch: int) -> str | None:
        """Return why the ranks' steps together are not what the model computes, or None.

        Every rank has to call this method, and comes to the same.
        """
        told = self.ranks.told([self.verdict is None, self._together(batch)], "step")
        if len({together for _, together in told}) > 1:
            return Cause("sharded", "ranks whose steps put other things together", self.module)
        if self.verdict is None or any(is_unproven for is_unproven, _ in told):
            self.verdict = None
            self.verdict = (self.ranks.agreed(reason_against(self, plans)),)
        return self.verdict[0]

    def _together(self, batch: int) -> int:
        """Return a number for what ranks put together in a step of so many sequences, and in which order."""
        if batch not in self._joint:
            recording = self.recording(batch, 1)
            found = [(each.name, recording.fact(each.out)) for each in recording.calls if each.op in COLLECTIVES]
            facts = [(name, tuple(fact.shape), fact.dtype) for name, fact in found]
            self._joint[batch] = zlib.crc32(repr(facts).encode())
        return self._joint[batch]


class RecordedOverRanks(Recorded):
    """What takes the place of an architecture for models that have none and are spread over processes.

    Attributes:
        ranks: the processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        super().__init__(model)
        self.ranks = ranks

    def _part(self, model: nn.Module) -> ShardedRecordedModel:
        return ShardedRecordedModel(self, model)
