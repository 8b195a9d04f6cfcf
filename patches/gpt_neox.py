"""GPT-NeoX and Pythia: layer norm, fused q/k/v by head, rotary positions of a part of each head, plain MLP
beside attention or behind it."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="gpt_neox",
    module="transformers.models.gpt_neox.modeling_gpt_neox",
    causal_lm="GPTNeoXForCausalLM",
    base="gpt_neox",
    embedding="embed_in",
    embedding_dropout="emb_dropout",
    rotary="rotary_emb",
    layers="layers",
    final_norm="final_layer_norm",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "GPTNeoXAttention",
        qkv=("query_key_value",),
        by_kv_head=True,
        out="dense",
        head_dim="head_size",
        cache="layer_past",
    ),
    mlp=MLPSpec("GPTNeoXMLP", activation="act", up="dense_h_to_4h", down="dense_4h_to_h"),
    layer=LayerSpec(
        "GPTNeoXLayer",
        attention_norm="input_layernorm",
        attention="attention",
        mlp_norm="post_attention_layernorm",
        mlp="mlp",
        dropouts=("post_attention_dropout", "post_mlp_dropout"),
        parallel="use_parallel_residual",
    ),
)
