"""Calls that the native library makes in a row: the bits, errors, threads and memory of calls from Python."""

from __future__ import annotations

import gc
import operator
import threading
import weakref

import fresh_process
import pytest
import torch
from causal_lm_types import small_model
from golden_calls import RECORDED
from models import (
    CPU,
    build,
    left_padded,
    over_architectures,
    prompt,
    require_native,
    skip_if_cache_is_named_otherwise,
)

import hf_fastpath
from hf_fastpath import ops
from hf_fastpath.decode.calls.named_calls import Step
from hf_fastpath.decode.run import native_calls
from hf_fastpath.decode.run.native_calls import NativeCalls
from hf_fastpath.decode.run.program import Program
from hf_fastpath.native import call_lists, loader
from hf_fastpath.parity.comparison import decode_logits
from hf_fastpath.patching.state import state_of

_aten = torch.ops.aten
FROM_PYTHON = "-native_calls"


@pytest.fixture(autouse=True)
def library():
    require_native(CPU)


def optimized(program: Program) -> Program:
    program.optimize(Step(rows=1))
    return program


def plan_of(model):
    return next(iter(state_of(model).plans))


def made_both_ways(model, monkeypatch, make) -> tuple:
    """Return what ``make`` gives with the library's runs of calls and without them."""
    found = []
    for passes in ("", FROM_PYTHON):
        monkeypatch.setenv("HF_FASTPATH_PASSES", passes)
        state_of(model).plans.clear()
        found.append(make(model))
        assert all((not each.program.native_runs) == (passes == FROM_PYTHON) for each in state_of(model).plans)
    return tuple(found)


# ---- models ---------------------------------------------------------------------------------------------------------


def same_text_both_ways(model, monkeypatch, batch: int) -> None:
    """Tokens and logits of a prompt, one token at a time and sampled ones, over a cache that grows."""
    ids = prompt(model.device, batch, 9) % 97 + 3

    def generate(ours, **how):
        torch.manual_seed(3)
        found = ours.generate(
            ids, max_new_tokens=40, min_new_tokens=40, output_logits=True, return_dict_in_generate=True, **how
        )
        return found.sequences, *found.logits

    for how in (dict(do_sample=False), dict(do_sample=True, top_k=7)):
        ours, theirs = made_both_ways(model, monkeypatch, lambda each, how=how: generate(each, **how))
        assert all(map(torch.equal, ours, theirs))


@over_architectures
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_listed_models(architecture, batch, dtype, device, monkeypatch):
    """On a GPU the prompt alone is made of runs of calls."""
    require_native(device)
    same_text_both_ways(hf_fastpath.patch(build(architecture).to(device, dtype), quiet=True), monkeypatch, batch)


@pytest.mark.parametrize("options", (dict(weights="int4_g32", lm_head="int8"), dict(kv_dtype="int8")), ids=str)
def test_quantized(options, monkeypatch):
    same_text_both_ways(hf_fastpath.patch(build("llama").half(), quiet=True, **options), monkeypatch, 2)


@pytest.mark.parametrize("model_type", RECORDED)
def test_recorded_models(model_type, monkeypatch):
    skip_if_cache_is_named_otherwise(model_type)
    same_text_both_ways(hf_fastpath.patch(small_model(model_type), quiet=True), monkeypatch, 1)


def test_pages_and_padding(monkeypatch):
    model = hf_fastpath.patch(build("mistral"), quiet=True, page_size=16)

    def generate(ours):
        return ours.generate(**left_padded(CPU), max_new_tokens=30, min_new_tokens=30, do_sample=False)

    assert torch.equal(*made_both_ways(model, monkeypatch, generate))


def test_drafts(monkeypatch):
    """Several tokens of one sequence at once."""
    model = hf_fastpath.patch(build("llama"), quiet=True)
    ids = torch.arange(4, 12).repeat(4)[None]

    def generate(ours):
        return ours.generate(ids, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=4)

    assert torch.equal(*made_both_ways(model, monkeypatch, generate))


