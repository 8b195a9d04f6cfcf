"""The config of a model at the size of the self-test's twin: tables of sizes, by the names that configs have."""

from __future__ import annotations

import copy

from .. import compat

VOCAB_SIZE = 97
#: sizes of the twin, by transformers' names; an attribute that the config does not have is not set. Heads of a
#: recurrence times their size are twice the hidden size, as families check.
_TWIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "num_heads": 4,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "n_mamba_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_headdim": 32,
    "mamba_d_ssm": 128,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    # of encoders, and of decoders that were made for one
    **dict.fromkeys(("d_model", "d_embed", "embed_dim"), 64),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "d_kv": 32,
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "encoder_num_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads"), 2),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads"), 2),
    **{"cross_head_dim": 32, "cross_hidden_size": 64, "cross_attention_hidden_size": 64},
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_layers"), 2),
    "decoder_start_token_id": 0,
}
#: most that further sizes of the twin may be
_AT_MOST = tuple(
    (name, size)
    for size, names in (
        (128, "attention_hidden_size"),
        (64, "attention_head_dim lru_width moe_hidden_size"),
        (48, "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
        (32, "kv_channels"),
        (16, "hidden_size_per_layer_input laurel_rank linear_head_dim linear_key_head_dim linear_value_head_dim"),
        (8, "state_size ssm_state_size mamba_d_state time_step_rank mamba_dt_rank"),
        (4, "linear_num_value_heads n_routed_experts"),
        (2, "n_groups mamba_n_groups mamba_ngroups linear_num_key_heads linear_num_heads n_group"),
        (2, "decoder_sparse_step moe_layer_interval"),
        (1, "topk_group first_k_dense_replace num_dense_layers moe_layer_start_index"),
    )
    for name in names.split()
)
#: sizes that the code of one family asks for: model type -> entries. CodeGen's projections have four parts.
_OF_FAMILIES: dict[str, dict[str, int]] = {"codegen": {"num_attention_heads": 4}}
#: numbers of layers; ``num_hidden_layers`` may be the encoder's, which transformers takes for its cache
_LAYERS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
#: lists with an entry for every layer
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
#: layers of the twin at least, and at most if a list of layers is cut
_FEWEST_LAYERS, _MOST_LAYERS = 2, 4


def twin_config(config):
    """Return ``config`` at the size of the twin, with the same structure, windows and scalings, and few tokens.

    The twin has at least two layers, and one of every kind that the model has (four of them at most, if the config
    lists its layers).
    """
    small = copy.deepcopy(config)
    by_layer = compat.take_layer_entries(small)
    config_before = copy.deepcopy(small)
    kept = _cut_stacks(small) or _cut_layers(small)
    known = vars(small).keys() | getattr(small, "attribute_map", {}).keys()
    entries = [(name, value, None) for name, value in _TWIN.items()]
    entries += [(name, size, size) for name, size in _AT_MOST]
    entries += [(name, len(kept), None) for name in _LAYERS]
    for name, value, most in entries:
        is_derived = isinstance(getattr(type(small), name, None), property)
        if name == "head_dim" and "qk_rope_head_dim" in known:
            continue  # of attention over a latent, the part of a head that is rotated
        if name not in known or is_derived or (old := compat.entry_of(small, name)) is None:
            continue
        if isinstance(old, list) and value is not None:  # a size of each of several parts
            compat.set_entry(small, name, [value] * len(old))
        elif most is None or (isinstance(old, int) and old > most):
            compat.set_entry(small, name, value)
    _fit(small, config_before)
    for entries in by_layer.values():  # sizes of a layer keep their ratio to those of the others
        for name in entries.keys() & _TWIN.keys():
            entries[name] = max(1, getattr(small, name) * entries[name] // getattr(config_before, name))
    compat.put_layer_entries(small, {new: by_layer[old] for new, old in enumerate(kept) if old in by_layer})
    return small


def _fit(small, old) -> None:
    """Change entries that have to go with others, which are small now."""
    for name, value in _OF_FAMILIES.get(small.model_type, {}).items():
        setattr(small, name, value)
    if dense := vars(small).get("mlp_only_layers"):
        small.mlp_only_layers = [layer for layer in dense if layer < 1]
    if rotated := vars(small).get("rotary_dim"):  # of a head
        small.rotary_dim = max(2, rotated * compat.head_dim(small) // compat.head_dim(old))
    if isinstance(vars(small).get("attention_window"), list):  # LED's, for each layer of its encoder
        small.attention_window = [_TWIN["sliding_window"]] * _TWIN["encoder_layers"]


def _cut_stacks(config) -> list[int]:
    """Leave one layer in each stack if the config's layers are stacks that run several times; return the layers."""
    if not (height := vars(config).get("num_layers_per_stack")):
        return []
    config.num_layers_per_stack = 1
    return list(range(config.num_hidden_layers // height))


def _cut_layers(config) -> list[int]:
    """Cut the lists with an entry for every layer to one layer of each kind; return the layers that stay."""
    lists = {name: vars(config)[name] for name in _BY_LAYER if vars(config).get(name)}
    if not lists:
        kinds = compat.layer_kinds(config) or []
        return list(range(max([_FEWEST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)])))
    rows = list(zip(*lists.values()))
    shared = vars(config).get("num_kv_shared_layers") or 0  # the last layers, which read what others have cached
    own = len(rows) - shared
    firsts = [place for place, row in enumerate(rows[:own]) if rows.index(row) == place][:_MOST_LAYERS]
    firsts += [place for place in range(own, len(rows)) if rows.index(rows[place], own) == place]
    # Zamba's hybrid layers share weights, which takes two of them
    hybrid = [place for place, row in enumerate(rows) if "hybrid" in row and place not in firsts]
    firsts += hybrid[:1]
    others = [place for place in range(own) if place not in firsts]
    kept = sorted(firsts + others[: max(0, _FEWEST_LAYERS - len(firsts))]) if len(rows) > 1 else [0, 0]
    alike = (name for name, value in vars(config).items() if isinstance(value, list) and len(value) == len(rows))
    for name in {*lists, *alike}:
        setattr(config, name, [vars(config)[name][place] for place in kept])
    if shared:
        config.num_kv_shared_layers = sum(place >= own for place in kept)
    if vars(config).get("hybrid_layer_ids"):  # Zamba 2's
        config.hybrid_layer_ids = [place for place, old in enumerate(kept) if "hybrid" in rows[old]]
    return kept
