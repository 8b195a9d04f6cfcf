"""Decode attention at the lengths, groups of heads and numbers of queries that models decode with, beside SDPA.

    python benchmarks/bench_decode_attention.py --csv

Method: that of bench_ops.py, on a GPU.
"""

from __future__ import annotations

import argparse

import bench_ops
import measure
import torch
from op_calls import Call, attention_call

#: query heads, KV heads, head_dim
HEADS = {"32/8 heads of 128": (32, 8, 128), "32/32 heads of 128": (32, 32, 128), "64/8 heads of 128": (64, 8, 128)}
LENGTHS = {"128": 128, "1k": 1024, "4k": 4096, "32k": 32768, "128k": 131072}
QUERIES = (1, 2, 4, 8)


def calls(dtype: str) -> list[Call]:
    """One query at every length and group; more queries for the first group."""
    found = []
    for group, sizes in HEADS.items():
        for label, length in LENGTHS.items():
            for queries in QUERIES if group == next(iter(HEADS)) else (1,):
                name = f"{group}, {label}" + (f", {queries} queries" if queries > 1 else "")
                found.append(attention_call(name, *sizes, length, query_len=queries, dtypes=(dtype,)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--rounds", type=int, default=5)
    measure.add_csv_argument(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: bench_ops.py --device cpu --ops decode_attention times the CPU kernel")
    path = measure.chosen_csv(arguments.csv, "decode_attention", torch.device("cuda"))
    shapes = {"decode_attention": calls(arguments.dtype)}
    bench_ops.bench("cuda", ["decode_attention"], rounds=arguments.rounds, csv=path, shapes=shapes)


if __name__ == "__main__":
    main()
