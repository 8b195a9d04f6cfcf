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
from . import eight_bits, four_bit_floats, gguf_modules, weight_classes, with_minimums
from .checkpoint_weights import AnyWeight, IntWeight, TableWeight


@dataclass(frozen=True)
class LayerFamily:
    """Layers of one kind.

    Attributes:
        name: name of the package or method, for messages.
        package: the package that the class is from.
        classes: class names of layers, or of weights in an ``nn.Linear``.
        read: reads a layer's weight.
        written: makes a layer's tensors, by name, of the integers that ``read`` gave; None: what is here is kept.
        release: frees what ``restore`` can make again of other quants that ``read`` gave; None: nothing.
        restore: gives a layer what was freed, bit for bit, of its quants; or of the weight, ``restores_weight``.
        of_bytes: whether a scheme's weights of bytes belong to it, and no others.

    ``read`` raises NoCounterpart if a layer of the family means more than these weights can say.
    """

    name: str
    package: str
    classes: tuple[str, ...]
    read: Callable[[nn.Module], AnyWeight]
    written: Callable[[nn.Module, IntWeight], dict[str, torch.Tensor]] | None = None
    release: Callable[[nn.Module], None] | None = None
    restore: Callable[[nn.Module, Any], None] | None = None
    restores_weight: bool = False
    of_bytes: bool = False

    def has(self, module: nn.Module) -> bool:
        """Whether ``module`` is a layer of this family."""
        if type(module) is not nn.Linear:
            return self._names(type(module))
        weight = module._parameters.get("weight")
        of_bytes = type(weight) is nn.Parameter and weight.dtype in eight_bits.BYTES
        if weight is None or of_bytes:
            return of_bytes == self.of_bytes and self._names(_scheme_of(module))
        return self._names(type(weight))

    def _names(self, cls: type) -> bool:
        return cls.__module__.partition(".")[0] == self.package and cls.__name__ in self.classes


def _scheme_of(module: nn.Module) -> type:
    return type(vars(module).get("quantization_scheme"))