def test_most_calls_of_a_token_are_in_one_run():
    """That is what makes thin models fast; the calls are those that a plan always had."""
    # a recorded model's embedding and angles, which another release may compute with a call more
    for model, outside in ((build("llama"), 0), (build("mixtral"), 0), (small_model("glm4"), 11)):
        ours = hf_fastpath.patch(model, quiet=True)
        ours.generate(prompt(CPU) % 97, max_new_tokens=3, do_sample=False)
        program = plan_of(ours).program
        (run,) = program.native_runs
        assert len(program) - (run.end - run.begin) <= outside
        assert len(program.op_names()) == len(program)


# ---- programs -------------------------------------------------------------------------------------------------------

VIEWS = {
    "select": (_aten.select.int, (1, -2)),
    "narrow": (_aten.narrow.default, (2, 1, 3)),
    "slice": (_aten.slice.Tensor, (-1, 1, -1, 2)),
    "slice, open": (_aten.slice.Tensor, (0,)),
    "slice, behind the end": (_aten.slice.Tensor, (2, 3, 9223372036854775807)),
    "transpose": (_aten.transpose.int, (0, -1)),
    "permute": (_aten.permute.default, ([2, 0, 1],)),
    "unsqueeze": (_aten.unsqueeze.default, (-1,)),
    "unsqueeze, first": (_aten.unsqueeze.default, (0,)),
    "squeeze": (_aten.squeeze.dim, (1,)),
    "reshape": (_aten.reshape.default, ([2, -1],)),
    "reshape, more": (_aten.reshape.default, ([2, 1, 2, 2, 1, -1],)),
    "reshape, flat": (_aten.reshape.default, ([-1],)),
    "expand": (_aten.expand.default, ([5, -1, -1, 6],)),
}
INPUTS = {
    "dense": lambda: torch.randn(2, 4, 6),
    "turned": lambda: torch.randn(6, 4, 2).permute(2, 1, 0),
    "part": lambda: torch.randn(3, 5, 14)[1:, :4, 1:13:2],
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, given):
    """They give PyTorch's sizes and strides; a copy where PyTorch makes one."""
    op, arguments = VIEWS[view]
    x, weight = INPUTS[given](), torch.ones(6)
    program = Program()
    first = program.register()
    seen = program.keep(program.emit(op, first, *arguments))
    program.emit(ops.rms_norm.overload, first, weight, 1e-5)
    optimized(program)
    program.put(first, x)
    program.run()
    (run,) = program.native_runs
    assert (run.begin, run.end) == (0, 2)
    found, expected = program.values[seen.index], op(x, *arguments)
    assert torch.equal(found, expected) and found.shape == expected.shape
    assert [s for s, size in zip(found.stride(), found.shape) if size > 1] == [
        s for s, size in zip(expected.stride(), expected.shape) if size > 1
    ]
    assert (found.data_ptr() == expected.data_ptr()) == (expected.data_ptr() in range(*span(x)))


