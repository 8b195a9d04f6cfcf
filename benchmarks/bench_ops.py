"""Op benchmark: every op of the registry at real sizes, beside what PyTorch offers for the same work.

    python benchmarks/bench_ops.py --device cuda --ops gemv gemv_swiglu --dtype fp16 --csv

Method. Each call has several sets of arguments, used in turn, that together are larger than any cache (or
``MAX_SETS`` of them: then ``sets`` says that the data stays in the cache, as small activations do in a
model). On a GPU all calls of a round lie in one CUDA graph, one after the other, and events time its replay;
outputs stay alive, so that they rotate too. On a CPU a plain loop is timed. Implementations alternate, every
second round in reverse order; rows give the median with the 20th and 80th percentile. Ops are called as
``torch.ops`` does, without the argument checks of ``hf_fastpath.ops``, as the decode plan calls them. ``% of
R``: bytes the call has to move, over the time, over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
from measure import DTYPE_NAMES, DTYPES, Spread
from torch.nn import functional

import hf_fastpath.ops.read_stream  # noqa: F401  (an op of the registry even where hf_fastpath.ops does not list it)
from hf_fastpath import loader, registry
from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.ops.decode_attention import workspace_bytes
from hf_fastpath.registry import OpInputError, OpSpec, Sample, nbytes

#: what the argument sets of a call have to exceed together: a GPU's L2 (60 MB on an H200), a server CPU's L3
ROTATION_BYTES = {"cuda": 200e6, "cpu": 300e6}
MAX_SETS = 64
#: a round lasts at least this long, in bytes read at full speed (about 1 ms on an H200, 30 ms on two CPU
#: cores)
ROUND_BYTES = {"cuda": 4e9, "cpu": 1e9}
MAX_CALLS = 1024


@dataclass(frozen=True)
class Call:
    """A call of an op at a size that models use.

    Attributes:
        name: in tables and CSV.
        arguments: ``(device, dtype)`` to a random set of arguments.
        dtypes: those it is run in unless ``--dtype`` says otherwise.
        devices: where it is run; a GPU's larger sizes would take minutes on a CPU.
    """

    name: str
    arguments: Callable[[torch.device, torch.dtype], Sample]
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    devices: tuple[str, ...] = ("cuda", "cpu")


# ---- sizes ------------------------------------------------------------------------------------------------


def _randn(*shape: int, std: float = 1.0) -> Callable[[torch.device, torch.dtype], torch.Tensor]:
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype) * std


def _sample(*parts, **named) -> Callable[[torch.device, torch.dtype], Sample]:
    """Arguments of which the callables are drawn for each set."""

    def draw(part, device, dtype):
        return part(device, dtype) if callable(part) else part

    return lambda device, dtype: Sample(
        *(draw(part, device, dtype) for part in parts),
        **{k: draw(part, device, dtype) for k, part in named.items()},
    )


def _gemv(name: str, k: int, n: int, rows: int = 1, **options) -> Call:
    return Call(name, _sample(_randn(1, rows, k), _randn(n, k, std=k**-0.5), **options))


def _conv1d(name: str, k: int, n: int, **options) -> Call:
    weight = _randn(k, n, std=k**-0.5)
    return Call(name, _sample(_randn(1, 1, k), weight, _randn(n), transposed=True, **options), ("fp16", "fp32"))


def _angles(
    device: torch.device, dtype: torch.dtype, rotary_dim: int, batch: int = 1, query_len: int = 1
) -> list[torch.Tensor]:
    """Cosines and sines of the rotation."""
    angle = torch.rand(batch, query_len, rotary_dim // 2, device=device).repeat(1, 1, 2) * 2 * math.pi
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def _workspace(device: torch.device, *sizes: int) -> dict[str, torch.Tensor]:
    """One workspace for all calls, as a decode plan keeps it; the CPU needs none."""
    if device.type != "cuda":
        return {}
    return {"workspace": torch.zeros(workspace_bytes(*sizes), device=device, dtype=torch.uint8)}


def _qkv(name: str, k: int, heads: int, kv_heads: int, head_dim: int, query_len: int = 1) -> Call:
    """Norm, projections, rotation and append of a Mistral or Llama."""

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


def _swiglu(name: str, k: int, n: int, rows: int = 1) -> Call:
    return Call(name, _sample(_randn(1, rows, k), *[_randn(n, k, std=k**-0.5)] * 2))


def _experts(
    name: str,
    hidden_size: int,
    width: int,
    num_experts: int,
    top_k: int,
    rows: int = 1,
    transposed: bool = False,
    **options,
) -> Call:
    """Experts that a random router chooses, and the residual; ``transposed``: as gpt-oss's, with biases."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape, std=1.0):
            return torch.randn(*shape, device=device, dtype=dtype) * std

        weights, ids = torch.randn(rows, num_experts, device=device).softmax(-1).topk(top_k)
        stacks = (
            randn(num_experts, 2 * width, hidden_size, std=hidden_size**-0.5),
            randn(num_experts, hidden_size, width, std=width**-0.5),
        )
        form = {}
        if transposed:
            stacks = [stack.mT.contiguous() for stack in stacks]
            biases = {"gate_up_bias": randn(num_experts, 2 * width), "down_bias": randn(num_experts, hidden_size)}
            form = biases | {"transposed": True, "activation": "clamped_swiglu"}
        return Sample(randn(rows, 1, hidden_size), ids, weights, *stacks, randn(rows, 1, hidden_size), **form)

    return Call(name, arguments, **options)


