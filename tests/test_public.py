"""The public surface: patch, unpatch, patched, report, verify, strict, and the command line."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from models import (
    ARCHITECTURES,
    TINY_PYTHON,
    build,
    counting,
    heldout_tokens,
    left_padded,
    pair,
    prompt,
    require_native,
    trained,
)
from parity import LogitRule, assert_same_tokens, float64_copy
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, T5Config, T5ForConditionalGeneration
from transformers.generation import GenerationMixin

import hf_fastpath
from hf_fastpath import FallbackError, UnsupportedModelError, cli, compat
from hf_fastpath.reasons import REASONS

ROOT = Path(__file__).resolve().parent.parent
GREEDY = dict(max_new_tokens=12, do_sample=False)
CPU = torch.device("cpu")
over_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(autouse=True)
def one_thread(repeatable):
    """Handing a microsecond of work to a pool takes longer than doing it; ``repeatable`` restores this."""
    torch.set_num_threads(1)


def fresh(architecture: str, device: torch.device = CPU, **changes):
    """(stock, patched) that a test may change."""
    require_native(device)
    stock = build(architecture, **changes).to(device)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def assert_equal_generation(ours, stock, fast: bool | None = True, **options) -> None:
    """Greedy tokens of both are equal; ``fast`` says whether by our loop (None: either)."""
    inputs = left_padded(stock.device, 2)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **(GREEDY | options))
    assert fast is None or bool(counts.fast) == fast, counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **(GREEDY | options)), stock, inputs["attention_mask"])


def instances(model: nn.Module) -> dict[str, dict]:
    """``vars(module)`` of every module, by name."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def assert_same_instances(now: dict[str, dict], before: dict[str, dict]) -> None:
    assert list(now) == list(before)
    for name, contents in now.items():
        assert list(contents) == list(before[name]), f"{name}: {set(contents) ^ set(before[name])}"
        assert all(value is before[name][key] for key, value in contents.items()), name


# ---- patch and unpatch -------------------------------------------------------------------------------------


@over_architectures
def test_unpatch_restores_everything(architecture, device):
    """Logits and state_dict bit for bit, every module's __dict__, RNG, mode, generation_config."""
    require_native(device)
    model, ids = build(architecture).to(device), prompt(device, 2)
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    with torch.no_grad():
        logits, state = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    before, random_state = instances(model), torch.get_rng_state()
    assert hf_fastpath.patch(model, quiet=True) is model
    assert list(model.state_dict()) == list(state) and not model.training
    assert torch.equal(torch.get_rng_state(), random_state), "patch() used random numbers"
    model.generate(ids, **GREEDY)
    assert hf_fastpath.unpatch(model) is model
    assert_same_instances(instances(model), before)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    assert torch.equal(torch.get_rng_state(), random_state)


