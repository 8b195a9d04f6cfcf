"""Granite: like Llama, with factors on embeddings, on the outputs of attention and MLP, on scores and on logits."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="granite",
    module="transformers.models.granite.modeling_granite",
    causal_lm="GraniteForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    embedding_multiplier="embedding_multiplier",
    logits_divisor="config.logits_scaling",
    norm=NormSpec("GraniteRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("GraniteAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLPSpec("GraniteMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "GraniteDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        residual_multiplier="residual_multiplier",
    ),
)
