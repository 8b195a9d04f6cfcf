"""accelerate: models that are spread over devices and disk, and the wrapper for training."""

from __future__ import annotations

import copy

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from models import (
    SHORT,
    TINY_PYTHON,
    assert_same_instances,
    blocks_of,
    build,
    counting,
    fresh,
    heldout_tokens,
    instances,
    left_padded,
    over_architectures,
    prompt,
    require_native,
)
from parity import assert_equal_generation, assert_same_tokens, both
from said import logged
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath import UnsupportedModelError
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.calls.named_calls import run
from hf_fastpath.decode.sources import steps
from hf_fastpath.patching.state import state_of


def to_disk(model, folder) -> None:
    """Put layer 1 onto disk, the rest onto the model's device."""
    here, names = model.device, ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(names, here), "model.layers.0": here, "model.layers.1": "disk"}
    dispatch_model(model, places, main_device=here, offload_dir=folder, force_hooks=True)


def to_cpu(model, folder) -> None:
    """Keep every weight in host memory."""
    cpu_offload(model, model.device)


@pytest.mark.parametrize("offload", (to_disk, to_cpu), ids=lambda function: function.__name__)
def test_weights_offloaded_after_patching(offload, tmp_path, device):
    """Weights come and go with each module: tokens are stock's; then the model is unpatched.

    Stock code runs, with a reason, if weights are on disk, or if a GPU would have to bring a table of embeddings.
    """
    stock, ours = fresh("llama", device)
    inputs = left_padded(device, 2)
    expected = stock.generate(**inputs, **SHORT)
    ours.generate(**inputs, **SHORT)
    offload(ours, tmp_path)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])
    if offload is to_cpu and device.type == "cpu":
        assert counts.fast == 24 and not counts.reasons, counts.reasons
    else:
        assert not counts.fast and counts.reasons["offloaded"], counts.reasons
    hf_fastpath.unpatch(ours)
    assert_same_tokens(ours.generate(**inputs, **SHORT), expected, stock, inputs["attention_mask"])
    remove_hook_from_submodules(ours)
    assert not [name for module in ours.modules() for name in vars(module) if name.startswith("_hf_")]


def test_weights_on_disk_are_refused(tmp_path, device):
    """If every projection has a hook that reads its weight from disk, nothing is left to patch."""
    require_native(device)
    stock = build("llama").to(device)
    ours = copy.deepcopy(stock)
    disk_offload(ours, tmp_path, device)
    before = instances(ours)
    with pytest.raises(UnsupportedModelError, match="What helps: load the model where it fits"):
        hf_fastpath.patch(ours, quiet=True)
    assert_same_instances(instances(ours), before)
    assert_same_tokens(ours.generate(prompt(device), **SHORT), stock.generate(prompt(device), **SHORT), stock)


def test_layers_that_are_not_on_disk_are_patched(tmp_path, device):
    require_native(device)
    stock = build("llama").to(device)
    ours = copy.deepcopy(stock)
    to_disk(ours, tmp_path)
    before = instances(ours)
    with logged(r"mlp: offloaded \(model.layers.1.mlp: LlamaMLP\)"):
        hf_fastpath.patch(ours, quiet=True)
    report = hf_fastpath.report(ours)
    assert report.patched["layer"] == 1 and report.loop == "offloaded"
    assert report.details["loop: offloaded"] == [
        "model.layers.1.self_attn.q_proj: Linear, weights that are on disk, or that accelerate converts"
    ]
    assert_equal_generation(ours, stock, fast=False)
    assert_same_instances(instances(hf_fastpath.unpatch(ours)), before)


def test_all_on_one_device_is_fast(device):
    """The device_map has a single device, as from_pretrained(device_map="auto") gives if the model fits."""
    require_native(device)
    stock = build("llama").to(device)
    ours = dispatch_model(copy.deepcopy(stock), {"": device})
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2), **SHORT)
    assert counts.fast == 24
    assert_same_tokens(found, stock.generate(prompt(device, 2), **SHORT), stock)


def places(model, first, second, *others: str) -> dict:
    """Return a device map with the second layer, and names that end so, on ``second``, and all else on ``first``."""
    endings = (".layers.1", ".blocks.1", ".h.1", *others)
    return {name: second if name.endswith(endings) else first for name in blocks_of(model)}


