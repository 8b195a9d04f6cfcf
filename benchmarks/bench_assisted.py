"""Greedy search with drafts that are accepted, stock and ours, and the cost of a step that reads several tokens.

    python benchmarks/bench_assisted.py --model mistral-7b --dtype fp16 --context 1024 4096 --drafts 3 4 7

Method. The model has random weights, but its layers add nothing to the stream: their products have the usual sizes, and
the last ones multiply by zeros. A token then follows from the token before, so that an assistant of one layer agrees
with every token, and a text becomes periodic, so that a prompt lookup finds what follows. A draft of n tokens then
gives n + 1 tokens a step, which the table shows. Decode is ``(t2 - t1) / (n2 - n1)`` as in ``bench_generate.py``;
engines alternate. On CUDA, ``step`` rows are replays of the graph of a plan that reads ``drafts`` tokens, without the
host in between; 0 is the decode plan.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_fastpath
from hf_fastpath import arguments
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPE_NAMES, DTYPES, Spread
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans.draft_plan import WIDTHS, DraftPlan

ENGINES = ("stock", "ours")
WARM_TOKENS = 16
REPLAYS, ROUNDS = 30, 5


#: types whose layers :func:`silence` knows, and of which the first layer alone is a model
TYPES = ("cohere2", "gemma", "gemma2", "gemma3_text", "glm4", "llama", "mistral", "olmo2", "qwen2", "qwen3")


def silence(model: PreTrainedModel) -> None:
    """Make the layers add nothing."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def small_copy(model: PreTrainedModel, threshold: float) -> PreTrainedModel:
    """Make a model of the first layer, with weights of its own, whose drafts end at this confidence."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    base, source = made.model, model.model
    base.layers = nn.ModuleList([copy.deepcopy(source.layers[0])])
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(base, name, copy.deepcopy(getattr(source, name)))
    made.lm_head = copy.deepcopy(model.lm_head)
    made.generation_config.num_assistant_tokens_schedule = "constant"
    made.generation_config.assistant_confidence_threshold = threshold
    return made.eval()


def periodic_prompt(model: PreTrainedModel, context: int) -> torch.Tensor:
    """Return [1, context] tokens that the model continues periodically."""
    text = shapes.prompt(model, 1, 8)
    with hf_fastpath.patched(model, quiet=True):
        while True:
            text = model.generate(text, do_sample=False, max_new_tokens=512, pad_token_id=0, eos_token_id=None)
            last = text[0, -1]
            places = (text[0, :-1] == last).nonzero().flatten().tolist()
            if places:
                period = text[:, places[-1] + 1 :]
                return period.repeat(1, -(-context // period.shape[1]))[:, -context:]


def steps_of(model: PreTrainedModel, engine: str, call: Callable[[], object]) -> int:
    """Return how many steps of the model verify drafts in a call."""
    owner, name = (DraftPlan, "finish") if engine == "ours" else (type(model), "forward")
    real, steps = getattr(owner, name), []

    def counting(self, *args, **kwargs):
        steps.append(self)
        return real(self, *args, **kwargs)

    setattr(owner, name, functools.wraps(real)(counting))
    try:
        call()
    finally:
        setattr(owner, name, real)
    return sum(step is not None and (engine == "ours" or step is model) for step in steps)


def replay_ms(model: PreTrainedModel, context: int, drafts: int) -> float:
    """Return the median time of a step's graph."""
    state = vars(model)["_hf_fastpath"]
    part, prompt = state.plans.part_of(model), shapes.prompt(model, 1, context)
    out = model.generate(
        prompt, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True
    )
    cache, times = out[CACHE], []
    with torch.inference_mode():
        plan = state.plans.draft_plan(part, cache, drafts) if drafts else state.plans.decode_plan(part, 1, cache)
        cache.reserve(REPLAYS + max(WIDTHS))
        plan.begin(cache, torch.full((1,), cache.get_seq_length(), device=model.device), None)
        for _ in range(2):
            plan.read([1] * drafts) if drafts else plan.step(prompt[:, -1])
        lengths = plan.seq_lens.clone()
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            plan.seq_lens.copy_(lengths)
            begin.record()
            for _ in range(REPLAYS):
                plan.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / REPLAYS)
        plan.end()
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, shape in shapes.MODELS.items() if shape.model_type in TYPES]
    parser.add_argument("--model", default="mistral-7b", choices=known)
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES))
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--context", nargs="+", type=arguments.count, default=[1024])
    parser.add_argument("--drafts", nargs="+", type=arguments.count, default=[3, 4, 7])
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated, of: " + ", ".join(ENGINES))
    parser.add_argument("--new-tokens", type=arguments.count, default=120)
    parser.add_argument("--repeats", type=arguments.count, default=3)
    parser.add_argument("--threshold", default=0.0, type=float, help="confidence that ends a draft: 1e-9 ends none")
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    engines = given.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engine {', '.join(sorted(unknown))}, expected {', '.join(ENGINES)}")
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = shapes.build_model(given.model, device, DTYPES[given.dtype])
    silence(model)
    helper = small_copy(model, given.threshold)
    path = measure.chosen_csv(given.csv, "assisted", device)
    same = measure.environment(device) | {"model": shapes.shape(given.model).label, "dtype": DTYPE_NAMES[model.dtype]}

    def report(context: int, engine: str, how: str, drafts: int, times: list[float], tokens: float) -> None:
        spread = Spread.of(times)
        label = f"{how} with threshold" if how == "assistant" and given.threshold else how
        row = {"context": context, "engine": engine, "how": label, "drafts": drafts}
        row |= {"ms_per_token": round(1000 * spread.p50, 4), "tok_s": round(1 / spread.p50, 1)}
        row |= {"spread_percent": spread.percent, "tokens_a_step": round(tokens, 2), "repeats": len(times)}
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if path is not None:
            measure.append_csv(path, [same | row])

    longest = WARM_TOKENS + given.new_tokens
    for context in sorted(given.context):
        prompt = periodic_prompt(model, context)
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        options |= {"eos_token_id": None}
        ways = [("plain", 0), *((how, drafts) for drafts in given.drafts for how in ("lookup", "assistant"))]
        seen: dict[tuple, list[float]] = {(engine, *way): [] for engine in engines for way in ways}
        tokens: dict[tuple, float] = {}
        for turn in range(-1, given.repeats):
            for engine, how, drafts in seen if turn % 2 == 0 else reversed(seen):
                helper.generation_config.num_assistant_tokens = drafts
                more = {"lookup": {"prompt_lookup_num_tokens": drafts}, "assistant": {"assistant_model": helper}}
                generate = functools.partial(model.generate, prompt, **options, **more.get(how, {}))
                with contextlib.ExitStack() as stack:
                    if engine == "ours":
                        stack.enter_context(hf_fastpath.patched(model, quiet=True))
                        stack.enter_context(hf_fastpath.patched(helper, quiet=True))
                    call = functools.partial(generate, max_new_tokens=longest)
                    call()  # a newly patched model has to capture its plans
                    if turn < 0:
                        tokens[engine, how, drafts] = longest / (steps_of(model, engine, call) if drafts else longest)
                        continue
                    short = measure.seconds(functools.partial(generate, max_new_tokens=WARM_TOKENS), device)
                    long = measure.seconds(call, device)
                seen[engine, how, drafts].append((long - short) / given.new_tokens)
        for (engine, how, drafts), times in seen.items():
            report(context, engine, how, drafts, times, tokens[engine, how, drafts])
        if device.type == "cuda" and "ours" in engines:
            with hf_fastpath.patched(model, quiet=True), torch.no_grad():
                for drafts in (0, *WIDTHS):
                    report(context, "ours", "step", drafts, [replay_ms(model, context, drafts) / 1e3], max(1, drafts))


if __name__ == "__main__":
    main()
