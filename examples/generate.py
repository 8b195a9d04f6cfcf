"""An ordinary transformers script; nothing in it knows of hf_fastpath. The demo runs it stock and patched."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parent / "tiny-python"
PROMPT = '"""Utilities for reading configuration files."""\n\nimport os\nimport sys\n\n\nclass Config'


def load(device: str = "cuda" if torch.cuda.is_available() else "cpu"):
    """The small model of this repository, trained on Python's standard library, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(MODEL)


def generate(model, tokenizer, prompt: str = PROMPT, max_new_tokens: int = 200) -> torch.Tensor:
    """Continue ``prompt`` greedily; returns [1, seq_len] token ids, the prompt's included."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    return model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)


if __name__ == "__main__":
    model, tokenizer = load()
    print(tokenizer.decode(generate(model, tokenizer)[0]))
