"""Models with a tp_plan over two processes: our loop runs over each rank's shards, and gives stock's tokens."""

from __future__ import annotations

import os
import time
from pathlib import Path

import processes
import pytest
import torch
from models import assert_same_instances, build, instances
from processes import (
    GREEDY,
    NEW,
    SIZES,
    assert_fast,
    assert_half_types,
    assert_tokens,
    device,
    needs_processes,
    run,
    save,
    some_prompt,
    spread,
    tokens_of,
)
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_fastpath
from hf_fastpath import RankError
from hf_fastpath.decode.ranks import process_group, rank_calls
from hf_fastpath.patching.state import state_of

pytestmark = needs_processes
#: what is special about a family's spread layers: biases of rowwise layers, norms over heads, scaled embeddings, one
#: matrix for q, k and v, tied embeddings, experts
FAMILIES = ("llama", "qwen2", "starcoder2", "qwen3", "gemma", "gpt_neox", "cohere", "mixtral", "qwen3_moe")
#: those that run without ``--full``: other tests of this folder have the others' ways
SOME = ("qwen2", "qwen3", "gemma", "gpt_neox", "mixtral")


def loaded(folder: Path, architecture: str = "llama", **options) -> nn.Module:
    model = spread(folder / architecture, **options)
    return hf_fastpath.patch(model, quiet=True)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _equal_tokens(rank: int, folder: Path, architectures: tuple[str, ...]) -> None:
    for architecture in architectures:
        assert_tokens(rank, spread(folder / architecture), build(architecture, **SIZES))


def test_tokens_are_those_of_stock_and_of_one_process(tmp_path, request):
    families = FAMILIES if request.config.getoption("--full") else SOME
    for architecture in families:
        save(tmp_path / architecture, architecture)
    run(_equal_tokens, tmp_path, families)


def _other_seeds(rank: int, folder: Path) -> None:
    model = loaded(folder)
    inputs = {"input_ids": some_prompt(device(rank), 2)}
    found = tokens_of(model, inputs, seed=rank, do_sample=True)
    drawn = torch.rand(1)
    torch.manual_seed(rank)
    assert_fast(model)
    others = [torch.empty_like(found) for _ in range(2)]
    torch.distributed.all_gather(others, found)
    assert torch.equal(*others)
    if rank:
        assert device(rank).type == "cuda" or torch.equal(drawn, torch.rand(1)), "the rank's own generator is back"


def test_all_ranks_draw_the_first_ranks_numbers(tmp_path):
    save(tmp_path / "llama")
    run(_other_seeds, tmp_path)


class Late(StoppingCriteria):
    """Ends at another length on every rank."""

    def __init__(self, rank: int):
        self.length = 14 + rank

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class Counting(BaseStreamer):
    """A streamer of the user's own."""

    def __init__(self):
        self.tokens = 0

    def put(self, value):
        self.tokens += value.numel()

    def end(self):
        pass


def _own_streamer(rank: int, folder: Path) -> None:
    """Only the first rank has a streamer, which makes the host wait for every token; an end token ends the text."""
    model = loaded(folder)
    inputs = {"input_ids": some_prompt(device(rank))}
    whole = tokens_of(model, inputs)
    streamer = None if rank else Counting()
    ends = dict(eos_token_id=whole[0, -5].item(), pad_token_id=0)
    for options in ({}, ends, ends | dict(do_sample=True, top_k=20)):
        found = tokens_of(model, inputs, streamer=streamer, **options)
        others = [torch.empty_like(found) for _ in range(2)]
        torch.distributed.all_gather(others, found)
        assert torch.equal(*others)
    assert streamer is None or streamer.tokens > 3 * 11


def test_a_streamer_on_one_rank(tmp_path):
    save(tmp_path / "llama")
    run(_own_streamer, tmp_path)


def _own_ends(rank: int, folder: Path) -> None:
    model = loaded(folder)
    inputs = {"input_ids": some_prompt(device(rank))}
    found = tokens_of(model, inputs, stopping_criteria=StoppingCriteriaList([Late(rank)]))
    assert found.shape[1] == 14, "all ranks stop with the first"
    assert hf_fastpath.report(model).stats["fast_tokens"]


def test_all_ranks_stop_at_the_same_step(tmp_path):
    save(tmp_path / "llama")
    run(_own_ends, tmp_path)


def _half_types(rank: int, folder: Path) -> None:
    assert_half_types(rank, folder / "llama", build("llama", **SIZES))


def test_half_types(tmp_path):
    save(tmp_path / "llama")
    run(_half_types, tmp_path)


