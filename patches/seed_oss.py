"""Seed-OSS: like Llama, with biases and dropout."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="seed_oss",
    module="transformers.models.seed_oss.modeling_seed_oss",
    causal_lm="SeedOssForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("SeedOssRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "SeedOssAttention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        residual_dropout="residual_dropout",
    ),
    mlp=MLPSpec(
        "SeedOssMLP",
        activation="act_fn",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        dropout="residual_dropout",
    ),
    layer=LayerSpec(
        "SeedOssDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
