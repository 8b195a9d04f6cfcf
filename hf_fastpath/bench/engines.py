"""The engines that ``generate.py`` and ``benchmarks/bench_append.py`` compare: transformers, ours, llama.cpp."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, TextIteratorStreamer

import hf_fastpath

from ..cache.states import copy_states
from ..compat import LinearAttentionLayer, cache_name
from ..patching.state import state_of
from .measure import wait_for_pages

#: name of the engine that is a separate program
LLAMA_CPP = "llama.cpp"


class NoSuchEngine(ValueError):
    """A model does not have an engine: ``patch()`` refuses it, or its class takes no other attention."""


def first_sentence(error: Exception) -> str:
    """Return what an error says in its first sentence."""
    return str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")


class Numbers:
    """A tokenizer for streamers that needs no vocabulary: a token's text is its number."""

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


#: engine -> options of its generate()
ENGINES: dict[str, Callable[[], dict[str, Any]]] = {
    "stock": dict,
    "static": lambda: {"cache_implementation": "static"},
    "flash": dict,
    "ours": dict,
    "ours-sampled": lambda: {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "ours-streamed": lambda: {"streamer": TextIteratorStreamer(Numbers())},
    "ours-int8-kv": dict,
    "ours-fp8-kv": dict,
}
#: engine -> storage type of its KV cache, if that is not the model's
KV_DTYPES = {"ours-int8-kv": torch.int8, "ours-fp8-kv": torch.float8_e4m3fn}


def _unmasked_sdpa(module, query, key, value, attention_mask, scaling=None, **options):
    """Compute causal attention with PyTorch's fused kernels, without masks and without repeated keys and values."""
    behind = key.shape[2] - query.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=causal_lower_right(query.shape[2], key.shape[2]) if behind and query.shape[2] > 1 else None,
        is_causal=not behind,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


AttentionInterface.register("unmasked_sdpa", _unmasked_sdpa)


@contextlib.contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Make the model's layers call the attention registered as ``name``."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise NoSuchEngine(first_sentence(error)) from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def is_ours(name: str) -> bool:
    """Whether an engine is the patched model."""
    return name.startswith("ours")


def random_cache(model: PreTrainedModel, batch: int, length: int) -> DynamicCache:
    """Make a cache of ``length`` positions with random keys and values; states are those behind a few tokens."""
    config = model.config.get_text_config(decoder=True)
    few, cache = DynamicCache(config=config), DynamicCache(config=config)
    with torch.no_grad():
        model(torch.zeros(batch, 4, dtype=torch.long, device=model.device), use_cache=True, **{cache_name(model): few})
    for index, layer in enumerate(few.layers):
        if getattr(layer, "keys", None) is not None:
            sizes = [(*half.shape[:2], length, half.shape[3]) for half in (layer.keys, layer.values)]
            cache.update(*(torch.randn(size, device=model.device).to(model.dtype) for size in sizes), index)
        if isinstance(layer, LinearAttentionLayer):
            copy_states(layer, cache.layers[index])
    return cache


def copied_cache(name: str, cache: DynamicCache | None) -> DynamicCache | hf_fastpath.FastpathCache | None:
    """Copy ``cache`` into the kind that the engine ``name`` takes."""
    if cache and is_ours(name):
        return hf_fastpath.FastpathCache.from_dynamic(cache, KV_DTYPES.get(name))
    return copy.deepcopy(cache)


Generate = Callable[[torch.Tensor, int, Any], torch.Tensor]


@contextlib.contextmanager
def engine(name: str, model: PreTrainedModel) -> Iterator[Generate]:
    """Turn ``model`` into the engine ``name``.

    Yields:
        ``generate(prompt, new_tokens, cache)``; the cache holds the first positions of the prompt.

    Raises:
        ValueError: there is no such engine, or, as NoSuchEngine, this model does not have it.
    """
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}, expected one of {', '.join(ENGINES)}")

    def generate(prompt: torch.Tensor, new_tokens: int, cache: Any = None) -> torch.Tensor:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | ENGINES[name]()
        if cache is None and name in KV_DTYPES:
            cache = hf_fastpath.FastpathCache(model.config, KV_DTYPES[name])
        if cache is not None:
            options[cache_name(model)] = cache
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, **options)
        if out.shape[1] != prompt.shape[1] + new_tokens:
            raise RuntimeError(f"{name} made {out.shape[1] - prompt.shape[1]} tokens, expected {new_tokens}")
        return out

    patches = is_ours(name) and state_of(model) is None  # a model with quantized weights stays patched
    with contextlib.ExitStack() as stack:
        if name == "flash":
            stack.enter_context(_attention(model, "unmasked_sdpa"))
        elif patches:
            try:
                stack.enter_context(hf_fastpath.patched(model, quiet=True))
            except hf_fastpath.UnsupportedModelError as error:
                raise NoSuchEngine(first_sentence(error)) from error
        wait_for_pages(model)
        yield generate


class LlamaBench:
    """llama.cpp's own benchmark on a GGUF file of the same shape, one sequence.

    Args:
        gguf: the file.

    Raises:
        FileNotFoundError: ``llama-bench`` is not on PATH, or there is no such file.
    """

    def __init__(self, gguf: Path):
        program = shutil.which("llama-bench")
        if program is None:
            raise FileNotFoundError("llama-bench is not on PATH: build llama.cpp and add its folder of programs")
        if not gguf.is_file():
            raise FileNotFoundError(f"there is no file {gguf}: benchmarks/write_gguf.py writes one")
        self.program, self.gguf = program, gguf

    def seconds_per_token(self, context: int, new_tokens: int) -> float:
        """Run ``new_tokens`` behind ``context`` positions; loading and warm-up are not timed.

        A context of fewer than 128 positions is left out, because its keys and values are next to nothing.
        """
        return self._seconds(context if context >= 128 else 0, {"-p": 0, "-n": new_tokens}) / new_tokens

    def seconds_of_prompt(self, context: int, tokens: int) -> float:
        """Read ``tokens`` at once behind ``context`` positions; return the seconds."""
        return self._seconds(context, {"-p": tokens, "-n": 0})

    def _seconds(self, depth: int, sizes: dict[str, int]) -> float:
        sizes = sizes | {"-r": 1, "-t": torch.get_num_threads()} | ({"-d": depth} if depth else {})
        options = [str(word) for pair in sizes.items() for word in pair]
        command = [self.program, "-m", str(self.gguf), *options, "-o", "json"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return json.loads(out)[0]["avg_ns"] / 1e9
