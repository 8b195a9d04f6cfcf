"""load_packed(model, directory): load into a model what save_packed() wrote."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import compat, logs
from ..choices import InputQuants
from ..compat import Conv1D, check_sizes, class_named, few_modules, model_of_config
from ..linears.packed_experts import DOWN, GATE_UP, PackedStacks
from ..linears.packed_linear import PackedLinear
from ..native import huge_pages, loader
from ..options import USUAL_BATCH, Options
from ..patching.api import patch_with
from ..patching.state import PatchState, state_of
from ..quantization.formats import (
    FORMATS,
    AnyPackedWeight,
    InputRounding,
    PackedWeight,
    ReorderedWeight,
    RoundedInputWeight,
    padded,
    scale_dtype,
)
from ..replacing.experts import experts_with
from ..replacing.quantizing import Replaced, free_originals, places_of
from .file_index import AGAIN
from .files import PackedFiles, not_persistent

#: number of differences that an error names
_MOST_NAMED = 5
_LOST = "load_packed() brought packed weights alone. Load the model anew, with from_pretrained(), for its own"


def load_packed(
    model: nn.Module | str | os.PathLike,
    directory: str | os.PathLike | None = None,
    *,
    device: str | torch.device | None = None,
    kv_dtype: str | torch.dtype = "auto",
    ops: str | Iterable[str] = "all",
    strict: bool = False,
    max_batch_size: int = USUAL_BATCH,
    quiet: bool = False,
    page_size: int | None = None,
    prefix_cache: int | str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load what :func:`save_packed` wrote, and patch the model.

    ``load_packed(directory)`` makes the model from the config saved there. ``load_packed(model, directory)`` fills a
    model that the caller made, on the meta device
    (``with torch.device("meta"): AutoModelForCausalLM.from_config(config)``) or with weights, which are then freed. In
    both cases every tensor is read from the files, in the type that was saved; memory never holds an unquantized weight
    of a packed layer. Nothing in the model changes before all files are read and found right. ``unpatch()`` cannot undo
    the loading, because there are no original weights.

    Args:
        model: a model of the class and sizes that was saved, not patched; or the directory.
        directory: where the files are; left out if ``model`` is the directory.
        device: where the tensors go; None means the model's device, or the CPU.
        kv_dtype, ops, strict, max_batch_size, quiet, page_size, prefix_cache: as for ``patch()``.
        trust_remote_code: run the model code that the saved config names, without asking.

    Returns:
        The model, patched, in eval mode if it was made here.

    Raises:
        ValueError: files are missing, damaged or of another version, or lead out of the directory; the model is a
            different one, or is patched; the saved config makes no model, or needs ``trust_remote_code=True``.
        OSError: a file cannot be read.
        TypeError: no directory was given, or two.
        UnsupportedModelError: as for ``patch()``.
    """
    if not isinstance(model, nn.Module):
        if directory is not None:
            raise TypeError(
                f"load_packed() got {type(model).__name__} as model, expected a model, or a directory alone"
            )
        directory, given = model, None
    elif directory is None:
        raise TypeError("load_packed() got no directory beside the model")
    else:
        given = model
    with PackedFiles(Path(directory)) as files:
        made = _made(Path(directory), files, trust_remote_code) if given is None else given
        if state_of(made) is not None:
            raise ValueError("load_packed() got a patched model: unpatch(model) first, or make another one")
        saved = files.header.options
        try:
            Options.parse(weights=saved["weights"], lm_head=saved["lm_head"])
        except ValueError as error:
            raise ValueError(f"load_packed(): the index in {directory} is damaged ({error}): {AGAIN}") from None
        options = Options.parse(
            *(kv_dtype, saved["weights"], ops, strict, max_batch_size, saved["lm_head"]),
            page_size=page_size,
            prefix_cache=prefix_cache,
        )
        _check_model(made, files)
        files.check()
        loading = _Loading(made, files, _device_of(made, device))
        loader.ensure(loading.device.type, None if quiet else logs.say)
        loading.read()
        try:
            patch_with(made, options, quiet, loading.put)
        except BaseException:
            loading.undo()
            raise
    free_originals(made, state_of(made).ledger.replaced)
    return made


