"""transformers' quantizers: what ``from_pretrained()`` makes of a model before it loads a quantized checkpoint."""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.quantizers_utils import should_convert_module

__all__ = ["should_convert_module"]


def quantization_config(config: Any) -> dict[str, Any] | None:
    """Return what a config says of quantized weights, as ``config.json`` has it, or None if they are not quantized."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            return copy.deepcopy(dict(found)) if isinstance(found, Mapping) else found.to_dict()
    return None


def quantization_methods() -> dict[str, type]:
    """Return the methods that transformers knows, and the classes of their configs."""
    return dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)


def quantization_method(quantized: Mapping[str, Any]) -> str:
    """Return the name of a ``quantization_config``'s method."""
    for bits in ("4bit", "8bit"):
        if quantized.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(getattr(quantized.get("quant_method"), "value", quantized.get("quant_method")))


def dequantizing_option(method: str) -> str | None:
    """Return the argument of ``from_pretrained()`` with which transformers dequantizes as it loads, or None."""
    cls = quantization_methods().get(method)
    names = inspect.signature(cls).parameters if cls is not None else {}
    for name, value in (("dequantize", True), ("run_compressed", False)):
        if cls is not None and name in names:
            return f"quantization_config={cls.__name__}({name}={value})"
    return None


class Loaded(enum.Enum):
    """What ``from_pretrained()`` makes of a quantized checkpoint: plain weights, layers of other classes, or only
    tensors of other classes, which are not there before the weights are."""

    PLAIN = enum.auto()
    LAYERS = enum.auto()
    TENSORS = enum.auto()


def give_quantized_layers(model: nn.Module, quantized: Mapping[str, Any]) -> Loaded:
    """Give a model on the meta device the layers that it has after ``from_pretrained()`` on this machine.

    Raises:
        Exception: whatever transformers or the method's package raise: a package or a GPU is missing, or the method
            needs the checkpoint's files.
    """
    before = [type(module) for module in model.modules()]
    quantizer = auto.AutoHfQuantizer.from_config(copy.deepcopy(dict(quantized)), pre_quantized=True)
    if quantization_method(quantized) == "gguf":
        raise ValueError("weights in a GGUF file are loaded with from_pretrained(..., gguf_file=...)")
    quantizer.validate_environment(device_map=None, weights_only=True)
    quantizer.update_dtype(model.dtype)
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None, checkpoint_files=None)
    if getattr(quantizer.quantization_config, "dequantize", False):
        return Loaded.PLAIN
    schemes = any(hasattr(module, "quantization_scheme") for module in model.modules())
    has_layers = schemes or [type(module) for module in model.modules()] != before
    return Loaded.LAYERS if has_layers else Loaded.TENSORS