SAMPLE_SCRIPT = """
import copy, gc, sys
sys.path.insert(0, sys.argv[1])
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
    """In a process of its own: the wrapper goes with the last patched model, unpatched or forgotten."""
    require_native(CPU)
    command = [sys.executable, "-c", SAMPLE_SCRIPT, str(ROOT / "tests")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
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


@pytest.mark.parametrize("failing", ("_bind_module", "_bind_generate", "_check_coverage"))
@pytest.mark.parametrize("after", (0, 3))
def test_a_failing_patch_leaves_nothing(failing, after, monkeypatch):
    """All or nothing, whatever goes wrong in the middle."""
    from hf_fastpath import patching

    require_native(CPU)
    anchor = hf_fastpath.patch(build("gpt2"), quiet=True)  # keeps the wrapper in place, so that it can be compared
    model, sample, users = build("mistral"), GenerationMixin._sample, set(compat._users)
    before, real, calls = instances(model), getattr(patching, failing), []

    def fails(*args):
        calls.append(args)
        if len(calls) > (after if failing == "_bind_module" else 0):
            raise MemoryError("in the middle")
        return real(*args)

    monkeypatch.setattr(patching, failing, fails)
    with pytest.raises(MemoryError):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)
    assert GenerationMixin._sample is sample and set(compat._users) <= users
    hf_fastpath.unpatch(anchor)
    monkeypatch.undo()
    hf_fastpath.patch(model, quiet=True)
    model.generate(prompt(CPU), **GREEDY)


def test_patched_context_manager(device):
    require_native(device)
    model = build("gpt2").to(device)
    before = instances(model)
    with hf_fastpath.patched(model, quiet=True) as inside:
        assert inside is model
        model.generate(prompt(device), **GREEDY)
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
    ours.generate(prompt(device), **GREEDY)
    twin = copy.deepcopy(ours)
    assert hf_fastpath.report(twin).stats["fast_tokens"] == 0
    with torch.no_grad():
        next(twin.parameters()).mul_(1.5)  # its weights are its own
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
    assert "_hf_fastpath" not in vars(alone) and "forward" not in vars(alone)
    x = torch.randn(1, 3, 112)
    with torch.no_grad():
        torch.testing.assert_close(alone(x), ours.model.layers[0].mlp(x))


@over_architectures
@pytest.mark.parametrize("how", ("pickle", "torch.save"))
def test_pickle_comes_out_stock(how, architecture):
    """No residue, the same weights, and it can be patched again."""
    stock, ours = fresh(architecture)
    ours.generate(prompt(CPU), **GREEDY)
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
    assert torch.equal(twin.generate(prompt(CPU), **GREEDY), stock.generate(prompt(CPU), **GREEDY))
    assert_equal_generation(ours, stock)
    hf_fastpath.unpatch(ours)
    assert torch.equal(twin.generate(prompt(CPU), **GREEDY), stock.generate(prompt(CPU), **GREEDY))


def test_save_pretrained_is_unaffected(tmp_path):
    stock, ours = fresh("mistral")
    ours.generate(prompt(CPU), **GREEDY)
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    for file in (tmp_path / "stock").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert_equal_generation(hf_fastpath.patch(loaded.eval(), quiet=True), stock)


# ---- weights that change -----------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    ids = prompt(next(model.parameters()).device, 2, 20)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return loss.item()


@over_architectures
def test_train_a_step_then_generate(architecture, device):
    """AdamW on the patched model, before and between generate() calls: always the present weights."""
    drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) if architecture == "gpt2" else {}
    stock, ours = fresh(architecture, device, **drop)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.02)
    stock_optimizer = torch.optim.AdamW(stock.parameters(), lr=0.02)
    untrained = stock.generate(prompt(device), **GREEDY)
    for _ in range(3):
        loss, expected = train_step(ours, optimizer), train_step(stock, stock_optimizer)
        assert loss == pytest.approx(expected, rel=1e-4)
        same_weights = copy.deepcopy(stock)
        same_weights.load_state_dict(ours.state_dict())
        assert_equal_generation(ours, same_weights)
    assert not torch.equal(same_weights.generate(prompt(device), **GREEDY), untrained), "training changed nothing"


@over_architectures
@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("checkpointing", (False, True))
def test_gradients_within_rule(checkpointing, dropout, architecture, device):
    """As near to float64 as stock's; with dropout, made with the same random numbers."""
    if dropout:
        names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if architecture == "gpt2" else ("attention_dropout",)
        changes = dict.fromkeys(names, dropout)
    else:
        changes = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) if architecture == "gpt2" else {}
    stock, ours = fresh(architecture, device, **changes)
    ids = prompt(device, 2, 20)
    models = [ours, stock] if dropout else [ours, stock, float64_copy(stock)]
    found, states = [], []
    for model in models:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        states.append(torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state())
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(states[0], states[1]), "other random numbers were used"
    if dropout:
        for name, gradient in found[1].items():
            torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-5)
        return
    mean = [sum((g[n].double() - found[2][n]).abs().mean().item() for n in found[2]) / len(found[2]) for g in found[:2]]
    assert 0 < mean[1] and mean[0] <= 1.1 * mean[1]


