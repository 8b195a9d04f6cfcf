"""A small random model of every encoder-decoder type of the installed transformers, and what its decoder starts from.

As in ``causal_lm_types``, sizes are cut by their names; :data:`_TYPES` holds what a type needs besides.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import causal_lm_types
import torch
from causal_lm_types import VOCAB, random_model, small
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from hf_fastpath.compat import encoder_output, encoder_width, token_shape

_MOST_PARAMETERS = 20_000_000
_TOKENS = dict(decoder_start_token_id=2, bos_token_id=1, eos_token_id=None, pad_token_id=0, forced_eos_token_id=None)
_TOKENS |= dict(forced_bos_token_id=None, suppress_tokens=None, begin_suppress_tokens=None, is_decoder=False)
#: sizes that only encoder-decoders have
causal_lm_types._SIZES |= {
    "max_source_positions": 64,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "encoder_sparse_step": 2,
    "cross_num_attention_heads": 4,
    "cross_num_key_value_heads": 4,
    "cross_head_dim": 16,
    "cross_hidden_size": 64,
    "decoder_sparse_step": 2,
}
_CHANNELS = 3  # tokens of a position of Dia's text
_BERT = {"model_type": "bert"}
_AROUND = dict(encoder=dict(is_decoder=False), decoder=dict(add_cross_attention=True))
#: entries that a type is given besides, as in ``causal_lm_types``
_TYPES: dict[str, dict[str, Any]] = {
    "dia": dict(
        delay_pattern=list(range(_CHANNELS)),
        decoder_config=dict(
            num_channels=_CHANNELS, eos_token_id=VOCAB - 3, pad_token_id=VOCAB - 2, bos_token_id=VOCAB - 1
        ),
    ),
    "encoder-decoder": dict(default=dict(encoder=_BERT, decoder=_BERT)) | _AROUND,
    "nllb-moe": dict(tie_word_embeddings=False),  # tied, a random model says one token alone
    "fsmt": dict(src_vocab_size=4000, tgt_vocab_size=4000),
    "moonshine_streaming": dict(num_key_value_heads=4),  # the class has no default
    "prophetnet": dict(num_buckets=8, relative_max_distance=10),  # texts are longer
    "speecht5": dict(vocab_size=VOCAB),
    "speech-encoder-decoder": dict(default=dict(encoder={"model_type": "wav2vec2"}, decoder=_BERT)) | _AROUND,
}


def types() -> tuple[str, ...]:
    """Return the types of encoder-decoders that read text or sound, of the installed transformers."""
    names = {**MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
    return tuple(name for name in names if _has_encoder(name))


def _has_encoder(model_type: str) -> bool:
    field = CONFIG_MAPPING[model_type].__dataclass_fields__["is_encoder_decoder"]
    return field.default is True or model_type.endswith("encoder-decoder")


def reads_text(model_type: str) -> bool:
    """Whether the encoder of a type reads tokens."""
    return model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def small_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Make a small config of a type.

    Args:
        model_type: one of :func:`types`.
        changes: further entries.
    """
    extra = causal_lm_types.extra_of(model_type) | _TYPES.get(model_type, {}) | changes
    config = small(CONFIG_MAPPING[model_type](**extra.pop("default", {})), extra)
    for name, value in _TOKENS.items():
        if name in type(config).__dataclass_fields__:
            setattr(config, name, value)
    return config


def small_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a random float32 model of a type on the CPU, in eval mode, without an end-of-sequence token.

    Args:
        model_type: one of :func:`types`.
        seed: seed of the weights.
        changes: further entries of the config.

    Raises:
        ValueError: the model is not small. What the config or the class raises is not caught.
    """
    factory = AutoModelForSeq2SeqLM if reads_text(model_type) else AutoModelForSpeechSeq2Seq
    model = random_model(small_config(model_type, **changes), factory, seed, _MOST_PARAMETERS)
    for name in ("forced_bos_token_id", "forced_eos_token_id", "eos_token_id"):
        setattr(model.generation_config, name, None)
    model.generation_config.decoder_start_token_id = 2
    model.generation_config.num_beams = None  # FSMT's config asks for five
    return model


def text(batch: int, length: int, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens and their mask; the last sequence ends in ``padding``."""
    ids = causal_lm_types.prompt(batch, length, seed)
    mask = torch.ones_like(ids)
    if padding:
        mask[-1, -padding:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def output(model: PreTrainedModel, batch: int, length: int, padding: int = 0, seed: int = 0) -> dict[str, Any]:
    """Return a random output of a model's encoder, and its mask."""
    width, generator = encoder_width(model), torch.Generator().manual_seed(seed)
    states = torch.randn(batch, length, width, generator=generator)
    mask = text(batch, length, padding, seed)["attention_mask"]
    return {"encoder_outputs": encoder_output(states), "attention_mask": mask}


def start(batch: int, length: int = 3, seed: int = 0, channels: tuple[int, ...] = ()) -> torch.Tensor:
    """Return [batch, length, *channels] tokens that a decoder starts from."""
    return causal_lm_types.prompt(batch, length * math.prod(channels), seed + 100).view(batch, length, *channels)


def generate(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """Return the tokens that ``GenerationMixin.generate()`` adds, whatever a model's class does around it."""
    start = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 0
    known = type(model) if token_shape(model) else GenerationMixin  # a class takes several tokens apart
    found = known.generate(model, **copy.deepcopy(inputs), **options)
    new = options["max_new_tokens"]
    assert found.shape[1] >= start + new
    return found[:, -new:]
