"""What a call of a step is: its kind, its module, its shapes, its bytes, and whose code runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decode.calls.named_calls import Call, tensors_in
from ..decode.calls.whose import is_ours, is_torchs, is_view, op_name
from ..native import loader
from ..quantization import PackedWeight
from ..registry import get
from . import places

#: kind -> the ops of that kind
OPS: dict[str, tuple[str, ...]] = {
    "products": (
        *("gemv", "gemm", "gemv_swiglu", "joined_gemv", "head_products", "qkv_rope_append"),
        *("packed_gemv", "packed_gemm", "packed_gemv_swiglu", "packed_qkv_rope_append"),
    ),
    "attention": ("decode_attention", "append_attention", "quantizing_attention", "latent_attention", "rope_append"),
    "experts": ("fused_experts", "packed_experts", "routed_experts", "choose_experts", "router_logits"),
    "states": ("gated_delta_step", "selective_state_step", "short_convolution"),
    "adapters": ("lora_down", "lora_up"),
    "norms": (
        "rms_norm",
        "layer_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "fused_swiglu",
        "fused_gelu",
        "fake_quantize",
    ),
    "tokens": ("step_inputs", "greedy_token", "exponential_race", "read_stream", "bytes_sum"),
    "ranks": ("sum_ranks", "gather_ranks"),
    "layers": ("decode_layers",),
}
PYTORCH, VIEWS = "PyTorch", "views"
KINDS = (*OPS, PYTORCH, VIEWS)
_KIND_OF = {op: kind for kind, found in OPS.items() for op in found}
#: what a call may be run by
KERNELS, REFERENCE, TORCH, PYTHON = "hf_fastpath", "hf_fastpath reference", "PyTorch", "Python"
#: calls of PyTorch's that read rows of their first tensor, as many as they give
_GATHERS = ("embedding", "index_select", "gather", "index", "take", "take_along_dim")


@dataclass(frozen=True)
class CallFacts:
    """A call of a step.

    Attributes:
        op: its name: an op's, a PyTorch function's with its namespace, or a Python function's.
        kind: one of KINDS.
        runs: ``"hf_fastpath"`` for a kernel, ``"hf_fastpath reference"`` for an op without a kernel for the device,
            ``"PyTorch"``, or ``"Python"`` for an element of a tuple.
        layer: path of the layer that it is in, empty outside of layers.
        module: path of the module, or modules, that it comes from.
        shape: of its result; empty if it gives no tensor, or several.
        weights: shapes of the matrices that it multiplies by.
        bytes: least number of bytes that it moves; None if nobody knows.
    """

    op: str
    kind: str
    runs: str
    layer: str
    module: str
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    bytes: int | None


def kind_of(op: Callable[..., Any]) -> str:
    """Return which of KINDS a call is of."""
    if is_ours(op):
        return _KIND_OF[op_name(op)]
    return VIEWS if is_view(op) else PYTORCH


def runs(op: Callable[..., Any], device: torch.device) -> str:
    """Return what runs a call, see :class:`CallFacts`."""
    if not is_ours(op):
        return TORCH if is_torchs(op) else PYTHON
    has_kernel = device.type in get(op_name(op)).native and loader.is_native(device.type)
    return KERNELS if has_kernel else REFERENCE


def moved_bytes(call: Call, op: Callable[..., Any], arguments: Sequence[Any], result: Any) -> int | None:
    """Return the least number of bytes of memory that a call moves: an op by its own formula, a call of PyTorch's by
    the tensors that go in and come out; None for a Python function, which may do anything.

    Args:
        call: the call.
        op, arguments, result: as ``Program.run_each`` gives them.
    """
    if is_view(call.op):
        return 0
    if is_ours(call.op):
        named = op.keywords if isinstance(op, functools.partial) else {}
        return int(get(op_name(call.op)).bytes(*arguments, **named))
    if not isinstance(call.op, torch._ops.OpOverload):
        return None
    made = list(tensors_in(result)) if isinstance(result, (torch.Tensor, list, tuple)) else []
    given = list(tensors_in(list(arguments)))
    if call.op.overloadpacket.__name__ in _GATHERS and given:
        return 2 * sum(map(_bytes, made)) + sum(map(_bytes, given[1:]))
    return sum(_bytes(each) for each in {id(each): each for each in (*given, *made)}.values())


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements that lie apart in memory: of an expanded one, those of what it was."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else min(size, 1)
    return count * tensor.element_size()


def _matrices(call: Call) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that an op multiplies by."""
    found: list[tuple[int, ...]] = []
    for name, value in call.arguments.items():
        if isinstance(value, PackedWeight):
            found.append((value.out_features, value.in_features))
        elif name == "weights" or name.endswith("weight") and name != "next_weight":
            found += [tuple(each.shape) for each in tensors_in(value) if each.dim() > 1]
    return found


def describe(
    call: Call,
    paths: Sequence[str],
    op: Callable[..., Any],
    arguments: Sequence[Any],
    result: Any,
    device: torch.device,
) -> CallFacts:
    """Return what a call is, which has just run.

    Args:
        call: the call.
        paths: of the modules that it comes from.
        op, arguments, result: as ``Program.run_each`` gives them.
        device: of the step.
    """
    return CallFacts(
        op=op_name(call.op),
        kind=kind_of(call.op),
        runs=runs(call.op, device),
        layer=places.layer_of(paths),
        module=places.shown(paths),
        shape=tuple(result.shape) if isinstance(result, torch.Tensor) else (),
        weights=tuple(_matrices(call)) if is_ours(call.op) else (),
        bytes=moved_bytes(call, op, arguments, result),
    )