def span(x: torch.Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize(
    ("op", "arguments"), ((_aten.split.Tensor, (4, 2)), (_aten.split_with_sizes.default, ([1, 5], -1)))
)
def test_lists_of_views(op, arguments):
    x, weight = torch.randn(2, 3, 6), torch.ones(6)
    program = Program()
    first = program.register()
    parts = program.emit(op, first, *arguments)
    taken = [program.keep(program.emit(operator.getitem, parts, place)) for place in (0, -1)]
    program.emit(ops.rms_norm.overload, first, weight, 1e-5)
    optimized(program)
    program.put(first, x)
    program.run()
    assert [(each.begin, each.end) for each in program.native_runs] == [(0, 4)]
    expected = op(x, *arguments)
    for register, place in zip(taken, (0, -1)):
        found = program.values[register.index]
        assert torch.equal(found, expected[place]) and found.stride() == expected[place].stride()


def test_a_list_that_python_reads_stays_in_python():
    x, weight = torch.randn(2, 3, 6), torch.ones(6)
    program = Program()
    first = program.register()
    normed = program.emit(ops.rms_norm.overload, first, weight, 1e-5)
    again = program.emit(ops.rms_norm.overload, normed, weight, 1e-5)
    parts = program.emit(_aten.split.Tensor, again, 4, 2)
    program.emit(lambda parts: sum(each.sum() for each in parts), parts)
    optimized(program)
    program.put(first, x)
    program.run()
    assert [(each.begin, each.end) for each in program.native_runs] == [(0, 2)]
    torch.testing.assert_close(program.values[-1], program.values[again.index].sum())


def norms(count: int, weight: torch.Tensor) -> tuple[Program, list]:
    """Record norms in a row; return the program, and the registers of its input and of all results."""
    program = Program()
    registers = [program.register()]
    for _ in range(count):
        registers.append(program.emit(ops.rms_norm.overload, registers[-1], weight, 1e-5))
    return optimized(program), registers


def test_values_that_change_between_runs():
    """What is put into a register, also in place, and what a weight holds."""
    weight = torch.randn(8)
    program, (first, *_, last) = norms(3, weight)
    for change in range(4):
        x = torch.randn(2, 8)
        program.put(first, x)
        if change == 2:
            weight.mul_(2)
        if change == 3:
            weight.data = torch.randn(8)
        for _ in range(2):
            program.run()
            expected = x
            for _ in range(3):
                expected = ops.rms_norm(expected, weight, 1e-5)
            assert torch.equal(program.values[last.index], expected)
            x.add_(1)


def test_what_the_library_does_not_take_runs_from_python():
    """A tensor of a subclass: its own class sees the calls."""

    class Seen(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    program, (first, *_, last) = norms(3, torch.ones(8))
    x = torch.randn(2, 8)
    program.put(first, x)
    program.run()
    expected = program.values[last.index]
    program.put(first, x.as_subclass(Seen))
    program.run()
    assert Seen.calls >= 3 and torch.equal(program.values[last.index], expected)
    program.put(first, x)
    program.run()
    assert torch.equal(program.values[last.index], expected)


def test_a_program_that_runs_once(device, monkeypatch):
    """It is one call of the library, on a GPU as well."""
    require_native(device)
    weight, x = torch.randn(64, device=device), torch.randn(3, 64, device=device)
    program, (first, *_) = norms(20, weight)
    run, made = native_calls._run_calls, []

    def running(*args):
        made.append(args)
        return run(*args)

    monkeypatch.setattr(native_calls, "_run_calls", running)
    for turn in range(3):
        expected = x = x + turn
        for _ in range(20):
            expected = ops.rms_norm(expected, weight, 1e-5)
        assert torch.equal(program.run_once([(first, x)]), expected) and len(made) == turn + 1


def test_short_runs_stay_in_python():
    program, (first, _) = norms(1, torch.ones(8))
    program.put(first, torch.randn(2, 8))
    program.run()
    assert not program.native_runs


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_calls_from_python():
    weight = torch.ones(8)
    messages = []
    for passes in (True, False):
        program, (first, *_) = norms(3, weight)
        if not passes:
            program._in_native_code = False
        program.put(first, torch.randn(2, 9))
        with pytest.raises(RuntimeError, match="hf_fastpath::rms_norm: weight has to have one dimension of 9") as info:
            program.run()
        messages.append(str(info.value).splitlines()[0])
        assert bool(program.native_runs) == passes
        program.put(first, torch.randn(2, 8))
        program.run()
    assert messages[0] == messages[1]


def test_an_error_leaves_the_results_of_calls_in_front_of_it():
    """Who looks at a step's logits behind an error finds those of this step."""
    program = Program()
    first = program.register()
    normed = program.keep(program.emit(ops.rms_norm.overload, first, None, 1e-5))
    again = program.keep(program.emit(ops.rms_norm.overload, normed, torch.ones(8), 1e-5))
    program.emit(ops.rms_norm.overload, again, torch.ones(9), 1e-5)
    optimized(program)
    for _ in range(2):
        x = torch.randn(2, 8)
        program.put(first, x)
        with pytest.raises(RuntimeError, match="rms_norm"):
            program.run()
        assert torch.equal(program.values[normed.index], ops.rms_norm(x, None, 1e-5))
        assert torch.equal(program.values[again.index], ops.rms_norm(program.values[normed.index], torch.ones(8), 1e-5))


def test_an_error_keeps_no_memory():
    program = Program()
    first, second = program.register(), program.register()
    program.emit(ops.rms_norm.overload, first, None, 1e-5)
    program.emit(ops.rms_norm.overload, second, torch.ones(8), 1e-5)
    program.emit(ops.rms_norm.overload, second, torch.ones(9), 1e-5)
    optimized(program)
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="rms_norm"):
        program.run_once([(first, x), (second, x)])
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_a_description_that_is_wrong_is_refused():
    path = loader.status()["cpu"].detail
    for names, code, message in (
        ("none_such", [0, 0, 0, 0, 0], "there is no op none_such"),
        ("rms_norm", [2, 0, 0, 0], "ends too early"),
        ("rms_norm", [2, 1, 5], "a register is 5, expected 0 to 1"),
        ("rms_norm", [2, 0, 0, 0, 1, 0, 1, 2, 0, 0], "has 2 arguments, expected 7"),
        (
            "rms_norm",
            [2, 0, 0, 0, 1, 0, 1, 7, 0, 0],
            "register 0, which calls of rms_norm read, does not hold a tensor",
        ),
        ("rms_norm", [2, 0, 1, 0, 0, 1, 0, 1, 7, 3, 0], "is of kind 3, expected 0"),
        ("rms_norm", [2, 0, 1, 0, 0, 1, 0, 1, 7, -1], "lacks an argument"),
        ("rms_norm", [2, 0, 0, 1, 1, 0], "register 1, which the results read, does not hold a tensor"),
        ("rms_norm", [2, 0, 0, 0, 0, 0], "something behind the last call"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call_lists.make(path, [names], code, [])
    with pytest.raises(RuntimeError, match="there is no list of calls 0"):
        torch.ops.hf_fastpath.run_calls(torch.ones(1), [], 0)


# ---- threads and memory ---------------------------------------------------------------------------------------------


def test_threads():
    """Each with a program of its own, and all with one model."""
    weight, failed = torch.randn(64), []
    model = hf_fastpath.patch(build("llama"), quiet=True)
    ids = prompt(CPU)
    expected_tokens = model.generate(ids, max_new_tokens=20, do_sample=False)

    def work(number: int) -> None:
        try:
            program, (first, *_, last) = norms(20, weight)
            for turn in range(50):
                x = torch.full((2, 64), float(number + turn)) + torch.arange(64)
                program.put(first, x)
                program.run()
                for _ in range(20):
                    x = ops.rms_norm(x, weight, 1e-5)
                assert torch.equal(program.values[last.index], x)
            assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected_tokens)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed


FORKED = """
import os, threading, time, torch
from hf_fastpath import ops
from hf_fastpath.decode.calls.named_calls import Step
from hf_fastpath.decode.run.program import Program

program = Program()
first = last = program.register()
for _ in range(200):
    last = program.emit(ops.rms_norm.overload, last, torch.ones(4096), 1e-5)
program.optimize(Step(rows=1))
program.put(first, torch.randn(4, 4096))
program.run()
expected, ends = program.values[last.index], []


def work():
    while not ends:
        program.run()


thread = threading.Thread(target=work)
thread.start()
failed = 0
for turn in range(20):
    time.sleep(0.003)
    child = os.fork()
    if child == 0:
        program.run()
        os._exit(0 if torch.equal(program.values[last.index], expected) else 1)
    failed += os.waitpid(child, 0)[1] != 0
ends.append(True)
thread.join()
assert not failed, failed
"""


def test_a_fork_while_another_thread_makes_the_calls():
    """The child makes them, too: it does not wait for a thread that it does not have."""
    done = fresh_process.run(FORKED, timeout=120)
    assert done.returncode == 0, done.stderr


def test_memory_is_let_go_of():
    """Results of calls behind their last reader, what was given behind a run, and all behind release()."""
    weight = torch.nn.Parameter(torch.ones(1 << 16), requires_grad=False)
    program, (first, *_) = norms(40, weight)
    x = torch.randn(4, 1 << 16)
    result = program.run_once([(first, x)])
    gone = weakref.ref(x)
    del x
    assert gone() is None and result.shape == (4, 1 << 16)
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.ones(1 << 16)))  # refuses tensors that others hold
    # 40 results at once would take 40 MB
    assert all(value is None for value in program.values)


