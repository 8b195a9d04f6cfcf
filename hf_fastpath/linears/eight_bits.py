"""Layers of other packages whose weights are bytes, and whose products may round their input to bytes as well.

FP8 of transformers and of FBGEMM, FP8 and INT8 of compressed-tensors, and LLM.int8 of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..choices import InputQuants
from ..errors import NoCounterpart
from ..packed_formats import BLOCK
from ..quantization.formats import InputRounding
from .checkpoint_weights import ByteWeight

#: types of weights that are bytes
BYTES = (torch.float8_e4m3fn, torch.int8)


def _need(is_so: bool, reason: str = "quantized_fp8") -> None:
    if not is_so:
        raise NoCounterpart(reason)


def _of_blocks(scales: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Return the scales of blocks of rows and columns as those of each row and 128 columns."""
    _need(block[1] % BLOCK == 0)
    shape = -(-rows // block[0]), -(-columns // block[1])
    _need(tuple(scales.shape) == shape)
    of_rows = scales.float().repeat_interleave(block[0], dim=0)[:rows]
    return of_rows.repeat_interleave(block[1] // BLOCK, dim=1)[:, : -(-columns // BLOCK)].contiguous()


def fine_grained(module: nn.Module) -> ByteWeight:
    """Read weight float8 [out, in] and weight_scale_inv, float32 or float8_e8m0fnu [out / block, in / block] or one
    number: a token's inputs are rounded by blocks of 128, or as a whole."""
    weight, block = module.weight, module.block_size
    _need(weight.dtype == torch.float8_e4m3fn and weight.dim() == 2)
    _need(module.activation_scheme == "dynamic", "quantized_activations")
    scales, rows = module.weight_scale_inv.detach(), weight.shape[0]
    if block is None:
        _need(scales.numel() == 1)
        of_rows = scales.float().reshape(1, 1).expand(rows, 1)
        return ByteWeight(weight.detach(), of_rows, InputRounding(InputQuants.FP8_ROW))
    _need(block[1] == BLOCK)  # of inputs, too
    of_blocks = _of_blocks(scales, tuple(block), *weight.shape)
    return ByteWeight(weight.detach(), of_blocks, InputRounding(InputQuants.FP8_BLOCK))


def fbgemm(module: nn.Module) -> ByteWeight:
    """Read weight float8 [out, in], weight_scale float32 [out, 1], input_scale_ub [1]: the largest magnitude of a
    token's inputs that counts for their scale."""
    weight = module.weight
    _need(weight.dtype == torch.float8_e4m3fn and tuple(module.weight_scale.shape) == (weight.shape[0], 1))
    limit = float(module.input_scale_ub)
    return ByteWeight(weight.detach(), module.weight_scale.detach().float(), InputRounding(InputQuants.FP8_ROW, limit))


def compressed_rounding(inputs: Mapping[str, Any] | None, of_integers: bool) -> InputRounding | None:
    """Return how compressed-tensors rounds inputs, given ``input_activations`` of a config.

    Raises:
        NoCounterpart: it does so in a way that we have not.
    """
    if inputs is None:
        return None
    strategy, reason = inputs.get("strategy"), "quantized_activations"
    _need(inputs.get("dynamic") is True and inputs.get("symmetric", True) and inputs.get("num_bits") == 8, reason)
    _need(inputs.get("type", "int") == ("int" if of_integers else "float"), reason)
    if strategy == "token":
        return InputRounding(InputQuants.INT8_ROW_NARROW if of_integers else InputQuants.FP8_ROW_NARROW)
    _need(strategy == "group" and inputs.get("group_size") == BLOCK and not of_integers, reason)
    return InputRounding(InputQuants.FP8_BLOCK_NARROW)


def _as_in_config(inputs: Any) -> dict[str, Any] | None:
    """Return a layer's ``input_activations`` as a config has them."""
    if inputs is None:
        return None
    names = ("dynamic", "symmetric", "num_bits", "type", "strategy", "group_size")
    values = {name: getattr(inputs, name) for name in names if hasattr(inputs, name)}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def compressed(module: nn.Module) -> ByteWeight:
    """Read weight float8 or int8 [out, in] and weight_scale [out, 1], [1] or [out / block, in / block]."""
    scheme, weight = module.quantization_scheme, module.weight
    how, of_integers = scheme.weights, weight.dtype == torch.int8
    _need(how is not None and scheme.output_activations is None, "quantized_activations")
    reason = "quantized_format" if of_integers else "quantized_fp8"
    _need(how.num_bits == 8 and how.symmetric and weight.dtype in BYTES, reason)
    rounding = compressed_rounding(_as_in_config(scheme.input_activations), of_integers)
    strategy, rows = str(getattr(how.strategy, "value", how.strategy)), weight.shape[0]
    scales = module.weight_scale.detach()
    if strategy == "block":
        _need(not of_integers, reason)
        return ByteWeight(weight.detach(), _of_blocks(scales, tuple(how.block_structure), *weight.shape), rounding)
    _need(strategy in ("channel", "tensor") and scales.numel() in (1, rows), reason)
    return ByteWeight(weight.detach(), scales.float().reshape(-1, 1).expand(rows, 1), rounding)


def refused(module: nn.Module) -> ByteWeight:
    """Refuse layers that are no single matrix."""
    raise NoCounterpart("quantized_fp8")


def release(module: nn.Module) -> None:
    """Free the bytes; scales stay."""
    module.weight.data = module.weight.data.new_empty(0)


def restore(module: nn.Module, quants: torch.Tensor) -> None:
    """Give a layer its bytes again, on the device of ``quants``, and scales there."""
    module.weight.data = quants.contiguous().view(module.weight.dtype)
    for scale in (getattr(module, name, None) for name in ("weight_scale_inv", "weight_scale", "input_scale_ub")):
        if scale is not None and scale.device != quants.device:
            scale.data = scale.data.to(quants.device)


# ---- LLM.int8 ------------------------------------------------------------------------------------------------


def _bytes_and_scales(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return ``CB`` and ``SCB``, which the first call moves from the weight to the state."""
    places = getattr(module, "state", None), module.weight
    found = [(each.CB, each.SCB) for each in places if getattr(each, "CB", None) is not None]
    return found[0] if found else (None, None)


def llm_int8(module: nn.Module) -> ByteWeight:
    """Read CB int8 [out, in], whose weights are ``CB * SCB / 127``, and SCB float32 [out]."""
    values, scales = _bytes_and_scales(module)
    _need(values is not None and scales is not None and not module.state.has_fp16_weights, "quantized_format")
    assert values is not None and scales is not None
    _need(values.dtype == torch.int8 and tuple(values.shape) == (module.out_features, module.in_features))
    limit = float(module.state.threshold or 0.0)
    # as bitsandbytes' int8_vectorwise_dequant() has it, but for the order of two products
    return ByteWeight(values.detach(), (scales.float() / 127)[:, None], InputRounding(InputQuants.INT8_OUTLIERS, limit))


def release_llm_int8(module: nn.Module) -> None:
    """Free the bytes; SCB stays."""
    nothing = module.weight.data.new_empty(0)
    for each in (module.state, module.weight):
        if getattr(each, "CB", None) is not None:
            each.CB = nothing
    module.weight.data = nothing


def restore_llm_int8(module: nn.Module, quants: torch.Tensor) -> None:
    """Give a layer its bytes again, on the device of ``quants``, and scales there."""
    module.weight.data = quants.contiguous().view(torch.int8)
    for each in (module.state, module.weight):
        if getattr(each, "CB", None) is not None:
            each.CB = module.weight.data
        if getattr(each, "SCB", None) is not None:
            each.SCB = each.SCB.to(quants.device)