def unpacked(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the numbers that int32 words hold along ``dim``, first in the lowest bits, as uint8.

    Args:
        order: the position of the number that each part of a word holds; None if numbers are in order.
    """
    moved = words.movedim(dim, -1)
    places = range(32 // bits) if order is None else sorted(range(len(order)), key=order.__getitem__)
    made = torch.empty(*moved.shape, 32 // bits, dtype=torch.uint8, device=words.device)
    for at, place in enumerate(places):
        made[..., at] = (moved >> (bits * place)) & ((1 << bits) - 1)
    return made.flatten(-2).movedim(-1, dim)


def _centered(numbers: torch.Tensor, half: int) -> torch.Tensor:
    """Return uint8 numbers less ``half`` as int8."""
    return (numbers - half).view(torch.int8)


def _from_zero(weight: IntWeight) -> torch.Tensor:
    """Return the quants as uint8 from 0 up, in the order of the inputs."""
    quants = weight.quants if weight.order is None else weight.quants[:, weight.order.argsort()]
    return quants.view(torch.uint8) + (1 << (weight.bits - 1))


def packed_words(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the int32 words of which :func:`unpacked` gives ``numbers``, and zeros up to a whole word."""
    count = 32 // bits
    moved = numbers.movedim(dim, -1)
    moved = functional.pad(moved, (0, -moved.shape[-1] % count)).unflatten(-1, (-1, count))
    words = torch.zeros(moved.shape[:-1], dtype=torch.int32, device=numbers.device)
    for place, which in enumerate(range(count) if order is None else order):
        words |= moved[..., which].to(torch.int32) << (bits * place)
    return words.movedim(-1, dim).contiguous()


def _in_groups(places: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return the order of inputs in which those of a group are neighbors, given each input's group; None if they are
    neighbors as they are.

    Raises:
        NoCounterpart: a group but the last has another number of inputs.
    """
    places = places.long()
    columns = torch.arange(len(places), device=places.device) // group
    if torch.equal(places, columns):
        return None
    order = places.argsort(stable=True)
    _need(torch.equal(places[order], columns), "quantized_order")
    return order


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
    _need(not getattr(module, "planar", False))
    order = None if module.g_idx is None else _in_groups(module.g_idx, group)
    _need(module.qweight.shape == (module.in_features * bits // 32, module.out_features))
    half = 1 << (bits - 1)
    zeros = unpacked(module.qzeros, bits, 1).to(torch.int16)
    if module.qzero_format() == 1:  # files of this format hold zero - 1
        zeros += 1
        _need(int(zeros.max()) < 2 * half)
    quants = _centered(unpacked(module.qweight, bits, 0).t(), half)
    quants = quants if order is None else quants[:, order]
    return IntWeight(bits, group, quants, module.scales.t(), zeros.t() - half, order)


def _gptq_written(module: nn.Module, weight: IntWeight) -> dict[str, torch.Tensor]:
    """Make what :func:`_gptq` reads, but for g_idx."""
    bits, half = weight.bits, 1 << (weight.bits - 1)
    zeros = weight.zeros.t() + half - int(module.qzero_format() == 1)
    qweight = packed_words(_from_zero(weight).t(), bits, 0)
    return dict(qweight=qweight, qzeros=packed_words(zeros, bits, 1), scales=weight.scales.t().contiguous())


#: the position of the number that each four bits of a word hold
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(module: nn.Module) -> IntWeight:
    """Read qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; words are in AWQ_ORDER."""
    bits, group = _gptqmodel_layer(module)
    _need(bits == 4 and module.qweight.shape == (module.in_features, module.out_features // 8))
    return _awq_weight(module, group)


def _awq_weight(module: nn.Module, group: int) -> IntWeight:
    quants, zeros = (_centered(unpacked(words, 4, 1, AWQ_ORDER).t(), 8) for words in (module.qweight, module.qzeros))
    return IntWeight(4, group, quants, module.scales.t(), zeros.to(torch.int16))


def _awq_written(module: nn.Module, weight: IntWeight) -> dict[str, torch.Tensor]:
    """Make what :func:`_awq` reads."""
    words = (packed_words(numbers.t() + 8, 4, 1, AWQ_ORDER) for numbers in (weight.quants, weight.zeros))
    return dict(zip(("qweight", "qzeros"), words), scales=weight.scales.t().contiguous())


def _autoawq(module: nn.Module) -> IntWeight:
    """Read a layer of autoawq itself, whose tensors are those of :func:`_awq`."""
    _need(module.w_bit == 4 and module.qweight.shape == (module.in_features, module.out_features // 8))
    return _awq_weight(module, module.group_size)


def _compressed(module: nn.Module) -> AnyWeight:
    """Read weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point packed along out."""
    if four_bit_floats.is_four_bit_float(module):
        return four_bit_floats.compressed_floats(module)
    scheme, own = module.quantization_scheme, module._parameters
    how = scheme.weights
    _need(how is not None and scheme.input_activations is None and scheme.output_activations is None)
    _need("weight_packed" in own and how.type == "int" and how.num_bits in (4, 8))
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
        found = unpacked(found, bits, 0)[:rows].to(torch.int16) - half if packed else found.to(torch.int16)
        zeros = found.reshape(-1, scales.shape[1]).expand(rows, -1)
    order = _in_groups(module.weight_g_idx, group) if "weight_g_idx" in own else None
    quants = _centered(unpacked(module.weight_packed, bits, 1)[:rows, :columns], half)
    quants = quants if order is None else quants[:, order]
    return IntWeight(bits, group, quants, scales, zeros, order)


def _compressed_written(module: nn.Module, weight: IntWeight) -> dict[str, torch.Tensor]:
    """Make what :func:`_compressed` reads of weights with a scale for each group or row."""
    bits, half, own = weight.bits, 1 << (weight.bits - 1), module._parameters
    made = dict(weight_packed=packed_words(_from_zero(weight), bits, 1), weight_scale=weight.scales)
    if own.get("weight_zero_point") is not None:
        is_packed = own["weight_zero_point"].dtype == torch.int32
        zeros = packed_words(weight.zeros + half, bits, 0) if is_packed else weight.zeros.to(torch.int8)
        made["weight_zero_point"] = zeros
    return made


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


def _of_a_kernel(module: nn.Module) -> IntWeight:
    """Refuse layers whose words are in the order of one kernel, which belongs to a version of the package."""
    raise NoCounterpart("quantized_kernel")


#: layers that transformers loads; GPTQ's and AWQ's layers hold the checkpoint's tensors until they are first called
FAMILIES = (
    LayerFamily(
        "GPTQ",
        "gptqmodel",
        ("TorchLinear", "TorchAtenLinear", "TorchCpuAvx512Linear", "TorchFusedLinear", "TritonV2Linear"),
        _gptq,
        _gptq_written,
    ),
    LayerFamily(
        "AWQ",
        "gptqmodel",
        (
            *("AwqTorchLinear", "TorchFusedAwqLinear", "TorchAtenAwqLinear", "TorchCpuAvx512AwqLinear"),
            *("AwqGEMMLinear", "AwqGEMMTritonLinear"),
        ),
        _awq,
        _awq_written,
    ),
    LayerFamily(
        "GPTQ or AWQ for one kernel",
        "gptqmodel",
        (
            *("MarlinLinear", "ExllamaV2Linear", "MacheteLinear", "SwordfishLinear", "BitblasLinear"),
            *("AwqMarlinLinear", "AwqExllamaV2Linear", "AwqMacheteLinear", "AwqSwordfishLinear", "AWQBitBlasKernel"),
            *("TorchInt8Linear", "TorchInt8AwqLinear", "AwqGEMVLinear", "AwqGEMVFastLinear", "LLMAwqLinear"),
        ),
        _of_a_kernel,
    ),
    LayerFamily("AWQ", "awq", ("WQLinear_GEMM",), _autoawq, _awq_written),
    LayerFamily("compressed-tensors", "compressed_tensors", ("QuantizationScheme",), _compressed, _compressed_written),
    LayerFamily(
        "compressed-tensors of bytes",
        "compressed_tensors",
        ("QuantizationScheme",),
        eight_bits.compressed,
        release=eight_bits.release,
        restore=eight_bits.restore,
        of_bytes=True,
    ),
    LayerFamily(
        "torchao",
        "torchao",
        ("Int8Tensor", "IntxUnpackedToInt8Tensor"),
        weight_classes.torchao_integers,
        weight_classes.torchao_written,
        weight_classes.release_torchao,
        weight_classes.restore_torchao,
    ),
    LayerFamily(
        "torchao of FP8",
        "torchao",
        ("Float8Tensor",),
        weight_classes.torchao_floats,
        release=weight_classes.release_torchao,
        restore=weight_classes.restore_torchao,
    ),
    LayerFamily(
        "quanto",
        "optimum",
        ("QLinear",),
        weight_classes.quanto,
        release=weight_classes.release_quanto,
        restore=weight_classes.restore_quanto,
    ),
    LayerFamily("torchao of four bits", "torchao", ("Int4Tensor",), with_minimums.torchao_pairs),
    LayerFamily("torchao of tiles", "torchao", ("Int4TilePackedTo4dTensor",), with_minimums.torchao_tiles),
    LayerFamily(
        "HQQ",
        "hqq",
        ("HQQLinear",),
        with_minimums.hqq,
        release=with_minimums.release_hqq,
        restore=with_minimums.restore_hqq,
    ),
    LayerFamily(
        "bitsandbytes",
        "bitsandbytes",
        ("Linear4bit", "LinearNF4", "LinearFP4"),
        _bitsandbytes,
        release=_release_bitsandbytes,
        restore=_restore_bitsandbytes,
    ),
    LayerFamily(
        "LLM.int8",
        "bitsandbytes",
        ("Linear8bitLt",),
        eight_bits.llm_int8,
        release=eight_bits.release_llm_int8,
        restore=eight_bits.restore_llm_int8,
    ),
    LayerFamily(
        "FP8 in blocks",
        "transformers",
        ("FP8Linear",),
        eight_bits.fine_grained,
        release=eight_bits.release,
        restore=eight_bits.restore,
    ),
    LayerFamily(
        "GGUF",
        "transformers",
        (gguf_modules.LINEAR,),
        gguf_modules.read,
        release=gguf_modules.release,
        restore=gguf_modules.restore,
        restores_weight=True,
    ),
    LayerFamily("FP8 of experts and groups", "transformers", ("FP8Experts", "FP8GroupedLinear"), eight_bits.refused),
    LayerFamily(
        "FBGEMM",
        "transformers",
        ("FbgemmFp8Linear",),
        eight_bits.fbgemm,
        release=eight_bits.release,
        restore=eight_bits.restore,
    ),
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
