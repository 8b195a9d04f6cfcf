"""OLMo 2: like Llama, with norms behind attention and MLP, and over all heads' queries and keys."""

from hf_fastpath.architecture import MLP, Architecture, Attention, Layer, Norm

ARCHITECTURE = Architecture(
    name="olmo2",
    module="transformers.models.olmo2.modeling_olmo2",
    causal_lm="Olmo2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=Norm("Olmo2RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=Attention(
        "Olmo2Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", head_norms=("q_norm", "k_norm")
    ),
    mlp=MLP("Olmo2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=Layer(
        "Olmo2DecoderLayer",
        attention_norm=None,
        attention="self_attn",
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp="mlp",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
