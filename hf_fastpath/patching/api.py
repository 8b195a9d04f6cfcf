"""patch(model): find the architecture, decide what can be fused, bind instances; reversible and transactional."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.loops.generate_calls import agreed_reason
from ..native import huge_pages, loader
from ..options import HEADS, USUAL_BATCH, Options
from ..progress import announced
from ..reasons import explained, named
from ..recording.family import Recorded
from ..recording.kept_recordings import taking_from
from ..replacing.model_methods import methods
from ..replacing.quantizing import free_originals
from ..replacing.repacking import repack_checkpoint
from . import selftest
from .analyse import analyse
from .apply import apply, claim, keep_recording, quantize, undo
from .coverage import check_coverage, check_kernels, check_whole
from .families import DescribedOrRecorded
from .over_ranks import check_done, check_options, check_transformers, on_all_ranks, undone_on_all_ranks
from .reporting import Report
from .saved_plan import read_plan, tell
from .state import PatchState, patched_model, state_of


def patch(
    model: nn.Module,
    *,
    kv_dtype: str | torch.dtype = "auto",
    weights: str | None = None,
    ops: str | Iterable[str] = "all",
    strict: bool = False,
    max_batch_size: int = USUAL_BATCH,
    lm_head: str = HEADS[0],
    keep_original: bool = True,
    quiet: bool = False,
    page_size: int | None = None,
    prefix_cache: int | str | None = None,
    share_steps: bool = False,
    plan: str | os.PathLike | None = None,
) -> nn.Module:
    """Speed up ``model`` in place: its modules' forwards, its KV cache and its ``generate()`` loop.

    Classes and weights are not touched, except that Linux is asked to keep weights in host memory in pages of 2 MB, at
    the same addresses; ``unpatch(model)`` restores the model bit for bit. A module or call that cannot be sped up runs
    stock code and is counted with a reason (``report(model)``).

    Args:
        model: a transformers causal LM on the CPU or a CUDA device, also one that reads images or sound, or an
            encoder-decoder; or a wrapper of one (PEFT, DDP, ``torch.compile``), of which the model inside is patched.
        kv_dtype: storage type of the KV cache: ``"auto"`` (the model's own), float32, float16 or bfloat16; or
            ``"int8"`` or ``"fp8"`` (e4m3) with a scale for every head and token.
        weights: None for the model's own, or a format to quantize the decoder layers' weights to, layer by layer:
            a name of ``quantization.FORMATS``, such as ``"int8"`` or ``"int4_g32"``. What reads images or sound, an
            encoder, and what makes keys and values of its output stay as they are.
        lm_head: with ``weights``, the head: ``"fp16"`` leaves it as it is, ``"int8"`` quantizes it.
        keep_original: with ``weights``, keep the model's own weights in host memory for ``unpatch()``; with False, free
            them.
        ops: ``"all"``, or names out of ``norm``, ``mlp``, ``attention``, ``layer``, ``loop``.
        strict: raise FallbackError wherever stock code would run instead of our code.
        max_batch_size: sequences the decode loop takes at most, 1 to 256.
        quiet: print no report. Else it goes to stderr.
        page_size: positions of a page, a power of two from 16 on: ``generate()`` then keeps keys and values in pages
            that sequences share, see ``FastpathCache``. With None, every layer has one buffer.
        prefix_cache: bytes, such as ``"2GB"``, for what ``generate()`` has made of texts: a prompt that begins as an
            earlier text did is read from there on. With None, nothing is kept of a call.
        share_steps: calls of ``generate()`` that run at once, in several threads, share steps of a model on a CPU (see
            ``batch``). A call that runs alone is as it is without.
        plan: a directory that ``save_plan()`` has written: recorded steps are taken from there. If code, versions or
            values of the model differ, there is a warning that names them, and the steps are recorded.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: nothing in the model could be patched, there are no compiled kernels for its device, or
            its architecture file names a class that the installed transformers lacks.
        ValueError: an argument or ``HF_FASTPATH_PASSES`` has no valid value, or the model is patched already with other
            options.
        RankError: the model is spread over processes, and another one was given other options, has failed, or has not
            come to its patch() in time; the model is as it was.
        TypeError: ``model`` is not a module.
        RuntimeError: another thread runs the model, and has not left its ``generate()`` or forward for a minute.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch() got {type(model).__name__}, expected a transformers model (torch.nn.Module)")
    with on_all_ranks(model, "patch()"):
        options = Options.parse(
            *(kv_dtype, weights, ops, strict, max_batch_size, lm_head, keep_original),
            *(page_size, prefix_cache, share_steps),
        )
        if plan is None:
            return patch_with(model, options, quiet)
        saved = read_plan(plan)
        with taking_from(saved):
            patch_with(model, options, quiet)
        tell(saved)
        return model


def patch_with(
    model: nn.Module,
    options: Options,
    quiet: bool,
    put_weights: Callable[[PatchState], None] | None = None,
) -> nn.Module:
    """Do what :func:`patch` does, with options that are already checked.

    Args:
        put_weights: puts quantized weights in place, instead of what the options ask for.
    """
    check_transformers()  # load_packed() comes in here
    with compat.without_foreign_modes():
        return _patch_alone(model, options, quiet, put_weights)


def _patch_alone(
    given: nn.Module, options: Options, quiet: bool, put_weights: Callable[[PatchState], None] | None
) -> nn.Module:
    """Do what :func:`patch_with` does, while no mode of PyTorch's looks on."""
    model = patched_model(given)
    check_options(model, options, put_weights is not None)
    while not _is_patched(model, options):
        check_whole(given)
        check_kernels(_devices(model), options.strict, quiet)
        state = PatchState(options)
        with _alone(model, state, "patch") as is_ours:
            if is_ours:
                _patch(model, state, quiet, put_weights)
                return given  # no statement follows: an interrupted patch() is either undone or done
    return given


def _is_patched(model: nn.Module, options: Options) -> bool:
    """Whether a model is patched with these options.

    Raises:
        ValueError: the model is patched with other options.
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


#: seconds that patch() and unpatch() wait for other threads; there is a limit because a callback in such a thread may
#: in turn be waiting for this thread
_PATIENCE = 60.0
#: seconds for which patch() and unpatch() keep the door closed to new calls at a time, at first and at most; the door
#: opens again because a call that already runs may wait for one that is kept out
_CLOSED, _CLOSED_LONGEST = 0.05, 2.0
#: seconds for which patch() waits for weights to lie in huge pages: small models are there when it returns
_SMALL_MOVE = 0.3
#: seconds between two looks at other threads
_PAUSE = 0.002


@contextmanager
def _alone(model: nn.Module, state: PatchState, function: str) -> Iterator[bool]:
    """Wait until no other thread runs ``model``, and keep new calls waiting for the length of a ``with`` block.

    A call that this thread itself is in the middle of goes on with the changed model.

    Args:
        state: the state of the model, or the state that a model which is not patched yet is to get.
        function: name of the function that waits, for the error.

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
        time.sleep(_PAUSE)  # threads that wait at the door come in meanwhile
        closed = min(2 * closed, _CLOSED_LONGEST)


def _patch(model: nn.Module, state: PatchState, quiet: bool, put_weights: Callable[[PatchState], None] | None) -> None:
    """Decide what is to be fast, bind all of it, and put quantized weights in place."""
    options, ledger = state.options, state.ledger
    if options.weights is None and put_weights is None and "loop" in options.ops:
        repack_checkpoint(model, ledger.replaced, ledger.removed_hooks, quiet)
    no_kernels = next(filter(None, map(loader.why_not_native, _devices(model))), None)
    plan = analyse(model, options, no_kernels)
    if ledger.replaced and plan.architecture is None and plan.loop_reason is not None:
        ledger.bring_layers_back(model)  # the package's own kernels serve stock's loop
        plan = analyse(model, options, no_kernels)
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
    if ledger.replaced and isinstance(plan.family, (Recorded, DescribedOrRecorded)) and plan.loop_reason is None:
        if (reason := _look_again(plan.family, state)) is not None:
            if put_weights is not None or plan.replacements:
                raise ValueError(_refused(state, reason))
            ledger.bring_layers_back(model)  # of a checkpoint, which stock's loop then runs as it was loaded
            plan.family.first = None
    if ledger.replaced and not options.keep_original:
        free_originals(model, ledger.replaced)
        state.lost = state.lost or "patch(keep_original=False) freed them"
    if ledger.replaced:
        for name, method in methods(ledger.replaced).items():
            ledger.bind(model, name, method)
    if loader.is_native("cpu"):
        weights = [*model.parameters(), *(each.tensor for each in ledger.replaced)]
        state.huge_pages = huge_pages.Move(weights)
        state.huge_pages.wait(_SMALL_MOVE)
    keep_recording(plan, state)
    check_done(model)
    if not quiet:
        print(report(model), file=sys.stderr)


def _look_again(family: Recorded | DescribedOrRecorded, state: PatchState) -> str | None:
    """Record the step of a model whose weights are quantized now, unless a file describes it.

    Returns:
        Why the step is not used, or None.
    """
    family.first = None
    part = family.model_part(state.model)
    assert part is not None, "the family knew the model before its weights were quantized"
    reason = part.reason() or part.proof_reason(state.plans, 1)
    reason = agreed_reason(part.ranks, reason, part, state.plans, 1)
    return None if reason is None else explained(named(reason, part.module))


def _refused(state: PatchState, reason: str) -> str:
    asked = f"weights={state.options.weights!r}, lm_head={state.options.lm_head!r}"
    return f"{asked}: the model's own code does not run with quantized layers as it does without: {reason}"


def _devices(model: nn.Module) -> set[str]:
    """Return the types of the devices that hold weights, or to which hooks bring them.

    An offloaded weight is on "meta" until a hook brings it, so each call looks again at where weights are.
    """
    types = {parameter.device.type for parameter in model.parameters()}
    if "meta" in types:
        types |= {device.type for device in map(compat.execution_device, model.modules()) if device is not None}
    return types - {"meta"}


def unpatch(model: nn.Module) -> nn.Module:
    """Undo ``patch(model)``: every module is as it was before.

    ``unpatch()`` waits until calls of other threads have ended. If a callback of ``generate()`` calls it, it takes
    effect with the next token of that call.

    Returns:
        The same model. A model that is not patched is returned as it is.

    Raises:
        ValueError: the model's own weights are gone.
        RankError: the model is spread over processes, and another one makes another call; or it has not come in
            time, and this process's model alone is as it was. Ranks that have lost each other go by themselves.
        RuntimeError: another thread runs the model, and has not left its ``generate()`` or forward for a minute.
    """
    inside = patched_model(model)
    state = state_of(inside)
    if state is None:
        return model
    if state.lost is not None:
        raise ValueError(f"unpatch() cannot bring the model's own weights back: {state.lost}")
    with undone_on_all_ranks(inside), _alone(inside, state, "unpatch") as is_ours:
        if is_ours:
            undo(state)
    return model


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """Apply ``patch(model, **options)`` for the length of a ``with`` block. A model patched before stays patched."""
    was_patched = state_of(patched_model(model)) is not None
    patch(model, **options)
    try:
        yield model
    finally:
        if not was_patched:
            unpatch(model)


def report(model: nn.Module) -> Report:
    """Say what is fast on ``model``, what is stock and why, and what has happened since ``patch()``.

    Raises:
        ValueError: the model is not patched.
    """
    model = patched_model(model)
    state = state_of(model)
    if state is None or state.decided is None:
        raise ValueError(f"this {type(model).__name__} is not patched: call hf_fastpath.patch(model) first")
    part = state.plans.part_of(model) if state.loop_reason is None else None
    moved = 0 if state.huge_pages is None else state.huge_pages.num_bytes
    step = next((each.program.calls for each in state.plans), ())
    return Report.of(state.decided, part, state.stats, moved, step, state.torch_percent)
