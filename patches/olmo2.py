"""OLMo 2: like Llama, with norms behind attention and MLP, and over all heads' queries and keys."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="olmo2",
    module="transformers.models.olmo2.modeling_olmo2",
    causal_lm="Olmo2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Olmo2RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "Olmo2Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", head_norms=("q_norm", "k_norm")
    ),
    mlp=MLPSpec("Olmo2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Olmo2DecoderLayer",
        attention_norm=None,
        attention="self_attn",
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp="mlp",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
