"""Recorded steps behind an encoder: attention over what it has read, masks over that, and T5's relative positions."""

from __future__ import annotations

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
from encoder_decoder_types import small_model
from models import CPU, counting, require_native
from parity import assert_same_tokens
from transformers import BartForConditionalGeneration

import hf_fastpath
from hf_fastpath.decode.plans.encoded import Seen
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import marks
from hf_fastpath.recording.placed_model import RecordedAlone
from hf_fastpath.recording.recorded_model import RecordedModel
from hf_fastpath.recording.recorded_step import Unrecordable


def part_of(model) -> RecordedModel:
    return RecordedAlone(model).model_part(model)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 1], [1, 1, 1]], ([0, 0], [3, 3])),
        ([[1, 1, 0], [1, 0, 0]], ([0, 0], [2, 1])),
        ([[0, 1, 1], [0, 0, 1]], ([1, 2], [3, 3])),
        ([[0, 1, 0], [1, 1, 1]], ([1, 0], [2, 3])),
        ([[1, 0, 1], [1, 1, 1]], None),
        ([[1, 1, 1], [0, 0, 0]], None),
        ([[2, 2, 2], [1, 1, 1]], None),
    ],
    ids=["all", "right", "left", "both", "hole", "nothing", "other numbers"],
)
@pytest.mark.parametrize("dtype", (torch.long, torch.float32))
def test_masks_are_runs(mask, expected, dtype):
    found = Seen.by_mask(torch.tensor(mask, dtype=dtype))
    assert (found is None) == (expected is None)
    if expected is not None:
        assert (found.starts.tolist(), found.ends.tolist()) == expected
        assert found.starts.dtype == found.ends.dtype == torch.int32


@pytest.mark.parametrize("model_type", ("bart", "mvp", "led", "whisper", "t5"))
def test_attention_over_what_an_encoder_has_read(model_type):
    """Through the interface of transformers, or of a model's own."""
    model = small_model(model_type)
    recording = part_of(model).recording(2, 1)
    found = [call for call in recording.calls if call.op is marks.attend_encoded]
    assert [call.arguments["layer"] for call in found] == list(range(len(recording.encoded)))
    for call in found:
        batch, query_len, heads, head_dim = recording.fact(call.arguments["q"]).shape
        keys = recording.fact(call.arguments["k"])
        assert (batch, query_len) == (2, 1) and keys.shape == (2, heads, recording.encoded_length, head_dim)
        assert call.arguments["scale"] in (1.0, head_dim**-0.5)


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("bart", dict(encoder_layers=3, decoder_layers=1)),
        ("bart", dict(encoder_layers=1, decoder_layers=3)),
        ("whisper", dict(encoder_layers=3, decoder_layers=1)),
        ("whisper", dict(encoder_layers=1, decoder_layers=3)),
        ("t5", dict(num_layers=3, num_decoder_layers=1)),
    ],
)
def test_encoders_and_decoders_of_different_depths(model_type, layers):
    """The cache has as many layers as the decoder, whatever the config tells."""
    count = layers.get("decoder_layers", layers.get("num_decoder_layers"))
    require_native(CPU)
    stock = small_model(model_type, **layers)
    ours = hf_fastpath.patch(small_model(model_type, **layers), quiet=True)
    part = state_of(ours).plans.part_of(ours)
    assert len(part.kinds) == len(part.layers) == len(part.recording(1, 1).encoded) == count
    inputs = encoder_decoder_types.output(stock, 2, 9, 3) | {"decoder_input_ids": encoder_decoder_types.start(2)}
    for beams in (1, 3):
        options = dict(max_new_tokens=6, do_sample=False, num_beams=beams)
        with counting(ours) as counts:
            found = encoder_decoder_types.generate(ours, inputs, **options)
        assert counts.fast and not counts.reasons
        assert_same_tokens(found, encoder_decoder_types.generate(stock, inputs, **options))


class Reading(BartForConditionalGeneration):
    """Reads the encoder's output with every token."""

    def forward(self, *args, encoder_outputs=None, **kwargs):
        out = super().forward(*args, encoder_outputs=encoder_outputs, **kwargs)
        out.logits = out.logits + encoder_outputs[0].mean()
        return out


def test_an_output_that_is_read_with_every_token():
    part = part_of(Reading(small_model("bart").config).eval())
    with pytest.raises(Unrecordable, match="reads the encoder's output with every token"):
        part.recording(1, 1)
    with pytest.raises(Unrecordable, match="several tokens at once"):
        part_of(small_model("bart")).recording(1, 2)


def test_relative_positions_are_a_table_by_distance():
    model = small_model("t5")
    attention = model.decoder.block[0].layer[0].SelfAttention
    recording = part_of(model).recording(1, 1)
    (table,) = recording.values
    heads, distances = table.shape
    assert heads == attention.n_heads and 100 < distances <= attention.relative_attention_max_distance
    memory = table.memory(CPU)
    with torch.no_grad():
        for _ in range(2):
            table.fill(memory)
            for length in (1, 2, 40, 300):
                expected = attention.compute_bias(1, length, past_seen_tokens=length - 1)[0, :, 0]
                behind = torch.arange(length - 1, -1, -1).clamp(max=distances - 1)
                assert torch.equal(memory[:, behind], expected)
            attention.relative_attention_bias.weight.mul_(-0.5)  # the next plan finds the weights as they are then


