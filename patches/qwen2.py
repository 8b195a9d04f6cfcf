"""Qwen2 and Qwen2.5: RMS norm, separate q/k/v with bias, rotary positions, windows by layer, gated SiLU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    causal_lm="Qwen2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Qwen2RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("Qwen2Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLPSpec("Qwen2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Qwen2DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
