"""Weights that a checkpoint has quantized, in our formats: the same values in the order of our kernels."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .. import logs, structural
from ..architecture import architectures
from ..compat import INSIDE_ADAPTER, adapter_modules, hook_of, placement
from ..decode.model.structure import ModelInRoles
from ..decode.sources.described import model_part
from ..errors import NoCounterpart
from ..linears.checkpoints import IntWeight, TableWeight, family_of, note
from ..linears.packed_linear import PackedLinear
from ..native import heap, loader
from ..ops import packed_gemv
from ..progress import counted
from ..quantization.formats import FORMATS, Format, PackedWeight, ReorderedWeight, pack, padded
from .mxfp4_experts import is_mxfp4, repack_experts
from .quantizing import Replaced, places_of
from .rewriting import Restoring, Rewriting

#: a layer that is replaced, the layer that takes its place, and what makes its tensors again
Packed = tuple[nn.Module, PackedLinear, Rewriting | None]
#: gets layers of one input; gives those that are replaced
Packing = Callable[[list[nn.Module]], list[Packed]]
#: quants, scales and zeros as a format has them; zeros are None if it has none
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
#: scales that are not float16 are brought below 2 ** this by the multiplier
_LARGEST_SCALE = 7


@dataclass(eq=False)
class RemovedHooks:
    """Hooks that a package's layers need and our layers do not.

    Attributes:
        module: the module that had the hooks.
        hooks: all hooks of the module, as they were.
    """

    module: nn.Module
    hooks: OrderedDict

    def undo(self) -> None:
        """Put the hooks back."""
        for key, hook in self.hooks.items():
            self.module._forward_pre_hooks.setdefault(key, hook)


def format_for(bits: int, group: int, in_features: int, has_zeros: bool, zeros_fit: bool, steps_fit: bool) -> Format:
    """Return the format that holds quants exactly.

    Args:
        bits, group: of the quants, as of :class:`..linears.checkpoints.IntWeight`.
        in_features: weights of a row.
        has_zeros: whether a zero point is not 0.
        zeros_fit: whether all zero points are numbers of four bits, or of as many as quants have if these are eight.
        steps_fit: whether all quants less their zero points are numbers of eight bits.

    Raises:
        NoCounterpart: there is no such format.
    """

    def groups_fit(format: Format) -> bool:
        return group >= in_features or group % format.group == 0

    if bits <= 4:
        fits = {"int4": zeros_fit, "int4_g32": not has_zeros, "int4_g32_zeros": zeros_fit}
    else:
        fits = {"int8": bits == 8 and steps_fit, "int8_g32_zeros": bits == 8 and zeros_fit}
    found = next((name for name, fits_so in fits.items() if fits_so and groups_fit(FORMATS[name])), None)
    if found is None:
        raise NoCounterpart("quantized_format")
    return FORMATS[found]


def counterpart(weight: IntWeight | TableWeight) -> Format:
    """Return the format that holds a weight's quants exactly.

    Raises:
        NoCounterpart: there is no such format.
    """
    if isinstance(weight, TableWeight):
        found = next((format for format in FORMATS.values() if format.table == weight.table), None)
        if found is None:
            raise NoCounterpart("quantized_format")
        check_blocks(weight.block, weight.quants.shape[1], found)
        return found
    steps_fit, most = weight.bits == 8, 8 if weight.bits <= 4 else 128
    if steps_fit:
        steps = weight.quants - _of_columns(weight.zeros, weight)
        steps_fit = -128 <= int(steps.min()) and int(steps.max()) <= 127  # -128 too, which only our quantizer avoids
    return format_for(
        weight.bits,
        weight.group,
        weight.quants.shape[1],
        bool(weight.zeros.any()),
        -most <= int(weight.zeros.min()) and int(weight.zeros.max()) < most,
        steps_fit,
    )


def _of_columns(values: torch.Tensor, weight: IntWeight) -> torch.Tensor:
    """Expand [rows, groups] to [rows, in_features]."""
    return values.repeat_interleave(weight.group, dim=1)[:, : weight.quants.shape[1]]


def _of_groups(values: torch.Tensor, weight: IntWeight, format: Format) -> torch.Tensor:
    """Convert [rows, groups of the weight] to [rows, groups of the format]."""
    starts = torch.arange(format.groups(weight.quants.shape[1]), device=values.device) * format.group
    return values[:, (starts // weight.group).clamp(max=values.shape[1] - 1)]


def check_blocks(block: int, in_features: int, format: Format) -> None:
    """Raise if blocks of a checkpoint, where rows follow each other, are no whole groups or go on in the next row.

    Where they go on, bitsandbytes' kernels disagree: those of a CPU with AVX-512 begin each row with a block, and its
    quantizer does not.

    Raises:
        NoCounterpart: with the reason code.
    """
    if block % format.group or in_features % block:
        raise NoCounterpart("quantized_blocks")


def _packed_table(weight: TableWeight, format: Format) -> Parts:
    rows, columns = weight.quants.shape
    scales = weight.scales.view(rows, -1).repeat_interleave(weight.block // format.group, dim=1)
    quants = functional.pad(weight.quants, (0, padded(columns) - columns), value=format.empty_quant)
    return pack(format, quants), functional.pad(scales, (0, format.groups(columns) - scales.shape[1])), None


def _packed(weight: IntWeight | TableWeight, format: Format, multiplier: float) -> Parts:
    if isinstance(weight, TableWeight):
        return _packed_table(weight, format)
    zeros = _of_groups(weight.zeros, weight, format)
    if format.bits == 8 and not format.has_zeros:
        quants, rest = weight.quants - _of_columns(weight.zeros, weight), 0
    else:
        half = 1 << (format.bits - 1)
        zeros, quants, rest = zeros + half, weight.quants.view(torch.uint8) + half, int(format.zero)
    width = padded(weight.quants.shape[1])
    padding = (0, width - quants.shape[1])
    if format.has_zeros:  # padding has the zero point of its group
        whole = zeros.to(torch.uint8).repeat_interleave(format.group, dim=1)
        whole[:, : quants.shape[1]] = quants
        quants = whole
    else:
        quants = functional.pad(quants, padding, value=rest)
    scales = (_of_groups(weight.scales, weight, format).double() / multiplier).half()
    as_bytes = (quants.to(torch.int8) if quants.dtype == torch.int16 else quants).view(torch.uint8)
    of_groups = zeros.to(torch.uint8).contiguous() if format.has_zeros else None
    return pack(format, as_bytes), scales.contiguous(), of_groups


def _multiplier(weights: list[IntWeight | TableWeight]) -> float:
    """Return the multiplier that brings scales which are not float16 into its range.

    Raises:
        NoCounterpart: a scale is not finite.
    """
    largest = max(float(weight.scales.abs().max()) for weight in weights)
    if not math.isfinite(largest):
        raise NoCounterpart("quantized_format")
    is_held = all(isinstance(each, TableWeight) or each.scales.dtype == torch.float16 for each in weights)
    return 1.0 if is_held or not largest else 2.0 ** (math.frexp(largest)[1] - _LARGEST_SCALE)


def _shared_orders(weights: list[IntWeight | TableWeight]) -> list[torch.Tensor | None]:
    """Return each weight's order of inputs as int32; those that are alike are one tensor."""
    made: list[torch.Tensor] = []

    def shared(order: torch.Tensor | None) -> torch.Tensor | None:
        if order is None:
            return None
        found = next((each for each in made if torch.equal(each, order)), None)
        if found is None:
            made.append(found := order.to(torch.int32))
        return found

    return [shared(each.order if isinstance(each, IntWeight) else None) for each in weights]