def _made(directory: Path, files: PackedFiles, trust_remote_code: bool) -> nn.Module:
    """Make a model without weights from the saved config."""
    from transformers import AutoConfig, GenerationConfig

    configs = files.configs()
    with tempfile.TemporaryDirectory() as made_here:
        # transformers reads copies of the files that were found right, with the model's code beside them. It caches
        # imported code under the folder's name, so the name is the same for every load of a save.
        folder = Path(made_here, files.name)
        folder.mkdir()
        for name, content in configs.items():
            (folder / name).write_bytes(content)
        try:
            check_sizes(json.loads(configs.get("config.json", b"{}")))
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            named = class_named(files.header.architecture, config)
            with torch.device("meta"), few_modules():
                model = named(config) if named else model_of_config(config, trust_remote_code=trust_remote_code)
            if "generation_config.json" in configs:
                model.generation_config = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # transformers or the model's own code may raise anything
            first = f"{error} ".splitlines()[0].strip().replace(str(folder), str(directory)) or type(error).__name__
            hint = "call load_packed(model, directory) with a model that you made"
            if b'"auto_map"' in configs.get("config.json", b"") and not trust_remote_code:
                hint = f"pass trust_remote_code=True to run the code that it names, or {hint}"
            raise ValueError(
                f"load_packed(): the config saved in {directory} makes no model ({first}): {hint}"
            ) from error
    changed = files.changed_since()
    if changed:
        logs.warn(
            f"hf_fastpath: {', '.join(changed)} in {directory} are not what save_packed() wrote. load_packed() loads "
            "the save's own copies; for a model of another config, make it yourself and call load_packed(model, "
            "directory)"
        )
    model.config._name_or_path = model.name_or_path = str(directory)
    return model.eval()


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    own = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
    return torch.device("cpu") if own is None else own


