"""pipeline("text-generation") around a patched model, as chat and as text."""

from __future__ import annotations

import copy

import pytest
import torch
from models import counting, tokenizer, trained
from transformers import pipeline

TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
CHAT = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def add(a, b):"}]
LONGER = [*CHAT, {"role": "assistant", "content": "return a + b"}, {"role": "user", "content": "def sub(a, b):"}]
INPUTS = {
    "chat": (CHAT, {}, 24),
    "chats_in_a_batch": ([CHAT, LONGER], dict(batch_size=2), 48),
    "text": ("import os\n\n\ndef", {}, 24),
    "texts": (["import os\n\n\ndef", "class Config:"], dict(num_return_sequences=2, do_sample=True), 96),
}


@pytest.mark.parametrize("name", INPUTS)
def test_pipeline(name, device):
    """The fast loop gives the same answers."""
    given, options, tokens = INPUTS[name]
    stock, ours = trained(device)
    encoder = copy.deepcopy(tokenizer())
    encoder.chat_template = TEMPLATE
    options = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False) | options
    with counting(ours) as counts:
        found = _answers(ours, encoder, given, options)
    assert counts.fast == tokens and not counts.fallback, counts.reasons
    assert found == _answers(stock, encoder, given, options)


def _answers(model, encoder, given, options: dict):
    torch.manual_seed(5)
    return pipeline("text-generation", model=model, tokenizer=encoder, device=model.device)(given, **options)
