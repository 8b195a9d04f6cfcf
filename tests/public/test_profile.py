"""profile(): the calls of a step with their times, modules and bytes, on models of every kind; and what it refuses."""

from __future__ import annotations

import json
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import count

import encoder_decoder_types
import multimodal_types
import pytest
import torch
from models import (
    CPU,
    GPT2_SMALL,
    TINY_PYTHON,
    assert_same_instances,
    build,
    fresh,
    hidden_files,
    instances,
    pair,
    prompt,
    require_native,
)

import hf_fastpath
from hf_fastpath import ops, registry
from hf_fastpath.cli import main as cli
from hf_fastpath.compat import KernelRecord
from hf_fastpath.decode.calls.whose import op_name, torch_calls
from hf_fastpath.decode.plans.decode_plan import DecodePlan
from hf_fastpath.decode.run.program import Program
from hf_fastpath.patching.state import state_of
from hf_fastpath.profiling import attributed, energy, kernels, profiler
from hf_fastpath.profiling.described import KINDS, kind_of
from hf_fastpath.profiling.places import Places, layer_of, shown
from hf_fastpath.profiling.result import StepProfile
from hf_fastpath.profiling.steps import typical

#: R, so that no test measures it
R = 1e10
TOKENS = 6


def profiled(model, inputs, tokens: int = TOKENS) -> StepProfile:
    """Profile a model, and check what holds of every profile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = hf_fastpath.profile(model, inputs, tokens, bandwidth=R)
    assert sum(call.us for call in found.calls) == pytest.approx(found.us) and found.us > 0
    assert sum(call.percent_of_step for call in found.calls) == pytest.approx(100)
    assert [call.number for call in found.calls] == list(range(len(found.calls)))
    assert all(call.us >= 0 and call.kind in KINDS for call in found.calls)
    assert found.bytes == sum(call.bytes or 0 for call in found.calls) > 0
    for call in found.calls:
        expected = call.bytes / call.us * 1e6 / R * 100 if call.bytes and call.us else None
        assert call.percent_of_r == (None if expected is None else pytest.approx(expected))
    in_torch = sum(call.us for call in found.calls if call.runs == "PyTorch")
    assert found.torch_percent == pytest.approx(100 * in_torch / found.us)
    assert found.host_us == pytest.approx(found.wall_us - found.plain_us)
    assert min(found.plain_us, found.wall_us, found.profiled_wall_us, found.first_token_us) > 0
    assert StepProfile.from_json(found.to_json()) == found
    assert json.loads(found.to_json()) == json.loads(json.dumps(found.to_dict()))
    return found


def newest_calls(model) -> list:
    """Return the calls of the plan that a patched model has used last."""
    return next(iter(state_of(model).plans)).program.calls


#: of a layer of Llama: op, module
LLAMA_LAYER = (
    ("qkv_rope_append", "self_attn.{q_proj, k_proj, v_proj}"),
    ("decode_attention", "self_attn"),
    ("gemv", "self_attn.o_proj"),
    ("gemv_swiglu", "mlp.{gate_proj, up_proj}"),
    ("gemv", "mlp.down_proj"),
)
GPT2_LAYER = ("qkv_rope_append", "decode_attention", "gemv", "gemv", "gemv")


@pytest.mark.parametrize("batch", (1, 3))
def test_calls_of_a_listed_model(batch, device):
    """Every call of the list is there once and in order, with the module, sizes and bytes that it has by its op."""
    _, ours = pair("llama", device)
    found = profiled(ours, prompt(device, batch))
    inside = [(f"model.layers.{layer}", *each) for layer in range(2) for each in LLAMA_LAYER]
    layers = [call for call in found.calls if call.layer]
    assert [(call.layer, call.op, call.module) for call in layers] == [
        (layer, op, f"{layer}.{module}") for layer, op, module in inside
    ]
    assert all(call.runs == "hf_fastpath" for call in layers)
    outside = [(call.op, call.module) for call in found.calls if not call.layer]
    assert outside[0] == ("step_inputs", "model.embed_tokens") and outside[-1][0] == "greedy_token"
    assert ("gemv", "lm_head") in outside and len(found.calls) == len(layers) + len(outside)
    assert found.batch == batch and found.tokens == TOKENS and found.model == "LlamaForCausalLM"
    x, out = (torch.empty(batch, 1, size, device=device) for size in (112, 320))
    attention = ours.model.layers[0].self_attn
    wide = ops.gemv.bytes(out, attention.o_proj.weight, residual=x)
    (o_proj,) = (call for call in layers if call.module == "model.layers.0.self_attn.o_proj")
    assert o_proj.bytes == wide and o_proj.weights == ((112, 320),) and o_proj.shape == (batch, 1, 112)
    (projections,) = (call for call in layers if call.module.startswith("model.layers.1.self_attn.{"))
    assert projections.weights == ((320, 112), (80, 112), (80, 112))
    assert projections.bytes > 480 * 112 * 4
    # the lengths of the caches say how much attention reads: K and V of one head of 80 elements
    (attended,) = (call for call in layers if call.op == "decode_attention" and call.layer == "model.layers.0")
    read = batch * 2 * 80 * 4
    assert 11 * read < attended.bytes < (11 + 2 * TOKENS + 8) * read + 2 * batch * 320 * 4


def test_one_call_is_taken_apart(device):
    """An op that makes all layers is shown as the calls that it stands for, which add up to its own time."""
    _, ours = fresh("gpt2", device, **GPT2_SMALL)
    found = profiled(ours, prompt(device))
    if device.type == "cpu":  # no op makes all layers there
        assert {call.within for call in found.calls} == {None} and found.scaled is None
        return
    within = [call for call in found.calls if call.within is not None]
    names = [op_name(call.op) for call in newest_calls(ours)]
    assert "decode_layers" in names and {call.within for call in within} == {"decode_layers"}
    assert len(within) == 2 * len(GPT2_LAYER)
    assert len(found.calls) == len(names) - 1 + len(within)
    assert sum(call.us for call in within) == pytest.approx(found.scaled.us)
    assert found.scaled.op == "decode_layers" and found.scaled.list_us > 0
    assert "scaled" in found.text()


def test_a_recorded_model(device):
    """Calls of PyTorch's have their modules, and the bytes of the tensors that go in and come out."""
    require_native(device)
    with hidden_files():
        ours = hf_fastpath.patch(build("llama").to(device), quiet=True)
    found = profiled(ours, prompt(device, 2))
    calls = {call.op: call for call in found.calls}
    embedding = calls["aten.embedding"]
    assert embedding.module == "model.embed_tokens" and embedding.runs == embedding.kind == "PyTorch"
    assert embedding.bytes == 2 * (2 * 112 * 4) + 2 * 8 and embedding.shape == (2, 1, 112)
    assert calls["aten.cos"].bytes == 2 * calls["aten.cos"].shape[-1] * 2 * 4
    assert calls["aten.unsqueeze"].kind == "views" and calls["aten.unsqueeze"].bytes == 0
    assert calls["run_angles"].bytes is None and calls["run_angles"].percent_of_r is None
    assert found.torch_percent > 0 and calls["gemv"].module == "lm_head"
    report = hf_fastpath.report(ours)
    assert report.torch_percent == found.torch_percent
    assert report.torch_calls == torch_calls(newest_calls(ours)) and report.torch_calls["aten.embedding"] == 1
    assert report.step_calls == len(newest_calls(ours))
    assert "calls are PyTorch's (aten.embedding, " in str(report) and "of its time when profiled" in str(report)


