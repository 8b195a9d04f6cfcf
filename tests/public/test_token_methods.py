"""Methods of a model's class that ``generate()`` calls for every token, and that no recorded forward shows."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
import transformers
from causal_lm_types import small_model
from models import CPU, counting, require_native
from transformers.models.glm4.modeling_glm4 import Glm4ForCausalLM

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.compat import token_methods
from hf_fastpath.compat.token_methods import digest_of_source

METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
#: classes of transformers whose own methods give a token more, or other things, than itself and its position
NOT_TAKEN = """ClvpForCausalLM CpmAntForCausalLM CsmDepthDecoderForCausalLM CsmForConditionalGeneration
    FlaubertWithLMHeadModel HiggsAudioV2ForConditionalGeneration IdeficsForVisionText2Text
    KyutaiSpeechToTextForConditionalGeneration MoshiForConditionalGeneration MusicgenForCausalLM
    MusicgenForConditionalGeneration MusicgenMelodyForCausalLM MusicgenMelodyForConditionalGeneration
    NemotronAsrStreamingGenerationMixin OpenAIGPTLMHeadModel ParakeetRNNTGenerationMixin ParakeetTDTGenerationMixin
    PocketTTSGenerationMixin Qwen2_5OmniTalkerForConditionalGeneration
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration Qwen3OmniMoeTalkerForConditionalGeneration
    RagTokenForGeneration ReformerModelWithLMHead RwkvForCausalLM VoxtralRealtimeForConditionalGeneration
    XLMWithLMHeadModel XLNetLMHeadModel""".split()


def overrides():
    """Yield class, method and source of every override in the installed transformers."""
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/[mg]*.py")):
        text = path.read_text()
        if path.name.startswith("modular_") or not any(f"def {name}" in text for name in METHODS):
            continue
        classes = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.ClassDef))
        for cls in classes:
            yield from ((cls.name, each) for each in cls.body if getattr(each, "name", None) in METHODS)


def test_every_override_of_transformers_was_looked_at():
    """Of a class in a table, the table has the installed version; no other class is left to chance."""
    tables = token_methods._SAME_INPUTS, token_methods._FORGETTING, token_methods._READING_AGAIN
    seen, unknown = 0, []
    for owner, method in overrides():
        of_inputs = method.name == METHODS[0]
        known = [each.get(owner, ()) for each in (tables if of_inputs else (token_methods._SAME_ARGUMENTS,))]
        is_taken = sum(digest_of_source(method) in each for each in known)
        seen += is_taken
        if is_taken != (owner not in NOT_TAKEN):
            unknown.append((owner, method.name))
    assert not unknown and seen > 30


def greedy(model, length, count, rows=1, **options):
    torch.manual_seed(1)
    ids = torch.randint(3, 150, (rows, length))
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **options)


def compared(ours, stock, length, count, **options):
    """Return the reasons of a call, whose tokens are stock's."""
    with counting(ours) as counts:
        found = greedy(ours, length, count, **options)
    assert torch.equal(found, greedy(stock, length, count, **options))
    assert counts.fast == (0 if counts.reasons else count)
    return counts.reasons


def test_phi4_drops_its_cache_once():
    """Behind the positions that it was trained with, stock gives the forward one token and no cache."""
    require_native(CPU)
    stock = small_model("phi4_multimodal")
    limit = stock.config.original_max_position_embeddings
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert not compared(ours, stock, limit - 8, 9)
    assert compared(ours, stock, limit - 8, 16) == {"generation_method": 1}
    assert compared(ours, stock, limit, 4) == {"generation_method": 1}
    assert "drops the cache behind 64 tokens" in str(hf_fastpath.report(ours))


def test_phi3_reads_its_text_again():
    """At positions that turn as before, keys and values come out as they were."""
    require_native(CPU)
    stock = small_model("phi3")
    limit = stock.config.original_max_position_embeddings = 40
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    drop = token_methods.cache_drop(ours)
    reasons = compared(ours, stock, limit - 8, 16)
    assert drop.length == limit and bool(reasons) is not drop.is_read_again
    assert compared(ours, stock, limit - 8, 16, num_beams=2) == {"generation_method": 1}
    assert compared(ours, stock, limit - 8, 16, prompt_lookup_num_tokens=3).keys() <= {"generation_method"}


# ---- own methods that are asked for every token ------------------------------------------------------------------

of_glm4 = Glm4ForCausalLM.prepare_inputs_for_generation


def gives_the_same(self, input_ids, **kwargs):
    return of_glm4(self, input_ids, **kwargs)


