"""What the host does in a call of ``generate()``, beside stock: thin models, of which computing takes next to no time.

    python benchmarks/bench_host.py --csv
    python benchmarks/bench_host.py --models glm4 glm4+lora --rounds 30
    python benchmarks/bench_host.py --models llama qwen3 mixtral llama+int4_g32 --tokens 64

The models have 32 layers of 64 features. "check" is how long it takes to see that a patched model is as it was: its
modules, tensors, Python values and hooks, the names that its code reads, and PyTorch's own functions. "call" is a whole
``generate(max_new_tokens=1)``, "patch" is ``patch()`` and "first" the first call behind it. With ``--tokens``, "token"
is one of so many tokens behind the first, in time that the process had on a CPU, so that other programs count less, and
"from Python" has each op of a step called by Python, where otherwise the native library makes calls in a row. Stock and
ours take turns.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4Config, Lfm2Config, LlamaConfig, MixtralConfig, Qwen3Config

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.bench import measure
from hf_fastpath.decode.calls.pass_table import PASSES
from hf_fastpath.patching.state import state_of

LAYERS, VOCAB = 32, 97
_SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=32),
    "lfm2": lambda: Lfm2Config(**_SIZES, full_attn_idxs=list(range(2, LAYERS, 4))),
}
CHECKS = 200
FROM_PYTHON = "-native_calls"


def model_of(name: str) -> Any:
    """Return a random model; of ``<name>+lora`` with an adapter on all linear layers, which is not merged.

    Of ``<name>+<format>`` our weights are quantized, and stock's are not.
    """
    kind, _, adapter = name.partition("+")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    if adapter == "lora":
        import peft

        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        peft.get_peft_model(model, config).eval()
    return model


def format_of(name: str) -> str | None:
    """Return the format of our weights, None if they are the model's own."""
    behind = name.partition("+")[2]
    return behind if behind and behind != "lora" else None


@contextmanager
def passes(off: str) -> Iterator[None]:
    """Switch passes off for what is made within a ``with`` block."""
    before = os.environ.get(PASSES)
    os.environ[PASSES] = off
    try:
        yield
    finally:
        os.environ.pop(PASSES)
        if before is not None:
            os.environ[PASSES] = before


def token_rows(
    name: str, prompt_len: int, tokens: int, rounds: int, device: torch.device
) -> Iterator[tuple[str, list[float]]]:
    """Yield whose tokens behind the first, and milliseconds of one, of each round."""
    stock = model_of(name).to(device)
    ids = torch.randint(3, VOCAB, (1, prompt_len), generator=torch.Generator().manual_seed(0)).to(device)
    models: dict[str, tuple[Any, str]] = {"token, stock": (stock, "")}
    for what, off in (("token, from Python", FROM_PYTHON), ("token, ours", "")):
        models[what] = copy.deepcopy(stock), off
        with passes(off):
            hf_fastpath.patch(models[what][0], quiet=True, weights=format_of(name))

    def call(model: Any, count: int) -> float:
        started = time.process_time()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False).cpu()
        return (time.process_time() - started) * 1000

    found: dict[str, list[float]] = {what: [] for what in models}
    for turn in range(rounds + 1):
        for what, (model, off) in models.items():
            with passes(off):
                each = (call(model, tokens + 1) - call(model, 1)) / tokens
            if turn:  # the first plans
                found[what].append(each)
    yield from found.items()


def rows_of(name: str, prompt_len: int, tokens: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """Return the rows of a model: of its tokens behind the first if there are some, else of calls."""
    stock = model_of(name).to(device)
    facts = {"model": name, "modules": sum(1 for _ in stock.modules()), "prompt": prompt_len}
    times = (
        token_rows(name, prompt_len, tokens, rounds, device) if tokens else call_rows(name, prompt_len, rounds, device)
    )
    return [
        facts | {"what": what, "median_ms": round(statistics.median(each), 4), "min_ms": round(min(each), 4)}
        for what, each in times
    ]


def call_rows(name: str, prompt_len: int, rounds: int, device: torch.device) -> Iterator[tuple[str, list[float]]]:
    """Yield parts of calls of one token, and milliseconds of each round."""
    stock = model_of(name).to(device)
    ours = copy.deepcopy(stock)
    ids = torch.randint(3, VOCAB, (1, prompt_len), generator=torch.Generator().manual_seed(0)).to(device)
    call = lambda model: model.generate(ids, max_new_tokens=1, do_sample=False).cpu()  # noqa: E731
    patch = lambda: hf_fastpath.patch(ours, quiet=True, weights=format_of(name))  # noqa: E731
    found = {"patch": [measure.milliseconds(patch)]}
    found["first"] = [measure.milliseconds(lambda: call(ours))]
    for model in (stock, ours, ours):
        call(model)
    found |= {"call, stock": [], "call, ours": []}
    for _ in range(rounds):
        found["call, stock"].append(measure.milliseconds(lambda: call(stock)))
        found["call, ours"].append(measure.milliseconds(lambda: call(ours)))
    snapshot = state_of(ours).plans.snapshot
    checks = (lambda: snapshot.holds(), lambda: compat.replaced_function(ours), compat.foreign_mode)
    if snapshot is not None:
        found["check"] = [measure.milliseconds(lambda: [each() for each in checks]) for _ in range(CHECKS)]
    yield from found.items()


def text_of(rows: list[dict]) -> str:
    line = "{model:14} {modules:5} modules, prompt {prompt}, {what:18} {median_ms:10.3f} ms (least {min_ms:.3f})"
    return "\n".join(line.format(**row) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=15)
    parser.add_argument("--models", nargs="+", default=["llama", "glm4", "glm4+lora", "lfm2"])
    parser.add_argument("--prompt", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="tokens behind the first; default: calls of one token")
    given = parser.parse_args(argv)
    groups = (
        rows_of(name, given.prompt, given.tokens, given.rounds, torch.device(given.device)) for name in given.models
    )
    measure.print_groups(groups, text_of, given, "host")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
