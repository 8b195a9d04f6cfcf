"""All decoder layers of one new token of each sequence, the final norm and the head, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..choices import Activation, NormKind
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .decode_attention import moved as attention_bytes
from .decode_attention import reference as decode_attention
from .decode_attention import why_not as attention_reasons
from .fused_swiglu import GATES
from .gemv import ACTIVATIONS, MAX_ROWS
from .gemv import reference as gemv
from .gemv_swiglu import reference as gemv_swiglu
from .kv_cache import refuse_kv_table, slot_positions
from .norm import NORMS, RMS_NORMS
from .qkv_rope_append import reference as qkv_rope_append
from .rope_append import random_angles
from .rope_append import why_not as rope_reasons

#: the tensors that ``weights`` holds for every layer, in this order
LAYER_TENSORS = (
    "attention_norm_weight",
    "attention_norm_bias",
    "q_weight",
    "q_bias",
    "k_weight",
    "k_bias",
    "v_weight",
    "v_bias",
    "out_weight",
    "out_bias",
    "mlp_norm_weight",
    "mlp_norm_bias",
    "gate_weight",
    "up_weight",
    "up_bias",
    "down_weight",
    "down_bias",
)
#: the tensors that follow the layers in ``weights``
OUTER_TENSORS = ("final_norm_weight", "final_norm_bias", "head_weight", "head_bias")
_HEAD = OUTER_TENSORS.index("head_weight") - len(OUTER_TENSORS)  # its index from the end
#: weights that every model has
_NEEDED = ("q_weight", "out_weight", "up_weight", "down_weight", "head_weight")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, taken from its first layer and its head; ``qkv_features`` counts all three projections."""

    layers: int
    hidden_size: int
    q_features: int
    qkv_features: int
    intermediate_size: int
    vocab_size: int