def repacked(weights: list[IntWeight | TableWeight]) -> list[PackedWeight | ReorderedWeight]:
    """Repack weights of the same input.

    Returns:
        Weights that lie behind each other in memory if one format holds all of them, and that share one order of inputs
        if theirs are alike.

    Raises:
        NoCounterpart: no format holds one of the weights.
    """
    orders = _shared_orders(weights)
    made = zip(_repacked(weights), orders)
    return [weight if order is None else ReorderedWeight(weight, order) for weight, order in made]


def _repacked(weights: list[IntWeight | TableWeight]) -> list[PackedWeight]:
    """Repack weights in the order in which their inputs are.

    Raises:
        NoCounterpart: no format holds one of the weights.
    """
    formats = [counterpart(weight) for weight in weights]
    if len(set(formats)) > 1:
        return [each for weight in weights for each in _repacked([weight])]
    format, in_features = formats[0], weights[0].quants.shape[1]
    multiplier = _multiplier(weights)
    tensors = zip(*(_packed(weight, format, multiplier) for weight in weights))
    quants, scales, zeros = (None if each[0] is None else torch.cat(each) for each in tensors)
    together = PackedWeight(format, in_features, quants, scales, zeros, multiplier)
    return together.split([len(weight.quants) for weight in weights])


def repack_checkpoint(model: nn.Module, replaced: list[Replaced], hooks: list[RemovedHooks], quiet: bool) -> None:
    """Replace the layers that a package's checkpoint brought by our layers, all of the model's or none.

    Args:
        model: as transformers loaded it, not patched.
        replaced, hooks: get what was done, so that a caller can undo it.
        quiet: show no progress on a terminal.
    """
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    has_experts = any(map(is_mxfp4, model.modules()))
    if not (has_experts or any(map(family_of, model.modules()))) or len(devices) != 1:
        return
    (device,) = devices
    if device not in packed_gemv.native or not loader.is_native(device):
        return
    if has_experts:
        first, start = len(replaced), time.monotonic()
        repack_experts(model, replaced, quiet)
        if not quiet and len(replaced) > first:
            logs.say(_announcement(replaced[first:], time.monotonic() - start))
        if not any(map(family_of, model.modules())):
            return
    known = structural.known_for(model, architectures())
    part = next(filter(None, (model_part(architecture, model) for architecture in known)), None)
    if part is not None and part.other_reason() is not None:
        return
    first, packed, start = len(replaced), functools.partial(_packed_alike, dtype=model.dtype), time.monotonic()
    try:
        with heap.repacking():
            if part is None or adapter_modules(model):
                _repack_modules(model, replaced, quiet, packed)
            else:
                repack_layers(part, replaced, quiet, packed)
    except NoCounterpart as found:
        while len(replaced) > first:
            replaced.pop().undo()
        reason = str(found)
        for module in model.modules():
            if family_of(module) is not None:
                note(module, reason)
        return
    _remove_hooks(model, hooks)
    if not quiet and len(replaced) > first:
        logs.say(_announcement(replaced[first:], time.monotonic() - start))