def _router(name: str, num_experts: int, top_k: int, rows: int = 1) -> Call:
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
    **options,
) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        q = torch.randn(batch, query_len, heads, head_dim, device=device, dtype=dtype)
        caches = [torch.randn(batch, kv_heads, length, head_dim, device=device, dtype=dtype) for _ in range(2)]
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        workspace = _workspace(device, batch, query_len, heads, head_dim)
        return Sample(q, *caches, lens, None, head_dim**-0.5, 0, **workspace)

    return Call(name, arguments, **options)


def _step(
    name: str,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    gpt2: bool = False,
    length: int = 1024,
    **options,
) -> Call:
    """A step of a whole Mistral or Llama, or of a GPT-2."""

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape, std=1.0):
            return torch.randn(*shape, device=device, dtype=dtype) * std

        def linear(out_features, in_features):
            shape = (in_features, out_features) if gpt2 else (out_features, in_features)
            return [randn(*shape, std=in_features**-0.5), randn(out_features) if gpt2 else absent]

        def norm():
            return [randn(hidden_size), randn(hidden_size) if gpt2 else absent]

        absent, features, kv_features = randn(0), heads * head_dim, kv_heads * head_dim
        weights = []
        for _ in range(layers):
            qkv = [features + 2 * kv_features] if gpt2 else [features, kv_features, kv_features]
            weights += norm() + [tensor for size in qkv for tensor in linear(size, hidden_size)]
            weights += [absent] * (4 if gpt2 else 0) + linear(hidden_size, features) + norm()
            weights += [absent] if gpt2 else linear(intermediate_size, hidden_size)[:1]
            weights += linear(intermediate_size, hidden_size) + linear(hidden_size, intermediate_size)
        weights += [*norm(), randn(vocab_size, hidden_size, std=hidden_size**-0.5), absent]
        caches = [[randn(1, kv_heads, length, head_dim) for _ in range(layers)] for _ in range(2)]
        angles = [None, None] if gpt2 else _angles(device, dtype, head_dim)
        lens = torch.full((1,), length, device=device, dtype=torch.int32)
        activation = "gelu_tanh" if gpt2 else "silu"
        return Sample(
            *(randn(1, 1, hidden_size), weights, *caches, *angles, lens, None, heads, head_dim**-0.5, [0] * layers),
            *("layer" if gpt2 else "rms", 1e-5, activation, gpt2),
            **_workspace(device, 1, 1, heads, head_dim),
        )

    return Call(name, arguments, **options)


