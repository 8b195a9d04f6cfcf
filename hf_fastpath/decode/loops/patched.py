"""What loops and forwards need to know of a patched model; ``patching.state.PatchState`` implements it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ...options import Options
from ...stats import Stats
from ..plans.plan_cache import PlanCache
from ..ranks.process_group import Ranks

#: where a model that was given to ``patch()`` keeps its state
STATE_KEY = "_hf_fastpath"


class Patched(Protocol):
    """The state of a patched model.

    Attributes:
        options: as given to ``patch()``.
        plans: decode plans and programs made so far.
        stats: what has happened.
        prefixes: what is kept of texts (:class:`.prefixes.Prefixes`), or None.
        sharing: the calls that share steps (``batching.sharing.Sharing``).
        enabled: False while ``verify`` runs stock code.
        is_compared: while ``verify`` runs patched modules, these run forwards of ours even where stock's are faster.
    """

    options: Options
    plans: PlanCache
    stats: Stats
    prefixes: Any
    sharing: Any
    enabled: bool
    is_compared: bool

    @property
    def model(self) -> nn.Module | None:
        """The model that was given to ``patch()``."""

    @property
    def ranks(self) -> Ranks | None:
        """The processes over which the model is spread, or None if this one has all of it."""

    @property
    def loop_reason(self) -> str | None:
        """Why ``generate()`` always uses transformers' loop on this model, or None."""

    @property
    def generates(self) -> bool:
        """Whether the model's ``generate()`` passes through our code, even if only to be counted."""

    @property
    def has_patched_modules(self) -> bool:
        """Whether any module has a forward of ours."""

    def serves(self, model: nn.Module, part: Any) -> bool:
        """Whether a FastpathCache serves a model as it is: our loop uses it, or every layer's attention does."""

    def aside(self, model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """Let the model's modules run stock's forwards for the length of a ``with`` block, unless ours are faster."""

    def fall_back(self, reason: str) -> None:
        """Count a call of stock code.

        Raises:
            FallbackError: the model was patched with ``strict=True``, and the reason is not the user's own choice.
        """

    def come_in(self) -> None:
        """Wait for another thread that is at patch() or unpatch()."""


@contextmanager
def paused(model: nn.Module) -> Iterator[nn.Module]:
    """Run stock code for the length of a ``with`` block on a model that may be patched."""
    state: Patched | None = vars(model).get(STATE_KEY)
    was_enabled = state is not None and state.enabled
    if state is not None:
        state.enabled = False
    try:
        yield model
    finally:
        if state is not None:
            state.enabled = was_enabled


@contextmanager
def compared(model: nn.Module) -> Iterator[None]:
    """Let a patched model's modules run our forwards for the length of a ``with`` block, faster or not."""
    state: Patched = vars(model)[STATE_KEY]
    was_compared, state.is_compared = state.is_compared, True
    try:
        yield
    finally:
        state.is_compared = was_compared