def test_report_counts_the_calls_of_pytorch():
    """Also where nothing was profiled."""
    _, ours = fresh("gpt2")
    assert hf_fastpath.report(ours).step_calls == 0 and "PyTorch's" not in str(hf_fastpath.report(ours))
    ours.generate(prompt(CPU), max_new_tokens=4, do_sample=False)
    report = hf_fastpath.report(ours)
    assert report.step_calls == len(newest_calls(ours)) and report.torch_percent is None
    assert set(report.torch_calls) == {"aten.select.int"} and "step: 1 of" in str(report)


@pytest.mark.parametrize("weights", ("int8", "int4", "nf4"))
def test_quantized_weights(weights, device):
    """The bytes are those of the quantized weights, under the names of the layers that they stand for."""
    require_native(device)
    ours = hf_fastpath.patch(build("llama").to(device), weights=weights, quiet=True)
    found = profiled(ours, prompt(device))
    (down,) = (call for call in found.calls if call.module == "model.layers.1.mlp.down_proj")
    packed = ours.model.layers[1].mlp.down_proj.packed
    x, residual = (torch.empty(1, 1, size, device=device) for size in (204, 112))
    assert down.op == "packed_gemv" and down.weights == ((112, 204),)
    assert down.bytes == ops.packed_gemv.bytes(x, *packed.parts, residual=residual)


