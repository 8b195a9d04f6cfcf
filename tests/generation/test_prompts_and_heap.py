"""A long prompt leaves nothing in the C library's heap, and no large block of it lies there."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from causal_lm_types import small_model
from heap import mapped_blocks
from models import CPU

import hf_fastpath
from hf_fastpath.decode.loops import prompt

#: run in a process of its own, where nothing that is free in the heap is large enough for a block
BLOCKS = """
import torch
from heap import mapped_blocks
from hf_fastpath.native.heap import BLOCK_BYTES, TRIMMED_BYTES, reading_prompt

def new_blocks(num_bytes):
    before, kept = mapped_blocks(), torch.empty(num_bytes, dtype=torch.uint8)
    return mapped_blocks() - before

with reading_prompt(BLOCK_BYTES):
    assert new_blocks(BLOCK_BYTES) == 1
    assert new_blocks(BLOCK_BYTES // 2) == 0
assert new_blocks(BLOCK_BYTES) == 0, "the limit is as in any process that has freed large blocks"
with reading_prompt(TRIMMED_BYTES):
    assert new_blocks(BLOCK_BYTES) == 0
"""


def test_large_blocks_of_a_prompt_lie_outside_of_the_heap():
    mapped_blocks()  # skips where there is no glibc
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", BLOCKS], env=environment, check=True, timeout=60)


def test_prompts_say_how_large_their_hidden_states_are(monkeypatch):
    seen, reading = [], prompt.reading_prompt

    def noted(num_bytes):
        seen.append(num_bytes)
        return reading(num_bytes)

    model = hf_fastpath.patch(small_model("glm4").to(CPU), quiet=True)
    monkeypatch.setattr(prompt, "reading_prompt", noted)
    width = model.get_input_embeddings().weight.shape[1]
    model.generate(torch.ones(2, 9, dtype=torch.long, device=CPU), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert seen == [2 * 9 * width * 4]
