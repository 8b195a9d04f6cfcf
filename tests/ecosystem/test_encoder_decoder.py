"""Encoder-decoders: stock code runs the encoder and reads the prompt, our loop decodes behind it."""

from __future__ import annotations

import copy

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
import transformers
from conftest import needs_cuda
from encoder_decoder_types import small_model
from models import CPU, Tokens, counting, require_native
from packaging.version import Version
from parity import assert_same_tokens
from quantized import check_saved_copied_and_taken_back, packed_in, with_dequantized
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Wav2Vec2FeatureExtractor,
    pipeline,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hf_fastpath
from hf_fastpath import FastpathCache, compat
from hf_fastpath.compat import CACHE
from hf_fastpath.errors import UnsupportedModelError
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.patching.state import state_of
from hf_fastpath.quantization import FORMATS

#: of each test every fourth case; all of them with ``--full``
pytestmark = pytest.mark.every(4)

FEW = dict(max_new_tokens=12, do_sample=False)
TYPES = ("bart", "t5", "whisper", "moonshine", "fsmt", "t5gemma2", "nllb-moe", "prophetnet")
#: with ``--full`` alone: each is like Bart
LIKE_OTHERS = ("marian", "m2m_100")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module", params=[*TYPES, *(pytest.param(name, marks=pytest.mark.full) for name in LIKE_OTHERS)])
def models(request, device) -> tuple[nn.Module, nn.Module]:
    """A small random model, and a patched copy of it."""
    require_native(device)
    skip_if_drawing(request.param)
    stock = small_model(request.param).to(device)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def skip_if_drawing(model_type: str) -> None:
    """Skip a type that draws random numbers of which nothing depends."""
    if model_type == "nllb-moe" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"{model_type} draws random numbers in transformers {transformers.__version__}")


def of(model: nn.Module, batch: int = 1, length: int = 9, padding: int = 0, seed: int = 0) -> dict:
    """Return inputs of ``generate()``: text, or sound where a model hears."""
    kind, generator = model.config.model_type, torch.Generator().manual_seed(seed)
    if kind == "whisper":
        shape = batch, model.config.num_mel_bins, 2 * model.config.max_source_positions
        return {"input_features": torch.randn(shape, generator=generator).to(model.device)}
    if kind == "moonshine":
        values, mask = torch.randn(batch, 384 * length, generator=generator), torch.ones(batch, 384 * length).long()
        if padding:
            mask[-1, -384 * padding :] = 0
        inputs = {"input_values": values, "attention_mask": mask}
    else:
        inputs = encoder_decoder_types.text(batch, length, padding, seed)
    return {name: each.to(model.device) for name, each in inputs.items()}


@pytest.mark.parametrize(("batch", "length", "padding"), [(1, 9, 0), (2, 9, 0), (3, 14, 5)])
def test_tokens_are_stocks_and_of_our_loop(models, batch, length, padding):
    stock, ours = models
    inputs = of(stock, batch, length, padding)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW)
    assert counts.fast == 12 * batch and not counts.fallback and not counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **FEW))


def test_what_is_read_matters(models):
    """Else equal tokens would say nothing of cross attention."""
    stock, ours = models
    one, other = (ours.generate(**of(stock, seed=seed), **FEW) for seed in (0, 1))
    assert not torch.equal(one, other)


def test_one_plan_serves_texts_of_any_length(models):
    stock, ours = models
    ours.generate(**of(stock), **FEW)
    plans = list(state_of(ours).plans)
    for length in (3, 40, 9):
        inputs = of(stock, length=length, seed=length)
        assert_same_tokens(ours.generate(**inputs, **FEW), stock.generate(**inputs, **FEW))
    assert list(state_of(ours).plans) == plans


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True, top_k=5),
        dict(do_sample=True, num_return_sequences=2),
        dict(num_beams=3),
        dict(num_beams=4, num_return_sequences=2, length_penalty=2.0, no_repeat_ngram_size=2, early_stopping=True),
        dict(num_beams=2, do_sample=True, return_dict_in_generate=True, output_scores=True),
    ],
    ids=["samples", "several samples", "beams", "best beams", "sampled beams"],
)
def test_samples_and_beams(models, options):
    stock, ours = models
    inputs, results = of(stock, 2, padding=3), []
    for model in (ours, stock):
        torch.manual_seed(0)
        with counting(ours) as counts:
            found = model.generate(**inputs, **FEW | options)
        if model is ours:
            assert counts.fast and not counts.fallback and not counts.reasons
        results.append(found if torch.is_tensor(found) else found["sequences"])
    assert_same_tokens(*results)