CHANGES = {
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
    "load": lambda model, state: model.load_state_dict(state),
    "half": lambda model, state: model.half(),
    "bfloat16": lambda model, state: model.to(torch.bfloat16),
    "double": lambda model, state: model.double(),
    "half_and_back": lambda model, state: model.half().float(),
    "data": lambda model, state: [setattr(p, "data", p.data * 1.25) for p in model.parameters()],
    "in_place": lambda model, state: [p.data.mul_(0.8) for p in model.parameters()],
    "resize": lambda model, state: model.resize_token_embeddings(331, mean_resizing=False),
    "fewer_layers": lambda model, state: _drop_layer(model),
}


def _drop_layer(model: nn.Module) -> None:
    name, decoder = ("h", model.transformer) if hasattr(model, "transformer") else ("layers", model.model)
    setattr(decoder, name, getattr(decoder, name)[:1])
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1]


@over_architectures
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("warm", (False, True), ids=("before_generate", "after_generate"))
def test_model_changed_after_patching(warm, change, architecture, device):
    """Whatever a user does to the model, the next generate() is that of the model as it then is."""
    stock, ours = fresh(architecture, device)
    state = {k: v.clone() for k, v in build(architecture, seed=1).to(device).state_dict().items()}
    if warm:
        ours.generate(**left_padded(device, 2), **GREEDY)
    for model in (stock, ours):
        torch.manual_seed(0)
        CHANGES[change](model, {k: v.clone() for k, v in state.items()})
    if stock.dtype in (torch.float16, torch.bfloat16):  # ties are common: the logits decide
        rule = LogitRule()
        reference = float64_copy(stock)
        with torch.no_grad():
            for seed in range(4):
                ids = prompt(device, 4, 20, seed=seed)
                rule.add(*(model(ids, use_cache=False).logits for model in (ours, stock, reference)))
        rule.check(f"{architecture} {change}")
        with counting(ours) as counts:
            ours.generate(**left_padded(device, 2), **GREEDY)
        assert counts.fast, counts.reasons
        return
    assert_equal_generation(ours, stock, fast=None)


@over_architectures
def test_new_head_after_patching(architecture, device):
    """A replaced output projection, norm or MLP is used."""
    for warm in (False, True):
        stock, ours = fresh(architecture, device)
        if warm:
            ours.generate(prompt(device), **GREEDY)
        for model in (stock, ours):
            torch.manual_seed(5)
            head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, device=device)
            model.lm_head = head
        assert_equal_generation(ours, stock, fast=None)


# ---- modules with a life of their own ----------------------------------------------------------------------


