"""Functions that the code of an inner model calls are replaced after ``patch()``, as packages of kernels do."""

from __future__ import annotations

import copy
import sys

import multimodal_types
import pytest
import torch
from models import CPU, counting, require_native

import hf_fastpath


@pytest.mark.parametrize("function", ("rotate_half", "apply_rotary_pos_emb"))
@pytest.mark.parametrize("name", ("llava", "glm4v"))
def test_a_replaced_function_takes_effect(name, function, monkeypatch):
    """LLaVA's decoder is Llama's, whose code lies in another module than the model's."""
    require_native(CPU)
    stock = multimodal_types.small_model(name).eval()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    call = multimodal_types.prompt(name, (1,)) | dict(max_new_tokens=8, do_sample=False)
    plain = stock.generate(**call)
    assert torch.equal(ours.generate(**call), plain)
    inner = next(each for each in ours.modules() if hasattr(each, "layer_idx"))
    module = sys.modules[type(inner).__module__]
    real = getattr(module, function)

    def scaled(*given, **named):
        found = real(*given, **named)
        return tuple(each * 1.3 for each in found) if isinstance(found, tuple) else found * 1.3

    with monkeypatch.context() as patch:
        patch.setattr(module, function, scaled)
        expected = stock.generate(**call)
        assert not torch.equal(expected, plain), "the function changes nothing, so the test shows nothing"
        with counting(ours) as counts:
            assert torch.equal(ours.generate(**call), expected)
        assert counts.fast or counts.reasons
    assert torch.equal(ours.generate(**call), plain)
