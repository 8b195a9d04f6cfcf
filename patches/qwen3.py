"""Qwen3: like Qwen2, without biases and with a norm over every head's query and key."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="qwen3",
    module="transformers.models.qwen3.modeling_qwen3",
    causal_lm="Qwen3ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Qwen3RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "Qwen3Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", head_norms=("q_norm", "k_norm")
    ),
    mlp=MLPSpec("Qwen3MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Qwen3DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
