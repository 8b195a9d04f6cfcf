"""A rank that is given something else, makes another call or fails: every rank gets an error that says so, in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from models import assert_same_instances, instances
from processes import COUNT, device, meet, needs_processes, on_gpus, run, save, some_prompt, spread, tokens_of
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_fastpath
from hf_fastpath import RankError
from hf_fastpath.decode.ranks import process_group
from hf_fastpath.patching import api

pytestmark = needs_processes
#: seconds that ranks wait in these tests, and seconds in which every rank has its error
SHORT, BOUND = 3.0, 12.0


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the error that a call ends with, in time."""
    return error_within(BOUND, function, *args, **kwargs)


def error_within(seconds: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    started = time.monotonic()
    try:
        function(*args, **kwargs)
    except (RankError, ValueError, RuntimeError, ZeroDivisionError) as error:
        assert time.monotonic() - started < seconds, error
        return f"{type(error).__name__}: {error}"
    return f"no error after {time.monotonic() - started:.1f} s"


def assert_alike(*tensors: torch.Tensor) -> None:
    """Compare a tensor of this rank with those of the others."""
    for each in tensors:
        others = [torch.empty_like(each) for _ in range(COUNT)]
        torch.distributed.all_gather(others, each)
        assert all(torch.equal(each, other) for other in others)


# ---- options of patch() ---------------------------------------------------------------------------------------------

OPTIONS: tuple[dict[str, Any], ...] = (
    dict(kv_dtype="int8"),
    dict(weights="int8"),
    dict(page_size=16),
    dict(max_batch_size=4),
    dict(strict=True),
    dict(ops=("loop", "norm")),
    dict(keep_original=False),
)


def _options(rank: int, folder: Path) -> None:
    process_group.PATIENCE = SHORT
    model = spread(folder / "llama")
    inputs, before = {"input_ids": some_prompt(device(rank))}, instances(model)
    stock = tokens_of(model, inputs)
    for number, options in enumerate(OPTIONS):
        (name,) = options
        own = options if rank == number % COUNT else {}
        said = error_of(hf_fastpath.patch, model, quiet=True, **own)
        assert f"{name} is " in said and "on rank 1 and" in said and "on rank 0" in said, (options, said)
        assert_same_instances(instances(model), before)
    with pytest.MonkeyPatch.context() as patches:
        if rank:
            patches.setenv("HF_FASTPATH_NATIVE", "1")
        said = error_of(hf_fastpath.patch, model, quiet=True)
        assert "HF_FASTPATH_NATIVE in the environment is 1 on rank 1 and not given on rank 0" in said, said
    with pytest.MonkeyPatch.context() as patches:
        if rank:  # at the end of patch(), when the other rank has done all of it
            patches.setattr(api, "keep_recording", lambda *given: 1 // 0)
        said = error_of(hf_fastpath.patch, model, quiet=True)
    assert said.startswith("ZeroDivisionError" if rank else "RankError: rank 1 has left patch()"), said
    assert_same_instances(instances(model), before)
    own = dict(weights="int9") if rank else {}
    said = error_of(hf_fastpath.patch, model, quiet=True, **own)
    assert ("weights is 'int9'" in said) and said.startswith("ValueError" if rank else "RankError"), said
    half = spread(folder / "llama", dtype=torch.bfloat16) if rank else model
    if not rank:
        spread(folder / "llama")  # loading is a call of all ranks
    said = error_of(hf_fastpath.patch, half, quiet=True)
    assert "dtypes of the model" in said and "bfloat16" in said, said
    if rank == 0:
        said = error_of(hf_fastpath.patch, model, quiet=True)
        assert "rank 1 has not come to patch()" in said, said
    torch.distributed.barrier()
    if rank == 1:  # rank 0 has given up meanwhile
        assert "rank 0 has left patch()" in error_of(hf_fastpath.patch, model, quiet=True)
    assert_same_instances(instances(model), before)
    hf_fastpath.patch(model, quiet=rank > 0, page_size=16)  # a report on one rank is no difference
    assert torch.equal(tokens_of(model, inputs), stock)
    assert not hf_fastpath.report(model).stats["reasons"]


def test_options_of_one_rank_alone(tmp_path):
    save(tmp_path / "llama")
    run(_options, tmp_path)


# ---- arguments of generate() ----------------------------------------------------------------------------------------


class Ending(StoppingCriteria):
    """Ends the text at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class Choosing(LogitsProcessor):
    """Chooses one token."""

    def __call__(self, input_ids, scores):
        return torch.zeros_like(scores).index_fill(1, torch.tensor([7], device=scores.device), 1.0)


class Listening(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


#: arguments that one rank alone is given -> what the error names
ARGUMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(num_beams=2), "num_beams is 2 on rank 1"),
    (dict(max_new_tokens=5), "max_new_tokens is 5 on rank 1"),
    (dict(do_sample=True), "do_sample is True on rank 1"),
    (dict(use_cache=False), "use_cache is False on rank 1"),
    (dict(top_k=3), "top_k is 3 on rank 1"),
    (dict(repetition_penalty=1.5), "repetition_penalty is 1.5 on rank 1"),
    (dict(eos_token_id=3, pad_token_id=0), "eos_token_id is 3 on rank 1"),
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions is True on rank 1"),
    (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens is 3 on rank 1"),
    (dict(cache_implementation="static"), "cache_implementation is 'static' on rank 1"),
    (dict(attention_mask=torch.ones(1, 11, dtype=torch.long)), "attention_mask is torch.int64 [1, 11]"),
    (dict(bad_words_ids=[[5]]), "bad_words_ids is "),
    (dict(sequence_bias=[[[5], -9.0]]), "sequence_bias is "),
    (dict(prefix_allowed_tokens_fn=lambda *given: [5]), "prefix_allowed_tokens_fn is "),
)


def _arguments(rank: int, folder: Path) -> None:
    process_group.PATIENCE = SHORT
    model, here = hf_fastpath.patch(spread(folder / "llama"), quiet=True), device(rank)
    inputs = {"input_ids": some_prompt(here)}
    expected = tokens_of(model, inputs)
    for options, named in ARGUMENTS:
        own = {name: each.to(here) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
        said = error_of(tokens_of, model, inputs, **(own if rank else {}))
        assert said.startswith("RankMismatch: generate() got other") and named in said, (options, said)
    for length in (9, 12):
        others = {"input_ids": some_prompt(here, length=length)} if rank else inputs
        assert f"inputs is torch.int64 [1, {length}]" in error_of(model.generate, *others.values())
    with torch.autocast(here.type, torch.bfloat16, enabled=bool(rank)):
        assert "autocast is ['torch.bfloat16'] on rank 1" in error_of(tokens_of, model, inputs)
    with torch.autocast(here.type, torch.bfloat16, enabled=bool(rank)):
        assert "autocast is " in error_of(tokens_of, model, inputs, num_beams=2)
    if rank:
        model.train()
    assert "model.training is True on rank 1" in error_of(tokens_of, model, inputs)
    model.eval()
    if rank:
        model.generation_config.temperature = 0.5
    assert "temperature is 0.5 on rank 1" in error_of(tokens_of, model, inputs)
    model.generation_config.temperature = None if rank else model.generation_config.temperature
    said = error_of(*((hf_fastpath.unpatch, model) if rank else (tokens_of, model, inputs)))
    assert said.startswith("RankMismatch: rank ") and "unpatch()" in said and "generate()" in said, said
    said = error_of(*((hf_fastpath.patch, model) if rank else (tokens_of, model, inputs)))
    assert said.startswith("RankMismatch: rank ") and "patch()" in said and "generate()" in said, said
    said = error_of(tokens_of, model, inputs, **(dict(nonsense=1) if rank else {}))
    assert "nonsense" in said, said
    said = error_of(tokens_of, model, inputs, logits_processor=[Choosing()] if rank else None)
    assert said.startswith("RankMismatch: generate() has chosen the tokens [7] on rank 1 and ["), said
    ended = tokens_of(model, inputs, stopping_criteria=[Ending(14)] if rank else None)
    assert torch.equal(ended, expected[:, :14]), "a rank's own end is that of all"
    for own in (dict(streamer=Listening()), dict(tokenizer=object())):
        assert torch.equal(tokens_of(model, inputs, **(own if rank else {})), expected)
    assert_alike(tokens_of(model, inputs, seed=rank, do_sample=True))
    adapted = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out) if rank else None
    hooked = tokens_of(model, inputs)
    with hf_fastpath.decode.loops.patched.paused(model):
        assert torch.equal(hooked, tokens_of(model, inputs))
    assert adapted is None or adapted.remove() is None
    assert torch.equal(tokens_of(model, inputs), expected)
    hf_fastpath.unpatch(model)
    assert torch.equal(tokens_of(model, inputs), expected)


def test_arguments_of_one_rank_alone(tmp_path):
    save(tmp_path / "llama")
    run(_arguments, tmp_path)


# ---- ranks that are lost --------------------------------------------------------------------------------------------


class Failing(BaseStreamer, StoppingCriteria):
    """The user's code, which fails when it is called for the third time."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.put(None)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def put(self, value):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("the user's code has failed")

    def end(self):
        pass


class FailingProcessor(Failing, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.put(None)
        return scores


def _anew(rank: int, folder: Path, name: str) -> nn.Module:
    """Load the model over a process group of its own."""
    torch.distributed.destroy_process_group()
    meet(rank, folder, "gloo", name)
    model = spread(folder / "llama")
    torch.distributed.barrier()  # one rank may have loaded for longer than patch() waits here
    return model


def _assert_lost(name: str, model: nn.Module, before: dict, inputs: dict) -> None:
    """Every further call says that ranks are lost, at once if all have noticed, and unpatch() does its work."""
    for number, (call, *given) in enumerate([(tokens_of, model, inputs)] * 2 + [(hf_fastpath.patch, model)]):
        said = error_within(1.0 if number else BOUND, call, *given)
        assert said.startswith("RankError") and "end all processes" in said, (name, said)
    hf_fastpath.unpatch(model)
    assert_same_instances(instances(model), before)


def _failures(rank: int, folder: Path) -> None:
    process_group.PATIENCE = SHORT
    cases = {
        "streamer": lambda: dict(streamer=Failing()),
        "criterion": lambda: dict(stopping_criteria=[Failing()]),
        "processor": lambda: dict(logits_processor=[FailingProcessor()]),
        "processor of beams": lambda: dict(logits_processor=[FailingProcessor()], num_beams=2),
        "criterion of drafts": lambda: dict(stopping_criteria=[Failing()], prompt_lookup_num_tokens=2),
        "end of beams": lambda: dict(stopping_criteria=[Ending(13)], num_beams=2),
        "absent": dict,
        "unpatch": dict,
    }
    if on_gpus():  # torch 2.11 crashes where forwards of stock code gather tensors of GPUs over gloo
        cases = {name: options for name, options in cases.items() if not name.endswith(("beams", "drafts"))}
    for name, options in cases.items():
        model = _anew(rank, folder, name)
        before, inputs = instances(model), {"input_ids": some_prompt(device(rank), length=11)}
        hf_fastpath.patch(model, quiet=True)
        failed = all(name != each for each in ("absent", "unpatch", "end of beams"))
        if failed:  # on all ranks alike: they go on together
            assert "the user's code has failed" in error_of(tokens_of, model, inputs, **options())
        tokens_of(model, inputs)
        modes = {key: value for key, value in options().items() if isinstance(value, int)}
        own = options() if rank else modes
        if name == "unpatch" and rank == 0:
            said = error_of(hf_fastpath.unpatch, model)
            assert "rank 1 has not come to unpatch()" in said, said
            assert_same_instances(instances(model), before)
            continue
        elif name == "absent" and rank == 0:
            said = error_of(tokens_of, model, inputs)
            assert "rank 1 has not come to generate()" in said, said
        elif failed or rank == 0:
            said = error_of(tokens_of, model, inputs, **own)
            assert said.startswith("ZeroDivisionError" if rank else "RankError"), (name, said)
            assert ("the user's code has failed" in said) == failed, (name, said)
        elif name == "end of beams":
            assert tokens_of(model, inputs, **own).shape[1] == 13
        time.sleep(SHORT + 1.5 if rank and name in ("absent", "unpatch", "end of beams") else 0.0)
        _assert_lost(name, model, before, inputs)


def test_every_further_call_of_lost_ranks_says_so_at_once(tmp_path):
    save(tmp_path / "llama")
    run(_failures, tmp_path)
