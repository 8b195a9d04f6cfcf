"""Configs of listed families that differ in a switch, each of which has to give stock's tokens and logits.

A new family, or a switch that a release of transformers adds, is a line here; ``test_families.py`` runs all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from models import WINDOW


@dataclass(frozen=True)
class Variant:
    """A config, and what becomes of it.

    Attributes:
        changes: entries of the config that differ from those in ``models.py``.
        fast: whether our loop decodes.
        reason: the reason code of a call that is not fast; "declined" where ``patch()`` itself says it.
        patched: kinds of modules -> how many are patched, where that is not told by the tokens.
    """

    changes: dict[str, Any]
    fast: bool = True
    reason: str | None = None
    patched: dict[str, int] = field(default_factory=dict)


def _is(**changes: Any) -> Variant:
    return Variant(changes)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


def _by_layer(**full: Any) -> dict[str, Any]:
    return {"sliding_attention": _rope("default"), "full_attention": full}


_SHORT = {"original_max_position_embeddings": 64}
_WHOLE_HEADS_ROTATE = {"whole heads rotate": _is(rope_parameters=_rope("default", partial_rotary_factor=1.0))}
_ONE_KIND = {
    f"{kind.partition('_')[0]} layers alone": _is(layer_types=[kind] * 2)
    for kind in ("sliding_attention", "full_attention")
}
_ATTENTION_BIAS = {"attention bias": _is(attention_bias=True)}
_TIED = {"tied head": _is(tie_word_embeddings=True)}
_SEPARATE_HEAD = {"separate head": _is(tie_word_embeddings=False)}
_EAGER = {"eager attention": _is(attn_implementation="eager")}
_EXPERTS_FUNCTIONS = {f"experts by {name}": _is(experts_implementation=name) for name in ("eager", "batched_mm")}
#: the structure of Falcon 7B; the small model has that of 40B and 180B
_FALCON_7B = {"new_decoder_architecture": False}

VARIANTS: dict[str, dict[str, Variant]] = {
    "cohere": {
        "unscaled logits": _is(logit_scale=1.0),
        "norms of heads": _is(use_qk_norm=True),
        **_ATTENTION_BIAS,
        **_SEPARATE_HEAD,
    },
    "cohere2": {**_ONE_KIND, **_ATTENTION_BIAS, **_SEPARATE_HEAD},
    "falcon": {
        **{
            f"{name}, multi_query={multi}": _is(multi_query=multi, num_kv_heads=4, **_FALCON_7B, **more)
            for name, more in (("one norm", {}), ("MLP behind attention", {"parallel_attn": False}))
            for multi in (True, False)
        },
        "one KV head": _is(num_kv_heads=1),
        "four KV heads": _is(num_kv_heads=4),
        "one norm for both": _is(num_ln_in_parallel_attn=1),
        "biases": _is(bias=True),
        "biases, MLP behind attention": _is(bias=True, parallel_attn=False, **_FALCON_7B),
        "ALiBi": Variant({"alibi": True}, fast=False, reason="declined"),
        **_EAGER,
        **_SEPARATE_HEAD,
    },
    "gemma": {
        "multi-head": _is(num_key_value_heads=2),
        "erf GELU": _is(hidden_act="gelu"),
        "bidirectional attention": _is(use_bidirectional_attention=True),
        **_ATTENTION_BIAS,
        **_SEPARATE_HEAD,
    },
    "gemma2": {
        "no soft caps": _is(attn_logit_softcapping=None, final_logit_softcapping=None),
        "bidirectional attention": _is(use_bidirectional_attention=True),
        # eager caps scores; sdpa does not
        "sdpa": _is(attn_implementation="sdpa"),
        **_EAGER,
        **_ONE_KIND,
    },
    "gemma3_text": {
        "scaled angles in full layers": _is(
            rope_parameters=_by_layer(rope_type="linear", factor=8.0, rope_theta=1000000.0)
        ),
        "dynamic angles": Variant(
            {"rope_parameters": _by_layer(**_rope("dynamic", factor=2.0))}, fast=False, reason="dynamic_rope"
        ),
        "soft-capped logits": _is(final_logit_softcapping=0.7),
        "soft-capped scores": _is(attn_logit_softcapping=20.0),
        **_ONE_KIND,
    },
    "gpt2": {
        **{name: _is(activation_function=name) for name in ("gelu", "relu", "gelu_pytorch_tanh", "silu", "tanh")},
        "scores scaled by layer": _is(scale_attn_by_inverse_layer_idx=True),
        "unscaled scores": _is(scale_attn_weights=False),
        "reordered attention": _is(reorder_and_upcast_attn=True),
        **_SEPARATE_HEAD,
        **_EAGER,
    },
    "gpt_neox": {
        "MLP behind attention": _is(use_parallel_residual=False),
        "no attention bias": _is(attention_bias=False),
        **_WHOLE_HEADS_ROTATE,
        **_TIED,
    },
    "gpt_oss": {
        "one expert a token": _is(num_experts_per_tok=1),
        "five experts a token": _is(num_experts_per_tok=5),
        "no attention bias": _is(attention_bias=False),
        # the angles of the checkpoints are scaled by yarn, and so are those of the small model
        "plain angles": _is(rope_parameters={"rope_type": "default", "rope_theta": 150000.0}),
        **_EXPERTS_FUNCTIONS,
        **_ONE_KIND,
        **_TIED,
    },
    "granite": {
        "no factors": _is(
            attention_multiplier=0.125, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0
        ),
        "biases": _is(attention_bias=True, mlp_bias=True),
        **_TIED,
    },
    "llama": {
        "linear angles": _is(rope_parameters=_rope("linear", factor=2.0)),
        "llama3 angles": _is(
            rope_parameters=_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_SHORT)
        ),
        "yarn angles": _is(rope_parameters=_rope("yarn", factor=4.0, **_SHORT)),
        "dynamic angles": Variant(
            {
                "rope_parameters": _rope("dynamic", factor=2.0, original_max_position_embeddings=16),
                "max_position_embeddings": 16,
            },
            fast=False,
            reason="dynamic_rope",
        ),
        "MLP bias": _is(mlp_bias=True),
        **_ATTENTION_BIAS,
        **_TIED,
    },
    "ministral": {"full layers alone": _is(layer_types=["full_attention"] * 2)},
    "mistral": {
        "no window": _is(sliding_window=None),
        **{f"heads of {size}": _is(head_dim=size) for size in (6, 32, 64, 72)},
        "heads of 514": Variant({"head_dim": 514}, fast=False, reason="declined"),
        "GELU gate": _is(hidden_act="gelu"),
        **_EAGER,
        **_TIED,
    },
    "mixtral": {
        "one expert a token": _is(num_experts_per_tok=1),
        "five experts a token": _is(num_experts_per_tok=5),
        "window": _is(sliding_window=WINDOW),
        "GELU gate": _is(hidden_act="gelu_pytorch_tanh"),
        "ReLU experts": _is(hidden_act="relu"),
        **_EXPERTS_FUNCTIONS,
        **_TIED,
    },
    "olmo2": {"multi-head": _is(num_key_value_heads=4), **_ATTENTION_BIAS, **_TIED},
    "olmo3": {
        "scaled angles in full layers": _is(rope_parameters=_by_layer(**_rope("yarn", factor=4.0, **_SHORT))),
        "grouped queries": _is(num_key_value_heads=1),
        **_ONE_KIND,
        **_ATTENTION_BIAS,
    },
    "olmoe": {
        "weights that sum to one": _is(norm_topk_prob=True),
        "grouped heads": _is(num_key_value_heads=1),
        "clipped projections": _is(clip_qkv=0.8),
    },
    "opt": {
        "GELU": _is(activation_function="gelu"),
        "no biases": _is(enable_bias=False),
        "norms without parameters": _is(layer_norm_elementwise_affine=False),
        "norms behind attention and MLP": _is(do_layer_norm_before=False),
        "no final norm": _is(_remove_final_layer_norm=True),
        "projected embeddings": _is(word_embed_proj_dim=64),
        **_SEPARATE_HEAD,
    },
    "phi": {
        "multi-head": _is(num_key_value_heads=4),
        "norms of heads": _is(qk_layernorm=True),
        **_WHOLE_HEADS_ROTATE,
        **_TIED,
    },
    "phi3": {
        "window": _is(sliding_window=WINDOW),
        "grouped queries": _is(num_attention_heads=4, num_key_value_heads=2, hidden_size=128),
        "half of a head rotates": _is(rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    },
    "qwen2": {
        "windows in all layers": _is(max_window_layers=0),
        "windows in no layer": _is(max_window_layers=2),
        "no windows": _is(use_sliding_window=False),
        **_TIED,
    },
    "qwen3": {
        "windows": _is(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        **_ATTENTION_BIAS,
        **_TIED,
    },
    "qwen3_moe": {
        "weights that sum to one": _is(norm_topk_prob=True),
        "a mixture in every other layer": Variant({"decoder_sparse_step": 2}, patched={"mlp": 2}),
        "an MLP in one layer": Variant({"mlp_only_layers": [1]}, patched={"mlp": 2}),
        "one expert a token": _is(num_experts_per_tok=1),
        **_ATTENTION_BIAS,
        **_TIED,
    },
    "seed_oss": {"no biases": _is(mlp_bias=False, attention_bias=False, attention_out_bias=False)},
    "smollm3": {
        "all layers rotate": _is(no_rope_layers=[1, 1]),
        "no layer rotates": _is(no_rope_layers=[0, 0]),
        "windows where nothing rotates": _is(use_sliding_window=True, sliding_window=WINDOW),
        "biases": _is(attention_bias=True, mlp_bias=True),
    },
    "stablelm": {
        "bias of projections": _is(use_qkv_bias=True),
        "norms of heads": _is(qk_layernorm=True),
        "MLP beside attention": _is(use_parallel_residual=True),
        **_WHOLE_HEADS_ROTATE,
    },
    "starcoder2": {
        "no window": _is(sliding_window=None),
        "no bias": _is(use_bias=False),
        "erf GELU": _is(hidden_act="gelu"),
        **_SEPARATE_HEAD,
    },
}

#: families that drop activations in training -> the switch
DROPOUT: dict[str, dict[str, float]] = {
    "gpt_neox": {"hidden_dropout": 0.4},
    "phi3": {"resid_pdrop": 0.4},
    "seed_oss": {"residual_dropout": 0.4},
    "starcoder2": {"residual_dropout": 0.4, "embedding_dropout": 0.3},
}
