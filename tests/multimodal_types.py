"""A small random model of every multimodal type of the installed transformers, and prompts with images or sound.

As in ``causal_lm_types``, sizes are cut by their names; :data:`_TYPES` holds what a type needs besides, and
:data:`MEDIA` what some of them read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import causal_lm_types
import torch
from causal_lm_types import VOCAB, random_model, small
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

#: the token that stands for a piece of an image or of sound
PLACE = VOCAB - 1
_MOST_PARAMETERS = 50_000_000
_SIDE = 32  # of an image
_IMAGE = dict(image_token_index=PLACE, image_token_id=PLACE)
_AUDIO = dict(audio_token_index=PLACE, audio_token_id=PLACE)
_CLIP = dict(image_size=16, patch_size=8)
_SIGLIP = dict(image_size=_SIDE, patch_size=8)
#: shares of a small head that turn by each axis of positions
_SECTIONS = {
    "cosmos3_edge": [4, 2, 2],
    "ernie4_5_vl_moe": [3, 3, 2],
    "glm46v": [2, 3, 3],
    "glm4v": [2, 3, 3],
    "glm4v_moe": [1, 1, 2],
    "glm_ocr": [2, 3, 3],
    "glmga": [2, 3, 3],
    "hunyuan_vl": [2, 2, 2, 2],
    "hy_v4_vl": [2, 1, 1],
    "paddleocr_vl": [2, 3, 3],
    "qwen2_5_vl": [4, 2, 2],
    "qwen2_5_omni_thinker": [4, 2, 2],
    "qwen2_vl": [4, 2, 2],
    "qwen3_omni_moe_thinker": [4, 2, 2],
    "qwen3_vl": [4, 2, 2],
}
_GLM = dict(image_start_token_id=VOCAB - 3, image_end_token_id=VOCAB - 4, video_token_id=VOCAB - 2)
_GLM |= dict(video_start_token_id=VOCAB - 5, video_end_token_id=VOCAB - 6, vision_config=dict(image_size=56))
_QWEN = dict(video_token_id=VOCAB - 2, vision_start_token_id=VOCAB - 3, vision_end_token_id=VOCAB - 4)
_OMNI = dict(vision_start_token_id=VOCAB - 3, video_token_id=VOCAB - 2)
_THINKER = _OMNI | dict(vision_config=dict(fullatt_block_indexes=[1], window_size=28))
_ROTATED = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})
#: entries that a type is given besides, as in ``causal_lm_types``
_TYPES: dict[str, dict[str, Any]] = {
    "aya_vision": dict(vision_config=_SIGLIP),
    "blip": dict(text_config=dict(encoder_hidden_size=64, eos_token_id=2, sep_token_id=2 * VOCAB), vision_config=_CLIP),
    "blip-2": dict(vision_config=_CLIP, num_query_tokens=4),
    "chameleon": dict(vocabulary_map={"<image>": PLACE}),
    "cohere2_vision": dict(alignment_intermediate_size=64, vision_config=_SIGLIP),
    "deepseek_vl": dict(vision_config=_CLIP),
    "deepseek_ocr2": dict(
        vision_config=dict(sam_config=dict(image_size=_SIDE, global_attn_indexes=[1])),
        text_config=dict(mlp_layer_types=["dense", "sparse"]),
    ),
    "emu3": dict(vocabulary_map={"<image>": PLACE}, vq_config=dict(base_channels=32)),
    "fast_vlm": dict(vision_config=dict(architecture="test_convnext", hidden_size=64, model_args={})),
    "florence2": dict(vision_config=dict(embed_dim=[32] * 4, num_heads=[4] * 4, num_groups=[4] * 4, projection_dim=64)),
    "fun_asr_nano": dict(adaptor_config=dict(intermediate_size=16)),
    "git": dict(vision_config=_CLIP),
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm5_next": dict(text_config=dict(index_topk=16)),
    "granite4_vision": dict(
        vision_config=_CLIP, downsample_rate="1/2", deepstack_layer_map=[[0, 0]], spatial_target_layers=[0, 0, 1, 1]
    ),
    "inkling2": dict(vision_config=dict(text_hidden_size=64)),
    "inkling2_loop": dict(vision_config=dict(text_hidden_size=64)),
    "janus": dict(
        vision_config=_CLIP | dict(projection_dim=64, num_image_tokens=4),
        vq_config=dict(base_channels=32, projection_dim=64, image_token_embed_dim=64),
    ),
    "kosmos-2": dict(text_config=dict(embed_dim=64), vision_config=_CLIP, latent_query_num=4),
    "kosmos-2.5": dict(text_config=dict(embed_dim=64), latent_query_num=4),
    "kyutai_speech_to_text": dict(audio_pad_token_id=0, codec_config=dict(upsample_groups=64)),
    "lighton_ocr": dict(vision_config=_SIGLIP, spatial_merge_size=2),
    "llama4": dict(
        vision_config=dict(vision_output_dim=64, projector_input_dim=64, projector_output_dim=64, image_size=28)
    ),
    "mistral4": dict(qk_nope_head_dim=8),
    "molmo2": dict(
        adapter_config=dict(vision_feature_layer=[1, 0], text_hidden_size=64), vision_config=dict(image_size=[28, 28])
    ),
    "muse_spark": dict(
        audio_config=dict(hidden_sizes=[16] * 4, out_hidden_size=64), text_config=dict(moe_hidden_size=64)
    ),
    "nemo_speechlm": dict(head_config=dict(audio_hidden_size=64)),
    "nemotron_h_omni": dict(vision_config=dict(video_temporal_patch_size=2)),
    "perception_lm": dict(vision_config=dict(architecture="test_vit", model_args=dict(embed_dim=64, img_size=_SIDE))),
    "qwen2_5_omni_thinker": _THINKER,
    "qwen3_asr": dict(eos_token_id=[2 * VOCAB]),
    "step3p7": dict(text_config=dict(sliding_window=8)),
    "gemma3": dict(vision_config=_SIGLIP, mm_tokens_per_image=4),
    "idefics3": dict(vision_config=_SIGLIP, scale_factor=2),
    "instructblip": dict(vision_config=_CLIP, num_query_tokens=4),
    "instructblipvideo": dict(vision_config=_CLIP, num_query_tokens=1, video_token_index=PLACE),
    "internvl": dict(vision_config=dict(image_size=[_SIDE] * 2, patch_size=[8, 8]), downsample_ratio=0.5),
    "llava": dict(vision_config=_CLIP),
    "llava_next": dict(vision_config=_CLIP, image_grid_pinpoints=[[16, 16]]),
    "llava_onevision": dict(vision_config=_CLIP, image_grid_pinpoints=[[16, 16]]),
    "mistral3": dict(vision_config=_SIGLIP, spatial_merge_size=2),
    "paligemma": dict(vision_config=_CLIP | dict(projection_dim=64), projection_dim=64),
    "qwen2_5_vl": _QWEN | dict(vision_config=dict(fullatt_block_indexes=[1], window_size=28)),
    "qwen2_audio": dict(audio_config=dict(max_source_positions=16)),
    "qwen2_vl": _QWEN | dict(vision_config=dict(embed_dim=64)),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "pix2struct": dict(
        text_config=dict(decoder_start_token_id=2), vision_config=dict(patch_embed_hidden_size=64, seq_len=16)
    ),
    "qwen2_5_omni": dict(
        thinker_config=_THINKER | dict(text_config=_ROTATED),
        token2wav_config=dict(bigvgan_config=dict(upsample_initial_channel=64)),
    ),
    "qwen3_omni_moe": dict(
        enable_audio_output=False,
        thinker_config=_OMNI | dict(vision_config=dict(deepstack_visual_indexes=[0, 1]), text_config=_ROTATED),
    ),
    "qwen3_omni_moe_thinker": _OMNI | dict(vision_config=dict(deepstack_visual_indexes=[0, 1])),
    "qwen3_vl_moe": _QWEN | dict(vision_config=dict(deepstack_visual_indexes=[0, 1])),
    "shieldgemma2": dict(vision_config=_SIGLIP, mm_tokens_per_image=4),
    "vipllava": dict(vision_config=_CLIP, vision_feature_layers=[-1, -2]),
    "qwen3_vl": _QWEN | dict(vision_config=dict(deepstack_visual_indexes=[0, 1])),
    "smolvlm": dict(vision_config=_SIGLIP, scale_factor=2),
    "udop": dict(decoder_start_token_id=2),
    "vibevoice_asr": dict(
        **dict.fromkeys(
            ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"),
            dict(num_filters=2, depths=[1] * 7),
        )
    ),
    "vision-encoder-decoder": dict(
        default=dict(encoder={"model_type": "vit"}, decoder={"model_type": "trocr"}),
        encoder=dict(is_decoder=False) | _CLIP,
        decoder=dict(add_cross_attention=True, cross_attention_hidden_size=64),
        decoder_start_token_id=2,
    ),
    "voxtral": dict(audio_config=dict(max_source_positions=8, intermediate_size=128)),
}


def types() -> tuple[str, ...]:
    """Return the multimodal types of the installed transformers: those that read images, sound, or both."""
    return tuple({**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def small_config(model_type: str) -> PreTrainedConfig:
    """Make a small config of a type.

    Args:
        model_type: one of :func:`types`.
    """
    own = dict(_TYPES.get(model_type, {}))
    config = CONFIG_MAPPING[model_type](**own.pop("default", {}))
    extra = {name: value for name, value in (_IMAGE | _AUDIO).items() if name in type(config).__dataclass_fields__}
    extra |= causal_lm_types.extra_of(model_type) | own
    text = getattr(config, "text_config", None)
    if text is not None:
        of_text = causal_lm_types.extra_of(text.model_type)
        if model_type in _SECTIONS:
            known = getattr(text, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
            of_text |= {"rope_parameters": known | {"mrope_section": _SECTIONS[model_type]}}
        extra["text_config"] = of_text | extra.get("text_config", {})
    return small(config, extra)


def small_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Make a random float32 model of a type on the CPU, in eval mode, without an end-of-sequence token.

    Args:
        model_type: one of :func:`types`.
        seed: seed of the weights.

    Raises:
        ValueError: the model is not small. What the config or the class raises is not caught.
    """
    model = model_of(small_config(model_type), seed)
    if model_type == "qwen2_5_omni":  # comes with a checkpoint
        model.speaker_map = {"Chelsie": {}}
    return model