def _announcement(done: list[Replaced], seconds: float) -> str:
    """Return a line on what was repacked as what, with memory and time."""
    counts = Counter(each.packed.format.name for each in done)
    formats = ", ".join(f"{count} as {name}" for name, count in counts.most_common())
    size = sum(tensor.nbytes for each in done for tensor in each.packed.packed.tensors) / 1e9
    back = (
        "their bytes are made again by unpatch()" if all(each.restore for each in done) else "theirs are kept as well"
    )
    took = f"hf_fastpath: layers of the checkpoint repacked in {seconds:.1f} s"
    return f"{took}: {formats}; {size:.2f} GB, {back}"


def repack_layers(part: ModelInRoles, replaced: list[Replaced], quiet: bool, packed: Packing) -> None:
    """Replace the projections of all decoder layers, and the head, by what ``packed`` makes of them.

    Args:
        part: the model in its roles.
        replaced: gets what was done, step by step.
        quiet: show no progress on a terminal.
        packed: gets layers of one input; gives those that it replaces, each with the layer that takes its place.
    """
    places, layers = places_of(part.module), part.layers
    with counted(len(layers), "hf_fastpath: repacking layers", quiet) as bar:
        for layer in layers:
            for linears in layer.projection_groups():
                _put(packed(linears), places, replaced)
            bar.update()
    _put(packed([part.head]), places, replaced)