class Never(LogitsProcessor):
    """A processor of the user's own."""

    def __call__(self, input_ids, scores):
        scores[:, 5:40] = -float("inf")
        return scores


def test_processors_scores_and_caches_that_are_returned(models):
    stock, ours = models
    inputs = of(stock, 2)
    options = FEW | dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    options |= dict(logits_processor=LogitsProcessorList([Never()]), repetition_penalty=1.3)
    found, expected = (model.generate(**inputs, **options) for model in (ours, stock))
    if stock.config.model_type == "whisper":  # its class returns what it makes of a segment
        assert_same_tokens(found["sequences"], expected["sequences"])
        return
    assert type(found) is type(expected)
    assert_same_tokens(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
    cache = found[CACHE]
    assert isinstance(cache, EncoderDecoderCache) and isinstance(cache.self_attention_cache, FastpathCache)
    assert cache.get_seq_length() == expected[CACHE].get_seq_length()
    cache.crop(-2)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 1, 0, 2], device=stock.device))
    assert cache.get_seq_length() == expected[CACHE].get_seq_length() - 2
    layer = cache.cross_attention_cache.layers[0]
    assert len(layer.keys) == 4 and torch.equal(layer.keys[0], layer.keys[3])
    assert not torch.equal(layer.keys[0], layer.keys[1])


def test_outputs_of_the_encoder_and_a_beginning(models):
    stock, ours = models
    start = encoder_decoder_types.start(2).to(stock.device)
    given = {name: each.to(stock.device) for name, each in encoder_decoder_types.output(stock, 2, 11, 4).items()
             if torch.is_tensor(each)}  # fmt: skip
    output = encoder_decoder_types.output(stock, 2, 11, 4)["encoder_outputs"]
    output.last_hidden_state = output.last_hidden_state.to(stock.device)
    if stock.config.model_type == "whisper":
        return
    inputs = given | dict(decoder_input_ids=start)
    made = []
    for model in (ours, stock):
        with counting(ours) as counts:
            made.append(model.generate(**inputs, encoder_outputs=copy.copy(output), **FEW))
        if model is ours:
            assert counts.fast == 24 and not counts.reasons
    assert_same_tokens(*made)


def test_all_else_of_a_patched_model(models):
    """Report, streams, verify, copies, unpatch."""
    stock, given = models
    ours = copy.deepcopy(given)
    report = hf_fastpath.report(ours)
    assert (report.architecture, report.loop, report.patched) == ("recorded", "fast", {})
    inputs = of(stock)
    streamer = Tokens()
    found = ours.generate(**inputs, **FEW, streamer=streamer)
    assert streamer.tokens[-12:] == found[0].tolist()[-12:]
    assert hf_fastpath.verify(ours, inputs, max_new_tokens=4).ok
    hf_fastpath.unpatch(ours)
    assert vars(ours).keys() == vars(stock).keys()
    assert_same_tokens(ours.generate(**inputs, **FEW), found)


def test_a_pipeline_hears(device):
    require_native(device)
    stock = small_model("moonshine").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(causal_lm_types.VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    sound = torch.randn(6000, generator=torch.Generator().manual_seed(0)).numpy()
    said = []
    for model in (ours, stock):
        hear = pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=tokenizer,
            feature_extractor=Wav2Vec2FeatureExtractor(),
            device=device,
        )
        said.append(hear(sound, generate_kwargs=dict(max_new_tokens=8))["text"])
    assert said[0] == said[1] and said[0].count("w") > 4
    stats = hf_fastpath.report(ours).stats
    assert stats["fast_tokens"] and not stats["fallback_tokens"] and not stats["reasons"]


# ---- Whisper's own loop around ours ----------------------------------------------------------------------------------

#: what speech may say: text, special tokens, then times
_END, _START, _PREVIOUS, _SILENCE, _NO_TIMES = 99, 90, 91, 92, 100
_FALLBACK = dict(logprob_threshold=-0.5, compression_ratio_threshold=1.1, no_speech_threshold=0.6)


@pytest.fixture(scope="module")
def hearing(device) -> tuple[nn.Module, nn.Module]:
    """A Whisper that may say when it has heard something, and a patched copy of it."""
    require_native(device)
    stock = small_model("whisper").to(device)
    known = dict(eos_token_id=_END, pad_token_id=_END, decoder_start_token_id=_START, prev_sot_token_id=_PREVIOUS)
    known |= dict(no_timestamps_token_id=_NO_TIMES, no_speech_token=_SILENCE, is_multilingual=False, max_length=40)
    known |= dict(return_timestamps=False, max_initial_timestamp_index=20, alignment_heads=[[0, 0], [1, 1]])
    known |= dict(suppress_tokens=[3, 4], begin_suppress_tokens=[5])
    for name, value in known.items():
        setattr(stock.generation_config, name, value)
    stock.config.eos_token_id = stock.config.pad_token_id = _END
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