def test_adapters(device):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    require_native(device)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(build("llama"), config).to(device).eval()
    found = profiled(model, prompt(device))
    down = [(call.op, call.module) for call in found.calls if call.module.startswith("model.layers.1.mlp.down_proj")]
    assert down == [
        ("lora_down", "model.layers.1.mlp.down_proj.lora_A.default"),
        ("gemv", "model.layers.1.mlp.down_proj.base_layer"),
        ("lora_up", "model.layers.1.mlp.down_proj.lora_B.default"),
    ]
    assert state_of(model.base_model.model) is None, "an unpatched model is unpatched again"


def test_an_encoder_decoder(device):
    require_native(device)
    model = encoder_decoder_types.small_model("bart").to(device)
    found = profiled(model, encoder_decoder_types.text(2, 7))
    modules = [call.module for call in found.calls if call.op == "decode_attention"]
    layer = "model.decoder.layers.1"
    assert modules[2:] == [f"{layer}.self_attn", f"{layer}.encoder_attn"]
    assert found.calls[0].module == "model.decoder.embed_tokens", "not the encoder's, which shares the table"
    assert not any("model.encoder" in call.module for call in found.calls)


def test_a_model_that_reads_images(device):
    require_native(device)
    model = multimodal_types.small_model("llava").to(device)
    inputs = {name: each.to(device) for name, each in multimodal_types.prompt("llava", (1,)).items()}
    found = profiled(model, inputs)
    assert {call.layer for call in found.calls if call.layer} == {f"model.language_model.layers.{n}" for n in range(2)}


def test_nothing_is_changed():
    """The model, its plans, its counts and its random numbers are as they were."""
    stock, ours = fresh("mistral")
    before, state = instances(stock), torch.get_rng_state()
    profiled(stock, prompt(CPU))
    assert_same_instances(instances(stock), before)
    ours.generate(prompt(CPU), max_new_tokens=4, do_sample=False)
    counted, kept = hf_fastpath.report(ours).stats, list(state_of(ours).plans)
    profiled(ours, {"input_ids": prompt(CPU, 2)})
    assert hf_fastpath.report(ours).stats == counted and torch.equal(torch.get_rng_state(), state)
    plans = state_of(ours).plans
    assert "plan_of" not in vars(plans) and set(kept) <= set(plans)
    assert not any({"_run", "end"} & set(vars(plan)) for plan in plans)
    expected = stock.generate(prompt(CPU), max_new_tokens=6, do_sample=False)
    assert torch.equal(ours.generate(prompt(CPU), max_new_tokens=6, do_sample=False), expected)


