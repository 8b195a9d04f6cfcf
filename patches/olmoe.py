"""OLMoE: like Llama, with norms over all heads' queries and keys, and a mixture of gated SiLU MLPs."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MoESpec, NormSpec

ARCHITECTURE = Architecture(
    name="olmoe",
    module="transformers.models.olmoe.modeling_olmoe",
    causal_lm="OlmoeForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("OlmoeRMSNorm", kind="rms", eps="variance_epsilon"),
    attention=AttentionSpec(
        "OlmoeAttention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        refuse=("config.clip_qkv",),
        head_norms=("q_norm", "k_norm"),
    ),
    mlp=MoESpec(
        "OlmoeSparseMoeBlock",
        router="gate",
        router_class="OlmoeTopKRouter",
        experts="experts",
        experts_class="OlmoeExperts",
        activation="act_fn",
        normalized="norm_topk_prob",
        rounded=True,
    ),
    layer=LayerSpec(
        "OlmoeDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
