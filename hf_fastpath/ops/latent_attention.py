"""Attention of one new token over the latents of multi-head latent attention (MLA), which all heads share."""

from __future__ import annotations

import torch

from ..choices import Rotation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .decode_attention import visible_slots
from .kv_cache import KV_TABLE_COLUMNS, length_reasons, refuse_kv_table
from .rope_append import random_angles, rotate

#: of a latent, and of the rotated part of a key; kernels hold a head's results in registers
MAX_RANK, MAX_ROPE_DIM = 512, 128


def reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    rope_keys: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    kv_table: torch.Tensor | None = None,
    layer: int = 0,
    new_latent: torch.Tensor | None = None,
    new_rope: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rotation: Rotation = Rotation.HALVES,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``softmax(scale * (q_latent @ latents.T + q_rope @ rope_keys.T)) @ latents`` for each head.

    A key is ``W_k`` times a latent, and a value ``W_v`` times the same latent: ``q_latent`` is a head's query times
    ``W_k``, and the head's output is ``W_v`` times what this op returns. Keys and values are then never made. The op
    can also turn the rotary parts and append the newest position.

    Args:
        q_latent: [batch, heads, rank] float32, float16 or bfloat16, any strides; rank (kv_lora_rank) 1 to 512.
        q_rope: [batch, heads, rope_dim], q_latent's dtype, any strides; rope_dim 1 to 128.
        latents: [batch, 1, capacity, rank], q_latent's dtype, contiguous: what transformers' cache has as keys.
        rope_keys: [batch, 1, capacity, rope_dim], likewise: what it has as values. They are rotated.
        seq_lens: int32 [batch], positions that a row holds, the new one included; at most capacity.
        starts: int32 [batch], first visible position (left padding), or None for 0.
        scale: factor on the scores.
        kv_table: int64 [layers, 3]; row ``layer`` holds the addresses of latents and rope_keys and the capacity, which
            then replace those of the tensors (so a captured CUDA graph works for another cache as well). The addresses
            are multiples of 16.
        layer: row of ``kv_table``.
        new_latent, new_rope: [batch, rank] and [batch, rope_dim], written at position ``seq_lens - 1`` first; None if
            the caller has appended them.
        cos, sin: [batch or 1, rope_dim], rope_dim even, which turn ``q_rope`` and ``new_rope``; None if these are
            rotated.
        rotation: ``"halves"``: elements i and ``i + rope_dim/2`` turn together; ``"neighbors"``: 2i and 2i + 1;
            ``"neighbors_to_halves"``: 2i and 2i + 1, which become i and ``i + rope_dim/2`` (DeepSeek V3).
        programmatic_launch: CUDA may read seq_lens, starts, kv_table and positions that this call does not append while
            the kernel in front on this stream still runs; see ``gemv``. The result does not depend on it.

    Returns:
        [batch, heads, rank] in q_latent's dtype; softmax and accumulators are float32. A row that sees no position
        gives zeros. Slots that are not visible are never used, whatever they hold.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit; on the CPU also if lengths do not fit.

    Source: transformers ``models/deepseek_v3/modeling_deepseek_v3.py@5.24``, ``DeepseekV3Attention``, with
    ``kv_b_proj`` absorbed; arXiv:2405.04434.
    """
    refuse_kv_table(kv_table)
    if cos is not None and sin is not None:
        q_rope = _rotated(q_rope, cos, sin, rotation)
        new_rope = None if new_rope is None else _rotated(new_rope[:, None], cos, sin, rotation)[:, 0]
    if new_latent is not None and new_rope is not None:
        rows, slots = torch.arange(len(seq_lens), device=seq_lens.device), (seq_lens.long() - 1).clamp(min=0)
        for cache, new in ((latents, new_latent), (rope_keys, new_rope)):
            cache[rows, 0, slots] = torch.where((seq_lens > 0)[:, None], new, cache[rows, 0, slots])
    visible = visible_slots(seq_lens, starts, 1, latents.shape[2], 0)[:, 0]
    kept = [torch.where(visible[..., None], cache[:, 0], 0) for cache in (latents, rope_keys)]
    scores = (q_latent @ kept[0].transpose(1, 2) + q_rope @ kept[1].transpose(1, 2)) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(scores.dtype)
    out = torch.where(visible.any(1)[:, None, None], weights, 0) @ kept[0]
    return out.contiguous()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn x, [batch, heads, rope_dim]."""
    if rotation == Rotation.NEIGHBORS_TO_HALVES:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    angles = (cos.expand(len(x), -1)[:, None], sin.expand(len(x), -1)[:, None])
    return rotate(x[:, None], *angles, rotation == Rotation.NEIGHBORS)[:, 0]


def fake(q_latent):
    return torch.empty_like(q_latent, memory_format=torch.contiguous_format)


