"""Arguments of ops at sizes that models use, for ``bench_ops.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_fastpath.ops.decode_attention import MAX_QUERY_LEN, workspace_bytes
from hf_fastpath.ops.kv_cache import in_pages, quantized
from hf_fastpath.ops.rope_append import random_head_norms
from hf_fastpath.quantization.formats import FORMATS, padded, scale_bits
from hf_fastpath.registry import Sample


@dataclass(frozen=True)
class Call:
    """A call of an op at a size that models use.

    Attributes:
        name: name in tables and CSV.
        arguments: function of (device, dtype) that draws a random set of arguments.
        dtypes: the dtypes to run, unless ``--dtype`` says otherwise.
        devices: the devices to run on; a GPU's larger sizes would take minutes on a CPU.
        most: number of calls a round, and of sets of arguments, at most; for calls that are bound by arithmetic.
    """

    name: str
    arguments: Callable[[torch.device, torch.dtype], Sample]
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    devices: tuple[str, ...] = ("cuda", "cpu")
    most: int = 1024


def drawn(*shape: int, std: float = 1.0) -> Callable[[torch.device, torch.dtype], torch.Tensor]:
    """Draw a random tensor for each set."""
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype) * std


def stream(*shape: int) -> Callable[[torch.device, torch.dtype], torch.Tensor]:
    """Draw a random residual stream in float32 for each set."""
    return lambda device, dtype: torch.randn(shape, device=device)


def sample_of(*parts, **named) -> Callable[[torch.device, torch.dtype], Sample]:
    """Make arguments; those that are callables are drawn for each set."""

    def draw(part, device, dtype):
        return part(device, dtype) if callable(part) else part

    return lambda device, dtype: Sample(
        *(draw(part, device, dtype) for part in parts),
        **{k: draw(part, device, dtype) for k, part in named.items()},
    )


def alone_call(name: str, features: int, added: bool = False) -> Call:
    """Make a call of an op over ranks with one rank, which waits for nobody; ``bench_sum_ranks.py`` has several."""

    def draw(device: torch.device, dtype: torch.dtype) -> Sample:
        x = torch.randn(1, 1, features, device=device, dtype=dtype)
        buffers, status = [torch.zeros(2, 1, features, device=device, dtype=dtype)], torch.zeros(1, device=device)
        residual = {"residual": torch.randn_like(x)} if added else {}
        return Sample(x, buffers, status.int(), 0, 0, **residual)

    return Call(name, draw)


def gemv_call(name: str, k: int, n: int, rows: int = 1, **options) -> Call:
    return Call(name, sample_of(drawn(1, rows, k), drawn(n, k, std=k**-0.5), **options))


def gemm_call(name: str, k: int, n: int, rows: int, **options) -> Call:
    arguments = sample_of(drawn(1, rows, k), drawn(n, k, std=k**-0.5), **options)
    return Call(name, arguments, ("fp16", "bf16", "fp32"), ("cpu",), max(2, int(5e9 / (rows * k * n))))


def packed_call(
    name: str, format: str, k: int, n: int, rows: int = 1, devices: tuple[str, ...] = ("cuda", "cpu")
) -> Call:
    found = FORMATS[format]
    groups = n, found.groups(k)

    def random_bytes(*shape: int, below: int = 256) -> Callable[[torch.device, torch.dtype], torch.Tensor]:
        return lambda device, dtype: torch.randint(below, shape, device=device, dtype=torch.uint8)

    quants = random_bytes(n, padded(k) * found.bits // 8, below=found.finite_bytes)
    zeros = random_bytes(*groups, below=16) if found.has_zeros else None

    def scales(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return scale_bits(found, torch.rand(groups, device=device))

    arguments = sample_of(drawn(1, rows, k), quants, scales, zeros)
    return Call(name, lambda *to: Sample(*arguments(*to).args, 1 / 64, format), devices=devices)


def packed_qkv_call(name: str, format: str, k: int, heads: int, kv_heads: int, head_dim: int) -> Call:
    """Make a call as :func:`qkv_call`, over a quantized weight."""
    product = packed_call(name, format, k, (heads + 2 * kv_heads) * head_dim)
    plain = qkv_call(name, k, heads, kv_heads, head_dim)

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        x, *rest = plain.arguments(device, dtype).args
        return Sample(x, *product.arguments(device, dtype).args[1:], *rest[7:])

    return Call(name, arguments)


def conv1d_call(name: str, k: int, n: int, **options) -> Call:
    weight = drawn(k, n, std=k**-0.5)
    return Call(name, sample_of(drawn(1, 1, k), weight, drawn(n), transposed=True, **options), ("fp16", "fp32"))


def _angles(
    device: torch.device, dtype: torch.dtype, rotary_dim: int, batch: int = 1, query_len: int = 1
) -> list[torch.Tensor]:
    """Draw cosines and sines for the rotation."""
    angle = torch.rand(batch, query_len, rotary_dim // 2, device=device).repeat(1, 1, 2) * 2 * math.pi
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def _workspace(device: torch.device, *sizes: int) -> dict[str, torch.Tensor]:
    """Return one workspace for all calls, as a decode plan keeps it; the CPU needs none."""
    if device.type != "cuda":
        return {}
    return {"workspace": torch.zeros(workspace_bytes(*sizes), device=device, dtype=torch.uint8)}


def qkv_call(name: str, k: int, heads: int, kv_heads: int, head_dim: int, query_len: int = 1) -> Call:
    """Make a call for norm, projections, rotation and append of a Mistral or Llama."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape, std=1.0):
            return torch.randn(*shape, device=device, dtype=dtype) * std

        weights = [randn(n * head_dim, k, std=k**-0.5) for n in (heads, kv_heads, kv_heads)]
        caches = [randn(1, kv_heads, 1024, head_dim) for _ in range(2)]
        lens = torch.full((1,), 1000, device=device, dtype=torch.int32)
        return Sample(
            *(
                randn(1, query_len, k),
                *weights,
                None,
                None,
                None,
                False,
                *_angles(device, dtype, head_dim, query_len=query_len),
            ),
            *(*caches, lens, heads, None, 0, "rms", randn(k), None, 1e-5),
        )

    return Call(name, arguments)