def by_name(weights: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return ``weights``, or what stands for them, as one dictionary for every layer and one for what follows."""
    layers, size = len(weights) // len(LAYER_TENSORS), len(LAYER_TENSORS)
    named = [dict(zip(LAYER_TENSORS, weights[i * size : (i + 1) * size])) for i in range(layers)]
    return named, dict(zip(OUTER_TENSORS, weights[layers * size :]))


def sizes(weights: Sequence[torch.Tensor], q_features: int, transposed: bool) -> Sizes:
    """Return the sizes of the model that ``weights`` make up; a size that no matrix tells is 0."""
    layers, outer = by_name(weights)

    def outputs(weight: torch.Tensor, transposed: bool = False) -> int:
        return weight.shape[1 if transposed else 0] if weight.dim() == 2 else 0

    first = layers[0]
    return Sizes(
        layers=len(layers),
        hidden_size=outputs(first["out_weight"], transposed),
        q_features=q_features,
        qkv_features=sum(outputs(first[name], transposed) for name in ("q_weight", "k_weight", "v_weight")),
        intermediate_size=outputs(first["up_weight"], transposed),
        vocab_size=outputs(outer["head_weight"]),
    )


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
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
    transposed: bool,
    kv_table: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``x += out(attention(norm(x))); x += down(mlp(norm(x)))`` for each layer, then ``head(norm(x))``.

    Args:
        x: [batch, 1, hidden_size], embeddings of the new tokens; batch 1 to 16, on CUDA 1.
        weights: for every layer the tensors named in ``LAYER_TENSORS``, then those of ``OUTER_TENSORS``; a tensor that
            the model lacks is empty. All layers have the same tensors in the same shapes. Without ``k_weight`` and
            ``v_weight``, ``q_weight`` holds all three projections one after the other. With ``gate_weight`` the MLP is
            ``activation(gate) * up``, without biases; else it is ``activation(up)``.
        k_caches, v_caches: [batch, num_kv_heads, capacity, head_dim] for every layer, as in ``qkv_rope_append``;
            written in place. A layer may have its own capacity.
        cos, sin: [batch or 1, 1, rotary_dim], rotary_dim even and at most head_dim; None: no rotation.
        seq_lens: int32 [batch], tokens that a sequence holds with the new one.
        starts: int32 [batch], first visible position (left padding), or None for 0.
        num_heads: number of query heads.
        scale: factor on the scores.
        windows: for every layer the positions that a token sees, itself included; 0 for all.
        norm: ``rms`` or ``layer``, of every norm.
        norm_eps: of every norm.
        activation: of the MLP; with a gate ``silu``, ``gelu_tanh`` or ``gelu``, else one that ``gemv`` takes.
        transposed: the layers' matrices are stored [in_features, out_features] as ``Conv1D`` does; ``q_weight`` then
            holds all three projections and there is no gate. The head is always [vocab_size, hidden_size].
        kv_table: int64 [layers, 3], see ``rope_append``; replaces the addresses and capacities of the caches.
        workspace: see ``decode_attention``.
        programmatic_launch: CUDA may read weights, lengths, table and all but the newest position of the caches while
            the kernel in front on this stream still runs. It is allowed only if that kernel writes none of them. The
            result does not depend on it.

    Returns:
        [batch, 1, vocab_size] logits in x's dtype.

    Raises:
        OpInputError: shapes, dtypes, devices or lengths of lists do not fit, or layers are not alike.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralDecoderLayer``, ``MistralModel``;
    ``models/gpt2/modeling_gpt2.py@5.17``, ``GPT2Block``.
    """
    refuse_kv_table(kv_table)

    def normed_by(tensors: dict[str, Any], name: str) -> dict[str, Any]:
        weight, bias = tensors[f"{name}_weight"], tensors[f"{name}_bias"]
        return {"norm": norm, "norm_weight": weight, "norm_bias": bias, "norm_eps": norm_eps}

    layers, outer = by_name([tensor if tensor.numel() else None for tensor in weights])
    for w, k_cache, v_cache, window in zip(layers, k_caches, v_caches, windows):
        attention_norm, mlp_norm = normed_by(w, "attention_norm"), normed_by(w, "mlp_norm")
        qkv = w["q_weight"], w["k_weight"], w["v_weight"], w["q_bias"], w["k_bias"], w["v_bias"]
        at = k_cache, v_cache, seq_lens
        queries = qkv_rope_append(x, *qkv, transposed, cos, sin, *at, num_heads, **attention_norm)
        mixed = decode_attention(queries, *at, starts, scale, window)
        x = gemv(mixed, w["out_weight"], w["out_bias"], x, Activation.NONE, transposed)
        if w["gate_weight"] is None:
            hidden = gemv(x, w["up_weight"], w["up_bias"], None, activation, transposed, **mlp_norm)
        else:
            hidden = gemv_swiglu(x, w["gate_weight"], w["up_weight"], activation, **mlp_norm)
        x = gemv(hidden, w["down_weight"], w["down_bias"], x, Activation.NONE, transposed)
    return gemv(x, outer["head_weight"], outer["head_bias"], **normed_by(outer, "final_norm"))


def fake(x, weights):
    return x.new_empty(x.shape[0], 1, weights[_HEAD].shape[0])


def why_not(
    x,
    weights,
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
    transposed,
    kv_table,
    workspace,
) -> list[str]:
    most = 1 if x.device.type == "cuda" else MAX_ROWS
    if x.dim() != 3 or x.shape[1] != 1 or not 1 <= x.shape[0] <= most:
        expected = f"[1 to {most}, 1, hidden_size]: one token of each sequence"
        return [f"x has shape {tuple(x.shape)}, expected {expected}"]
    reasons = _count_reasons(weights, k_caches, v_caches, windows)
    if not reasons and k_caches[0].dim() != 4:
        reasons = [f"k_caches[0] has shape {tuple(k_caches[0].shape)}, expected [batch, kv_heads, capacity, head_dim]"]
    if reasons:
        return reasons
    num_kv_heads, _, head_dim = k_caches[0].shape[1:]
    reasons = choice_reason("norm", norm, NORMS[1:]) + tensor_reasons(x)
    reasons += weight_reasons(x, weights, num_heads, num_kv_heads, head_dim, norm, activation, transposed)
    qkv = x.new_empty(x.shape[0], 1, (num_heads + 2 * num_kv_heads) * head_dim)
    q = x.new_empty(x.shape[0], 1, num_heads, head_dim)
    for layer, (k_cache, v_cache, window) in enumerate(zip(k_caches, v_caches, windows)):
        found = rope_reasons(qkv, None, cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer)
        found += attention_reasons(q, k_cache, v_cache, seq_lens, starts, window, kv_table, layer, workspace)
        reasons += [f"layer {layer}: {reason}" for reason in dict.fromkeys(found)]
        if found:
            break  # the reasons of the next layer would be the same
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
    if len(weights) != layers * len(LAYER_TENSORS) + len(OUTER_TENSORS):
        reasons.append(
            f"weights has {len(weights)} tensors, expected {len(LAYER_TENSORS)} for each of the {layers} layers and "
            f"{len(OUTER_TENSORS)} more"
        )
    return reasons


def weight_reasons(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: NormKind,
    activation: Activation,
    transposed: bool,
) -> list[str]:
    """Return reasons why the weights do not fit together, up to the first layer with one; ``x`` as in ``reference``."""
    layers, outer = by_name(weights)
    model = sizes(weights, num_heads * head_dim, transposed)
    present = {name for name, tensor in layers[0].items() if tensor.numel()}
    gated, separate = "gate_weight" in present, "k_weight" in present
    reasons = choice_reason("activation", activation, GATES if gated else ACTIVATIONS)
    if separate != ("v_weight" in present) or (not separate and present & {"k_bias", "v_bias"}):
        reasons.append("k_weight and v_weight go together, with their biases: pass both or neither")
    if transposed and (separate or gated):
        reasons.append("transposed takes all projections in q_weight and no gate_weight: pass the others empty")
    if gated and "up_bias" in present:
        reasons.append("gate_weight takes no up_bias: pass it empty")
    if reasons:
        return reasons
    hidden, inner = x.shape[2], model.intermediate_size
    kv_features = num_kv_heads * head_dim
    q_features = model.q_features + (0 if separate else 2 * kv_features)
    matrices = {
        "q": (q_features, hidden),
        "k": (kv_features, hidden),
        "v": (kv_features, hidden),
        "out": (hidden, model.q_features),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}_bias": size[:1] for name, size in matrices.items()}
    shapes |= {f"{name}_weight": size[::-1] if transposed else size for name, size in matrices.items()}
    shapes |= {"head_weight": (model.vocab_size, hidden), "head_bias": (model.vocab_size,)}
    for number, tensors in enumerate([*layers, outer]):
        where = f"layer {number}: " if number < len(layers) else ""
        for name, tensor in tensors.items():
            found = tensor_reasons(x, **{name: tensor})
            if tensor.numel():
                found += shape_reason(name, tensor, shapes.get(name, (hidden,)))
                if tensor.dim() == 2 and tensor.stride(1) != 1:
                    found.append(f"{name} has strides {tensor.stride()}: make its rows contiguous")
                if norm in RMS_NORMS and name.endswith("norm_bias"):
                    found.append(f"norm {NormKind(norm).label!r} takes no {name}: pass it empty")
            elif name in _NEEDED or (norm in RMS_NORMS and name.endswith("norm_weight")):
                found.append(f"{name} is empty, expected a weight")
            if number < len(layers) and bool(tensor.numel()) != (name in present):
                found.append(f"{name} is {'given' if tensor.numel() else 'empty'}, unlike the first layer's")
            reasons += [where + reason for reason in dict.fromkeys(found)]
        if reasons:
            break  # the reasons of the next layer would be the same
    return reasons


def moved(x, weights, k_caches, cos, sin, seq_lens, starts, windows) -> int:
    nothing = x.new_empty(x.shape[0], 1, 0, k_caches[0].shape[3])  # queries count no bytes: they need not reach memory
    read = sum(
        attention_bytes(nothing, k_cache, seq_lens, starts, window) for k_cache, window in zip(k_caches, windows)
    )
    logits = weights[_HEAD].shape[0] * x.element_size()
    return nbytes(x, *weights, cos, sin, seq_lens, starts) + read + logits


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(
        hidden_size,
        heads,
        kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
        seq_len,
        capacities,
        windows=None,
        start=None,
        norm=NormKind.RMS,
        activation=Activation.SILU,
        gated=True,
        layout="separate",
        bias=False,
        rotary_dim=None,
        kv=None,
        programmatic_launch=False,
    ):
        absent = randn(0)
        seq_lens = [seq_len] if isinstance(seq_len, int) else seq_len
        batch = len(seq_lens)

        def matrix(out_features, in_features):
            weight = randn(out_features, in_features) * in_features**-0.5
            return weight.t().contiguous() if layout == "conv1d" else weight

        def linear(out_features, in_features):
            return [matrix(out_features, in_features), randn(out_features) if bias else absent]

        def norm_tensors():
            return [randn(hidden_size), randn(hidden_size) if norm == NormKind.LAYER else absent]

        features, kv_features = heads * head_dim, kv_heads * head_dim
        weights, caches = [], [[], []]
        lens = torch.tensor(seq_lens, device=device, dtype=torch.int32)
        for capacity in capacities:
            weights += norm_tensors()
            if layout == "separate":
                for size in (features, kv_features, kv_features):
                    weights += linear(size, hidden_size)
            else:
                weights += [*linear(features + 2 * kv_features, hidden_size), *[absent] * 4]
            weights += linear(hidden_size, features) + norm_tensors()
            up = intermediate_size, hidden_size
            weights += [matrix(*up), matrix(*up), absent] if gated else [absent, *linear(*up)]
            weights += linear(hidden_size, intermediate_size)
            for part in caches:
                cache = torch.randn(batch, kv_heads, capacity, head_dim, device=device).to(kv or dtype)
                unwritten = (slot_positions(lens - 1, capacity) < 0)[:, None, :, None]
                cache.masked_fill_(unwritten, float("nan"))
                part.append(cache)
        weights += norm_tensors()
        weights += [randn(vocab_size, hidden_size) * hidden_size**-0.5, randn(vocab_size) if bias else absent]
        cos, sin = random_angles(batch, 1, rotary_dim, device, dtype)
        starts = None if start is None else torch.tensor([start] * batch, device=device, dtype=torch.int32)
        return Sample(
            *(randn(batch, 1, hidden_size), weights, *caches, cos, sin, lens, starts, heads, head_dim**-0.5),
            *(windows or [0] * len(capacities), norm, 1e-5, activation, layout == "conv1d"),
            programmatic_launch=programmatic_launch,
        )

    # Mistral whose second layer has a ring; GPT-2; many heads to a KV head, and padding; plain MLPs
    yield call(256, 4, 2, 64, 512, 501, 40, [64, 24], windows=[0, 16], rotary_dim=64)
    gpt2 = dict(norm=NormKind.LAYER, activation=Activation.GELU_TANH, gated=False, layout="conv1d", bias=True)
    yield call(256, 4, 4, 64, 1024, 503, 33, [33, 40], programmatic_launch=True, **gpt2)
    yield call(256, 8, 1, 64, 320, 100, 20, [32, 32, 32], start=3, rotary_dim=64, programmatic_launch=True)
    yield call(192, 3, 1, 64, 256, 64, 1, [8], activation=Activation.RELU, gated=False, layout="fused", bias=True)
    gelu = dict(activation=Activation.GELU)
    yield call(128, 2, 2, 64, 192, 77, 300, [310, 310], gated=False, bias=True, rotary_dim=32, **gelu)
    yield call(90, 3, 1, 40, 111, 7, 19, [30, 30], [8, 8], rotary_dim=24, norm=NormKind.RMS_OFFSET, **gelu)
    yield call(33, 2, 1, 32, 17, 1, 9, [9], norm=NormKind.LAYER, bias=True, kv=torch.float16, **gelu)
    yield call(1024, 8, 2, 128, 2816, 1000, 701, [1024], rotary_dim=128)  # Llama, several parts of everything
    if device.type == "cuda":  # GPT-2's own sizes, small and medium, for which CUDA has kernels of its own
        yield call(768, 12, 12, 64, 3072, 50, 1030, [1040, 200], [0, 190], 3, programmatic_launch=True, **gpt2)
        yield call(1024, 16, 16, 64, 4096, 50, 31, [40], **gpt2)


SPEC = register(
    OpSpec(
        name="decode_layers",
        schema=(
            "(Tensor x, Tensor[] weights, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor? cos, Tensor? sin, "
            "Tensor seq_lens, Tensor? starts, int num_heads, float scale, int[] windows, int norm, float norm_eps, "
            "int activation, bool transposed, Tensor? kv_table=None, Tensor(c!)? workspace=None, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, native code runs the calls of any step in a row
    )
)
