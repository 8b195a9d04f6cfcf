"""What the host does in a call of ``generate()``, beside stock: thin models, of which computing takes next to no time.

    python benchmarks/bench_host.py --csv
    python benchmarks/bench_host.py --models glm4 glm4+lora --rounds 30

The models have 32 layers of 64 features. "check" is how long it takes to see that a patched model is as it was: its
modules, tensors, Python values and hooks, the names that its code reads, and PyTorch's own functions. "call" is a whole
``generate(max_new_tokens=1)``, "patch" is ``patch()`` and "first" the first call behind it. Stock and ours take turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4Config, Lfm2Config, LlamaConfig

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.bench import measure
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
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=32),
    "lfm2": lambda: Lfm2Config(**_SIZES, full_attn_idxs=list(range(2, LAYERS, 4))),
}
CHECKS = 200


def model_of(name: str) -> Any:
    """Return a random model; of ``<name>+lora`` with an adapter on all linear layers, which is not merged."""
    kind, _, adapter = name.partition("+")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    if adapter:
        import peft

        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        peft.get_peft_model(model, config).eval()
    return model


def rows_of(name: str, prompt_len: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    stock = model_of(name).to(device)
    ours = copy.deepcopy(stock)
    ids = torch.randint(3, VOCAB, (1, prompt_len), generator=torch.Generator().manual_seed(0)).to(device)
    call = lambda model: model.generate(ids, max_new_tokens=1, do_sample=False).cpu()  # noqa: E731
    found = {"patch": [measure.milliseconds(lambda: hf_fastpath.patch(ours, quiet=True))]}
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
    facts = {"model": name, "modules": sum(1 for _ in ours.modules()), "prompt": prompt_len}
    return [
        facts | {"what": what, "median_ms": round(statistics.median(times), 4), "min_ms": round(min(times), 4)}
        for what, times in found.items()
    ]


def text_of(rows: list[dict]) -> str:
    line = "{model:10} {modules:5} modules, prompt {prompt}, {what:12} {median_ms:10.3f} ms (least {min_ms:.3f})"
    return "\n".join(line.format(**row) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=15)
    parser.add_argument("--models", nargs="+", default=["llama", "glm4", "glm4+lora", "lfm2"])
    parser.add_argument("--prompt", type=int, default=1)
    given = parser.parse_args(argv)
    groups = (rows_of(name, given.prompt, given.rounds, torch.device(given.device)) for name in given.models)
    measure.print_groups(groups, text_of, given, "host")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
