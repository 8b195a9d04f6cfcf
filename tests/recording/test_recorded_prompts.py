"""Prompts of recorded models are read by a list of calls that is recorded once, for any number of tokens that the model
does not read otherwise; stock's modules read the first prompt, and what no list can be made of."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import habits
import pytest
import torch
from causal_lm_types import VOCAB, random_model, small_config, small_model
from habits import NEW_TOKENS, READ_BY_LISTS, RECORDABLE, habit_model
from models import CPU, counting, require_native
from recorded_types import pair_or_skip
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import prompt as prompts
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import prompts as recorded_prompts
from hf_fastpath.recording import whole_step
from hf_fastpath.recording.skeleton import Skeleton

#: of each test every sixth case; all of them with ``--full``
pytestmark = pytest.mark.every(6)

GREEDY = dict(max_new_tokens=5, do_sample=False)
#: type -> what there is of it in prompts
TYPES = {
    "glm4": "four norms in a layer, neighbors that turn together",
    "bert": "learned positions, an encoder that generates",
    "bloom": "attention of its own, with slopes",
    "deepseek_v3": "latents, and experts that are chosen by groups, beside one of all rows",
    "lfm2": "windows of convolutions",
    "minicpm3": "latents",
    "mpt": "attention of its own, with slopes and a table of them",
    "falcon_h1": "states beside attention",
    "granitemoehybrid": "states, and experts",
    "mamba": "states of one head",
    "mamba2": "states alone",
    "qwen3_5_text": "states of a delta net",
    "xglm": "positions of sines that are looked up",
}
#: mixtures: of softmax and sigmoid, with biases, groups, factors and shared experts, and of experts without weights
MIXTURES = (
    *("aria_text", "deepseek_v2", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared"),
    *("hunyuan_v1_moe", "longcat_flash", "minimax_m2", "phimoe", "qwen2_moe", "qwen3_next", "sarvam_moe", "solar_open"),
)
#: types whose forward reads tokens otherwise that do not fill a convolution's window
STATES = {"lfm2"}
#: types in which attention alone sees padding
PADDED = {"bert", "deepseek_v3", "glm4", "minicpm3", "mpt", "xglm"}
#: numbers of tokens beside those with which prompts are recorded, and around chunks of states
LENGTHS = (1, 3, 8, 9, 16, 17, 29, 64, 65)


@pytest.fixture(autouse=True)
def first_uses():
    habits.forget_first_uses()
    yield
    habits.forget_first_uses()


@functools.cache
def _pair(name: str):
    if name in TYPES:
        return pair_or_skip(name)  # of a release whose code cannot be recorded
    stock = habit_model(*name.split("+"))
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def pair(name: str):
    """Stock and patched; tests do not change them."""
    require_native(CPU)
    return _pair(name)


def ids_of(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)
    return torch.randint(3, min(VOCAB, 97), (batch, length), generator=generator)


@contextmanager
def reads(monkeypatch) -> Iterator[list[tuple[int, ...]]]:
    """Note the shapes of prompts that lists of calls read in a ``with`` block, but those of proofs."""
    shapes: list[tuple[int, ...]] = []
    proofs: list[bool] = []
    real, agree = prompts.read, recorded_prompts.prompts_agree

    def noted(part, cache, prompt, programs):
        if not proofs:
            shapes.append(tuple(prompt.tokens.shape))
        return real(part, cache, prompt, programs)

    def proving(*arguments):
        proofs.append(True)
        try:
            return agree(*arguments)
        finally:
            proofs.pop()

    with monkeypatch.context() as patch:
        patch.setattr(prompts, "read", noted)
        patch.setattr(recorded_prompts, "prompts_agree", proving)
        yield shapes


def assert_equal(ours, stock, ids: torch.Tensor, **options) -> None:
    with counting(ours) as counts:
        found = ours.generate(ids, **GREEDY | options)
    assert torch.equal(found, stock.generate(ids, **GREEDY | options)), ids.shape
    assert counts.fast and not counts.fallback, counts.reasons


@pytest.mark.parametrize("name", TYPES)
def test_lengths(name, monkeypatch):
    stock, ours = pair(name)
    ours.generate(ids_of(5), **GREEDY)  # stock's modules read the first one
    read: list[tuple[int, ...]] = []
    for length in LENGTHS:
        with reads(monkeypatch) as shapes:
            assert_equal(ours, stock, ids_of(length))
        assert shapes == [(1, length)] or name in STATES, length
        read += shapes
    assert len(read) > 3


@pytest.mark.parametrize("name", ("exaone4", "cwm", "gpt_neo"))
def test_windows_that_end_inside_of_a_prompt(name, monkeypatch):
    """A window of eight tokens, up to the slots of its ring and beyond; the cache has what the next tokens see."""
    stock, ours = pair_or_skip(name)
    ours.generate(ids_of(5), **GREEDY)
    for length in (8, 9, 24, 25, 65):
        with reads(monkeypatch) as shapes:
            assert_equal(ours, stock, ids_of(length))
        assert shapes == [(1, length)], length


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name, monkeypatch):
    """Prompts of more rows than the ops for experts take have stock's tokens, and its logits but for rounding."""
    require_native(CPU)
    stock, ours = pair_or_skip(name)
    how = GREEDY | dict(return_dict_in_generate=True, output_logits=True)
    for length, batch in ((5, 1), (16, 1), (17, 2), (17, 2), (40, 1)):
        ids = ids_of(length, batch)
        with reads(monkeypatch) as shapes:
            found = ours.generate(ids, **how)
        expected = stock.generate(ids, **how)
        assert torch.equal(found.sequences, expected.sequences), length
        torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=1e-3, atol=1e-3)
    assert shapes == [(1, 40)]