def _features(module: nn.Module | None) -> tuple[int, int] | None:
    """Return (in_features, out_features) of a linear layer, or None for any other module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    out_features, in_features = weight.t().shape if isinstance(module, Conv1D) else weight.shape
    return in_features, out_features


def _features_of_stack(modules: dict[str, nn.Module], name: str) -> tuple[int, int] | None:
    """Return (in_features, out_features of all experts) of a stack of matrices, or None for anything else."""
    at, _, attribute = name.rpartition(".")
    stacks = compat.expert_stacks(modules[at]) if attribute in (GATE_UP, DOWN) and at in modules else None
    if stacks is None or attribute not in stacks.tensors:
        return None
    count, out_features, in_features = stacks.tensors[attribute].shape
    if stacks.is_transposed:
        in_features, out_features = out_features, in_features
    return in_features, count * out_features


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _check_model(model: nn.Module, files: PackedFiles) -> None:
    """Raise if the files are of another model.

    Raises:
        ValueError: the message says what differs.
    """
    header = files.header
    kind = type(model).__name__, getattr(model.config, "model_type", "")
    if kind != (header.architecture, header.model_type):
        raise ValueError(
            f"load_packed(): the files are of a {header.architecture} ({header.model_type}), this model is a {kind[0]} "
            f"({kind[1]}): make it from the config saved beside them"
        )
    differences = [*_weights_differences(model, files), *_other_differences(model, files)]
    if differences:
        more = len(differences) - _MOST_NAMED
        text = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"load_packed(): the files do not fit this {kind[0]}: {text}. Make the model from the config saved beside "
            "the files, or save it again"
        )


def _weights_differences(model: nn.Module, files: PackedFiles) -> Iterator[str]:
    modules = dict(model.named_modules())
    for name, weight in files.header.weights.items():
        format = FORMATS[weight["format"]]
        sizes = weight["in_features"], weight["out_features"]
        found = _features(modules.get(name)) or _features_of_stack(modules, name)
        if found != sizes:
            what = "no linear layer" if found is None else f"{found[0]} -> {found[1]}"
            yield f"{name} is saved as {sizes[0]} -> {sizes[1]}, in the model it is {what}"
        shapes = {
            "quants": ("uint8", [sizes[1], padded(sizes[0]) * format.bits // 8]),
            "scales": (str(scale_dtype(format)).removeprefix("torch."), [sizes[1], format.scale_columns(sizes[0])]),
        }
        if format.has_zeros:
            shapes["zeros"] = ("uint8", shapes["scales"][1])
        if f"{name}.order" in files.entries:
            shapes["order"] = ("int32", [sizes[0]])
        for part, (dtype, shape) in shapes.items():
            entry = files.entries.get(f"{name}.{part}")
            if entry is None:
                yield f"{name}.{part} is not in the files"
            elif (entry.dtype, entry.shape) != (dtype, shape):
                yield f"{name}.{part} is {entry.dtype} {entry.shape}, expected {dtype} {shape} of {format.name}"
        if not format.has_zeros and f"{name}.zeros" in files.entries:
            yield f"{name}.zeros is in the files, which {format.name} does not have"


def _other_differences(model: nn.Module, files: PackedFiles) -> Iterator[str]:
    header = files.header
    own = {
        name: tensor
        for name, tensor in _tensors_of(model).items()
        if name.removesuffix(".weight") not in header.weights or not name.endswith(".weight")
        if name not in header.weights
    }
    made_here = set(not_persistent(model))
    beside = files.names_beside(iter(header.weights))
    for name, tensor in own.items():
        saved = header.tied.get(name, name)
        if saved in beside:
            shape = files.entries[saved].shape
            if shape != list(tensor.shape):
                yield f"{name} is saved with shape {shape}, in the model it has {list(tensor.shape)}"
            if saved in own and own[saved] is not tensor:
                yield f"{name} is tied to {saved} in the files, but not in the model"
        elif name not in made_here or tensor.is_meta:
            yield f"{name} is in the model, but not in the files"
    for name in sorted(beside - set(own) - set(header.buffers)):
        yield f"{name} is in the files, but not in the model"
    first: dict[int, str] = {}
    for name, tensor in own.items():
        if first.setdefault(id(tensor), name) != name and header.tied.get(name, name) == name and name in beside:
            yield f"{name} is tied to {first[id(tensor)]} in the model, but not in the files"


class _Loading:
    """The tensors that were read from the files; they can be put into the model and taken back."""

    def __init__(self, model: nn.Module, files: PackedFiles, device: torch.device):
        self._model, self._files, self.device = model, files, device
        self._weights: dict[str, AnyPackedWeight] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._before: list[tuple[dict, str, Any]] = []

    def read(self) -> None:
        """Read all tensors."""
        header = self._files.header
        for names in header.joined:
            order: torch.Tensor | None = None
            for name, weight in zip(names, self._read_joined(names)):
                if (rounding := header.weights[name].get("rounding")) is not None:
                    quants, limit = rounding
                    self._weights[name] = RoundedInputWeight(weight, InputRounding(InputQuants(quants), float(limit)))
                    continue
                order = self._order_of(name, order)
                self._weights[name] = weight if order is None else ReorderedWeight(weight, order)
        for name in self._files.names_beside(iter(header.weights)):
            self._tensors[name] = self._files.read(name).to(self.device, copy=True)

    def _order_of(self, name: str, before: torch.Tensor | None) -> torch.Tensor | None:
        """Read the order of a weight's inputs, or return the tensor that the weight before has for the same one.

        Raises:
            ValueError: the order names an input twice or not at all.
        """
        if f"{name}.order" not in self._files.entries:
            return None
        order = self._files.read(f"{name}.order").to(self.device, copy=True)
        if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device, dtype=order.dtype)):
            raise ValueError(f"load_packed(): {name}.order is no permutation of {len(order)} inputs: save it again")
        return before if before is not None and torch.equal(before, order) else order

    def _read_joined(self, names: list[str]) -> list[PackedWeight]:
        """Read packed weights into memory behind each other."""
        said = [self._files.header.weights[name] for name in names]
        format, in_features = FORMATS[said[0]["format"]], said[0]["in_features"]
        rows = [weight["out_features"] for weight in said]
        parts: list[torch.Tensor | None] = []
        for part in ("quants", "scales", "zeros"):
            if part == "zeros" and not format.has_zeros:
                parts.append(None)
                continue
            first = self._files.entries[f"{names[0]}.{part}"]
            together = torch.empty((sum(rows), first.shape[1]), dtype=getattr(torch, first.dtype), device=self.device)
            huge_pages.ask_for(together)
            for name, target in zip(names, together.split(rows)):
                target.copy_(self._files.read(f"{name}.{part}"))
            parts.append(together)
        quants, scales, zeros = parts
        together = PackedWeight(format, in_features, quants, scales, zeros, 1.0)
        return [
            PackedWeight(format, in_features, each.quants, each.scales, each.zeros, weight["multiplier"])
            for each, weight in zip(together.split(rows), said)
        ]

    def put(self, state: PatchState) -> None:
        """Put all tensors in place."""
        header, model = self._files.header, self._model
        made: dict[int, nn.Parameter] = {}
        for name, own in _tensors_of(model).items():
            saved = header.tied.get(name, name)
            if saved not in self._tensors:
                continue
            at, _, attribute = name.rpartition(".")
            module = model.get_submodule(at)
            tensor = self._tensors[saved]
            if attribute in module._parameters:
                if id(own) not in made:
                    made[id(own)] = nn.Parameter(tensor, requires_grad=own.requires_grad)
                self._set(module._parameters, attribute, made[id(own)])
            else:
                self._set(module._buffers, attribute, tensor)
        places = places_of(model)
        stacks: dict[str, dict[str, PackedWeight]] = {}
        for name, weight in self._weights.items():
            at, _, attribute = name.rpartition(".")
            if attribute in (GATE_UP, DOWN) and attribute in (experts := model.get_submodule(at))._parameters:
                assert isinstance(weight, PackedWeight), "stacks have no order of inputs"
                stacks.setdefault(at, {})[attribute] = weight
                if len(found := stacks[at]) == 2:
                    made = experts_with(experts, PackedStacks(found[GATE_UP], found[DOWN]))
                    Replaced(experts, made, places[id(experts)]).put(state.ledger.replaced)
                continue
            linear = model.get_submodule(name)
            bias = linear.bias if hasattr(linear, "bias") else None
            packed = PackedLinear(weight, bias, linear.weight.dtype).train(linear.training)
            Replaced(linear, packed, places[id(linear)]).put(state.ledger.replaced)
        state.lost = _LOST

    def _set(self, contents: dict, name: str, value: Any) -> None:
        self._before.append((contents, name, contents[name]))
        contents[name] = value

    def undo(self) -> None:
        """Restore what :meth:`put` has replaced, except for layers, which the undoing of the patch restores."""
        while self._before:
            contents, name, value = self._before.pop()
            contents[name] = value
