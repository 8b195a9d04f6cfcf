"""Qwen2 and Qwen2.5: RMS norm, separate q/k/v with bias, rotary positions, windows by layer, gated SiLU MLP."""

from hf_fastpath.architecture import MLP, Architecture, Attention, Layer, Norm

ARCHITECTURE = Architecture(
    name="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    causal_lm="Qwen2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=Norm("Qwen2RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=Attention("Qwen2Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLP("Qwen2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=Layer(
        "Qwen2DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
