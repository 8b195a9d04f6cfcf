"""Mixtral: like Mistral, with a mixture of gated SiLU MLPs whose weights sum to one."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MoESpec, NormSpec

ARCHITECTURE = Architecture(
    name="mixtral",
    module="transformers.models.mixtral.modeling_mixtral",
    causal_lm="MixtralForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("MixtralRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec("MixtralAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"),
    mlp=MoESpec(
        "MixtralSparseMoeBlock",
        router="gate",
        router_class="MixtralTopKRouter",
        experts="experts",
        experts_class="MixtralExperts",
        activation="act_fn",
        jitter="jitter_noise",
    ),
    layer=LayerSpec(
        "MixtralDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