def _rope(name: str, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, bias: bool, batch: int = 1) -> Call:
    features, capacity, length = (heads + 2 * kv_heads) * head_dim, 1024, 1000

    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        qkv = torch.randn(batch, 1, features, device=device, dtype=dtype)
        angles = _angles(device, dtype, rotary_dim, batch) if rotary_dim else [None, None]
        caches = [torch.randn(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype) for _ in range(2)]
        lens = torch.full((batch,), length, device=device, dtype=torch.int32)
        row = torch.randn(features, device=device, dtype=dtype) if bias else None
        return Sample(qkv, row, *angles, *caches, lens, heads)

    return Call(name, arguments)


def _greedy(name: str, vocab_size: int, batch: int = 1) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def whole(*shape, dtype=torch.long):
            return torch.ones(*shape, device=device, dtype=dtype)

        logits = torch.randn(batch, vocab_size, device=device, dtype=dtype)
        lens = whole(batch, dtype=torch.int32)
        return Sample(logits, whole(batch), whole(batch, 1), whole(batch, 1), lens, whole(8, 2, batch))

    return Call(name, arguments)


def _inputs(name: str, vocab_size: int, hidden_size: int, rows: int, head_dim: int = 0) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        def randn(*shape):
            return torch.randn(*shape, device=device, dtype=dtype)

        one = torch.ones(1, 1, device=device, dtype=torch.long)
        tables = [randn(rows, head_dim) for _ in range(2 if head_dim else 0)]
        learned = None if head_dim else randn(rows, hidden_size)
        return Sample(randn(vocab_size, hidden_size), one, one, learned, 0, tables)

    return Call(name, arguments)


def _race(name: str, vocab_size: int, *settings: float, batch: int = 1) -> Call:
    def arguments(device: torch.device, dtype: torch.dtype) -> Sample:
        logits = 3 * torch.randn(batch, vocab_size, device=device, dtype=dtype)
        noise = torch.empty(batch, vocab_size, device=device).exponential_()
        return Sample(logits, noise, torch.tensor(settings, dtype=torch.float64, device=device))

    return Call(name, arguments)


_GPU = ("cuda",)
_GELU_DTYPES = ("fp32", "fp16")

