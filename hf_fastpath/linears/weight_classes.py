"""Linear layers of torchao and optimum-quanto, whose weights are tensors of classes of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..choices import InputQuants
from ..errors import NoCounterpart
from ..packed_formats import BLOCK
from ..quantization.formats import InputRounding
from .checkpoint_weights import AffineWeight, ByteWeight, IntWeight
from .with_minimums import quanto_bits, release_quanto_bits, restore_quanto_bits


def _need(is_so: bool, reason: str = "quantized_format") -> None:
    if not is_so:
        raise NoCounterpart(reason)


# ---- torchao -------------------------------------------------------------------------------------------------

#: bits of the types that torchao has for quants, which lie in bytes -> bits of our formats that hold them
TORCHAO_BITS = {torch.int8: 8} | {
    getattr(torch, f"int{bits}"): max(bits, 2) if bits <= 4 else 8
    for bits in range(1, 8)
    if hasattr(torch, f"int{bits}")
}
#: attributes of a weight with which torchao multiplies or rounds a product's input
_OF_INPUTS = ("act_quant_scale", "act_quant_zero_point", "act_pre_scale", "activation_quantization")


def _granularity(kwargs: Any) -> str:
    return type(kwargs.granularity).__name__


def _torchao_rounding(weight: torch.Tensor) -> InputRounding | None:
    """Return how products with a weight of torchao's round their input, or None."""
    _need(all(getattr(weight, name, None) is None for name in _OF_INPUTS), "quantized_activations")
    inputs = getattr(weight, "act_quant_kwargs", None)
    if inputs is None:
        return None
    of_rows = type(inputs).__name__ == "QuantizeTensorToInt8Kwargs" and _granularity(inputs) == "PerRow"
    mapping = getattr(inputs, "mapping_type", None)
    is_symmetric = getattr(mapping, "name", mapping) == "SYMMETRIC"
    _need(of_rows and is_symmetric and not inputs.reduce_range, "quantized_activations")
    return InputRounding(InputQuants.INT8_ROW)


def torchao_integers(module: nn.Module) -> IntWeight | ByteWeight:
    """Read qdata int8 [out, in], and scale and zero_point [out, groups], or one for each row or for all.

    Raises:
        NoCounterpart: the layer rounds its input in a way that ours do not.
    """
    weight: Any = module.weight
    rounding = _torchao_rounding(weight)
    bits = TORCHAO_BITS.get(getattr(weight, "target_dtype", torch.int8), 0)
    _need(bits > 0 and weight.qdata.dtype == torch.int8 and weight.qdata.dim() == 2)
    (rows, columns), (height, width) = weight.qdata.shape, weight.block_size
    scales = weight.scale.reshape(-1, weight.scale.shape[-1])
    zeros = torch.zeros_like(scales) if weight.zero_point is None else weight.zero_point.reshape(scales.shape)
    _need(not zeros.is_floating_point() or torch.equal(zeros, zeros.round()))
    has_rows = bits == 8 and width == columns and height in (1, rows) and not bool(zeros.any())
    if has_rows and (scales.dtype == torch.float32 or type(weight).__name__ == "Int8Tensor"):
        return ByteWeight(weight.qdata, scales.float().expand(rows, 1), rounding)
    _need(height == 1 and rounding is None)
    return IntWeight(bits, width, weight.qdata, scales, zeros.to(torch.int16))


def torchao_floats(module: nn.Module) -> ByteWeight:
    """Read qdata float8_e4m3fn [out, in] and scale float32: one for each row, block of 128 inputs, or for all."""
    weight: Any = module.weight
    _need(_torchao_rounding(weight) is None, "quantized_activations")
    _need(weight.qdata.dtype == torch.float8_e4m3fn and weight.qdata.dim() == 2, "quantized_fp8")
    (rows, columns), (height, width) = weight.qdata.shape, weight.block_size
    scales = weight.scale.float().reshape(-(-rows // height), -(-columns // width))
    scales = scales.repeat_interleave(height, dim=0)[:rows]
    if width < columns:
        _need(width % BLOCK == 0, "quantized_fp8")
        scales = scales.repeat_interleave(width // BLOCK, dim=1)[:, : -(-columns // BLOCK)]
    return ByteWeight(weight.qdata, scales)


def torchao_written(module: nn.Module, weight: IntWeight) -> dict[str, torch.Tensor]:
    """Make the quants that :func:`torchao_integers` has read."""
    return {"weight.qdata": weight.quants}


def release_torchao(module: nn.Module) -> None:
    """Free the quants; scales stay."""
    module.weight.qdata.data = module.weight.qdata.data.new_empty(0)


def restore_torchao(module: nn.Module, quants: torch.Tensor) -> None:
    """Give a layer its quants again, on the device of its weight."""
    qdata = module.weight.qdata
    qdata.data = quants.contiguous().view(qdata.dtype).to(qdata.device)


# ---- optimum-quanto ------------------------------------------------------------------------------------------


def quanto(module: nn.Module) -> ByteWeight | AffineWeight:
    """Read ``_data`` int8 or float8_e4m3fn [out, in] and ``_scale`` [out, 1] of a frozen layer's weight, or what
    :func:`~.with_minimums.quanto_bits` reads."""
    weight: Any = module.weight
    _need(getattr(module, "activation_qtype", None) is None, "quantized_activations")
    kind = type(weight).__name__
    _need(kind not in ("MarlinF8QBytesTensor", "AWQWeightQBitsTensor"), "quantized_kernel")
    if kind in ("WeightQBitsTensor", "TinyGemmWeightQBitsTensor"):
        return quanto_bits(weight)
    _need(kind == "WeightQBytesTensor")
    values, scales = weight._data, weight._scale
    _need(values.dim() == 2 and weight.axis == 0 and tuple(scales.shape) == (values.shape[0], 1))
    _need(values.dtype in (torch.int8, torch.float8_e4m3fn), "quantized_fp8")
    return ByteWeight(values.detach(), scales.detach().float())


def release_quanto(module: nn.Module) -> None:
    """Free the quants; scales stay."""
    if type(module.weight).__name__ != "WeightQBytesTensor":
        return release_quanto_bits(module.weight)
    module.weight._data.data = module.weight._data.data.new_empty(0)


def restore_quanto(module: nn.Module, quants: torch.Tensor) -> None:
    """Give a layer its quants again, on the device of its weight."""
    if type(module.weight).__name__ != "WeightQBytesTensor":
        return restore_quanto_bits(module.weight, quants)
    data = module.weight._data
    data.data = quants.contiguous().view(data.dtype).to(data.device)
