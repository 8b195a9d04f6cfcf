"""Models without an architecture file over two processes: each rank's step is recorded, and gives stock's tokens."""

from __future__ import annotations

import functools
from pathlib import Path

import encoder_decoder_types
import multimodal_types
import pytest
import torch
from causal_lm_types import random_model, small_config
from models import assert_same_instances, instances
from processes import (
    COUNT,
    GREEDY,
    assert_fast,
    assert_half_types,
    assert_tokens,
    device,
    needs_processes,
    run,
    some_prompt,
    spread,
    tokens_of,
    with_whole_kv,
)
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_fastpath
from hf_fastpath import UnsupportedModelError
from hf_fastpath.compat import whole_experts
from hf_fastpath.recording.sharded_model import ShardedRecordedModel

pytestmark = needs_processes
#: what is special about a type's spread layers: gathered features and a part of them, states and gates, latents and
#: experts beside shared ones; entries of configs besides, so that a kernel would take what is gathered at once
TYPES = {"glm4": {}, "qwen3_5_text": dict(linear_num_value_heads=16), "deepseek_v3": {}}


def whole(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def saved(folder: Path, *types: str) -> Path:
    for each in types:
        config = small_config(each)
        for name, value in TYPES[each].items():
            setattr(config, name, value)
        random_model(config, AutoModelForCausalLM).save_pretrained(folder / each)
    return folder


def _equal_tokens(rank: int, folder: Path) -> None:
    for each in TYPES:
        model = spread(folder / each)
        before, inputs = instances(model), {"input_ids": some_prompt(device(rank))}
        assert_tokens(rank, model, whole(folder / each))
        assert hf_fastpath.report(model).architecture == "recorded"
        hf_fastpath.unpatch(model)
        assert_same_instances(instances(model), before)
    model = hf_fastpath.patch(spread(folder / "deepseek_v3"), weights="int8", quiet=True)
    found, inputs = tokens_of(model, inputs), inputs | {"past_key_values": DynamicCache(config=model.config)}
    assert_fast(model)
    assert torch.equal(found, tokens_of(model, inputs)), "stock's forward, over quantized shards"
    model = spread(folder / "deepseek_v3", distributed_config=whole_experts(COUNT))
    assert_tokens(rank, model, whole(folder / "deepseek_v3"))
    assert_half_types(rank, folder / "glm4", whole(folder / "glm4"))


def test_tokens_are_those_of_stock_and_of_one_process(tmp_path):
    run(_equal_tokens, saved(tmp_path, *TYPES))


def _around_a_decoder(rank: int, folder: Path) -> None:
    """Stock code reads images, or runs the encoder, on the spread model; every token behind the prompt is ours."""
    here = device(rank)
    for each in ("llava", "qwen3_5"):
        alone = multimodal_types.small_model(each)
        prompts = (multimodal_types.prompt(each, images, padding=len(images) - 1) for images in ((0,), (1,), (1, 1)))
        _assert_around(folder / each, alone, prompts, here, lambda model, given: tokens_of(model, given))
    alone = encoder_decoder_types.small_model("t5gemma")
    prompts = (encoder_decoder_types.text(1, 9), encoder_decoder_types.text(2, 9, padding=4))
    generate = functools.partial(encoder_decoder_types.generate, **GREEDY)
    _assert_around(folder / "t5gemma", alone, prompts, here, generate)


def _assert_around(folder: Path, alone: PreTrainedModel, prompts, here: torch.device, generate) -> None:
    model = type(alone).from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    model.generation_config = alone.generation_config
    cases = [{name: value.to(here) for name, value in given.items()} for given in prompts]
    expected = [generate(alone.to(here), given) for given in cases]
    hf_fastpath.patch(model, quiet=True)
    for given, wanted in zip(cases, expected, strict=True):
        assert torch.equal(generate(model, given), wanted), (type(model).__name__, list(given))
    assert_fast(model)
    hf_fastpath.unpatch(model)
    assert torch.equal(generate(model, cases[0]), expected[0])
    if folder.name == "llava":
        hf_fastpath.patch(model, weights="int8", quiet=True)
        found = [generate(model, given) for given in cases]
        assert_fast(model)
        hf_fastpath.unpatch(model)
        assert torch.equal(generate(model, cases[0]), expected[0])
        assert all(each.shape == wanted.shape for each, wanted in zip(found, expected))


def test_models_around_a_decoder(tmp_path):
    for each in ("llava", "qwen3_5"):
        multimodal_types.small_model(each).save_pretrained(tmp_path / each)
    encoder_decoder_types.small_model("t5gemma").save_pretrained(tmp_path / "t5gemma")
    run(_around_a_decoder, tmp_path)


def _other_modes(rank: int, folder: Path) -> None:
    """Drafts, which a step of several tokens verifies; beams, which run stock's loop over our cache; pages."""
    inputs = {"input_ids": some_prompt(device(rank))[:, :6].repeat(1, 3)}
    model = spread(folder / "glm4")
    expected, beams = tokens_of(model, inputs), tokens_of(model, inputs, num_beams=2)
    hf_fastpath.patch(model, quiet=True, page_size=16)
    assert torch.equal(tokens_of(model, inputs), expected)
    assert torch.equal(tokens_of(model, inputs, prompt_lookup_num_tokens=3), expected)
    assert_fast(model)
    assert torch.equal(tokens_of(model, inputs, num_beams=2), beams)
    assert hf_fastpath.report(model).stats["reasons"] == {"generation_mode": 1}


def _one_rank(rank: int, folder: Path) -> None:
    """The ranks prove their step together, though one of them has seen a change that the others have not."""
    inputs = {"input_ids": some_prompt(device(rank))}
    model = hf_fastpath.patch(spread(folder / "glm4"), quiet=True)
    expected = tokens_of(model, inputs)
    if rank:
        model.model.norm.note = "only here"
    assert torch.equal(tokens_of(model, inputs), expected)
    if rank:
        model.model.norm.register_forward_hook(lambda *_: None)
    assert torch.equal(tokens_of(model, inputs), expected)
    assert hf_fastpath.report(model).stats["reasons"] == {"hooks" if rank else "other_rank": 1}
    model = hf_fastpath.patch(spread(folder / "glm4"), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedRecordedModel, "_together", lambda self, batch: rank)
        assert torch.equal(tokens_of(model, inputs), expected)
    assert hf_fastpath.report(model).stats["reasons"] == {"sharded": 1}


def _refused(rank: int, folder: Path) -> None:
    model = spread(folder / "glm4", distributed_config=with_whole_kv())
    with pytest.raises(UnsupportedModelError, match=r"sharded\.\n.*2 heads of a rank beside 2 KV heads of all ranks"):
        hf_fastpath.patch(model, quiet=True)
    with pytest.raises(ValueError, match="has colwise_gather_output and rowwise_split_input"):
        hf_fastpath.patch(spread(folder / "glm4"), weights="int8", quiet=True)
    rules = {"model.layers.*.mlp": "all_reduce"}
    model = spread(folder / "glm4", distributed_config=DistributedConfig(tp_size=COUNT, tp_plan=rules))
    before = instances(model)
    with pytest.raises(UnsupportedModelError, match=r"sharded\.\n.*layers.0.mlp is spread by AllReduceParallel"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def _all(rank: int, folder: Path) -> None:
    for each in (_other_modes, _one_rank, _refused):
        each(rank, folder)


def test_modes_ranks_that_differ_and_what_is_refused(tmp_path):
    run(_all, saved(tmp_path, "glm4"))
