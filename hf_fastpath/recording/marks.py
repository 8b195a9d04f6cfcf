"""What stands in a recorded list for calls that pass through a seam, or that a pass has recognized.

Each mark is a function over tensors that computes what the mark stands for, so that a recorded list can be run before
and after a pass; :mod:`.lowering` replaces all marks by ops. ``append`` and ``attend`` cannot be run so, as
both need a cache.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import compat, ops
from ..choices import Activation, NormKind, Rotation, Scoring
from ..decode.calls.named_calls import Norm
from ..decode.ranks.rank_calls import COLLECTIVES, own_embeddings
from ..ops.choose_experts import reference as choose_experts


class Chunk(int):
    """A window of so many positions that begins anew at each multiple of its size, counted from a row's first token."""


_ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.RELU: torch.relu,
    Activation.SILU: nn.functional.silu,
    Activation.GELU: nn.functional.gelu,
    Activation.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def linear(x, weight, bias=None, transposed=False, activation=Activation.NONE, residual=None, norm=None):
    """Return ``activation(norm(x) @ weight.T + bias) + residual``; with ``@ weight`` if ``transposed``."""
    x = x if norm is None else normed(x, norm)
    out = activated(nn.functional.linear(x, weight.t() if transposed else weight, bias), activation)
    return out if residual is None else out + residual


def joined_linear(x, weights, norm=None):
    """Return ``norm(x) @ weight.T`` for every weight, the features side by side."""
    return torch.cat([linear(x, weight, norm=norm) for weight in weights], dim=-1)


def normed(x, norm: Norm, unit_offset=False, residual=None, factor=None):
    """Return ``factor * (residual + norm(x))`` over the last dimension; with ``unit_offset`` the norm multiplies by
    ``1 + weight``."""
    size, weight = x.shape[-1:], norm.weight
    if weight is not None and (unit_offset or norm.kind == NormKind.RMS_OFFSET):
        weight = 1 + weight
    if norm.kind == NormKind.LAYER:
        out = nn.functional.layer_norm(x, size, weight, norm.bias, norm.eps)
    else:
        out = nn.functional.rms_norm(x, size, weight, norm.eps)
    out = out if residual is None else residual + out
    return out if factor is None else out * factor


def add_normed(x, residual, norm: Norm):
    """Return the RMS norm of ``residual + x``, and this sum, see ``ops.add_rms_norm``."""
    return ops.add_rms_norm.reference(x, residual, norm.weight, norm.eps)


def activated(x, activation: Activation):
    """Return ``activation(x)``."""
    return _ACTIVATIONS[activation](x)


def head_products(x, weight):
    """Return ``x[b, h] @ weight[h].T``, see ``ops.head_products``."""
    return ops.head_products.reference(x, weight)


def router_logits(x, weight):
    """See ``ops.router_logits``."""
    return ops.router_logits.reference(x, weight)


def matmul(a, b):
    """Return ``a @ b``."""
    return torch.matmul(a, b)


def sdpa(q, k, v, mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Run PyTorch's attention over whatever the model hands it."""
    how = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how)


def short_convolution(**arguments):
    """See ``ops.short_convolution``; it writes ``conv_state``."""
    return ops.short_convolution.reference(**arguments)


def gated_delta_step(**arguments):
    """See ``ops.gated_delta_step``; it writes ``state``."""
    return ops.gated_delta_step.reference(**arguments)


def selective_state_step(**arguments):
    """See ``ops.selective_state_step``; it writes ``state``."""
    return ops.selective_state_step.reference(**arguments)


def gated_norm(**arguments):
    """See ``ops.gated_rms_norm``."""
    return ops.gated_rms_norm.reference(**arguments)


def text_positions(lengths, query_len):
    """Return int64 [query_len], places of the new tokens in the text, given int32 [batch] lengths that count them."""
    return lengths[:1].long() - query_len + torch.arange(query_len, device=lengths.device)


def append(k, v, layer):
    """Return what a cache gives for ``update(k, v, layer)``: all K and V [batch, num_kv_heads, tokens, head_dim]."""
    raise NotImplementedError("keys and values are appended by an op over a cache alone")