def decode_modules(model: nn.Module) -> list[str]:
    """Names of the modules that stock calls once a token in generate()."""
    called: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    model.generate(prompt(model.device), max_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    return [name for name in dict.fromkeys(called) if called.count(name) == 3]


@over_architectures
@pytest.mark.parametrize("kind", ("forward_hook", "forward_pre_hook", "instance_forward", "replaced"))
def test_every_child_may_have_a_life_of_its_own(kind, architecture, device):
    """A hook, a forward on the instance, another module in its place: honored on each module in turn.

    Each doubles what goes through it, and counts its calls; tokens and counts are stock's.
    """
    stock, ours = fresh(architecture, device)
    names, wrong = decode_modules(stock), []
    names = [name for name in names if ".1" not in name]  # the second layer is as the first
    assert len(names) > 12
    for name in names:
        ours.generate(prompt(device), max_new_tokens=2, do_sample=False)  # a plan without it exists
        results = []
        for model in (ours, stock):
            calls: list[int] = []
            undo = _interfere(model, name, kind, calls)
            try:
                results.append(
                    (
                        model.generate(prompt(device, 2), max_new_tokens=5, do_sample=False).tolist(),
                        len(calls),
                    )
                )
            except Exception as error:  # an error on both is stock's own
                results.append((type(error).__name__, 0))
            finally:
                undo()
        if results[0] != results[1]:
            wrong.append(f"{name or 'the model'} ({results[0][1]} calls, stock {results[1][1]})")
    assert not wrong, "ignored: " + ", ".join(wrong)


def _doubled(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * 2
    return type(value)(map(_doubled, value)) if type(value) in (tuple, list) else value


class Replacement(nn.Module):
    """Another module in the place of one: forwards to it, doubles the result."""

    def __init__(self, inner: nn.Module, calls: list[int]):
        super().__init__()
        self.inner, self.calls = inner, calls

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return _doubled(self.inner(*args, **kwargs))


def _interfere(model: nn.Module, name: str, kind: str, calls: list[int]):
    """Make the module double its result (or its input); returns what undoes that."""
    module = model.get_submodule(name)
    if kind == "forward_hook":
        return module.register_forward_hook(lambda m, a, out: (calls.append(1), _doubled(out))[1]).remove
    if kind == "forward_pre_hook":
        hook = module.register_forward_pre_hook(lambda m, args: (calls.append(1), _doubled(args))[1])
        return hook.remove
    if kind == "instance_forward":
        held, before = vars(module).get("forward"), module.forward

        def forward(*args, **kwargs):
            calls.append(1)
            return _doubled(before(*args, **kwargs))

        # the arguments' names stay visible, as transformers looks at them
        forward.__signature__ = inspect.signature(before)
        module.forward = forward
        if held is None:
            return lambda: vars(module).pop("forward")
        return lambda: setattr(module, "forward", held)
    if not name or name in ("model", "transformer"):
        return lambda: None  # without these it is another model
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    replacement = Replacement(module, calls)
    setattr(owner, attribute, replacement)
    return lambda: setattr(owner, attribute, module)


class LoraLinear(nn.Linear):
    """As PEFT does it: a subclass whose ``weight`` is the base weight, with a low-rank addition."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=generator).to(base.weight) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=generator).to(base.weight) * 0.2)

    def forward(self, x):
        return super().forward(x) + (x @ self.down.T) @ self.up.T


@pytest.mark.parametrize("when", ("before_patch", "after_patch", "after_generate"))
@pytest.mark.parametrize("target", ("q_proj", "o_proj", "up_proj", "down_proj", "lm_head"))
def test_lora_like_projection(target, when, device):
    require_native(device)
    stock = build("llama").to(device)
    plain = stock.generate(prompt(device), **GREEDY)
    ours = copy.deepcopy(stock)
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(prompt(device), **GREEDY)
    for model in (stock, ours):
        for name, module in list(model.named_modules()):
            if name.endswith(target):
                setattr(model.get_submodule(name.rpartition(".")[0]), target, LoraLinear(module))
    if when == "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    expected = stock.generate(prompt(device), **GREEDY)
    assert not torch.equal(expected, plain), "the adapter changes nothing, so the test shows nothing"
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **GREEDY)
    assert_same_tokens(found, expected, stock)
    assert counts.reasons["unsupported_projection"] and not counts.fast
    with pytest.raises(FallbackError, match="unsupported_projection"):
        hf_fastpath.unpatch(ours)
        hf_fastpath.patch(ours, strict=True, quiet=True).generate(prompt(device), **GREEDY)


def test_accelerate_hooks_are_respected(device):
    """A module under an accelerate hook keeps it: the hook runs around our forward."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    require_native(device)
    stock, calls = build("llama").to(device), []
    ours = copy.deepcopy(stock)

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(1)
            return args, kwargs

    for name in ("self_attn", "mlp"):
        add_hook_to_module(getattr(ours.model.layers[0], name), Count())
    hf_fastpath.patch(ours, quiet=True)
    inputs = left_padded(device, 2)
    found = ours.generate(**inputs, **GREEDY)
    assert_same_tokens(found, stock.generate(**inputs, **GREEDY), stock, inputs["attention_mask"])
    assert len(calls) == 24, f"the hooks ran {len(calls)} times in 12 steps"
    hf_fastpath.unpatch(ours)
    for name in ("self_attn", "mlp"):
        remove_hook_from_module(getattr(ours.model.layers[0], name))
    assert_same_tokens(ours.generate(**inputs, **GREEDY), found)


# ---- modes -------------------------------------------------------------------------------------------------


@over_architectures
def test_dropout_in_train_mode(architecture, device):
    """generate() in train mode: dropout is active in stock, so stock runs, with the same random numbers."""
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if architecture == "gpt2" else ("attention_dropout",)
    stock, ours = fresh(architecture, device, **dict.fromkeys(names, 0.2))
    results = []
    for model in (ours, stock):
        model.train()
        torch.manual_seed(11)
        results.append(model.generate(prompt(device, 2), **GREEDY))
        results.append(torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state())
        assert model.training
    assert_same_tokens(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert hf_fastpath.report(ours).stats["reasons"]["dropout"]
    for model in (ours, stock):
        model.eval()
    assert_equal_generation(ours, stock)


@over_architectures
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_runs_stock(dtype, architecture, device):
    stock, ours = pair(architecture, device)
    with torch.autocast(device.type, dtype=dtype), counting(ours) as counts, torch.no_grad():
        ids = prompt(device, 2)
        assert torch.equal(ours(ids).logits, stock(ids).logits)
        assert torch.equal(ours.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert counts.reasons["autocast"] and not counts.fast


@over_architectures
def test_torch_compile_after_patching(architecture):
    """The compiler traces stock code, whole prompts and steps over a cache."""
    torch._dynamo.reset()
    layers = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    stock, ours = fresh(architecture, **layers)
    compiled = torch.compile(ours, backend="aot_eager")
    ids = prompt(CPU, 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, stock(ids, use_cache=False).logits)
    loss = compiled(ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = stock(ids, labels=ids, use_cache=False).loss
    expected.backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch._dynamo.reset()
    assert_equal_generation(ours, stock)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@over_architectures
def test_default_dtype_of_the_user(dtype, architecture, device):
    stock, ours = fresh(architecture, device)
    expected = stock.generate(**left_padded(device), **GREEDY)
    torch.set_default_dtype(dtype)
    try:
        found = ours.generate(**left_padded(device), **GREEDY)
        other = stock.generate(**left_padded(device), **GREEDY)
        patched_then = hf_fastpath.patch(copy.deepcopy(stock), quiet=True).generate(**left_padded(device), **GREEDY)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other, expected)
    assert_same_tokens(found, expected, stock, left_padded(device)["attention_mask"])
    assert torch.equal(patched_then, found)


@over_architectures
def test_default_device_of_the_user(architecture, device):
    stock, ours = fresh(architecture, device)
    expected = stock.generate(**left_padded(device), **GREEDY)
    inputs = left_padded(device)
    with torch.device(device), counting(ours) as counts:
        found = ours.generate(**inputs, **GREEDY)
    assert counts.fast
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


# ---- threads -----------------------------------------------------------------------------------------------


def in_threads(*calls):
    """Run the calls at once; returns their results, or raises what one of them raised."""
    results, errors = [None] * len(calls), []

    def run(index: int) -> None:
        try:
            torch.set_num_threads(1)
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def test_two_threads_on_one_model(device):
    stock, ours = fresh("mistral", device)
    inputs = [prompt(device, batch, 9, seed=batch) for batch in (1, 2, 1, 3)]
    expected = [stock.generate(ids, max_new_tokens=30, do_sample=False) for ids in inputs]
    with counting(ours) as counts:
        found = in_threads(*(lambda ids=ids: ours.generate(ids, max_new_tokens=30, do_sample=False) for ids in inputs))
    assert counts.fast == 7 * 30 and not counts.reasons
    for a, b in zip(found, expected):
        assert_same_tokens(a, b, stock)


def test_two_threads_on_two_models(device):
    pairs = [fresh(architecture, device) for architecture in ("gpt2", "llama")]
    ids = prompt(device, 2)
    found = in_threads(*(lambda m=ours: m.generate(ids, max_new_tokens=30, do_sample=False) for _, ours in pairs))
    for tokens, (stock, _) in zip(found, pairs):
        assert_same_tokens(tokens, stock.generate(ids, max_new_tokens=30, do_sample=False), stock)


# ---- models that are not covered, and arguments that are off -----------------------------------------------


def _bert():
    sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64, vocab_size=99)
    return BertModel(BertConfig(**sizes))


def _t5():
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=16, num_heads=2, d_ff=64, num_layers=1, vocab_size=99))


@pytest.mark.parametrize("make", (_bert, _t5, lambda: nn.Linear(4, 4)), ids=("bert", "t5", "linear"))
def test_unsupported_model_raises_and_names_what_was_looked_for(make):
    model = make()
    before = instances(model)
    with pytest.raises(UnsupportedModelError) as caught:
        hf_fastpath.patch(model, quiet=True)
    text = str(caught.value)
    assert type(model).__name__ in text
    for name in ("GPT2Block", "MistralDecoderLayer", "LlamaDecoderLayer"):
        assert name in text
    assert_same_instances(instances(model), before)


def test_partial_coverage_warns():
    require_native(CPU)
    model = build("gpt2")
    model.transformer.h[1].mlp.act = nn.Tanh()
    with pytest.warns(UserWarning, match="unsupported_activation"):
        hf_fastpath.patch(model, quiet=True)
    report = hf_fastpath.report(model)
    assert report.loop == "partial_patch" and report.patched["mlp"] == 1 and any("mlp" in d for d in report.declined)
    assert_equal_generation(model, hf_fastpath.unpatch(copy.deepcopy(model)), fast=False)
    with pytest.raises(UnsupportedModelError, match="strict=True"):
        hf_fastpath.patch(hf_fastpath.unpatch(model), strict=True, quiet=True)


def test_base_model_and_classifier_get_their_modules_patched(device):
    """What has no generate() is still patched, module by module."""
    from transformers import MistralForSequenceClassification, MistralModel

    require_native(device)
    config = build("mistral").config
    for cls in (MistralModel, MistralForSequenceClassification):
        stock = cls(config).to(device).eval()
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
        report = hf_fastpath.report(ours)
        assert report.loop == "class_not_supported" and report.patched["layer"] == 2
        with torch.no_grad():
            ids = prompt(device, 1, 20)
            for a, b in zip(ours(ids, use_cache=False).values(), stock(ids, use_cache=False).values()):
                torch.testing.assert_close(a, b)


def test_subclass_of_a_known_class_keeps_stocks_loop_and_says_so(device):
    require_native(device)
    stock = build("llama").to(device)

    class Own(type(stock)):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    stock.__class__ = Own
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert hf_fastpath.report(ours).loop == "class_not_supported"
    assert_equal_generation(ours, stock, fast=False)


@pytest.mark.parametrize("ops", ("norm", ("mlp", "norm"), ("attention",), ["layer", "loop"], "loop"))
def test_ops_chooses_what_is_patched(ops, device):
    require_native(device)
    stock = build("llama").to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the user left out is no news
        ours = hf_fastpath.patch(copy.deepcopy(stock), ops=ops, quiet=True)
    chosen = {ops} if isinstance(ops, str) else set(ops)
    report = hf_fastpath.report(ours)
    assert set(report.patched) == chosen - {"loop"}
    assert (report.loop == "fast") == ("loop" in chosen)
    assert_equal_generation(ours, stock, fast="loop" in chosen)


def test_max_batch_size(device):
    require_native(device)
    stock = build("llama").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), max_batch_size=1, quiet=True)
    assert_equal_generation(ours, stock, fast=False)
    assert hf_fastpath.report(ours).stats["reasons"]["batch_size"]