#: op -> its calls; an op of the registry without an entry here is an error
SHAPES: dict[str, list[Call]] = {
    "fused_gelu": [
        Call("gpt2 prefill 1000x3072", _sample(_randn(1000, 3072)), _GELU_DTYPES),
        Call("gpt2 prefill 16000x3072", _sample(_randn(16000, 3072)), _GELU_DTYPES, _GPU),
        Call("gpt2 decode 1x3072", _sample(_randn(1, 3072)), _GELU_DTYPES),
        Call("erf 1000x3072", _sample(_randn(1000, 3072), "none"), _GELU_DTYPES),
        Call("erf 1x3072", _sample(_randn(1, 3072), "none"), _GELU_DTYPES),
    ],
    "fused_swiglu": [
        Call("mistral prefill 512x14336", _sample(*[_randn(512, 14336)] * 2)),
        Call("mistral prefill 4096x14336", _sample(*[_randn(4096, 14336)] * 2), devices=_GPU),
        Call("tinyllama prefill 512x5632", _sample(*[_randn(512, 5632)] * 2)),
    ],
    "gemv": [
        _gemv("mistral o 4096x4096", 4096, 4096),
        _gemv("mistral o 4096x4096 + residual", 4096, 4096, residual=_randn(1, 1, 4096)),
        _gemv("mistral down 14336->4096", 14336, 4096),
        _gemv("mistral head 4096->32000", 4096, 32000),
        _gemv("mistral o 4096x4096, 8 rows", 4096, 4096, rows=8),
        _gemv("mistral down 14336->4096, 16 rows", 14336, 4096, rows=16),
        _gemv("tinyllama o 2048x2048", 2048, 2048),
        _gemv("tinyllama down 5632->2048", 5632, 2048),
        _gemv("tinyllama head 2048->32000", 2048, 32000),
        _gemv("llama-3.2 head 2048->128256", 2048, 128256),
        _conv1d("gpt2 qkv 768->2304, Conv1D", 768, 2304),
        _conv1d("gpt2 o 768x768, Conv1D", 768, 768),
        _conv1d("gpt2 fc 768->3072 + gelu, Conv1D", 768, 3072, activation="gelu_tanh"),
        _conv1d("gpt2 proj 3072->768, Conv1D", 3072, 768),
        _gemv("gpt2 head 768->50257", 768, 50257),
    ],
    "qkv_rope_append": [
        _qkv("mistral 4096->4096+2x1024", 4096, 32, 8, 128),
        _qkv("mistral 4096->4096+2x1024, 8 queries", 4096, 32, 8, 128, query_len=8),
        _qkv("tinyllama 2048->2048+2x256", 2048, 32, 4, 64),
        _qkv("llama-3.2 2048->2048+2x512", 2048, 32, 8, 64),
    ],
    "gemv_swiglu": [
        _swiglu("mistral 4096->2x14336", 4096, 14336),
        _swiglu("mistral 4096->2x14336, 8 rows", 4096, 14336, rows=8),
        _swiglu("tinyllama 2048->2x5632", 2048, 5632),
        _swiglu("llama-3.2 2048->2x8192", 2048, 8192),
    ],
    "fused_experts": [
        _experts("mixtral 2 of 8, 4096->2x14336", 4096, 14336, 8, 2, dtypes=("bf16",), devices=_GPU),
        _experts("mixtral 2 of 8, 8 rows", 4096, 14336, 8, 2, rows=8, dtypes=("bf16",), devices=_GPU),
        _experts("qwen3-30b 8 of 128, 2048->2x768", 2048, 768, 128, 8, dtypes=("bf16",)),
        _experts("qwen3-30b 8 of 128, 8 rows", 2048, 768, 128, 8, rows=8, dtypes=("bf16",)),
        _experts("gpt-oss-20b 4 of 32, 2880->2x2880", 2880, 2880, 32, 4, transposed=True, dtypes=("bf16",)),
        _experts("gpt-oss-20b 4 of 32, 8 rows", 2880, 2880, 32, 4, rows=8, transposed=True, dtypes=("bf16",)),
    ],
    "topk_softmax": [_router("mixtral 2 of 8", 8, 2), _router("qwen3-30b 8 of 128", 128, 8)],
    "decode_attention": [
        attention_call("mistral 1k", 32, 8, 128, 1024),
        attention_call("mistral 4k", 32, 8, 128, 4096),
        attention_call("mistral 32k", 32, 8, 128, 32768),
        attention_call("mistral 128k", 32, 8, 128, 131072, devices=_GPU),
        attention_call("mistral 1k, batch 8", 32, 8, 128, 1024, batch=8),
        attention_call("mistral 16k, 8 queries", 32, 8, 128, 16384, query_len=8),
        attention_call("mistral 16k, 16 queries", 32, 8, 128, 16384, query_len=16),
        attention_call("tinyllama 2k", 32, 4, 64, 2048),
        attention_call("llama-3.2 4k", 32, 8, 64, 4096),
        attention_call("gpt2 1k", 12, 12, 64, 1024),
        attention_call("gemma-2b 16k", 8, 1, 256, 16384),
    ],
    "decode_layers": [
        _step("mistral, 2 layers, 1k", 2, 4096, 32, 8, 128, 14336, 32000, dtypes=("fp16",)),
        _step("gpt2, 12 layers, 1k", 12, 768, 12, 12, 64, 3072, 50257, gpt2=True, dtypes=("fp16", "fp32")),
    ],
    "greedy_token": [
        _greedy("mistral 32000", 32000),
        _greedy("gpt2 50257", 50257),
        _greedy("llama-3.2 128256, batch 8", 128256, batch=8),
    ],
    "step_inputs": [
        _inputs("mistral", 32000, 4096, 4096, head_dim=128),
        _inputs("gpt2", 50257, 768, 1024),
    ],
    "exponential_race": [
        _race("mistral 32000, temperature", 32000, 0.8, 0, 1.0, 0.0),
        _race("mistral 32000, top-k 50, top-p", 32000, 0.8, 50, 0.95, 0.0),
        _race("mistral 32000, top-p", 32000, 0.8, 0, 0.95, 0.0),
        _race("gpt2 50257, top-k 50, top-p", 50257, 0.8, 50, 0.95, 0.0),
        _race("llama-3.2 128256, top-k 50, top-p, batch 8", 128256, 0.8, 50, 0.95, 0.0, batch=8),
        _race("llama-3.2 128256, top-p, batch 8", 128256, 0.8, 0, 0.95, 0.0, batch=8),
    ],
    "rms_norm": [
        Call("mistral 1x4096", _sample(_randn(1, 1, 4096), _randn(4096), 1e-5)),
        Call("mistral 512x4096", _sample(_randn(512, 4096), _randn(4096), 1e-5)),
        Call("mistral 4096x4096", _sample(_randn(4096, 4096), _randn(4096), 1e-5), devices=_GPU),
    ],
    "layer_norm": [
        Call("gpt2 1x768", _sample(_randn(1, 1, 768), _randn(768), _randn(768), 1e-5)),
        Call("gpt2 1000x768", _sample(_randn(1000, 768), _randn(768), _randn(768), 1e-5)),
        Call("gpt2 16000x768", _sample(_randn(16000, 768), _randn(768), _randn(768), 1e-5), devices=_GPU),
    ],
    "rope_append": [
        _rope("mistral", 32, 8, 128, 128, False),
        _rope("mistral, batch 8", 32, 8, 128, 128, False, batch=8),
        _rope("tinyllama", 32, 4, 64, 64, False),
        _rope("gpt2, no rotation", 12, 12, 64, 0, True),
    ],
    "read_stream": [
        Call("33.6 MB, variant 0", _sample(_randn(1 << 24), 0), ("fp16",)),
        Call("235 MB, variant 0", _sample(_randn(28672 * 4096), 0), ("fp16",)),
        Call("235 MB, variant 1", _sample(_randn(28672 * 4096), 1), ("fp16",)),
        Call("235 MB, variant 2", _sample(_randn(28672 * 4096), 2), ("fp16",), _GPU),
    ],
}


