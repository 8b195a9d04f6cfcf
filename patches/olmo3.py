"""OLMo 3: like OLMo 2, with windows in most layers, whose angles may be scaled differently."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="olmo3",
    module="transformers.models.olmo3.modeling_olmo3",
    causal_lm="Olmo3ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Olmo3RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "Olmo3Attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        head_norms=("q_norm", "k_norm"),
        layer_types="layer_types",
    ),
    mlp=MLPSpec("Olmo3MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Olmo3DecoderLayer",
        attention_norm=None,
        attention="self_attn",
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp="mlp",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
