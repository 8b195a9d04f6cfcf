"""A small random model of every causal-LM type of the installed transformers.

No list of types is kept here. A type's config class says which entries the type has: entries whose names mean a size
are cut down (:data:`_SIZES`), lists with an entry for each layer are cut to the layers at which they say something new,
and :data:`_TYPES` holds what a type needs besides.

``python tests/causal_lm_types.py [type ...]`` builds types (all types if none is named), lets stock transformers
generate, and prints a row for each.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_timm_available

from hf_fastpath.compat import generating_model

VOCAB = 160
# Wide enough that attention matters to the result; at transformers' 0.02 the embeddings decide nearly alone.
_SPREAD = 0.15
#: standard deviation of what the embeddings give
_EMBEDDING = 0.6
#: least and largest number of layers of a model
_MIN_LAYERS, _MAX_LAYERS = 2, 4
#: most parameters of a small model; the bound shows if a new release calls a size by a name not known here
_MOST_PARAMETERS = 3_000_000
#: name of a config entry -> value that it is cut to, if it is greater
_SIZES = {
    name: size
    for size, names in (
        (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (VOCAB, "pronunciation_vocab_size shape_vocab_size audio_vocab_size encoder_hash_byte_group_vocab"),
        (VOCAB, "ngram_vocab_size_base"),
        (256, "max_position_embeddings max_seq_len max_target_positions context_length model_max_length n_ctx"),
        (256, "n_positions"),
        (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner dff dim_ff"),
        (96, "d_ff feed_forward_size dense_intermediate_size intermediate_size_mlp mlp_dim"),
        (64, "hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size embedding_dim lru_width"),
        (64, "hidden_size_global pronunciation_embed_dim shape_embed_dim ple_embed_dim input_size"),
        (64, "original_max_position_embeddings backbone_hidden_size out_hidden_size router_hidden_size"),
        (64, "adapter_in_dim adapter_input_size adapter_out_dim nemo_conv_channels"),
        (64, "depthwise_separable_out_channel ext_pw_out_channel"),
        (48, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"),
        (48, "shared_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size"),
        (48, "input_embedding_size output_embedding_size"),
        (32, "kv_lora_rank q_lora_rank o_lora_rank"),
        (16, "head_dim d_head d_kv dim_head kv_channels v_head_dim swa_head_dim attention_head_size"),
        (16, "index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head"),
        (16, "mamba_head_dim mamba_headdim hidden_size_per_layer_input laurel_rank loop_gate_rank"),
        (16, "adapter_rank gated_norm_rank hc_lowrank index_n_heads qk_nope_head_dim query_pre_attn_scalar"),
        (8, "qk_rope_head_dim d_rel rotary_dim ssm_state_size state_size mamba_d_state time_step_rank"),
        (8, "mamba_dt_rank sliding_window sliding_window_size window_size attention_window_size"),
        (8, "local_attention attention_chunk_size local_attention_window_len keep_window_size rel_extent"),
        (8, "chunk_size mamba_chunk_size block_size mem_len mamba_n_heads mamba_num_heads"),
        (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
        (4, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
        (4, "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts"),
        (4, "linear_num_heads linear_num_value_heads index_topk hc_mult hc_count"),
        (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k n_group"),
        (2, "num_expert_group n_groups encoder_layers decoder_layers num_encoder_layers num_decoder_layers"),
        (2, "num_layers depth num_blocks zero_expert_num"),
        (1, "n_shared_experts topk_group first_k_dense_replace num_dense_layers max_window_layers"),
        (1, "num_nextn_predict_layers"),
    )
    for name in names.split()
}
#: entries that list layers by their numbers
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "cross_attention_layers", "full_attn_idxs", "hybrid_layer_ids")
_WINDOWS = ["sliding_attention", "full_attention"]
_CONVOLUTIONS = dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
_ROTATION = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_INDEXER = dict(indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4)
_SHARING = dict(num_hidden_layers=4, layer_types=2 * _WINDOWS, num_kv_shared_layers=2)
_GEMMA3N = _SHARING | dict(intermediate_size=[96] * 4, activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0])
_GEMMA4 = dict(global_head_dim=32)  # head_dim of the layers without a window
_DRAFTS = dict(num_hidden_layers=2, layer_types=_WINDOWS, num_kv_shared_layers=2)
_DRAFTS |= _GEMMA4 | dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
_DOTS3 = dict(swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=32, swa_kv_lora_rank=32)
_DOTS3 |= dict(swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=16)
#: entries that a type is given besides: layers of every kind if the defaults have one kind only, values that the class
#: checks against other entries, and values that the class needs but has no default for. Entries of a nested config are
#: under the config's name; "default" holds the arguments that the class needs to be made at all.
_TYPES: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(num_hidden_layers=2),  # the cache of this type reads the entry
    "cohere_compass_text": dict(layer_types=_WINDOWS, rope_parameters=dict.fromkeys(_WINDOWS, _ROTATION)),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, clip_qkv=8.0)),
    "dory": dict(num_hidden_layers=4, layer_types=2 * _WINDOWS, n_input_layers=1, n_output_layers=1),
    "dots3_note": dict(text_config=_DOTS3),
    "dots3_note_text": _DOTS3,
    "falcon_h1": dict(mamba_d_ssm=128, mamba_d_head=16),
    "gemma3n": dict(
        text_config=_GEMMA3N,
        vision_config=dict(architecture="test_efficientnet", hidden_size=256),
        vision_soft_tokens_per_image=4,
    ),
    "gemma3n_text": _GEMMA3N,
    "gemma4": dict(text_config=_GEMMA4),
    "gemma4_assistant": dict(default=dict(text_config=_DRAFTS), text_config=_GEMMA4),
    "gemma4_text": _GEMMA4,
    "gemma4_unified": dict(text_config=_GEMMA4),
    "gemma4_unified_assistant": dict(text_config=_DRAFTS),
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "hrm_text": dict(num_layers_per_stack=1, num_hidden_layers=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "laguna": dict(layer_types=_WINDOWS),
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "longcat_flash": dict(head_dim=8),
    "mamba2": dict(num_heads=8),
    "mellum": dict(layer_types=_WINDOWS),
    "mimo_v2_flash": dict(head_dim=24),  # of queries and keys; values have another size
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"], index_block_size=4, index_topk_blocks=2
    ),
    "ministral": dict(layer_types=_WINDOWS),
    "qwen2": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen4_exp": dict(text_config=_INDEXER),
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(
        attn_layers=["local", "lsh"], axial_pos_shape=(16, 16), axial_pos_embds_dim=(16, 48), axial_norm_std=0.1
    ),
    "xlm": dict(mask_token_id=2),  # generate() appends this token; the default is the token of padding
    "xlstm": dict(hidden_size=128, embedding_dim=128, chunk_size=64),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(attention_hidden_size=128, attention_head_dim=32, num_hidden_layers=4)
    | dict(layers_block_type=2 * ["linear_attention", "hybrid"]),
    "zaya": dict(num_hidden_layers=4, layer_types=2 * ["hybrid", "hybrid_sliding"], sliding_window=8),
}
#: entries that are needed, although a class may leave them None
_FILLED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
#: entries that are set in every type that has them
_COMMON = dict(
    bos_token_id=1, eos_token_id=None, pad_token_id=0, forced_eos_token_id=None, is_decoder=True, use_cache=True
)
_NO_TARGET = "it drafts for another model, whose keys and values it has to be given"
_NO_DECODER = "AutoModelForCausalLM hands the whole config to its class, which takes the decoder's"
#: types that no small config makes generate -> why
_BROKEN = {
    "gemma4_assistant": _NO_TARGET,
    "gemma4_unified_assistant": _NO_TARGET,
    "musicgen": _NO_DECODER,
    "musicgen_melody": _NO_DECODER,
}
if not is_timm_available():
    _BROKEN["gemma3n"] = "its vision tower needs the package timm"
#: cache layers that hold keys and values only; the layer of a dummy reads those of a layer below or has no attention
_KEYS_VALUES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
#: cache layers with states of recurrences and convolutions
_STATES = {
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}


def types() -> tuple[str, ...]:
    """Return the causal-LM types of the installed transformers."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _layers(config: PreTrainedConfig) -> tuple[list[str], list[int]]:
    """Return the entries with a value for each layer, and the layers that are kept: those with new values."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return [], []
    listed = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
    by_layer = {name: value for name, value in listed.items() if len(value) == count and name not in _LAYER_NUMBERS}
    rows = list(zip(*by_layer.values())) or [()] * count
    members = [tuple(layer in listed.get(name, ()) for name in _LAYER_NUMBERS) for layer in range(count)]
    rows = [str(row) for row in zip(rows, members)]
    kept = [layer for layer, row in enumerate(rows) if row not in rows[:layer]][:_MAX_LAYERS]
    others = [layer for layer in range(count) if layer not in kept]
    return list(by_layer), sorted(kept + others[: max(0, _MIN_LAYERS - len(kept))])


def small(config: PreTrainedConfig, extra: dict[str, Any]) -> PreTrainedConfig:
    """Make a config of ``config``'s class with small entries and the entries of ``extra``."""
    fields = type(config).__dataclass_fields__
    by_layer, kept = _layers(config)
    own_name = getattr(config, "attribute_map", {})
    changes: dict[str, Any] = {}
    for name, field in fields.items():
        value = vars(config).get(own_name.get(name, name))  # entries that differ by layer are no attributes
        if isinstance(value, PreTrainedConfig):
            changes[name] = small(value, extra.get(name, {}))
        elif name in by_layer:
            changes[name] = [_cut(name, value[layer]) for layer in kept]
        elif name in _LAYER_NUMBERS and value is not None:
            changes[name] = [new for new, layer in enumerate(kept) if layer in value]
        elif name == own_name.get("num_hidden_layers", "num_hidden_layers") and kept:
            changes[name] = len(kept)
        elif isinstance(value, int) and not isinstance(value, bool) and (name in _SIZES or field.default is not None):
            changes[name] = _cut(name, value)  # entries that the class derives keep None
        elif name in ("initializer_range", "init_std"):
            changes[name] = _SPREAD
        elif value is None and name in _FILLED:
            changes[name] = _SIZES[name]
        elif name == "rope_parameters":
            changes[name] = value
    changes |= {name: value for name, value in _COMMON.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:  # every head reads a part of the one latent
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    nested = {name for name in extra if isinstance(changes.get(name), PreTrainedConfig)}
    return type(config)(**changes | {name: value for name, value in extra.items() if name not in nested})


def _cut(name: str, value: Any) -> Any:
    """Return the entry's value, cut to the size that its name has in :data:`_SIZES`."""
    size = _SIZES.get(name)
    return min(size, value) if size is not None and isinstance(value, int) else value


def small_config(model_type: str) -> PreTrainedConfig:
    """Make a small config of a type.

    Args:
        model_type: one of :func:`types`.
    """
    extra = dict(_TYPES.get(model_type, {}))
    return small(CONFIG_MAPPING[model_type](**extra.pop("default", {})), extra)


def small_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Make a random float32 model of a type on the CPU, in eval mode, without an end-of-sequence token.

    Args:
        model_type: one of :func:`types`.
        seed: seed of the weights.

    Raises:
        ValueError: the model is not small. What the config or the class raises is not caught.
    """
    return random_model(small_config(model_type), AutoModelForCausalLM, seed)


def extra_of(model_type: str) -> dict[str, Any]:
    """Return the entries that a type is given besides."""
    return dict(_TYPES.get(model_type, {}))


def random_model(
    config: PreTrainedConfig, factory: Any, seed: int = 0, most_parameters: int = _MOST_PARAMETERS
) -> PreTrainedModel:
    """Make a random model of a config by a factory of transformers, as :func:`small_model` does.

    Raises:
        ValueError: it has more than ``most_parameters``.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with torch.device("meta"):
            parameters = factory.from_config(config, dtype=torch.float32).num_parameters()
        if parameters > most_parameters:
            raise ValueError(
                f"a small {config.model_type} has {parameters} parameters, of at most {most_parameters}; "
                f"an entry of its config that means a size is missing in _SIZES or _TYPES: {config}"
            )
        torch.manual_seed(seed)
        model = factory.from_config(config, dtype=torch.float32).eval()
        kept = model.state_dict().keys()
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name in kept and buffer.dim() == 1]
        for name, tensor in [*model.named_parameters(), *biases]:  # routers keep biases in buffers
            _vary(name, tensor)
        embeddings = None
        with suppress(NotImplementedError):  # Dia has several
            embeddings = generating_model(model).get_input_embeddings()
        if isinstance(embeddings, nn.Embedding):  # some embeddings scale their rows
            embeddings.weight.mul_(_EMBEDDING / embeddings(torch.arange(1, VOCAB)).std())
    return model