# ---- what PyTorch offers ----------------------------------------------------------------------------------


def _copy_bytes(sample: Sample) -> torch.Tensor:
    return sample.args[0].clone()


def _sdpa(sample: Sample) -> torch.Tensor:
    q, k, v, _, _, scale, _ = sample.args
    options = {}
    if q.shape[1] > 1:
        steps = torch.arange(k.shape[2], device=q.device)
        options["attn_mask"] = steps <= steps[-q.shape[1] :, None]
    q = q.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **options)


def _repeat_kv(sample: Sample) -> torch.Tensor:
    """Keys and values copied for every query head, as transformers does when there is a mask."""
    q, k, v, *rest = sample.args
    groups = q.shape[2] // k.shape[1]
    repeated = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return _sdpa(Sample(q, *repeated, *rest))


def _fused_gelu(sample: Sample) -> torch.Tensor:
    x, approximate = (*sample.args, "tanh")[:2]
    return functional.gelu(x, approximate=approximate)


#: op -> what its reference is called here: the calls that a stock model makes
REFERENCE_NAMES = {
    "fused_gelu": "stock formula",
    "fused_swiglu": "F.silu, mul",
    "gemv": "F.linear",
    "qkv_rope_append": "norm, 3 F.linear, rope",
    "gemv_swiglu": "2 F.linear, gate",
    "fused_experts": "batched_mm",
    "topk_softmax": "softmax, topk, division",
    "decode_layers": "layer by layer",
    "greedy_token": "argmax, copies",
    "step_inputs": "F.embedding",
    "exponential_race": "warpers, softmax, division",
    "rms_norm": "MistralRMSNorm",
    "layer_norm": "F.layer_norm",
    "rope_append": "rope, index_put",
}
#: op -> {name of another way: function of a Sample}
ALTERNATIVES: dict[str, dict[str, Callable[[Sample], torch.Tensor]]] = {
    "fused_gelu": {"F.gelu": _fused_gelu, "copy": _copy_bytes},
    "decode_attention": {"SDPA enable_gqa": _sdpa, "SDPA repeat_kv": _repeat_kv},
    "rms_norm": {
        "F.rms_norm": lambda s: functional.rms_norm(s.args[0], s.args[1].shape, s.args[1], s.args[2]),
        "copy": _copy_bytes,
    },
    "layer_norm": {"copy": _copy_bytes},
    "read_stream": {"copy": _copy_bytes},
}
#: bytes that an alternative moves, where that is not what the op moves
ALTERNATIVE_BYTES = {"copy": lambda sample: 2 * nbytes(sample.args[0])}
#: ops whose reference is not what a stock model runs: the ways above stand for it
WITHOUT_REFERENCE = ("decode_attention", "read_stream")


