"""Features that exist only on a GPU: graph replay, running ahead of the device, streams, capture beside other work."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from models import ARCHITECTURES, GREEDY, build, counting, fresh, over_architectures, pair, prompt, require_native
from parity import assert_same_tokens, both

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans import decode_plan as plan_module
from hf_fastpath.decode.plans.decode_plan import MAX_EOS_TOKENS, DecodePlan
from hf_fastpath.decode.run.graph import capture
from hf_fastpath.parity.comparison import decode_logits


@pytest.fixture
def captures(monkeypatch):
    """Counts captures of plans into graphs."""
    made = []

    def capture(program, device):
        made.append(program)
        return real(program, device)

    real = plan_module.capture
    monkeypatch.setattr(plan_module, "capture", capture)
    return made


@over_architectures
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_graph_replay_equals_eager(dtype, architecture, cuda, monkeypatch):
    """Bits are equal, because the graph holds the very kernels that run eagerly."""
    _, ours = pair(architecture, cuda, dtype)
    text = prompt(cuda, 3, 40)
    replayed = decode_logits(ours, text, 9, fast=True)
    eager = copy.deepcopy(ours)
    real = DecodePlan.step

    def step(self, tokens):
        self.warm = False  # never captures
        return real(self, tokens)

    monkeypatch.setattr(DecodePlan, "step", step)
    assert torch.equal(decode_logits(eager, text, 9, fast=True), replayed)


def test_one_capture_serves_every_cache_and_length(cuda, captures):
    """Other prompts, growth, a continued conversation and in-place changes of weights need one capture."""
    require_native(cuda)
    stock = build("mistral").to(cuda)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for length in (5, 40, 200):
        ids = prompt(cuda, 2, length)
        found = ours.generate(ids, max_new_tokens=200, do_sample=False)
        assert_same_tokens(found, stock.generate(ids, max_new_tokens=200, do_sample=False), stock)
    with torch.no_grad():
        for model in (ours, stock):
            for parameter in model.parameters():
                parameter.mul_(0.9)
    assert_same_tokens(ours.generate(ids, **GREEDY), stock.generate(ids, **GREEDY), stock)
    assert len(captures) == 1


def test_one_capture_serves_every_setting(cuda, captures):
    """Temperatures, top-k, seeds and modes change between the calls; one graph draws what stock draws."""
    require_native(cuda)
    stock, ours = fresh("mistral", cuda)
    settings = (dict(), dict(temperature=0.4), dict(top_p=0.8, top_k=0), dict(top_k=9, min_p=0.1))
    for seed, options in enumerate(settings):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                options |= dict(input_ids=prompt(cuda, 2), do_sample=True, max_new_tokens=40)
                assert_same_tokens(*both(stock, ours, seed=seed, **options))
    assert len(captures) == 1


def test_sampling_and_other_random_numbers_share_the_generator(cuda):
    """Numbers that a program draws between two calls are stock's."""
    stock, ours = pair("llama", cuda)
    drawn = []
    for model in (ours, stock):
        torch.manual_seed(5)
        for _ in range(3):
            drawn.append(model.generate(prompt(cuda, 3), do_sample=True, max_new_tokens=9))
            drawn.append(torch.rand(1000, device=cuda))
    for found, expected in zip(drawn[:6], drawn[6:], strict=True):
        assert torch.equal(found, expected)


@over_architectures
def test_growth_under_replay(architecture, cuda, captures):
    """The buffers move several times while one graph is replayed."""
    require_native(cuda)
    stock = build(architecture).to(cuda)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ids = prompt(cuda, 1, 3)
    found = ours.generate(ids, max_new_tokens=700, do_sample=False)
    assert len(captures) == 1
    assert_same_tokens(found, stock.generate(ids, max_new_tokens=700, do_sample=False), stock)


@pytest.mark.parametrize("scores", (False, True))
@pytest.mark.parametrize("sample", (False, True))
def test_late_end_is_undone(sample, scores, cuda):
    """Tokens past the end leave no trace: sequences, cache, generator, and the next turn are stock's."""
    stock, ours = pair("mistral", cuda)
    for seed in range(6):
        ids, results = prompt(cuda, 2, 9, seed=seed), []
        for model in (ours, stock):
            torch.manual_seed(seed)
            ends = 100 if scores else MAX_EOS_TOKENS  # with few end tokens and no scores, the plan chooses
            options = dict(do_sample=sample, max_new_tokens=80, eos_token_id=list(range(60, 60 + ends)))
            options |= dict(return_dict_in_generate=True, output_scores=scores)
            out = model.generate(ids, **options)
            state = torch.cuda.get_rng_state()
            more = torch.cat((out.sequences, prompt(cuda, 2, 3)), dim=1)
            then = model.generate(more, **{CACHE: out[CACHE]}, max_new_tokens=10, do_sample=sample)
            results.append((out, state, out[CACHE].get_seq_length(), then))
        (a, a_state, _, a_then), (b, b_state, _, b_then) = results
        assert_same_tokens(a.sequences, b.sequences, None if sample else stock)
        assert torch.equal(a_state, b_state)
        assert not scores or len(a.scores) == len(b.scores)
        assert_same_tokens(a_then, b_then, None if sample else stock)


