"""Quantized weights: what they cost on a text, and how they are saved once and loaded from then on.

    python examples/quantized.py       # the small model of this repository

Quantizing reads the model's own weights and takes minutes for a large model. Loading what ``save_packed()`` wrote takes
seconds, and the unquantized weights are never in memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastpath

TINY = Path(__file__).parent / "tiny-python"


def main(directory: str | Path, tokens: int = 512, max_new_tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of the quantized model, and of the model that was loaded from ``directory``."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float16).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = tokenizer((TINY / "heldout.txt").read_text(), return_tensors="pt")["input_ids"][:, :tokens]
    print(hf_fastpath.compare_formats(model, text, ["int8", "int4_g32"]))

    hf_fastpath.patch(model, weights="int4_g32", keep_original=False)
    inputs = tokenizer("import os\n\n\ndef", return_tensors="pt")
    before = model.generate(**inputs, max_new_tokens=max_new_tokens)
    hf_fastpath.save_packed(model, directory)
    tokenizer.save_pretrained(directory)

    loaded = hf_fastpath.load_packed(directory)
    after = loaded.generate(**inputs, max_new_tokens=max_new_tokens)
    print(f"tokens equal: {torch.equal(before, after)}\n{tokenizer.decode(after[0])}")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
