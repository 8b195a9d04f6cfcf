"""Gemma 3, text: like Gemma, with norms behind attention and MLP and over heads, windows with angles of their own."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="gemma3_text",
    module="transformers.models.gemma3.modeling_gemma3",
    causal_lm="Gemma3ForCausalLM",
    base="model",
    embedding="embed_tokens",
    embedding_scale="embed_scale",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    logits_softcap="config.final_logit_softcapping",
    norm=NormSpec("Gemma3RMSNorm", kind="rms", eps="eps", unit_offset=True),
    attention=AttentionSpec(
        "Gemma3Attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        refuse=("attn_logit_softcapping",),
        require=("is_causal",),
        head_norms=("q_norm", "k_norm"),
        layer_types="layer_types",
    ),
    mlp=MLPSpec("Gemma3MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Gemma3DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp="mlp",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
