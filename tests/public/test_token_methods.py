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


def greedy(model, length, count, **options):
    torch.manual_seed(1)
    ids = torch.randint(3, 150, (1, length))
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


def edits_tokens(self, input_ids, **kwargs):
    if input_ids.shape[1] > 24:
        input_ids = torch.cat((input_ids[:, :-1], input_ids[:, -1:] // 2), dim=1)
    return Glm4ForCausalLM.prepare_inputs_for_generation(self, input_ids, **kwargs)


def moves_positions(self, outputs, model_kwargs, **kwargs):
    found = Glm4ForCausalLM._update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs)
    return found | {"position_ids": found["position_ids"] * 2}


def reads_less(self, input_ids, *args, **kwargs):
    return Glm4ForCausalLM._prefill(self, input_ids // 2, *args, **kwargs)


@pytest.mark.parametrize("name, method", [*zip((*METHODS, "_prefill"), (edits_tokens, moves_positions, reads_less))])
def test_own_method_is_stocks(name, method):
    require_native(CPU)
    stock = small_model("glm4")
    plain = greedy(stock, 20, 12)
    stock.__class__ = type("Own", (Glm4ForCausalLM,), {name: method, "__module__": __name__})
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
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
