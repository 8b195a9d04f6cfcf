"""Mistral: RMS norm, separate grouped q/k/v, rotary positions, sliding window, gated SiLU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="mistral",
    module="transformers.models.mistral.modeling_mistral",
    causal_lm="MistralForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("MistralRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("MistralAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLPSpec("MistralMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "MistralDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
