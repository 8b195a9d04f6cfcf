"""patch(model): find the architecture, decide what can be fused, bind instances; reversible and transactional."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from . import compat, huge_pages, loader, selftest, structural
from .architecture import Architecture, architectures
from .bindings import bind, bind_copying, bind_forward, bind_value, claim, undo_bindings
from .cache import FastpathCache
from .coverage import check_anything, check_coverage, check_kernels, check_whole
from .decode import parts, structure
from .decode.structure import MAX_BATCH
from .errors import UnsupportedModelError
from .forwards import FORWARDS, STATE_KEY, decoder, head
from .loops import install_loops, uninstall_loops
from .options import HEADS, Options
from .patch_state import LOOPS, PatchState, patched_model, state_of
from .progress import announced
from .quantization.repacking import repack_checkpoint
from .quantization.replacing import free_originals, no_saving, quantize_as_asked
from .reasons import Cause, named
from .reporting import Report


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
    is_new, end, closed = not state.bindings, time.monotonic() + _PATIENCE, _CLOSED
    while True:
        with state.door:
            try:
                if is_new:
                    install_loops(state, LOOPS)  # calls that begin from here on come to the door
                is_ours, until = claim(state, model) if is_new else state_of(model) is state, time.monotonic() + closed
                while is_ours and (is_run := compat.is_run_elsewhere(model, state.waiting)):
                    if time.monotonic() > until:
                        break
                    time.sleep(_PAUSE)
                if not is_ours or not is_run:
                    yield is_ours
                    return
            except BaseException:
                if is_new:
                    _unbind(state)
                raise
            if is_new:
                _unbind(state)
        if time.monotonic() > end:
            raise RuntimeError(
                f"{function}() waited {_PATIENCE:.0f} s: another thread is inside of generate() or a forward of this "
                f"{type(model).__name__}. Wait for it, then call {function}() again"
            )
        time.sleep(_PAUSE)  # who waits at the door comes in
        closed = min(2 * closed, _CLOSED_LONGEST)


def _patch(model: nn.Module, state: PatchState, quiet: bool, put_weights: Callable[[PatchState], None] | None) -> None:
    """Bind all that is to be fast, and put quantized weights in place."""
    options = state.options
    if options.weights is None and put_weights is None and "loop" in options.ops:
        repack_checkpoint(model, state.replaced, state.removed_hooks, quiet)
    _bind_all(model, state, next(filter(None, map(loader.why_not_native, _devices(model))), None))
    check_coverage(model, state)
    by_structure = next((architecture for architecture in state.known if architecture.like), None)
    due = state.loop_reason is None and selftest.is_due() or by_structure and state.patched
    if due and not getattr(_testing, "active", False):
        with nullcontext() if quiet else announced("trying a small random twin of the model"):
            _self_test(model, by_structure)
    if put_weights is not None:
        put_weights(state)
    elif options.weights is not None:
        quantize_as_asked(model, state.part_of(model), options, state.replaced, quiet)
    if state.replaced and not options.keep_original:
        free_originals(model, state.replaced)
        state.lost = state.lost or "patch(keep_original=False) freed them"
    if state.replaced:
        bind(state, model, "save_pretrained", no_saving)
    if loader.is_native("cpu"):
        with nullcontext() if quiet else announced("moving the weights into pages of 2 MB"):
            state.huge_page_bytes = huge_pages.move_into(
                [*model.parameters(), *(each.packed.quants for each in state.replaced)]
            )
    if not quiet:
        print(report(model))


def _devices(model: nn.Module) -> set[str]:
    """Types of the devices that weights lie on; offloaded ones are "meta" until a hook brings them: each call looks
    where they are."""
    return {parameter.device.type for parameter in model.parameters()} - {"meta"}


def examine(model: nn.Module) -> Report:
    """What ``patch(model)`` would make fast where kernels serve the model's device, and what not and why.

    The model, which may be on the meta device, is left as it was.

    Raises:
        UnsupportedModelError: nothing in the model could be patched.
    """
    state = PatchState(Options.parse())
    try:
        bind_value(state, model, STATE_KEY, state)
        _bind_all(model, state)
        check_anything(model, state)
        return Report.of(state, _loop_reason_now(model, state))
    finally:
        _unbind(state)


def _bind_all(model: nn.Module, state: PatchState, no_kernels: str | None = None) -> None:
    """Bind all that is to be fast, noted so that :func:`_unbind` can undo it; ``no_kernels``: why nothing is."""
    _bind_modules(model, state, no_kernels)
    _bind_generate(model, state)


def _bind_modules(model: nn.Module, state: PatchState, no_kernels: str | None) -> None:
    """Bind our forwards through ``model.apply``, or note why a module keeps its own."""
    names = {id(module): name for name, module in model.named_modules()}
    state.known = structural.known_for(model, architectures())

    def visit(module: nn.Module) -> None:
        found = ((architecture, architecture.part_of(module)) for architecture in state.known)
        architecture, kind = next((pair for pair in found if pair[1] is not None), (None, None))
        if kind is None:
            if (holder := next((each for each in state.known if each.holds_layers(module)), None)) is not None:
                bind_forward(state, decoder, structure.DecoderPart(holder, module))
            return
        if architecture.name != state.architecture:
            architecture.check_classes()
        state.architecture = architecture.name
        part = _make_part(architecture, kind, module)
        reason = None
        if kind not in state.options.ops:
            reason = Cause("module_disabled", f"ops={sorted(state.options.ops)}")
        elif no_kernels is not None:
            reason = Cause(no_kernels, module=module)
        reason = reason or _lasting_reason(part)
        if reason is not None:
            state.declined.append((names[id(module)], kind, named(reason, model)))
            return
        bind_forward(state, FORWARDS[kind], part)
        state.patched[kind] = state.patched.get(kind, 0) + 1

    model.apply(visit)


#: set while the twin of a self-test is patched: it is not tested in turn
_testing = threading.local()


def _self_test(model: nn.Module, by_structure: Architecture | None) -> None:
    """On an untested version of transformers, and a family known by its structure, try our code on a small twin first.

    Raises:
        UnsupportedModelError: the twin does not decode as stock does.
    """
    _testing.active = True
    try:
        difference = selftest.run(model)
    finally:
        _testing.active = False
    if difference is not None:
        if by_structure is not None:
            why = f"{by_structure.name} has no architecture file and was taken for a {by_structure.like}"
        else:
            tested = ", ".join(compat.TESTED_TRANSFORMERS)
            why = f"transformers {compat.transformers_version()} is not among the tested versions ({tested})"
        raise UnsupportedModelError(
            f"{why}, and a small {type(model).__name__} does not decode as stock does: {difference}"
        )


def _make_part(architecture: Architecture, kind: str, module: nn.Module) -> parts.Part:
    if kind == "norm":
        return parts.NormPart(architecture, module)
    if kind == "mlp":
        return parts.feed_forward_part(architecture, module)
    if kind == "attention":
        return parts.AttentionPart(architecture, module, _window(module))
    attention = getattr(module, architecture.layer.attention)
    return structure.LayerPart(architecture, module, _window(attention))


def _window(attention: nn.Module) -> int | None:
    """Sliding window of an attention module, by its place in the config; None of what is none of transformers'."""
    if not hasattr(attention, "config") or not hasattr(attention, "layer_idx"):
        return None
    windows = compat.layer_windows(attention.config)
    return None if windows is None or attention.layer_idx >= len(windows) else windows[attention.layer_idx]


