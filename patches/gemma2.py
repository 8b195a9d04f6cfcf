"""Gemma 2: like Gemma, with norms behind attention and MLP, soft-capped scores and logits, windows in some layers."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="gemma2",
    module="transformers.models.gemma2.modeling_gemma2",
    causal_lm="Gemma2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    embedding_scale="embed_scale",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    logits_softcap="config.final_logit_softcapping",
    norm=NormSpec("Gemma2RMSNorm", kind="rms", eps="eps", unit_offset=True),
    attention=AttentionSpec(
        "Gemma2Attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        require=("is_causal",),
        softcap="attn_logit_softcapping",
    ),
    mlp=MLPSpec("Gemma2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Gemma2DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp="mlp",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
