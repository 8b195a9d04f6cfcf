"""No token leaves a byte behind on the heap, whichever way it is made."""

from __future__ import annotations

import copy

import pytest
from heap import growth
from models import fresh, prompt

import hf_fastpath

TOKENS = 16
#: device -> calls of a window, windows; on a GPU torch and the driver fill pools of their own for some hundred calls,
#: in stock's generate() as well
CALLS = {"cpu": (3, 6), "cuda": (10, 12)}
#: kind -> options of ``patch()``, options of ``generate()``
KINDS = {
    "plain": ({}, {}),
    "sampled": ({}, {"do_sample": True}),
    "by_part": ({"ops": ("norm", "mlp", "attention", "layer")}, {}),
    "pages": ({"page_size": 16}, {}),
    "quantized_kv": ({"kv_dtype": "int8"}, {}),
    "quantized_weights": ({"weights": "int4_g32"}, {}),
    "prompt_lookup": ({}, {"prompt_lookup_num_tokens": 3}),
    "beams": ({}, {"num_beams": 2}),
}


@pytest.mark.parametrize("kind", (*KINDS, "assisted"))
def test_tokens_free_what_they_allocate(kind, device):
    stock, _ = fresh("mistral", device)
    options, given = KINDS.get(kind, ({}, {}))
    if kind == "assisted":
        given = {"assistant_model": hf_fastpath.patch(copy.deepcopy(stock), quiet=True)}
    model = hf_fastpath.patch(stock, quiet=True, **options)
    ids = prompt(device)
    settings = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS} | given
    calls, windows = CALLS[device.type]
    grown = growth(lambda: model.generate(ids, **settings), calls, windows)
    assert grown < calls * TOKENS, f"{grown / (calls * TOKENS)} bytes a token"