#: reasons that no later call can cure; all others are looked at again at every call
_LASTING = (
    *("unsupported_head_dim", "unsupported_config", "unsupported_activation"),
    *("class_not_supported", "instance_forward", "offloaded"),
)


def _lasting_reason(part: Any) -> str | None:
    """Why a module keeps its stock forward for good, or None."""
    reason = part.reason()
    return reason if reason in _LASTING else None


def _bind_generate(model: nn.Module, state: PatchState) -> None:
    """Give the model our cache and decode loop; one that no architecture covers wholly is only counted."""
    bind_copying(state, model)
    state.loop_reason = _loop_reason(model, state)
    if state.loop_reason is None:
        found = state.part_of(model)
        head_part = parts.HeadPart(found.architecture, found.head)
        if _lasting_reason(head_part) is None:
            bind_forward(state, head, head_part)
    state.generates = compat.uses_generation_mixin_sample(model)
    if state.generates:
        bind(state, model, compat.PREPARE_CACHE, _prepare_cache)
        install_loops(state, LOOPS)
    else:
        uninstall_loops(state)


def _loop_reason(model: nn.Module, state: PatchState) -> str | None:
    """Why ``generate()`` keeps transformers' loop on this model, or None; sets ``state.model_architecture``."""
    if "loop" not in state.options.ops:
        return Cause("module_disabled", f"ops={sorted(state.options.ops)}")
    declined = [reason for *_, reason in state.declined if reason != "module_disabled"]
    if declined:
        missing = next((reason for reason in declined if reason in loader.NO_KERNELS), None)
        return missing or Cause("partial_patch", f"{declined[0]}: {declined[0].what}")
    covering = (a for a in state.known if structure.model_part(a, model) is not None)
    state.model_architecture = next(covering, None)
    if state.model_architecture is None:
        return Cause("class_not_supported", module=model)
    narrow = [window for window in state.part_of(model).windows if window is not None and window < compat.MIN_WINDOW]
    if narrow:
        return Cause("unsupported_config", f"sliding_window={narrow[0]}", model)
    if compat.uses_generation_mixin_sample(model):
        return None
    return Cause("custom_sample", compat.name_of(getattr(type(model), "_sample", type(model))))


