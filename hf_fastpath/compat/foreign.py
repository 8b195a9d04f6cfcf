"""Layers, weights and functions of other packages in a model: adapters, and weights that they have quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adapters import NAMES_OF_ROWS

#: packages whose layers are adapters around a model's own
_ADAPTERS = ("peft", "adapters", "loralib", "lycoris")
#: name of the layer that a layer of PEFT stands around
INSIDE_ADAPTER = "base_layer"
#: package, or package and module, of layers and weights that are quantized -> the reason code of its own, or None
_QUANTIZERS: dict[str, str | None] = {
    **dict.fromkeys(("compressed_tensors", "transformers.integrations.compressed_tensors"), "compressed_tensors"),
    **dict.fromkeys(("bitsandbytes", "optimum.quanto", "quanto", "hqq", "torchao", "gptqmodel", "auto_gptq", "awq")),
    **dict.fromkeys(("aqlm", "eetq", "vptq", "spqr_quant", "quark", "flute", "fbgemm_gpu", "auto_round", "autoawq")),
    **dict.fromkeys(("auto_round_extension", "qqq", "intel_extension_for_pytorch", "neural_compressor", "modelopt")),
    **dict.fromkeys(("torch.ao", "torch.nn.quantized")),
    "transformers.integrations.finegrained_fp8": "quantized_fp8",
    # transformers' own layers for checkpoints of other packages; the folder has much else
    **{
        f"transformers.integrations.{name}": None
        for name in (
            *("aqlm", "awq", "bitnet", "bitsandbytes", "eetq", "fbgemm_fp8", "fouroversix"),
            *("fp_quant", "gemma_quant", "higgs", "hqq", "metal_quantization", "mxfp4", "nvfp4", "quanto", "sinq"),
            *("spqr", "torchao", "vptq"),
        )
    },
}
#: types of weights that kernels of a model's own family read; any other type is of quantized weights
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _code_of_home(home: str) -> str | None:
    """Return the reason code of what a module, by its dotted name, defines; None if it is of none of the packages."""
    parts = home.split(".")
    for known in (".".join(parts[:3]), ".".join(parts[:2]), parts[0]):
        if known in _ADAPTERS:
            return "adapter"
        if known in _QUANTIZERS:
            return _QUANTIZERS[known] or "quantized_format"
    return None


def _code_of_class(cls: type) -> str | None:
    """Return the reason code of a class or of a class that it is derived from, or None."""
    return next((code for each in cls.__mro__ if (code := _code_of_home(each.__module__)) is not None), None)


def function_code(function: Any) -> str | None:
    """Return the reason code of a forward or hook that another package has put onto a module, or None."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    if getattr(function, "__name__", "") == NAMES_OF_ROWS:
        return "adapter_names"
    # a wrapper has taken on the name of the module of what it wraps
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(type(function), "__module__", "")
    return None if home.startswith(("torch.", "transformers.")) else _code_of_home(home)


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules that adapters of PEFT consist of, without what they are put around."""
    found: set[int] = set()
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            if isinstance(inside := getattr(module, name, None), nn.Module):
                found.update(map(id, inside.modules()))
    return found


def merged_layer(model: nn.Module) -> str | None:
    """Return the name of a layer into whose weight an adapter of PEFT is merged, but not for good; or None."""
    layers = ((name, each) for name, each in model.named_modules() if getattr(each, "adapter_layer_names", ()))
    return next((name for name, each in layers if getattr(each, "merged_adapters", ())), None)


def foreign_code(module: nn.Module) -> str | None:
    """Return the reason code of a layer that another package has made or quantized; None for any other layer.

    An adapter around a quantized layer counts as quantized: to merge it would leave the weights quantized.
    """
    if "quantization_scheme" in vars(module):
        return "compressed_tensors"
    code = _code_of_class(type(module))
    if code != "adapter":
        return code or _code_of_weight(module)
    inside = vars(module).get("_modules", {}).get(INSIDE_ADAPTER)
    return (None if inside is None else foreign_code(inside)) or code


def _code_of_weight(module: nn.Module) -> str | None:
    """Return ``"quantized_format"`` or a package's own code if a layer's weight is quantized, or None."""
    weight = {**module._buffers, **module._parameters}.get("weight")
    if weight is None:
        return None
    code = _code_of_class(type(weight))
    return code or (None if weight.dtype in _FLOATS else "quantized_format")


def foreign_layer(model: nn.Module) -> nn.Module | None:
    """Return the first layer of a model whose weights another package has quantized, or None."""
    return next((module for module in model.modules() if foreign_code(module) not in (None, "adapter")), None)
