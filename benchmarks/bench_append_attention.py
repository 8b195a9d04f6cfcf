"""Attention of microbatches: 1 to 16384 new tokens against a cache of 16384 positions that holds them, beside SDPA.

    python benchmarks/bench_append_attention.py --csv

Method. As in bench_ops.py on a GPU, the caches of a call are together more than the L2 holds and are used in turn, all
calls of a round are in one CUDA graph, and implementations alternate; rows give the median with the 20th and 80th
percentile. SDPA is called directly, with a single backend, queries at the end of the keys (``causal_lower_right``) and
``enable_gqa``. "stock" is SDPA as transformers calls it, with repeated keys and values and a mask. With ``--prompts``
there are no tokens before the new ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.bench import measure
from hf_fastpath.bench.measure import DTYPES
from hf_fastpath.native import loader
from hf_fastpath.ops import append_attention, decode_attention
from hf_fastpath.ops.decode_attention import MAX_QUERY_LEN

#: query heads, KV heads, head_dim
SHAPES = {"llama-8B": (32, 8, 128), "gemma-2B": (8, 1, 256), "phi-2": (32, 32, 80)}
QUERIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
POSITIONS = 16384
#: bytes of the caches of a call together, at least; the L2 of an H200 has 60 MB
ROTATION_BYTES = 300e6
#: a call with so many multiplications is long enough alone
_LONG = 2e11
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def implementations(q: torch.Tensor, length: int, group: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return name -> function of keys and values."""
    query_len, scale = q.shape[1], q.shape[3] ** -0.5
    lens = torch.full((1,), length, device=q.device, dtype=torch.int32)
    queries = q.transpose(1, 2)
    mask = causal_lower_right(query_len, length)
    causal = dict(is_causal=True) if query_len == length else dict(attn_mask=mask) if query_len > 1 else {}

    def direct(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def call(k, v):
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    queries, k, v, scale=scale, enable_gqa=group > 1, **causal
                )

        return call

    seen = torch.ones(query_len, length, device=q.device, dtype=torch.bool).tril(length - query_len)

    def stock(k, v):
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        return functional.scaled_dot_product_attention(queries, k, v, attn_mask=seen[None, None], scale=scale)

    found = {
        "hf_fastpath": lambda k, v: append_attention.overload(q, k, v, lens, None, scale),
        "hf_fastpath, overlapping": lambda k, v: append_attention.overload(
            q, k, v, lens, None, scale, programmatic_launch=True
        ),
    }
    if query_len <= MAX_QUERY_LEN:
        found["decode_attention"] = lambda k, v: decode_attention.overload(q, k, v, lens, None, scale)
    return found | {name: direct(backend) for name, backend in BACKENDS.items()} | {"stock": stock}


def timers(sizes: tuple[int, int, int], query_len: int, length: int, dtype: torch.dtype) -> dict[str, Callable]:
    """Return the timer of each implementation that runs here."""
    device = torch.device("cuda")
    heads, kv_heads, head_dim = sizes
    q = torch.randn(1, query_len, heads, head_dim, device=device, dtype=dtype)
    one = 2 * kv_heads * length * head_dim * q.element_size()
    work = 4 * query_len * length * heads * head_dim
    sets = 1 if work > _LONG else max(2, int(ROTATION_BYTES / one))
    shape = (1, kv_heads, length, head_dim)
    caches = [[torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(sets)]
    made = {}
    for name, call in implementations(q, length, heads // kv_heads).items():
        try:
            made[name] = measure.graph_timer(lambda call=call: [call(*cache) for cache in caches], device, sets)
        except RuntimeError as error:  # the backend does not have these sizes
            print(f"{name}, {query_len} tokens: left out: {str(error).splitlines()[0][:100]}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(QUERIES))
    parser.add_argument("--positions", type=int, default=POSITIONS)
    parser.add_argument("--prompts", action="store_true", help="no tokens before the new ones")
    parser.add_argument("--rounds", type=int, default=5)
    measure.add_csv_argument(parser)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: append_attention has kernels for GPUs alone")
    device = torch.device("cuda")
    path = measure.chosen_csv(given.csv, "append_attention", device)
    status, bandwidth, known = loader.ensure("cuda"), measure_read_bandwidth(device), measure.environment(device)
    print(f"{known['device']}: R = {bandwidth / 1e9:.1f} GB/s; torch {torch.__version__}; kernels {status}")
    for shape in given.shapes:
        heads, kv_heads, head_dim = SHAPES[shape]
        for query_len in given.tokens:
            length = query_len if given.prompts else given.positions
            made = timers(SHAPES[shape], query_len, length, DTYPES[given.dtype])
            found = measure.alternate(made, given.rounds)
            work = 4 * query_len * (length - (query_len - 1) / 2) * heads * head_dim
            moved = 4 * kv_heads * length * head_dim
            for name, spread in found.items():
                us = spread.p50 * 1e6
                low, high = ("" if each is None else f"{each * 1e6:.2f}" for each in (spread.p20, spread.p80))
                row = known | dict(shape=shape, dtype=given.dtype, tokens=query_len, positions=length)
                row |= dict(implementation=name, us=f"{us:.2f}", p20=low)
                row |= dict(p80=high, tflops=f"{work / us / 1e6:.1f}")
                row |= dict(percent_of_read=f"{100 * moved / spread.p50 / bandwidth:.1f}")
                print(f"{shape:9} {query_len:6} {name:26} {us:10.2f} us {row['tflops']:>7} TFLOP/s", flush=True)
                if path is not None:
                    measure.append_csv(path, [row])


if __name__ == "__main__":
    main()
