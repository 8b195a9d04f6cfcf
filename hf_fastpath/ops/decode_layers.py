"""All decoder layers of one new token of one sequence in one call, for models of GPT-2's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..choices import Activation, NormKind
from ..native import loader
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .decode_attention import moved as attention_bytes
from .decode_attention import reference as decode_attention
from .decode_attention import why_not as attention_reasons
from .gemv import ACTIVATIONS
from .gemv import reference as gemv
from .kv_cache import refuse_kv_table, slot_positions
from .qkv_rope_append import reference as qkv_rope_append

#: the tensors that ``weights`` holds for every layer, in this order
LAYER_TENSORS = (
    "attention_norm_weight",
    "attention_norm_bias",
    "qkv_weight",
    "qkv_bias",
    "out_weight",
    "out_bias",
    "mlp_norm_weight",
    "mlp_norm_bias",
    "up_weight",
    "up_bias",
    "down_weight",
    "down_bias",
)
#: those that every layer has
_NEEDED = ("qkv_weight", "out_weight", "up_weight", "down_weight")
#: the only size of heads that CUDA has kernels for, and the most heads
_CUDA_HEAD_DIM, _CUDA_HEADS = 64, 16
#: sizes of the stream that CUDA has kernels for; the larger ones for types of 16 bits only
_CUDA_HIDDEN, _CUDA_HIDDEN_16_BIT = (768,), (768, 1024)


def by_layer(weights: Sequence[Any]) -> list[dict[str, Any]]:
    """Return ``weights``, or what stands for them, as one dictionary for every layer."""
    size = len(LAYER_TENSORS)
    return [dict(zip(LAYER_TENSORS, weights[at : at + size])) for at in range(0, len(weights), size)]


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    num_heads: int,
    scale: float,
    windows: Sequence[int],
    norm_eps: float,
    activation: Activation,
    kv_table: torch.Tensor | None = None,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``x += out(attention(norm(x))); x += down(activation(up(norm(x))))`` for each layer.

    Args:
        x: [1, 1, hidden_size], embedding of the new token, contiguous. On CUDA hidden_size is 768, or 1024 in float16
            and bfloat16, and the GPU's compute capability is 9.0.
        weights: for every layer the tensors named in ``LAYER_TENSORS``; a bias, or weight of a norm, that the model
            lacks is empty. All layers have the same tensors in the same shapes. Matrices are stored
            [in_features, out_features] as ``Conv1D`` does; ``qkv_weight`` holds all three projections. Norms are layer
            norms. On CUDA the MLP has 4 * hidden_size features, and rows of matrices begin at 16 bytes.
        k_caches, v_caches: [1, num_heads, capacity, head_dim] for every layer, contiguous, in x's dtype; written in
            place. A layer may have its own capacity. On CUDA head_dim is 64.
        seq_lens: int32 [1], tokens that the sequence holds with the new one.
        starts: int32 [1], first visible position (left padding), or None for 0.
        num_heads: number of heads; on CUDA at most 16.
        scale: factor on the scores.
        windows: for every layer the positions that a token sees, itself included; 0 for all.
        norm_eps: of every norm.
        activation: of the MLP, one that ``gemv`` takes.
        kv_table: int64 [layers, 3], see ``rope_append``; replaces the addresses and capacities of the caches.
        programmatic_launch: CUDA may read weights, lengths, table and all but the newest position of the caches while
            the kernel in front on this stream still runs. It is allowed only if that kernel writes none of them. The
            result does not depend on it.

    Returns:
        [1, 1, hidden_size] in x's dtype: the stream behind the last layer. CUDA keeps it in float32 between layers.

    Raises:
        OpInputError: shapes, dtypes, devices or lengths of lists do not fit, layers are not alike, or the GPU has no
            kernels for them.

    Source: transformers ``models/gpt2/modeling_gpt2.py@5.17``, ``GPT2Block``.
    """
    refuse_kv_table(kv_table)
    layers = by_layer([tensor if tensor.numel() else None for tensor in weights])
    for w, k_cache, v_cache, window in zip(layers, k_caches, v_caches, windows):
        norms = (
            dict(norm=NormKind.LAYER, norm_weight=w[f"{of}_weight"], norm_bias=w[f"{of}_bias"], norm_eps=norm_eps)
            for of in ("attention_norm", "mlp_norm")
        )
        qkv = w["qkv_weight"], None, None, w["qkv_bias"], None, None
        at = k_cache, v_cache, seq_lens
        queries = qkv_rope_append(x, *qkv, True, None, None, *at, num_heads, **next(norms))
        mixed = decode_attention(queries, *at, starts, scale, window)
        x = gemv(mixed, w["out_weight"], w["out_bias"], x, Activation.NONE, True)
        hidden = gemv(x, w["up_weight"], w["up_bias"], None, activation, True, **next(norms))
        x = gemv(hidden, w["down_weight"], w["down_bias"], x, Activation.NONE, True)
    return x