@pytest.mark.parametrize(
    ("segments", "batch", "options"),
    [
        (1, 2, {}),
        (1, 2, dict(return_timestamps=True)),
        (1, 1, dict(return_timestamps=True, return_segments=True)),
        (1, 1, dict(return_dict_in_generate=True)),
        (2.5, 2, dict(return_timestamps=True)),
        (2, 1, dict(return_timestamps=True, temperature=(0.0, 0.4, 0.8), **_FALLBACK)),
        (2, 2, dict(return_timestamps=True, temperature=(0.0, 0.4), condition_on_prev_tokens=True, **_FALLBACK)),
    ],
    ids=["short", "times", "segments", "dict", "long", "fallback", "on what was said"],
)
def test_whisper_long_and_short(hearing, segments, batch, options):
    stock, ours = hearing
    config, generator = stock.config, torch.Generator().manual_seed(0)
    frames = int(segments * 2 * config.max_source_positions)
    inputs = {"input_features": torch.randn(batch, config.num_mel_bins, frames, generator=generator).to(stock.device)}
    if segments > 1:
        inputs["attention_mask"] = torch.ones(batch, frames, dtype=torch.long, device=stock.device)
    made = []
    for model in (ours, stock):
        torch.manual_seed(0)
        with counting(ours) as counts:
            found = model.generate(**inputs, **copy.deepcopy(options))
        if model is ours:
            assert counts.fast and not counts.fallback and not counts.reasons
        made.append(found if torch.is_tensor(found) else found["sequences"])
    assert_same_tokens(*made)


def test_whisper_tells_times_of_tokens(hearing):
    """These are made of attention weights, which stock code returns."""
    stock, ours = hearing
    shape = 1, stock.config.num_mel_bins, 2 * stock.config.max_source_positions
    sound = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(stock.device)
    with counting(ours) as counts:
        found = ours.generate(sound, return_timestamps=True, return_token_timestamps=True)
    assert set(counts.reasons) == {"attention_outputs"}
    expected = stock.generate(sound, return_timestamps=True, return_token_timestamps=True)
    assert_same_tokens(found["sequences"], expected["sequences"])
    assert torch.equal(found["token_timestamps"], expected["token_timestamps"])


# ---- what is left to stock code --------------------------------------------------------------------------------------


def test_what_is_left_to_stock():
    require_native(CPU)
    stock = small_model("bart")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1]])
    inputs = of(stock)
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for options, code in (
        (dict(attention_mask=mask), "attention_mask"),
        ({CACHE: own}, "other_cache"),
        (dict(output_attentions=True, return_dict_in_generate=True), "attention_outputs"),
        (dict(use_cache=False), "no_cache"),
        (dict(num_beams=3, attention_mask=mask), "attention_mask"),
        (dict(prompt_lookup_num_tokens=2), "generation_mode"),
    ):
        with counting(ours) as counts:
            found = ours.generate(**inputs | FEW | copy.deepcopy(options))
        assert counts.reasons == {code: 1}, code
        expected = stock.generate(**inputs | FEW | copy.deepcopy(options))
        found, expected = (each if torch.is_tensor(each) else each.sequences for each in (found, expected))
        assert_same_tokens(found, expected)


@pytest.mark.parametrize("model_type", ("nllb-moe", "prophetnet"))
def test_padding_that_is_left_to_stock(model_type):
    """NLLB's routers are given attention's mask, ProphetNet's attention is given none behind the prompt."""
    require_native(CPU)
    skip_if_drawing(model_type)
    stock = small_model(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = of(stock, 2) | {"decoder_input_ids": encoder_decoder_types.start(2, 5)}
    inputs["decoder_input_ids"][:, 0] = stock.generation_config.decoder_start_token_id  # else it is put in front
    for padding, code in ((0, None), (2, "attention_mask")):
        mask = torch.ones(2, 5, dtype=torch.long)
        mask[0, :padding] = 0
        given = inputs | {"decoder_attention_mask": mask}
        with counting(ours) as counts:
            found = ours.generate(**given, **FEW)
        assert counts.reasons == ({code: 1} if code else {}), padding
        assert_same_tokens(found, stock.generate(**given, **FEW))
    told = "is not given the mask" if model_type == "prophetnet" else "matters to more than attention"
    assert told in str(hf_fastpath.report(ours).stats["details"])


def test_many_sequences_of_several_streams():
    """A sequence is three rows of ProphetNet's products, and kernels for a few rows take 16."""
    require_native(CPU)
    stock = small_model("prophetnet")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for batch in (5, 6, 20):
        inputs = of(stock, batch, padding=4)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW)
        assert counts.fast == 12 * batch and not counts.reasons
        assert_same_tokens(found, stock.generate(**inputs, **FEW))


