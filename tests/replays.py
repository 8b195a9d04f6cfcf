"""Repeat steps of decode plans many times and compare each with the first pass, bit for bit.

    python hf_fastpath/native/build.py cuda --cuda-arch 90a --flags=-DHF_FASTPATH_JITTER
    python tests/replays.py --replays 10000

Sanitizers see neither races through device memory, nor kernels that start before the kernel in front is complete. A
library built with ``HF_FASTPATH_JITTER`` delays warps at random where they wait for each other, so that a missing wait
shows. The script is no pytest file: it takes minutes and needs that library.
"""

from __future__ import annotations

import argparse
import sys

import torch

from hf_fastpath.compat import CACHE
from hf_fastpath.quantization import FORMATS

CONTEXT, STEPS = 100, 20


def differing(
    device: torch.device, architecture: str, dtype: torch.dtype, batch: int, replays: int, weights: str | None = None
) -> int:
    """Return how many of ``replays`` steps, taken ``STEPS`` at a time from one state, differ from the first pass."""
    from models import build, prompt

    import hf_fastpath
    from hf_fastpath.decode.plans.decode_plan import DecodePlan

    # The sizes are those that the kernels for aligned weights and for layers of small models take; rows are so long
    # that several rows of x come in phases.
    if architecture == "gpt2":
        sizes = dict(n_embd=768, n_head=12, n_inner=3072)
    else:
        sizes = dict(hidden_size=256, head_dim=128, num_attention_heads=4, num_key_value_heads=2)
        sizes |= dict(intermediate_size=4608, sliding_window=None)
    model = hf_fastpath.patch(build(architecture, **sizes).to(device, dtype), quiet=True, weights=weights)
    ids = prompt(device, batch, CONTEXT)
    out = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    cache = out[CACHE]
    part = vars(model)["_hf_fastpath"].plans.part_of(model)
    start = torch.full((batch,), cache.get_seq_length(), device=device)
    wrong, seen, first = 0, 0, []
    with torch.inference_mode():
        plan = DecodePlan(part, batch, cache.layers[0].k_buffer.dtype)
        cache.reserve(STEPS + 1)
        length = cache.get_seq_length()
        while seen < replays:
            cache.crop(length - cache.get_seq_length())
            plan.begin(cache, start, None)
            found = [plan.step(ids[:, 0] if step == 0 else None).clone() for step in range(STEPS)]
            if not first:
                first = found
            wrong += sum(not torch.equal(a, b) for a, b in zip(first, found))
            seen += STEPS
        plan.end()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--replays", type=int, default=10000)
    arguments = parser.parse_args()
    failed = 0
    cases = [(name, dtype, None) for name in ("gpt2", "mistral", "mixtral") for dtype in (torch.float16, torch.float32)]
    cases += [("mistral", torch.float16, weights) for weights in FORMATS]
    for architecture, dtype, weights in cases:
        for batch in (1, 3, 8, 12) if architecture == "mixtral" else (1, 3, 8, 12, 40):
            wrong = differing(arguments.device, architecture, dtype, batch, arguments.replays, weights)
            kind = f"{architecture} {weights or dtype} batch {batch}"
            print(f"{kind}: {wrong} of {arguments.replays} replays differ", flush=True)
            failed += wrong
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
