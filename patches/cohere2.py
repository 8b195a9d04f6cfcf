"""Cohere's Command R7B and Command A: like Cohere, and the layers that rotate have windows."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="cohere2",
    module="transformers.models.cohere2.modeling_cohere2",
    causal_lm="Cohere2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    logits_multiplier="logit_scale",
    norm=NormSpec("Cohere2LayerNorm", kind="layer", eps="variance_epsilon"),
    attention=AttentionSpec(
        "Cohere2Attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        rotates="sliding_window",
        pairs="neighbors",
    ),
    mlp=MLPSpec("Cohere2MLP", activation="act_fn", gate="gate_proj", up="up_proj", down="down_proj"),
    layer=LayerSpec(
        "Cohere2DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm=None,
        mlp="mlp",
        parallel=True,
    ),
)
