"""Phi-3 and Phi-4-mini: RMS norm, fused q/k/v, rotary positions of a part of each head, fused gated SiLU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="phi3",
    module="transformers.models.phi3.modeling_phi3",
    causal_lm="Phi3ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Phi3RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("Phi3Attention", qkv=("qkv_proj",), out="o_proj"),
    mlp=MLPSpec("Phi3MLP", activation="activation_fn", gate="gate_up_proj", up="gate_up_proj", down="down_proj"),
    layer=LayerSpec(
        "Phi3DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
)
