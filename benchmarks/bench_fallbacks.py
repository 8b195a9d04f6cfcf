"""Calls that a plan cannot serve, and loops of the user's own: a patched model beside stock, on small models.

    python benchmarks/bench_fallbacks.py --csv
    python benchmarks/bench_fallbacks.py --models llama --sizes 2x128 12x512 --rounds 40 --tokens 5 --csv
    python benchmarks/bench_fallbacks.py --models llama --sizes 32x4096 --dtype bf16 --device cuda --csv

A size is layers x features. Each way to generate ``--tokens`` behind 16 runs in turns, stock and patched, every second
time in reverse order; times are medians, and "speed" is the median of stock's time by ours of each turn, with the 20th
and the 80th percentile. "copy" is the same of a second unpatched model instead of ours: what it is off 1 says nothing
of us. All three models are copies of one. Variants are what is done to all three before: nothing, a hook on a layer's
forward, or an adapter on all projections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import truediv
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Glm4Config, LlamaConfig

try:
    import peft
except ImportError:
    peft = None  # no rows of adapters then

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.bench import measure

PROMPT = 16
CONFIGS: dict[str, Callable[..., Any]] = {"llama": LlamaConfig, "glm4": Glm4Config}
#: options of ``generate()`` for which stock's loop runs, and plain calls
OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda model: {},
    "attentions": lambda model: {"output_attentions": True, "return_dict_in_generate": True},
    "hidden states": lambda model: {"output_hidden_states": True, "return_dict_in_generate": True},
    "no cache": lambda model: {"use_cache": False},
    "DynamicCache": lambda model: {compat.CACHE: DynamicCache(config=model.config)},
    "static cache": lambda model: {"cache_implementation": "static", "disable_compile": True},
    "guidance": lambda model: {"guidance_scale": 1.5},
}


def model_of(name: str, layers: int, width: int, dtype: torch.dtype, device: torch.device) -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, vocab_size=500)
    count = max(4, width // 128)
    heads = dict(num_attention_heads=count, num_key_value_heads=max(4, count // 4), head_dim=width // count)
    config = CONFIGS[name](**sizes, **heads, pad_token_id=0, eos_token_id=None)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def generated(model: Any, ids: torch.Tensor, way: str, tokens: int) -> None:
    model.generate(ids, max_new_tokens=tokens, do_sample=False, **OPTIONS[way](model))


@torch.no_grad()
def own_loop(model: Any, ids: torch.Tensor, way: str, tokens: int) -> None:
    """As people write it: one forward a token, over the cache that the first forward gives, or that is given."""
    given = {compat.CACHE: DynamicCache(config=model.config)} if way == "own loop, DynamicCache" else {}
    for _ in range(tokens):
        found = model(ids, use_cache=True, **given)
        given = {compat.CACHE: found[compat.CACHE]}
        ids = found.logits[:, -1:].argmax(-1)


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, way: str, tokens: int) -> None:
    model(ids, use_cache=False)


WAYS: dict[str, Callable[[Any, torch.Tensor, str, int], None]] = dict.fromkeys(OPTIONS, generated)
WAYS |= {"own loop": own_loop, "own loop, DynamicCache": own_loop, "forward": forward}


def hooked(model: Any) -> Any:
    """Put a hook on the first layer that changes nothing."""
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    return model


def with_adapter(model: Any) -> Any:
    """Put LoRA on all projections."""
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).eval()


PLAIN = "nothing"
#: what is done to all models -> the ways that run then
VARIANTS: dict[str, tuple[Callable[[Any], Any], Sequence[str]]] = {
    PLAIN: (lambda model: model, list(WAYS)),
    "hook": (hooked, ["plain", "DynamicCache", "own loop, DynamicCache"]),
}
if peft is not None:
    VARIANTS["LoRA"] = with_adapter, ["plain", "attentions", "DynamicCache", "own loop, DynamicCache"]


def rows_of(
    name: str, size: str, variants: Sequence[str], rounds: int, tokens: int, dtype: str, device: torch.device
) -> Iterator[list[dict[str, object]]]:
    """Yield a row as soon as a way has been timed."""
    layers, width = map(int, size.split("x"))
    made = model_of(name, layers, width, measure.DTYPES[dtype], device)
    ids = torch.randint(3, 400, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    for variant in variants:
        change, ways = VARIANTS[variant]
        models = {which: change(copy.deepcopy(made)) for which in ("stock", "copy", "ours")}
        hf_fastpath.patch(models["ours"], quiet=True)
        for way in ways:
            full = f"{variant}, {way}" if variant != PLAIN else way
            found = _row_of(models, ids, way, rounds, tokens)
            yield [{"model": name, "size": size, "dtype": dtype, "tokens": tokens, "way": full, **found}]


def _row_of(models: dict[str, Any], ids: torch.Tensor, way: str, rounds: int, tokens: int) -> dict[str, float]:
    run = WAYS[way]
    times: dict[str, list[float]] = {which: [] for which in models}
    for turn in range(rounds + 2):
        for which in list(models)[:: 1 if turn % 2 else -1]:
            seconds = measure.seconds(partial(run, models[which], ids, way, tokens), ids.device)
            if turn > 1:  # the first two turns record, build and capture
                times[which].append(seconds)
    found = {f"{which}_ms": round(1000 * measure.Spread.of(times[which]).p50, 3) for which in ("stock", "ours")}
    ours, copy_ = (measure.Spread.of([*map(truediv, times["stock"], times[which])]) for which in ("ours", "copy"))
    speeds = {"speed": ours.p50, "speed_p20": ours.p20, "speed_p80": ours.p80, "copy": copy_.p50}
    return found | {name: round(each, 3) for name, each in speeds.items()}


def text_of(rows: list[dict]) -> str:
    line = "{model:6} {size:7} {way:28} {stock_ms:9.2f} ms, ours {ours_ms:9.2f} ms: {speed:.2f}"
    line += " ({speed_p20:.2f} to {speed_p80:.2f}), copy {copy:.2f}"
    return "\n".join(line.format(**row) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=10)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--sizes", nargs="+", default=["2x128", "6x256", "12x512"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--tokens", type=int, default=24, help="with few, turns are short, and noise evens out")
    parser.add_argument("--dtype", choices=measure.DTYPES, default="fp32")
    given = parser.parse_args(argv)
    if given.rounds < 2:
        parser.error("--rounds has to be 2 at least: one turn has no percentiles")
    others = given.variants, given.rounds, given.tokens, given.dtype, torch.device(given.device)
    groups = (group for name in given.models for size in given.sizes for group in rows_of(name, size, *others))
    measure.print_groups(groups, text_of, given, "fallbacks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
