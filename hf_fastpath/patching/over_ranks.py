"""patch() and unpatch() of a model that is spread over processes: all ranks do it alike, or none does."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .. import __version__, compat, switches
from ..decode.calls.pass_table import switched_off
from ..decode.ranks import process_group as over
from ..decode.ranks.process_group import Ranks
from ..decode.ranks.rank_arguments import state_of_run
from ..errors import RankError, lacking
from ..options import Options
from .state import patched_model, state_of


def check_transformers() -> None:
    """Refuse a release of transformers that has moved what the package uses.

    Raises:
        UnsupportedModelError: it has.
    """
    if (missing := compat.what_is_missing()) is not None:
        raise lacking(missing)


@contextmanager
def on_all_ranks(given: Any, what: str) -> Iterator[None]:
    """Be in a call that all ranks make if the model is spread, for the length of a ``with`` block.

    Args:
        given: the model, or a wrapper of it.
        what: the call, as the user writes it.

    Raises:
        UnsupportedModelError: transformers has moved what the package uses.
    """
    check_transformers()
    ranks = _ranks_of(given)
    if ranks is None:
        yield
        return
    with ranks.call(what):
        yield


def check_options(model: nn.Module, options: Options, puts_weights: bool) -> None:
    """Compare what ranks give to ``patch()``, and what they find.

    Raises:
        RankMismatch: they differ.
        ValueError: ``HF_FASTPATH_PASSES`` names no pass, or one that cannot be switched off.
    """
    switched_off()
    if (ranks := _ranks_of(model)) is None:
        return
    facts = {each.name: _text(getattr(options, each.name)) for each in dataclasses.fields(options)}
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    facts |= {"names and shapes of the weights": zlib.crc32(repr(shapes).encode()), "version": __version__}
    facts |= {f"{name} in the environment": value for name, value in switches.all_set().items()}
    facts |= {"is patched already": state_of(model) is not None, "weights come from a file": puts_weights}
    ranks.check_arguments("patch()", facts | state_of_run(model))


def check_done(model: nn.Module) -> None:
    """Wait until all ranks have patched the model.

    Raises:
        RankError: a rank has failed, or has not come in time.
    """
    if (ranks := _ranks_of(model)) is not None:
        ranks.told([], "end")


@contextmanager
def undone_on_all_ranks(model: nn.Module) -> Iterator[None]:
    """Wait until all ranks are at ``unpatch()``. If the ranks have lost each other, each goes on by itself.

    Raises:
        RankError: a rank makes another call; or a rank has not come in time, and this one has gone on by itself.
    """
    ranks = _ranks_of(model)
    if ranks is None or ranks.are_lost:
        yield
        return
    with ranks.notices.call("unpatch()", over.PATIENCE):
        late = None
        try:
            ranks.told([], "start")
        except RankError as error:
            if not ranks.are_lost:
                raise
            late = error if ranks.notices.has_waited(error) else None
        yield
        if late is not None:
            raise late


def _ranks_of(given: Any) -> Ranks | None:
    if not isinstance(given, nn.Module):
        return None
    model = patched_model(given)
    return Ranks(compat.rank_group(model)) if compat.is_tensor_parallel(model) else None


def _text(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)
