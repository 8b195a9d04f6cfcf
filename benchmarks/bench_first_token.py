"""The time of a prompt: ``generate(max_new_tokens=1)`` beside stock, of models of many types.

    python benchmarks/bench_first_token.py --csv
    python benchmarks/bench_first_token.py --types glm4 lfm2 --sizes 8x1024 --prompts 1 128 1024 --dtype bf16
    python benchmarks/bench_first_token.py --device cuda --csv --sizes 32x4096

A size is layers x features; the weights are random. "speed" is stock's median by ours, of calls that take turns.
"patch" is ``patch()``, "first" the first call behind it and "second" the second, in which a prompt of a recorded model
is recorded. "by" says what reads prompts behind these: a list of calls, or the model's modules.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.bench import measure
from hf_fastpath.decode.loops import prompt as prompts

#: listed types, and recorded ones: plain, of older code, with latents, states, experts
TYPES = (
    *("gemma3_text", "gpt2", "llama", "mistral", "olmo2", "qwen3"),
    *("apertus", "glm4", "helium", "nemotron", "bloom", "persimmon", "minicpm3"),
    *("granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text", "deepseek_v3"),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCAB = 500
#: types -> what their configs need beside sizes
_OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32),
    "mamba2": dict(num_heads=8, head_dim=None, n_groups=1),
}


def model_of(name: str, layers: int, width: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a random model."""
    heads = max(4, width // 128)
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, vocab_size=VOCAB)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=max(2, heads // 4), head_dim=width // heads)
    others = dict(_OTHERS.get(name, {}))
    if name == "mamba2":
        others["head_dim"] = 2 * width // others["num_heads"]
    config = AutoConfig.for_model(name, **sizes | others, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def rows_of(name: str, size: str, lengths: Sequence[int], rounds: int, dtype: str, device: torch.device) -> list[dict]:
    layers, width = map(int, size.split("x"))
    stock = model_of(name, layers, width, DTYPES[dtype], device)
    ours = copy.deepcopy(stock)
    generator = torch.Generator().manual_seed(0)
    texts = {length: torch.randint(3, VOCAB, (1, length), generator=generator).to(device) for length in lengths}
    call = lambda model, ids: model.generate(ids, max_new_tokens=1, do_sample=False).cpu()  # noqa: E731
    once = {"patch_ms": milliseconds(lambda: hf_fastpath.patch(ours, quiet=True))}
    for what in ("first_ms", "second_ms"):
        once[what] = milliseconds(lambda: call(ours, next(iter(texts.values())).repeat(1, 3)[:, :5]))
    made, read, seen = [], prompts.read, []
    prompts.read = lambda *given: seen.append(1) or read(*given)
    try:
        for length, ids in texts.items():
            for model in (stock, ours, ours, ours):
                seen.clear()
                call(model, ids)
            by, times = "list" if seen else "modules", {"stock": [], "ours": []}
            for _ in range(rounds):
                times["stock"].append(milliseconds(lambda: call(stock, ids)))  # noqa: B023
                times["ours"].append(milliseconds(lambda: call(ours, ids)))  # noqa: B023
            median = {who: statistics.median(found) for who, found in times.items()}
            facts = {"type": name, "size": size, "dtype": dtype, "prompt": length, "by": by}
            facts |= {f"{who}_ms": round(found, 3) for who, found in median.items()}
            made.append(facts | {"speed": round(median["stock"] / median["ours"], 3)})
    finally:
        prompts.read = read
    return [row | {what: round(found, 1) for what, found in once.items()} for row in made]


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--sizes", nargs="+", default=["32x64"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 16, 128, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cpu")
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    path = measure.chosen_csv(given.csv, "first_token", device)
    warnings.simplefilter("ignore")
    for size in given.sizes:
        for name in given.types:
            rows = rows_of(name, size, given.prompts, given.rounds, given.dtype, device)
            for row in rows:
                print(
                    f"{row['type']:18} {row['size']:8} {row['dtype']} prompt {row['prompt']:5} by {row['by']:8}"
                    f" stock {row['stock_ms']:9.2f} ms, ours {row['ours_ms']:9.2f}, speed {row['speed']:.2f}",
                    flush=True,
                )
            print(
                f"{name:18} patch {row['patch_ms']:.0f} ms, first {row['first_ms']:.0f}, second {row['second_ms']:.0f}"
            )
            if path is not None:
                measure.append_csv(path, [measure.environment(device) | row for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
