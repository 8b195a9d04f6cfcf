"""Weights that a checkpoint has quantized, in our formats: the same values in the order of our kernels."""

from __future__ import annotations

import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .. import logs, structural
from ..architecture import architectures
from ..compat import INSIDE_ADAPTER, adapter_modules, hook_of, placement
from ..decode.model.structure import ModelInRoles
from ..decode.sources.described import model_part
from ..errors import NoCounterpart
from ..linears.checkpoint_weights import DequantizedWeight, IntWeight
from ..linears.checkpoints import family_of, note
from ..linears.gguf_modules import EXPERTS, is_gguf
from ..linears.packed_linear import PackedLinear
from ..native import heap, loader
from ..ops import packed_gemv
from ..progress import counted
from .counterparts import repacked
from .gguf_layers import repack_embeddings, repack_stacks
from .mxfp4_experts import is_mxfp4, repack_experts
from .quantizing import Replaced, places_of
from .rewriting import Restoring, Rewriting

#: a layer that is replaced, the layer that takes its place, and what makes its tensors again
Packed = tuple[nn.Module, PackedLinear | nn.Linear, Rewriting | None]
#: gets layers of one input; gives those that are replaced
Packing = Callable[[list[nn.Module]], list[Packed]]


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


def repack_checkpoint(model: nn.Module, replaced: list[Replaced], hooks: list[RemovedHooks], quiet: bool) -> None:
    """Replace the layers that a package's checkpoint brought by our layers, all of the model's or none.

    Args:
        model: as transformers loaded it, not patched.
        replaced, hooks: get what was done, so that a caller can undo it.
        quiet: show no progress on a terminal.
    """
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    has_experts = any(is_mxfp4(module) or is_gguf(module, EXPERTS) for module in model.modules())
    if not (has_experts or any(map(family_of, model.modules()))) or len(devices) != 1:
        return
    (device,) = devices
    if device not in packed_gemv.native or not loader.is_native(device):
        return
    if has_experts:
        first, start = len(replaced), time.monotonic()
        repack_experts(model, replaced, quiet)
        repack_stacks(model, replaced, quiet)
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
    repack_embeddings(model, replaced)
    _remove_hooks(model, hooks)
    if not quiet and len(replaced) > first:
        logs.say(_announcement(replaced[first:], time.monotonic() - start))


def _announcement(done: list[Replaced], seconds: float) -> str:
    """Return a line on what was repacked as what, with memory and time."""
    counts = Counter(
        "plain weights" if isinstance(each.packed, nn.Linear) else each.packed.format.name for each in done
    )
    formats = ", ".join(f"{count} as {name}" for name, count in counts.most_common())
    size = sum(tensor.nbytes for each in done for tensor in _tensors(each)) / 1e9
    back = (
        "their bytes are made again by unpatch()" if all(each.restore for each in done) else "theirs are kept as well"
    )
    took = f"hf_fastpath: layers of the checkpoint repacked in {seconds:.1f} s"
    return f"{took}: {formats}; {size:.2f} GB, {back}"


def _tensors(done: Replaced) -> list[torch.Tensor]:
    return [done.tensor] if isinstance(done.packed, nn.Linear) else done.packed.packed.tensors


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
        done.put(replaced)
        family = family_of(linear)
        if isinstance(packed, nn.Linear):
            continue
        if rewriting is not None:
            done.restore = rewriting
            with torch.inference_mode(False), torch.no_grad():
                rewriting.release(linear, packed.packed)
        elif family is not None and family.release is not None and not packed.is_described:
            assert family.restore is not None, "what frees can give back"
            with torch.inference_mode(False):
                family.release(linear)
            done.restore = Restoring(family.restore, family.restores_weight)
    if any(each.tensor.device.type == "cpu" for each in replaced[len(replaced) - len(made) :]):
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
        quantized = [each for each in read if not isinstance(each, DequantizedWeight)]
        weights = iter(repacked(quantized) if quantized else ())
    made: list[Packed] = []
    for (linear, family), whole in zip(found, read):
        bias = getattr(linear, "bias", None)
        if bias is not None and (not isinstance(bias, nn.Parameter) or bias.dtype != dtype):
            bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        if isinstance(whole, DequantizedWeight):
            made.append((linear, _plain_linear(linear, whole, bias, dtype), None))
            continue
        rewriting, weight = None, next(weights)
        if family.written is not None and isinstance(whole, IntWeight):
            rewriting = Rewriting.of(family.written, whole, weight)
        made.append((linear, PackedLinear(weight, bias, dtype).train(linear.training), rewriting))
    return made


def _plain_linear(
    linear: nn.Module, weight: DequantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype
) -> nn.Linear:
    made = nn.Linear(*reversed(weight.values.shape), bias=False, device="meta")
    made.weight, made.bias = nn.Parameter(weight.values.to(dtype), requires_grad=False), bias
    return made.train(linear.training)


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