@pytest.fixture
def fused_layers(monkeypatch) -> list[torch.device]:
    """Collect the devices of layers that ran fused, outside of a decode plan."""
    devices, layer = [], steps.decoder_layer

    def noted(to, part, hidden, *arguments):
        if to.emit is run:
            devices.append(hidden.device)
        return layer(to, part, hidden, *arguments)

    monkeypatch.setattr(steps, "decoder_layer", noted)
    return devices


@over_architectures
@pytest.mark.parametrize("hooks_come", ("before_patch", "after_patch"))
def test_hooks_that_only_place_tensors_are_fast(hooks_come, architecture, fused_layers, device):
    """Every module has a hook, and all are on one device: the plan runs, the fused layers do, and stock code again."""
    require_native(device)
    stock = build(architecture).to(device)
    ours = copy.deepcopy(stock)
    if hooks_come == "after_patch":
        hf_fastpath.patch(ours, quiet=True)
    dispatch_model(ours, places(ours, device, device), skip_keys=CACHE, force_hooks=True)
    assert all(hasattr(module, "_hf_hook") for module in ours.modules() if list(module.parameters(recurse=False)))
    before = instances(ours)
    hf_fastpath.patch(ours, quiet=True)
    assert hf_fastpath.report(ours).loop == "fast"
    assert_equal_generation(ours, stock)
    cache, ids = hf_fastpath.FastpathCache(ours.config), prompt(device, 2, 9)
    with torch.no_grad():
        # several tokens of several sequences are no step of a plan
        found = [ours(part, **{CACHE: cache}).logits[:, -1] for part in ids.split((7, 2), dim=1)]
    torch.testing.assert_close(found[1], stock(ids).logits[:, -1])
    assert len(fused_layers) == 2
    if hooks_come == "before_patch":
        assert_same_instances(instances(hf_fastpath.unpatch(ours)), before)
    hf_fastpath.unpatch(ours)
    remove_hook_from_submodules(ours)
    assert not [name for module in ours.modules() for name in vars(module) if name.startswith("_hf_")]
    assert_same_tokens(ours.generate(prompt(device), **SHORT), stock.generate(prompt(device), **SHORT), stock)


def test_a_tied_head_on_another_gpu_than_the_norm(two_gpus):
    """The map that device_map="auto" makes of a tied model: its embeddings and head on the first GPU."""
    kinds = dict(tie_word_embeddings=True)
    stock, ours = build("llama", **kinds), build("llama", **kinds)
    for model in (stock, ours):
        dispatch_model(model, places(model, *two_gpus, ".norm"), main_device=two_gpus[0], skip_keys=CACHE)
    hf_fastpath.patch(ours, quiet=True)
    for options in (SHORT, SHORT | dict(num_beams=2)):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=prompt(two_gpus[0], 2), **options)
        assert_same_tokens(found, expected)
        assert counts.fast == 24 and not counts.reasons, counts.reasons


@pytest.mark.parametrize("model_type", ("llama", "glm4"))
def test_quantized_layers_keep_their_places(model_type, device):
    """A layer that replaces another takes what accelerate would bring to that one."""
    require_native(device)
    stock = causal_lm_types.small_model(model_type).to(device)
    hooked, wanted = copy.deepcopy(stock), copy.deepcopy(stock)
    dispatch_model(hooked, dict.fromkeys(blocks_of(hooked), device), skip_keys=CACHE, force_hooks=True)
    before = instances(hooked)
    for model in (hooked, wanted):
        hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    assert hooked.lm_head._hf_hook.execution_device == device
    ids = causal_lm_types.prompt(2, 11, seed=2).to(device)
    with counting(hooked) as counts:
        found = hooked.generate(ids, **SHORT)
    assert torch.equal(found, wanted.generate(ids, **SHORT))
    assert counts.fast == 24 and not counts.reasons, counts.reasons
    assert_same_instances(instances(hf_fastpath.unpatch(hooked)), before)