def model_of(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Do as :func:`small_model` for a config."""
    return random_model(config, AutoModelForMultimodalLM, seed, _MOST_PARAMETERS)


# ---- images and sound -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Medium:
    """What a type reads besides tokens.

    Attributes:
        places: tokens that one image or clip takes in the prompt.
        read: makes the arguments of so many images or clips, of a generator.
        marks: argument with a number for each token of the prompt: 1 for one of the image's, 0 for others; or None.
        begins: whether a token in front of each says that it begins.
        is_needed: whether each prompt has one.
        is_all: whether a prompt is nothing else.
    """

    places: int
    read: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    marks: str | None = None
    begins: bool = False
    is_needed: bool = False
    is_all: bool = False


def _random(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _pixels(*shape: int, **more: Any) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    """Return what makes pixels of a shape for each image, and tensors with a row for each image."""

    def read(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rows = {name: torch.tensor([value] * count) for name, value in more.items()}
        return {"pixel_values": _random(count, *shape, generator=generator), **rows}

    return read


def _patches(size: int) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    """Return what makes images of 4 x 4 patches of ``size`` pixels, all patches in one row."""

    def read(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = _random(count * 16, 3 * 2 * size**2, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}

    return read


def _flat_patches(count: int) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    """Return what makes images of so many patches of 64 numbers, each behind its row and its column."""

    def read(images: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        places = torch.stack((torch.arange(1, count + 1), torch.ones(count)), -1).expand(images, -1, -1)
        pixels = _random(images, count, 64, generator=generator)
        return {"flattened_patches": torch.cat((places, pixels), -1)}

    return read


def _sound(frames: int, mask: str | None = None) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    def read(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        found = {"input_features": _random(count, 128, frames, generator=generator)}
        return found if mask is None else found | {mask: torch.ones(count, frames, dtype=torch.long)}

    return read


_SQUARE = 3, _SIDE, _SIDE
_ANY_RESOLUTION = Medium(10, _pixels(2, 3, 16, 16, image_sizes=[16, 16]))
#: type -> what it reads
MEDIA: dict[str, Medium] = {
    "aya_vision": Medium(4, _pixels(*_SQUARE)),
    "blip": Medium(0, _pixels(3, 16, 16), is_needed=True, is_all=True),
    "blip-2": Medium(4, _pixels(3, 16, 16), is_needed=True),
    "cohere2_vision": Medium(4, _pixels(*_SQUARE)),
    "deepseek_vl": Medium(4, _pixels(3, 16, 16)),
    "gemma3": Medium(4, _pixels(*_SQUARE), "token_type_ids"),
    "fast_vlm": Medium(4, _pixels(3, 64, 64)),
    "florence2": Medium(2, _pixels(3, 32, 32), is_needed=True),
    "gemma3n": Medium(4, _pixels(3, 64, 64)),
    "git": Medium(0, _pixels(3, 16, 16), is_needed=True),
    "glm46v": Medium(4, _patches(14), "mm_token_type_ids", begins=True),
    "glm4v": Medium(4, _patches(14), "mm_token_type_ids", begins=True),
    "glm4v_moe": Medium(4, _patches(14), "mm_token_type_ids", begins=True),
    "idefics3": Medium(4, _pixels(1, *_SQUARE)),
    "instructblip": Medium(4, _pixels(3, 16, 16, qformer_input_ids=[3, 4]), is_needed=True),
    "instructblipvideo": Medium(4, _pixels(4, 3, 16, 16, qformer_input_ids=[3, 4]), is_needed=True),
    "internvl": Medium(4, _pixels(*_SQUARE)),
    "janus": Medium(4, _pixels(3, 16, 16)),
    "kosmos-2": Medium(4, _pixels(3, 16, 16), "image_embeds_position_mask", is_needed=True),
    "lighton_ocr": Medium(4, _pixels(*_SQUARE, image_sizes=[_SIDE, _SIDE])),
    "llava": Medium(4, _pixels(3, 16, 16)),
    "llava_next": _ANY_RESOLUTION,
    "llava_onevision": _ANY_RESOLUTION,
    "mistral3": Medium(4, _pixels(*_SQUARE, image_sizes=[_SIDE, _SIDE])),
    "paligemma": Medium(4, _pixels(3, 16, 16)),
    "perception_lm": Medium(4, _pixels(1, *_SQUARE)),
    "pix2struct": Medium(0, _flat_patches(8), is_needed=True, is_all=True),
    "qwen2_5_omni_thinker": Medium(4, _patches(14), begins=True),
    "qwen2_5_vl": Medium(4, _patches(14), "mm_token_type_ids", begins=True),
    "qwen2_audio": Medium(8, _sound(32, "feature_attention_mask")),
    "qwen2_vl": Medium(4, _patches(14), "mm_token_type_ids", begins=True),
    "qwen3_5": Medium(4, _patches(16), "mm_token_type_ids", begins=True),
    "qwen3_5_moe": Medium(4, _patches(16), "mm_token_type_ids", begins=True),
    "qwen3_omni_moe_thinker": Medium(4, _patches(16), begins=True),
    "qwen3_vl": Medium(4, _patches(16), "mm_token_type_ids", begins=True),
    "qwen3_vl_moe": Medium(4, _patches(16), "mm_token_type_ids", begins=True),
    "shieldgemma2": Medium(4, _pixels(*_SQUARE), "token_type_ids"),
    "smolvlm": Medium(4, _pixels(1, *_SQUARE)),
    "udop": Medium(0, lambda count, generator: {"bbox": torch.rand(count, 8, 4, generator=generator)}, is_needed=True),
    "vision-encoder-decoder": Medium(0, _pixels(3, 16, 16), is_needed=True, is_all=True),
    "vipllava": Medium(4, _pixels(3, 16, 16)),
    "voxtral": Medium(4, _sound(16)),
}


#: further arguments of ``generate()``, of a type whose class has one of its own
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {"thinker_max_new_tokens": 12, "generation_mode": "text"},
    "qwen3_omni_moe": {"thinker_max_new_tokens": 12},
}


def prompt(model_type: str, media: tuple[int, ...], padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the inputs of ``generate()`` for a batch of prompts.

    Args:
        model_type: one of :data:`MEDIA`, or any type if there are no media.
        media: number of images or clips of each prompt; rows with fewer have more text.
        padding: tokens of padding in front of the last prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    medium = MEDIA.get(model_type, Medium(0, lambda count, generator: {}))
    if medium.is_all:
        return medium.read(sum(media), generator)
    length = 6 + max(media) * (medium.places + 2)
    ids = torch.randint(3, VOCAB - 8, (len(media), length), generator=generator)
    if any(media) and medium.begins:
        ids[:, 1] = VOCAB - 3
    for row, count in enumerate(media):
        for number in range(count):
            start = 2 + number * (medium.places + 2)
            if medium.begins:
                ids[row, start - 1] = VOCAB - 3
            ids[row, start : start + medium.places] = PLACE
    mask = torch.ones_like(ids)
    if padding:
        ids[-1] = torch.cat((torch.zeros(padding, dtype=torch.long), ids[-1, :-padding]))
        mask[-1, :padding] = 0
    found = {"input_ids": ids, "attention_mask": mask} | _ARGUMENTS.get(model_type, {})
    if not any(media):
        return found
    if medium.marks is not None:
        found[medium.marks] = (ids == PLACE).long()
    return found | medium.read(sum(media), generator)
