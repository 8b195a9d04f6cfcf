"""GRPO with TRL over a patched model: the rollouts are generate() calls, on which such training spends its time.

    python examples/grpo.py            # the small model of this repository on the CPU; needs trl

Patch the model before the trainer gets it. The trainer's steps change the weights in place, and the next rollout reads
the changed weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastpath

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install trl") from None

TINY = Path(__file__).parent / "tiny-python"
PROMPTS = ("import os\n\n\ndef", "import re\n\n\nclass", "    def __init__(self,", "for name in")


def airy(completions: list[str], **kwargs) -> list[float]:
    """Return the rewards: the share of blanks in each completion."""
    return [sum(map(str.isspace, text)) / max(1, len(text)) for text in completions]


def main(output: str | Path, steps: int = 5, max_new_tokens: int = 48):
    """Train for some steps; return the trained model, which is still patched."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    hf_fastpath.patch(model)
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=max_new_tokens,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=airy,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * 8}),
        processing_class=tokenizer,
    )
    trainer.train()
    print(hf_fastpath.report(model))
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