@pytest.mark.parametrize("name", MIXTURES)
def test_many_sequences_of_mixtures(name):
    """Steps of more sequences than the ops for experts take run by our loop, with stock's tokens."""
    require_native(CPU)
    stock, ours = pair_or_skip(name)
    for batch in (17, 64):
        assert_equal(ours, stock, ids_of(6, batch))


def test_more_layers_than_tokens_are_recorded(monkeypatch):
    """The number of a layer is no size."""
    require_native(CPU)
    monkeypatch.setattr(whole_step, "_LEAST_COUNT", 7)
    config = small_config("glm4")
    config.num_hidden_layers = 12
    stock = random_model(config, AutoModelForCausalLM)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for length in (9, 9, 40):
        with reads(monkeypatch) as shapes:
            assert_equal(ours, stock, ids_of(length))
    assert shapes == [(1, 40)]


@pytest.mark.parametrize("name", TYPES)
def test_sequences_and_padding(name, monkeypatch):
    stock, ours = pair(name)
    ids = ids_of(20, 3)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for is_padded in (False, False, True):
        options = dict(attention_mask=mask) if is_padded else {}
        given = ids * mask if is_padded else ids
        with reads(monkeypatch) as shapes, counting(ours) as counts:
            found = ours.generate(given, **GREEDY, **options)
        assert torch.equal(found, stock.generate(given, **GREEDY, **options))
        # Bloom of transformers 5.17 makes its positions of a mask of ones for the whole text
        assert counts.fast or counts.reasons.keys() & {"attention_mask", "not_recorded"}, counts
    assert shapes == [(3, 20)] * (name in PADDED)


@pytest.mark.parametrize("name", TYPES)
def test_turns(name, monkeypatch):
    """Prompts behind others in a cache, of one token and of several."""
    stock, ours = pair(name)
    found: list[list[torch.Tensor]] = []
    for model in (ours, stock):
        text, cache, texts = ids_of(6), None, []
        for length in (1, 7, 19, 24):
            made = model.generate(text, return_dict_in_generate=True, **{CACHE: cache} if cache else {}, **GREEDY)
            text, cache = torch.cat((made.sequences, ids_of(length)), dim=1), getattr(made, CACHE)
            texts.append(made.sequences)
        found.append(texts)
    assert all(map(torch.equal, *found))