def test_non_default_stream(cuda):
    """Work before, in and after generate() on a stream of the user's keeps its order."""
    for architecture in ARCHITECTURES:
        require_native(cuda)
        stock = build(architecture).to(cuda)
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
        expected = stock.generate(prompt(cuda, 2), **GREEDY)
        for _ in range(2):
            stream = torch.cuda.Stream(cuda)
            stream.wait_stream(torch.cuda.current_stream(cuda))
            with torch.cuda.stream(stream):
                busy = torch.randn(2048, 2048, device=cuda)
                for _ in range(20):
                    busy = busy @ busy * 1e-3
                ids = prompt(cuda, 2) + (busy[0, 0] * 0).long()  # depends on the queue in front of it
                found = ours.generate(ids, **GREEDY).clone()
            torch.cuda.current_stream(cuda).wait_stream(stream)
            assert_same_tokens(found, expected, stock)
        assert_same_tokens(ours.generate(prompt(cuda, 2), **GREEDY), expected, stock)


def test_another_thread_allocates_during_capture(cuda):
    stop, errors, ready = threading.Event(), [], threading.Event()

    def allocate() -> None:
        generator = torch.Generator().manual_seed(0)
        try:
            while not stop.is_set():
                size = int(torch.randint(1, 1 << 22, (1,), generator=generator))
                torch.empty(size, device=cuda).fill_(1.0)
                ready.set()
        except BaseException as error:
            errors.append(error)

    require_native(cuda)
    stock = build("llama").to(cuda)
    expected = stock.generate(prompt(cuda, 2), **GREEDY)
    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert ready.wait(60)
        for _ in range(8):
            ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
            assert_same_tokens(ours.generate(prompt(cuda, 2), **GREEDY), expected, stock)
    finally:
        stop.set()
        thread.join(60)
    assert not errors, errors


@pytest.mark.parametrize("sample", (False, True))
def test_steady_state_does_not_synchronize(sample, cuda):
    """No token makes a blocking call: the host waits only for the prompt and for the end."""
    _, ours = pair("llama", cuda)
    options = GREEDY | dict(do_sample=sample)
    ours.generate(prompt(cuda, 2), **options)
    real, blocking = DecodePlan.step, []

    def step(self, tokens):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(self, tokens)
        except RuntimeError as error:
            blocking.append(str(error))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    DecodePlan.step = step
    try:
        with counting(ours) as counts:
            ours.generate(prompt(cuda, 2), **options)
    finally:
        DecodePlan.step = real
    assert not blocking and counts.fast == 40


def test_plans_do_not_hold_caches(cuda):
    """After a call the KV memory is free again."""
    require_native(cuda)
    ours = hf_fastpath.patch(build("llama").to(cuda), quiet=True)
    ours.generate(prompt(cuda, 2), **GREEDY)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for length in (100, 400, 900):
        ours.generate(prompt(cuda, 2, length), **GREEDY)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 16)


def _waits(sample: bool, device: torch.device, lengths: tuple[int, ...]) -> list[Counter]:
    """Count the calls that wait for the device while as many tokens are made."""
    _, ours = pair("mistral", device, torch.float16)
    ids = prompt(device, 1, 20)
    waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "aten::_local_scalar_dense")
    for _ in range(3):  # the first calls capture the step, and the prompt
        ours.generate(ids, max_new_tokens=max(lengths), do_sample=sample)
    found = []
    for tokens in lengths:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
            ours.generate(ids, max_new_tokens=tokens, do_sample=sample)
        names = Counter(event.name for event in trace.events())
        assert names["cudaGraphLaunch"] >= tokens - 1, "the trace has lost the steps"
        found.append(Counter({name: names[name] for name in waiting}))
    return found


@pytest.mark.parametrize("sample", (False, True))
def test_no_synchronization_a_token(sample, cuda):
    """Twice the tokens make not one more call that waits for the device. A process that has profiled a GPU keeps some
    bytes for every launch from then on; therefore it is one of its own."""
    require_native(cuda)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        long, short = pool.submit(_waits, sample, cuda, (80, 40)).result()
    assert long == short


def test_a_capture_that_fails_leaves_random_numbers_alone(cuda):
    """torch would refuse to draw from then on, in every model of the process."""
    x = torch.ones(4, device=cuda)
    with pytest.raises(RuntimeError, match="captur"):
        capture(lambda: x.add_(1).cpu(), cuda)  # a wait for the device, which no graph can hold
    with pytest.raises(KeyError):
        capture(lambda: {}["no such"], cuda)
    torch.manual_seed(3)
    expected = torch.randn(4, device=cuda)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=cuda), expected)
    before = x.clone()
    capture(lambda: x.add_(1), cuda).replay()
    assert torch.equal(x, before + 1)
