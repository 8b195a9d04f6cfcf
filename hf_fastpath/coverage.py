"""What patch() says where it could patch nothing, or not all of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from . import compat, loader, structural
from .architecture import architectures
from .errors import UnsupportedModelError
from .reasons import REASONS

if TYPE_CHECKING:
    from .patch_state import PatchState


def _declined(state: PatchState) -> tuple[str, str, list[str]]:
    """Which modules were declined; what helps; the reason codes that the user has not asked for."""
    why = "; ".join(f"{name} ({kind}): {reason}" for name, kind, reason in state.declined[:6])
    partial = sorted({reason for *_, reason in state.declined} - {"module_disabled", *loader.NO_KERNELS})
    remedies = "; ".join(f"{reason}: {REASONS[reason].remedy}" for reason in partial)
    return why, f" What helps: {remedies}." if partial else "", partial


def check_whole(model: nn.Module) -> None:
    """Fail if this process has only a part of the model's weights.

    Raises:
        UnsupportedModelError: names how they are spread.
    """
    how = compat.sharding(model)
    if how is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its weights are spread over processes ({how}). "
            f"What helps: sharded: {REASONS['sharded'].remedy}."
        )


def check_kernels(devices: Iterable[str], strict: bool) -> None:
    """Say so where there are no compiled kernels for the devices of a model, so that all of it stays stock's.

    Raises:
        UnsupportedModelError: there are none. With HF_FASTPATH_NATIVE=0, which asks for just that, a warning says so.
    """
    cause = loader.cause(devices)
    if cause is None:
        return
    if strict or not loader.switched_off():
        hint = "HF_FASTPATH_NATIVE=0 runs stock code instead; `python -m hf_fastpath info` says what each device has"
        raise UnsupportedModelError(f"{cause}\n{hint}")
    warnings.warn(f"hf_fastpath: {cause}\nEvery module runs stock code.", stacklevel=4)


def check_anything(model: nn.Module, state: PatchState) -> None:
    """Fail if nothing was patched.

    Raises:
        UnsupportedModelError: says what was looked for, and why what was found is declined.
    """
    if state.patched or state.loop_reason in (None, *loader.NO_KERNELS):
        return
    why, helps, _ = _declined(state)
    if why:
        why += f"; the decode loop: {state.loop_reason}"
    nearest = structural.match(model)
    looked_for = ", ".join(f"{a.name} ({a.layer.class_name})" for a in architectures())
    raise UnsupportedModelError(
        f"nothing in this {type(model).__name__} can be patched. Looked for: {looked_for}. "
        + (f"Found, but declined: {why}.{helps}" if why else "None of these is in the model.")
        + ("" if why or nearest is None or not nearest.differences else f" {nearest}")
    )


def check_coverage(model: nn.Module, state: PatchState) -> None:
    """Say so when little or nothing was patched.

    Raises:
        UnsupportedModelError: nothing could be patched, or not all of it with ``strict=True``.
    """
    check_anything(model, state)
    why, helps, partial = _declined(state)
    if partial:
        text = f"{len(state.declined)} modules keep stock code ({', '.join(partial)}): {why}"
        if state.options.strict:
            raise UnsupportedModelError(f"{text}. strict=True forbids that.{helps}")
        warnings.warn(f"hf_fastpath: {text}.{helps} See report(model).", stacklevel=3)
