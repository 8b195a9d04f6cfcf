"""All decoder layers with quantized weights over one new token of each sequence, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..choices import Activation, NormKind, PackedFormat
from ..quantization import FORMATS
from ..quantization.formats import padded
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .decode_attention import moved as attention_bytes
from .decode_attention import reference as decode_attention
from .decode_attention import why_not as attention_reasons
from .fused_swiglu import GATES, activate
from .gemv import ACTIVATIONS, MAX_ROWS
from .norm import NORMS, RMS_NORMS
from .packed_gemv import random_weight
from .packed_gemv import reference as packed_gemv
from .rope_append import random_angles
from .rope_append import reference as rope_append
from .rope_append import why_not as rope_reasons

#: matrices of a layer, in order; each has a multiplier of its own
MATRICES = ("qkv", "out", "up", "down")


def _tensors_of(*matrices: str) -> tuple[str, ...]:
    return tuple(f"{name}_{part}" for name in matrices for part in ("quants", "scales", "zeros"))


#: the tensors that ``weights`` holds for every layer, in this order
LAYER_TENSORS = (
    *("attention_norm_weight", "attention_norm_bias", *_tensors_of("qkv", "out")),
    *("mlp_norm_weight", "mlp_norm_bias", *_tensors_of("up", "down")),
)


def by_name(weights: Sequence[Any]) -> list[dict[str, Any]]:
    """Return ``weights`` as a dictionary for every layer."""
    size = len(LAYER_TENSORS)
    return [dict(zip(LAYER_TENSORS, weights[at : at + size])) for at in range(0, len(weights), size)]


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    multipliers: Sequence[float],
    format: PackedFormat,
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    num_heads: int,
    scale: float,
    windows: Sequence[int],
    norm: NormKind,
    norm_eps: float,
    activation: Activation,
    gated: bool,
) -> torch.Tensor:
    """Compute ``x += out(attention(norm(x))); x += down(mlp(norm(x)))`` for each layer, as ``decode_layers``.

    Args:
        x: [batch, 1, hidden_size], embeddings of the new tokens; batch 1 to 16.
        weights: for every layer the tensors named in ``LAYER_TENSORS``; a tensor that the model lacks is empty. ``qkv``
            holds query, key and value projections one after the other; ``up`` of a gated MLP holds its gate, then its
            up projection. There are no biases.
        multipliers: for every layer those of its ``MATRICES``, see ``quantization.PackedWeight``.
        format: of all matrices, a name out of ``quantization.FORMATS``.
        k_caches, v_caches, cos, sin, seq_lens, starts, num_heads, scale, windows, norm, norm_eps: as in
            ``decode_layers``.
        activation: of the MLP; with a gate ``silu``, ``gelu_tanh`` or ``gelu``, else one that ``gemv`` takes.
        gated: the MLP is ``activation(gate) * up``; else it is ``activation(up)``.

    Returns:
        [batch, 1, hidden_size] in x's dtype.

    Raises:
        OpInputError: shapes, dtypes, devices or lengths of lists do not fit.

    Source: as ``decode_layers``, over ``PackedWeight.dequantize()``.
    """
    for place, w in enumerate(by_name([tensor if tensor.numel() else None for tensor in weights])):
        factors = dict(zip(MATRICES, multipliers[place * len(MATRICES) :]))

        def product(
            name: str, given: torch.Tensor, residual=None, act=Activation.NONE, normed_by=None, w=w, factors=factors
        ):
            matrix = w[f"{name}_quants"], w[f"{name}_scales"], w[f"{name}_zeros"], factors[name], format
            in_front = (NormKind.NONE, None, None, 0.0)
            if normed_by is not None:
                in_front = (norm, w[f"{normed_by}_norm_weight"], w[f"{normed_by}_norm_bias"], norm_eps)
            return packed_gemv(given, *matrix, None, residual, act, *in_front)

        at = k_caches[place], v_caches[place], seq_lens
        queries = rope_append(product("qkv", x, normed_by="attention"), None, cos, sin, *at, num_heads)
        mixed = decode_attention(queries, *at, starts, scale, windows[place])
        x = product("out", mixed, x)
        if gated:
            gate, up = product("up", x, normed_by="mlp").chunk(2, dim=-1)
            hidden = activate(gate, activation) * up
        else:
            hidden = product("up", x, act=activation, normed_by="mlp")
        x = product("down", hidden, x)
    return x


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(
    x,
    weights,
    multipliers,
    format,
    k_caches,
    v_caches,
    cos,
    sin,
    seq_lens,
    starts,
    num_heads,
    windows,
    norm,
    activation,
    gated,
) -> list[str]:
    if x.dim() != 3 or x.shape[1] != 1 or not 1 <= x.shape[0] <= MAX_ROWS:
        return [f"x has shape {tuple(x.shape)}, expected [1 to {MAX_ROWS}, 1, hidden_size]: one token of each sequence"]
    layers = len(k_caches)
    reasons = choice_reason("format", format, PackedFormat) + choice_reason("norm", norm, NORMS[1:])
    reasons += choice_reason("activation", activation, GATES if gated else ACTIVATIONS) + tensor_reasons(x)
    if not layers:
        reasons.append("k_caches is empty, expected one cache for every layer")
    each = {"v_caches": 1, "windows": 1, "multipliers": len(MATRICES), "weights": len(LAYER_TENSORS)}
    for (name, count), values in zip(each.items(), (v_caches, windows, multipliers, weights)):
        if len(values) != layers * count:
            reasons.append(f"{name} has {len(values)} entries, expected {count} for each of the {layers} layers")
    if not reasons and k_caches[0].dim() != 4:
        reasons = [f"k_caches[0] has shape {tuple(k_caches[0].shape)}, expected [batch, kv_heads, capacity, head_dim]"]
    if reasons:
        return reasons
    num_kv_heads, _, head_dim = k_caches[0].shape[1:]
    qkv = x.new_empty(x.shape[0], 1, (num_heads + 2 * num_kv_heads) * head_dim)
    q = x.new_empty(x.shape[0], 1, num_heads, head_dim)
    for layer, (w, k_cache, v_cache, window) in enumerate(zip(by_name(weights), k_caches, v_caches, windows)):
        found = weight_reasons(x, w, format, num_heads, num_kv_heads, head_dim, norm, gated)
        found += rope_reasons(qkv, None, cos, sin, k_cache, v_cache, seq_lens, num_heads)
        found += attention_reasons(q, k_cache, v_cache, seq_lens, starts, window)
        if found:
            # the reasons of the next layer would be the same
            return [f"layer {layer}: {reason}" for reason in dict.fromkeys(found)]
    return []


def weight_reasons(
    x: torch.Tensor,
    w: dict[str, torch.Tensor],
    format: PackedFormat,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: NormKind,
    gated: bool,
) -> list[str]:
    """Return reasons why the weights of a layer do not fit together."""
    known, hidden = FORMATS[format.label], x.shape[2]
    both = w["up_quants"].shape[0] if w["up_quants"].dim() else 0
    inner = both // 2 if gated else both
    reasons = []
    for name in ("attention", "mlp"):
        weight, bias = w[f"{name}_norm_weight"], w[f"{name}_norm_bias"]
        for which, tensor in (("weight", weight), ("bias", bias)):
            reasons += tensor_reasons(x, **{f"{name}_norm_{which}": tensor})
            if tensor.numel():
                reasons += shape_reason(f"{name}_norm_{which}", tensor, (hidden,))
        if norm in RMS_NORMS and (bias.numel() or not weight.numel()):
            reasons.append(f"norm {NormKind(norm).label!r} takes {name}_norm_weight and no {name}_norm_bias")
    if gated and both % 2:
        reasons.append(f"up_quants has {both} rows, expected as many of the gate as of the up projection")
    sizes = {
        "qkv": ((num_heads + 2 * num_kv_heads) * head_dim, hidden),
        "out": (hidden, num_heads * head_dim),
        "up": (both, hidden),
        "down": (hidden, inner),
    }
    for name, (rows, columns) in sizes.items():
        groups = rows, known.groups(columns)
        wanted = {
            "quants": (torch.uint8, (rows, padded(columns) * known.bits // 8)),
            "scales": (torch.float16, groups),
            "zeros": (torch.uint8, groups),
        }
        for part, (dtype, shape) in wanted.items():
            tensor, label = w[f"{name}_{part}"], f"{name}_{part}"
            if part == "zeros" and not known.has_zeros:
                if tensor.numel():
                    reasons.append(f"{label} is given, which format {format} does not go with")
                continue
            reasons += shape_reason(label, tensor, shape)
            if tensor.dtype != dtype:
                reasons.append(f"{label} has dtype {tensor.dtype}, expected {dtype}")
            if tensor.device != x.device:
                reasons.append(f"{label} is on {tensor.device}, expected {x.device}: move it")
    return reasons


def moved(x, weights, k_caches, cos, sin, seq_lens, starts, windows) -> int:
    nothing = x.new_empty(x.shape[0], 1, 0, k_caches[0].shape[3])  # queries count no bytes: they need not reach memory
    read = sum(
        attention_bytes(nothing, k_cache, seq_lens, starts, window) for k_cache, window in zip(k_caches, windows)
    )
    return nbytes(x, *weights, cos, sin, seq_lens, starts) + read + x.nbytes


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(format, hidden, heads, kv_heads, head_dim, inner, seq_lens, capacities, norm=NormKind.RMS, **settings):
        gated, activation = settings.get("gated", True), settings.get("activation", Activation.SILU)
        rotary_dim, start, batch = settings.get("rotary_dim"), settings.get("start"), len(seq_lens)
        sizes = ((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)
        sizes += (inner * (2 if gated else 1), hidden), (hidden, inner)
        weights, multipliers, caches = [], [], [[], []]
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        for capacity in capacities:
            for place, (rows, columns) in enumerate(sizes):
                if place % 2 == 0:
                    weights += [randn(hidden), randn(hidden) if norm == NormKind.LAYER else randn(0)]
                quants, scales, zeros, multiplier, _ = random_weight(FORMATS[format], rows, columns, device)
                weights += [quants, scales, quants.new_empty(0) if zeros is None else zeros]
                multipliers.append(multiplier)
            for part in caches:
                cache = torch.randn(batch, kv_heads, capacity, head_dim, device=device).to(dtype)
                for row, length in enumerate(seq_lens):
                    cache[row, :, length - 1 :] = float("nan")
                part.append(cache)
        cos, sin = random_angles(batch, 1, rotary_dim, device, dtype)
        starts = None if start is None else torch.tensor([start] * batch, device=device, dtype=torch.int32)
        windows = settings.get("windows") or [0] * len(capacities)
        return Sample(
            *(randn(batch, 1, hidden), weights, multipliers, format, *caches, cos, sin, lens, starts, heads),
            *(head_dim**-0.5, windows, norm, 1e-5, activation, gated),
        )

    yield call("int4_g32", 256, 4, 2, 64, 384, [40], [64, 40], rotary_dim=64, windows=[0, 16])
    yield call(
        "int8", 256, 4, 4, 64, 300, [33], [33], norm=NormKind.LAYER, activation=Activation.GELU_TANH, gated=False
    )
    yield call("int4", 256, 8, 1, 64, 320, [20, 9], [32, 24], start=3, rotary_dim=64)
    yield call("fp8", 90, 3, 1, 40, 111, [19, 7, 1], [30], activation=Activation.GELU, rotary_dim=24)
    yield call("int4_g32", 256, 4, 2, 64, 384, [40], [64, 40], norm=NormKind.RMS_OFFSET, rotary_dim=64)
    yield call("int4_g32", 128, 2, 2, 64, 256, [9] * MAX_ROWS, [16], activation=Activation.RELU, gated=False)


SPEC = register(
    OpSpec(
        name="packed_layers",
        schema=(
            "(Tensor x, Tensor[] weights, float[] multipliers, int format, Tensor(a!)[] k_caches, "
            "Tensor(b!)[] v_caches, Tensor? cos, Tensor? sin, Tensor seq_lens, Tensor? starts, int num_heads, "
            "float scale, int[] windows, int norm, float norm_eps, int activation, bool gated) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cpu",),
    )
)
