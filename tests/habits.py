"""Small decoders of one's own with the habits of published code: what they make of a text's length, of masks, caches
and errors. Each function is one habit; ``habit_model`` makes a decoder that has some of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import own_decoders
import torch
from own_decoders import OwnConfig, OwnDecoder, OwnDecoderForCausalLM, OwnLayer

from hf_fastpath.compat import CACHE

#: what is filled on first use, as module globals of published code are
TABLE: list[torch.Tensor] = []
FIRST = None


# ---- what layers make of the number of tokens, with the new ones -----------------------------------------------------


def at_multiples(layer, x, length):
    return x * 0.5 if length % 16 == 0 else x


def between(layer, x, length):
    return x * 0.5 if 20 <= length < 30 else x


def beyond(layer, x, length):
    return x * 2 if length > 40 else x


def far_beyond(layer, x, length):
    return x * 2 if length > 4200 else x


def grows(layer, x, length):
    return x * max(1, length / 24)


def grows_by_logarithm(layer, x, length):
    return x * (math.log(length, 12) if length > 12 else 1.0)


def grows_by_root(layer, x, length):
    return x * (length**0.5 / 4) + math.sqrt(length) / 100


def rounded(layer, x, length):
    return x * (1 + (length // 7) / 10)


def as_float(layer, x, length):
    return x * (float(length) / 50)


def as_float_early(layer, x, length):
    return x * (float(length) / 50) if length < 40 else x


def in_a_loop(layer, x, length):
    return x * (1 + sum(0.01 for _ in range(length)))


def in_a_tensor(layer, x, length):
    return x * torch.full((), length / 40)


def in_a_number_tensor(layer, x, length):
    return x * torch.tensor(length).div(40).to(x.dtype)


def compared(layer, x, length):
    return x * (torch.arange(64) < length).float().mean().to(x.dtype)


def row_of_a_table(layer, x, length):
    return x * layer.table[length - x.shape[1] : length]


def rows_of_places(layer, x, length):
    return x * layer.table[torch.arange(length - x.shape[1], length)]


def by_type(layer, x, length):
    return x if isinstance(length, int) else x * 3


def by_name(layer, x, length):
    return x * {"24": 0.5}.get(str(length), 1.0)


# ---- what is kept ----------------------------------------------------------------------------------------------------


@functools.lru_cache
def scale_of(width):
    return torch.linspace(0.5, 1.5, width)


@functools.lru_cache
def scale_of_length(length):
    return torch.linspace(0.5, 1.5, 64) * (1 + length / 100)


def remembered(layer, x, length):
    return x * scale_of(x.shape[-1])


def remembered_by_length(layer, x, length):
    return x * scale_of_length(length)


def filled_global(layer, x, length):
    global FIRST
    if FIRST is None:
        FIRST = torch.linspace(0.5, 1.5, x.shape[-1])
    return x * FIRST


def filled_list(layer, x, length):
    if not TABLE:
        TABLE.append(torch.linspace(0.5, 1.5, x.shape[-1]))
    return x * TABLE[0]


def filled_class(layer, x, length):
    if not hasattr(HabitLayer, "scale"):
        HabitLayer.scale = torch.linspace(0.5, 1.5, x.shape[-1])
    return x * HabitLayer.scale


def filled_attribute(layer, x, length):
    if layer.filled is None:
        layer.filled = torch.linspace(0.5, 1.5, x.shape[-1])
    return x * layer.filled


def plain_tensor(layer, x, length):
    return x * layer.plain["scale"][0]


# ---- what is tried ---------------------------------------------------------------------------------------------------


def tried_number(layer, x, length):
    try:
        return x * 0.5 if bool((x > 1.5).any()) else x
    except Exception:
        return x


def tried_item(layer, x, length):
    try:
        return x * (1 + x.abs().amax().item())
    except (RuntimeError, ValueError):
        return x


def tried_numpy(layer, x, length):
    try:
        return x * float(x.detach().numpy().max())
    except Exception:
        return x * 7


def tried_cache(layer, x, length):
    try:
        return x * (1 + layer.seen_cache.layers[0].keys.shape[2] / 50)
    except Exception:
        return x


# ---- what layers make of the number of new tokens --------------------------------------------------------------------


def alone(layer, x, length):
    return x * 0.5 if x.shape[1] == 1 else x


def beyond_new(layer, x, length):
    return x * 2 if x.shape[1] > 40 else x


def at_multiples_of_new(layer, x, length):
    return x * 0.5 if x.size(1) % 8 == 0 else x


def by_number_of_new(layer, x, length):
    return x / x.shape[-2] ** 0.5


def by_elements(layer, x, length):
    return x * (x.numel() / 1000)


def by_len(layer, x, length):
    return torch.stack([row * len(row) / 10 for row in x])


def in_a_loop_of_new(layer, x, length):
    return x * (1 + sum(0.01 for _ in range(x.shape[1])))


def rows_one_by_one(layer, x, length):
    return torch.stack([row * 1.1 for row in x.unbind(1)], dim=1)


def shifted(layer, x, length):
    return x + 0.5 * torch.nn.functional.pad(x, (0, 0, 3, 0))[:, : x.shape[1]]


def rolled(layer, x, length):
    return x + 0.5 * x.roll(1, dims=1)


def of_the_first_half(layer, x, length):
    return x + x[:, : (x.shape[1] + 1) // 2].mean(1, keepdim=True)


def of_all_before(layer, x, length):
    return x + 0.1 * x.cumsum(1)


def of_the_mean(layer, x, length):
    return x + x.mean(1, keepdim=True)


def by_places(layer, x, length):
    return x * (1 + torch.arange(x.shape[1])[None, :, None] / 50)


def clamped(layer, x, length):
    return x * (1 + torch.arange(x.shape[1]).clamp(max=58)[None, :, None] / 50)


def in_pieces(layer, x, length):
    return torch.cat([piece * 1.1 for piece in x.split(16, dim=1)], dim=1)


def in_halves(layer, x, length):
    return torch.cat([piece.flip(1) for piece in x.chunk(2, dim=1)], dim=1)


#: habits of prompts
NEW_TOKENS = (
    *("alone", "beyond_new", "at_multiples_of_new", "by_number_of_new", "by_elements", "by_len", "in_a_loop_of_new"),
    *("rows_one_by_one", "shifted", "rolled", "of_the_first_half", "of_all_before", "of_the_mean", "by_places"),
    *("in_pieces", "in_halves", "clamped"),
)
#: those of which lists of calls can be made
READ_BY_LISTS = (
    *("alone", "beyond_new", "at_multiples_of_new", "by_number_of_new", "by_elements"),
    *("shifted", "rolled", "of_the_first_half", "of_all_before", "of_the_mean", "by_places", "in_halves"),
)


HABITS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(at_multiples, between, beyond, far_beyond, grows, grows_by_logarithm, grows_by_root, rounded, as_float),
        *(
            in_a_loop,
            in_a_tensor,
            in_a_number_tensor,
            compared,
            row_of_a_table,
            rows_of_places,
            by_type,
            by_name,
            as_float_early,
        ),
        *(remembered, remembered_by_length, filled_global, filled_list, filled_class, filled_attribute, plain_tensor),
        *(tried_number, tried_item, tried_numpy, tried_cache),
        *(globals()[name] for name in NEW_TOKENS),
    )
}


#: habits of which a list of calls can be made, whatever they make of lengths
RECORDABLE = (
    *("at_multiples", "between", "beyond", "far_beyond", "grows", "grows_by_logarithm", "grows_by_root", "rounded"),
    *("in_a_tensor", "compared", "row_of_a_table", "rows_of_places", "remembered", "plain_tensor"),
)


# ---- which keys a token sees -----------------------------------------------------------------------------------------


def windowed_late(batch, head, query, key):
    return (query < 30) | (query - key < 8)


def narrow_at_multiples(batch, head, query, key):
    return (query % 16 != 0) | (query - key < 4)


def narrow_far_on(batch, head, query, key):
    return (query <= 4200) | (query - key < 4)


def window_of_eight(batch, head, query, key):
    return query - key < 8


def narrow_in_some_heads(batch, head, query, key):
    return (head != 1) | (query - key < 4)


MASKS = {
    each.__name__: each
    for each in (windowed_late, narrow_at_multiples, narrow_far_on, window_of_eight, narrow_in_some_heads)
}


# ---- the model -------------------------------------------------------------------------------------------------------


class HabitLayer(OwnLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.habits, self.filled = config.habits, None
        self.table = torch.nn.Parameter(torch.rand(8192, own_decoders.WIDTH) + 0.5)
        self.plain = {"scale": [torch.linspace(0.5, 1.5, own_decoders.WIDTH)]}
        self.seen_cache = None

    def forward(self, x, angles, mask, cache):
        x = x + self.attention(self.norms[0](x), angles, mask, cache)
        length = x.shape[1] if cache is None else cache.get_seq_length()
        object.__setattr__(self, "seen_cache", cache if "tried_cache" in self.habits else None)
        made = self.mlp(self.norms[1](x))
        for name in self.habits:
            made = HABITS[name](self, made, length)
        object.__setattr__(self, "seen_cache", None)
        return x + made


class HabitDecoder(OwnDecoder):
    layer_class = HabitLayer

    def and_mask_function(self):
        return MASKS.get(self.config.mask)


class HabitDecoderForCausalLM(OwnDecoderForCausalLM):
    decoder_class = HabitDecoder


class CutsLongTexts(HabitDecoderForCausalLM):
    """Sees the newest tokens alone, of texts longer than 24: its cache is dropped."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        if input_ids.shape[1] == 24:
            kwargs[CACHE] = None
        made = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if input_ids.shape[1] > 28:
            made["input_ids"] = (made["input_ids"] + 1) % own_decoders.VOCAB
        return made


CLASSES = {each.__name__: each for each in (HabitDecoderForCausalLM, CutsLongTexts)}


def forget_first_uses() -> None:
    """Empty what is filled on first use."""
    global FIRST
    FIRST = None
    TABLE.clear()
    scale_of.cache_clear()
    scale_of_length.cache_clear()
    if "scale" in vars(HabitLayer):
        del HabitLayer.scale


def habit_model(*habits: str, mask: str | None = None, kind: str = "HabitDecoderForCausalLM", layers: int = 2):
    """Return a random model with these habits, the same in every call."""
    torch.manual_seed(0)
    config = OwnConfig("Attribute", habits=list(habits), mask=mask, num_hidden_layers=layers)
    return CLASSES[kind](config).eval()
