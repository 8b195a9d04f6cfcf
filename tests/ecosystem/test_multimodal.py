"""Models that read images or sound around a decoder: stock code reads the prompt, our loop all tokens behind it."""

from __future__ import annotations

import copy
import inspect

import causal_lm_types
import multimodal_types
import pytest
import torch
from conftest import needs_cuda
from models import CPU, Tokens, counting, require_native
from multimodal_types import MEDIA, PLACE, small_model
from parity import assert_same_tokens
from quantized import check_saved_copied_and_taken_back, packed_in, with_dequantized
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast, pipeline

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE, FORWARD_NOTES, TESTED_TRANSFORMERS, transformers_version
from hf_fastpath.patching.multimodal_twin import multimodal_twin
from hf_fastpath.patching.state import state_of
from hf_fastpath.patching.twin_config import twin_config
from hf_fastpath.quantization import FORMATS

#: of each test every fourth case; all of them with ``--full``
pytestmark = pytest.mark.every(4)

FEW = dict(max_new_tokens=12, do_sample=False)
LOGITS = dict(return_dict_in_generate=True, output_logits=True)
#: media of each prompt, padding of the last one
PROMPTS = {
    "text": ((0,), 0),
    "padded texts": ((0, 0), 2),
    "one": ((1,), 0),
    "two": ((2,), 0),
    "one and two": ((1, 2), 0),
    "padded": ((1, 1), 2),
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request) -> torch.device:
    return torch.device(request.param)


#: types that are tried with all that follows; the table of types tries all others
TYPES = (
    *("gemma3", "idefics3", "internvl", "llava", "paligemma", "qwen2_5_vl", "qwen2_audio"),
    *("qwen3_5", "qwen3_omni_moe_thinker", "qwen3_vl", "voxtral"),
)
#: and with ``--full`` alone: each is like one of these
LIKE_OTHERS = ("llava_next", "llava_onevision", "mistral3", "qwen2_vl", "smolvlm")


@pytest.fixture(scope="module", params=[*TYPES, *(pytest.param(name, marks=pytest.mark.full) for name in LIKE_OTHERS)])
def models(request, device) -> tuple[str, nn.Module, nn.Module]:
    """A type, a small random model of it, and a patched copy of that."""
    require_native(device)
    stock = small_model(request.param).to(device)
    return request.param, stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def of(model: nn.Module, *media: int, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    inputs = multimodal_types.prompt(model.config.model_type, media or (1,), padding, seed)
    return {name: each.to(model.device) for name, each in inputs.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_stocks_and_of_our_loop(models, prompt):
    _, stock, ours = models
    media, padding = PROMPTS[prompt]
    inputs = of(stock, *media, padding=padding)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, return_dict_in_generate=True)
    assert counts.fast == 12 * len(media) and not counts.fallback and not counts.reasons
    assert isinstance(found[CACHE], FastpathCache)
    assert_same_tokens(found.sequences, stock.generate(**inputs, **FEW))


def test_what_is_seen_or_heard_matters(models):
    """Else equal tokens would say nothing of images and sound."""
    _, stock, ours = models
    inputs = of(stock)
    name = next(name for name in ("pixel_values", "input_features") if name in inputs)
    other = inputs | {name: -inputs[name]}
    found, expected = (model.generate(**other, **FEW) for model in (ours, stock))
    assert_same_tokens(found, expected)
    assert not torch.equal(found, ours.generate(**inputs, **FEW))


def next_turn(model_type: str, before: dict, sequences: torch.Tensor, new: dict[str, torch.Tensor]) -> dict:
    """Return the inputs of a turn behind others: all tokens, and the media that are new.

    Args:
        before: inputs of the first turn, which has one image or clip.
        sequences: tokens of the turns before.
        new: inputs of the turn.
    """
    ids = torch.cat((sequences, new["input_ids"]), 1)
    inputs = new | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    marks = MEDIA[model_type].marks
    if marks in new:
        zeros = torch.zeros_like(sequences[:, before["input_ids"].shape[1] :])
        inputs[marks] = torch.cat((before[marks], zeros, new[marks]), 1)
    if "image_grid_thw" in new:  # Qwen's models make positions of all tokens anew
        inputs["image_grid_thw"] = torch.cat((before["image_grid_thw"], new["image_grid_thw"]))
    return inputs


def test_a_conversation_goes_on_with_text_and_with_another(models):
    """The cache of a turn with an image or a clip is given to one of text, and that one's to another with an image."""
    model_type, stock, ours = models
    turns = 2
    if stock.device.type == "cuda":  # an index out of range, which is an error on the CPU, ends all use of a GPU
        turns = sum(map(torch.is_tensor, _conversation(model_type, copy.deepcopy(stock).to("cpu"), turns))) - 1
    found, expected = (_conversation(model_type, model, turns) for model in (ours, stock))
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):  # stock cannot read this turn, and neither can we
            assert one == other
        else:
            assert_same_tokens(one, other)
    assert len(found) > 1 and torch.is_tensor(found[1])


