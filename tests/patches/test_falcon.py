"""Falcon: bytes of its cache, and its masks."""

import pytest
import torch
from models import CPU, SHORT, build, counting, fresh, prompt
from parity import assert_same_tokens

import hf_fastpath
from hf_fastpath import traffic
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.sources import steps

#: the structure of Falcon 7B; the test model has the structure of 40B and 180B
OLD = {"new_decoder_architecture": False}


@torch.no_grad()
@pytest.mark.parametrize("changes", ({}, OLD, OLD | {"multi_query": False, "num_kv_heads": 4}))
def test_falcon_kv_bytes_are_those_of_the_cache(changes):
    model = build("falcon", **changes)
    cache = model(prompt(CPU, 1, 9), use_cache=True)[CACHE]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert traffic.kv_bytes(model.config, 9, torch.float32) == held


@torch.no_grad()
def test_falcon_makes_a_mask_for_every_token(device):
    """A forward that is no step of a plan therefore runs stock layers, and says why; steps and generate() are fast."""
    stock, ours = fresh("falcon", device)
    ids = prompt(device, 2, 9)
    for asked, reasons in ({}, set()), (dict(output_hidden_states=True), {"attention_mask"}):
        cache = hf_fastpath.FastpathCache(ours.config)
        with counting(ours) as counts:
            found = [ours(part, **{CACHE: cache}, **asked).logits[:, -1] for part in ids.split((8, 1), dim=1)]
        assert set(counts.reasons) == reasons
        torch.testing.assert_close(found[1], stock(ids).logits[:, -1])
    with counting(ours) as counts:
        beams = ours.generate(ids, num_beams=3, **SHORT)
    assert counts.fast and not counts.reasons
    assert_same_tokens(beams, stock.generate(ids, num_beams=3, **SHORT))


@torch.no_grad()
def test_falcon_layers_without_a_mask(monkeypatch):
    """A layer that the user's own code calls for one token gives the pair that stock gives."""
    outputs, fused, decoder_layer = [], [], steps.decoder_layer
    monkeypatch.setattr(steps, "decoder_layer", lambda *given: fused.append(0) or decoder_layer(*given))
    for model in fresh("falcon"):
        cache = hf_fastpath.FastpathCache(model.config)
        model(prompt(CPU, 1, 9), **{CACHE: cache})
        x = torch.linspace(-1, 1, 160).view(1, 1, 160)
        angles = model.transformer.rotary_emb(x, torch.tensor([[9]]))
        outputs.append(
            model.transformer.h[0](x, None, None, layer_past=cache, use_cache=True, position_embeddings=angles)
        )
    (expected, _), (found, weights) = outputs
    assert fused and weights is None
    torch.testing.assert_close(found, expected)
