"""Qwen3 MoE: like Qwen3, with a mixture of gated SiLU MLPs in all or some of the layers."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec

ARCHITECTURE = Architecture(
    name="qwen3_moe",
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("Qwen3MoeRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "Qwen3MoeAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", head_norms=("q_norm", "k_norm")
    ),
    mlp=MoESpec(
        "Qwen3MoeSparseMoeBlock",
        router="gate",
        router_class="Qwen3MoeTopKRouter",
        experts="experts",
        experts_class="Qwen3MoeExperts",
        activation="act_fn",
        normalized="norm_topk_prob",
        rounded=True,
        dense=MLPSpec("Qwen3MoeMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    layer=LayerSpec(
        "Qwen3MoeDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
