"""The main job on real input: the ordinary script of ``generate.py``, stock and patched, side by side.

The demo prints the text, whether the tokens are equal, the logit error beside stock's own noise, and both speeds.
"""

import statistics
import time

import torch
from generate import PROMPT, generate, load

import hf_fastpath

NEW_TOKENS = 200
REPEATS = 5


def timed(model, tokenizer) -> tuple[torch.Tensor, float]:
    """Return token ids and seconds of one call of the script's generate()."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    ids = generate(model, tokenizer, max_new_tokens=NEW_TOKENS)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return ids, time.perf_counter() - started


def main() -> None:
    model, tokenizer = load()
    stock_ids = generate(model, tokenizer, max_new_tokens=NEW_TOKENS)  # this call also warms up

    hf_fastpath.patch(model)
    fast_ids = generate(model, tokenizer, max_new_tokens=NEW_TOKENS)
    check = hf_fastpath.verify(model, tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=NEW_TOKENS)

    stock_seconds, fast_seconds = [], []
    for _ in range(REPEATS):  # the two alternate, so that a busy machine slows both
        fast_seconds.append(timed(model, tokenizer)[1])
        hf_fastpath.unpatch(model)
        stock_seconds.append(timed(model, tokenizer)[1])
        hf_fastpath.patch(model, quiet=True)

    print("\n--- text, stock ---------------------------------------------------------------")
    print(tokenizer.decode(stock_ids[0]))
    print("--- text, patched -------------------------------------------------------------")
    print(tokenizer.decode(fast_ids[0]))
    print("--- parity --------------------------------------------------------------------")
    print(f"tokens equal: {torch.equal(stock_ids, fast_ids)} ({fast_ids.shape[1]} tokens)")
    print(check)
    print(f"--- speed (whole generate(), prompt included, median of {REPEATS}) ---------------------")
    new_tokens = fast_ids.shape[1] - tokenizer(PROMPT, return_tensors="pt")["input_ids"].shape[1]
    stock, fast = (new_tokens / statistics.median(seconds) for seconds in (stock_seconds, fast_seconds))
    print(f"stock {stock:8.1f} tok/s   patched {fast:8.1f} tok/s   {fast / stock:.2f}x   ({model.device})")
    if not (torch.equal(stock_ids, fast_ids) and check.ok):
        raise SystemExit("the patched model gave other tokens than stock")


if __name__ == "__main__":
    main()
