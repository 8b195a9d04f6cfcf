"""Gemma: RMS norm with 1 + weight, scaled embeddings, separate q/k/v, rotary positions, gated GELU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="gemma",
    module="transformers.models.gemma.modeling_gemma",
    causal_lm="GemmaForCausalLM",
    base="model",
    embedding="embed_tokens",
    embedding_scale="embed_scale",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("GemmaRMSNorm", kind="rms", eps="eps", unit_offset=True),
    attention=AttentionSpec("GemmaAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", require=("is_causal",)),
    mlp=MLPSpec("GemmaMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "GemmaDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
