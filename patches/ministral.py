"""Ministral: like Mistral, with windows in some layers."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="ministral",
    module="transformers.models.ministral.modeling_ministral",
    causal_lm="MinistralForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("MinistralRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("MinistralAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLPSpec("MinistralMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "MinistralDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
