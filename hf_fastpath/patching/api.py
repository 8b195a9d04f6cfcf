"""patch(model): find the architecture, decide what can be fused, bind instances; reversible and transactional."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.structure import MAX_BATCH
from ..native import huge_pages, loader
from ..options import HEADS, Options
from ..progress import announced
from ..quantization.repacking import repack_checkpoint
from ..quantization.replacing import free_originals, no_saving
from . import selftest
from .analyse import analyse
from .apply import apply, claim, quantize, undo
from .coverage import check_coverage, check_kernels, check_whole
from .reporting import Report
from .state import PatchState, patched_model, state_of


def patch(
    model: nn.Module,
    *,
    kv_dtype: str | torch.dtype = "auto",
    weights: str | None = None,
    ops: str | Iterable[str] = "all",
    strict: bool = False,
    max_batch_size: int = MAX_BATCH,
    lm_head: str = HEADS[0],
    keep_original: bool = True,
    quiet: bool = False,
    page_size: int | None = None,
) -> nn.Module:
    """Speed up ``model`` in place: its modules' forwards, its KV cache and its ``generate()`` loop.

    Classes and weights are not touched, except that Linux is asked to keep weights in host memory in pages of 2 MB, at
    the same addresses; ``unpatch(model)`` restores the model bit for bit. What cannot be sped up runs stock code and is
    counted with a reason (``report(model)``).

    Args:
        model: a transformers causal LM on the CPU or a CUDA device; or what wraps one (PEFT, DDP, ``torch.compile``):
            the model inside is patched.
        kv_dtype: storage type of the KV cache: ``"auto"`` (the model's own), float32, float16 or bfloat16; or
            ``"int8"`` or ``"fp8"`` (e4m3) with a scale for every head and token.
        weights: None for the model's own, or a format to quantize the decoder layers' weights to, layer by layer:
            ``"int8"``, ``"fp8"``, ``"int4"`` or ``"int4_g32"`` (see ``quantization.FORMATS``).
        lm_head: with ``weights``, the head: ``"fp16"`` leaves it as it is, ``"int8"`` quantizes it.
        keep_original: with ``weights``, keep the model's own in host memory for ``unpatch()``; False frees them.
        ops: ``"all"``, or names out of ``norm``, ``mlp``, ``attention``, ``layer``, ``loop``.
        strict: raise FallbackError wherever stock code would run instead of ours.
        max_batch_size: sequences the decode loop takes at most, 1 to 64.
        quiet: print no report.
        page_size: positions of a page, a power of two from 16 on: ``generate()`` then keeps keys and values in pages
            that sequences share, see ``FastpathCache``. None: one buffer a layer.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: nothing in the model could be patched, there are no compiled kernels for its device, or
            its architecture file names a class that the installed transformers lacks.
        ValueError: an argument is off, or the model is patched already with other options.
        TypeError: ``model`` is not a module.
        RuntimeError: another thread runs the model, and has not left its ``generate()`` or forward for a minute.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch() got {type(model).__name__}, expected a transformers model (torch.nn.Module)")
    options = Options.parse(kv_dtype, weights, ops, strict, max_batch_size, lm_head, keep_original, page_size)
    return patch_with(model, options, quiet)


def patch_with(
    model: nn.Module,
    options: Options,
    quiet: bool,
    put_weights: Callable[[PatchState], None] | None = None,
) -> nn.Module:
    """:func:`patch` with checked options.

    Args:
        put_weights: puts quantized weights in place, instead of what the options ask for.
    """
    given, model = model, patched_model(model)
    while not _is_patched(model, options):
        check_whole(given)
        devices = _devices(model)
        for device in sorted(devices):
            loader.ensure(device, None if quiet else print)
        check_kernels(devices, options.strict)
        state = PatchState(options)
        with _alone(model, state, "patch") as is_ours:
            if is_ours:
                _patch(model, state, quiet, put_weights)
                return given  # nothing runs behind it: what interrupts patch() finds it undone or done
    return given


def _is_patched(model: nn.Module, options: Options) -> bool:
    """Whether a model is patched, with these options.

    Raises:
        ValueError: it is patched with others.
    """
    existing = state_of(model)
    if existing is None:
        return False
    with existing.door:  # another thread may be at patch(), which may fail, or at unpatch()
        if state_of(model) is not existing:
            return False
        if existing.options != options:
            raise ValueError(f"the model is patched with {existing.options}: unpatch(model) first, then patch it anew")
        return True


#: seconds that patch() and unpatch() wait for other threads, where a callback may be waiting for this one in turn
_PATIENCE = 60.0
#: seconds for which they close the door to calls at a time, first and at most: what is inside may wait for such a call
_CLOSED, _CLOSED_LONGEST = 0.05, 2.0
#: seconds between two looks at other threads
_PAUSE = 0.002


@contextmanager
def _alone(model: nn.Module, state: PatchState, function: str) -> Iterator[bool]:
    """Wait until no other thread runs ``model``, and let calls that come wait, for the length of a ``with`` block.

    What this thread itself is in the middle of goes on with the model as it becomes.

    Args:
        state: of the model; of one that is not patched yet, what it gets.
        function: who waits.

    Yields:
        Whether the model has this state: another thread may have been faster.

    Raises:
        RuntimeError: another thread has not left the model in time.
    """
    is_new, end, closed = state.model is None, time.monotonic() + _PATIENCE, _CLOSED
    while True:
        with state.door:
            try:
                is_ours, until = claim(model, state) if is_new else state_of(model) is state, time.monotonic() + closed
                while is_ours and (is_run := compat.is_run_elsewhere(model, state.waiting)):
                    if time.monotonic() > until:
                        break
                    time.sleep(_PAUSE)
                if not is_ours or not is_run:
                    yield is_ours
                    return
            except BaseException:
                if is_new:
                    undo(state)
                raise
            if is_new:
                undo(state)
        if time.monotonic() > end:
            raise RuntimeError(
                f"{function}() waited {_PATIENCE:.0f} s: another thread is inside of generate() or a forward of this "
                f"{type(model).__name__}. Wait for it, then call {function}() again"
            )
        time.sleep(_PAUSE)  # who waits at the door comes in
        closed = min(2 * closed, _CLOSED_LONGEST)


def _patch(model: nn.Module, state: PatchState, quiet: bool, put_weights: Callable[[PatchState], None] | None) -> None:
    """Decide, then bind all that is to be fast, and put quantized weights in place."""
    options, ledger = state.options, state.ledger
    if options.weights is None and put_weights is None and "loop" in options.ops:
        repack_checkpoint(model, ledger.replaced, ledger.removed_hooks, quiet)
    plan = analyse(model, options, next(filter(None, map(loader.why_not_native, _devices(model))), None))
    check_coverage(plan)
    if selftest.is_due(plan):
        with nullcontext() if quiet else announced("trying a small random twin of the model"):
            selftest.check(plan)
    if put_weights is None and plan.refusal is not None:
        raise ValueError(plan.refusal)
    apply(plan, state)
    if put_weights is not None:
        put_weights(state)
    elif plan.replacements:
        quantize(plan, state, quiet)
    if ledger.replaced and not options.keep_original:
        free_originals(model, ledger.replaced)
        state.lost = state.lost or "patch(keep_original=False) freed them"
    if ledger.replaced:
        ledger.bind(model, "save_pretrained", no_saving)
    if loader.is_native("cpu"):
        with nullcontext() if quiet else announced("moving the weights into pages of 2 MB"):
            state.huge_page_bytes = huge_pages.move_into(
                [*model.parameters(), *(each.packed.quants for each in ledger.replaced)]
            )
    if not quiet:
        print(report(model))


def _devices(model: nn.Module) -> set[str]:
    """Types of the devices that weights lie on; offloaded ones are "meta" until a hook brings them: each call looks
    where they are."""
    return {parameter.device.type for parameter in model.parameters()} - {"meta"}


def unpatch(model: nn.Module) -> nn.Module:
    """Undo ``patch(model)``: every module is as it was before.

    Waits for calls of other threads to end. Called from a callback of ``generate()``, it counts from that call's next
    token on.

    Returns:
        The same model; one that is not patched is returned as it is.

    Raises:
        ValueError: the model's own weights are gone.
        RuntimeError: another thread runs the model, and has not left its ``generate()`` or forward for a minute.
    """
    inside = patched_model(model)
    state = state_of(inside)
    if state is None:
        return model
    if state.lost is not None:
        raise ValueError(f"unpatch() cannot bring the model's own weights back: {state.lost}")
    with _alone(inside, state, "unpatch") as is_ours:
        if is_ours:
            undo(state)
    return model


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """``patch(model, **options)`` for the length of a ``with`` block. A model that was patched before stays so."""
    was_patched = state_of(patched_model(model)) is not None
    patch(model, **options)
    try:
        yield model
    finally:
        if not was_patched:
            unpatch(model)


def report(model: nn.Module) -> Report:
    """What is fast on ``model``, what is stock and why, and what happened since ``patch()``.

    Raises:
        ValueError: the model is not patched.
    """
    model = patched_model(model)
    state = state_of(model)
    if state is None or state.decided is None:
        raise ValueError(f"this {type(model).__name__} is not patched: call hf_fastpath.patch(model) first")
    part = state.plans.part_of(model) if state.loop_reason is None else None
    return Report.of(state.decided, part, state.stats, state.huge_page_bytes)
