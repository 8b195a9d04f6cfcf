"""Layers of compressed-tensors whose weights are floats of four bits: NVFP4 and MXFP4, weights only."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import NoCounterpart
from ..packed_formats import E2M1, FORMATS
from .checkpoint_weights import DequantizedWeight, TableWeight

#: weights that share a scale -> its type
_SCALES = {16: torch.float8_e4m3fn, 32: torch.uint8}
_NAN_SCALE = 255
#: type of the weight that the package's own dequantization gives
_DEQUANTIZED = torch.bfloat16


def _need(is_so: bool, reason: str = "quantized_format") -> None:
    if not is_so:
        raise NoCounterpart(reason)


def is_four_bit_float(module: nn.Module) -> bool:
    """Whether a layer of compressed-tensors has floats of four bits as its weight."""
    how = getattr(module.quantization_scheme, "weights", None)
    return getattr(how, "num_bits", None) == 4 and str(getattr(how.type, "value", how.type)) == "float"


def compressed_floats(module: nn.Module) -> DequantizedWeight | TableWeight:
    """Read weight_packed uint8 [out, in / 2], a byte's first number in its low bits, weight_scale [out, in / group],
    and of NVFP4 weight_global_scale float32 [1], by which scales are divided.

    Returns:
        Of MXFP4 places in a table, of NVFP4 the weight, as the package's first call makes it.
    """
    scheme, own = module.quantization_scheme, module._parameters
    how, packed, scales = scheme.weights, own.get("weight_packed"), own.get("weight_scale")
    _need(scheme.input_activations is None and scheme.output_activations is None, "quantized_activations")
    _need(how.symmetric and packed is not None and scales is not None)
    assert packed is not None and scales is not None
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    group, bytes = how.group_size, packed.detach()
    _need(scales.dtype == _SCALES.get(group) and tuple(scales.shape) == (rows, columns // group))
    numbers = torch.stack((bytes & 15, bytes >> 4), dim=-1).view(rows, columns)
    if group == 32:
        _need(not bool((scales == _NAN_SCALE).any()))
        powers = torch.exp2(scales.detach().double() - 127).float()
        weight = TableWeight(E2M1, group, numbers, powers.flatten())
        # on a GPU no product reads these, so that the weight is faster as the package has it
        return weight if packed.device.type == "cpu" or FORMATS["mxfp4"].has_gpu_products else _plain(weight)
    factor = own.get("weight_global_scale")
    _need(factor is not None and factor.numel() == 1)
    assert factor is not None
    return _plain(TableWeight(E2M1, group, numbers, (scales.detach().float() / factor.detach().float()).flatten()))


def _plain(weight: TableWeight) -> DequantizedWeight:
    table = torch.tensor(weight.table, device=weight.quants.device)
    scales = weight.scales.view(len(weight.quants), -1)
    values = table[weight.quants.int()].unflatten(1, (-1, weight.block)) * scales[..., None]
    return DequantizedWeight(values.flatten(1).to(_DEQUANTIZED))
