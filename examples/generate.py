"""An ordinary transformers script that knows nothing of hf_fastpath. The demo runs it stock and patched."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

MODEL = Path(__file__).parent / "tiny-python"
PROMPT = "import os\n\n\ndef"


def load(device: str = "cuda" if torch.cuda.is_available() else "cpu"):
    """Load the small model of this repository, which was trained on Python's standard library, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).eval()
    return model, AutoTokenizer.from_pretrained(MODEL)


def generate(model, tokenizer, prompt: str = PROMPT, max_new_tokens: int = 200) -> torch.Tensor:
    """Continue ``prompt``, sampling with a fixed seed; return [1, seq_len] token ids, the prompt's included."""
    set_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    return model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=True, top_p=0.9, temperature=0.7)


if __name__ == "__main__":
    model, tokenizer = load()
    print(tokenizer.decode(generate(model, tokenizer)[0]))
