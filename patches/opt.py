"""OPT: layer norm, separate q/k/v with bias, learned positions that start at 2, plain ReLU MLP, tied head."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="opt",
    module="transformers.models.opt.modeling_opt",
    causal_lm="OPTForCausalLM",
    base="model.decoder",
    embedding="embed_tokens",
    embedding_dropout="layerdrop",
    position_embedding="embed_positions",
    position_offset="offset",
    layers="layers",
    final_norm="final_layer_norm",
    refuse=("project_in", "project_out"),
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec(
        "OPTAttention", qkv=("q_proj", "k_proj", "v_proj"), out="out_proj", attention_dropout="dropout"
    ),
    mlp=MLPSpec(None, activation="activation_fn", up="fc1", down="fc2"),
    layer=LayerSpec(
        "OPTDecoderLayer",
        attention_norm="self_attn_layer_norm",
        attention="self_attn",
        mlp_norm="final_layer_norm",
        mlp=None,
        require=("do_layer_norm_before",),
        dropouts=("dropout",),
    ),
)