def _other_modes(rank: int, folder: Path) -> None:
    """Beams run stock's loop, over our cache."""
    model, inputs = spread(folder / "llama"), {"input_ids": some_prompt(device(rank))}
    modes = dict(num_beams=2), dict(cache_implementation="static", disable_compile=True)  # compiling takes minutes
    expected = [tokens_of(model, inputs, **mode) for mode in modes]
    hf_fastpath.patch(model, quiet=True, kv_dtype="auto")
    for mode, wanted in zip(modes, expected):
        assert torch.equal(tokens_of(model, inputs, **mode), wanted), mode
    reasons = hf_fastpath.report(model).stats["reasons"]
    assert reasons == {"generation_mode": 1, "other_cache": 1}, reasons


def test_other_modes_run_stock_code_on_all_ranks(tmp_path):
    save(tmp_path / "llama")
    run(_other_modes, tmp_path)


def _drafts(rank: int, folder: Path) -> None:
    here = device(rank)
    model, assistant = spread(folder / "llama"), build("llama", **SIZES | dict(num_hidden_layers=1)).to(here)
    lookup, own = dict(prompt_lookup_num_tokens=3), dict(assistant_model=assistant)
    inputs = {"input_ids": some_prompt(here)[:, :6].repeat(1, 3)}
    wanted = tokens_of(model, inputs)
    hf_fastpath.patch(model, quiet=True)
    for drafts in (lookup, own, own):
        assert torch.equal(tokens_of(model, inputs, **drafts), wanted), drafts
        hf_fastpath.patch(assistant, quiet=True)
    assert_fast(model)
    for drafts in (lookup, own):
        found = tokens_of(model, inputs, seed=rank, do_sample=True, top_k=20, **drafts)
        others = [torch.empty_like(found) for _ in range(2)]
        torch.distributed.all_gather(others, found)
        assert torch.equal(*others)
    assert_fast(model)
    found = tokens_of(model, inputs, streamer=None if rank else Counting(), **lookup)
    assert torch.equal(found, wanted)
    reasons = hf_fastpath.report(model).stats["reasons"]
    assert reasons == {"other_rank" if rank else "generation_mode": 1}, reasons


def test_drafts(tmp_path):
    save(tmp_path / "llama")
    run(_drafts, tmp_path)


def _caches(rank: int, folder: Path) -> None:
    """Quantized keys and values, pages, and a conversation over one cache."""
    here = device(rank)
    for options in (dict(kv_dtype="int8"), dict(page_size=16)):
        model, whole = spread(folder / "llama"), build("llama", **SIZES).to(here)
        for each in (model, whole):
            hf_fastpath.patch(each, quiet=True, **options)
        inputs = {"input_ids": some_prompt(here, 2)}
        assert torch.equal(tokens_of(model, inputs), tokens_of(whole, inputs)), options
        assert_fast(model)
        found = []
        for each in (model, whole):
            cache = hf_fastpath.FastpathCache(each.config)
            first = each.generate(some_prompt(here), past_key_values=cache, **GREEDY)
            second = torch.cat((first, some_prompt(here, length=5)), 1)
            found.append(each.generate(second, past_key_values=cache, **GREEDY))
        assert torch.equal(*found), options


def test_caches(tmp_path):
    save(tmp_path / "llama")
    run(_caches, tmp_path)


ALIVE = []