def attend(
    q,
    states,
    layer,
    scale,
    window,
    softcap=0.0,
    sinks=None,
    slopes=None,
    bias=None,
    encoded=None,
    row_biases=None,
    other=None,
    other_lse=None,
):
    """Return attention [batch, query_len, num_heads, head_dim] of q [batch, num_heads, query_len, head_dim] over
    ``states``, which :func:`append` gave.

    ``slopes`` [num_heads] are added to a score once for each position that a key is further on (ALiBi). ``bias``
    [num_heads, distances] is added to scores by how far a key is behind, see ``passes.position_bias``. What an encoder
    has read, as the decoder's layer ``encoded`` keeps it, shares the softmax; it is None if nothing does.
    ``row_biases``, ``other`` and ``other_lse`` are those of ``ops.decode_attention``, biases of each sequence.
    """
    raise NotImplementedError("attention is run by an op over a cache alone")


def attend_encoded(q, k, v, layer, scale, softcap=0.0):
    """Return attention of q, and as it, [batch, query_len, num_heads, head_dim], over what an encoder has read: k and v
    [batch, num_kv_heads, length, head_dim] of a ``layer`` of the decoder."""
    q, group = q.transpose(1, 2), q.shape[2] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (scores.softmax(-1) @ v).transpose(1, 2)


def latent_attend(q, states, layer, scale, window, weight, cos=None, sin=None, rotation=Rotation.HALVES):
    """Return attention [batch, query_len, num_heads, value_dim] of q [batch, num_heads, query_len, head_dim] over keys
    and values that ``weight`` makes of the latent in ``states``, see :mod:`.latent`. With ``cos`` and ``sin`` the last
    elements of queries, and the keys that :func:`append` is given as values, are turned first.
    """
    raise NotImplementedError("attention is run by an op over a cache alone")


def experts(
    x,
    ids,
    weights,
    gate_up_weight,
    down_weight,
    activation,
    residual=None,
    first_expert=0,
    alternating=False,
    **layout,
):
    """See ``ops.fused_experts``, which also has the arguments in ``layout``; the weights are those of the experts from
    ``first_expert`` on. Rows of gate and up alternate in weights that stand for quantized ones."""
    if alternating:
        gate_up_weight = torch.cat((gate_up_weight[:, ::2], gate_up_weight[:, 1::2]), dim=1)
        if (bias := layout.get("gate_up_bias")) is not None:
            layout["gate_up_bias"] = torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1)
    stacks, ids = (gate_up_weight, down_weight), ids.long() - first_expert
    return ops.fused_experts.reference(x, ids, weights, *stacks, residual, activation, **layout)


