"""Self-test on an untested version of transformers, and of a family that is known only by its structure: a tiny random
twin of the model is patched and compared with stock."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import compat
from ..errors import UnsupportedModelError
from ..options import Options
from ..parity.comparison import compare, different_tokens
from ..parity.draws import different_draws
from ..reasons import REASONS
from ..recording import proof
from ..recording.family import Recorded
from . import passed_twins
from .analyse import analyse
from .apply import apply, claim, keep_recording, undo
from .coverage import check_coverage, unsupported
from .multimodal_twin import cut_inside, multimodal_twin
from .plan import PatchPlan
from .state import PatchState

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
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
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
#: places of a random output of an encoder
_ENCODED = 24
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
#: numbers of layers; ``num_hidden_layers`` may be the encoder's, which transformers takes for its cache
_LAYERS = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
#: lists with an entry for every layer
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
#: layers of the twin at least, and at most if a list of layers is cut
_FEWEST_LAYERS, _MOST_LAYERS = 2, 4
_PROMPT_TOKENS, _NEW_TOKENS = 12, 16


def is_due(plan: PatchPlan) -> bool:
    """Whether a twin is tried before the plan is applied.

    If the code of transformers is none that was tested, a twin is tried if our loop is to run; of a family that is
    known only by its structure, a twin is tried if anything is to be patched; of a recorded model, one is always tried.
    """
    if plan.recorded is not None or (plan.by_structure is not None and plan.patched):
        return True
    return plan.loop_reason is None and _why_untested(plan) is not None


def _why_untested(plan: PatchPlan) -> str | None:
    return compat.why_untested(() if plan.architecture is None else (plan.architecture.module,))


def check(plan: PatchPlan) -> None:
    """Try a twin of the model.

    Raises:
        UnsupportedModelError: the twin does not decode as stock does.
    """
    model = plan.model
    difference, of_logits = run(model, plan.recorded)
    if plan.ranks is not None:
        difference = plan.ranks.agreed(difference)
    if difference is None:
        if plan.recorded is not None:
            plan.recorded.twins_difference = of_logits
        return
    if plan.recorded is not None:
        cause = f"the recorded step of a small {type(model).__name__} does not decode as stock does"
        raise unsupported(cause, REASONS["not_recorded"].remedy, why=difference)
    found = plan.by_structure
    if found is not None:
        why = f"{found.name} has no architecture file and was taken for a {found.like}"
    else:
        why = _why_untested(plan)
    raise UnsupportedModelError(
        f"{why}, and a small {type(model).__name__} does not decode as stock does: {difference}"
    )


def _inside(model: nn.Module) -> list[Any]:
    """Return the configs of the parts of an encoder-decoder, if it has some of their own."""
    return list(compat.configs_inside(model.config).values()) if compat.has_encoder(model) else []


def _twin(model: nn.Module, recorded: Recorded | None) -> nn.Module:
    has_decoder = compat.is_multimodal(model) and compat.text_decoder(model) is not model
    if has_decoder or any(compat.entry_of(each, "num_hidden_layers") is None for each in _inside(model)):
        first = None if recorded is None else recorded.first
        return multimodal_twin(model, twin_config, () if first is None else first.recording(1, 1).readers)
    config = twin_config(model.config)
    if compat.has_encoder(model):
        cut_inside(config, twin_config)
        if compat.token_shape(model):  # a processor of logits asks for an end
            compat.set_entry(config.get_text_config(decoder=True), "eos_token_id", _TWIN["vocab_size"] - 1)
    return type(model)(config)


def twin_config(config):
    """Return ``config`` at the size of the twin, with the same structure, windows and scalings and 97 tokens.

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
            continue  # of attention over a latent, the part of a head that is turned
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
    if small.model_type == "codegen":  # whose projections have four parts
        small.num_attention_heads = 4
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


