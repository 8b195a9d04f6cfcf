"""Small models that the tests share: random ones of odd sizes, and the trained model of ``examples/``."""

from __future__ import annotations

import copy
import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_fastpath
from hf_fastpath.architecture import Architecture, architectures
from hf_fastpath.compat import CACHE
from hf_fastpath.native import loader
from hf_fastpath.patching import families

#: models for tests of everything around the layers
ARCHITECTURES = ("gpt2", "llama", "mistral")
over_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
CPU = torch.device("cpu")
GREEDY = dict(max_new_tokens=20, do_sample=False)
#: options for tests of what happens around the tokens
SHORT = dict(max_new_tokens=12, do_sample=False)
VOCAB = 307
#: sliding window of the random Mistral; small, so that every test crosses it
WINDOW = 16
#: sizes of GPT-2 small, for which a GPU has an op that makes all layers
GPT2_SMALL = dict(n_embd=768, n_head=12, n_inner=3072)
TINY_PYTHON = Path(__file__).resolve().parent.parent / "examples" / "tiny-python"
# The weights spread so wide that attention matters; at transformers' 0.02 the embeddings decide nearly alone.
_SPREAD = 0.15
_COMMON = dict(num_hidden_layers=2, vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, pad_token_id=0)
_COMMON |= dict(initializer_range=_SPREAD)
#: config entries of the random models, in odd sizes; comments say what each model covers
_SIZES = {
    # three queries a KV head, head_dim 32
    "cohere": dict(
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=172,
        logit_scale=0.3,
        max_position_embeddings=2048,
    ),
    # two queries a KV head, head_dim 40; only the lower layer rotates, over a window
    "cohere2": dict(
        hidden_size=80,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=40,
        intermediate_size=148,
        layer_types=["sliding_attention", "full_attention"],
        logit_scale=0.3,
        sliding_window=WINDOW,
    ),
    # two queries a KV head, head_dim 40, two norms a layer
    "falcon": dict(
        hidden_size=160,
        num_attention_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=212,
        new_decoder_architecture=True,
    ),
    # multi-query, heads wider than the model
    "gemma": dict(hidden_size=88, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=164),
    # two queries a KV head, head_dim 48; windows in the lower layer; eager attention, because sdpa ignores the cap
    "gemma2": dict(
        hidden_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=48,
        intermediate_size=140,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    ),
    # two queries a KV head, head_dim 40; windows in the lower layer
    "gemma3_text": dict(
        hidden_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=40,
        intermediate_size=156,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        max_position_embeddings=2048,
    ),
    # multi-head, head_dim 40
    "gpt2": dict(n_embd=120, n_head=3, n_inner=250, n_positions=1200),
    # multi-head, a quarter of 64 turns
    "gpt_neox": dict(hidden_size=128, num_attention_heads=2, intermediate_size=244),
    # four queries a KV head, head_dim 40, heads wider than the model; two of five experts; windows in the lower layer;
    # a limit that many gates and ups meet, where transformers takes it from the config
    "gpt_oss": dict(
        hidden_size=120,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=40,
        intermediate_size=72,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        sliding_window=WINDOW,
        max_position_embeddings=2048,
    ),
    # two queries a KV head, head_dim 48
    "granite": dict(
        hidden_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=180,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_scaling=1.7,
        max_position_embeddings=2048,
    ),
    # multi-query, head_dim 80
    "llama": dict(
        hidden_size=112,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=80,
        intermediate_size=204,
        max_position_embeddings=2048,
    ),
    # three queries a KV head, head_dim 48; windows in the lower layer
    "ministral": dict(
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=48,
        sliding_window=WINDOW,
        intermediate_size=236,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # three queries a KV head, head_dim 40, and heads wider than the model
    "mistral": dict(
        hidden_size=104,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=40,
        intermediate_size=250,
        sliding_window=WINDOW,
    ),
    # three queries a KV head, head_dim 40; two of five experts
    "mixtral": dict(
        hidden_size=120,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=152,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    # two queries a KV head, head_dim 40
    "olmo2": dict(hidden_size=160, num_attention_heads=4, num_key_value_heads=2, intermediate_size=196),
    # multi-head, head_dim 56; windows in the lower layer
    "olmo3": dict(
        hidden_size=112,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=188,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    ),
    # multi-head, head_dim 48; two of six experts
    "olmoe": dict(
        hidden_size=96,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=72,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    # multi-head, head_dim 56
    "opt": dict(
        hidden_size=112,
        num_attention_heads=2,
        ffn_dim=236,
        word_embed_proj_dim=112,
        max_position_embeddings=1200,
        init_std=_SPREAD,
    ),
    # two queries a KV head, half of 40 turns
    "phi": dict(
        hidden_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=228,
        max_position_embeddings=2048,
    ),
    # multi-head, head_dim 48
    "phi3": dict(
        hidden_size=96, num_attention_heads=2, num_key_value_heads=2, intermediate_size=140, sliding_window=None
    ),
    # biases, two queries a KV head, head_dim 32; windows in the upper layer
    "qwen2": dict(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=220,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    # heads wider than the model, two queries a KV head
    "qwen3": dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=40, intermediate_size=188),
    # heads wider than the model, two queries a KV head; three of eight experts
    "qwen3_moe": dict(
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        intermediate_size=188,
        moe_intermediate_size=80,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    # two queries a KV head, head_dim 56
    "seed_oss": dict(
        hidden_size=112,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=56,
        mlp_bias=True,
        intermediate_size=168,
        attention_out_bias=True,
    ),
    # two queries a KV head, head_dim 32; the upper layer does not rotate
    "smollm3": dict(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=212,
        no_rope_layers=[1, 0],
        max_position_embeddings=2048,
    ),
    # multi-head, a quarter of 64 turns
    "stablelm": dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, intermediate_size=180),
    # four queries a KV head, head_dim 32
    "starcoder2": dict(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=1, intermediate_size=260, sliding_window=WINDOW
    ),
}


def build(architecture: str, seed: int = 0, **changes) -> PreTrainedModel:
    """Make a random float32 model on the CPU, in eval mode, without an end-of-sequence token.

    Args:
        architecture: its name, as in ``patches/``.
        seed: seed of its weights.
        changes: config entries that differ from the test's usual ones.
    """
    declared = next(found for found in architectures() if found.name == architecture)
    cls = getattr(importlib.import_module(declared.module), declared.causal_lm)
    config = cls.config_class(**(_COMMON | _SIZES[architecture] | changes))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts with zeros, so that a forgotten bias would change nothing
                parameter.normal_(std=_SPREAD)
            elif parameter.dim() == 1:  # norms start with ones, so that a forgotten weight would change nothing
                parameter.normal_(mean=1.0, std=_SPREAD)
        if declared.moe is not None:
            _route_by_token(model, declared)
    torch.set_rng_state(state)
    return model


def _route_by_token(model: PreTrainedModel, declared: Architecture) -> None:
    """Give every token experts of its own, by levels far apart in features that no layer adds to.

    With random routers a rounding may change a choice, and what another expert gives is no error to compare.
    """
    base = getattr(model, declared.base)
    mixtures = [getattr(layer, declared.layer.mlp) for layer in getattr(base, declared.layers)]
    routers = [getattr(each, declared.moe.router) for each in mixtures if hasattr(each, declared.moe.router)]
    count = len(routers[0].weight)
    embeddings = getattr(base, declared.embedding).weight
    embeddings[:, :count] = torch.rand(len(embeddings), count).argsort(-1) / count
    for router in routers:
        router.weight.zero_()[:, :count] = 4 * torch.eye(count)
        if getattr(router, "bias", None) is not None:
            router.bias.uniform_(-0.05, 0.05)
    for layer, each in zip(getattr(base, declared.layers), mixtures):
        getattr(layer, declared.layer.mlp_norm).weight[:count] = 1
        attention, experts = getattr(layer, declared.layer.attention), getattr(each, declared.moe.experts, None)
        for parameter in getattr(attention, declared.attention.out).parameters():
            parameter[:count] = 0
        if experts is None:
            getattr(each, declared.dense_mlp.down).weight[:count] = 0
        else:
            down = getattr(experts, declared.moe.down)
            (down.mT if declared.moe.transposed else down)[:, :count] = 0
            if declared.moe.down_bias is not None:
                getattr(experts, declared.moe.down_bias)[:, :count] = 0


def require_native(device: torch.device) -> None:
    """Skip, visibly, if no compiled kernels serve ``device``: everything is stock code there."""
    status = loader.ensure(device.type)
    if not status.native:
        pytest.skip(f"no native library: {status}")


def skip_if_cache_is_named_otherwise(model_type: str) -> None:
    """Skip, visibly, a type whose classes call their cache otherwise before transformers 5.24."""
    if model_type in ("falcon_mamba", "mamba", "mamba2") and CACHE != "cache":
        pytest.skip(f"{model_type} takes its cache by another name in transformers {transformers.__version__}")


@functools.cache
def _pair(architecture: str, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    stock = build(architecture).to(device, dtype)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def pair(architecture: str, device: torch.device, dtype: torch.dtype = torch.float32):
    """Return (stock, patched): the same random model twice, made once; tests do not change them."""
    require_native(device)
    return _pair(architecture, str(device), dtype)


def fresh(architecture: str, device: torch.device = CPU, **changes) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (stock, patched) that a test may change."""
    require_native(device)
    stock = build(architecture, **changes).to(device)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


@functools.cache
def _trained(device: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    stock = AutoModelForCausalLM.from_pretrained(TINY_PYTHON, dtype=torch.float32).to(device).eval()
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def trained(device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (stock, patched): the trained model twice, in float32."""
    require_native(device)
    return _trained(str(device))


@functools.cache
def tokenizer():
    """Return the trained model's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY_PYTHON)


@functools.cache
def heldout_tokens(count: int) -> torch.Tensor:
    """Return the [1, count] first tokens of a text that the trained model has not seen."""
    ids = tokenizer()((TINY_PYTHON / "heldout.txt").read_text(), return_tensors="pt")["input_ids"]
    assert ids.shape[1] >= count, f"the held-out text has {ids.shape[1]} tokens, {count} are needed"
    return ids[:, :count]


def prompt(device: torch.device, batch: int = 1, length: int = 11, seed: int = 0) -> torch.Tensor:
    """Return [batch, length] random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(device)


def left_padded(device: torch.device, batch: int = 3, length: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask of prompts of different lengths, the longest ``length``."""
    ids = prompt(device, batch, length, seed)
    mask = torch.ones_like(ids)
    for row in range(batch):
        padding = (3 * row) % (length - 1)
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def blocks_of(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names that a device map has: layers one by one, and what is beside them."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            found += [f"{path}.{place}" for place in range(len(child))]
        elif any(isinstance(each, nn.ModuleList) for each in child.modules()) and not list(child.parameters(False)):
            found += blocks_of(child, f"{path}.")
        else:
            found.append(path)
    return found


def instances(model: nn.Module) -> dict[str, dict]:
    """Return ``vars(module)`` of every module, by name."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def assert_same_instances(now: dict[str, dict], before: dict[str, dict]) -> None:
    """Assert that two results of :func:`instances` hold the same objects under the same names."""
    assert list(now) == list(before)
    for name, contents in now.items():
        assert list(contents) == list(before[name]), f"{name}: {set(contents) ^ set(before[name])}"
        assert all(value is before[name][key] for key, value in contents.items()), name


class Counts:
    """What happened on a patched model inside :func:`counting`."""

    fast = fallback = 0
    reasons: Counter = Counter()


class Tokens(BaseStreamer):
    """Writes down the tokens that it is given."""

    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        pass


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[Counts]:
    """Count fast and stock tokens, and reason codes, of the calls inside the block."""
    counts, before = Counts(), hf_fastpath.report(model).stats
    yield counts
    after = hf_fastpath.report(model).stats
    counts.fast = after["fast_tokens"] - before["fast_tokens"]
    counts.fallback = after["fallback_tokens"] - before["fallback_tokens"]
    counts.reasons = Counter(after["reasons"]) - Counter(before["reasons"])


@contextmanager
def hidden_files() -> Iterator[None]:
    """Let no architecture file describe a model that is patched within a ``with`` block: its step is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "of_files", lambda model, known, ranks: [])
        yield


def without_one_call(monkeypatch) -> None:
    """Let steps be one op after the other, even if one op could do all layers."""
    monkeypatch.setenv("HF_FASTPATH_PASSES", "-one_call")