def test_one_recording_serves_all_prompts(monkeypatch):
    """The first prompt of a number of sequences is left to stock's modules, and the second one is recorded."""
    require_native(CPU)
    made: list[tuple] = []
    real = recorded_prompts.whole_prompt
    monkeypatch.setattr(recorded_prompts, "whole_prompt", lambda *given: made.append(given[1:]) or real(*given))
    stock = small_model("glm4")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for batch in (1, 2):
        for length in (9, 11, 40, 300):
            before = len(made)
            with reads(monkeypatch) as shapes:
                assert_equal(ours, stock, ids_of(length, batch))
            assert shapes == ([] if length == 9 else [(batch, length)])
            assert len(made) - before == (length == 11)


@pytest.mark.parametrize("name", NEW_TOKENS)
def test_what_a_model_makes_of_the_number_of_new_tokens(name, monkeypatch):
    """Stock's tokens on both sides of every bound; by a list where one can be made."""
    stock, ours = pair(name)
    all_shapes = []
    ours.generate(ids_of(5), **GREEDY)
    for length in (2, 19, 24, 40, 41):
        with reads(monkeypatch) as shapes, counting(ours) as counts:
            found = ours.generate(ids_of(length), **GREEDY)
        assert torch.equal(found, stock.generate(ids_of(length), **GREEDY)), length
        all_shapes += shapes
        assert counts.fast or counts.reasons
    assert bool(all_shapes) == (name in READ_BY_LISTS), all_shapes


@pytest.mark.parametrize("name", [each for each in RECORDABLE if each not in NEW_TOKENS])
def test_what_a_model_makes_of_the_length_of_the_text(name):
    stock, ours = pair(name)
    for length in (9, 15, 16, 19, 31, 41, 49):
        habits.forget_first_uses()
        expected = stock.generate(ids_of(length), **GREEDY)
        habits.forget_first_uses()
        assert torch.equal(ours.generate(ids_of(length), **GREEDY), expected), length


def test_a_list_that_is_wrong_reads_nothing(monkeypatch):
    require_native(CPU)
    stock = small_model("glm4")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    real = recorded_prompts.whole_prompt

    def other(*given):
        made = real(*given)
        norm = next(call for call in made.calls if call.arguments.get("norm") is not None)
        made.calls.remove(next(call for call in made.calls if call.name == "gated"))
        made.calls.remove(norm) if norm in made.calls else None
        return made

    monkeypatch.setattr(recorded_prompts, "whole_prompt", other)
    monkeypatch.setattr(recorded_prompts, "whole_rows", None)
    with reads(monkeypatch) as shapes:
        for length in (9, 11, 40):
            assert_equal(ours, stock, ids_of(length))
    assert not shapes


def test_a_changed_model_is_recorded_anew(monkeypatch):
    """Weights are read as they are; Python values are those of the recording, or there is another one."""
    require_native(CPU)
    stock = habit_model("plain_tensor")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for model_edit in (None, "weights", "tensor", "number", "class"):
        for model in (stock, ours):
            layer = model.model.layers[1]
            if model_edit == "weights":
                layer.mlp.up.weight.data.mul_(1.5)
            elif model_edit == "tensor":
                layer.plain["scale"][0] = layer.plain["scale"][0] * 2
            elif model_edit == "number":
                layer.mlp.edit(3.0)
            elif model_edit == "class":
                layer.habits = ["plain_tensor", "beyond_new"]
        for length in (9, 12, 45):
            assert_equal(ours, stock, ids_of(length))


def test_a_chunked_prompt(monkeypatch):
    stock, ours = pair("glm4")
    ours.generate(ids_of(5), **GREEDY)
    with reads(monkeypatch) as shapes:
        assert_equal(ours, stock, ids_of(50), prefill_chunk_size=20)
    assert shapes == [(1, 20), (1, 20), (1, 10)]


@pytest.mark.parametrize("weights", ("int8", "int4_g32"))
def test_quantized_weights(weights, monkeypatch):
    require_native(CPU)
    ours = hf_fastpath.patch(small_model("glm4"), weights=weights, quiet=True)
    found = []
    for _ in range(2):
        with reads(monkeypatch) as shapes:
            found.append(ours.generate(ids_of(40), **GREEDY))
    assert torch.equal(*found) and shapes == [(1, 40)]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_sixteen_bits(dtype, monkeypatch):
    require_native(CPU)
    stock = small_model("glm4").to(dtype)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for length in (9, 9, 40):
        with reads(monkeypatch) as shapes:
            how = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=1)
            found, expected = (model.generate(ids_of(length), **how).logits[0].float() for model in (ours, stock))
        exact = copy.deepcopy(stock).float()(ids_of(length)).logits[:, -1]
        assert (found - exact).norm() <= 2 * (expected - exact).norm() + 1e-3 * exact.norm()
    assert shapes == [(1, 40)]


