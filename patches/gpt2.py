"""GPT-2: layer norm, fused Conv1D projections with bias, plain GELU MLP, learned positions, tied head."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="gpt2",
    module="transformers.models.gpt2.modeling_gpt2",
    causal_lm="GPT2LMHeadModel",
    base="transformer",
    embedding="wte",
    position_embedding="wpe",
    embedding_dropout="drop",
    layers="h",
    final_norm="ln_f",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "GPT2Attention",
        qkv=("c_attn",),
        out="c_proj",
        attention_dropout="attn_dropout",
        refuse=("reorder_and_upcast_attn",),
        residual_dropout="resid_dropout",
    ),
    mlp=MLPSpec("GPT2MLP", activation="act", up="c_fc", down="c_proj", dropout="dropout"),
    layer=LayerSpec(
        "GPT2Block",
        attention_norm="ln_1",
        attention="attn",
        mlp_norm="ln_2",
        mlp="mlp",
        refuse=("crossattention",),
    ),
)
