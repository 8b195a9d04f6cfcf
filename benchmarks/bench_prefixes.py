"""A chat that sends its whole text each turn: the time to the second answer's first token, beside stock.

    python benchmarks/bench_prefixes.py --csv
    python benchmarks/bench_prefixes.py --types llama --sizes 32x4096 --lengths 4096 --dtype bf16 --device cuda --csv

A size is layers x features; the weights are random. Each round is a chat of its own: a first turn of so many tokens,
an answer of 16 tokens, a second turn of 24 tokens, of which one token is asked for. "ours" is a model patched without
``prefix_cache``, "kept" one patched with it; "sum_ms" is the sum over the weights, which is part of "kept".
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from bench_first_token import VOCAB, model_of

import hf_fastpath
from hf_fastpath.bench import measure
from hf_fastpath.decode.state.weights_sum import weights_sum

#: whole layers, listed and recorded; windows; states
TYPES = ("llama", "glm4", "gemma3_text", "lfm2", "qwen3_5_text")
_ANSWER, _TURN = 16, 24


def rows_of(name: str, size: str, lengths: Sequence[int], rounds: int, dtype: str, device: torch.device) -> list[dict]:
    layers, width = map(int, size.split("x"))
    stock = model_of(name, layers, width, measure.DTYPES[dtype], device)
    models = {"stock": stock, "ours": hf_fastpath.patch(copy.deepcopy(stock), quiet=True)}
    models["kept"] = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, prefix_cache="8GB")
    generator = torch.Generator().manual_seed(0)
    text = lambda length: torch.randint(3, VOCAB, (1, length), generator=generator).to(device)  # noqa: E731
    answer = lambda model, ids, count: model.generate(ids, max_new_tokens=count, do_sample=False)  # noqa: E731
    made = []
    for length in lengths:
        times: dict[str, list[float]] = {who: [] for who in models}
        for number in range(rounds + 2):
            first, second = text(length), text(_TURN)
            for who, model in models.items():
                whole = torch.cat((answer(model, first, _ANSWER), second), dim=1)
                spent = measure.milliseconds(lambda: answer(model, whole, 1).cpu())  # noqa: B023
                if number > 1:
                    times[who].append(spent)
        facts: dict[str, Any] = {"type": name, "size": size, "dtype": dtype, "first_turn": length}
        facts |= {f"{who}_ms": round(statistics.median(found), 3) for who, found in times.items()}
        facts["spread_ms"] = round(max(times["kept"]) - min(times["kept"]), 3)
        sums = [measure.milliseconds(lambda: weights_sum(stock.parameters())) for _ in range(5)]
        made.append(facts | {"sum_ms": round(statistics.median(sums), 3)})
    return made


def text_of(rows: list[dict]) -> str:
    line = (
        "{type:14} {size:8} {dtype} first turn {first_turn:5}: stock {stock_ms:8.1f} ms, ours {ours_ms:8.1f}, kept"
        " {kept_ms:7.1f} (sum {sum_ms:.1f})"
    )
    return "\n".join(line.format(**row) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=5)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--sizes", nargs="+", default=["12x512"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--dtype", choices=measure.DTYPES, default="fp32")
    given = parser.parse_args(argv)
    others = given.lengths, given.rounds, given.dtype, torch.device(given.device)
    groups = (rows_of(name, size, *others) for size in given.sizes for name in given.types)
    measure.print_groups(groups, text_of, given, "prefixes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