def test_every_layer_may_have_relative_positions_of_its_own():
    recording = part_of(small_model("umt5")).recording(1, 1)
    assert len(recording.values) == len(recording.encoded) == 2


def test_weights_of_relative_positions_may_change():
    require_native(CPU)
    inputs = encoder_decoder_types.text(1, 9)
    stock, ours = small_model("t5"), hf_fastpath.patch(small_model("t5"), quiet=True)
    before = ours.generate(**inputs, max_new_tokens=12, do_sample=False)
    plans = list(state_of(ours).plans)
    with torch.no_grad():
        for model in (stock, ours):
            model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.mul_(-8)
    found, expected = (model.generate(**inputs, max_new_tokens=12, do_sample=False) for model in (ours, stock))
    assert_same_tokens(found, expected)
    assert not torch.equal(found, before) and list(state_of(ours).plans) == plans


def test_a_text_that_is_longer_than_the_table():
    require_native(CPU)
    inputs = encoder_decoder_types.text(2, 9, padding=3)
    stock, ours = small_model("t5"), hf_fastpath.patch(small_model("t5"), quiet=True)
    found, expected = (model.generate(**inputs, max_new_tokens=160, do_sample=False) for model in (ours, stock))
    assert_same_tokens(found, expected)


@pytest.mark.parametrize(
    ("model_type", "learned", "computed"),
    [
        ("bart", (256, 2), None),
        ("whisper", (256, 0), None),
        ("t5", None, None),
        ("m2m_100", None, 257),
        ("moonshine", None, None),
    ],
)
def test_tables_of_positions(model_type, learned, computed):
    part = part_of(small_model(model_type))
    assert (part.learned_positions, part.computed_positions) == (learned, computed)


def test_a_text_that_is_longer_than_a_table_of_positions():
    """Stock code makes M2M100's table longer."""
    require_native(CPU)
    inputs = encoder_decoder_types.text(1, 9)
    stock, ours = small_model("m2m_100"), hf_fastpath.patch(small_model("m2m_100"), quiet=True)
    for tokens, code in ((30, None), (262, "position_ids")):
        with counting(ours) as counts:
            found = ours.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        assert counts.reasons == ({} if code is None else {code: 1})
        assert_same_tokens(found, stock.generate(**inputs, max_new_tokens=tokens, do_sample=False))
    with counting(ours) as counts:
        ours.generate(**inputs, max_new_tokens=100, do_sample=False)
    assert counts.fast == 100 and not counts.reasons


@pytest.mark.parametrize("model_type", ["bart", "t5", "led", "fsmt"])
def test_padding_of_the_text(model_type):
    """LED and FSMT forget it behind the prompt; where padding is not hidden, stock's loop shows the same."""
    require_native(CPU)
    stock = small_model(model_type)
    ours = hf_fastpath.patch(small_model(model_type), quiet=True)
    text = dict(decoder_input_ids=torch.tensor([[0, 2, 5], [2, 6, 7]]))
    text |= dict(decoder_attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    inputs = encoder_decoder_types.text(2, 9) | text
    with counting(ours) as counts:
        found = ours.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert_same_tokens(found, stock.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert counts.reasons == ({"attention_mask": 1} if model_type in ("led", "fsmt") else {})
    unpadded = {name: each for name, each in inputs.items() if name != "decoder_attention_mask"}
    with counting(ours) as counts:
        ours.generate(**unpadded, max_new_tokens=8, do_sample=False)
    assert counts.fast and not counts.reasons


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_model_in_training_is_patched_and_waits_for_eval(kind):
    """Dropout draws numbers in stock's steps, which ours would not; or a number decides whether a layer is left out."""
    require_native(CPU)
    model, inputs = small_model(kind), encoder_decoder_types.text(1, 9)
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    ours = hf_fastpath.patch(model.train(), quiet=True)
    assert hf_fastpath.report(ours).loop == "dropout"
    with counting(ours) as counts:
        ours.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert set(counts.reasons) == {"dropout"} and not counts.fast
    (detail,) = hf_fastpath.report(ours).details["loop: dropout"]
    assert "draws random numbers" in detail or "decides what is called next" in detail, detail
    assert "model.eval()" in str(hf_fastpath.report(ours))
    with counting(ours.eval()) as counts:
        assert_same_tokens(ours.generate(**inputs, max_new_tokens=5, do_sample=False), expected)
    assert counts.fast and not counts.reasons


def test_a_model_without_dropout_is_fast_in_training():
    require_native(CPU)
    model, ids = causal_lm_types.small_model("glm4"), torch.ones(1, 4, dtype=torch.long)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    ours = hf_fastpath.patch(model.train(), quiet=True)
    with counting(ours) as counts:
        assert_same_tokens(ours.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert counts.fast == 5 and not counts.reasons
