"""A LoRA adapter of PEFT on a patched model is trained, tried out and merged; decoding is fast before and after.

    python examples/lora.py            # the small model of this repository; needs peft

While an adapter is a module of its own, the model's step is recorded with the adapter's products in it; that takes a
moment at the first ``generate()``. Training, switching and merging work as without a patch. After
``merge_and_unload()`` the step is that of a plain model again, and reads the merged weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastpath

try:
    from peft import LoraConfig, get_peft_model
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install peft") from None

TINY = Path(__file__).parent / "tiny-python"
TEXT = "def spam(eggs):\n    return eggs\n"


def train(model, ids: torch.Tensor, steps: int = 20) -> float:
    """Teach the adapter one text; return the last loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(steps: int = 20, max_new_tokens: int = 24) -> dict[str, dict]:
    """Train and generate; return the counters of ``report()`` before and after merging."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    hf_fastpath.patch(model)
    inputs = tokenizer("def spam(", return_tensors="pt")

    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    adapted.train()
    print(f"loss {train(adapted, tokenizer(TEXT, return_tensors='pt')['input_ids'], steps):.3f}")
    adapted.eval()

    counters = {}
    for name in ("adapter", "merged"):
        if name == "merged":
            merged = adapted.merge_and_unload()
        before = hf_fastpath.report(model).to_dict()["stats"]
        out = (adapted if name == "adapter" else merged).generate(**inputs, max_new_tokens=max_new_tokens)
        after = hf_fastpath.report(model).to_dict()["stats"]
        counters[name] = {key: after[key] - before[key] for key in ("fast_tokens", "fallback_tokens")}
        print(f"{name}: {counters[name]}\n{tokenizer.decode(out[0])}")
    return counters


if __name__ == "__main__":
    main()