def _loop_reason_now(model: nn.Module, state: PatchState) -> str | None:
    """Why ``generate()`` would use transformers' loop on this model as it is, or None."""
    if state.loop_reason is not None:
        return state.loop_reason
    part = state.part_of(model)
    if part is None:
        return Cause("class_not_supported", module=model)
    overridden = compat.overridden_method(model, part.architecture.module)
    return part.reason() if overridden is None else Cause("generation_method", overridden)


def _prepare_cache(self: nn.Module, generation_config: Any, model_kwargs: dict, generation_mode: Any, *rest, **named):
    """Like the class's own, with a FastpathCache where that would make a plain ``DynamicCache``."""
    state: PatchState | None = vars(self).get(STATE_KEY)
    users_own = model_kwargs.get(compat.CACHE) is not None
    result = compat.prepare_cache_stock(self, generation_config, model_kwargs, generation_mode, *rest, **named)
    if state is None or not state.enabled:  # None: another thread has just unpatched it
        return result
    state.stats.new_call()
    ours = compat.is_sample_mode(generation_mode) or (compat.is_assisted_mode(generation_mode) and state.generates)
    if not ours:
        state.fall_back(
            state.loop_reason or Cause("generation_mode", str(getattr(generation_mode, "value", generation_mode)))
        )
    made = model_kwargs.get(compat.CACHE)
    plain = generation_config.cache_implementation in (None, "dynamic") and type(made) is compat.DynamicCache
    if plain and not users_own and _takes_our_cache(self, state):
        made = FastpathCache.from_dynamic(made, state.options.kv_dtype, state.options.page_size)
        model_kwargs[compat.CACHE] = made
    if isinstance(made, FastpathCache):
        if not generation_config.is_assistant:  # which is asked for a few tokens at a time
            made.expect(generation_config.max_length)
        part = state.part_of(self) if state.loop_reason is None else None
        if part is not None and part.is_cast_down:
            state.stats.note("autocast_left_out")
        if made.page_counts is not None:
            state.stats.pages = made.page_counts
            if any(made.is_sliding):
                state.stats.note(Cause("window_not_paged", f"page_size={state.options.page_size}"))
    return result


def _takes_our_cache(model: nn.Module, state: PatchState) -> bool:
    """Whether a FastpathCache serves this model: our loop uses it, or every layer's attention does."""
    if state.loop_reason is None:
        return compat.overridden_method(model, state.model_architecture.module) is None
    windows = compat.layer_windows(model.config)
    return windows is not None and len(windows) in (state.patched.get("attention"), state.patched.get("layer"))


def _unbind(state: PatchState) -> None:
    state.plans.clear()
    state.snapshot = None
    while state.replaced:
        state.replaced.pop().undo()
    while state.removed_hooks:
        state.removed_hooks.pop().undo()
    uninstall_loops(state)
    undo_bindings(state)


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
            _unbind(state)
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


@contextmanager
def paused(model: nn.Module) -> Iterator[nn.Module]:
    """Run stock code on a patched model for the length of a ``with`` block."""
    state = state_of(model)
    state.enabled = False
    try:
        yield model
    finally:
        state.enabled = True


def report(model: nn.Module) -> Report:
    """What is fast on ``model``, what is stock and why, and what happened since ``patch()``.

    Raises:
        ValueError: the model is not patched.
    """
    model = patched_model(model)
    state = state_of(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched: call hf_fastpath.patch(model) first")
    return Report.of(state, _loop_reason_now(model, state))