def test_a_call_that_is_broken_off_leaves_nothing():
    _, ours = fresh("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run_each", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hf_fastpath.profile(ours, prompt(CPU), TOKENS, bandwidth=R)
    plans = state_of(ours).plans
    assert "plan_of" not in vars(plans) and not any("_run" in vars(plan) for plan in plans)
    profiled(ours, prompt(CPU))


REFUSED = {
    "batch": (lambda model: (model, prompt(CPU, 65)), "batch_size .*: .*"),
    "cache": (lambda model: (model, {"input_ids": prompt(CPU), "use_cache": False}), "no_cache"),
    "inputs": (lambda model: (model, "text"), "inputs of str, expected input_ids .* or a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """The reason is named, and nothing is left in the model."""
    _, ours = fresh("llama")
    before, (arguments, said) = instances(ours), REFUSED[case]
    with pytest.raises(ValueError, match=said):
        hf_fastpath.profile(*arguments(ours), bandwidth=R)
    now = instances(ours)  # a call of stock code takes forwards out and puts them back, in another order
    assert {name: set(held) for name, held in now.items()} == {name: set(held) for name, held in before.items()}
    assert all(now[name][key] is value for name, held in before.items() for key, value in held.items())


def test_stock_loops_are_refused():
    ours = hf_fastpath.patch(build("llama"), ops=["mlp"], quiet=True)
    with pytest.raises(ValueError, match="finds no step of ours: .*module_disabled .*: left out by"):
        hf_fastpath.profile(ours, prompt(CPU), bandwidth=R)
    model = build("llama")
    model.model.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="hooks"):
        hf_fastpath.profile(model, prompt(CPU), bandwidth=R)
    assert state_of(model) is None
    with pytest.raises(ValueError, match="no transformers model"):
        hf_fastpath.profile(torch.nn.Linear(2, 2), prompt(CPU), bandwidth=R)


@pytest.mark.parametrize(
    ("name", "value"), (("tokens", 3), ("tokens", 8.0), ("bandwidth", 0.0), ("bandwidth", float("inf")))
)
def test_wrong_numbers(name, value):
    with pytest.raises(ValueError, match=rf"got {name}={value}, expected"):
        hf_fastpath.profile(None, None, **{name: value})


def test_r_is_measured(monkeypatch):
    _, ours = fresh("llama")
    monkeypatch.setattr(profiler, "measure_read_bandwidth", lambda device: 7e9 if device == CPU else None)
    found = hf_fastpath.profile(ours, prompt(CPU), TOKENS)
    assert found.bandwidth == 7e9 and "R = 7.0 GB/s" in found.text()


# ---- on a GPU ---------------------------------------------------------------------------------------------------


def test_kernels_of_calls():
    """A step with a marker in front of each call and at the end says which kernels each call starts."""
    names = "m a m m b c m other m A m m b c m later"
    records = [KernelRecord(name, place, place + 0.5) for place, name in enumerate(names.split())]
    assert kernels.of_calls(records, "m", 3) == [["A"], [], ["b", "c"]], "of the newest step"
    with pytest.raises(RuntimeError, match="8 markers, expected 5 for each step"):
        kernels.of_calls(records, "m", 4)


def test_kernels_that_overlap_add_up():
    """A call counts from the end of the calls in front to its own; kernels side by side are matched by their names."""
    made = [("a", 10, 14), ("c", 12, 15), ("b", 13, 20), ("c", 21, 22.5), ("later", 30, 40)]
    step = [KernelRecord(*each) for each in made]
    assert kernels.added(step, [["a"], ["b", "c"], [], ["c"]]) == [4, 6, 0, 2.5]
    assert sum(kernels.added(step, [["a"], ["b", "c"], [], ["c"]])) == 22.5 - 10
    assert kernels.added(step, [["x"], ["y", "z"], [], ["w"]]) == [4, 6, 0, 2.5], "other names, as many: by order"
    assert kernels.added(step[1:], [["b"], ["c"]]) == [8, 0], "it ended inside of the call in front"
    with pytest.raises(RuntimeError, match="has 5 kernels, its calls by themselves start 6"):
        kernels.added(step, [["a"] * 6])


class FakeGPU:
    """Makes records of what a GPU would run while programs run on the CPU: one kernel, or two, for each call."""

    def __init__(self, monkeypatch):
        self.records: list[KernelRecord] = []
        self.times = count()
        run, run_each, made_for = Program.run, Program.run_each, DecodePlan._made_for

        def running(program):
            run(program)
            for call in program.calls:
                self.start(*self.names(op_name(call.op)))

        def running_each(program):
            for each in run_each(program):
                self.start(*self.names(op_name(each[0].op)))
                yield each

        def recorded(run, device):
            self.records.clear()
            run()
            return "marker", list(self.records)

        def as_on_a_gpu(plan, of_sequence):
            return replace(made_for(plan, of_sequence), one_call=plan.batch == 1)

        monkeypatch.setattr(DecodePlan, "_made_for", as_on_a_gpu)
        monkeypatch.setattr(Program, "run", running)
        monkeypatch.setattr(Program, "run_each", running_each)
        monkeypatch.setattr("hf_fastpath.profiling.steps.put_marker", lambda device: self.start("marker"))
        monkeypatch.setattr("hf_fastpath.profiling.attributed.kernel_records", recorded)
        monkeypatch.setattr("hf_fastpath.profiling.profiler.on_cpu", attributed.on_gpu)

    @staticmethod
    def names(op: str) -> list[str]:
        return {"decode_attention": ["split", "merge"], "getitem": [], "aten.select.int": []}.get(op, [op])

    def start(self, *names: str) -> None:
        for name in names:
            start = next(self.times)
            self.records.append(KernelRecord(name, start, start + 1))


@pytest.mark.parametrize(("architecture", "batch"), (("gpt2", 1), ("mixtral", 1), ("mixtral", 3)))
def test_gpu_profile_of_made_up_records(architecture, batch, monkeypatch):
    """All that is done with records of kernels, where there is no GPU: each kernel takes a microsecond."""
    _, ours = fresh(architecture)
    FakeGPU(monkeypatch)
    found = profiled(ours, prompt(CPU, batch))
    expected = [len(FakeGPU.names(call.op)) for call in found.calls]
    assert "CUPTI" in found.method
    if architecture == "gpt2":  # inputs, layers, head and token
        assert found.scaled.us == 1 and found.scaled.list_us == 2 * 6 and found.us == pytest.approx(4)
    else:
        assert found.scaled is None and [call.us for call in found.calls] == expected
    assert any(call.within == "decode_layers" for call in found.calls) == (architecture == "gpt2")


def test_cupti_records(cuda):
    """On a GPU: the calls of a replayed step take its time, and views take none."""
    require_native(cuda)
    _, ours = pair("llama", cuda, torch.float16)
    found = profiled(ours, prompt(cuda, 2), tokens=16)
    assert "CUPTI" in found.method and found.us <= 1.5 * found.plain_us
    assert all(call.us == 0 for call in found.calls if call.kind == "views")
    assert all(call.us > 0 for call in found.calls if call.runs == "hf_fastpath")
    assert (found.joules or 1) > 0 and found.energy


# ---- parts ------------------------------------------------------------------------------------------------------


def test_every_op_has_a_kind():
    for name, spec in registry.all_ops().items():
        assert kind_of(spec.overload) in KINDS, f"{name}: give it a kind in profiling/described.py:OPS"


def test_typical():
    """A step that was disturbed changes nothing, and calls add up to the median step."""
    steps = [[1.0, 2.0, 3.0]] * 3 + [[1.0, 200.0, 3.0], [100.0, 2.0, 3.0]]
    found = typical(steps)
    assert found == [1, 2, 3]
    assert sum(typical([[1.0, 4.0], [2.0, 3.0], [3.0, 5.0]])) == 5
    with pytest.raises(ValueError, match="give more tokens"):
        typical([])


def test_places():
    """Weights are found by where they lie, also views of them; of modules that share a weight, the one that is used."""
    model = build("gpt2")
    head, table = model.lm_head, model.transformer.wte
    assert head.weight is table.weight
    calls = Program()
    row = calls.emit(torch.ops.aten.embedding.default, table.weight, torch.tensor([1]))
    wide = calls.emit(torch.ops.aten.mm.default, row, model.transformer.h[1].attn.c_attn.weight[:, :120])
    narrow = calls.emit(torch.ops.aten.mul.Tensor, wide, 2.0)
    calls.emit(ops.gemv.overload, narrow, table.weight)
    calls.emit(torch.ops.aten.neg.default, torch.ones(2))
    state = calls.emit(torch.ops.aten.exp.default, torch.ones(120))
    for layer in model.transformer.h:
        calls.emit(torch.ops.aten.mm.default, state, layer.attn.c_attn.weight)
    one = calls.emit(torch.ops.aten.exp.default, torch.ones(120))
    calls.emit(torch.ops.aten.mm.default, one, layer.mlp.c_fc.weight)
    for places in (Places(model), Places(model, table, head)):
        assert places.of_calls(calls.calls) == [
            ["transformer.wte"],
            ["transformer.h.1.attn.c_attn"],
            ["transformer.h.1.attn"],
            ["lm_head"],
            [""],
            ["transformer.h"],
            ["transformer.h.0.attn.c_attn"],
            ["transformer.h.1.attn.c_attn"],
            ["transformer.h.1.mlp"],
            ["transformer.h.1.mlp.c_fc"],
        ]
    assert layer_of(["transformer.h.1.attn"]) == "transformer.h.1" and layer_of(["lm_head"]) == ""
    assert layer_of(["model.layers.3.a", "model.layers.3.b"]) == "model.layers.3"
    assert shown(["a.b.c", "a.b.d.e"]) == "a.b.{c, d.e}" and shown(["a", "b"]) == "{a, b}"
    assert shown(["a.b", "a.b.c"]) == "a.{b, b.c}" and layer_of(["a.1", "a.1.c"]) == "a.1"


def test_energy_of_a_cpu(tmp_path):
    """The packages and their memory are counted, not parts of packages, and a counter may begin anew."""
    assert "no RAPL counters" in energy.rapl(tmp_path)
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram"}
    for folder, name in zones.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text("9999999\n")
        (tmp_path / folder / "energy_uj").write_text("9000000\n")
    meter = energy.rapl(tmp_path)
    assert "package-0, dram" in meter.name and meter.joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1000000\n")  # behind the end of the counter
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("9500000\n")
    assert meter.joules() == 2
    (tmp_path / "intel-rapl:0:1" / "energy_uj").write_text("9250000\n")
    assert meter.joules() == 2.25


def test_energy_in_a_profile(monkeypatch):
    """Joules are those of the measured steps alone, and of a step."""
    _, ours = fresh("llama")
    used = count(0, 3)
    meter = energy.Meter("a test", lambda: float(next(used)), 0.0)
    monkeypatch.setattr(profiler.energy, "meter_of", lambda device: meter)
    found = profiled(ours, prompt(CPU, 2))
    assert found.joules == 3 / TOKENS and "0.5 J a token, 0.25 J of each sequence, of a test" in found.text()
    monkeypatch.setattr(profiler.energy, "meter_of", lambda device: "there is no counter")
    found = profiled(ours, prompt(CPU, 2))
    assert found.joules is None and "energy: not known: there is no counter" in found.text()


# ---- what is shown ----------------------------------------------------------------------------------------------


def test_text_and_files(tmp_path):
    """Layers that are alike are shown once, or each; the picture has a bar for every call and one for every limit."""
    _, ours = fresh("llama", num_hidden_layers=3)
    found = profiled(ours, prompt(CPU))
    text = str(found)
    assert "model.layers.0, and 2 layers like it, to model.layers.2 (means)" in text and "model.layers.1." not in text
    assert f"{found.us:,.1f} us under the profiler, {found.plain_us:,.1f} us without it" in text
    assert all(f"model.layers.{layer}.mlp.down_proj" in found.text(all_calls=True) for layer in range(3))
    for ending in ("svg", "html", "json", "txt"):
        found.save(tmp_path / f"step.{ending}")
    assert StepProfile.from_json((tmp_path / "step.json").read_text()) == found
    picture = ET.parse(tmp_path / "step.svg").getroot()
    bars = picture.findall("{*}rect")
    titles = [each.findtext("{*}title") or "" for each in bars]
    timed = [call for call in found.calls if call.us]
    shown_calls = [title for title in titles if " us" in title and " at R" not in title]
    assert len(shown_calls) == len(timed) and sum("at R" in title for title in titles) == 3 + 2
    widths = [float(each.get("width")) for each, title in zip(bars, titles) if title in shown_calls]
    scale = sum(widths) / found.us
    rounding = 0.005  # of a width in a picture; the scale is known from widths alone
    scales = rounding * len(widths) / sum(widths)
    assert widths == pytest.approx([call.us * scale for call in timed], rel=scales, abs=2 * rounding)
    limits = [float(each.get("width")) for each, title in zip(bars, titles) if "at R" in title]
    assert sum(limits) == pytest.approx(found.limit_us(found.bytes) * scale, rel=scales, abs=rounding * len(limits))
    assert all(float(each.get("x", 0)) + float(each.get("width")) <= 960 for each in bars)
    assert "prefers-color-scheme:dark" in picture.findtext("{*}style")
    page = (tmp_path / "step.html").read_text()
    assert (
        page.count("<tr>") > len(found.calls) and "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    )
    with pytest.raises(ValueError, match=r"step.png', expected a name that ends in .svg, .html, .json, .txt"):
        found.save("step.png")
    with pytest.raises(ValueError, match="no JSON of a StepProfile"):
        StepProfile.from_json("{}")


def test_cli_profile(capsys, tmp_path):
    require_native(CPU)
    arguments = ["profile", str(TINY_PYTHON), "--device", "cpu", "--tokens", "6", "--bandwidth", "10"]
    assert cli.main([*arguments, "--batch", "2", "--json", "--save", str(tmp_path / "step.svg")]) == 0
    found = StepProfile.from_json(capsys.readouterr().out)
    assert found.batch == 2 and found.bandwidth == 1e10 and (tmp_path / "step.svg").stat().st_size > 1000
    assert cli.main([*arguments, "--weights", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "packed_gemv" in printed and "R = 10.0 GB/s" in printed


CLI_REFUSED = {
    "no model": (["/nowhere"], "'/nowhere' is no folder, GGUF file or model id of a causal LM"),
    "picture": ([str(TINY_PYTHON), "--save", "x.png"], "expected a name that ends in .svg"),
    "tokens": ([str(TINY_PYTHON), "--tokens", "2"], "tokens=2, expected a whole number from 4 on"),
    "batch": ([str(TINY_PYTHON), "--batch", "65", "--bandwidth", "1"], "batch_size"),
}


@pytest.mark.parametrize("case", CLI_REFUSED)
def test_cli_profile_refuses(case, capsys):
    require_native(CPU)
    arguments, said = CLI_REFUSED[case]
    with pytest.raises(SystemExit) as left:
        cli.main(["profile", *arguments, "--device", "cpu"])
    assert left.value.code == 2 and said in capsys.readouterr().err