def swiglu_call(name: str, k: int, n: int, rows: int = 1) -> Call:
    return Call(name, sample_of(drawn(1, rows, k), *[drawn(n, k, std=k**-0.5)] * 2))


def joined_call(name: str, k: int, features: tuple[int, ...]) -> Call:
    """Make a call behind an RMS norm."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        weights = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for n in features]
        x, norm_weight = (torch.randn(1, 1, k, device=device, dtype=dtype) for _ in range(2))
        return Sample(x, weights, "rms", norm_weight.flatten(), None, 1e-6)

    return Call(name, arguments)


def experts_call(
    name: str,
    hidden_size: int,
    width: int,
    num_experts: int,
    top_k: int,
    rows: int = 1,
    transposed: bool = False,
    concatenated: bool = False,
    has_gate: bool = True,
    routed: bool = False,
    **options,
) -> Call:
    """Make a call of experts that a random router chooses, and a residual.

    Args:
        transposed: as gpt-oss, with biases.
        concatenated: as Aria.
        has_gate: else as Nemotron-H.
        routed: the router's scores are given, and x is normed.
    """

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape, std=1.0):
            return torch.randn(*shape, device=device, dtype=dtype) * std

        scores = torch.randn(rows, 1, num_experts, device=device, dtype=dtype)
        weights, ids = scores.float().flatten(0, 1).softmax(-1).topk(top_k)
        stacks = (
            randn(num_experts, 2 * width if has_gate else width, hidden_size, std=hidden_size**-0.5),
            randn(num_experts, hidden_size, width, std=width**-0.5),
        )
        settings = {} if has_gate else {"activation": "squared_relu"}
        if concatenated:
            stacks = [stack.mT.contiguous() for stack in stacks]
            settings = {"transposed": True, "concatenated": True}
        if transposed:
            stacks = [stack.mT.contiguous() for stack in stacks]
            biases = {"gate_up_bias": randn(num_experts, 2 * width), "down_bias": randn(num_experts, hidden_size)}
            settings = biases | {"transposed": True, "activation": "clamped_swiglu"}
        x, residual = (randn(rows, 1, hidden_size) for _ in range(2))
        if routed:
            settings |= {"norm": "rms", "norm_weight": randn(hidden_size), "norm_eps": 1e-6}
            return Sample(x, scores, *stacks, top_k, residual, **settings)
        return Sample(x, ids, weights, *stacks, residual, **settings)

    return Call(name, arguments, **options)


def packed_experts_call(
    name: str,
    format: str,
    hidden_size: int,
    width: int,
    num_experts: int,
    top_k: int,
    rows: int = 1,
    is_gpt_oss: bool = False,
    **options,
) -> Call:
    """Make a call of quantized experts that a random router chooses, and a residual.

    Args:
        is_gpt_oss: gate and up alternate, there are biases, and the gate is clamped.
    """
    found = FORMATS[format]

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        def stack(out_features: int, in_features: int) -> tuple:
            groups = out_features, found.groups(in_features)
            shape, below = (out_features, padded(in_features) * found.bits // 8), found.finite_bytes
            quants = torch.randint(below, shape, device=device, dtype=torch.uint8)
            zeros = torch.randint(16, groups, device=device, dtype=torch.uint8) if found.has_zeros else None
            return quants, scale_bits(found, torch.rand(groups, device=device)), zeros, 1 / 64, format

        weights, ids = torch.randn(rows, num_experts, device=device).softmax(-1).topk(top_k)
        stacks = *stack(num_experts * 2 * width, hidden_size), *stack(num_experts * hidden_size, width)
        settings = {}
        if is_gpt_oss:
            biases = {"gate_up_bias": randn(num_experts, 2 * width), "down_bias": randn(num_experts, hidden_size)}
            settings = biases | {"alternating": True, "activation": "clamped_swiglu"}
        return Sample(randn(rows, 1, hidden_size), ids, weights, *stacks, randn(rows, 1, hidden_size), **settings)

    return Call(name, arguments, **options)


def router_call(name: str, num_experts: int, top_k: int, rows: int = 1) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        ids = torch.zeros(rows, top_k, dtype=torch.long, device=device)
        return Sample(torch.randn(rows, num_experts, device=device, dtype=dtype), ids)

    return Call(name, arguments)


def attention_call(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    query_len: int = 1,
    batch: int = 1,
    kv: torch.dtype | None = None,
    page_size: int | None = None,
    **options,
) -> Call:
    """Make a call of attention.

    Args:
        kv: dtype of a quantized cache; PyTorch's attention then runs over the dequantized cache, and dequantizing is
            part of the time.
        page_size: the cache lies in pages; PyTorch's attention then gathers them, also as part of the time.
    """

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        capacity = length if page_size is None else -(-length // page_size) * page_size
        caches = [torch.randn(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype) for _ in range(2)]
        scales = {}
        if page_size is not None:
            scales["block_table"], *caches = in_pages(caches, page_size)
        if kv is not None:
            (k, k_scales), (v, v_scales) = (quantized(cache, kv) for cache in caches)
            caches, scales = [k, v], dict(k_scales=k_scales, v_scales=v_scales)
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        workspace = _workspace(device, batch, query_len, heads, head_dim) if query_len <= MAX_QUERY_LEN else {}
        return Sample(q, *caches, lens, None, head_dim**-0.5, 0, **workspace, **scales)

    return Call(name, arguments, **options)


def quantizing_call(
    name: str, heads: int, kv_heads: int, head_dim: int, length: int, kv: torch.dtype, query_len: int = 1
) -> Call:
    """Make a call over a quantized cache whose newest positions come beside it."""
    plain = attention_call(name, heads, kv_heads, head_dim, length, query_len, kv=kv)

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        sample = plain.arguments(device, dtype)
        q, k_cache, v_cache, *seen = sample.args
        new = [torch.randn(1, kv_heads, query_len, head_dim, device=device) for _ in range(2)]
        scales = [sample.kwargs.pop(name) for name in ("k_scales", "v_scales")]
        return Sample(q, *new, k_cache, v_cache, *scales, *seen, **sample.kwargs)

    return Call(name, arguments, devices=("cuda",))


def append_call(
    name: str, heads: int, kv_heads: int, head_dim: int, length: int, query_len: int, most: int = 1024
) -> Call:
    """Make a call of new tokens behind others; there are kernels for GPUs only."""
    plain = attention_call(name, heads, kv_heads, head_dim, length, query_len)

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        return Sample(*plain.arguments(device, dtype).args)

    return Call(name, arguments, devices=("cuda",), most=most)


def layers_call(
    name: str, layers: int, hidden_size: int, heads: int, head_dim: int, length: int = 1024, **options
) -> Call:
    """Make a call of all layers of a GPT-2."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape, std=1.0):
            return torch.randn(*shape, device=device, dtype=dtype) * std

        def linear(in_features, out_features):
            return [randn(in_features, out_features, std=in_features**-0.5), randn(out_features)]

        def norm():
            return [randn(hidden_size), randn(hidden_size)]

        features, inner = heads * head_dim, 4 * hidden_size
        weights = []
        for _ in range(layers):
            weights += norm() + linear(hidden_size, 3 * features) + linear(features, hidden_size)
            weights += norm() + linear(hidden_size, inner) + linear(inner, hidden_size)
        caches = [[randn(1, heads, length, head_dim) for _ in range(layers)] for _ in range(2)]
        lens = torch.full((1,), length, device=device, dtype=torch.int32)
        x = randn(1, 1, hidden_size)
        return Sample(x, weights, *caches, lens, None, heads, head_dim**-0.5, [0] * layers, 1e-5, "gelu_tanh")

    return Call(name, arguments, **options)


