"""patch(), unpatch() and patched() on the instance, and copies of it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import fresh_process
import pytest
import torch
from faults import PATCH, Fault, places
from models import (
    CPU,
    SHORT,
    assert_same_instances,
    build,
    fresh,
    instances,
    over_architectures,
    prompt,
    require_native,
)
from parity import assert_equal_generation
from transformers import AutoModelForCausalLM
from transformers.generation import GenerationMixin

import hf_fastpath
from hf_fastpath.patching import api, apply, loops

ROOT = Path(__file__).resolve().parents[2]


# ---- patch and unpatch -------------------------------------------------------------------------------------


@over_architectures
def test_unpatch_restores_everything(architecture, device):
    """Logits and state_dict bit for bit, every module's __dict__, RNG, mode and generation_config are as before."""
    require_native(device)
    model, ids = build(architecture).to(device), prompt(device, 2)
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    with torch.no_grad():
        logits, state = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    before, random_state = instances(model), torch.get_rng_state()
    assert hf_fastpath.patch(model, quiet=True) is model
    assert list(model.state_dict()) == list(state) and not model.training
    assert torch.equal(torch.get_rng_state(), random_state), "patch() used random numbers"
    model.generate(ids, **SHORT)
    assert hf_fastpath.unpatch(model) is model
    assert_same_instances(instances(model), before)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    assert torch.equal(torch.get_rng_state(), random_state)


SAMPLE_SCRIPT = """
import copy, gc
from transformers.generation import GenerationMixin
import torch
torch.set_num_threads(1)
original = GenerationMixin._sample
attributes = set(vars(GenerationMixin))
import hf_fastpath
from models import build, prompt
assert GenerationMixin._sample is original, "import changes transformers"
first, second = build("gpt2"), build("llama")
hf_fastpath.patch(first, quiet=True)
hf_fastpath.patch(second, quiet=True)
third = copy.deepcopy(second)
assert GenerationMixin._sample is not original
hf_fastpath.unpatch(first)
hf_fastpath.unpatch(second)
assert GenerationMixin._sample is not original, "a copy still needs the loop"
hf_fastpath.unpatch(third)
assert GenerationMixin._sample is original, "unpatch of the last model leaves the wrapper"
hf_fastpath.patch(third, quiet=True)
third.generate(prompt(torch.device("cpu")), max_new_tokens=3)
del third
gc.collect()
print("restored" if GenerationMixin._sample is original else "left behind")
assert set(vars(GenerationMixin)) == attributes

# another library's wrapper over ours: ours stays beneath it and passes through
import functools
model = hf_fastpath.patch(build("gpt2"), quiet=True)
ours = GenerationMixin._sample
calls = []
@functools.wraps(ours)
def theirs(self, *args, **kwargs):
    calls.append(self)
    return ours(self, *args, **kwargs)
GenerationMixin._sample = theirs
hf_fastpath.unpatch(model)
assert GenerationMixin._sample is theirs
expected = model.generate(prompt(torch.device("cpu")), max_new_tokens=3, do_sample=False)
hf_fastpath.patch(model, quiet=True)
assert GenerationMixin._sample is theirs
found = model.generate(prompt(torch.device("cpu")), max_new_tokens=3, do_sample=False)
assert torch.equal(found, expected) and len(calls) == 2
assert hf_fastpath.report(model).stats["fast_tokens"] == 3
print("beneath")
"""


