"""Cohere's Command R: layer norm without bias, attention beside a gated SiLU MLP, rotary positions of neighboring
elements, a factor on the logits."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="cohere",
    module="transformers.models.cohere.modeling_cohere",
    causal_lm="CohereForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    logits_multiplier="logit_scale",
    norm=NormSpec("CohereLayerNorm", kind="layer", eps="variance_epsilon"),
    attention=AttentionSpec(
        "CohereAttention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        refuse=("use_qk_norm",),
        pairs="neighbors",
    ),
    mlp=MLPSpec("CohereMLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "CohereDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm=None,
        mlp="mlp",
        parallel=True,
    ),
)