def _conversation(model_type, model, turns: int) -> list[torch.Tensor | str]:
    """Return the text behind each turn, the first one's included; an error ends the conversation."""
    first = of(model)
    last = model.generate(**first, **FEW, return_dict_in_generate=True)
    texts = [last.sequences]
    for turn, media in enumerate((0, 1)[:turns]):
        inputs = next_turn(model_type, first, last.sequences, of(model, media, seed=5 + turn))
        try:
            last = model.generate(**inputs, **{CACHE: last[CACHE]}, **FEW, return_dict_in_generate=True)
        except (ValueError, RuntimeError, IndexError) as error:
            return [*texts, str(error)]
        texts.append(last.sequences)
    return texts


def test_embeddings_of_a_prompt(models):
    _, stock, ours = models
    embeds = stock.get_input_embeddings()(of(stock, 0, 0)["input_ids"]).detach()
    if "inputs_embeds" not in inspect.signature(stock.prepare_inputs_for_generation).parameters:
        for model in (ours, stock):  # transformers' own rule
            with pytest.raises(ValueError, match="doesn't have its forwarding implemented"):
                model.generate(inputs_embeds=embeds, **FEW)
        return
    with counting(ours) as counts:
        found = ours.generate(inputs_embeds=embeds, **FEW)
    assert counts.fast == 24 and not counts.reasons
    assert_same_tokens(found, stock.generate(inputs_embeds=embeds, **FEW))


def test_calls_of_one_kind_use_one_recording(models):
    """What a forward notes about a prompt (Qwen's rope_deltas) is no change of the model, nor are the hooks that
    collect hidden states, which transformers puts into an encoder when it first runs."""
    model_type, stock, _ = models
    ours = hf_fastpath.patch(small_model(model_type).to(stock.device), quiet=True)  # none has run yet
    ours.generate(**of(stock, 0), **FEW)
    part = state_of(ours).plans.part_of(ours)
    ours.generate(**of(stock, 2), **FEW)
    assert state_of(ours).plans.part_of(ours) is part


def test_samples_beams_and_drafts(models):
    _, stock, ours = models
    inputs = of(stock)
    ways = [dict(do_sample=True, top_k=5), dict(num_beams=2)]
    if not stock._is_stateful:  # transformers verifies no drafts with states
        ways.append(dict(prompt_lookup_num_tokens=2))
    for options in ways:
        results = []
        for model in (ours, stock):
            torch.manual_seed(0)
            results.append(model.generate(**inputs, **FEW | options))
        assert_same_tokens(*results)


def test_all_else_of_a_patched_model(models):
    """Report, streams, verify, copies, unpatch."""
    _, stock, given = models
    ours = copy.deepcopy(given)
    report = hf_fastpath.report(ours)
    assert (report.architecture, report.loop, report.patched) == ("recorded", "fast", {})
    inputs = of(stock)
    streamer = Tokens()
    found = ours.generate(**inputs, **FEW, streamer=streamer)
    assert streamer.tokens == found[0].tolist()
    ids = of(stock, 0, seed=3)["input_ids"]
    assert hf_fastpath.verify(ours, ids.repeat(1, 4), max_new_tokens=4).ok
    hf_fastpath.unpatch(ours)
    assert vars(ours).keys() - FORWARD_NOTES == vars(stock).keys() - FORWARD_NOTES
    assert_same_tokens(ours.generate(**inputs, **FEW), found)