def rope_call(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    bias: bool,
    batch: int = 1,
    norms: bool = False,
) -> Call:
    """Make a call, with ``norms`` of each head of queries and keys if asked for."""
    features, capacity, length = (heads + 2 * kv_heads) * head_dim, 1024, 1000

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        qkv = torch.randn(batch, 1, features, device=device, dtype=dtype)
        angles = _angles(device, dtype, rotary_dim, batch) if rotary_dim else [None, None]
        caches = [torch.randn(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype) for _ in range(2)]
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        row = torch.randn(features, device=device, dtype=dtype) if bias else None
        of_heads = random_head_norms("each", heads, kv_heads, head_dim, device, dtype) if norms else {}
        return Sample(qkv, row, *angles, *caches, lens, heads, **of_heads)

    return Call(name, arguments)


def latent_call(name: str, heads: int, rank: int, rope_dim: int, length: int, batch: int = 1) -> Call:
    """Make a call of attention over latents, which turns and appends the newest position, as DeepSeek V3's does."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        parts = [randn(*shape, size) for shape in ((batch, heads), (batch, 1, length)) for size in (rank, rope_dim)]
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        new = randn(batch, rank), randn(batch, rope_dim), *(angle[0] for angle in _angles(device, dtype, rope_dim))
        return Sample(*parts, lens, None, (rank + rope_dim) ** -0.5, None, 0, *new, "neighbors_to_halves")

    return Call(name, arguments)


def router_logits_call(name: str, num_experts: int, hidden_size: int) -> Call:
    """Make a call for one row."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        x, weight = (torch.randn(rows, hidden_size, device=device, dtype=dtype) for rows in (1, num_experts))
        return Sample(x, weight * hidden_size**-0.5, True)

    return Call(name, arguments)


