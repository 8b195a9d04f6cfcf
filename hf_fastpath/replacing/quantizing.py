"""Replacing a model's own layers by quantized ones, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import Conv1D, ShardStyle, is_sharded, local_tensor, merged_layer, move, place_like, spread_like
from ..decode.ranks.rank_calls import style_of
from ..decode.sources.step_source import StepSource
from ..linears.checkpoints import family_of
from ..linears.packed_experts import PackedExperts
from ..linears.packed_linear import PackedLinear
from ..native import heap, loader
from ..ops.packed_gemv import SPEC
from ..options import HEADS, Options
from ..progress import announced, counted
from ..quantization.formats import FORMATS, Format
from ..quantization.quantizer import quantize
from ..reasons import class_name, explained, named
from ..registry import PLAIN_TENSORS
from .experts import experts_of, quantized_experts


@dataclass(eq=False)
class Replaced:
    """A linear layer, or experts, that another one has replaced.

    Attributes:
        original: the layer; if we have quantized its weight, that lies in host memory now unless another module has it.
        packed: the layer that took its place: a quantized one, or of a checkpoint's a plain one.
        places: (parent, name) of every place that the layer had.
        restore: makes the layer's tensors again of the packed weight, where these are not kept twice.
    """

    original: nn.Module
    packed: PackedLinear | PackedExperts | nn.Linear
    places: list[tuple[nn.Module, str]]
    restore: Callable[[nn.Module, Any], None] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The largest tensor of the layer that took the place."""
        return self.packed.weight if isinstance(self.packed, nn.Linear) else self.packed.quants

    def put(self, replaced: list[Replaced]) -> None:
        """Put the quantized layer in all places; ``replaced`` gets what was done."""
        for parent, name in self.places:
            parent._modules[name] = self.packed
        replaced.append(self)

    def undo(self, elsewhere: Sequence[tuple[nn.Module, str]] = ()) -> None:
        """Put the layer back, with its weight on the device of the quantized one.

        Args:
            elsewhere: (parent, name) of every place that the quantized layer has now: PEFT's ``unload()`` moves layers.
        """
        device = self.tensor.device
        if self.restore is not None:
            assert not isinstance(self.packed, nn.Linear), "what a plain layer has replaced is kept"
            with torch.inference_mode(False), torch.no_grad():
                self.restore(self.original, self.packed.packed)
            if device.type == "cpu":
                heap.give_back()
        tensors = [*self.original.parameters(), *self.original.buffers()]
        for tensor in tensors:
            if (local := local_tensor(tensor)).device != device and not local.is_meta:
                move(tensor, device)
        for parent, name in (*self.places, *elsewhere):
            if parent._modules.get(name) is self.packed:  # else the user has put something else there since
                parent._modules[name] = self.original


#: styles in which a rank is given other features than it computes; stock code asks quantized layers for their number
_TO_ALL_RANKS = (ShardStyle.GATHERED, ShardStyle.SPLIT_ROWS)


@dataclass(frozen=True)
class Replacement:
    """Projections of a decoder layer, or the head, that quantized layers are to replace.

    Attributes:
        groups: projections that take the same input; their weights will lie behind each other in memory, so that one
            product can compute them.
        format: format of their weights.
        is_head: whether this is the head.
        experts: modules with the experts of a mixture.
    """

    groups: tuple[tuple[nn.Module, ...], ...]
    format: Format
    is_head: bool = False
    experts: tuple[nn.Module, ...] = ()


def why_not_quantized(
    model: nn.Module, part: StepSource | None, options: Options, reason: str | None = None
) -> str | None:
    """Return why ``model`` cannot be quantized as the options of ``patch()`` ask for, or None.

    Args:
        part: the model in its roles, or None if it does not decode fast as a whole.
        reason: why it does not, if that is known.
    """
    wanted = f"weights={options.weights!r}"
    family = next(filter(None, map(family_of, model.modules())), None)
    if family is not None:
        return (
            f"{wanted}: the model's weights are quantized already, by {family.name}: leave weights= out, or load "
            "unquantized ones"
        )
    if (merged := merged_layer(model)) is not None:
        return (
            f"{wanted} would quantize an adapter with the weights that it is merged into (those of {merged}, ...), and "
            "it could not be taken out again: unmerge_adapter() before patch(), or merge for good, merge_and_unload()"
        )
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    missing = [device for device in devices if device not in SPEC.native or not loader.is_native(device)]
    if missing:
        return (
            f"{wanted} has no kernels for {' and '.join(missing)}, where weights of the model are: move it, or see "
            "`python -m hf_fastpath info` for why there are none"
        )
    if part is not None and part.ranks is not None and options.lm_head != HEADS[0]:
        return f"lm_head={options.lm_head!r} takes a model whose head is not spread over processes, as this one's is"
    why = reason or "class_not_supported" if part is None else part.reason()
    if why is not None:
        return f"{wanted} takes a model that decodes fast as a whole; this one: {explained(named(why, model))}"
    if any(style_of(linear) in _TO_ALL_RANKS for linear in part.projections()):
        return (
            f"{wanted} takes a model whose ranks keep the features that they make; this one's tp_plan has "
            f"{' and '.join(style.value for style in _TO_ALL_RANKS)}: load the model whole"
        )
    if options.lm_head != HEADS[0] and type(part.head) is not nn.Linear:
        kind = class_name(part.head)
        return f"lm_head={options.lm_head!r} takes a model whose head is a linear layer, as this one's, {kind}, is not"
    if not replacements(part, options, model):
        return f"{wanted} finds no nn.Linear in the step of this {type(model).__name__}: leave weights= out"
    return None


