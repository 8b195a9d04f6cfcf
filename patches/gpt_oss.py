"""gpt-oss: sinks in the softmax, windows in every other layer, biases, a mixture of clamped gated MLPs."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MoESpec, NormSpec

ARCHITECTURE = Architecture(
    name="gpt_oss",
    module="transformers.models.gpt_oss.modeling_gpt_oss",
    causal_lm="GptOssForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    half_angles=True,
    layers="layers",
    final_norm="norm",
    norm=NormSpec("GptOssRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("GptOssAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", sinks="sinks"),
    mlp=MoESpec(
        "GptOssMLP",
        router="router",
        router_class="GptOssTopKRouter",
        experts="experts",
        experts_class="GptOssExperts",
        clamped=("_apply_gate", "alpha", "limit"),
        gate_up_bias="gate_up_proj_bias",
        down_bias="down_proj_bias",
        transposed=True,
        rounded=True,
        returns_weights=True,
    ),
    layer=LayerSpec(
        "GptOssDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