def test_a_pipeline_sees(device):
    """``image-text-to-text``: a picture, through a processor, and words around it."""
    require_native(device)
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    stock = small_model("llava").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    sees = stock.config.vision_config
    words = {"<image>" if number == PLACE else f"w{number}": number for number in range(causal_lm_types.VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    processor = LlavaProcessor(
        CLIPImageProcessor(
            size={"shortest_edge": sees.image_size}, crop_size={"height": sees.image_size, "width": sees.image_size}
        ),
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", additional_special_tokens=["<image>"]),
        **dict(patch_size=sees.patch_size, image_token="<image>", num_additional_image_tokens=1),
        vision_feature_select_strategy=stock.config.vision_feature_select_strategy,
    )
    picture, said = image.new("RGB", (40, 30), (200, 30, 60)), []
    for model in (ours, stock):
        describe = pipeline("image-text-to-text", model=model, processor=processor, device=device)
        options = dict(return_full_text=False, generate_kwargs=dict(max_new_tokens=8, do_sample=False))
        said.append(describe(images=picture, text="<image> w5 w9 w11", **options)[0]["generated_text"])
    assert said[0] == said[1] and said[0].count("w") > 4
    stats = hf_fastpath.report(ours).stats
    assert stats["fast_tokens"] == 8 and not stats["fallback_tokens"] and not stats["reasons"]


# ---- quantized weights --------------------------------------------------------------------------------------------


def test_the_decoder_is_quantized(models):
    """The decoder's linear layers and the head; what reads images and sound is as it was."""
    model_type, stock, _ = models
    format = list(FORMATS)[[*TYPES, *LIKE_OTHERS].index(model_type) % len(FORMATS)]
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, lm_head="int8", quiet=True)
    decoder, head = stock.get_decoder(), stock.get_output_embeddings()
    names = {id(module): name for name, module in stock.named_modules()}
    inside = {names[id(module)] for module in decoder.modules() if type(module) is nn.Linear}
    packed = {name for name in packed_in(ours) if ".experts." not in name}  # a mixture's are quantized, too
    assert packed == inside | {names[id(head)]}
    same = with_dequantized(stock, ours)
    for media in ((1,), (0, 0)):
        inputs = of(stock, *media)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW)
        assert counts.fast == 12 * len(media) and not counts.reasons
        assert_same_tokens(found, same.generate(**inputs, **FEW))


def test_quantized_weights_are_saved_copied_and_taken_back(models, tmp_path):
    stock = models[-2]
    check_saved_copied_and_taken_back(stock, of(stock), tmp_path)


# ---- models that leave all but the image to a language model inside --------------------------------------------------


@pytest.mark.parametrize(("model_type", "inside"), [("blip-2", "language_model"), ("kosmos-2", "text_model")])
def test_the_model_inside_that_generates_is_patched(model_type, inside, device):
    require_native(device)
    stock = small_model(model_type).to(device)
    ours = copy.deepcopy(stock)
    assert hf_fastpath.patch(ours, quiet=True) is ours
    assert state_of(ours) is None and state_of(getattr(ours, inside)) is not None
    for media, padding in ((1,), 0), ((1, 1), 2):
        inputs = {name: each.to(device) for name, each in multimodal_types.prompt(model_type, media, padding).items()}
        with counting(getattr(ours, inside)) as counts:
            found = ours.generate(**inputs, **FEW, **LOGITS)
        assert counts.fast == 12 * len(media) and not counts.reasons
        assert_same_tokens(found.sequences, stock.generate(**inputs, **FEW))
        other = ours.generate(**inputs | {"pixel_values": -inputs["pixel_values"]}, **FEW, **LOGITS)
        assert not torch.allclose(other.logits[-1], found.logits[-1])  # the image matters
    assert hf_fastpath.report(ours).loop == "fast"
    hf_fastpath.unpatch(ours)
    assert state_of(getattr(ours, inside)) is None


