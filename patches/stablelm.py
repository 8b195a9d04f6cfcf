"""StableLM: layer norm, separate q/k/v, rotary positions of a part of each head, gated SiLU MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="stablelm",
    module="transformers.models.stablelm.modeling_stablelm",
    causal_lm="StableLmForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "StableLmAttention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj", refuse=("qk_layernorm",)
    ),
    mlp=MLPSpec("StableLmMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "StableLmDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        dropouts=("dropout",),
        parallel="use_parallel_residual",
    ),
)