BAD = {
    "kv_dtype_word": (dict(kv_dtype="int99"), ValueError, "kv_dtype is 'int99', expected 'auto'"),
    "kv_dtype_type": (dict(kv_dtype=torch.float64), ValueError, "kv_dtype is torch.float64"),
    "kv_dtype_none": (dict(kv_dtype=None), ValueError, "kv_dtype is None"),
    "weights": (dict(weights="int4"), ValueError, "weights is 'int4'"),
    "ops": (dict(ops="atention"), ValueError, "Did you mean 'attention'"),
    "ops_list": (dict(ops=["mlp", "everything"]), ValueError, "ops names 'everything'"),
    "ops_empty": (dict(ops=()), ValueError, "ops"),
    "ops_number": (dict(ops=3), (ValueError, TypeError), "ops"),
    "max_batch_size": (dict(max_batch_size=17), ValueError, "max_batch_size is 17, expected .* from 1 to 16"),
    "max_batch_size_0": (dict(max_batch_size=0), ValueError, "max_batch_size is 0"),
    "max_batch_size_text": (dict(max_batch_size="4"), ValueError, "max_batch_size is '4'"),
    "unknown": (dict(kv_type="auto"), TypeError, "kv_type"),
}


@pytest.mark.parametrize(("options", "error", "match"), BAD.values(), ids=BAD)
def test_bad_arguments_give_clear_errors(options, error, match):
    model = build("llama")
    before = instances(model)
    with pytest.raises(error, match=match):
        hf_fastpath.patch(model, quiet=True, **options)
    assert_same_instances(instances(model), before)