def test_generation_mixin_is_restored(tmp_path):
    """In a separate process, the wrapper goes with the last patched model, unpatched or forgotten."""
    require_native(CPU)
    result = fresh_process.run(SAMPLE_SCRIPT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == ["restored", "beneath"]


def test_patch_twice(device):
    _, ours = fresh("llama", device)
    before = instances(ours)
    assert hf_fastpath.patch(ours, quiet=True) is ours
    assert_same_instances(instances(ours), before)
    with pytest.raises(ValueError, match="unpatch"):
        hf_fastpath.patch(ours, kv_dtype="float16", quiet=True)
    assert_same_instances(instances(ours), before)
    hf_fastpath.unpatch(ours)
    hf_fastpath.patch(ours, kv_dtype="float16", quiet=True)


def test_unpatch_of_a_stock_model_changes_nothing():
    model = build("llama")
    before = instances(model)
    assert hf_fastpath.unpatch(hf_fastpath.unpatch(model)) is model
    assert_same_instances(instances(model), before)


@pytest.mark.parametrize("failing", ("_bind_forward", "_bind_generate", "check_coverage"))
@pytest.mark.parametrize("after", (0, 3))
def test_a_failing_patch_leaves_nothing(failing, after, monkeypatch):
    """Whatever goes wrong in the middle, all is done or nothing."""
    require_native(CPU)
    anchor = hf_fastpath.patch(build("gpt2"), quiet=True)  # keeps the wrapper in place, so that it can be compared
    home = api if failing == "check_coverage" else apply
    model, sample, users = build("mistral"), GenerationMixin._sample, set(loops._users)
    before, real, calls = instances(model), getattr(home, failing), []

    def fails(*args):
        calls.append(args)
        if len(calls) > (after if failing == "_bind_forward" else 0):
            raise MemoryError("in the middle")
        return real(*args)

    monkeypatch.setattr(home, failing, fails)
    with pytest.raises(MemoryError):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)
    assert GenerationMixin._sample is sample and set(loops._users) <= users
    hf_fastpath.unpatch(anchor)
    monkeypatch.undo()
    hf_fastpath.patch(model, quiet=True)
    model.generate(prompt(CPU), **SHORT)


@over_architectures
def test_patch_interrupted_anywhere(architecture):
    """An interrupt at any line of patch(), its report included, leaves the model as it was."""
    require_native(CPU)
    model = build(architecture)
    before = instances(model)
    anchor = hf_fastpath.patch(build("gpt2"), quiet=True)  # keeps the wrapper in place, so that it can be compared
    users = set(loops._users)
    for _ in range(2):  # the first call fills caches
        with Fault(PATCH) as whole:
            hf_fastpath.patch(model)
        hf_fastpath.unpatch(model)
        assert_same_instances(instances(model), before)
    for at in places(whole.lines - 1, 60):  # the last line is the return
        with Fault(PATCH, at) as fault, pytest.raises(KeyboardInterrupt):
            hf_fastpath.patch(model)
        assert hf_fastpath.patching.state.state_of(model) is None, fault.where
        assert_same_instances(instances(model), before)
        assert set(loops._users) <= users
    assert_equal_generation(hf_fastpath.patch(model, quiet=True), build(architecture))
    hf_fastpath.unpatch(anchor)


@over_architectures
def test_unpatch_interrupted_anywhere(architecture):
    """unpatch() called again goes on where it was; meanwhile the model gives stock's tokens."""
    require_native(CPU)
    model, stock = build(architecture), build(architecture)
    before = instances(model)
    hf_fastpath.patch(model, quiet=True)
    with Fault(PATCH) as whole:
        hf_fastpath.unpatch(model)
    expected = stock.generate(prompt(CPU), **SHORT)
    for at in places(whole.lines, 25):
        hf_fastpath.patch(model, quiet=True)
        with Fault(PATCH, at) as fault, pytest.raises(KeyboardInterrupt):
            hf_fastpath.unpatch(model)
        assert torch.equal(model.generate(prompt(CPU), **SHORT), expected), fault.where
        hf_fastpath.unpatch(model)
        assert_same_instances(instances(model), before)


PIECES = ("model.layers.0", "model.layers.0.mlp", "model.layers.1.self_attn", "model.norm", "model.layers", "model")