def why_not(
    q_latent,
    q_rope,
    latents,
    rope_keys,
    seq_lens,
    starts,
    kv_table=None,
    layer=0,
    new_latent=None,
    new_rope=None,
    cos=None,
    sin=None,
    rotation=Rotation.HALVES,
) -> list[str]:
    if q_latent.dim() != 3 or q_rope.dim() != 3 or latents.dim() != 4:
        found = f"q_latent {tuple(q_latent.shape)}, q_rope {tuple(q_rope.shape)}, latents {tuple(latents.shape)}"
        return [f"got {found}, expected [batch, heads, rank], [batch, heads, rope_dim], [batch, 1, capacity, rank]"]
    batch, heads, rank = q_latent.shape
    rope_dim, capacity = q_rope.shape[2], latents.shape[2]
    reasons = tensor_reasons(q_latent, q_rope=q_rope, latents=latents, rope_keys=rope_keys)
    if not (1 <= rank <= MAX_RANK and 1 <= rope_dim <= MAX_ROPE_DIM):
        reasons.append(f"rank is {rank}, rope_dim {rope_dim}, expected 1 to {MAX_RANK} and 1 to {MAX_ROPE_DIM}")
    reasons += shape_reason("q_rope", q_rope, (batch, heads, rope_dim))
    reasons += shape_reason("latents", latents, (batch, 1, capacity, rank))
    reasons += shape_reason("rope_keys", rope_keys, (batch, 1, capacity, rope_dim))
    new, angles = dict(new_latent=new_latent, new_rope=new_rope), dict(cos=cos, sin=sin)
    reasons += tensor_reasons(q_latent, **new, **angles) + choice_reason("rotation", rotation, Rotation)
    reasons += shape_reason("new_latent", new_latent, (batch, rank))
    reasons += shape_reason("new_rope", new_rope, (batch, rope_dim))
    for names in (new, angles):
        if len({tensor is None for tensor in names.values()}) > 1:
            reasons.append(f"{' and '.join(names)} go together: pass both or neither")
    for name, tensor in angles.items():
        if tensor is not None and (tuple(tensor.shape) not in ((batch, rope_dim), (1, rope_dim)) or rope_dim % 2):
            reasons.append(f"{name} has shape {tuple(tensor.shape)}, expected [{batch} or 1, {rope_dim}], even")
    if not (latents.is_contiguous() and rope_keys.is_contiguous()):
        reasons.append("latents and rope_keys have to be contiguous: pass the whole buffers, not slices")
    for name, numbers in (("seq_lens", seq_lens), ("starts", starts)):
        if numbers is None:
            continue
        if numbers.dtype != torch.int32 or tuple(numbers.shape) != (batch,):
            reasons.append(f"{name} is {numbers.dtype} {tuple(numbers.shape)}, expected torch.int32 ({batch},)")
        if numbers.device != q_latent.device:
            reasons.append(f"{name} is on {numbers.device}, expected {q_latent.device}: move it")
    if kv_table is not None:
        if kv_table.dtype != torch.int64 or kv_table.dim() != 2 or kv_table.shape[1] != KV_TABLE_COLUMNS:
            expected = f"torch.int64 [layers, {KV_TABLE_COLUMNS}]"
            reasons.append(f"kv_table is {kv_table.dtype} {tuple(kv_table.shape)}, expected {expected}")
        elif not 0 <= layer < kv_table.shape[0]:
            reasons.append(f"layer is {layer}, expected 0 to {kv_table.shape[0] - 1}")
        if kv_table.device != q_latent.device:
            reasons.append(f"kv_table is on {kv_table.device}, expected {q_latent.device}: move it")
    elif not reasons:
        reasons += length_reasons(seq_lens, capacity)
    return reasons


def moved(q_latent, q_rope, latents, rope_keys, seq_lens, starts, new_latent, new_rope, cos, sin) -> int:
    held = int(seq_lens.sum()) if seq_lens.device.type != "meta" else latents.shape[0] * latents.shape[2]
    position = (latents.shape[3] + rope_keys.shape[3]) * latents.element_size()
    new = nbytes(new_latent, new_rope)
    return 2 * nbytes(q_latent) + nbytes(q_rope, seq_lens, starts, cos, sin) + 2 * new + held * position


def samples(device: torch.device, dtype: torch.dtype):
    def call(batch, heads, rank, rope_dim, capacity, lengths, starts=None, rotation=None, appends=True, early=False):
        """The two parts of a query, and those of the newest position, are columns of one projection."""

        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        q_latent, q_rope = randn(batch, heads, rank + rope_dim).split((rank, rope_dim), dim=-1)
        caches = randn(batch, 1, capacity, rank), randn(batch, 1, capacity, rope_dim)
        lens, first = (
            None if numbers is None else torch.tensor(numbers, device=device, dtype=torch.int32)
            for numbers in (lengths, starts)
        )
        given = {}
        if appends:
            given["new_latent"], given["new_rope"] = randn(batch, rank + rope_dim).split((rank, rope_dim), dim=-1)
        if rotation is not None:
            angles = random_angles(1, 1, rope_dim, device, dtype, rotation == Rotation.NEIGHBORS)
            given |= {"cos": angles[0][0], "sin": angles[1][0], "rotation": rotation}
        given |= {"programmatic_launch": early} if early else {}
        return Sample(q_latent, q_rope, *caches, lens, first, (rank + rope_dim) ** -0.5, **given)

    yield call(1, 4, 64, 16, 40, [33], rotation=Rotation.HALVES)
    yield call(1, 16, 512, 64, 300, [300], rotation=Rotation.NEIGHBORS, early=True)  # DeepSeek-V2-Lite
    yield call(2, 40, 256, 32, 200, [200, 77], [3, 60], rotation=Rotation.HALVES)  # MiniCPM3
    yield call(3, 3, 17, 5, 9, [1, 9, 5], [0, 8, 5])  # the last sees nothing
    yield call(1, 20, 512, 64, 150, [65], rotation=Rotation.NEIGHBORS_TO_HALVES)  # DeepSeek V3
    yield call(2, 1, 40, 128, 70, [64, 70], appends=False)


SPEC = register(
    OpSpec(
        name="latent_attention",
        schema=(
            "(Tensor q_latent, Tensor q_rope, Tensor(a!) latents, Tensor(b!) rope_keys, Tensor seq_lens, "
            "Tensor? starts, float scale, Tensor? kv_table=None, int layer=0, Tensor? new_latent=None, "
            "Tensor? new_rope=None, Tensor? cos=None, Tensor? sin=None, int rotation=0, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