@pytest.fixture
def two_gpus() -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    return torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize("when", ("before_patch", "after_patch"))
@over_architectures
def test_layers_on_two_gpus(architecture, when, two_gpus):
    """Our loop goes from GPU to GPU, with beams, too. Each layer has its cache beside it."""
    wide = {"sliding_window": 64} if architecture == "mistral" else {}  # a full window makes masks, which stock takes
    stock, ours = build(architecture, **wide), build(architecture, **wide)
    for model in (stock, ours):
        if model is ours and when == "after_patch":
            hf_fastpath.patch(ours.to(two_gpus[0]), quiet=True)
        dispatch_model(model, places(model, *two_gpus), main_device=two_gpus[0], skip_keys=CACHE)
    hf_fastpath.patch(ours, quiet=True)
    assert hf_fastpath.report(ours).loop == "fast"
    ids = prompt(two_gpus[0], 2)
    for options in (SHORT, SHORT | dict(num_beams=2), SHORT | dict(do_sample=True, top_k=20)):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=ids, return_dict_in_generate=True, **options)
        assert_same_tokens(found.sequences, expected.sequences)
        cache = found[CACHE]
        assert isinstance(cache, hf_fastpath.FastpathCache)
        assert [layer.k_buffer.device for layer in cache.layers] == list(two_gpus)
        assert counts.fast == 24 and not counts.reasons, counts.reasons
    inputs = left_padded(two_gpus[0], 2)
    assert_same_tokens(*both(stock, ours, **inputs, **SHORT))
    with counting(ours) as counts:
        again = dict(input_ids=ids[:1].repeat(1, 3), prompt_lookup_num_tokens=3)
        assert_same_tokens(*both(stock, ours, **again, **SHORT))
    assert counts.fast == 12 and not counts.reasons, counts.reasons
    with counting(ours) as counts:  # a conversation goes on over the same cache
        cache = hf_fastpath.FastpathCache(ours.config)
        first = ours.generate(ids[:1], **SHORT, **{CACHE: cache})
        again = torch.cat((first, ids[1:, :5]), dim=1)
        found = ours.generate(again, **SHORT, **{CACHE: cache})
    assert counts.fast == 24
    assert_same_tokens(found, stock.generate(again, **SHORT))


#: norms behind the blocks, states, latents and experts, biases of scores, states beside experts, a tower of images
_RECORDED = ("glm4", "qwen3_5_text", "deepseek_v3", "mpt", "granitemoehybrid", "jamba", "gemma3")


@pytest.mark.parametrize("model_type", _RECORDED)
def test_recorded_models_on_two_gpus(model_type, two_gpus):
    """Steps of models without an architecture file go from GPU to GPU; states and caches are beside their layers."""
    stock = causal_lm_types.small_model(model_type)
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        dispatch_model(model, places(model, *two_gpus), main_device=two_gpus[0], skip_keys=CACHE)
    hf_fastpath.patch(ours, quiet=True)
    report = hf_fastpath.report(ours)
    assert (report.architecture, report.loop) == ("recorded", "fast"), report
    cases = ((1, SHORT), (2, SHORT), (2, SHORT | dict(num_beams=2)), (1, SHORT | dict(do_sample=True, top_k=20)))
    if model_type in ("glm4", "deepseek_v3", "mpt"):  # states have none, and models that read images stock's
        cases += ((1, SHORT | dict(prompt_lookup_num_tokens=3)),)
    for batch, options in cases:
        ids = causal_lm_types.prompt(batch, 11, seed=batch).to(two_gpus[0])
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=ids, **options)
        assert_same_tokens(found, expected)
        assert counts.fast == 12 * batch and not counts.reasons, counts.reasons
    for plan in state_of(ours).plans:
        assert {stage.device for stage in plan.program._stages} == set(two_gpus)