def test_a_twin_has_weights_where_a_step_reads_them():
    """Gemma 3n's steps call what makes embeddings of images, which the twins of other models do without."""
    stock, projector = small_model("llava"), "model.multi_modal_projector"
    twin = multimodal_twin(stock, twin_config, [f"{projector}.linear_1"])
    sizes = {name: twin.get_submodule(f"{projector}.{name}").weight.numel() for name in ("linear_1", "linear_2")}
    assert sizes["linear_1"] > 0 == sizes["linear_2"]


# ---- what is left to stock code --------------------------------------------------------------------------------------


def test_axes_that_go_on_from_different_places():
    """A prompt that ends in an image: its axes do not end at one position."""
    require_native(CPU)
    stock = small_model("qwen2_vl")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = of(stock)
    ids = inputs["input_ids"][:, :6]
    inputs |= dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == PLACE).long())
    positions = torch.arange(6).repeat(3, 1, 1)
    positions[1, :, -1] = 9
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, position_ids=positions)
    assert counts.reasons == {"position_ids": 1} and not counts.fast
    assert "axes" in hf_fastpath.report(ours).stats["details"]["position_ids"][0]
    assert_same_tokens(found, stock.generate(**inputs, **FEW, position_ids=positions))


def test_a_prompt_that_is_read_without_a_cache():
    """Phi-4-multimodal's class leaves the cache out where its short factors end, and computes all of the text anew."""
    require_native(CPU)
    stock = small_model("phi4_multimodal")
    stock.config.original_max_position_embeddings = 200
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for length, code in ((64, None), (210, "no_cache")):
        ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(0))
        with counting(ours) as counts:
            found = ours.generate(ids, **FEW)
        assert counts.reasons == ({} if code is None else {code: 1})
        assert_same_tokens(found, stock.generate(ids, **FEW))


def test_a_decoder_that_is_given_an_image_with_every_token():
    """BLIP's keeps keys and values of the image in a cache that it makes around transformers' own."""
    require_native(CPU)
    stock = small_model("blip")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = multimodal_types.prompt("blip", (1,))
    with counting(ours.text_decoder) as counts:
        found = ours.generate(**inputs, **FEW)
    assert counts.reasons == {"unsupported_input": 1} and not counts.fast
    assert_same_tokens(found, stock.generate(**inputs, **FEW))
    with counting(ours.text_decoder) as counts:  # text alone is its language model's
        found = ours.text_decoder.generate(torch.tensor([[1, 5, 6]]), **FEW)
    assert counts.fast == 12 and not counts.reasons
    assert_same_tokens(found, stock.text_decoder.generate(torch.tensor([[1, 5, 6]]), **FEW))


def test_an_image_in_front_of_the_padding():
    """GIT's class puts an image into the cache that has no tokens in the prompt, so that padding stands behind it."""
    require_native(CPU)
    if transformers_version() == TESTED_TRANSFORMERS[0]:
        pytest.skip("the class reads no token without a mask")
    stock = small_model("git")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for padding, codes in (0, {}), (2, {"attention_mask": 1}):
        inputs = of(stock, 1, 1, padding=padding)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW)
        assert counts.reasons == codes and counts.fast == (0 if codes else 24)
        assert_same_tokens(found, stock.generate(**inputs, **FEW))
    assert "modeling_git.py" in hf_fastpath.report(ours).stats["details"]["attention_mask"][0]


def test_a_text_that_goes_on_between_two_whole_numbers():
    """Positions behind sound may be counted in seconds."""
    require_native(CPU)
    stock = small_model("qwen3_omni_moe_thinker")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ids = of(stock, 0)["input_ids"]
    for fraction, codes in ((0.0, {}), (0.5, {"position_ids": 1})):
        positions = torch.arange(ids.shape[1]).repeat(4, 1, 1) + fraction
        with counting(ours) as counts:
            found = ours.generate(ids, position_ids=positions, **FEW)
        assert counts.reasons == codes
        assert_same_tokens(found, stock.generate(ids, position_ids=positions, **FEW))