def _group_ends_first(rank: int, folder: Path) -> None:
    """Sums go through torch.distributed; NCCL destroys no process group while a captured step holds calls of it."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(rank_calls, "MOST_SENT", 0)
        model = loaded(folder)
        inputs = {"input_ids": some_prompt(device(rank))}
        assert torch.equal(tokens_of(model, inputs), tokens_of(model, inputs))
    whole = hf_fastpath.patch(build("llama", **SIZES), quiet=True)
    tokens_of(whole, {"input_ids": some_prompt(torch.device("cpu"))})
    for each in (model, whole):
        (plan,) = state_of(each).plans
        assert plan.graph is None
        plan.graph = object()
        plan.end()
        assert (plan.graph is None) == (each is model)
        plan.graph = None
    assert torch.equal(tokens_of(model, inputs), tokens_of(spread(folder / "llama"), inputs))
    ALIVE.append(model)  # while the group is destroyed


def test_a_process_group_may_end_before_the_model(tmp_path):
    save(tmp_path / "llama")
    run(_group_ends_first, tmp_path)


def _quantized(rank: int, folder: Path) -> None:
    here, wide = device(rank), dict(intermediate_size=128)
    for architecture in ("llama", "starcoder2"):
        for keep in (True, False):
            model = spread(folder / architecture)
            whole = build(architecture, **SIZES | wide).to(here)
            before, inputs = instances(model), {"input_ids": some_prompt(here, 2)}
            stock = tokens_of(model, inputs)
            for each in (model, whole):
                hf_fastpath.patch(each, weights="int4_g32", keep_original=keep, quiet=True)
            assert torch.equal(tokens_of(model, inputs), tokens_of(whole, inputs)), (architecture, keep)
            assert_fast(model)
            assert tokens_of(model, inputs, num_beams=2).shape[1] == 11 + NEW  # stock's forward, over quantized shards
            if keep:
                hf_fastpath.unpatch(model)
                assert_same_instances(instances(model), before)
                assert torch.equal(tokens_of(model, inputs), stock)
    with pytest.raises(ValueError, match="whose head is not spread"):
        hf_fastpath.patch(spread(folder / "llama"), weights="int8", lm_head="int8", quiet=True)


def test_quantized_weights(tmp_path):
    for architecture in ("llama", "starcoder2"):
        save(tmp_path / architecture, architecture, intermediate_size=128)
    run(_quantized, tmp_path)


# ---- reasons of one rank, and unpatch() -----------------------------------------------------------------------------


def _undone(rank: int, folder: Path) -> None:
    model = spread(folder / "llama")
    before = instances(model)
    inputs = {"input_ids": some_prompt(device(rank))}
    expected = tokens_of(model, inputs)
    hf_fastpath.patch(model, quiet=True)
    tokens_of(model, inputs)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *arguments: None) if rank else None
    assert torch.equal(tokens_of(model, inputs), expected)
    reasons = hf_fastpath.report(model).stats["reasons"]
    assert reasons == {"hooks" if rank else "other_rank": 1}
    if handle is not None:
        handle.remove()
    assert torch.equal(tokens_of(model, inputs), expected)
    assert hf_fastpath.report(model).stats["reasons"] == reasons
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.to_local().mul_(1.5)  # the plan reads the weights where they lie
    changed = tokens_of(model, inputs)
    hf_fastpath.unpatch(model)
    assert_same_instances(instances(model), before)
    assert torch.equal(tokens_of(model, inputs), changed)


def test_reasons_are_those_of_all_ranks_and_the_model_comes_back(tmp_path):
    save(tmp_path / "llama")
    run(_undone, tmp_path)


# ---- failures -------------------------------------------------------------------------------------------------------


class Failing(LogitsProcessor):
    def __init__(self, end):
        self.calls, self.end = 0, end

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 5:
            self.end()
        return scores


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def _interrupted(rank: int, folder: Path) -> None:
    process_group.PATIENCE = 10.0 if processes.on_gpus() else 2.0
    model = loaded(folder)

    def end():
        raise KeyboardInterrupt

    processor = Failing(end) if rank else Own()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank else RankError):
        tokens_of(model, {"input_ids": some_prompt(device(rank))}, logits_processor=[processor])
    assert time.monotonic() - started < 25
    time.sleep(2 * rank * process_group.PATIENCE)  # this process lives on, and makes no more calls
    os._exit(0)


def test_an_interrupted_rank_ends_the_others(tmp_path):
    save(tmp_path / "llama")
    run(_interrupted, tmp_path, seconds=60)


def _killed(rank: int, folder: Path) -> None:
    process_group.PATIENCE = 10.0 if processes.on_gpus() else 5.0
    model = loaded(folder)
    processor = Failing(lambda: os._exit(0)) if rank else Own()
    with pytest.raises(RankError, match="end all processes"):
        tokens_of(model, {"input_ids": some_prompt(device(rank))}, logits_processor=[processor])
    os._exit(0)


def test_a_rank_that_dies_ends_the_others(tmp_path):
    save(tmp_path / "llama")
    run(_killed, tmp_path, seconds=60)


def _other_prompts(rank: int, folder: Path) -> None:
    model = loaded(folder)
    inputs = some_prompt(device(rank), length=9 + rank)
    with pytest.raises(ValueError, match="inputs is .* on rank 1"):
        model.generate(inputs, **GREEDY)
    same = some_prompt(device(rank))
    with pytest.raises(ValueError, match="max_new_tokens is 5 on rank 1 and 4 on rank 0"):
        model.generate(same, do_sample=False, max_new_tokens=4 + rank)
    model.generate(same, **GREEDY)


def test_other_prompts_are_an_error_on_all_ranks(tmp_path):
    save(tmp_path / "llama")
    run(_other_prompts, tmp_path)


def test_processes_use_gpus_only_if_there_are_enough():
    assert processes.on_gpus() == (torch.cuda.device_count() >= processes.COUNT)