@pytest.mark.parametrize("name", PIECES)
def test_patch_of_a_piece(name, device):
    """A module of a model may be patched alone, copied, pickled and unpatched."""
    require_native(device)
    stock = build("llama").to(device)
    model = copy.deepcopy(stock)
    before, piece = instances(model), model.get_submodule(name)
    assert hf_fastpath.patch(piece, quiet=True) is piece and hf_fastpath.report(piece).patched
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.generate(prompt(device), **SHORT), stock.generate(prompt(device), **SHORT))
    hf_fastpath.unpatch(piece)
    assert_same_instances(instances(model), before)


def test_patched_context_manager(device):
    require_native(device)
    model = build("gpt2").to(device)
    before = instances(model)
    with hf_fastpath.patched(model, quiet=True) as inside:
        assert inside is model
        model.generate(prompt(device), **SHORT)
        assert hf_fastpath.report(model).stats["fast_tokens"] == 12
    assert_same_instances(instances(model), before)
    with pytest.raises(KeyError), hf_fastpath.patched(model, quiet=True):
        raise KeyError
    assert_same_instances(instances(model), before)
    hf_fastpath.patch(model, quiet=True)
    with hf_fastpath.patched(model, quiet=True):
        pass
    assert "_hf_fastpath" in vars(model), "a model that was patched before stays so"


# ---- copies ------------------------------------------------------------------------------------------------


@over_architectures
def test_deepcopy_stays_patched_and_independent(architecture, device):
    stock, ours = fresh(architecture, device)
    ours.generate(prompt(device), **SHORT)
    twin = copy.deepcopy(ours)
    assert hf_fastpath.report(twin).stats["fast_tokens"] == 0
    with torch.no_grad():
        next(twin.parameters()).mul_(1.5)  # the twin's weights are its own
    assert_equal_generation(ours, stock)
    expected = copy.deepcopy(stock)
    expected.load_state_dict(twin.state_dict())
    assert_equal_generation(twin, expected)
    hf_fastpath.unpatch(ours)
    assert_equal_generation(twin, expected)
    before = instances(expected)
    hf_fastpath.unpatch(twin)
    assert [sorted(c) for c in instances(twin).values()] == [sorted(c) for c in before.values()]


def test_deepcopy_of_one_module_is_stock():
    _, ours = fresh("llama")
    alone = copy.deepcopy(ours.model.layers[0].mlp)
    assert not {"_hf_fastpath", "_hf_fastpath_module", "forward"} & set(vars(alone))
    x = torch.randn(1, 3, 112)
    with torch.no_grad():
        torch.testing.assert_close(alone(x), ours.model.layers[0].mlp(x))


@over_architectures
@pytest.mark.parametrize("how", ("pickle", "torch.save"))
def test_pickle_comes_out_stock(how, architecture):
    """The copy has no residue of the patch and the same weights, and can be patched again."""
    stock, ours = fresh(architecture)
    ours.generate(prompt(CPU), **SHORT)
    if how == "pickle":
        made = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    assert [sorted(c) for c in instances(made).values()] == [sorted(c) for c in instances(stock).values()]
    assert "_hf_fastpath" in vars(ours), "pickling must not unpatch the original"
    with torch.no_grad():
        assert torch.equal(made(prompt(CPU)).logits, stock(prompt(CPU)).logits)
    assert_equal_generation(ours, stock)
    assert_equal_generation(hf_fastpath.patch(made, quiet=True), stock)


def test_shallow_copy_is_right():
    stock, ours = fresh("llama")
    twin = copy.copy(ours)
    assert torch.equal(twin.generate(prompt(CPU), **SHORT), stock.generate(prompt(CPU), **SHORT))
    assert_equal_generation(ours, stock)
    hf_fastpath.unpatch(ours)
    assert torch.equal(twin.generate(prompt(CPU), **SHORT), stock.generate(prompt(CPU), **SHORT))


def test_save_pretrained_is_unaffected(tmp_path):
    stock, ours = fresh("mistral")
    ours.generate(prompt(CPU), **SHORT)
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    for file in (tmp_path / "stock").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_equal_generation(hf_fastpath.patch(loaded.eval(), quiet=True), stock)