@pytest.mark.parametrize("options", (dict(kv_dtype="int8"), dict(page_size=16)), ids=str)
@pytest.mark.parametrize("model_type", ("llama", "glm4"))
def test_other_caches_on_two_gpus(model_type, options, two_gpus):
    """Keys and values in 8 bits, which are quantized on the layer's own GPU, and pages."""
    wanted = causal_lm_types.small_model(model_type).to(two_gpus[0])
    ours = copy.deepcopy(wanted)
    dispatch_model(ours, places(ours, *two_gpus), main_device=two_gpus[0], skip_keys=CACHE)
    for model in (ours, wanted):
        hf_fastpath.patch(model, **options, quiet=True)
    ids = causal_lm_types.prompt(2, 11, seed=2).to(two_gpus[0])
    with counting(ours) as counts:
        found, expected = both(wanted, ours, input_ids=ids, **SHORT)
    assert_same_tokens(found, expected)
    assert counts.fast == 24 and not counts.reasons, counts.reasons


@pytest.mark.parametrize("model_type", ("t5", "whisper"))
def test_a_decoder_behind_an_encoder_on_two_gpus(model_type, two_gpus):
    """A layer's keys and values of what the encoder has read are beside the layer; the first layer has T5's biases."""
    stock = encoder_decoder_types.small_model(model_type)
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        endings = "decoder.block.0", "decoder.layers.1"
        where = {name: two_gpus[name.endswith(endings)] for name in blocks_of(model)}
        dispatch_model(model, where, main_device=two_gpus[0], skip_keys=CACHE)
    hf_fastpath.patch(ours, quiet=True)
    for batch in (1, 2):
        given = encoder_decoder_types.output(stock, batch, 9, padding=2 * (batch > 1))
        given = {name: each.to(two_gpus[0]) for name, each in given.items()}
        given["decoder_input_ids"] = encoder_decoder_types.start(batch).to(two_gpus[0])
        with counting(ours) as counts:
            found, expected = (encoder_decoder_types.generate(model, given, **SHORT) for model in (ours, stock))
        assert torch.equal(found, expected)
        assert counts.fast == 12 * batch and not counts.reasons, hf_fastpath.report(ours)
    assert all({stage.device for stage in plan.program._stages} == set(two_gpus) for plan in state_of(ours).plans)


@pytest.mark.parametrize("model_type", ("llama", "glm4"))
def test_quantized_weights_on_two_gpus(model_type, two_gpus):
    """The head is on the first GPU, and the norm in front of it on the second."""
    wanted = causal_lm_types.small_model(model_type).to(two_gpus[0])
    ours = copy.deepcopy(wanted)
    dispatch_model(ours, places(ours, *two_gpus, ".norm"), main_device=two_gpus[0], skip_keys=CACHE)
    for model in (ours, wanted):
        hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    ids = causal_lm_types.prompt(2, 11, seed=2).to(two_gpus[0])
    with counting(ours) as counts:
        found, expected = both(wanted, ours, input_ids=ids, **SHORT)
    assert_same_tokens(found, expected)
    assert counts.fast == 24 and not counts.reasons, counts.reasons


def test_model_on_the_second_gpu(two_gpus):
    """The first GPU is the current device."""
    stock, ours = fresh("mistral", two_gpus[1])
    assert torch.cuda.current_device() == 0
    assert_equal_generation(ours, stock)
    assert_equal_generation(ours, stock, do_sample=True, top_k=1)


def test_models_on_two_gpus_take_turns(two_gpus):
    """Each model has its own plan."""
    pairs = [fresh("llama", device) for device in two_gpus]
    for _ in range(2):
        for stock, ours in pairs:
            assert_equal_generation(ours, stock)


@pytest.mark.parametrize("device_map", ("auto", "balanced", "sequential"))
def test_from_pretrained_over_all_gpus(device_map, two_gpus):
    """transformers puts the layers where it likes."""
    kwargs = dict(dtype=torch.float32, device_map=device_map)
    stock, ours = (AutoModelForCausalLM.from_pretrained(TINY_PYTHON, **kwargs) for _ in range(2))
    hf_fastpath.patch(ours, quiet=True)
    ids = heldout_tokens(40).to(stock.device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, max_new_tokens=60, do_sample=False)
    assert_same_tokens(found, expected)
    assert counts.fast or set(counts.reasons) == {"device"}, counts.reasons


@pytest.mark.parametrize("mixed_precision", ("no", "bf16"))
def test_accelerator_prepares_a_patched_model(mixed_precision, device):
    """A training step goes through Accelerator.prepare(), then the unwrapped model generates."""
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