def lora_down_call(name: str, k: int, ranks: tuple[int, ...]) -> Call:
    """Make a call for one row behind an RMS norm; adapters are in float32, as PEFT keeps them."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        weights = [torch.randn(rank, k, device=device) * k**-0.5 for rank in ranks]
        x, norm_weight = (torch.randn(1, 1, k, device=device, dtype=dtype) for _ in range(2))
        return Sample(x, weights, "rms", norm_weight.flatten(), None, 1e-6, True)

    return Call(name, arguments)


def lora_up_call(name: str, rank: int, features: tuple[int, ...], gated: bool = False) -> Call:
    """Make a call for one row in which each adapter, in float32, adds to the next ``features``."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        base = torch.randn(1, 1, sum(features), device=device, dtype=dtype)
        hidden = torch.randn(1, 1, rank * len(features), device=device)
        weights = [torch.randn(n, rank, device=device) * rank**-0.5 for n in features]
        firsts = [sum(features[:place]) for place in range(len(features))]
        behind = (None, "silu", True, True) if gated else (torch.randn_like(base), "none", False, True)
        return Sample(base, hidden, weights, [2.0] * len(features), firsts, *behind)

    return Call(name, arguments)


def head_products_call(name: str, heads: int, keys: int, values: int, rank: int, transposed: bool) -> Call:
    """Make a call over the rows of keys, or of values, in a weight that holds both for each head."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        both = torch.randn(heads, keys + values, rank, device=device, dtype=dtype) * rank**-0.5
        weight = both[:, :keys] if transposed else both[:, keys:]
        x = torch.randn(1, heads, keys if transposed else rank, device=device, dtype=dtype)
        return Sample(x, weight, transposed, True)

    return Call(name, arguments)


def convolution_call(name: str, channels: int, width: int, gates: bool = False, **options) -> Call:
    """Make a call of a short convolution; ``gates``: as LFM2, with one in front and one behind."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        before, x, after = randn(1, 3 * channels).split(channels, dim=-1)
        given = dict(input_gate=before, output_gate=after) if gates else {}
        return Sample(x, randn(1, channels, width), randn(channels, width), **given, **options)

    return Call(name, arguments)


