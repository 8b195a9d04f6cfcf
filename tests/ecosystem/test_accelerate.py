"""accelerate: models spread over devices and disk, and the training wrapper."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from models import (
    SHORT,
    assert_same_instances,
    build,
    counting,
    fresh,
    instances,
    left_padded,
    prompt,
    require_native,
)
from parity import assert_same_tokens

import hf_fastpath
from hf_fastpath import UnsupportedModelError


def to_disk(model, folder) -> None:
    """Layer 1 lies on disk, the rest on the model's device."""
    here, names = model.device, ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(names, here), "model.layers.0": here, "model.layers.1": "disk"}
    dispatch_model(model, places, main_device=here, offload_dir=folder, force_hooks=True)


def to_cpu(model, folder) -> None:
    """Every weight waits in host memory."""
    cpu_offload(model, model.device)


over_offloads = pytest.mark.parametrize("offload", (to_disk, to_cpu), ids=lambda function: function.__name__)


@over_offloads
def test_weights_offloaded_after_patching(offload, tmp_path, device):
    """Weights come and go with each module: stock's tokens and a reason; then unpatched under the hooks."""
    stock, ours = fresh("llama", device)
    inputs = left_padded(device, 2)
    expected = stock.generate(**inputs, **SHORT)
    ours.generate(**inputs, **SHORT)
    offload(ours, tmp_path)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])
    assert not counts.fast and set(counts.reasons) & {"device", "instance_forward"}, counts.reasons
    hf_fastpath.unpatch(ours)
    assert_same_tokens(ours.generate(**inputs, **SHORT), expected, stock, inputs["attention_mask"])
    remove_hook_from_submodules(ours)
    assert not [name for module in ours.modules() for name in vars(module) if name.startswith("_hf_")]


@over_offloads
def test_offloaded_weights_are_refused(offload, tmp_path, device):
    """Where every projection has a hook that brings its weight, nothing is left to patch."""
    require_native(device)
    stock = build("llama").to(device)
    ours = copy.deepcopy(stock)
    offload(ours, tmp_path)
    before = instances(ours)
    with pytest.raises(UnsupportedModelError, match="instance_forward"):
        hf_fastpath.patch(ours, quiet=True)
    assert_same_instances(instances(ours), before)
    assert_same_tokens(ours.generate(prompt(device), **SHORT), stock.generate(prompt(device), **SHORT), stock)


def test_all_on_one_device_is_fast(device):
    """device_map with a single device, as from_pretrained(device_map="auto") gives where the model fits."""
    require_native(device)
    stock = build("llama").to(device)
    ours = dispatch_model(copy.deepcopy(stock), {"": device})
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2), **SHORT)
    assert counts.fast == 24
    assert_same_tokens(found, stock.generate(prompt(device, 2), **SHORT), stock)


@pytest.mark.parametrize("mixed_precision", ("no", "bf16"))
def test_accelerator_prepares_a_patched_model(mixed_precision, device):
    """A training step through Accelerator.prepare(), then generate() of the unwrapped model."""
    require_native(device)
    results, ids = [], prompt(device, 2, 20)
    for patched in (True, False):
        model = build("llama").to(device)
        if patched:
            hf_fastpath.patch(model, quiet=True)
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=device.type == "cpu")
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        loss = prepared(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        results.append((loss.item(), accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)))
        accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    ours, stock = results[0][1], results[1][1]
    stock.load_state_dict(ours.state_dict())
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **SHORT)
    assert counts.fast == 12, counts.reasons
    assert_same_tokens(found, stock.generate(prompt(device), **SHORT), stock)
