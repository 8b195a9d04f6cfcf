"""The time of a prompt: ``generate(max_new_tokens=1)`` beside stock, of models of many types.

    python benchmarks/bench_first_token.py --csv
    python benchmarks/bench_first_token.py --types glm4 lfm2 --sizes 8x1024 --prompts 1 128 1024 --dtype bf16
    python benchmarks/bench_first_token.py --device cuda --csv --sizes 32x4096
    python benchmarks/bench_first_token.py --device cuda --csv --types listed recorded --sizes 16x1024 --dtype bf16
    python benchmarks/bench_first_token.py --device cuda --csv --sizes 32x4096 --dtype bf16 --types llama --new-lengths
    python benchmarks/bench_first_token.py --device cuda --csv --dtype bf16 --models gemma-3-4b qwen3-30b-a3b
    python benchmarks/bench_first_token.py --csv --models qwen3.5-4b:4 lfm2-1.2b:6 --dtype bf16
    python benchmarks/bench_first_token.py --device cuda --dtype bf16 --models llama-3.1-8b --prompts 512 --batch 32

"listed" stands for all types that have an architecture file, "recorded" for those of RECORDED. A size is layers x
features; the weights are random. Instead of types of sizes, ``--models`` takes published ones (name, or name:layers for
the first layers alone; hf_fastpath.bench.published). "speed" is stock's median by ours, of calls that take turns.
"patch" is ``patch()``, "first" the first call behind it and "second" the second, in which a prompt of a recorded model
is recorded. "by" says what reads prompts behind these: a list of calls, or the model's modules. With
``--new-lengths`` no two prompts that are timed are equally long, as in a conversation: each is a token shorter than
the one before. ``--batch`` reads as many prompts of a length at once.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.bench import measure, shapes
from hf_fastpath.decode.loops import prompt as prompts

#: recorded types: plain, of older code, with latents, states, experts
RECORDED = (
    *("apertus", "arcee", "glm4", "helium", "nemotron", "bloom", "persimmon", "minicpm3"),
    *("granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text", "deepseek_v3", "glm4_moe"),
)
TYPES = ("gemma3_text", "gpt2", "llama", "mistral", "olmo2", "qwen3", *RECORDED)
GROUPS = {"listed": [architecture.name for architecture in architectures()], "recorded": list(RECORDED)}
VOCAB = 500
#: the size that rows of published models name
PUBLISHED = "published"


def config_of(name: str, layers: int, width: int) -> Any:
    """Return a config of these sizes."""
    heads = max(4, width // 128)
    dim = width // heads
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, vocab_size=VOCAB)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=max(2, heads // 4), head_dim=dim)
    latent = dict(num_key_value_heads=heads, kv_lora_rank=2 * dim, q_lora_rank=2 * dim, qk_rope_head_dim=dim // 2)
    latent |= dict(qk_nope_head_dim=dim, v_head_dim=dim)
    every_fourth = [["mamba", "attention"][index % 4 == 3] for index in range(layers)]
    others: dict[str, dict[str, Any]] = {
        "deepseek_v3": latent | dict(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1),
        "granitemoehybrid": dict(
            num_local_experts=0, layer_types=every_fourth, mamba_n_heads=2 * heads, mamba_d_head=dim, mamba_d_state=dim
        ),
        "mamba2": dict(num_heads=2 * heads, n_groups=1, state_size=dim),
        **dict.fromkeys(("gpt_oss", "mixtral"), dict(num_local_experts=8, num_experts_per_tok=2)),
        **dict.fromkeys(("olmoe", "qwen3_moe"), dict(num_experts=8, num_experts_per_tok=2)),
        "glm4_moe": dict(n_routed_experts=8, num_experts_per_tok=2),
        "minicpm3": latent,
        "qwen3_5_text": dict(
            linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=dim, linear_value_head_dim=dim
        ),
    }
    if name in ("deepseek_v3", "minicpm3", "falcon"):
        del sizes["head_dim"]  # which these make of other sizes
    sizes |= others.get(name, {})
    return AutoConfig.for_model(name, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None)


def model_of(name: str, layers: int, width: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a random model."""
    config = config_of(name, layers, width)
    torch.manual_seed(0)
    with device:  # drawn where the weights stay: 7B take a minute on a CPU
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@dataclass(frozen=True)
class Given:
    """What the calls of all models are: prompts of ``lengths``, ``batch`` at once, timed in ``rounds`` turns."""

    lengths: Sequence[int]
    rounds: int
    batch: int
    are_new: bool