def replacements(part: StepSource, options: Options, model: nn.Module) -> tuple[Replacement, ...]:
    """Return what is to be quantized as the options of ``patch()`` ask for.

    The result has the projections of every decoder layer, the experts of mixtures that ``ops.packed_experts`` computes,
    and the head. What a token's step does not run is left alone: towers, an encoder, keys and values of what it has
    read.
    """
    format = FORMATS[options.weights]
    found = []
    for groups in part.projection_groups():
        owners = (tuple(map(part.owner, linears)) for linears in groups)
        found.append(Replacement(tuple(owners), format))
    if part.ranks is None:
        found += [Replacement((), format, experts=(each,)) for each in experts_of(model)]
    if options.lm_head != HEADS[0]:
        found.append(Replacement(((part.owner(part.head),),), FORMATS[options.lm_head], is_head=True))
    return tuple(found)


def quantize_model(
    model: nn.Module, asked: Sequence[Replacement], replaced: list[Replaced], quiet: bool = False
) -> None:
    """Replace a model's own layers by quantized ones.

    Args:
        model: the model that the layers are in.
        asked: the model's :func:`replacements`.
        replaced: gets what was done, step by step, so that a caller can undo it after an error.
        quiet: show no progress on a terminal.
    """
    places, layers = places_of(model), [each for each in asked if not each.is_head]
    held = Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)
    shared = {each for each, count in held.items() if count > 1}
    with counted(len(layers), f"hf_fastpath: {asked[0].format.name} weights, layers", quiet) as bar:
        for layer in layers:
            for linears in layer.groups:
                _replace(linears, layer.format, places, shared, replaced)
            for experts in layer.experts:
                _replace_experts(experts, layer.format, places, shared, replaced)
            bar.update()
    for head in asked:
        if head.is_head:
            with nullcontext() if quiet else announced("quantizing the head"):
                _replace(head.groups[0], head.format, places, shared, replaced)


def places_of(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return (parent, name) of every place of each module in ``root``, by the module's id."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, module in parent._modules.items():
            places.setdefault(id(module), []).append((parent, name))
    return places


def _replace(
    linears: Sequence[nn.Module],
    format: Format,
    places: dict[int, list[tuple[nn.Module, str]]],
    shared: set[int],
    replaced: list[Replaced],
) -> None:
    whole = [local_tensor(linear.weight) for linear in linears]
    weights = [weight.t() if type(linear) is Conv1D else weight for linear, weight in zip(linears, whole)]
    together = quantize(torch.cat(weights), format)
    for linear, weight in zip(linears, together.split([len(each) for each in weights])):
        packed = PackedLinear(weight, linear.bias, linear.weight.dtype).train(linear.training)
        if is_sharded(linear.weight):
            spread_like(linear, packed)
        place_like(linear, packed)
        Replaced(linear, packed, places[id(linear)]).put(replaced)
        if id(linear.weight) not in shared:  # the embedding's, which stays, may be the head's
            move(linear.weight, "cpu")


def _replace_experts(
    experts: nn.Module,
    format: Format,
    places: dict[int, list[tuple[nn.Module, str]]],
    shared: set[int],
    replaced: list[Replaced],
) -> None:
    packed = quantized_experts(experts, format)
    place_like(experts, packed)
    Replaced(experts, packed, places[id(experts)]).put(replaced)
    kept = {id(each) for each in packed.biases}
    for tensor in experts.parameters():
        if id(tensor) not in shared | kept:
            move(tensor, "cpu")


def free_originals(model: nn.Module, replaced: list[Replaced]) -> None:
    """Free the weights that quantized ones have replaced, except for tensors that ``model`` uses elsewhere.

    Tied embeddings and biases may be used elsewhere.
    """
    used = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for each in replaced:
        for held in (each.original._parameters, each.original._buffers):
            for name, tensor in held.items():
                if tensor is None or id(tensor) in used:
                    continue
                if type(tensor) in PLAIN_TENSORS:
                    tensor.data = tensor.data.new_empty(0)
                else:
                    held[name] = None
