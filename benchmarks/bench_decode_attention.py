"""Decode attention at the lengths, groups of heads and numbers of queries that models decode with, beside SDPA.

    python benchmarks/bench_decode_attention.py --csv
    python benchmarks/bench_decode_attention.py --page-size 16 256 --csv

Method: that of bench_ops.py, on a GPU. With page sizes every call is also made over a cache in pages, after the call
over one buffer; PyTorch's attention gathers the pages first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import bench_ops
import torch
from op_calls import Call, attention_call

from hf_fastpath.bench import measure

#: query heads, KV heads, head_dim
HEADS = {"32/8 heads of 128": (32, 8, 128), "32/32 heads of 128": (32, 32, 128), "64/8 heads of 128": (64, 8, 128)}
LENGTHS = {"128": 128, "1k": 1024, "4k": 4096, "32k": 32768, "128k": 131072}
QUERIES = (1, 2, 4, 8)


def calls(dtype: str, page_sizes: Sequence[int] = ()) -> list[Call]:
    """Make calls with one query at every length and group, with more queries for the first group, over every cache."""
    found = []
    for group, sizes in HEADS.items():
        for label, length in LENGTHS.items():
            for queries in QUERIES if group == next(iter(HEADS)) else (1,):
                name = f"{group}, {label}" + (f", {queries} queries" if queries > 1 else "")
                options = dict(query_len=queries, dtypes=(dtype,))
                found.append(attention_call(name, *sizes, length, **options))
                for page_size in page_sizes:
                    paged = f"{name}, pages of {page_size}"
                    found.append(attention_call(paged, *sizes, length, page_size=page_size, **options))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page-size", type=int, nargs="*", default=[], help="positions of a page")
    measure.add_csv_argument(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: bench_ops.py --device cpu --ops decode_attention times the CPU kernel")
    path = measure.chosen_csv(arguments.csv, "decode_attention", torch.device("cuda"))
    shapes = {"decode_attention": calls(arguments.dtype, arguments.page_size)}
    bench_ops.bench("cuda", ["decode_attention"], rounds=arguments.rounds, csv=path, shapes=shapes)


if __name__ == "__main__":
    main()