def rows_of(name: str, size: str, dtype: str, build: Callable[[], Any], given: Given) -> list[dict[str, Any]]:
    """Time a model beside stock's.

    Args:
        name, size, dtype: what the rows say of it.
        build: makes it.
    """
    stock = build()
    ours = copy.deepcopy(stock, {id(each): each for each in stock.parameters()})  # 30B would not fit twice
    generator = torch.Generator().manual_seed(0)
    vocab = min(VOCAB, stock.config.get_text_config().vocab_size)
    made = {each: torch.randint(3, vocab, (given.batch, each), generator=generator) for each in given.lengths}
    texts = {length: ids.to(stock.device) for length, ids in made.items()}
    call = lambda model, ids: model.generate(ids, max_new_tokens=1, do_sample=False).cpu()  # noqa: E731
    try:
        once = {"patch_ms": measure.milliseconds(lambda: hf_fastpath.patch(ours, quiet=True))}
    except hf_fastpath.UnsupportedModelError as error:
        print(f"{name}: {error}")
        return []
    for what in ("first_ms", "second_ms"):
        once[what] = measure.milliseconds(lambda: call(ours, next(iter(texts.values())).repeat(1, 3)[:, :5]))
    rows, read, seen = [], prompts.read, []
    prompts.read = lambda *how: seen.append(1) or read(*how)
    try:
        for length, ids in texts.items():
            for model in (stock, ours, ours, ours):
                seen.clear()
                call(model, ids)
            by, times = "list" if seen else "modules", {"stock": [], "ours": []}
            shorter = 0
            for _ in range(given.rounds):
                for who, model in (("stock", stock), ("ours", ours)):
                    shorter += given.are_new
                    text = ids[:, : max(1, length - shorter)]
                    times[who].append(measure.milliseconds(lambda: call(model, text)))  # noqa: B023
            median = {who: statistics.median(found) for who, found in times.items()}
            facts = {"type": name, "size": size, "dtype": dtype, "prompt": length, "batch": given.batch, "by": by}
            facts |= {f"{who}_ms": round(found, 3) for who, found in median.items()}
            rows.append(facts | {"speed": round(median["stock"] / median["ours"], 3)})
    finally:
        prompts.read = read
    last = {what: round(found, 1) for what, found in once.items()} | {"lengths": "new" if given.are_new else "same"}
    return [row | last for row in rows]


def text_of(rows: list[dict]) -> str:
    if not rows:
        return ""
    line = (
        "{type:18} {size:9} {dtype} {batch} x {prompt:5} by {by:8} stock {stock_ms:9.2f} ms, ours {ours_ms:9.2f}, speed"
        " {speed:.2f}"
    )
    once = "{type:18} patch {patch_ms:.0f} ms, first {first_ms:.0f}, second {second_ms:.0f}".format(**rows[0])
    return "\n".join([*(line.format(**row) for row in rows), once])


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=7)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--sizes", nargs="+", default=["32x64"])
    parser.add_argument("--models", nargs="+", default=[], help="published models instead of types of sizes")
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 16, 128, 1024])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=measure.DTYPES, default="fp32")
    parser.add_argument("--new-lengths", action="store_true", help="no two prompts are equally long")
    given = parser.parse_args(argv)
    dtype, device = measure.DTYPES[given.dtype], torch.device(given.device)
    calls = Given(given.prompts, given.rounds, given.batch, given.new_lengths)

    def groups() -> Iterator[list[dict[str, Any]]]:
        for name in given.models:
            build = partial(shapes.build_model, name, device, dtype)
            yield rows_of(shapes.shape(name).label, PUBLISHED, given.dtype, build, calls)
        for size in [] if given.models else given.sizes:
            for name in (name for each in given.types for name in GROUPS.get(each, [each])):
                build = partial(model_of, name, *map(int, size.split("x")), dtype, device)
                yield rows_of(name, size, given.dtype, build, calls)

    measure.print_groups(groups(), text_of, given, "first_token")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