def _vary(name: str, tensor: torch.Tensor) -> None:
    """Vary a weight that is constant or too narrow to matter, so that a step that leaves the weight out is noticed.

    Signs of the norms' weights are random as well: else a head tied to the embeddings would give the last token again.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    start = float(tensor.flatten()[0])
    constant = bool((tensor == start).all())
    if tensor.dim() == 1 or constant:
        tensor.add_(_SPREAD * torch.randn_like(tensor))
    elif tensor.std() < _SPREAD / 2:
        tensor.normal_(std=_SPREAD)
    if name.endswith("weight") and constant and start in (0.0, 1.0):  # Gemma's norms add one
        tensor.add_(1 - start).mul_(torch.randn_like(tensor).sign()).sub_(1 - start)


def kind(of: PreTrainedConfig | PreTrainedModel) -> str:
    """Return which kind of cache a type has.

    Returns:
        "keys_values": keys and values of attention over all tokens or a window, and nothing else;
        "chunked": keys and values of attention over chunks;
        "latent": keys and values of MLA, which transformers' cache keeps expanded, with or without an indexer;
        "states": states of recurrences, convolutions or linear attention, in some layers or all;
        "own": cache layers of a class that the model brings, or several caches;
        "none": no ``Cache``; all tokens are run each time, or the model keeps states in its own way;
        "encoder": no cache, because tokens see those behind them;
        "broken: <reason>": stock transformers does not generate.
    """
    config = of.config if isinstance(of, PreTrainedModel) else of
    cls = type(of) if isinstance(of, PreTrainedModel) else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.model_type in _BROKEN:
        return f"broken: {_BROKEN[config.model_type]}"
    if getattr(config, "causal", True) is False:
        return "encoder"
    decoder = config.get_text_config(decoder=True)
    layers = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    if hasattr(config, "patcher_config") or layers - _KEYS_VALUES - _STATES - {"DynamicIndexedLayer"}:
        return "own"
    if layers & _STATES or getattr(cls, "_is_stateful", False):
        return "states"
    if getattr(decoder, "kv_lora_rank", None) is not None:
        return "latent"
    if not {"cache", "past_key_values"} & set(inspect.signature(cls.forward).parameters):
        return "none"
    if "DynamicIndexedLayer" in layers:
        return "own"
    return "chunked" if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()) else "keys_values"


# --- the script


class Row(NamedTuple):
    """The result for one type.

    Attributes:
        cls, kind, parameters: class, kind of cache and number of parameters of the model.
        seconds: time that building the model took.
        said: "ok" with what is odd in stock code, or what went wrong.
    """

    model_type: str
    cls: str = "-"
    kind: str = "broken"
    parameters: int = 0
    seconds: float = 0.0
    said: str = "ok"


def prompt(batch: int, length: int, seed: int) -> torch.Tensor:
    """Return [batch, length] random token ids."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: torch.Tensor, padding: int = 0, **options: Any) -> torch.Tensor:
    """Return [batch, 12] tokens that stock adds greedily; the first ``padding`` tokens of the last row are masked."""
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    tokens = model.generate(ids * mask, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)
    return tokens[:, ids.shape[1] :]