def _repack_modules(model: nn.Module, replaced: list[Replaced], quiet: bool, packed: Packing) -> None:
    """Do as :func:`repack_layers` for a model that no file describes, or with adapters around layers: all layers that
    a package's checkpoint brought. Those of one module that take inputs of one size lie behind each other in memory,
    as some of them take one input."""
    places, groups = places_of(model), {}
    for path, module in model.named_modules():
        if family_of(module) is not None:
            parent = path.removesuffix(f".{INSIDE_ADAPTER}").rpartition(".")[0]
            groups.setdefault((parent, getattr(module, "in_features", None)), []).append(module)
    with counted(len(groups), "hf_fastpath: repacking layers", quiet) as bar:
        for linears in groups.values():
            _put(packed(linears), places, replaced)
            bar.update()


def _put(
    made: list[Packed],
    places: dict[int, list[tuple[nn.Module, str]]],
    replaced: list[Replaced],
) -> None:
    for linear, packed, rewriting in made:
        done = Replaced(linear, packed, places[id(linear)])
        for parent, name in done.places:
            parent._modules[name] = packed
        replaced.append(done)
        family = family_of(linear)
        if family is not None and family.release is not None and not packed.is_described:
            assert family.restore is not None, "what frees can give back"
            with torch.inference_mode(False):
                family.release(linear)
            done.restore = Restoring(family.restore)
        elif rewriting is not None:
            done.restore = rewriting
            with torch.inference_mode(False), torch.no_grad():
                rewriting.release(linear, packed.packed)
    if any(packed.quants.device.type == "cpu" for _, packed, _ in made):
        heap.give_back()


def _packed_alike(linears: list[nn.Module], dtype: torch.dtype) -> list[Packed]:
    """Repack those of some layers of one input that a package's checkpoint brought.

    Raises:
        NoCounterpart: with the reason code.
    """
    families = [family_of(linear) for linear in linears]
    found = [(linear, family) for linear, family in zip(linears, families) if family is not None]
    if not found:
        return []
    for linear, family in found:
        _check_calls(linear, family.package)
    with torch.no_grad():
        read = [family.read(linear) for linear, family in found]
        weights = repacked(read)
    made: list[Packed] = []
    for (linear, family), whole, weight in zip(found, read, weights):
        bias = getattr(linear, "bias", None)
        if bias is not None and (not isinstance(bias, nn.Parameter) or bias.dtype != dtype):
            bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        rewriting = None
        if family.written is not None and isinstance(whole, IntWeight):
            rewriting = Rewriting.of(family.written, whole, weight)
        made.append((linear, PackedLinear(weight, bias, dtype).train(linear.training), rewriting))
    return made


def _check_calls(linear: nn.Module, package: str) -> None:
    """Raise if calling a layer runs more than its package's code.

    Raises:
        NoCounterpart: with the reason code.
    """
    if hook_of(linear) is not None or placement(linear) is not None:
        raise NoCounterpart("hooks")
    forward = vars(linear).get("forward")
    home = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    if forward is not None and home.partition(".")[0] not in (package, "torch"):
        raise NoCounterpart("instance_forward")


def _remove_hooks(model: nn.Module, hooks: list[RemovedHooks]) -> None:
    """Remove compressed-tensors' hook if none of its layers is left: the first call would dequantize all of them."""
    if any(family_of(module) is not None for module in model.modules()):
        return
    before = OrderedDict(model._forward_pre_hooks)
    ours = [key for key, hook in before.items() if getattr(hook, "__module__", "").startswith("compressed_tensors.")]
    if ours:
        hooks.append(RemovedHooks(model, before))
        for key in ours:
            del model._forward_pre_hooks[key]
