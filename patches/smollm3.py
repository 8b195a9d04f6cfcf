"""SmolLM3: like Llama, with some layers without rotation, and windows if the config asks for them."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="smollm3",
    module="transformers.models.smollm3.modeling_smollm3",
    causal_lm="SmolLM3ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("SmolLM3RMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("SmolLM3Attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", rotates="use_rope"),
    mlp=MLPSpec("SmolLM3MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "SmolLM3DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