def fake(x):
    return torch.empty_like(x)


def why_not(x, weights, k_caches, v_caches, seq_lens, starts, num_heads, windows, activation, kv_table) -> list[str]:
    if x.dim() != 3 or x.shape[:2] != (1, 1) or not x.is_contiguous():
        shape, strides = tuple(x.shape), x.stride()
        return [f"x has shape {shape} and strides {strides}, expected [1, 1, hidden_size] and contiguous: one token"]
    reasons = _count_reasons(weights, k_caches, v_caches, windows)
    if not reasons and k_caches[0].dim() != 4:
        reasons = [f"k_caches[0] has shape {tuple(k_caches[0].shape)}, expected [1, num_heads, capacity, head_dim]"]
    if reasons:
        return reasons
    head_dim = k_caches[0].shape[3]
    reasons = choice_reason("activation", activation, ACTIVATIONS) + tensor_reasons(x)
    reasons += weight_reasons(x, weights, num_heads, head_dim)
    q = x.new_empty(1, 1, num_heads, head_dim)
    for layer, (k_cache, v_cache, window) in enumerate(zip(k_caches, v_caches, windows)):
        found = attention_reasons(q, k_cache, v_cache, seq_lens, starts, window, kv_table, layer)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            found += _cache_reasons(name, cache, x, num_heads)
        reasons += [f"layer {layer}: {reason}" for reason in dict.fromkeys(found)]
        if found:
            break  # the reasons of the next layer would be the same
    return reasons


def _cache_reasons(name: str, cache: torch.Tensor, x: torch.Tensor, num_heads: int) -> list[str]:
    """Return reasons why the kernels do not take a cache, whose shape else fits ``x``."""
    if cache.dim() != 4:
        return []  # attention's reasons say so
    reasons = []
    if cache.dtype != x.dtype:
        reasons.append(f"{name} is {cache.dtype}, expected {x.dtype} as x: call the ops of a layer in turn")
    if cache.shape[1] != num_heads:
        reasons.append(f"{name} has {cache.shape[1]} heads, expected {num_heads}, one for each of the queries")
    if not cache.is_contiguous() or (cache.is_cuda and cache.data_ptr() % 16):
        reasons.append(f"{name} has strides {cache.stride()}, or does not begin at 16 bytes: make a contiguous copy")
    return reasons


def _count_reasons(weights, k_caches, v_caches, windows) -> list[str]:
    """Return reasons why the lengths of the lists do not fit together."""
    layers = len(k_caches)
    if not layers:
        return ["k_caches is empty, expected one cache for every layer"]
    reasons = []
    for name, values in (("v_caches", v_caches), ("windows", windows)):
        if len(values) != layers:
            reasons.append(f"{name} has {len(values)} entries, expected {layers}, one for every layer as k_caches")
    if len(weights) != layers * len(LAYER_TENSORS):
        each = f"{len(LAYER_TENSORS)} for each of the {layers} layers"
        reasons.append(f"weights has {len(weights)} tensors, expected {each}")
    return reasons


def weight_reasons(x: torch.Tensor, weights: Sequence[torch.Tensor], num_heads: int, head_dim: int) -> list[str]:
    """Return reasons why the weights do not fit together, or a GPU has no kernels for them.

    Reasons end with the first layer that has one. ``x`` and ``weights`` are those of ``reference``.
    """
    layers = by_layer(weights)
    present = {name for name, tensor in layers[0].items() if tensor.numel()}
    hidden, features = x.shape[2], num_heads * head_dim
    up = layers[0]["up_weight"]
    inner = up.shape[1] if up.dim() == 2 else 0
    reasons = _cuda_reasons(x, num_heads, head_dim, inner) if x.is_cuda else []
    sizes = {"qkv": (hidden, 3 * features), "out": (features, hidden), "up": (hidden, inner), "down": (inner, hidden)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}_weight": size for name, size in sizes.items()}
    shapes |= {f"{name}_bias": size[1:] for name, size in sizes.items()}
    for number, tensors in enumerate(layers):
        for name, tensor in tensors.items():
            found = tensor_reasons(x, **{name: tensor})
            if tensor.numel():
                found += shape_reason(name, tensor, shapes.get(name, (hidden,)))
                found += _layout_reasons(name, tensor)
            elif name in _NEEDED:
                found.append(f"{name} is empty, expected a weight")
            if bool(tensor.numel()) != (name in present):
                found.append(f"{name} is {'given' if tensor.numel() else 'empty'}, unlike the first layer's")
            reasons += [f"layer {number}: {reason}" for reason in dict.fromkeys(found)]
        if reasons:
            break  # the reasons of the next layer would be the same
    return reasons


