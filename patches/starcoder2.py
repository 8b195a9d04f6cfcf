"""StarCoder2: layer norm, separate q/k/v with bias, rotary positions, sliding window, plain MLP."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="starcoder2",
    module="transformers.models.starcoder2.modeling_starcoder2",
    causal_lm="Starcoder2ForCausalLM",
    base="model",
    embedding="embed_tokens",
    embedding_dropout="embedding_dropout",
    rotary="rotary_emb",
    layers="layers",
    final_norm="norm",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "Starcoder2Attention",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        residual_dropout="residual_dropout",
    ),
    mlp=MLPSpec("Starcoder2MLP", activation="act", up="c_fc", down="c_proj", dropout="residual_dropout"),
    layer=LayerSpec(
        "Starcoder2DecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
    ),
)
