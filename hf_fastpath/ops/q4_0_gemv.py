"""Linear layer with a weight in ggml's Q4_0, in two plain layouts with which ``packed_gemv``'s layout is compared.

No model calls this op; ``python -m hf_fastpath bench gemv`` does.
"""

from __future__ import annotations

import torch

from ..quantization import FORMATS, PackedWeight, quantize
from ..quantization.formats import unpack
from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons

#: weights that share a scale, and the bytes of their quants
GROUP, QUANT_BYTES = 32, 16
#: bytes of a block: a float16 scale, then quants
BLOCK_BYTES = 2 + QUANT_BYTES
LAYOUTS = ("interleaved", "split")


def dequantize(quants: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return float32 [out_features, in_features] of a weight as :func:`reference` takes it."""
    rows = quants.shape[0]
    if scales is None:
        blocks = quants.contiguous().view(rows, -1, BLOCK_BYTES)
        scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        quants = blocks[..., 2:]
    quants = quants.reshape(rows, -1, QUANT_BYTES)
    steps = torch.cat((quants & 15, quants >> 4), dim=-1).float() - 8
    return (steps * scales.float()[..., None]).view(rows, -1)


def reference(x: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T`` for one row of x.

    A group of 32 weights is ``scale * (quant - 8)``; byte i of its 16 bytes holds weight i in the low four bits and
    weight i + 16 in the high four bits.

    Args:
        x: [..., in_features], one row; in_features in multiples of 32.
        quants: with scales, uint8 [out_features, in_features / 2], all groups behind each other ("split"). Without
            scales, uint8 [out_features, in_features / 32 * 18], each group's quants behind its float16 scale
            ("interleaved"), as in GGUF files.
        scales: float16 [out_features, in_features / 32], or None.

    Returns:
        [..., out_features] in x's dtype, contiguous; rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or there is more than one row.

    Source: ``block_q4_0`` of ggml.
    """
    return torch.nn.functional.linear(x, dequantize(quants, scales).to(x.dtype))


def fake(x, quants):
    return x.new_empty(*x.shape[:-1], quants.shape[0])


def why_not(x, quants, scales=None) -> list[str]:
    reasons = tensor_reasons(x)
    if reasons:
        return reasons
    in_features = x.shape[-1] if x.dim() else 0
    if in_features % GROUP or not in_features or x.numel() != in_features:
        return [f"x has shape {tuple(x.shape)}, expected one row of a multiple of {GROUP} features"]
    groups = in_features // GROUP
    width = groups * (BLOCK_BYTES if scales is None else QUANT_BYTES)
    if quants.dim() != 2 or quants.shape[1] != width:
        reasons.append(f"quants has shape {tuple(quants.shape)}, expected [out_features, {width}]")
    if scales is not None and scales.shape != (quants.shape[0], groups):
        reasons.append(f"scales has shape {tuple(scales.shape)}, expected {(quants.shape[0], groups)}")
    for name, part, dtype in (("quants", quants, torch.uint8), ("scales", scales, torch.float16)):
        if part is not None and part.dtype != dtype:
            reasons.append(f"{name} has dtype {part.dtype}, expected {dtype}")
        if part is not None and part.device != x.device:
            reasons.append(f"{name} is on {part.device}, expected {x.device}: move it")
    return reasons


def laid_out(packed: PackedWeight, layout: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return quants and scales, as :func:`reference` takes them, of a weight in format ``int4_g32``.

    Raises:
        ValueError: the weight has another format, a row is no multiple of 32, or the layout is unknown.
    """
    if packed.format.name != "int4_g32" or packed.in_features % GROUP or layout not in LAYOUTS:
        raise ValueError(
            f"laid_out() got {packed.format.name}, {packed.in_features} features and layout {layout!r}, expected "
            f"int4_g32, a multiple of {GROUP}, and one of {', '.join(LAYOUTS)}"
        )
    rows, groups = packed.out_features, packed.in_features // GROUP
    steps = unpack(packed.format, packed.quants).view(rows, -1, GROUP)[:, :groups]
    quants = steps[..., :QUANT_BYTES] | steps[..., QUANT_BYTES:] << 4
    scales = (packed.scales.float() * packed.multiplier).half()[:, :groups].contiguous()
    if layout == "split":
        return quants.reshape(rows, -1), scales
    blocks = torch.cat((scales[..., None].view(torch.uint8), quants), dim=-1)
    return blocks.view(rows, -1), None


def samples(device: torch.device, dtype: torch.dtype):
    for k, n in ((32, 9), (64, 70), (96, 33), (1056, 37), (2048, 65), (4096, 300)):
        packed = quantize(torch.randn(n, k, device=device) * k**-0.5, FORMATS["int4_g32"])
        for layout in LAYOUTS:
            x = torch.randn(1, 1, k, device=device, dtype=dtype)
            yield Sample(x, *laid_out(packed, layout))
            yield Sample(x[0, 0], *laid_out(packed, layout))


SPEC = register(
    OpSpec(
        name="q4_0_gemv",
        schema="(Tensor x, Tensor quants, Tensor? scales=None) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda x, quants, scales=None: nbytes(x, quants, scales) + quants.shape[0] * x.element_size(),
        samples=samples,
    )
)
