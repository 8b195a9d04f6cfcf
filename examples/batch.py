"""Many prompts at once: answers come as they end, and each has its own settings.

python examples/batch.py                             # the small model of this repository
python examples/batch.py FOLDER-OR-MODEL-ID --prompts FILE --max-new-tokens 200     # a prompt a line
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastpath

TINY = Path(__file__).parent / "tiny-python"
PROMPTS = ("import os\n", "def main(", "class Node:\n", "for line in", "if __name__ ==", "try:\n    import", "return [")


def main(source: str = str(TINY), prompts: tuple[str, ...] = PROMPTS, max_new_tokens: int = 60) -> dict[str, str]:
    """Print the answers as they end, then how many rows the steps had; return id -> answer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(device).eval()
    tokenizer, answers = AutoTokenizer.from_pretrained(source), {}
    hf_fastpath.patch(model, quiet=True)
    started = time.perf_counter()
    with hf_fastpath.batch(model, tokenizer=tokenizer, do_sample=True, top_p=0.9, logprobs=True) as batch:
        for number, prompt in enumerate(prompts):
            batch.submit(prompt, seed=number, temperature=0.4 + 0.1 * (number % 5), max_new_tokens=max_new_tokens)
        for result in batch:
            likely = sum(result.logprobs) / max(1, len(result.logprobs))
            print(f"--- {result.id}, {result.finish_reason}, mean log-probability {likely:.2f}\n{result.text}")
            answers[result.id] = result.text
    spent = time.perf_counter() - started
    print(f"--- {len(answers)} answers in {spent:.1f} s")
    print(hf_fastpath.report(model))
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY))
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=60)
    given = parser.parse_args()
    lines = PROMPTS if given.prompts is None else tuple(given.prompts.read_text().splitlines())
    main(given.model, lines, given.max_new_tokens)