def test_caches_of_other_types(monkeypatch):
    stock = small_model("glm4")
    for options in (dict(kv_dtype="int8"), dict(page_size=16)):
        require_native(CPU)
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
        expected = None
        for length in (9, 40, 40):
            with reads(monkeypatch) as shapes:
                found = ours.generate(ids_of(length), num_return_sequences=1, **GREEDY)
            expected = stock.generate(ids_of(length), **GREEDY)
            assert torch.equal(found, expected) or "kv_dtype" in options
        assert shapes == [(1, 40)]


def test_a_prompt_takes_no_more_memory_than_stocks(monkeypatch):
    """No list keeps what it has computed once the prompt is read."""
    _, ours = pair("glm4")
    ours.generate(ids_of(5), **GREEDY)
    ours.generate(ids_of(40), **GREEDY)
    part = state_of(ours).plans.part_of(ours)
    programs = state_of(ours).plans.prompt_programs_of(part)
    assert programs
    for program in programs.values():
        assert not any(isinstance(each, torch.Tensor) for each in program.program.values)


def test_threads_whose_prompts_are_recorded(monkeypatch):
    """Threads that come while a prompt is recorded and compared leave theirs to the modules."""
    require_native(CPU)
    stock = small_model("glm4")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ours.generate(ids_of(9), **GREEDY)
    lengths = range(10, 22)
    expected = [stock.generate(ids_of(length, 1 + length % 2), **GREEDY) for length in lengths]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda length: ours.generate(ids_of(length, 1 + length % 2), **GREEDY), lengths))
    assert all(map(torch.equal, found, expected))
    with reads(monkeypatch) as shapes:
        assert_equal(ours, stock, ids_of(40))
    assert shapes == [(1, 40)]


def test_passes_are_alone_with_the_tensors_that_they_compute_with(monkeypatch, tmp_path):
    """A tensor without data says that it is on no device while another thread calls a kernel of its mode."""
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path))  # other tests have left recordings in theirs
    passed, free = whole_step.passed, []

    def is_free(lock):
        found = lock.acquire(blocking=False)
        if found:
            lock.release()
        return found

    def locked(recording, model, **how):
        skeletons = [each for each in gc.get_objects() if type(each) is Skeleton and each.model is model]
        with ThreadPoolExecutor(1) as pool:
            free.extend(pool.submit(is_free, each.lock).result() for each in skeletons)
        return passed(recording, model, **how)

    monkeypatch.setattr(whole_step, "passed", locked)
    ours = hf_fastpath.patch(copy.deepcopy(small_model("glm4")), quiet=True)
    for _ in range(2):
        ours.generate(ids_of(9), **GREEDY)
    assert len(free) >= 2 and not any(free)


@pytest.mark.parametrize("error", (KeyboardInterrupt, MemoryError))
def test_what_was_broken_off_is_recorded_by_the_next_prompt(error, monkeypatch):
    require_native(CPU)
    stock = small_model("glm4")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ours.generate(ids_of(9), **GREEDY)
    with monkeypatch.context() as patch:

        def fail(*given):
            raise error

        patch.setattr(recorded_prompts, "prompts_agree", fail)
        with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
            ours.generate(ids_of(9), **GREEDY)
    with reads(monkeypatch) as shapes:
        assert_equal(ours, stock, ids_of(40))
    assert shapes == [(1, 40)]


def test_a_number_of_the_models_that_looks_like_a_size(monkeypatch):
    """It stays what it is: beyond 58 tokens the model's clamp shows."""
    stock, ours = pair("clamped")
    for length in (9, 9, 20, 70):
        assert_equal(ours, stock, ids_of(length))