def said(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def tried(model_type: str) -> Row:
    """Build a type and let it generate: two prompts, one of them without a cache, and both in a padded batch."""
    row, start = Row(model_type), time.perf_counter()
    try:
        model = small_model(model_type)
        row = Row(model_type, type(model).__name__, kind(model), sum(each.numel() for each in model.parameters()))
        row = row._replace(seconds=time.perf_counter() - start)
        long, short = prompt(1, 9, seed=1), prompt(1, 5, seed=2)
        one, other = generate(model, long), generate(model, short)
        both = generate(model, torch.cat([long, nn.functional.pad(short, (4, 0))]), padding=4)
        again = generate(model, long, use_cache=False)
    except Exception as error:  # any type of a new release may fail in any way, and the row says how
        return row._replace(kind="broken", said=said(error))
    wrong = {
        f"{one.shape[1]} and {other.shape[1]} tokens instead of 12": not one.shape == other.shape == (1, 12),
        f"prompts do not matter: {one.tolist()}": torch.equal(one, other),
        f"always the same tokens: {one.tolist()}, {other.tolist()}": len(torch.cat([one, other]).unique()) < 4,
    }
    odd = {"padding": not torch.equal(both[1:], other), "a batch": not torch.equal(both[:1], one)}
    odd["a cache"] = not torch.equal(again, one)
    notes = [f"{name} changes the tokens" for name, happened in odd.items() if happened]
    return row._replace(said="; ".join([name for name, happened in wrong.items() if happened] or ["ok", *notes]))


def main() -> None:
    """Print the table and its totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=types(), help="all, if none is named")
    rows = []
    for model_type in parser.parse_args().types:
        rows.append(row := tried(model_type))
        reason = f" ({_BROKEN[model_type]})" if model_type in _BROKEN else ""
        name, cls, of_kind, parameters, seconds, text = row
        print(f"{name:26} {cls:38} {of_kind:12.12} {parameters:8} {seconds:5.2f} {text}{reason}", flush=True)
    good = [row for row in rows if row.said.startswith("ok")]
    counts = ", ".join(f"{count} {name}" for name, count in Counter(row.kind for row in rows).most_common())
    seconds = sum(row.seconds for row in rows)
    print(f"{len(rows)} types ({counts}), {len(good)} build and generate, {seconds:.1f} s to build")


if __name__ == "__main__":
    main()