def test_a_prompt_lets_go_of_what_it_is_given_behind_its_last_reader(monkeypatch):
    """While the library makes calls, Python holds nothing that only these calls read."""
    weight, program = torch.ones(8), Program()
    first = program.register()
    made = program.emit(_aten.add.Tensor, first, 1.0)
    normed = program.emit(ops.rms_norm.overload, made, weight, 1e-5)
    program.emit(ops.rms_norm.overload, normed, weight, 1e-5)
    last = program.emit(_aten.neg.default, normed)
    optimized(program)
    run, seen = native_calls._run_calls, []

    def running(on, given, number, times):
        seen.append((list(given), program.values[made.index]))
        return run(on, given, number, times)

    monkeypatch.setattr(native_calls, "_run_calls", running)
    x = torch.randn(2, 8)
    result = program.run_once([(first, x)])
    assert torch.equal(result, -ops.rms_norm(x + 1.0, weight, 1e-5)) and seen == [([], None)]
    assert last.index == len(program.values) - 1 and len(program.native_runs) == 1


def test_a_step_holds_no_more_than_its_calls_one_by_one():
    """Bytes of tensors that are alive in native code never grow from step to step."""
    model = hf_fastpath.patch(build("llama"), quiet=True)
    model.generate(prompt(CPU), max_new_tokens=4, do_sample=False)
    run = plan_of(model).program.native_runs[0]
    assert run._last is None, "a plan that has ended holds nothing"
    held: list[weakref.ref] = []
    take = NativeCalls._hold

    def hold(self, watched):
        held.extend(weakref.ref(each) for each in watched if each.dim() == 4)  # keys and values
        return take(self, watched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeCalls, "_hold", hold)
        for _ in range(3):
            model.generate(prompt(CPU), max_new_tokens=40, do_sample=False)
            gc.collect()
            assert held and not any(each() is not None for each in held), "a cache outlives its text"


def test_lists_go_with_their_programs():
    program, (first, *_) = norms(3, torch.ones(8))
    program.put(first, torch.randn(2, 8))
    program.run()
    number = program.native_runs[0]._handle
    del program
    gc.collect()
    with pytest.raises(RuntimeError, match=f"there is no list of calls {number}"):
        torch.ops.hf_fastpath.run_calls(torch.ones(1), [], number)


def test_clocked():
    """A run with a clock gives the bits of one without, and a time behind each call."""
    model = hf_fastpath.patch(small_model("glm4"), quiet=True)
    text = prompt(CPU, 1, 20) % 97
    expected = decode_logits(model, text, 9, fast=True)
    with pytest.MonkeyPatch.context() as patch:
        times = []
        patch.setattr(Program, "run", lambda self: times.append(self.run_clocked()))
        assert torch.equal(decode_logits(model, text, 9, fast=True), expected)
    program = plan_of(model).program
    assert len(times) == 11 and all(len(each) == len(program) + 1 for each in times)
    assert all(a <= b for each in times for a, b in zip(each, each[1:]))