def test_patch_of_something_else_gives_a_clear_error():
    for thing in (None, "mistral", dict(model=1)):
        with pytest.raises(TypeError, match=f"patch\\(\\) got {type(thing).__name__}"):
            hf_fastpath.patch(thing)
    with pytest.raises(TypeError):
        hf_fastpath.patch(build("llama"), "float16")


def test_report_of_a_stock_model_gives_a_clear_error():
    with pytest.raises(ValueError, match="not patched: call hf_fastpath.patch"):
        hf_fastpath.report(build("llama"))


# ---- strict, report, verify --------------------------------------------------------------------------------


STOCK_CALLS = {
    "no_cache": dict(use_cache=False),
    "generation_mode": dict(num_beams=2),
    "attention_outputs": dict(output_hidden_states=True, return_dict_in_generate=True),
    "other_cache": dict(cache_implementation="static", disable_compile=True),
}


@pytest.mark.parametrize(("reason", "options"), STOCK_CALLS.items(), ids=STOCK_CALLS)
def test_strict_raises_where_stock_would_run(reason, options, device):
    require_native(device)
    ours = hf_fastpath.patch(build("llama").to(device), strict=True, quiet=True)
    ours.generate(prompt(device), **GREEDY)
    with pytest.raises(FallbackError, match=f"{reason}.*strict=True"):
        ours.generate(prompt(device), **(GREEDY | options))
    ours.generate(prompt(device), **GREEDY)  # and is as good as before
    with pytest.raises(FallbackError, match="batch_size"):
        ours.generate(prompt(device, 17), **GREEDY)


