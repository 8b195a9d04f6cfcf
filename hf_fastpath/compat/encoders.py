"""Encoder-decoders: what their decoders are given under which names, and the caches of what encoders have read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from .caches import CACHE
from .models import can_generate, entry_of, text_decoder

__all__ = ["EncoderDecoderCache", "GenerateEncoderDecoderOutput"]

#: arguments of an encoder-decoder that its decoder is given without this
_PREFIX = "decoder_"
#: arguments of a decoder alone, which mean the encoder's input if there is an encoder
_SHARED = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")
#: arguments of forwards that tell what the encoder has read
ENCODED_ARGUMENTS = frozenset({"encoder_outputs", *(_PREFIX + name for name in _SHARED)})
#: what counts the tokens of a position, in Dia
_CHANNELS = "num_channels"
#: names of the argument of decoders that says which of the encoder's outputs are no padding; the second is FSMT's
_MASKS = "encoder_attention_mask", "encoder_padding_mask"


def has_encoder(model: Any) -> bool:
    """Whether a model generates by a decoder that attends to what an encoder has read."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and can_generate(model)


def text_name(model: Any, name: str) -> str:
    """Return under which name a model's forward takes an argument that is about the text that it generates."""
    return _PREFIX + name if has_encoder(model) else name


def text_arguments(model_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keyword arguments of a call of ``generate()`` as a decoder alone would be given them."""
    cache = model_kwargs.get(CACHE)
    if not isinstance(cache, EncoderDecoderCache):
        return model_kwargs
    found = {name: value for name, value in model_kwargs.items() if name not in (*_SHARED, *ENCODED_ARGUMENTS)}
    found |= {name: model_kwargs[_PREFIX + name] for name in _SHARED if model_kwargs.get(_PREFIX + name) is not None}
    return found | {CACHE: cache.self_attention_cache}


def text_cache(cache: Any) -> Any:
    """Return the cache of the text that is generated: ``cache``, or a part of it if it also holds what an encoder has
    read."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def text_embedding(model: Any) -> nn.Module | None:
    """Return the embedding of the tokens that a model generates, or None if its class does not tell."""
    if not has_encoder(model):
        try:
            return model.get_input_embeddings()
        except NotImplementedError:  # another module is where the class looks for it
            return None
    decoder = text_decoder(model)
    own = getattr(decoder, "embed_tokens", None)
    if isinstance(own, nn.Embedding):
        return own
    try:
        return decoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # FSMT's decoder has no such method, Dia's refuses
        return next((each for each in decoder.modules() if isinstance(each, nn.Embedding)), None)


def token_shape(model: Any) -> tuple[int, ...]:
    """Return the shape of what a model generates at a position: () of one token, or the number of tokens."""
    channels = getattr(model.get_decoder(), _CHANNELS, None) if has_encoder(model) else None
    return (channels,) if isinstance(channels, int) else ()


def text_of_channels(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], channels: int) -> torch.Tensor:
    """Return the first of ``channels`` tokens of each position, [batch, seq_len] for each output of the encoder.

    Args:
        input_ids: [texts * channels, seq_len]; an encoder's outputs may be twice as many as the texts, with and without
            what guides them.
        model_kwargs: of the call of ``generate()``.
    """
    text = input_ids.unflatten(0, (-1, channels))[:, 0]
    return text.repeat(len(model_kwargs["encoder_outputs"][0]) // len(text), 1)


def over_encoder(cache: Cache) -> EncoderDecoderCache:
    """Make a cache of ``cache`` for the text, and an empty one of transformers' own for what an encoder has read."""
    return EncoderDecoderCache(cache, DynamicCache())


def encoded_states(cache: EncoderDecoderCache) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Return keys and values, [batch, num_kv_heads, length, head_dim], that each layer of the decoder has made of what
    an encoder has read; None for a layer that has made none."""
    layers = cache.cross_attention_cache.layers
    return [(each.keys, each.values) if each.is_initialized and each.keys is not None else None for each in layers]


def encoder_width(model: Any) -> int:
    """Return the number of features that an encoder gives of each place of its input.

    The config may have been edited since the model was made. If no norm of the encoder has as many weights as it says,
    the last norm's number counts.

    Raises:
        ValueError: the encoder's config does not tell.
    """
    encoder = model.get_encoder()
    config = getattr(encoder, "config", model.config)
    width = entry_of(config.get_text_config(), "hidden_size")
    if not isinstance(width, int):
        raise ValueError(f"the config of {type(encoder).__name__} has no hidden_size")
    norms = [module for module in encoder.modules() if "norm" in type(module).__name__.lower()]
    weights = [getattr(module, "weight", None) for module in norms]
    widths = [len(each) for each in weights if isinstance(each, torch.Tensor) and each.dim() == 1 and len(each)]
    return width if width in widths or not widths else widths[-1]


class _EncoderOutput(BaseModelOutput):
    """An encoder's output of which nothing but the states is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None  # a mask, the routers' logits, ...: encoders have classes of their own

    def to(self, *where: Any, **how: Any) -> BaseModelOutput:
        """Return the output elsewhere, as accelerate's hooks ask for it."""
        return type(self)(last_hidden_state=self.last_hidden_state.to(*where, **how))


def encoder_output(states: torch.Tensor) -> BaseModelOutput:
    """Return ``states``, [batch, length, encoder_width], as a model takes what its encoder has given.

    It is a copy: Moonshine's streaming decoder writes to what it is given.
    """
    return _EncoderOutput(last_hidden_state=states.clone())


def read_by_encoder(model: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a model's encoder.

    Args:
        inputs: what the encoder takes first (tokens or sound), or a mapping of its arguments.

    Returns:
        The beginning of a text, [batch, 1], and the encoder's output, [batch, length, features].

    Raises:
        ValueError: the model has no token that starts the decoder.
    """
    encoder, name = model.get_encoder(), model.main_input_name
    given = {name: inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    known = inspect.signature(encoder.forward).parameters
    given = {name: each.to(model.device) for name, each in given.items() if name in known and each is not None}
    states = encoder(**given, return_dict=True)[0]
    configs = model.generation_config, model.config
    starts = [getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs]
    start = next((each for each in starts if isinstance(each, int)), None)
    if start is None:
        raise ValueError("the model has neither decoder_start_token_id nor bos_token_id: set one in generation_config")
    return torch.full((len(states), 1), start, device=states.device), states


def text_output(logits: torch.Tensor, cache: Cache) -> ModelOutput:
    """Return [batch, count, vocab_size] logits as the forward of a model, which may have an encoder, gives them."""
    kind = Seq2SeqLMOutput if isinstance(cache, EncoderDecoderCache) else CausalLMOutputWithPast
    return kind(logits=logits, **{CACHE: cache})


def encoded_shape(model_kwargs: Mapping[str, Any]) -> torch.Size:
    """Return how many outputs of the encoder arguments of a forward hold, and how many places each has."""
    return model_kwargs["encoder_outputs"][0].shape[:2]


def generate_over(model: Any, states: torch.Tensor, tokens: torch.Tensor, **options: Any) -> Any:
    """Run ``GenerationMixin.generate()``, whatever a model's class does around it; of several tokens at a position the
    class's own, which takes them apart.

    Args:
        states: [batch, length, encoder_width], the encoder's output.
        tokens: [batch, seq_len], the beginning of the text; of several tokens at a position [batch, seq_len, channels].
        options: of ``generate()``.
    """
    given = {"encoder_outputs": encoder_output(states), text_name(model, "input_ids"): tokens}
    if not token_shape(model):
        return GenerationMixin.generate(model, **given, **options)
    mask = {text_name(model, "attention_mask"): torch.ones_like(tokens[..., 0])}
    return model.generate(**given, **mask, **options)


def seen_by_decoder(copy: nn.Module, arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask over the encoder's output that a model's decoder is given, or None for none.

    Args:
        copy: the model, or a copy; the decoder inside it is not run. No other thread may run it meanwhile.
        arguments: of the model's forward.

    Raises:
        ValueError: the forward does not come to the decoder.
    """
    decoder = text_decoder(copy)
    signature = inspect.signature(decoder.forward)

    def stop(*args: Any, **kwargs: Any) -> None:
        given = kwargs | signature.bind_partial(*args, **kwargs).arguments
        raise _Reached(next((given[name] for name in _MASKS if name in given), None))

    vars(decoder)["forward"] = stop
    try:
        copy(**arguments)
    except _Reached as reached:
        return reached.mask
    finally:
        del vars(decoder)["forward"]
    raise ValueError(f"{type(copy).__name__} does not call {type(decoder).__name__}")


class _Reached(Exception):
    """The decoder was called."""

    def __init__(self, mask: torch.Tensor | None):
        super().__init__()
        self.mask = mask