def names_less(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
    """As classes that were written for older versions."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    new = input_ids if cache is None else input_ids[:, cache.get_seq_length() :]
    return {"input_ids": new, "past_key_values": cache, "attention_mask": attention_mask, "use_cache": True}


def edits_newest(self, input_ids, **kwargs):
    if input_ids.shape[1] > 24:
        input_ids = torch.cat((input_ids[:, :-1], input_ids[:, -1:] // 2), dim=1)
    return of_glm4(self, input_ids, **kwargs)


def behind(length, change):
    def method(self, input_ids, **kwargs):
        found = of_glm4(self, input_ids, **kwargs)
        return found if input_ids.shape[1] <= length else found | change(found, input_ids, kwargs)

    return method


def shown(found, ids):
    mask = found.get("attention_mask")
    return torch.ones_like(ids, dtype=torch.float32) if mask is None else mask.bool()


def drops_cache(found, ids, kwargs):
    return {compat.CACHE: None, "use_cache": False, "position_ids": None, "attention_mask": None, "input_ids": ids}


def takes_back(found, ids, kwargs):
    cache = kwargs[compat.CACHE]
    if ids.shape[1] == 25:
        cache.crop(-2)
    return {"attention_mask": torch.ones(len(ids), cache.get_seq_length() + 1)}


#: name -> method, how many of 12 tokens behind 20 are fast (the first one comes out of the prompt)
ASKED = {
    "the same": (gives_the_same, 12),
    "less names": (names_less, 12),
    "newest token": (edits_newest, 12),
    "another mask, which says the same": (behind(24, lambda found, ids, kw: {"attention_mask": shown(found, ids)}), 12),
    "positions": (behind(24, lambda found, ids, kw: {"position_ids": found["position_ids"] * 2}), 5),
    "mask": (behind(24, lambda found, ids, kw: {"attention_mask": (ids > 75).long()}), 5),
    "all tokens": (behind(24, drops_cache), 5),
    "two tokens": (behind(24, lambda found, ids, kw: {"input_ids": ids[:, -2:], "position_ids": None}), 5),
    "cropped cache": (behind(24, takes_back), 5),
    "embeddings": (
        behind(24, lambda f, ids, kw: {"input_ids": None, "inputs_embeds": torch.ones(len(ids), 1, 64)}),
        5,
    ),
    "logits of hidden states": (behind(24, lambda f, ids, kw: {"output_hidden_states": True}), 5),
}


def own(method, name=METHODS[0]):
    stock = small_model("glm4")
    stock.__class__ = type("Own", (Glm4ForCausalLM,), {name: method, "__module__": __name__})
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


@pytest.mark.each_value
@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
@pytest.mark.parametrize("what", ASKED)
def test_own_method_is_asked_for_every_token(what, padded):
    """Plans go on as long as it gives what they read; stock's forward goes on from there."""
    require_native(CPU)
    method, fast = ASKED[what]
    stock, ours = own(method)
    rows, options = (3, {}) if padded else (1, {})
    if padded:
        options["attention_mask"] = torch.ones(rows, 20, dtype=torch.long)
        options["attention_mask"][1, :4] = 0
    with counting(ours) as counts:
        found = greedy(ours, 20, 12, rows=rows, **options)
    assert torch.equal(found, greedy(stock, 20, 12, rows=rows, **options))
    assert (counts.fast, counts.fallback) == (rows * fast, rows * (12 - fast))
    assert counts.reasons == ({} if fast == 12 else {"generation_method": 1})
    assert fast == 12 or "prepare_inputs_for_generation is " in str(hf_fastpath.report(ours))


def prepends(self, input_ids, inputs_embeds=None, is_first_iteration=False, **kwargs):
    """As prompts that were learned."""
    found = of_glm4(self, input_ids, is_first_iteration=is_first_iteration, **kwargs)
    if not is_first_iteration:
        return found | {"position_ids": None, "attention_mask": None}
    learned = torch.full((len(input_ids), 3, 64), 0.2)
    embeds = torch.cat((learned, self.get_input_embeddings()(input_ids)), dim=1)
    return found | {"input_ids": None, "position_ids": None, "attention_mask": None, "inputs_embeds": embeds}


def test_more_in_front_of_the_text_than_its_tokens():
    require_native(CPU)
    stock, ours = own(prepends)
    plain = greedy(small_model("glm4"), 20, 12)
    assert not compared(ours, stock, 20, 12)
    assert not torch.equal(greedy(ours, 20, 12), plain)


def edits(what):
    """Return a method that changes the model at a length of the text, as callbacks may."""

    def method(self, input_ids, **kwargs):
        if input_ids.shape[1] == 25:
            layer = self.model.layers[1]
            if what == "module":
                layer.mlp = torch.nn.Identity()
            elif what == "attribute":
                layer.mlp.activation_fn = torch.nn.Tanh()
            elif what == "parameter":
                self.lm_head.weight = torch.nn.Parameter(-self.lm_head.weight)
            else:
                layer.register_forward_hook(lambda module, given, result: -result)
        return of_glm4(self, input_ids, **kwargs)

    return method


@pytest.mark.parametrize("what", ("module", "attribute", "parameter", "hook"))
def test_the_method_may_change_the_model(what):
    require_native(CPU)
    stock, ours = own(edits(what))
    before = greedy(small_model("glm4"), 20, 12)
    found = greedy(ours, 20, 12)
    assert torch.equal(found, greedy(stock, 20, 12)) and not torch.equal(found, before)


def test_a_method_without_positions_may_change_the_model():
    """Stock's forward goes on, and nobody compares its inputs with what a plan would read."""
    require_native(CPU)
    changes = edits("hook")

    def method(self, input_ids, **kwargs):
        changes(self, input_ids, **kwargs)
        return names_less(self, input_ids, **kwargs)

    stock, ours = own(method)
    assert torch.equal(greedy(ours, 20, 12), greedy(stock, 20, 12))


def counts_calls(self, input_ids, *args, **kwargs):
    """Take arguments by any name, and keep state."""
    found = of_glm4(self, input_ids, *args, **kwargs)
    self.seen = [*getattr(self, "seen", ()), input_ids.shape[1]]
    return found | {"input_ids": found["input_ids"] * 0 + 5} if len(self.seen) == 4 else found


def test_nobody_but_generate_calls_the_method():
    """Neither patch() nor a recording nor a proof."""
    require_native(CPU)
    stock, ours = own(counts_calls)
    assert not hasattr(ours, "seen")
    for _ in range(2):
        assert torch.equal(greedy(ours, 20, 12), greedy(stock, 20, 12)) and ours.seen == stock.seen


@pytest.mark.parametrize("options", (dict(num_beams=2), dict(prompt_lookup_num_tokens=3)), ids=("beams", "drafts"))
def test_loops_that_cannot_ask(options):
    require_native(CPU)
    stock, ours = own(edits_newest)
    assert compared(ours, stock, 20, 12, **options) == {"generation_method": 1}


def test_sampling_and_a_second_turn():
    require_native(CPU)
    stock, ours = own(edits_newest)
    ids = torch.randint(3, 150, (2, 15))
    found = []
    for model in (stock, ours):
        torch.manual_seed(3)
        cache = None
        for _ in range(3):
            text = ids if cache is None else torch.cat((found[-1], ids[:, :4]), dim=1)
            given = {} if cache is None else {compat.CACHE: cache}
            result = model.generate(
                text, max_new_tokens=6, do_sample=True, top_k=5, pad_token_id=0, return_dict_in_generate=True, **given
            )
            cache = result[compat.CACHE]
            found.append(result.sequences)
    assert all(map(torch.equal, found[:3], found[3:]))
    assert hf_fastpath.report(ours).stats["fast_tokens"] == 36


def moves_positions(self, outputs, model_kwargs, **kwargs):
    found = Glm4ForCausalLM._update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs)
    return found | {"position_ids": found["position_ids"] * 2}


def reads_less(self, input_ids, *args, **kwargs):
    return Glm4ForCausalLM._prefill(self, input_ids // 2, *args, **kwargs)


@pytest.mark.parametrize("name, method", ((METHODS[1], moves_positions), ("_prefill", reads_less)))
def test_own_method_is_stocks(name, method):
    require_native(CPU)
    plain = greedy(small_model("glm4"), 20, 12)
    stock, ours = own(method, name)
    assert compared(ours, stock, 20, 12) == {"generation_method": 1}
    assert not torch.equal(plain, greedy(stock, 20, 12))
    assert f"{name} is " in str(hf_fastpath.report(ours))


def test_source_that_is_not_the_codes_is_not_known(monkeypatch):
    """A file may have changed since it was imported."""
    known = vars(transformers.BambaForCausalLM)[METHODS[0]]
    assert token_methods._is_looked_at(known, METHODS[0])
    code = known.__code__.replace(co_consts=tuple("other" if each == "logits_to_keep" else each
                                                  for each in known.__code__.co_consts))  # fmt: skip
    monkeypatch.setattr(known, "__code__", code)
    assert not token_methods._is_looked_at(known, METHODS[0])