def test_report_contents(device, capsys):
    require_native(device)
    ours = hf_fastpath.patch(build("mistral").to(device))
    printed = capsys.readouterr().out
    assert "hf_fastpath on mistral" in printed and "decode loop: fast" in printed
    assert len(printed.splitlines()) <= 4, "one short report"
    ours.generate(prompt(device, 2), **GREEDY)
    ours.generate(prompt(device, 1), num_beams=2, **GREEDY)
    ours.generate(prompt(device, 17), **GREEDY)
    report = hf_fastpath.report(ours)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["stats"]["fast_tokens"] == 24 and found["stats"]["fallback_tokens"] == 17 * 12
    assert found["stats"]["reasons"]["generation_mode"] == 1 and found["stats"]["reasons"]["batch_size"] >= 1
    assert found["stats"]["last_tokens_per_second"] > 0
    text = str(report)
    for part in ("2 layer", "24 fast", "204 stock", "batch_size", REASONS["batch_size"]):
        assert part in text


def test_a_call_gives_its_own_reasons_only(device):
    """A fallback of the loop does not drag other reasons along."""
    _, ours = fresh("llama", device)
    with counting(ours) as counts:
        ours.generate(prompt(device, 17), **GREEDY)
    assert set(counts.reasons) == {"batch_size"} and counts.fallback == 17 * 12


def test_quiet_prints_nothing(capsys):
    require_native(CPU)
    hf_fastpath.patch(build("llama"), quiet=True)
    assert capsys.readouterr() == ("", "")


def test_reason_codes_are_documented():
    page = (ROOT / "docs" / "reason-codes.md").read_text()
    missing = [code for code in REASONS if f"`{code}`" not in page]
    assert not missing, f"docs/reason-codes.md lacks {missing}"
    known = set(re.findall(r"^\|? ?`([a-z_]+)`", page, flags=re.M))
    assert known <= set(REASONS), f"docs/reason-codes.md has {known - set(REASONS)}, which the code does not"