def implementations(spec: OpSpec) -> dict[str, Callable[[Sample], torch.Tensor]]:
    """Name to function of a Sample: ours first, then the alternatives."""
    found = {"hf_fastpath": lambda sample: spec.overload(*sample.args, **sample.kwargs)}
    if spec.name not in WITHOUT_REFERENCE:
        found[REFERENCE_NAMES.get(spec.name, "reference")] = lambda sample: spec.reference(
            *sample.args, **sample.kwargs
        )
    return found | ALTERNATIVES.get(spec.name, {})


# ---- timing -----------------------------------------------------------------------------------------------


def _argument_bytes(sample: Sample) -> int:
    return nbytes(*sample.tensors())


def _timer(function: Callable[[Sample], object], sets: list[Sample], calls: int) -> Callable[[], float]:
    """A function that gives seconds a call over one round."""
    device = sets[0].args[0].device
    turns = list(itertools.islice(itertools.cycle(sets), calls))
    if device.type == "cuda":
        outputs: list[object] = [None] * len(sets)

        def step() -> list[object]:
            for number, sample in enumerate(turns):
                outputs[number % len(sets)] = function(sample)
            return outputs

        return measure.graph_timer(step, device, calls)

    def loop() -> float:
        start = time.perf_counter()
        for sample in turns:
            function(sample)
        return (time.perf_counter() - start) / calls

    loop()
    return loop


def bench_call(
    spec: OpSpec, call: Call, device: torch.device, dtype: torch.dtype, bandwidth: float, rounds: int
) -> list[dict[str, object]]:
    """Rows of one call: ours, then each alternative.

    Raises:
        OpInputError: the op does not take these arguments.
    """
    first = call.arguments(device, dtype)
    if reasons := spec.why_not(*first.args, **first.kwargs):
        raise OpInputError("; ".join(reasons))
    wanted = ROTATION_BYTES[device.type] / _argument_bytes(first)
    # The same values in other memory: drawing them again would take longer than the benchmark.
    sets = [first] + [first.map_tensors(torch.clone) for _ in range(min(MAX_SETS, math.ceil(wanted)) - 1)]
    moved = spec.bytes(*first.args, **first.kwargs)
    calls = max(len(sets), min(MAX_CALLS, int(ROUND_BYTES[device.type] / max(moved, _argument_bytes(first)))))
    timers = {name: _timer(function, sets, calls) for name, function in implementations(spec).items()}
    spreads = measure.alternate(timers, rounds)
    ours = spreads["hf_fastpath"].p50
    return [
        _row(spec, call, dtype, name, spread, ALTERNATIVE_BYTES.get(name, lambda _: moved)(first), bandwidth)
        | {"times_ours": round(spread.p50 / ours, 3), "sets": len(sets), "cached": wanted > len(sets)}
        for name, spread in spreads.items()
    ]


