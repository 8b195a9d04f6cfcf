"""Falcon: one layer norm for attention and one for a plain MLP beside it, or one for both; fused q/k/v, by head or with
one key and value; rotary positions."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="falcon",
    module="transformers.models.falcon.modeling_falcon",
    causal_lm="FalconForCausalLM",
    base="transformer",
    embedding="word_embeddings",
    rotary="rotary_emb",
    layers="h",
    final_norm="ln_f",
    linear="FalconLinear",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "FalconAttention",
        qkv=("query_key_value",),
        by_kv_head=True,
        repeats_kv="new_decoder_architecture",
        out="dense",
        scaling=None,
        refuse=("config.alibi",),
        cache="layer_past",
    ),
    mlp=MLPSpec("FalconMLP", activation="act", up="dense_h_to_4h", down="dense_4h_to_h"),
    layer=LayerSpec(
        "FalconDecoderLayer",
        attention_norm=("ln_attn", "input_layernorm"),
        attention="self_attention",
        mlp_norm=("ln_mlp", "post_attention_layernorm"),
        mlp="mlp",
        dropouts=("hidden_dropout",),
        parallel="config.parallel_attn",
        returns_weights=True,
    ),
)