def test_reason_codes_in_the_code_are_known():
    """Every entry of the table is in use, and a code that is not there is refused."""
    text = "\n".join(p.read_text() for p in (ROOT / "hf_fastpath").rglob("*.py") if p.name != "reasons.py")
    unused = [code for code in REASONS if f'"{code}"' not in text]
    assert not unused, f"reason codes that nothing gives: {unused}"
    with pytest.raises(KeyError, match="no_such"):
        hf_fastpath.patching.reasons.check("no_such")


def test_verify_on_the_trained_model(device):
    stock, ours = trained(device)
    ids = heldout_tokens(40).to(device)
    before = instances(stock)
    for model in (stock, ours):
        result = hf_fastpath.verify(model, {"input_ids": ids}, max_new_tokens=24)
        assert result.ok and result.tokens_equal and result.positions == 24 and result.top1_agreement == 1
        assert result.max_error >= result.mean_error > 0 and result.mean_floor > 0
        assert set(json.loads(json.dumps(result.to_dict()))) >= {"ok", "mean_error", "mean_floor"}
        assert "ok over 24 positions" in str(result)
    assert_same_instances(instances(stock), before)
    assert hf_fastpath.report(ours).loop == "fast"


def test_verify_sees_a_wrong_model(monkeypatch, device):
    """A decode step that is off is reported, not averaged away."""
    from hf_fastpath.decode.plan import DecodePlan

    stock, _ = trained(device)
    real = DecodePlan.step
    monkeypatch.setattr(DecodePlan, "step", lambda self, tokens: real(self, tokens).flip(-1))
    result = hf_fastpath.verify(stock, heldout_tokens(20).to(device), max_new_tokens=8)
    assert not result.ok and not result.tokens_equal and "DIFFERENT" in str(result)


def test_verify_gives_clear_errors():
    stock, _ = trained(CPU)
    with pytest.raises(ValueError, match="expected \\[batch, at least 2 tokens\\]"):
        hf_fastpath.verify(stock, torch.ones(5, dtype=torch.long))
    assert "_hf_fastpath" not in vars(stock)


def test_import_and_names():
    assert set(hf_fastpath.__all__) >= {
        "patch",
        "unpatch",
        "patched",
        "report",
        "verify",
        "FastpathCache",
        "ops",
    }
    for name in hf_fastpath.__all__:
        assert getattr(hf_fastpath, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        hf_fastpath.pach  # noqa: B018


# ---- command line ------------------------------------------------------------------------------------------


def test_cli_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for part in ("hf_fastpath:", torch.__version__, "cpu:", "cuda:", "mistral", "decode_attention"):
        assert part in printed


def test_cli_info_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and set(found["kernels"]) == {"cpu", "cuda"}
    assert found["architectures"] == list(ARCHITECTURES)


def test_cli_explain(capsys):
    assert cli.main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(REASONS)
    assert cli.main(["explain", "batch_size"]) == 0
    assert capsys.readouterr().out == f"batch_size: {REASONS['batch_size']}\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "batchsize"])
    assert caught.value.code == 2 and "unknown reason code 'batchsize'" in capsys.readouterr().err


@pytest.mark.parametrize("json_wanted", (False, True))
def test_cli_verify(json_wanted, capsys):
    require_native(CPU)
    arguments = ["verify", str(TINY_PYTHON), "--device", "cpu", "--max-new-tokens", "16"]
    assert cli.main(arguments + ["--json"] * json_wanted) == 0
    printed = capsys.readouterr().out
    if json_wanted:
        assert json.loads(printed)["tokens_equal"] is True
    else:
        assert "hf_fastpath.verify: ok over 16 positions" in printed


@pytest.mark.parametrize("arguments", (["info", "--nonsense"], ["verify"], ["speed"], []))
def test_cli_refuses_unknown_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: hf-fastpath" in capsys.readouterr().err


def test_cli_runs_as_a_module():
    command = [sys.executable, "-m", "hf_fastpath", "explain", "autocast"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("autocast: ")