def routed_experts(
    x,
    logits,
    top_k,
    normalized,
    rounded,
    norm=None,
    shared_gate_weight=None,
    shared_up_weight=None,
    shared_down_weight=None,
    shared_logits=None,
    scoring=Scoring.SOFTMAX,
    correction_bias=None,
    num_groups=1,
    top_groups=1,
    group_tops=2,
    factor=1.0,
    sum_eps=0.0,
    **others,
):
    """Run the experts that ``ops.choose_experts`` chooses by ``logits``, and a shared one if there is, see
    ``ops.routed_experts``; ``others`` are arguments of :func:`experts`."""
    x = x if norm is None else normed(x, norm)
    ids = torch.empty(logits.numel() // logits.shape[-1], top_k, dtype=torch.int64, device=x.device)
    router = scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps
    weights = choose_experts(logits.flatten(0, -2), ids, normalized, rounded, False, *router)
    chosen = experts(x, ids, weights, **others)
    if shared_gate_weight is None:
        return chosen
    hidden = gated(x, shared_gate_weight, shared_up_weight, others["activation"])
    hidden = hidden if shared_logits is None else sigmoid_gated(hidden, shared_logits)
    return chosen + linear(hidden, shared_down_weight)


def other_experts(x, ids, weights, module, first_expert=None):
    """Run the experts of a module as transformers does that gathers their weights, see ``passes.experts``.

    With ``first_expert`` the module has some experts from that one on, and others that are chosen add nothing.
    """
    held = dict(module.named_parameters())
    if any(each.dtype != x.dtype for each in held.values()):  # while formulas are compared in float64
        module = compat.with_stacks(module, {name: each.to(x.dtype) for name, each in held.items()})
    if first_expert is not None:
        ids, count = ids - first_expert, len(next(iter(held.values())))
        weights, ids = weights.masked_fill((ids < 0) | (ids >= count), 0), ids.clamp(0, count - 1)
    return compat.gathered_experts(module, x, ids, weights)


def scaled_experts(x, logits, gate_up_weight, down_weight, top_k, activation):
    """See ``composed.scaled_experts``."""
    shares, ids = logits.flatten(0, -2).topk(top_k)
    rows = (x.reshape(len(ids), 1, -1) * shares.sigmoid()[..., None]).flatten(0, 1)
    layout = dict(activation=activation, transposed=True, concatenated=True)
    out = experts(
        rows, ids.reshape(-1, 1), torch.ones_like(shares).reshape(-1, 1), gate_up_weight, down_weight, **layout
    )
    return out.view(len(ids), top_k, -1).sum(1).view(x.shape)


#: experts, whoever chooses and runs them
EXPERTS = (experts, routed_experts, other_experts, scaled_experts)


def gated(x, gate_weight, up_weight, activation, norm=None):
    """See ``ops.gemv_swiglu``."""
    x = x if norm is None else normed(x, norm)
    return activated(linear(x, gate_weight), activation) * linear(x, up_weight)


def sigmoid_gated(x, gate):
    """Return ``x * sigmoid(gate)``; the two may lie in different orders, and a row may have one gate."""
    return x * torch.sigmoid(gate)


def glu(gate, up, activation):
    """Return ``activation(gate) * up``; the two may lie in one tensor side by side."""
    return activated(gate, activation) * up


def angles(tables, formula, dtype, pairs):
    """Return cos and sin out of what a model has computed of its positions, see ``passes.attention``."""
    raise NotImplementedError("angles are emitted as one call")


def rotated_attention(
    sources,
    grouped,
    cos,
    sin,
    pairs,
    layer,
    scale,
    window,
    softcap,
    sinks,
    slopes,
    bias,
    encoded,
    num_heads,
    num_kv_heads,
    head_dim,
    head_norms=None,
    factor=None,
):
    """Normalize and rotate queries and keys, then :func:`append` and :func:`attend`.

    ``sources`` are queries, keys and values, [batch, query_len, features] or [batch, query_len, heads, head_dim] each,
    or one tensor [batch, query_len, features] with all of them; if ``grouped``, that tensor is ordered by KV head.
    ``pairs`` says which elements turn together, see ``architecture.AttentionSpec``. Turned queries are multiplied by
    ``factor``, a number for each new token.
    """
    raise NotImplementedError("attention is run by an op over a cache alone")


def projected_attention(
    x,
    weights,
    biases,
    transposed,
    cos,
    sin,
    pairs,
    layer,
    scale,
    window,
    softcap,
    sinks,
    slopes,
    bias,
    encoded,
    num_heads,
    num_kv_heads,
    head_dim,
    head_norms=None,
    factor=None,
    norm=None,
):
    """Project ``x``, and return :func:`rotated_attention` of the projections."""
    raise NotImplementedError("attention is run by an op over a cache alone")


#: attention, before passes have made one call of it and of what is around it
OVER_CACHES = (attend, attend_encoded, latent_attend)
#: attention over the text's keys and values, before and behind passes
OF_CACHES = (attend, latent_attend, rotated_attention, projected_attention)
#: marks that write to memory outside of a list
EFFECTS = (append, short_convolution, gated_delta_step, selective_state_step)
#: marks whose ops take columns of a projection where they lie
STRIDED = (short_convolution, gated_delta_step, selective_state_step, gated_norm)


#: what ranks put together; these calls are in a plan as they are in a recorded list
OF_RANKS = (*COLLECTIVES, own_embeddings)


def is_mark(op) -> bool:
    """Whether a call is one of this module's or of ranks together, not PyTorch's."""
    return getattr(op, "__module__", "") == __name__ or op in OF_RANKS
