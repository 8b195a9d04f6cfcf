"""The sizes of published models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """A published model's sizes.

    Attributes:
        label: name in tables.
        model_type: transformers' name of the architecture.
        config: values that differ from that architecture's defaults.
    """

    label: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)

    def build_config(self) -> PreTrainedConfig:
        """Make transformers' configuration, without special tokens, because the caller decides on lengths."""
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return AutoConfig.for_model(self.model_type, **{**tokens, **self.config})

    def with_layers(self, count: int) -> ModelShape:
        """Return the shape with its first ``count`` layers alone.

        Raises:
            ValueError: the model has fewer.
        """
        whole = self.build_config().num_hidden_layers
        if not 1 <= count <= whole:
            raise ValueError(f"{self.label} has {whole} layers, got {count}")
        lists = {key: value[:count] for key, value in self.config.items() if isinstance(value, list)}
        config = self.config | lists | {"num_hidden_layers": count}
        return ModelShape(f"{self.label}, {count} layers", self.model_type, config)

    @property
    def max_context(self) -> int:
        """Positions that the model knows."""
        return getattr(self.build_config(), "max_position_embeddings", _NO_LIMIT)


#: positions of models that count none
_NO_LIMIT = 1 << 20

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

MODELS: dict[str, ModelShape] = {
    "mistral-7b": ModelShape(
        "Mistral-7B",
        "mistral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
    ),
    "tinyllama-1.1b": ModelShape(
        "TinyLlama-1.1B",
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama-3.2-1b": ModelShape(
        "Llama-3.2-1B",
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA_3_ROPE,
        },
    ),
    "llama-3.1-8b": ModelShape(
        "Llama-3.1-8B",
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _LLAMA_3_ROPE | {"factor": 8.0},
        },
    ),
    "llama-3.1-70b": ModelShape(
        "Llama-3.1-70B",
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _LLAMA_3_ROPE | {"factor": 8.0},
        },
    ),
    "qwen2.5-14b": ModelShape(
        "Qwen2.5-14B",
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen2.5-7b": ModelShape(
        "Qwen2.5-7B",
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-4b": ModelShape(
        "Qwen3-4B",
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
        },
    ),
    "gemma-2b": ModelShape(  # made for 8,192 positions; the shape has more, so that it can be compared
        "Gemma-2B",
        "gemma",
        {
            "vocab_size": 256000,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
        },
    ),
    "phi-2": ModelShape(  # made for 2,048 positions; the shape has more
        "Phi-2",
        "phi",
        {
            "vocab_size": 51200,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        },
    ),
    "glm-4-9b": ModelShape("GLM-4-9B", "glm4"),  # from here on, sizes not given are the defaults
    "gemma-2-2b": ModelShape("Gemma-2-2B", "gemma2"),
    "gemma-3-4b": ModelShape(
        "Gemma-3-4B", "gemma3_text", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    ),
    "command-r7b": ModelShape(
        "Command-R7B",
        "cohere2",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "olmo-2-7b": ModelShape("OLMo-2-7B", "olmo2", {"vocab_size": 100352, "max_position_embeddings": 4096}),
    "qwen3-30b-a3b": ModelShape("Qwen3-30B-A3B", "qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "mixtral-8x7b": ModelShape("Mixtral-8x7B", "mixtral"),
    "gpt-oss-20b": ModelShape("gpt-oss-20b", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3.5-4b": ModelShape(
        "Qwen3.5-4B",
        "qwen3_5_text",
        {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    ),
    "qwen3.5-35b-a3b": ModelShape("Qwen3.5-35B-A3B", "qwen3_5_moe_text"),
    "glm-4.7-flash": ModelShape("GLM-4.7-Flash", "glm4_moe_lite"),
    "ernie-4.5-21b-a3b": ModelShape("ERNIE-4.5-21B-A3B", "ernie4_5_moe"),
    "gemma-4-small": ModelShape("Gemma 4, default sizes", "gemma4_text"),
    "granite-4.0-h-micro": ModelShape(
        "Granite-4.0-H-Micro",
        "granitemoehybrid",
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "shared_intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "layer_types": ["attention" if place in (5, 15, 25, 35) else "mamba" for place in range(40)],
            "position_embedding_type": "nope",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-1.2b": ModelShape(
        "LFM2-1.2B",
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["full_attention" if place in (2, 5, 8, 10, 12, 14) else "conv" for place in range(16)],
            "tie_word_embeddings": True,
        },
    ),
    "mamba2-2.7b": ModelShape(
        "Mamba2-2.7B",
        "mamba2",
        {
            "vocab_size": 50288,
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "num_heads": 80,
            "head_dim": 64,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-lite": ModelShape(
        "DeepSeek-V2-Lite",
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        },
    ),
    # three of the recorded types, drawn by random.Random(37).sample(sorted names, 3) before their first run
    "xlm-roberta-xl": ModelShape("XLM-RoBERTa-XL", "xlm-roberta-xl", {"is_decoder": True}),
    "blenderbot-3b": ModelShape(
        "BlenderBot-3B",
        "blenderbot",
        {
            "max_position_embeddings": 1024,  # made for 128
            "encoder_layers": 24,  # no part of the model, but transformers' cache gets as many layers
        },
    ),
    "qwen1.5-moe-a2.7b": ModelShape("Qwen1.5-MoE-A2.7B", "qwen2_moe"),
    "gpt2-124m": ModelShape("GPT-2 124M", "gpt2"),  # the architecture's defaults are this size
    "tiny": ModelShape(  # for trying the benchmarks out; its speed means nothing
        "tiny",
        "llama",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        },
    ),
}