def run(model: nn.Module, recorded: Recorded | None = None) -> tuple[str | None, float]:
    """Patch a twin of ``model`` and compare it with itself.

    Args:
        recorded: what takes the place of the model's family if its step is recorded.

    Returns:
        What differed, or None if the twin decodes as stock does; and by how much logits of a recorded step differ in
        the model's dtype, see :mod:`..recording.proof`. A twin that has passed is not tried again.
    """
    device = _device(model)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _on_cpu():
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        shape = 1, _PROMPT_TOKENS, *compat.token_shape(model)
        prompt = torch.randint(3, _TWIN["vocab_size"], shape).to(device)
        twin = None
        try:
            twin = _twin(model, recorded).eval()
            compat.set_known_inputs(twin)
            key = passed_twins.key_of(twin, device, dtype)
            if (known := passed_twins.find(key)) is not None:
                return None, known
            torch.set_default_dtype(default)
            difference, of_logits = _difference(twin.to(device), prompt, dtype, recorded)
        except Exception as error:  # nobody has tried this code: anything may be raised
            difference, of_logits = f"{type(error).__name__}: {error}", 0.0
        finally:
            torch.set_default_dtype(default)
        if difference is not None and recorded is not None and twin is not None and not _runs(twin, prompt):
            return None, 0.0  # the config tells of another model than this is; its own first tokens will prove it
    if difference is None:
        passed_twins.keep(key, of_logits, twin)
    else:
        passed_twins.forget()
    return difference, of_logits


def _runs(twin: nn.Module, prompt: torch.Tensor) -> bool:
    """Whether stock code runs a twin that is not patched. A config that was edited since its model was made may be one
    that no model could be made of."""
    try:
        if not compat.has_encoder(twin):
            twin.generate(prompt, max_new_tokens=2)
    except Exception:
        return False
    return True


def _on_cpu() -> AbstractContextManager[Any]:
    """Make new tensors on the CPU for the length of a ``with`` block. If they are made there anyway, nothing is done:
    PyTorch's own context takes a part in each of the twin's 50,000 calls."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu


def _device(model: nn.Module) -> torch.device:
    # the weights of a model on the meta device come later, with load_packed()
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


@passed_twins.hearing()
def _difference(
    twin: nn.Module, prompt: torch.Tensor, dtype: torch.dtype, recorded: Recorded | None
) -> tuple[str | None, float]:
    """Return how a twin decodes otherwise than stock code, or None; and of a recorded one, by how much its logits
    differ in ``dtype``. A twin of a recorded model has to be recorded, too."""
    plan = analyse(twin, Options.parse())
    if recorded is not None and plan.recorded is None:
        known = plan.loop_reason or "a model of its config has other modules than it has"
        return f"{known} ({known.what})" if getattr(known, "what", "") else str(known), 0.0
    check_coverage(plan)
    state = PatchState(plan.options)
    claim(twin, state)
    apply(plan, state)
    keep_recording(plan, state)
    try:
        if plan.recorded is not None:  # its experts and routers may not run in float64, which compare() needs
            encoded = None
            if compat.has_encoder(twin):
                encoded = torch.randn(1, _ENCODED, compat.encoder_width(twin)).to(prompt.device)
            tokens = different_tokens(twin, prompt, _NEW_TOKENS, encoded) or _different_draws(twin, prompt, encoded)
            part = state.plans.part_of(twin.to(dtype)) if tokens is None else None
            return tokens, 0.0 if part is None else proof.difference(part, state.plans)
        result = compare(twin, prompt, _NEW_TOKENS)
        return _different_draws(twin, prompt) if result.ok else str(result), 0.0
    finally:
        undo(state)


def _different_draws(twin: nn.Module, prompt: torch.Tensor, encoded: torch.Tensor | None = None) -> str | None:
    """Return how stock code draws other tokens than ours, or None. Of the tested code that is known."""
    if compat.why_untested(()) is None or compat.token_shape(twin):
        return None
    return different_draws(twin, prompt, encoded)
