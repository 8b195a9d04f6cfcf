"""save_packed(model, directory): write a quantized model's weights into files, as they are."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from pathlib import Path

import torch
from torch import nn

from ..compat import save_config
from ..linears.packed_embedding import PackedEmbedding
from ..linears.packed_linear import PackedLinear
from ..patching.state import state_of
from .file_index import Header
from .files import not_persistent
from .folder import write

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes_of(size: int | str) -> int:
    """Return ``"5GB"`` as a number of bytes.

    Raises:
        ValueError: the size is no number of bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip(), flags=re.IGNORECASE)
    count = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if count < 1:
        raise ValueError(f"max_shard_size is {size!r}, expected a number of bytes, or one with KB, MB, GB or GiB")
    return count


def save_packed(model: nn.Module, directory: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Write a quantized model for :func:`load_packed`: packed weights, all other tensors, config and generation config.

    The model's own weights, which ``unpatch()`` would bring back, are not written. The files are in the safetensors
    format; their names differ from transformers' own, so that ``from_pretrained()`` does not take them for a
    checkpoint. Nothing is copied in host memory; a model on a GPU is copied there one file at a time.

    The save replaces an older save in the directory all at once: if it is killed at any moment, or runs out of space,
    it leaves the old save or the new one, whole. Files that no save has written, such as a ``config.json``, stay as
    they are; there is a warning if a config differs from the model's.

    Args:
        model: a model whose weights ``patch(model, weights=...)`` or :func:`load_packed` has packed.
        directory: where the files go; it is made if it is not there.
        max_shard_size: of a file, in bytes or as ``"5GB"``.

    Raises:
        OSError: a file cannot be written.
        TimeoutError: another save into the directory is under way.
        ValueError: the model has no packed weights, or some are not in memory, or its table of embeddings is
            packed; ``max_shard_size`` is no size; the directory's index of packed files is another program's, or
            damaged.
    """
    state = state_of(model)
    limit = _bytes_of(max_shard_size)
    packed = {name: module for name, module in model.named_modules() if type(module) is PackedLinear}
    if state is None or not packed:
        raise ValueError(
            f"save_packed() got a {type(model).__name__} without packed weights: patch(model, weights='int4_g32') "
            "first, or use save_pretrained()"
        )
    table = next((name for name, module in model.named_modules() if type(module) is PackedEmbedding), None)
    if table is not None:
        raise ValueError(
            f"save_packed(): {table} is a quantized table of embeddings, which its files do not hold: keep the GGUF "
            "file, which from_gguf() loads as it is"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, module in packed.items():
        tensors |= {f"{name}.quants": module.quants, f"{name}.scales": module.scales}
        if module.zeros is not None:
            tensors[f"{name}.zeros"] = module.zeros
        if module.order is not None:
            tensors[f"{name}.order"] = module.order
    inside = {f"{name}.{part}" for name in packed for part in ("quants", "scale_bits", "zeros", "order")}
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    seen: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in own:
        if name in inside:
            continue
        if tensor.is_meta:
            raise ValueError(f"save_packed() finds {name} on the meta device: load the model where it fits whole")
        first = seen.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            tied[name] = first
    header = Header(
        architecture=type(model).__name__,
        model_type=getattr(model.config, "model_type", ""),
        weights={
            name: {
                "format": module.format.name,
                "in_features": module.in_features,
                "out_features": module.out_features,
                "multiplier": module.multiplier,
            }
            | ({} if module.rounding is None else {"rounding": [module.rounding.quants.label, module.rounding.limit]})
            for name, module in packed.items()
        },
        joined=_joined(packed),
        tied=tied,
        buffers=[name for name in not_persistent(model) if name in tensors],
        options={"weights": state.options.weights, "lm_head": state.options.lm_head},
    )
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    write(target, header, tensors, limit, _configs(model))


def _joined(packed: dict[str, PackedLinear]) -> list[list[str]]:
    """Return the names of the layers that share memory, each group in the order of its memory."""
    groups: dict[int, list[str]] = {}
    for name, module in packed.items():
        groups.setdefault(module.quants.untyped_storage().data_ptr(), []).append(name)
    return [sorted(names, key=lambda name: packed[name].quants.data_ptr()) for names in groups.values()]


def _configs(model: nn.Module) -> dict[str, bytes]:
    """Return name and content of each file that ``save_pretrained()`` writes beside weights.

    What the config says about how the model's own weights were loaded is left out.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with tempfile.TemporaryDirectory() as directory:
        save_config(model, config, directory)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}
