"""Every logits processor and warper for which generate() has an option: the fast loop gives stock's tokens."""

from __future__ import annotations

import inspect
import re

import pytest
from models import counting, left_padded, pair, prompt
from parity import assert_same_tokens, both
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import GenerationMixin, logits_process

#: end tokens that a random model soon draws
_ENDS = list(range(40, 80))
#: class in transformers -> options of generate() that make one
PROCESSORS: dict[str, dict] = {
    "MinLengthLogitsProcessor": dict(min_length=17, eos_token_id=_ENDS),
    "MinNewTokensLengthLogitsProcessor": dict(min_new_tokens=6, eos_token_id=_ENDS),
    "TemperatureLogitsWarper": dict(temperature=0.6),
    "RepetitionPenaltyLogitsProcessor": dict(repetition_penalty=1.4),
    "EncoderRepetitionPenaltyLogitsProcessor": dict(encoder_repetition_penalty=1.5),
    "TopPLogitsWarper": dict(top_p=0.6, top_k=0),
    "TopKLogitsWarper": dict(top_k=5),
    "TopHLogitsWarper": dict(top_h=0.4),
    "MinPLogitsWarper": dict(min_p=0.1),
    "TypicalLogitsWarper": dict(typical_p=0.5),
    "EpsilonLogitsWarper": dict(epsilon_cutoff=0.01),
    "EtaLogitsWarper": dict(eta_cutoff=0.01),
    "NoRepeatNGramLogitsProcessor": dict(no_repeat_ngram_size=2),
    "EncoderNoRepeatNGramLogitsProcessor": dict(encoder_no_repeat_ngram_size=1),
    "SequenceBiasLogitsProcessor": dict(sequence_bias=[[[9], 5.0], [[9, 12], -4.0]]),
    "NoBadWordsLogitsProcessor": dict(bad_words_ids=[[5], [7, 8], *([token] for token in range(100, 200))]),
    "PrefixConstrainedLogitsProcessor": dict(
        prefix_allowed_tokens_fn=lambda row, ids: list(range(10 + int(ids[-1]) % 5 + row, 200, 3))
    ),
    "ForcedBOSTokenLogitsProcessor": dict(forced_bos_token_id=9),
    "ForcedEOSTokenLogitsProcessor": dict(forced_eos_token_id=9),
    "InfNanRemoveLogitsProcessor": dict(remove_invalid_values=True),
    "ExponentialDecayLengthPenalty": dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=9),
    "LogitNormalization": dict(renormalize_logits=True, top_k=5),
    "SuppressTokensAtBeginLogitsProcessor": dict(begin_suppress_tokens=list(range(3, 200))),
    "SuppressTokensLogitsProcessor": dict(suppress_tokens=list(range(3, 200))),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": dict(guidance_scale=1.5),
    "WatermarkLogitsProcessor": dict(watermarking_config=WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")),
    "SynthIDTextWatermarkLogitsProcessor": dict(
        watermarking_config=SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    ),
}
#: reasons that a call counts besides its fast tokens
REASONS = {
    "PrefixConstrainedLogitsProcessor": "custom_logits_processor",  # it calls the user's function
}
#: warpers that a plan applies by itself, so that only the token behind the prompt passes through them
IN_THE_PLAN = ("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "MinPLogitsWarper")
#: processors that need a prompt of one token
_ONE_TOKEN = ("ForcedBOSTokenLogitsProcessor",)


def test_every_processor_with_an_option_is_here():
    made = re.findall(r"processors\.append\(\s*(\w+)\(", inspect.getsource(GenerationMixin._get_logits_processor))
    assert len(made) > 20 and set(made) <= set(PROCESSORS)


CASES = [(name, sample) for name in PROCESSORS for sample in (True, False) if sample or not name.endswith("Warper")]


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "sample"), CASES, ids=[f"{n}-{'sample' if s else 'greedy'}" for n, s in CASES])
def test_processor_tokens_equal(name, sample, device, monkeypatch):
    """Two padded rows go across the window; if the host chooses, processors are called as often, and the generator ends
    in the same state."""
    stock, ours = pair("mistral", device)
    inputs = dict(input_ids=prompt(device, 2, 1)) if name in _ONE_TOKEN else left_padded(device, 2)
    cls, lengths = getattr(logits_process, name), []
    real = cls.__call__
    monkeypatch.setattr(cls, "__call__", lambda self, ids, s: (lengths.append(ids.shape[1]), real(self, ids, s))[1])
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, max_new_tokens=14, do_sample=sample, **PROCESSORS[name])
    steps = range(inputs["input_ids"].shape[1], found.shape[1])
    assert counts.fast == 2 * len(steps) and not counts.fallback
    assert set(counts.reasons) == ({REASONS[name]} if name in REASONS else set())
    assert_same_tokens(found, expected, None if sample else stock, inputs.get("attention_mask"))
    if name in IN_THE_PLAN:
        assert lengths == [steps[0], *steps]
    else:
        once = len(lengths) // 2
        assert lengths and (device.type == "cuda" or lengths[:once] == lengths[once:])  # on CUDA our loop runs ahead
