"""Attention of several new tokens over a cache that holds them: which kernel runs, and what each kernel needs.

All choices of a kernel lie here: :func:`route_of` and :func:`route_on_cpu` are the tables.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from ... import ops
from ...native import loader
from ...ops.decode_attention import MAX_QUERY_LEN, visible_slots
from ...ops.kv_cache import KVCache, dequantized, gathered
from ..calls.named_calls import run

#: sizes of a head for which the kernels use tensor cores; see csrc/common/head_dims.h
TENSOR_CORE_HEAD_DIMS = range(32, 256 + 1, 8)


def has_tensor_cores(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether ``ops.append_attention`` has a tensor-core kernel for queries of this device, dtype and head size."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return head_dim in TENSOR_CORE_HEAD_DIMS and loader.is_native("cuda")


def is_hopper(device: torch.device) -> bool:
    """Whether ``ops.append_attention`` has its kernel for many rows on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


#: rows (queries of one KV head) up to which ``ops.append_attention`` is faster than PyTorch's flash attention on a GPU
#: that is no Hopper
MOST_ROWS = 64
#: on a CPU, ``ops.decode_attention`` is faster than PyTorch's attention with a mask for up to MOST_TOKENS new tokens if
#: at least TIMES_BEFORE times as many tokens are before them
MOST_TOKENS, TIMES_BEFORE = 64, 8
#: new tokens whose attention within a window is one call: so many keys that a token does not see are given to it
_OF_WINDOW = 256
#: bytes of a mask of numbers at most
_OF_MASK = 64 << 20


def route_of(rows: int, past: int, is_plain: bool, cuts: bool, fits: bool, hopper: bool) -> str:
    """Choose what computes attention on a GPU.

    The thresholds were measured with ``benchmarks/bench_append_attention.py`` on an H200, which runs all the kernels.
    PyTorch would choose cuDNN's there, which builds an engine for each new length: that takes 60 ms, as much as 45
    prompts of 4,096 tokens of an 8B gain by it.

    Args:
        rows: new tokens times query heads of a KV head.
        past: tokens before the new ones.
        is_plain: causal and nothing else: no padding, window, soft-cap or sinks.
        cuts: a sliding window hides some of the tokens.
        fits: see :func:`has_tensor_cores`.
        hopper: see :func:`is_hopper`.

    Returns:
        ``"append"`` for ``ops.append_attention``; ``"sdpa"`` for the kernel that PyTorch chooses; ``"flash"`` for
        PyTorch's flash attention with queries at the end of longer keys; ``"masked"`` for PyTorch's attention over
        parts of the keys with a mask.
    """
    if past == 0 and is_plain and not (fits and hopper):
        return "sdpa"
    if not fits:
        return "masked" if cuts else "sdpa"
    if is_plain and rows > MOST_ROWS and not hopper:
        return "flash"
    return "append"


def route_on_cpu(tokens: int, past: int, cuts: bool, changes: bool) -> str:
    """Choose what computes attention on a CPU.

    Args:
        tokens: new tokens of a row.
        past: tokens before the new ones.
        cuts: a sliding window hides some of the tokens.
        changes: slopes or sinks change the scores.

    Returns:
        ``"decode"`` for ``ops.decode_attention`` over a few tokens at a time; ``"sdpa"`` and ``"masked"`` as of
        :func:`route_of`.
    """
    if cuts or changes:
        return "decode" if tokens <= MOST_TOKENS else "masked"
    return "decode" if tokens <= MOST_TOKENS and past >= TIMES_BEFORE * tokens else "sdpa"