def test_experts_that_are_modules_and_of_which_tokens_need_different_ones():
    """Such weights lie apart: no kernel finds them by a number, and to read all takes as long as there are experts."""
    require_native(CPU)
    sparse = small_model("switch_transformers", num_sparse_decoder_layers=1)
    with pytest.raises(UnsupportedModelError, match="experts that are modules"):
        hf_fastpath.patch(sparse, quiet=True)


@pytest.mark.parametrize("options", (dict(), dict(num_beams=2)), ids=("greedy", "beams"))
def test_what_follows_the_prompt_is_asked_once(options, monkeypatch):
    require_native(CPU)
    ours = hf_fastpath.patch(small_model("bart"), quiet=True)
    inputs = of(ours, batch=2, padding=3)
    ours.generate(**inputs, **FEW, **options)
    asked, real = [], compat.inputs_behind
    monkeypatch.setattr(compat, "inputs_behind", lambda *given: asked.append(given) or real(*given))
    with counting(ours) as counts:
        ours.generate(**inputs, **FEW, **options)
    assert len(asked) == 1 and counts.fast and not counts.reasons


# ---- quantized weights --------------------------------------------------------------------------------------------


def test_the_decoder_is_quantized(models):
    """The linear layers that a token passes, and the head; not those that read the encoder's output once."""
    stock, _ = models
    format = list(FORMATS)[[*TYPES, *LIKE_OTHERS].index(stock.config.model_type) % len(FORMATS)]
    head = stock.get_output_embeddings()
    has_linear_head = type(head) is nn.Linear  # FSMT's is the table of embeddings
    lm_head = "int8" if has_linear_head else "fp16"
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, lm_head=lm_head, quiet=True)
    names = {id(module): name for name, module in stock.named_modules()}
    linears = [module for module in stock.get_decoder().modules() if type(module) is nn.Linear]
    inside = {names[id(module)] for module in linears if module.weight is not head.weight}
    inside = {name for name in inside if ".experts." not in name and ".router." not in name}  # none of a mixture
    kinds = "encoder_attn", "EncDecAttention", "cross_attention", "cross_attn"
    over_encoded = {name for name in inside if any(kind in name for kind in kinds)}
    once = {name for name in over_encoded if name.endswith((".k", ".v", "k_proj", "v_proj", "key_proj", "value_proj"))}
    assert bool(once) == (stock.config.model_type != "t5gemma2")  # of which the same layers make keys of either
    assert packed_in(ours).keys() == inside - once | ({names[id(head)]} if has_linear_head else set())
    same = with_dequantized(stock, ours)
    for options in (dict(), dict(num_beams=3)):
        inputs = of(stock, batch=2)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW | options)
        assert counts.fast and not counts.reasons
        assert_same_tokens(found, same.generate(**inputs, **FEW | options))


def test_quantized_weights_are_saved_copied_and_taken_back(models, tmp_path):
    stock = models[-2]
    check_saved_copied_and_taken_back(stock, of(stock), tmp_path)


def test_layers_whose_weights_other_code_reads_stay(monkeypatch):
    """T5 asks for a layer's weight: without an answer its code fails on quantized layers, and none are left behind."""
    require_native(CPU)
    stock = small_model("t5")
    ours = copy.deepcopy(stock)
    monkeypatch.delattr(PackedLinear, "weight")
    with pytest.raises(ValueError, match="does not run with quantized layers .*has no attribute 'weight'"):
        hf_fastpath.patch(ours, weights="int8", quiet=True)
    assert not packed_in(ours) and vars(ours).keys() == vars(stock).keys()
    monkeypatch.undo()
    assert packed_in(hf_fastpath.patch(ours, weights="int8", quiet=True))


def test_why_a_model_is_not_quantized():
    require_native(CPU)
    ours = small_model("bart")
    ours.model.decoder.layers[1].fc2.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"hooks\.\n.*\(model.decoder.layers.1.fc2"):
        hf_fastpath.patch(ours, weights="int8", quiet=True)


def test_a_head_that_is_no_linear_layer():
    require_native(CPU)
    with pytest.raises(ValueError, match="lm_head='int8' takes a model whose head is a linear layer"):
        hf_fastpath.patch(small_model("fsmt"), weights="int8", lm_head="int8", quiet=True)
