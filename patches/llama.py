"""Llama 2 and 3: RMS norm, separate q/k/v, rotary positions (scaled or not), gated SiLU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="llama",
    module="transformers.models.llama.modeling_llama",
    causal_lm="LlamaForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("LlamaRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("LlamaAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MLPSpec("LlamaMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "LlamaDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
