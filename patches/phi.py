"""Phi: layer norm, attention beside a plain MLP, every bias, rotary positions of a part of each head."""

from hf_fastpath.architecture import Architecture, AttentionSpec, LayerSpec, MLPSpec, NormSpec

ARCHITECTURE = Architecture(
    name="phi",
    module="transformers.models.phi.modeling_phi",
    causal_lm="PhiForCausalLM",
    base="model",
    embedding="embed_tokens",
    embedding_dropout="embed_dropout",
    rotary="rotary_emb",
    layers="layers",
    final_norm="final_layernorm",
    norm=NormSpec("LayerNorm", kind="layer", eps="eps"),
    attention=AttentionSpec("PhiAttention", qkv=("q_proj", "k_proj", "v_proj"), out="dense", refuse=("qk_layernorm",)),
    mlp=MLPSpec("PhiMLP", activation="activation_fn", up="fc1", down="fc2"),
    layer=LayerSpec(
        "PhiDecoderLayer",
        attention_norm="input_layernorm",
        attention="self_attn",
        mlp_norm=None,
        mlp="mlp",
        dropouts=("resid_dropout",),
        parallel=True,
    ),
)
