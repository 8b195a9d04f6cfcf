"""What patch() keeps about one model while it is patched."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import compat, reasons
from ..batching.sharing import Sharing
from ..cache.fastpath_cache import FastpathCache
from ..decode.loops.eligibility import uncovered_reason
from ..decode.loops.own_loop import OwnLoops
from ..decode.loops.patched import STATE_KEY
from ..decode.loops.prefixes import Prefixes
from ..decode.plans.plan_cache import PlanCache
from ..decode.ranks.process_group import Ranks
from ..errors import FallbackError
from ..forks import after_fork
from ..native.huge_pages import Move
from ..options import Options
from ..stats import Stats
from .aside import Aside
from .ledger import Ledger
from .module_patch import has_layers_of_ours
from .plan import PatchPlan

_states: weakref.WeakSet[PatchState] = weakref.WeakSet()


@after_fork
def _forget_other_threads() -> None:
    for state in list(_states):
        state.forget_other_threads()


class Texts(threading.local):
    """What a thread's forward is of, while a patched decoder runs.

    Attributes:
        aside: why all modules run stock code, or None.
        over_cache: whether the decoder was given a FastpathCache.
        by_stock: all modules run stock code, and the reason is counted.
        was_by_stock: so they did in the decoder that ran last, which is the one before a head.
    """

    aside: str | None = None
    over_cache = False
    by_stock = False
    was_by_stock = False


@dataclass(eq=False)
class PatchState:
    """Everything ``patch()`` keeps about one model. The model's ``__dict__`` and its modules' patches hold the state.

    Attributes:
        options: as given to ``patch()``.
        decided: the plan that ``patch()`` made; None until then.
        ledger: what was put into the model, and how it was before.
        plans: decode plans and programs.
        own_loops: the plans of loops that call the model's forward for every token.
        stats: what has happened since.
        enabled: False while ``verify`` runs stock code.
        is_compared: while ``verify`` runs patched modules, these run forwards of ours even where stock's are faster.
        huge_pages: what moves the weights in host memory into pages of 2 MB, or None.
        lost: why ``unpatch()`` cannot bring the model's own weights back, or None.
        door: the lock that calls of ``generate()`` pass; patch() and unpatch() hold it while they change the model.
        waiting: threads that wait at the door and are not in yet.
        texts: what each thread's forward is of.
        aside: takes our forwards out of the modules while stock's loop runs.
        prefixes: what is kept of texts, or None.
        sharing: the calls that share steps.
        has_trained: whether a forward with gradients has run. From then on forwards over whole texts run stock code,
            with and without gradients, so that a log-probability is the same in both.
        torch_percent: share of a step in PyTorch's calls, once ``profile()`` has measured it; else None.
    """

    options: Options
    decided: PatchPlan | None = None
    ledger: Ledger = field(default_factory=Ledger)
    plans: PlanCache = field(default_factory=PlanCache)
    own_loops: OwnLoops = field(default_factory=OwnLoops)
    stats: Stats = field(default_factory=Stats)
    enabled: bool = True
    is_compared: bool = False
    huge_pages: Move | None = None
    lost: str | None = None
    door: Any = field(default_factory=threading.RLock)
    waiting: set[int] = field(default_factory=set)
    texts: Texts = field(default_factory=Texts)
    has_trained: bool = False
    torch_percent: float | None = None

    def __post_init__(self) -> None:
        self.aside = Aside(self.ledger)
        self.sharing = Sharing(self.options, self.plans, self.stats)
        limit = self.options.prefix_cache
        self.prefixes = None if limit is None else Prefixes(limit)
        self.stats.prefixes = None if self.prefixes is None else self.prefixes.counts
        _states.add(self)

    @property
    def model(self) -> nn.Module | None:
        """The model that was given to ``patch()``."""
        return self.ledger.first

    @property
    def ranks(self) -> Ranks | None:
        """The processes over which the model is spread, or None if this one has all of it."""
        return None if self.decided is None else self.decided.ranks

    @property
    def loop_reason(self) -> str | None:
        """Why ``generate()`` always uses transformers' loop on this model, or None."""
        return None if self.decided is None else self.decided.loop_reason

    @property
    def generates(self) -> bool:
        """Whether the model's ``generate()`` passes through our code, even if only to be counted."""
        return self.decided is not None and self.decided.generates

    @property
    def has_patched_modules(self) -> bool:
        """Whether any module has a forward of ours."""
        return self.decided is not None and bool(self.decided.patched)

    def serves(self, model: nn.Module, part: Any) -> bool:
        """Whether a FastpathCache serves a model as it is: our loop uses it, or every layer's attention does."""
        if self.decided is not None and self.loop_reason is not None:
            return has_layers_of_ours(model, self.decided)
        reason = None if part is None else uncovered_reason(self.loop_reason, model, part)
        return part is not None and reason is None and self.plans.reason_of(part) is None

    def own_cache(self, model: nn.Module, batch: int) -> FastpathCache | None:
        """Make a cache for a text that the user's own loop goes on with, or return None if no plan would serve it.

        Where a plan could be made when the model was last looked at, it is not looked at again before the first step.
        """
        snapshot = self.plans.snapshot  # another thread may replace it at any time
        is_known = snapshot is not None and snapshot.reason is None
        part = snapshot.part if snapshot is not None and is_known else self.plans.part_of(model)
        if part is None or batch > part.max_batch or not (is_known or self.serves(model, part)):
            return None
        made = FastpathCache(model.config, self.options.kv_dtype, self.options.page_size)
        del made.layers[len(part.kinds) :]  # a config may tell of more layers than its decoder has
        return made

    def decide(self, plan: PatchPlan) -> None:
        """Take on the plan that :func:`.analyse.analyse` made."""
        self.decided = plan
        self.plans.family = plan.family

    def fall_back(self, reason: str) -> None:
        """Count a call of stock code.

        Raises:
            FallbackError: the model was patched with ``strict=True``, and the reason is not the user's own choice.
        """
        self.stats.note(reason, self.model)
        if self.options.strict and self.enabled and reason != "module_disabled":
            meaning, remedy = reasons.REASONS[reason]
            what = reasons.named(reason, self.model).what
            what = f" ({what})" if what else ""
            raise FallbackError(
                f"stock code would run, {reason}{what}: {meaning}; strict=True forbids it. What helps: {remedy}"
            )

    def come_in(self) -> None:
        """Wait for another thread that is at patch() or unpatch(); let modules have our forwards again."""
        here = threading.get_ident()
        self.waiting.add(here)
        try:
            with self.door:
                self.waiting.discard(here)  # the next thread that closes the door sees that this one is in
        finally:
            self.waiting.discard(here)
        self.aside.come_back()

    def forget_other_threads(self) -> None:
        """Forget what threads of another process held and did."""
        self.door, self.waiting = threading.RLock(), set()
        self.plans.forget_other_threads()
        self.own_loops.forget_other_threads()
        self.sharing.forget_other_threads()
        self.aside.forget_other_threads()
        if self.prefixes is not None:
            self.prefixes.forget_other_threads()
        self.stats.renew_lock()


def state_of(model: nn.Module) -> PatchState | None:
    """Return the patch state of ``model``, or None if it is not patched."""
    return vars(model).get(STATE_KEY) if isinstance(model, nn.Module) else None


def patched_model(model: nn.Module) -> nn.Module:
    """Return ``model`` if it was given to ``patch()`` itself, else the model inside it that generates."""
    return model if state_of(model) is not None else compat.generating_model(model)