def _layout_reasons(name: str, tensor: torch.Tensor) -> list[str]:
    """Return a reason if a weight does not lie in memory as kernels read it."""
    if tensor.dim() == 1 and not tensor.is_contiguous():
        return [f"{name} has strides {tensor.stride()}: make it contiguous"]
    if tensor.dim() == 2 and tensor.stride(1) != 1:
        return [f"{name} has strides {tensor.stride()}: make its rows contiguous"]
    if tensor.is_cuda and tensor.dim() == 2 and (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % 16:
        return [f"{name} has rows that do not begin at 16 bytes: copy it"]
    return []


def _cuda_reasons(x: torch.Tensor, num_heads: int, head_dim: int, inner: int) -> list[str]:
    """Return reasons why there are no kernels for these sizes on the GPU of ``x``."""
    hidden, reasons = x.shape[2], []
    sizes = _CUDA_HIDDEN if x.dtype == torch.float32 else _CUDA_HIDDEN_16_BIT
    if not loader.has_hopper_code(x.device):
        reasons.append("the GPU, or what the library was made for, is not of compute capability 9.0 or newer")
    if hidden not in sizes or inner != 4 * hidden:
        wanted = " or ".join(map(str, sizes))
        reasons.append(f"hidden_size is {hidden} and the MLP's {inner}, expected {wanted} and four times that")
    if head_dim != _CUDA_HEAD_DIM or num_heads > _CUDA_HEADS:
        wanted = f"at most {_CUDA_HEADS} of {_CUDA_HEAD_DIM}"
        reasons.append(f"there are {num_heads} heads of {head_dim} features, expected {wanted}")
    return [f"{reason}: call the ops of a layer in turn" for reason in reasons]


def moved(x, weights, k_caches, seq_lens, starts, windows) -> int:
    nothing = x.new_empty(x.shape[0], 1, 0, k_caches[0].shape[3])  # queries count no bytes: they need not reach memory
    read = sum(
        attention_bytes(nothing, k_cache, seq_lens, starts, window) for k_cache, window in zip(k_caches, windows)
    )
    return nbytes(x, *weights, seq_lens, starts) + read + nbytes(x)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(
        hidden_size,
        heads,
        head_dim,
        intermediate_size,
        seq_len,
        capacities,
        windows=None,
        start=None,
        activation=Activation.GELU_TANH,
        bias=True,
        programmatic_launch=False,
    ):
        absent = randn(0)

        def linear(in_features, out_features):
            weight = randn(in_features, out_features) * in_features**-0.5
            return [weight, randn(out_features) if bias else absent]

        def norm():
            return [randn(hidden_size), randn(hidden_size) if bias else absent]

        features = heads * head_dim
        weights, caches = [], [[], []]
        lens = torch.tensor([seq_len], device=device, dtype=torch.int32)
        for capacity in capacities:
            weights += [*norm(), *linear(hidden_size, 3 * features), *linear(features, hidden_size)]
            weights += [*norm(), *linear(hidden_size, intermediate_size), *linear(intermediate_size, hidden_size)]
            for part in caches:
                cache = randn(1, heads, capacity, head_dim)
                unwritten = (slot_positions(lens - 1, capacity) < 0)[:, None, :, None]
                cache.masked_fill_(unwritten, float("nan"))
                part.append(cache)
        starts = None if start is None else torch.tensor([start], device=device, dtype=torch.int32)
        return Sample(
            *(randn(1, 1, hidden_size), weights, *caches, lens, starts, heads, head_dim**-0.5),
            *(windows or [0] * len(capacities), 1e-5, activation),
            programmatic_launch=programmatic_launch,
        )

    if device.type == "cuda":  # GPT-2's own sizes, small and medium, for which CUDA has kernels
        yield call(768, 12, 64, 3072, 1030, [1040, 200], [0, 190], 3, programmatic_launch=True)
        yield call(768, 12, 64, 3072, 1, [8], bias=False)
        yield call(768, 3, 64, 3072, 40, [64, 24], [0, 16], 3, activation=Activation.RELU)
        if dtype != torch.float32:
            yield call(1024, 16, 64, 4096, 31, [40], activation=Activation.GELU, programmatic_launch=True)
        return
    yield call(256, 4, 64, 1024, 33, [33, 40], programmatic_launch=True)
    yield call(192, 3, 64, 256, 1, [8], activation=Activation.RELU, bias=False)
    yield call(90, 3, 40, 111, 19, [30, 30, 30], [8, 0, 8], 3, activation=Activation.GELU)
    yield call(33, 2, 32, 17, 300, [310], activation=Activation.GELU)


SPEC = register(
    OpSpec(
        name="decode_layers",
        schema=(
            "(Tensor x, Tensor[] weights, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor seq_lens, "
            "Tensor? starts, int num_heads, float scale, int[] windows, float norm_eps, int activation, "
            "Tensor? kv_table=None, bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, native code runs the calls of any step in a row
    )
)