class Attention:
    """The replacement for ``ops.decode_attention`` in a forward over several new tokens.

    Args:
        query_len: new tokens a row.
        length: tokens that the cache holds, new ones included.
        lengths: int32 [batch], the same number for each row.
        starts: int [batch], left padding of each row, or None for none.
    """

    def __init__(self, query_len: int, length: int, lengths: torch.Tensor, starts: torch.Tensor | None):
        self._query_len, self._length, self._lengths = query_len, length, lengths
        self._starts = None if starts is None else starts.to(torch.int32)

    @cached_property
    def _mask(self) -> torch.Tensor | None:
        """bool [batch or 1, 1, query_len, length], what each token sees; None if a causal mask says it."""
        lengths = self._lengths
        if self._starts is None:
            if self._length == self._query_len or self._query_len == 1:
                return None
            lengths = lengths[:1]
        visible = visible_slots(lengths, self._starts, self._query_len, self._length, window=0)
        return _for_padding(visible)

    def over(self, q, cache: KVCache, scale: float, window: int, softcap: float, sinks, slopes) -> torch.Tensor:
        """Compute what ``ops.decode_attention`` does; lengths and padding are those of this forward."""
        cuts = 0 < window < self._length
        route = self._route(q, cache, cuts, softcap > 0, sinks is not None, slopes is not None)
        if route == "decode":
            return self._in_pieces(q, cache, scale, window, softcap=softcap, sinks=sinks, slopes=slopes)
        if route == "append":
            k, v = self._states(cache, q.dtype)
            args = (q, k, v, self._lengths, self._starts, scale, window if cuts else 0, softcap, sinks)
            return ops.append_attention.overload(*args)
        k, v = (each.narrow(2, 0, self._length) for each in self._states(cache, q.dtype))
        if route == "flash":
            behind = causal_lower_right(self._query_len, self._length)
            grouped = q.shape[2] != k.shape[1]
            attend = nn.functional.scaled_dot_product_attention
            out = attend(q.transpose(1, 2), k, v, attn_mask=behind, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2).flatten(2)
        if route == "masked":
            return self._masked(q, k, v, scale, window if cuts else 0, sinks, slopes)
        return self._sdpa(q, k, v, scale)

    def _route(self, q: torch.Tensor, cache: KVCache, cuts: bool, caps: bool, has_sinks: bool, has_slopes: bool) -> str:
        """Return a route as of :func:`route_of` or :func:`route_on_cpu`, whichever is of this device."""
        past = self._length - self._query_len
        changes = has_sinks or has_slopes  # PyTorch's attention has neither, and no soft-cap
        if q.device.type == "cpu":
            return "decode" if caps else route_on_cpu(q.shape[1], past, cuts, changes)
        fits = has_tensor_cores(q.device, q.dtype, q.shape[3])
        if has_slopes or (changes and not fits):
            return "decode" if caps or q.shape[1] <= MAX_QUERY_LEN else "masked"
        if caps and not fits:
            return "decode"
        is_plain = self._starts is None and not cuts and not changes and not caps
        rows = q.shape[1] * (q.shape[2] // cache.k.shape[1])
        return route_of(rows, past, is_plain, cuts, fits, is_hopper(q.device))

    def over_latents(self, q: torch.Tensor, weight: torch.Tensor, cache: KVCache, scale: float) -> torch.Tensor:
        """Compute what ``composed.latent_attention`` does, without a window."""
        heads, rotated = q.shape[1], cache.v.shape[-1]
        latents, keys = (each.narrow(2, 0, self._length) for each in self._states(cache, q.dtype))
        plain = q.shape[-1] - rotated
        made = latents @ weight.view(heads, -1, weight.shape[-1]).mT  # [batch, heads, length, plain + value_dim]
        k = torch.cat((made[..., :plain], keys.expand(-1, heads, -1, -1)), dim=-1)
        v, q = made[..., plain:], q.transpose(1, 2)
        beyond = q.shape[3] - v.shape[3]
        fits = has_tensor_cores(q.device, q.dtype, q.shape[3]) and is_hopper(q.device)
        if not fits or beyond < 0 or self._starts is not None:
            return self._sdpa(q, k, v, scale).unflatten(2, (heads, -1))
        v = nn.functional.pad(v, (0, beyond)).contiguous()  # the kernel has one size of a head
        args = (q.contiguous(), k, v, self._lengths, None, scale, 0, 0.0, None)
        return ops.append_attention.overload(*args).unflatten(2, (heads, -1))[..., : v.shape[3] - beyond]

    def _in_pieces(self, q, cache: KVCache, scale, window, **changes) -> torch.Tensor:
        """Run ``ops.decode_attention`` over pieces of as many tokens as the op takes."""
        found, behind = [], q.shape[1]
        for piece in q.split(MAX_QUERY_LEN, dim=1):
            behind -= piece.shape[1]
            seen = dict(seq_lens=self._lengths - behind, starts=self._starts, scale=scale, window=window)
            found.append(run(ops.decode_attention.overload, q=piece, cache=cache, **seen, **changes))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _states(self, cache: KVCache, dtype) -> list[torch.Tensor]:
        """Return keys and values in the queries' dtype: the whole buffers, if they have that dtype."""
        # New tokens, too, are read as they are stored: so the result does not depend on how a text is cut into calls.
        if cache.is_paged:  # the kernels for prompts read contiguous buffers
            blocks = cache.block_table[:, : -(-self._length // cache.k.shape[2])]
            return [gathered(each, blocks).to(dtype) for each in (cache.k, cache.v)]
        if cache.k_scales is not None:
            pairs = (cache.k, cache.k_scales), (cache.v, cache.v_scales)
            held = [[each.narrow(2, 0, self._length) for each in pair] for pair in pairs]
            return [dequantized(states, scales, dtype) for states, scales in held]
        if cache.k.dtype != dtype:
            return [each.narrow(2, 0, self._length).to(dtype).contiguous() for each in (cache.k, cache.v)]
        return [cache.k, cache.v]

    def _masked(self, q, k, v, scale, window: int, sinks, slopes) -> torch.Tensor:
        """Attend with a mask, over the keys that some of a piece of the new tokens see.

        A sink is a key of zeros whose value is zeros, and whose score the mask gives.
        """
        batch, heads, dtype = len(q), q.shape[2], q.dtype
        k, v = (states.repeat_interleave(heads // k.shape[1], dim=1) for states in (k, v))
        held = torch.arange(self._length, device=q.device)
        past, number = self._length - self._query_len, torch.finfo(dtype).bits // 8
        size = _OF_WINDOW if window else max(MAX_QUERY_LEN, _OF_MASK // (batch * heads * self._length * number))
        found = []
        for first in range(0, self._query_len, size):
            piece = q[:, first : first + size].transpose(1, 2)
            end = past + first + piece.shape[2]
            begin = max(0, past + first - window + 1) if window else 0
            apart = held[begin:end] - held[past + first : end, None]
            seen = apart <= 0
            if window:
                seen = seen & (apart > -window)
            if self._starts is not None:
                seen = seen & (held[begin:end] >= self._starts.long()[:, None, None])
                seen = _for_padding(seen)
            keys, values = k[:, :, begin:end], v[:, :, begin:end]
            mask: torch.Tensor = seen
            if slopes is not None or sinks is not None:
                scores = torch.zeros_like(apart, dtype=torch.float32)
                if slopes is not None:
                    scores = slopes.float()[:, None, None] * apart
                mask = torch.where(seen, scores, -torch.inf).to(dtype)
                mask = mask.expand(len(q) if mask.dim() == 4 else 1, heads, -1, -1)
            if sinks is not None:
                mask = torch.cat((mask, sinks.to(dtype)[:, None, None].expand(*mask.shape[:3], 1)), dim=3)
                keys, values = (nn.functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
            found.append(nn.functional.scaled_dot_product_attention(piece, keys, values, attn_mask=mask, scale=scale))
        out = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return out.transpose(1, 2).flatten(2)

    def _sdpa(self, q, k, v, scale) -> torch.Tensor:
        grouped = q.shape[2] != k.shape[1]
        if grouped and (self._mask is not None or q.dtype == torch.float32):
            # PyTorch's kernels that take a mask, or float32, need as many KV heads as query heads.
            k, v = (states.repeat_interleave(q.shape[2] // k.shape[1], dim=1) for states in (k, v))
            grouped = False
        causal = self._mask is None and q.shape[1] > 1
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=self._mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(2)


def _for_padding(seen: torch.Tensor) -> torch.Tensor:
    """Return a mask for all heads of what each token sees, [batch, query_len, length].

    A token of the padding sees every position: nothing reads its result, but the result has to stay finite.
    """
    return (seen | ~seen.any(-1, keepdim=True))[:, None]


def attend(
    attention: Attention,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run :meth:`Attention.over` as a call of a step."""
    cache = KVCache(k_cache, v_cache, k_scales, v_scales, block_table)
    return attention.over(q, cache, scale, window, softcap, sinks, slopes)


def attend_latents(
    attention: Attention,
    q: torch.Tensor,
    weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do as ``composed.latent_attention`` for many tokens, for which keys and values are made of the latent: a product
    of queries and keys is shorter than one of queries and latents."""
    return attention.over_latents(q, weight, KVCache(k_cache, v_cache, k_scales, v_scales, block_table), scale)


@dataclass(frozen=True)
class PlainMask:
    """A mask that is causal, perhaps within a window and over left padding, and nothing else.

    Attributes:
        starts: int32 [batch or 1], left padding of each row, or None for none.
    """

    starts: torch.Tensor | None


#: masks of the running forwards, which their layers share: a mask, what it was compared with, the answer
_recent: list[tuple[weakref.ref, tuple, PlainMask | None]] = []
#: each of two forwards has a mask for full attention and one for windows
_MOST_RECENT = 4


def plain_mask(mask: torch.Tensor, past: int, query_len: int, window: int | None) -> PlainMask | None:
    """Return the :class:`PlainMask` that ``mask`` is, or None. The host waits for the device, once a forward.

    Args:
        mask: [batch or 1, 1, query_len, held + query_len], bool and True where a token sees a position; or floating, 0
            where a token sees a position and the lowest number elsewhere.
        past: tokens of the cache's layer.
        query_len: tokens behind the past ones.
        window: the layer's sliding window, or None.
    """
    held = past if window is None else min(past, window - 1)
    if mask.dim() != 4 or mask.shape[1:] != (1, query_len, held + query_len):
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    key = (past, query_len, window, mask._version if not mask.is_inference() else None)
    for known, key_then, answer in list(_recent):
        if known() is mask and key == key_then:
            return answer
    answer = _compare(mask[:, 0], past - held, past, query_len, window or 0)
    _recent[:] = [(weakref.ref(mask), key, answer), *_recent[: _MOST_RECENT - 1]]
    return answer


def _compare(mask: torch.Tensor, offset: int, past: int, query_len: int, window: int) -> PlainMask | None:
    positions = torch.arange(offset, past + query_len, device=mask.device)
    queries = positions[-query_len:, None]
    causal = positions <= queries
    if window:
        causal &= positions > queries - window
    seen = mask if mask.dtype == torch.bool else mask == 0
    first = positions[seen[:, 0].to(torch.uint8).argmax(-1)]  # the first position that each row's first token sees
    expected = causal & (positions >= first[:, None, None])
    if mask.dtype != torch.bool:
        expected = torch.zeros_like(mask).masked_fill(~expected, torch.finfo(mask.dtype).min)
    if not torch.equal(mask, expected.expand_as(mask)):
        return None
    oldest = max(0, past - window + 1) if window else 0
    return PlainMask(first.to(torch.int32) if bool((first > oldest).any()) else None)
