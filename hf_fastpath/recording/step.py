"""record(): run a model's own forward for one step over tensors without data, and write down what it calls."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from .. import compat
from ..decode.calls.named_calls import Call, Norm, Register
from ..ops.decode_attention import MAX_QUERY_LEN
from . import marks, modes
from .errors import LengthTaken
from .first_uses import forget_lengths
from .kinds import other_forwards
from .lines import where
from .masks import ENCODED_PLACES, is_known, sees_all, window_of
from .math_functions import functions_of_lengths
from .noted_code import NotedCode
from .numbers_of_lengths import known, of_known_size
from .recorded_step import EncodedLayer, OwnPadding, Recording, Unrecordable, behind, read_by
from .recorder import Recorder, recorder
from .rehearsal import cache_with_states, layers_alike, rehearse
from .skeleton import Skeleton
from .spread import spread_modules
from .text_lengths import Served


def record(
    skeleton: Skeleton,
    batch: int,
    query_len: int,
    arguments: dict[str, Any] | None = None,
    lengths: tuple[int | None, int | None] = (None, None),
    with_mask: bool = False,
    is_any: bool = False,
    begins: bool = False,
    one_of_alike: bool = False,
    known_of: Served | None = None,
) -> Recording:
    """Record the step of ``query_len`` new tokens for each of ``batch`` sequences.

    Args:
        arguments: what the forward is given besides, by name; tensors hold no data.
        lengths: tokens that the cache says it holds, and places of an encoder's output; None for many.
        with_mask: the forward is given a mask of all tokens, which hides none.
        is_any: the step is to be that of any number of new tokens but 1; ``query_len`` is then a number that no other
            size is, nor a multiple of it. The logits may be those of the last token alone.
        begins: the new tokens are the first of their text.
        one_of_alike: of layers that are alike one runs, which shows what all ask of lengths; the list is not whole.
        known_of: see ``Lengths.new_tokens``.

    Raises:
        Unrecordable: the step cannot be recorded; the message says which line did it.
    """
    most = max(query_len, MAX_QUERY_LEN)
    noting = Recorder(skeleton, *lengths, most=most, begins=begins)
    token = recorder.set(noting)
    given = batch, query_len, arguments or {}, with_mask, is_any, one_of_alike, known_of
    try:
        with skeleton.lock:
            is_plain = False
            try:
                recording, changed = _record_with_care(noting, *given)
                noting.lengths.check()
            except compat.OUT_OF_MEMORY:
                raise
            except Exception as error:  # of the length's type, perhaps
                is_known = (
                    error.is_known if isinstance(error, LengthTaken) else compat.is_of_transformers(skeleton.model)
                )
                if not is_known or is_any:
                    raise
                is_plain, changed = True, ["a length"]
            if changed:  # the first step may have set what the others find
                noting = Recorder(skeleton, *lengths, is_plain, most, begins)
                recorder.set(noting)
                recording, changed = _record_with_care(noting, *given)
            if not is_plain and skeleton.code.asks_for_types():
                _compare_with_plain(noting, skeleton, lengths, given)
            if changed:
                raise Unrecordable(f"{changed[0]}, which the forward reads, and changes with every token")
            recording.is_of_given_length = lengths[0] is not None or begins
            return recording
    except compat.OUT_OF_MEMORY:
        raise
    except Unrecordable as error:
        raise type(error)(f"{error}{where(error)}") from None
    except Exception as error:
        raise Unrecordable(_said(error, noting)) from error
    finally:
        recorder.reset(token)


def _compare_with_plain(noting: Recorder, skeleton: Skeleton, lengths: tuple[int | None, int | None], given: tuple):
    """Refuse a step that is another one if its lengths are of the type ``int``.

    Raises:
        Unrecordable: it is.
    """
    plain = Recorder(skeleton, *lengths, is_plain=True, most=noting.most, begins=noting.begins)
    recorder.set(plain)
    _record(plain, *given)
    for one, other in itertools.zip_longest(noting.trace, plain.trace):
        if one is None or other is None or _numbers_of(one) != _numbers_of(other):
            raise Unrecordable("a way that depends on the type of a length")


def _numbers_of(traced: tuple) -> tuple:
    """Return an op, and all that it was given but tensors."""
    func, args, kwargs = traced
    return func, [known(each) for each in (*args, *kwargs.values()) if not _holds_tensors(each)]


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _record_with_care(noting: Recorder, batch: int, query_len: int, *others: Any) -> tuple[Recording, list[str]]:
    """Return a step, and where Python values are that the step changes and its code reads."""
    skeleton = noting.skeleton
    skeleton.look()
    first_uses = skeleton.code.first_uses
    assert first_uses is not None, "the skeleton has begun with them"
    try:
        with skeleton.code.noting():
            recording = _record(noting, batch, query_len, *others)
    finally:
        kept = first_uses.undo()
        forget_lengths(skeleton.copy.modules())
    for where_, value in kept:
        if not noting.is_constant(value):
            raise Unrecordable(f"{where_}, which is filled on first use with what differs from text to text")
    changed = skeleton.code.that_matter(skeleton.what_differs(), skeleton.copy.modules())
    return recording, changed + skeleton.code.what_differs()


def why_other_in_training(model: nn.Module, code: NotedCode | None = None) -> str | None:
    """Return why a token's step of a model in training is not that of ``model.eval()`` (it draws numbers), or None.

    Args:
        code: notes what runs.
    """
    if not any(module.training for module in model.modules()):
        return None
    try:
        record(Skeleton(model, evaluates=False, code=code), 1, 1)
    except Exception as error:  # nobody has tried this code: anything may be raised
        return str(error)
    return None


def _record(
    noting: Recorder,
    batch: int,
    query_len: int,
    arguments: dict[str, Any],
    with_mask: bool,
    is_any: bool,
    one_of_alike: bool,
    known_of: Served | None,
) -> Recording:
    skeleton = noting.skeleton
    new = noting.lengths.new_tokens(query_len, is_any, known_of)
    cache = noting.new_cache()
    has_states, has_encoder = any(kind.states for kind in cache.kinds), compat.has_encoder(skeleton.copy)
    if has_states and query_len > 1 and not is_any:
        raise Unrecordable("several tokens at once, of which some could not be taken back from the states")
    if has_encoder and query_len > 1:
        raise Unrecordable("several tokens at once, over what an encoder has read")
    states: list[list[Register]] = [[] for _ in cache.kinds]
    encoded: list[EncodedLayer] = []
    encoder_output: Register | None = None
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _without_logs(),
        functions_of_lengths(),
        skeleton.mode,
        other_forwards(noting),
    ):
        whole: Any = cache
        if has_encoder:
            whole = compat.over_encoder(cache)
            given_output: Any = compat.encoder_output(skeleton.encoder_output(batch, noting.lengths.encoded))
            arguments = arguments | {"encoder_outputs": given_output}
            rehearse(noting, batch, whole, arguments)
        elif has_states:
            whole = cache = cache_with_states(noting, batch)
        if has_states:
            states = [[noting.state(each) for each in found.values()] for found in cache.states()]
            if not any(states):
                raise Unrecordable("states that it keeps elsewhere than in the cache that it is given")
        cache.claim(noting.lengths.past)
        if noting.begins:
            cache.begin()
        sizes = (batch, new, *skeleton.token_shape), (batch, new)
        tokens, positions = (torch.zeros(each, dtype=torch.long, device=skeleton.device) for each in sizes)
        given = noting.given(tokens), noting.given(positions)
        name_of_mask = compat.text_name(skeleton.copy, "attention_mask")
        if with_mask:
            shape = batch, noting.lengths.past + new
            arguments = arguments | {name_of_mask: torch.ones(shape, dtype=torch.long, device=skeleton.device)}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                register = noting.given(value)
                if name == name_of_mask:
                    noting.text_mask = register
        if has_encoder:
            encoder_output = noting.given(given_output.last_hidden_state)
            encoded = [noting.encoded(*each) for each in _without_gaps(compat.encoded_states(whole))]
            cache.keep(len(encoded))
        with modes.spans(noting), spread_modules(noting), modes.Dispatch(noting), modes.Functions(noting):
            with layers_alike(skeleton.copy, cache) if one_of_alike else nullcontext():
                logits = skeleton.run(tokens, positions, whole, arguments)
        noting.facts = {index: of_known_size(fact) for index, fact in noting.facts.items()}
    if noting.refused is not None:
        raise noting.refused
    cache.keep(_read_layers(noting.calls, cache.kinds))
    kept = {query_len, 1} if is_any else {query_len}
    if logits.shape[0] != batch * math.prod(skeleton.token_shape) or int(logits.shape[1]) not in kept:
        raise Unrecordable(f"logits of shape {tuple(logits.shape)}")
    appended = Counter(call.arguments["layer"] for call in noting.calls if call.op is marks.append)
    if (layer := next((layer for layer, count in appended.items() if count > 1), None)) is not None:
        raise Unrecordable(f"layer {layer} of the cache, to which several layers of the model append")
    for call in noting.calls:
        for name, value in call.arguments.items():
            if name == "norm" and isinstance(value, (tuple, list)):
                call.arguments[name] = Norm(*value)
    for expansion in {each.structure: each for each in noting.expansions.values()}.values():
        expansion.check()
    masks = noting.masks.items() if has_encoder else ()
    open_masks = frozenset(index for index, function in masks if sees_all(function))
    if not noting.masks_over_encoded <= open_masks:
        raise Unrecordable("a mask that hides some of what the encoder has read")
    if noting.text_mask is not None and any(kind.keys for kind in cache.kinds):
        of_text = {noting.text_mask.index, *noting.masks} - open_masks
        calls = behind(noting.calls, noting.value(logits))
        if not any(each.index in of_text for call in calls for each in read_by(call)):
            raise OwnPadding("attention that is not given the mask of the text")
    windows: dict[int, int | None] = {}  # of masks that the kernels have
    window_sizes = sorted({kind.window for kind in cache.kinds if kind.window is not None})
    for index, function in noting.masks.items():
        with suppress(Unrecordable):
            windows[index] = window_of(compat.with_held(function, noting.held), window_sizes, noting.rows)
    for call in noting.calls:
        if call.op in (marks.attend, marks.latent_attend):
            mask = call.arguments["window"]
            if mask is not None and mask.index not in windows:
                raise Unrecordable("a mask that is neither causal nor a window")
            of_mask = None if mask is None else windows[mask.index]
            of_cache = cache.kinds[call.arguments["layer"]].window  # the cache holds no more tokens
            window = min((w for w in (of_mask, of_cache) if w is not None), default=0)
            if isinstance(window, marks.Chunk) and query_len > 1:
                raise Unrecordable("several tokens at once, whose windows may begin at different places")
            call.arguments["window"] = window
    return Recording(
        batch,
        noting.lengths.query_len,
        noting.calls,
        noting.facts,
        *given,
        logits=noting.value(logits),
        spans=noting.spans,
        masks=windows,
        open_masks=open_masks,
        mutated=noting.mutated,
        past=noting.past,
        windows=tuple(kind.window for kind in cache.kinds),
        states=states[: len(cache.kinds)],
        state_places=[list(found) for found in cache.states()] if has_states else [],
        encoded=encoded,
        encoder_output=encoder_output,
        encoded_length=noting.encoded_length if has_encoder else 0,
        linears=_linears_by_input(noting),
        readers=_readers(noting),
        is_unpadded=noting.is_unpadded,
        live={compat.memory_of(each) for each in (*skeleton.plain, *skeleton.code.tensors())},
        served=_served(noting, windows),
        stand_ins=[(each, skeleton.model.get_submodule(path).packed) for path, each in skeleton.quantized.items()],
    )


def _served(noting: Recorder, windows: dict[int, int | None]) -> Served:
    """Return the lengths of which the step is the same, as far as was looked."""
    served = noting.lengths.served()
    for index, function in noting.masks.items():
        if is_known(function):
            continue
        if index in noting.masks_over_encoded:
            served = served.up_to(ENCODED_PLACES, of_encoded=True)
        elif index in windows:
            served = served.up_to(noting.rows)
    return served


def _read_layers(calls: list[Call], kinds: list[compat.LayerKind]) -> int:
    """Return how many layers of a cache a step uses: those behind them, which have keys and values alone, are of a
    config that tells of more layers than its model has."""
    used = [call.arguments["layer"] for call in calls if call.op is marks.append]
    used += [index for index, kind in enumerate(kinds) if kind.states or not kind.keys]
    return max(used, default=len(kinds) - 1) + 1


def _linears_by_input(noting: Recorder) -> list[list[str]]:
    """Return what :attr:`.recorded_step.Recording.linears` is."""
    model = noting.skeleton.model
    experts = {id(call.arguments["module"]) for call in noting.calls if call.op is marks.other_experts}
    experts |= set(map(id, compat.modules_with_experts(model)))
    mixtures = tuple(f"{path.rpartition('.')[0]}." for path, each in model.named_modules() if id(each) in experts)
    read = Counter((id(each), call.op is marks.linear) for call in noting.calls for each in call.arguments.values())
    called = Counter(path for path, _ in noting.linears)
    found: dict[int, list[str]] = {}
    for path, x in dict(reversed(noting.linears)).items():  # of a layer that is called twice, its first call
        weight = id(model.get_submodule(path).weight)
        is_own = read[weight, True] == called[path] and not read[weight, False]
        if is_own and not path.startswith(mixtures):
            found.setdefault(x.index, []).insert(0, path)
    return list(found.values())[::-1]


def _readers(noting: Recorder) -> list[str]:
    """Return what :attr:`.recorded_step.Recording.readers` is."""

    def own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)

    modules = noting.skeleton.model.named_modules()
    return [path for path, module in modules if any(id(each) in noting.read for each in own_tensors(module))]


def _without_gaps(found: list[tuple[torch.Tensor, torch.Tensor] | None]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of what an encoder has read, of each layer of a decoder.

    Raises:
        Unrecordable: a layer has made none, or none has.
    """
    while found and found[-1] is None:  # the config tells of more layers than the decoder has
        found = found[:-1]
    if not found or None in found:
        raise Unrecordable("layers that keep nothing of what the encoder has read")
    known = [each for each in found if each is not None]
    if any(k.shape != v.shape for k, v in known):
        raise Unrecordable("keys and values of different sizes")
    return known


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence torch's log, which repeats what the exception says, for the length of a ``with`` block."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    refuse = lambda record: False  # noqa: E731
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)


def _said(error: Exception, noting: Recorder) -> str:
    """Return what an exception says of the model, and which line raised it."""
    line = where(error)
    if isinstance(error, DataDependentOutputException):
        return f"a number in a tensor that decides what is called next{line}"
    if isinstance(error, DynamicOutputShapeException):
        return f"a tensor whose size depends on the numbers that it is made of ({error.func}){line}"
    if isinstance(error, AttributeError) and isinstance(error.obj, compat.RecordingCache):
        return f"a cache of a class of its own, with {error.name}{line}"
    return f"{type(error).__name__}: {error}{line}, for a token behind {noting.past} others in a cache"
