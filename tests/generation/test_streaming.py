"""Streamers get the calls that stock makes in the same order, whatever they do meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from models import GREEDY, counting, left_padded, pair, prompt, tokenizer, trained
from parity import assert_same_tokens
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer


class Recorder(BaseStreamer):
    """Writes down every call."""

    def __init__(self):
        self.calls: list = []

    def put(self, value):
        assert value.device.type == "cpu", "stock hands tokens over on the CPU"
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("batch", (1, 3))
def test_users_streamer_gets_stocks_calls(batch, device):
    stock, ours = pair("mistral", device)
    recorders = Recorder(), Recorder()
    with counting(ours) as counts:
        ours.generate(**left_padded(device, batch), streamer=recorders[0], **GREEDY)
    assert counts.fast == 20 * batch
    stock.generate(**left_padded(device, batch), streamer=recorders[1], **GREEDY)
    assert recorders[0].calls == recorders[1].calls
    assert recorders[0].calls.count("end") == 1 and len(recorders[0].calls) == 22


def test_streamer_does_not_see_tokens_past_the_end(device):
    stock, ours = pair("llama", device)
    eos = int(stock.generate(prompt(device), max_new_tokens=7, do_sample=False)[0, -1])
    recorders = Recorder(), Recorder()
    for model, recorder in zip((ours, stock), recorders):
        model.generate(prompt(device), streamer=recorder, eos_token_id=eos, **GREEDY)
    assert recorders[0].calls == recorders[1].calls and len(recorders[1].calls) < 22


def test_text_streamer_prints_the_same(device, capsys):
    stock, ours = trained(device)
    inputs = tokenizer()("import os\n\n\ndef", return_tensors="pt").to(device)
    printed = []
    for model in (ours, stock):
        model.generate(
            **inputs, streamer=TextStreamer(tokenizer(), skip_prompt=True), max_new_tokens=40, do_sample=False
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 20


def test_text_iterator_streamer_in_a_thread(device):
    _, ours = trained(device)
    inputs = tokenizer()("import os\n\n\ndef", return_tensors="pt").to(device)
    expected = ours.generate(**inputs, max_new_tokens=40, do_sample=False)
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    options = dict(**inputs, streamer=streamer, max_new_tokens=40, do_sample=False)
    thread = threading.Thread(target=ours.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer().decode(expected[0])


def test_async_text_iterator_streamer(device):
    """The event loop reads while another thread generates."""
    stock, ours = trained(device)
    inputs = tokenizer()("import os\n\n\ndef", return_tensors="pt").to(device)

    async def read(model) -> list[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer(), timeout=60)
        options = dict(**inputs, streamer=streamer, max_new_tokens=40, do_sample=False)
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        texts = [text async for text in streamer]
        thread.join()
        return texts

    found, expected = asyncio.run(read(ours)), asyncio.run(read(stock))
    assert found == expected and len(found) > 20


def test_sampled_tokens_are_streamed(device):
    """Tokens and end tokens are drawn on the device; the streamer gets what the call returns."""
    _, ours = pair("mistral", device)
    recorder = Recorder()
    out = ours.generate(prompt(device), streamer=recorder, do_sample=True, max_new_tokens=60, eos_token_id=[5, 60, 61])
    assert sum(recorder.calls[1:-1], []) == out[0, 11:].tolist()


def test_generate_from_inside_the_streamer(device):
    """The inner call finds the loop busy, says so, and is right; so is the outer call."""
    stock, ours = pair("mistral", device)
    inner = []

    class Nosy(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 6:
                inner.append(ours.generate(prompt(device, 2, seed=9), **GREEDY))

    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2), streamer=Nosy(), **GREEDY)
    assert counts.fast == 80 and counts.reasons == {"custom_streamer": 1}
    assert_same_tokens(found, stock.generate(prompt(device, 2), **GREEDY), stock)
    assert_same_tokens(inner[0], stock.generate(prompt(device, 2, seed=9), **GREEDY), stock)


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
def test_an_exception_in_the_streamer_leaves_the_model_usable(error, device):
    stock, ours = pair("gpt2", device)

    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 5:
                raise error("stop")

    with pytest.raises(error):
        ours.generate(prompt(device), streamer=Failing(), **GREEDY)
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **GREEDY)
    assert counts.fast == 20, counts.reasons
    assert torch.equal(found, stock.generate(prompt(device), **GREEDY))