def _row(
    spec: OpSpec, call: Call, dtype: torch.dtype, name: str, spread: Spread, moved: int, bandwidth: float
) -> dict[str, object]:
    speed = moved / spread.p50
    return {
        "op": spec.name,
        "call": call.name,
        "dtype": DTYPE_NAMES[dtype],
        "implementation": name,
        "us": round(spread.p50 * 1e6, 3),
        "us_p20": round(spread.p20 * 1e6, 3),
        "us_p80": round(spread.p80 * 1e6, 3),
        "bytes": moved,
        "gb_s": round(speed / 1e9, 1),
        "percent_of_r": round(100 * speed / bandwidth, 1),
        "r_gb_s": round(bandwidth / 1e9, 1),
    }


HEADER = (
    f"{'op':17}{'call':36}{'dtype':6}{'implementation':17}{'us':>10} {'±%':>4}{'GB/s':>8}{'% of R':>8}{'x ours':>8}"
)


def _line(row: dict[str, object]) -> str:
    spread = Spread(row["us"], row["us_p20"], row["us_p80"])
    return (
        f"{row['op']:17}{row['call']:36}{row['dtype']:6}{row['implementation']:17}{row['us']:>10.2f} "
        f"{spread.percent:>4.0f}{row['gb_s']:>8.1f}{row['percent_of_r']:>8.1f}{row['times_ours']:>8.2f}"
        + ("  in cache" if row["cached"] else "")
    )


def missing_shapes() -> list[str]:
    """Ops of the registry that have no calls here."""
    return sorted(set(registry.all_ops()) - set(SHAPES))


def bench(
    device: torch.device | str,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    rounds: int = 9,
    csv: Path | None = None,
    echo: Callable[[str], None] = print,
    shapes: dict[str, list[Call]] | None = None,
) -> list[dict[str, object]]:
    """Run the benchmark and print its table, line by line as it comes.

    Args:
        device: ``"cpu"`` or a CUDA device.
        ops: names; empty for all of the registry.
        dtypes: "fp32", "fp16", "bf16"; empty for each call's own.
        rounds: timed rounds.
        csv: file to append the rows to.
        echo: receives every line.
        shapes: calls of each op; None: :data:`SHAPES`.

    Raises:
        ValueError: an op of the registry has no entry in :data:`SHAPES`.
    """
    device = torch.device(device)
    if missing := missing_shapes():
        raise ValueError(f"no shapes for {', '.join(missing)}: add them to SHAPES in benchmarks/bench_ops.py")
    status = loader.ensure(device.type)
    bandwidth = measure_read_bandwidth(device)
    known = measure.environment(device)
    echo(f"{known['device']}: R = {bandwidth / 1e9:.1f} GB/s; torch {torch.__version__}; kernels {status}")
    echo(HEADER)
    rows = []
    for name in ops or registry.all_ops():
        spec = registry.get(name)
        for call in (shapes or SHAPES)[name]:
            if device.type not in call.devices:
                continue
            for dtype in dtypes or call.dtypes:
                try:
                    with torch.no_grad():
                        found = bench_call(spec, call, device, DTYPES[dtype], bandwidth, rounds)
                except OpInputError as error:
                    echo(f"{name}, {call.name}, {dtype}: left out: {error}")
                    continue
                found = [known | row for row in found]
                rows += found
                for row in found:
                    echo(_line(row))
                if csv is not None:
                    measure.append_csv(csv, found)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda, cuda:1 or cpu (here: %(default)s)")
    parser.add_argument("--ops", nargs="+", default=[], choices=sorted(registry.all_ops()), metavar="OP")
    parser.add_argument("--dtype", nargs="+", default=[], choices=list(DTYPES), help="instead of each call's own")
    parser.add_argument("--rounds", type=int, default=9)
    measure.add_csv_argument(parser)
    arguments = parser.parse_args(argv)
    path = measure.chosen_csv(arguments.csv, "ops", torch.device(arguments.device))
    bench(arguments.device, arguments.ops, arguments.dtype, arguments.rounds, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
