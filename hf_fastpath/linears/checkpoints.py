"""Quantized layers of other packages, as transformers loads their checkpoints: what the tensors of each family mean.

A family is recognized by the class of its layer (or of its weight) and by the package of that class, because packages
give tensors of the same name another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import NoCounterpart


@dataclass(frozen=True)
class IntWeight:
    """A weight of integers: its values are ``scale * (quant - zero)``.

    Attributes:
        bits: bits of a quant.
        group: number of weights in a row that share a scale.
        quants: int16 [out_features, in_features], from ``-2 ** (bits - 1)`` up.
        scales: float [out_features, groups].
        zeros: int16 [out_features, groups], on the same scale as quants.
    """

    bits: int
    group: int
    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


@dataclass(frozen=True)
class TableWeight:
    """A weight whose quants are places in a table: its values are ``scale * table[quant]`` in float32.

    Attributes:
        table: 16 values, each a float32.
        block: number of weights that share a scale, where rows follow each other.
        quants: uint8 [out_features, in_features], from 0 up.
        scales: float32 [blocks], the last of which may be shorter.
    """

    table: tuple[float, ...]
    block: int
    quants: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class LayerFamily:
    """Layers of one kind.

    Attributes:
        name: name of the package or method, for messages.
        package: the package that the class is from.
        classes: class names of layers, or of weights in an ``nn.Linear``.
        read: reads a layer's weight.
        release: frees what ``restore`` can make again of the quants that ``read`` gave; None: nothing.
        restore: gives a layer what was freed, bit for bit.

    ``read`` raises NoCounterpart if a layer of the family means more than these weights can say.
    """

    name: str
    package: str
    classes: tuple[str, ...]
    read: Callable[[nn.Module], IntWeight | TableWeight]
    release: Callable[[nn.Module], None] | None = None
    restore: Callable[[nn.Module, torch.Tensor], None] | None = None

    def has(self, module: nn.Module) -> bool:
        """Whether ``module`` is a layer of this family."""
        if type(module) is not nn.Linear:
            return self._names(type(module))
        return self._names(type(module.weight)) if "weight" in module._parameters else self._names(_scheme_of(module))

    def _names(self, cls: type) -> bool:
        return cls.__module__.partition(".")[0] == self.package and cls.__name__ in self.classes


def _scheme_of(module: nn.Module) -> type:
    return type(vars(module).get("quantization_scheme"))


def unpacked(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the numbers that int32 words hold along ``dim``, first in the lowest bits, as unsigned values in int16.

    Args:
        order: the position of the number that each part of a word holds; None if numbers are in order.
    """
    moved = words.movedim(dim, -1)
    places = range(32 // bits) if order is None else sorted(range(len(order)), key=order.__getitem__)
    parts = [(moved >> (bits * place)) & ((1 << bits) - 1) for place in places]
    return torch.stack(parts, dim=-1).flatten(-2).movedim(-1, dim).to(torch.int16)


def _need(is_so: bool, reason: str = "quantized_format") -> None:
    if not is_so:
        raise NoCounterpart(reason)


def _gptqmodel_layer(module: nn.Module) -> tuple[int, int]:
    """Return bits and group of a layer that still holds its tensors as they are in the checkpoint."""
    _need(getattr(module, "linear_mode", None) in (None, "train"), "quantized_in_use")
    _need(getattr(module, "adapter", None) is None)
    _need(not any(getattr(module, name, False) for name in ("online_full_had", "online_partial_had")))
    bits, group = module.bits, module.group_size
    _need(bits in (2, 4, 8))
    return bits, module.in_features if group in (-1, 0) else group


def _gptq(module: nn.Module) -> IntWeight:
    """Read qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out] and g_idx [in]."""
    bits, group = _gptqmodel_layer(module)
    columns = torch.arange(module.in_features, device=module.qweight.device)
    _need(module.g_idx is None or torch.equal(module.g_idx.long(), columns // group), "quantized_order")
    _need(module.qweight.shape == (module.in_features * bits // 32, module.out_features))
    half = 1 << (bits - 1)
    zeros = unpacked(module.qzeros, bits, 1)
    if module.qzero_format() == 1:  # files of this format hold zero - 1
        zeros += 1
        _need(int(zeros.max()) < 2 * half)
    quants = unpacked(module.qweight, bits, 0).t() - half
    return IntWeight(bits, group, quants, module.scales.t(), zeros.t() - half)


#: the position of the number that each four bits of a word hold
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(module: nn.Module) -> IntWeight:
    """Read qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; words are in AWQ_ORDER."""
    bits, group = _gptqmodel_layer(module)
    _need(bits == 4 and module.qweight.shape == (module.in_features, module.out_features // 8))
    quants, zeros = (unpacked(words, 4, 1, AWQ_ORDER).t() - 8 for words in (module.qweight, module.qzeros))
    return IntWeight(4, group, quants, module.scales.t(), zeros)


def _compressed(module: nn.Module) -> IntWeight:
    """Read weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point packed along out."""
    scheme, own = module.quantization_scheme, module._parameters
    how = scheme.weights
    _need(how is not None and scheme.input_activations is None and scheme.output_activations is None)
    _need("weight_packed" in own and how.type == "int" and how.num_bits in (4, 8))
    _need("weight_g_idx" not in own, "quantized_order")
    _need(how.strategy in ("group", "channel", "tensor"))
    bits, half = how.num_bits, 1 << (how.num_bits - 1)
    rows, columns = module.weight_shape.tolist()
    group = how.group_size if how.strategy == "group" else columns
    scales = module.weight_scale.reshape(-1, module.weight_scale.shape[-1]).expand(rows, -1)
    zeros = torch.zeros(scales.shape, dtype=torch.int16, device=scales.device)
    if not how.symmetric:
        _need("weight_zero_point" in own)
        found = module.weight_zero_point
        packed = found.dtype == torch.int32
        found = unpacked(found, bits, 0)[:rows] - half if packed else found.to(torch.int16)
        zeros = found.reshape(-1, scales.shape[1]).expand(rows, -1)
    quants = unpacked(module.weight_packed, bits, 1)[:rows, :columns] - half
    return IntWeight(bits, group, quants, scales, zeros)


#: bits of the types that torchao has for quants
_TORCHAO_BITS = {torch.int8: 8} | {getattr(torch, f"int{n}"): n for n in (2, 3, 4) if hasattr(torch, f"int{n}")}


def _torchao(module: nn.Module) -> IntWeight:
    """Read qdata int8 [out, in], scale and zero_point [out, groups]; the layer must not quantize activations."""
    weight = module.weight
    extras = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")
    _need(all(getattr(weight, name, None) is None for name in extras))
    bits = _TORCHAO_BITS.get(getattr(weight, "target_dtype", torch.int8), 0)
    rows, group = weight.block_size
    _need(bits > 0 and rows == 1 and weight.qdata.dtype == torch.int8)
    zeros = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point
    _need(not zeros.is_floating_point() or torch.equal(zeros, zeros.round()))
    return IntWeight(bits, group, weight.qdata.to(torch.int16), weight.scale, zeros.to(torch.int16))


def _quant_state(module: nn.Module) -> Any:
    """Return what bitsandbytes says of a weight of four bits, or None if it has not quantized the weight yet."""
    found = getattr(module.weight, "quant_state", None)
    return getattr(module, "quant_state", None) if found is None else found


def _bitsandbytes(module: nn.Module) -> TableWeight:
    """Read weight uint8 [out * in / 2, 1], a byte's first number in its high bits, and its ``quant_state``: absmax
    float32 [blocks], or nested: uint8 [blocks], places in a code of 256 values with scales and an offset of its own."""
    state = _quant_state(module)
    _need(state is not None and tuple(state.shape) == (module.out_features, module.in_features))
    _need(not getattr(state, "packing_format_for_cpu", False), "quantized_in_use")
    rows, columns = state.shape
    numbers = module.weight.data.contiguous().view(-1).view(torch.uint8)
    _need(numbers.numel() == (rows * columns + 1) // 2 and state.quant_type in ("nf4", "fp4"))
    quants = torch.stack((numbers >> 4, numbers & 15), dim=-1).view(-1)[: rows * columns].view(rows, columns)
    scales, inner = state.absmax, state.state2
    if inner is not None:
        whole = inner.absmax.float().repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = inner.code.float()[scales.int()] * whole + state.offset
    return TableWeight(tuple(state.code.float().tolist()), state.blocksize, quants, scales.float())


def _release_bitsandbytes(module: nn.Module) -> None:
    """Free the quants; ``quant_state`` stays."""
    module.weight.data = module.weight.data.new_empty(0)


def _restore_bitsandbytes(module: nn.Module, quants: torch.Tensor) -> None:
    """Make the bytes again that :func:`_bitsandbytes` has read, on the device of ``quants``."""
    pairs = functional.pad(quants.reshape(-1), (0, quants.numel() % 2)).view(-1, 2)
    numbers = pairs[:, 0] << 4 | pairs[:, 1]
    module.weight.data = numbers.view(module.weight.dtype).view(-1, 1)
    _quant_state(module).to(quants.device)


def _no_weight(module: nn.Module) -> IntWeight:
    """Refuse layers that quantize activations as well."""
    raise NoCounterpart("quantized_format")


#: layers that transformers loads; GPTQ's and AWQ's layers hold the checkpoint's tensors until they are first called
FAMILIES = (
    LayerFamily(
        "GPTQ",
        "gptqmodel",
        ("TorchLinear", "TorchAtenLinear", "TorchCpuAvx512Linear", "TorchFusedLinear", "TritonV2Linear"),
        _gptq,
    ),
    LayerFamily(
        "AWQ",
        "gptqmodel",
        (
            *("AwqTorchLinear", "TorchFusedAwqLinear", "TorchAtenAwqLinear", "TorchCpuAvx512AwqLinear"),
            *("AwqGEMMLinear", "AwqGEMMTritonLinear"),
        ),
        _awq,
    ),
    LayerFamily("compressed-tensors", "compressed_tensors", ("QuantizationScheme",), _compressed),
    LayerFamily("torchao", "torchao", ("Int8Tensor", "IntxUnpackedToInt8Tensor"), _torchao),
    LayerFamily(
        "bitsandbytes",
        "bitsandbytes",
        ("Linear4bit", "LinearNF4", "LinearFP4"),
        _bitsandbytes,
        _release_bitsandbytes,
        _restore_bitsandbytes,
    ),
    LayerFamily("bitsandbytes of 8 bits", "bitsandbytes", ("Linear8bitLt",), _no_weight),
)

#: why a layer of a known family keeps its own code, for the layers that patch() has looked at
_seen: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def family_of(module: nn.Module) -> LayerFamily | None:
    """Return the family of a quantized layer, or None."""
    return next((family for family in FAMILIES if family.has(module)), None)


def note(module: nn.Module, reason: str) -> None:
    """Remember why a layer keeps its own code."""
    _seen[module] = reason


def noted(module: nn.Module) -> str | None:
    """Return what :func:`note` was told of ``module``, or None."""
    return _seen.get(module)
