"""Layers of other packages whose weights are bytes, made by the description of their formats, each with the weight that
its bytes stand for; and layers that compute with that weight and rounded inputs."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import nn

from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.ops.fake_quantize import SPEC as FAKE_QUANTIZE

FLOAT8 = torch.float8_e4m3fn


def _frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float8 values, the scale of each block, and the weight that they stand for, in float32."""
    height, width = weight.shape
    scales = torch.empty(-(-height // rows), -(-width // columns))
    values, stands_for = torch.empty(height, width, dtype=FLOAT8), torch.empty(height, width)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
            scales[r, c] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[r, c]).clamp(-448, 448).to(FLOAT8)
            stands_for[at] = values[at].float() * scales[r, c]
    return values, scales, stands_for


def block_fp8(weight: torch.Tensor, bias: torch.Tensor | None = None, scale_fmt: str = "float"):
    """Return transformers' layer of blocks of 128 x 128."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(weight.shape[1], weight.shape[0], (128, 128), scale_fmt=scale_fmt, has_bias=bias is not None)
    values, scales, stands_for = _blocks(weight.detach().float(), 128, 128)
    if scale_fmt == "ue8m0":
        powers = torch.exp2(torch.ceil(torch.log2(scales))).to(torch.float8_e8m0fnu)
        of_rows = powers.float().repeat_interleave(128, 0)[: weight.shape[0]]
        each = of_rows.repeat_interleave(128, 1)[:, : weight.shape[1]]
        values = (weight.detach().float() / each).clamp(-448, 448).to(FLOAT8)
        scales, stands_for = powers, values.float() * each
    layer.weight, layer.weight_scale_inv = _frozen(values), _frozen(scales)
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return layer, stands_for


def tensor_fp8(weight: torch.Tensor, bias: torch.Tensor | None = None):
    """Return transformers' layer with one scale."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(weight.shape[1], weight.shape[0], None, has_bias=bias is not None)
    values, scales, stands_for = _blocks(weight.detach().float(), *weight.shape)
    layer.weight, layer.weight_scale_inv = _frozen(values), _frozen(scales[0, 0].clone())
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return layer, stands_for


def fbgemm_fp8(weight: torch.Tensor, bias: torch.Tensor | None = None, bound: float = 1200.0):
    """Return transformers' layer for FBGEMM, with a scale for each row."""
    from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear

    layer = FbgemmFp8Linear(weight.shape[1], weight.shape[0], bias is not None)
    values, scales, stands_for = _blocks(weight.detach().float(), 1, weight.shape[1])
    layer.weight, layer.weight_scale = _frozen(values), _frozen(scales)
    layer.input_scale_ub = torch.tensor([bound])
    layer.bias = None if bias is None else nn.Parameter(bias.detach().float().clone())
    return layer, stands_for


class QuantizationScheme(SimpleNamespace):
    """How compressed-tensors quantizes a layer."""

    __module__ = "compressed_tensors.somewhere"


_TOKEN = dict(num_bits=8, strategy="token", dynamic=True, symmetric=True)


def compressed_bytes(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    of_integers: bool = False,
    in_blocks: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    inputs: dict | None = _TOKEN,
):
    """Return a layer of compressed-tensors' format ``float-quantized``, ``int-quantized`` or ``naive-quantized``."""
    weight = weight.detach().float()
    layer, kind = nn.Linear(weight.shape[1], weight.shape[0], bias is not None), "int" if of_integers else "float"
    if in_blocks:
        values, scales, stands_for = _blocks(weight, 128, 128)
        inputs = inputs | dict(strategy="group", group_size=128)
    elif of_integers:
        scales = (weight.abs().amax(1, keepdim=True) / 127.5).to(scale_dtype)
        values = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
        stands_for = values.float() * scales.float()
    else:
        scales = (weight.abs().amax(1, keepdim=True) / 448).to(scale_dtype)
        values = (weight / scales.float()).clamp(-448, 448).to(FLOAT8)
        stands_for = values.float() * scales.float()
    layer.weight = _frozen(values)
    layer.register_parameter("weight_scale", _frozen(scales))
    strategy = "block" if in_blocks else "channel"
    layer.quantization_scheme = QuantizationScheme(
        weights=SimpleNamespace(num_bits=8, type=kind, strategy=strategy, block_structure=[128, 128], symmetric=True),
        input_activations=None if inputs is None else SimpleNamespace(type=kind, **inputs),
        output_activations=None,
    )
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return layer, stands_for


class Linear8bitLt(nn.Linear):
    """A layer as bitsandbytes' of the same name keeps it: rows of int8 in ``CB``, of each row the largest magnitude in
    ``SCB``; the first call moves both from the weight to ``state``."""

    __module__ = "bitsandbytes.somewhere"

    def __init__(self, weight: torch.Tensor, threshold: float, bias: torch.Tensor | None = None):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        halves = weight.detach().half().float()
        scales = halves.abs().amax(1)
        self.weight = _frozen((halves * (127.0 / scales[:, None])).round().to(torch.int8))
        self.weight.CB, self.weight.SCB = self.weight.data, scales
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.state = SimpleNamespace(CB=None, SCB=None, threshold=threshold, has_fp16_weights=False)

    def called(self) -> None:
        """Do what the first call does beside its product."""
        self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
        self.weight.CB = self.weight.SCB = None

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        found[f"{prefix}SCB"] = self.state.SCB if self.weight.SCB is None else self.weight.SCB
        return found

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.weight.SCB is not None:
            self.weight.CB, self.weight.SCB = self.weight.data, fn(self.weight.SCB)
        return self

    def __deepcopy__(self, memo):
        like = torch.zeros(self.out_features, self.in_features, device=self.weight.device)
        made = Linear8bitLt(like, self.state.threshold, self.bias)
        made.weight.data.copy_(self.weight.data)
        made.weight.CB, made.weight.SCB = made.weight.data, self.weight.SCB.clone()
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        halves, limit = rows.half(), self.state.threshold
        are_out = halves.abs() >= limit if limit else torch.zeros_like(halves, dtype=torch.bool)
        within = halves.masked_fill(are_out, 0).float()
        most = within.abs().amax(1, keepdim=True)
        quants = (within * (127.0 / most)).round()
        quants[:, are_out.any(0)] = 0
        values = self.weight.data.float()
        scales = self.weight.SCB if self.state.SCB is None else self.state.SCB
        out = (quants @ values.t()) * (most * scales / 127**2)
        out = out + rows[:, are_out.any(0)].float() @ (values * scales[:, None] / 127)[:, are_out.any(0)].t()
        out = out.to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def llm_int8(weight: torch.Tensor, bias: torch.Tensor | None = None, threshold: float = 6.0):
    """Return bitsandbytes' layer."""
    layer = Linear8bitLt(weight, threshold, bias)
    return layer, layer.weight.CB.float() * (layer.weight.SCB / 127)[:, None]


#: kind -> what makes a layer and the weight that it stands for, of a weight and a bias
MAKERS = {
    "FP8 in blocks": block_fp8,
    "FP8 in blocks with powers of two": lambda *given: block_fp8(*given, scale_fmt="ue8m0"),
    "FP8 with one scale": tensor_fp8,
    "FBGEMM": fbgemm_fp8,
    "compressed-tensors FP8": compressed_bytes,
    "compressed-tensors FP8 in bfloat16": lambda *given: compressed_bytes(*given, scale_dtype=torch.bfloat16),
    "compressed-tensors FP8 in blocks": lambda *given: compressed_bytes(*given, in_blocks=True),
    "compressed-tensors W8A8": lambda *given: compressed_bytes(*given, of_integers=True),
    "LLM.int8": llm_int8,
    "LLM.int8 without outliers": lambda *given: llm_int8(*given, threshold=0.0),
}


class RoundingLinear(nn.Module):
    """A layer that rounds its input and multiplies by a weight in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rounding):
        super().__init__()
        self.weight, self.bias, self._rounding = _frozen(weight), bias, rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = FAKE_QUANTIZE.reference(x, self._rounding.quants, self._rounding.limit)
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def with_bytes(stock: nn.Module, kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a copy of a model whose projections are layers of a kind, and one that computes what they mean."""
    model, same = copy.deepcopy(stock), copy.deepcopy(stock)
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and name.endswith("_proj"):
            layer, weight = MAKERS[kind](linear.weight, linear.bias)
            rounding = family_of(layer).read(layer).rounding
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer)
            setattr(same.get_submodule(parent), attribute, RoundingLinear(weight, layer.bias, rounding))
    return model, same
