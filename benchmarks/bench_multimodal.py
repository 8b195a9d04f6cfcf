"""Speed of decoding of a multimodal type at its default size, with random weights and a prompt of text, stock and ours:
``python benchmarks/bench_multimodal.py qwen2_5_vl``.

The step is the same behind images and sound, which stock code reads.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from transformers import AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_fastpath

PROMPT, TOKENS = 128, 128
#: tokens of a short generation, whose time is taken off that of a long one
SHORT = 8


def seconds(model: nn.Module, ids: torch.Tensor, tokens: int) -> float:
    """Return the time of a call that adds ``tokens``."""
    started = time.perf_counter()
    model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False).tolist()
    return time.perf_counter() - started


def speed(model: nn.Module, ids: torch.Tensor) -> float:
    """Return tokens per second of all sequences together, without the prompt."""
    seconds(model, ids, SHORT)
    return len(ids) * TOKENS / (seconds(model, ids, SHORT + TOKENS) - seconds(model, ids, SHORT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", help="a model_type that AutoModelForMultimodalLM knows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of the decoder; None means as many as the type's default has")
    arguments = parser.parse_args()
    config = CONFIG_MAPPING[arguments.type]()
    if arguments.layers is not None:
        config.get_text_config(decoder=True).num_hidden_layers = arguments.layers
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForMultimodalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
    ids = torch.randint(3, 1000, (arguments.batch, PROMPT), device=arguments.device)
    stock = speed(model, ids)
    started = time.perf_counter()
    hf_fastpath.patch(model, quiet=True)
    patched = time.perf_counter() - started
    first = seconds(model, ids, 2)
    ours = speed(model, ids)
    print(
        f"{arguments.type}: stock {stock:.1f}, ours {ours:.1f} tok/s; patch() {patched:.2f} s, first call {first:.2f} s"
    )
    print(hf_fastpath.report(model))


if __name__ == "__main__":
    main()