def delta_call(name: str, k_heads: int, v_heads: int, k_dim: int, v_dim: int, batch: int = 1) -> Call:
    """Make a call of a gated delta net's state; q, k and v are columns of the convolution's output."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        sizes = k_heads * k_dim, k_heads * k_dim, v_heads * v_dim
        heads = k_heads, k_heads, v_heads
        mixed = torch.randn(batch, sum(sizes), device=device, dtype=dtype).split(sizes, dim=-1)
        a, b = (torch.randn(batch, v_heads, device=device, dtype=dtype) for _ in range(2))
        a_log, dt_bias = (torch.randn(v_heads, device=device, dtype=dtype) for _ in range(2))
        state = torch.randn(batch, v_heads, k_dim, v_dim, device=device)
        parts = (part.unflatten(-1, (count, -1)) for part, count in zip(mixed, heads, strict=True))
        return Sample(*parts, a, b, a_log, dt_bias, state, k_dim**-0.5)

    return Call(name, arguments)


def state_space_call(
    name: str, heads: int, head_dim: int, state_size: int, per_channel: bool = False, batch: int = 1
) -> Call:
    """Make a call of a state space's step: Mamba-2 with one group, or, ``per_channel``, Mamba-1."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        of_step = (heads, head_dim) if per_channel else (heads,)
        of_rates = (*of_step, state_size) if per_channel else (heads,)
        x, b, c = randn(batch, heads * head_dim + 2 * state_size).split((heads * head_dim, state_size, state_size), -1)
        z = randn(batch, heads, head_dim) if per_channel else None
        state = torch.randn(batch, heads, head_dim, state_size, device=device)
        return Sample(
            *(x.unflatten(-1, (heads, head_dim)), randn(batch, *of_step), randn(*of_rates), b[:, None], c[:, None]),
            *(state, randn(*of_step), randn(*of_step), z),
        )

    return Call(name, arguments)


def greedy_call(name: str, vocab_size: int, batch: int = 1) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def whole(*shape, dtype=torch.long):
            return torch.ones(*shape, device=device, dtype=dtype)

        logits = torch.randn(batch, vocab_size, device=device, dtype=dtype)
        lens = whole(batch, dtype=torch.int32)
        return Sample(logits, whole(batch), whole(batch, 1), whole(batch, 1), lens, whole(8, 2, batch))

    return Call(name, arguments)


def inputs_call(name: str, vocab_size: int, hidden_size: int, rows: int, head_dim: int = 0) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        one = torch.ones(1, 1, device=device, dtype=torch.long)
        tables = [randn(rows, head_dim) for _ in range(2 if head_dim else 0)]
        learned = None if head_dim else randn(rows, hidden_size)
        return Sample(randn(vocab_size, hidden_size), one, one, learned, 0, tables)

    return Call(name, arguments)


def race_call(name: str, vocab_size: int, *settings: float, batch: int = 1) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        logits = 3 * torch.randn(batch, vocab_size, device=device, dtype=dtype)
        noise = torch.empty(batch, vocab_size, device=device).exponential_()
        return Sample(logits, noise, torch.tensor(settings, dtype=torch.float64, device=device))

    return Call(name, arguments)
