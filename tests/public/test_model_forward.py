"""A forward that other code, such as a trainer, has put on the model itself."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from causal_lm_types import small_model
from models import (
    SHORT,
    assert_same_instances,
    build,
    counting,
    fresh,
    instances,
    over_architectures,
    prompt,
    require_native,
    skip_if_cache_is_named_otherwise,
)
from parity import assert_equal_generation, assert_same_tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_fastpath
from hf_fastpath.decode.model import pass_through


def put_loss(model: nn.Module) -> None:
    """Put a trainer's forward on the model: with ``fused_loss=True`` it computes the loss in its own way.

    Without that, the forward is the class's; a plain call with labels is stock's.
    """
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_loss=False, labels=None, num_items=None, **kwargs):
        """Pass everything on, except in training."""
        if not fused_loss:
            if labels is not None:
                kwargs["labels"] = labels
            return original(*args, **kwargs)
        hidden = getattr(self, self.base_model_prefix)(*args, **kwargs).last_hidden_state
        return self.get_output_embeddings()(hidden).log_softmax(-1).sum() / (num_items or 1)

    model.forward = types.MethodType(forward, model)


@over_architectures
@pytest.mark.parametrize("when", ("before_patch", "after_patch", "after_generate"))
def test_a_trainers_loss_leaves_generate_fast(when, architecture, device):
    """Tokens and losses are stock's; unpatch() leaves the trainer's forward where it is."""
    require_native(device)
    stock = build(architecture).to(device)
    ours, ids = copy.deepcopy(stock), prompt(device, 2)
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(ids, **SHORT)
    for model in (stock, ours):
        put_loss(model)
    theirs = vars(ours)["forward"]
    hf_fastpath.patch(ours, quiet=True)
    assert hf_fastpath.report(ours).loop == "fast"
    assert_equal_generation(ours, stock)
    for given in (dict(labels=ids), dict(fused_loss=True)):
        losses = [getattr(found := model(ids, **given), "loss", found) for model in (ours, stock)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4)
        losses[0].backward()
    hf_fastpath.unpatch(ours)
    assert vars(ours)["forward"] is theirs


def looks_like(model):
    """Make ``generate()`` pass what the signature names."""
    return functools.wraps(type(model).forward)


def no_self(model):
    original = model.forward

    @looks_like(model)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    return forward


def by_name(model):
    original = model.forward

    @looks_like(model)
    def forward(input_ids=None, attention_mask=None, labels=None, scale=1.0, **kwargs):
        if labels is not None and scale:
            return scale * original(input_ids=input_ids, labels=labels).loss
        else:
            return original(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    return forward


def of_the_class(model):
    original = type(model).forward

    @looks_like(model)
    def forward(self, *args, labels=None, shift=0, **kwargs):
        if labels is None or not (shift or labels):
            return original(self, *args, **kwargs)
        raise AssertionError("not reached")

    return types.MethodType(forward, model)


def twice(model):
    model.forward = no_self(model)
    return of_the_class_of(model)


def of_the_class_of(model):
    inner = model.forward

    @looks_like(model)
    def forward(self, *args, **kwargs):
        return inner(*args, **kwargs)

    return types.MethodType(forward, model)


@pytest.mark.parametrize("make", (no_self, by_name, of_the_class, twice), ids=lambda make: make.__name__)
def test_forwards_that_hand_everything_on_are_fast(make, device):
    stock, ours = fresh("llama", device)
    ours.forward = make(ours)
    assert hf_fastpath.report(ours).loop == "fast"
    assert_equal_generation(ours, stock)


CALLS: list[int] = []


def counts(model):
    original = model.forward

    @looks_like(model)
    def forward(*args, **kwargs):
        CALLS.append(1)
        return original(*args, **kwargs)

    return forward


def doubles(model):
    original = model.forward

    @looks_like(model)
    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits.roll(1, -1)
        return out

    return forward


def forgets(model):
    original = model.forward

    @looks_like(model)
    def forward(*args, attention_mask=None, **kwargs):
        return original(*args, **kwargs)

    return forward


def forgets_the_rest(model):
    original = model.forward

    @looks_like(model)
    def forward(input_ids=None, **kwargs):
        return original(input_ids=input_ids)

    return forward


def adds(model):
    original = model.forward

    @looks_like(model)
    def forward(*args, **kwargs):
        return original(*args, **kwargs, output_attentions=False)

    return forward


def depends_on_a_switch(model):
    original, switch = model.forward, []

    @looks_like(model)
    def forward(*args, **kwargs):
        if switch:
            return None
        return original(*args, **kwargs)

    return forward


def depends_on_what_is_given(model):
    original = model.forward

    @looks_like(model)
    def forward(input_ids=None, **kwargs):
        if input_ids is None:
            return None
        return original(input_ids=input_ids, **kwargs)

    return forward


def is_a_lambda(model):
    original = model.forward
    return looks_like(model)(lambda *args, **kwargs: original(*args, **kwargs))


def is_an_object(model):
    original = model.forward

    class Forward:
        def __call__(self, *args, **kwargs):
            return original(*args, **kwargs)

    return functools.update_wrapper(Forward(), type(model).forward)


def is_of_another_model(model):
    return copy.deepcopy(model).forward


def has_no_source(model):
    space = {"original": model.forward}
    exec("def forward(*args, **kwargs):\n    return original(*args, **kwargs)", space)
    return looks_like(model)(space["forward"])


def calls_another_method(model):
    original = model.get_output_embeddings  # a method of the model that is not its forward

    @looks_like(model)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    return forward


def returns_nothing(model):
    @looks_like(model)
    def forward(*args, labels=None, **kwargs):
        if labels is None:
            return

    return forward


NOT_PROVEN = (
    *(counts, doubles, forgets, forgets_the_rest, adds, depends_on_a_switch, depends_on_what_is_given),
    *(is_a_lambda, is_an_object, is_of_another_model, has_no_source),
)


@pytest.mark.parametrize("make", NOT_PROVEN, ids=lambda make: make.__name__)
def test_forwards_that_may_do_more_run_as_they_are(make, device):
    stock, ours = fresh("llama", device)
    inputs = dict(input_ids=prompt(device, 2))
    results = []
    for model in (stock, ours):
        model.forward = make(model)
        CALLS.clear()
        with counting(ours) as found:
            results.append((model.generate(**inputs, **SHORT).tolist(), len(CALLS)))
    assert results[0] == results[1]
    assert set(found.reasons) == {"model_forward"} and not found.fast, found.reasons
    assert hf_fastpath.report(ours).loop == "model_forward"


@pytest.mark.parametrize("make", (calls_another_method, returns_nothing), ids=lambda make: make.__name__)
def test_what_is_no_forward_at_all_is_seen(make):
    model = build("llama")
    assert pass_through.reason_of(make(model), model) == "model_forward"


def test_a_function_whose_file_was_edited_is_not_read(tmp_path, monkeypatch):
    """What the file says now is not what runs."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_forward.py"
    text = "def make(original, calls):\n    def forward(*args, **kwargs):\n        {}\n    return forward\n"
    file.write_text(text.format("calls.append(1); return original(*args, **kwargs)"))
    import edited_forward

    model = build("llama")
    file.write_text(text.format("return original(*args, **kwargs)"))
    assert pass_through.reason_of(edited_forward.make(model.forward, []), model) == "model_forward"


# ---- mixed precision -----------------------------------------------------------------------------------------


def under_autocast(model: nn.Module, dtype: torch.dtype) -> None:
    """Put the forward under autocast, as accelerate does for mixed precision."""
    function = torch.autocast(device_type=model.device.type, dtype=dtype)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(function), model)


def decoded_logits(model: nn.Module, text: torch.Tensor, prefill: int) -> torch.Tensor:
    """Return logits of tokens behind a prompt, one by one, through ``generate()``, with a forced text."""

    def force(ids, scores):
        return torch.full_like(scores, -1e9).scatter(1, text[:, ids.shape[1], None], 0.0)

    out = model.generate(
        text[:, :prefill],
        max_new_tokens=text.shape[1] - prefill,
        do_sample=False,
        logits_processor=[force],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(out.logits, dim=1)


@pytest.mark.each_value
@over_architectures
@pytest.mark.parametrize("with_loss", (False, True))
def test_trainers_autocast_of_a_float32_model(with_loss, architecture, device):
    """Autocast only adds rounding: our logits are nearer to the truth, and the report says that autocast is left
    out."""
    stock, ours = fresh(architecture, device)
    text = prompt(device, 2, 40)
    truth = decoded_logits(copy.deepcopy(stock).double(), text, 8)
    for model in (stock, ours):
        if with_loss:
            put_loss(model)
        under_autocast(model, torch.bfloat16)
    with counting(ours) as found:
        logits = decoded_logits(ours, text, 8)
    assert found.fast == text[:, 8:].numel() and not found.fallback, found.reasons
    assert found.reasons["autocast_left_out"] == 1
    error, stock_error = ((each - truth).abs().mean() for each in (logits, decoded_logits(stock, text, 8)))
    assert stock_error > 1e-4, "autocast does nothing, so the test shows nothing"
    assert error <= stock_error


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_trainers_autocast_of_a_half_precision_model_is_stocks(dtype, device):
    stock, ours = fresh("llama", device)
    for model in (stock, ours):
        under_autocast(model.to(dtype), torch.bfloat16)
    with counting(ours) as found:
        tokens = ours.generate(prompt(device), **SHORT)
    assert torch.equal(tokens, stock.generate(prompt(device), **SHORT))
    assert found.reasons["autocast"] and not found.fast


@pytest.mark.each_value
@pytest.mark.parametrize("model_type", ("glm4", "mamba", "gemma3_text"))
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=("loss", "autocast"))
def test_trainers_forward_of_a_recorded_model(dtype, model_type, device):
    """A forward that encloses the model does not run on the copy that is recorded: it would call the model itself."""
    require_native(device)
    skip_if_cache_is_named_otherwise(model_type)
    stock = small_model(model_type).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    put_loss(ours)
    if dtype is not None:
        under_autocast(ours, dtype)
    for _ in range(3):  # prompts are recorded, too
        with counting(ours) as found:
            tokens = ours.generate(prompt(device, 2) % 90, **SHORT)
        if model_type == "mamba" and dtype is not None:  # states of a prompt under autocast have its type
            assert found.reasons["autocast"] and not found.fast, found.reasons
            return
        assert found.fast and not found.fallback, found.reasons
        assert dtype is not None or not found.reasons, found.reasons
    assert bool(found.reasons["autocast_left_out"]) == (dtype is not None)
    assert_same_tokens(tokens, stock.generate(prompt(device, 2) % 90, **SHORT), stock)


# ---- modules around the model --------------------------------------------------------------------------------


class ValueHead(nn.Module):
    """A wrapper with a value head, as in policy optimization."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.pretrained_model, self.value = model, nn.Linear(4, 1)


def data_parallel(model):
    """Wrap a model on its own device alone."""
    device = model.device
    return nn.DataParallel(model, [device] if device.type == "cuda" else None).to(device)


WRAPPERS = {
    "value head": (ValueHead, "pretrained_model"),
    "DataParallel": (data_parallel, "module"),
    "DDP": (DistributedDataParallel, "module"),
    "compiled": (lambda model: torch.compile(model, backend="eager"), "_orig_mod"),
}


@pytest.mark.each_value
@pytest.mark.parametrize(("wrap", "name"), WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("when", ("before_patch", "after_patch"))
def test_wrapper_and_model_inside_are_one(when, wrap, name, device, one_process):
    """patch(), report(), verify(), patched() and unpatch() take either of the two."""
    require_native(device)
    stock = build("llama").to(device)
    ours = copy.deepcopy(stock)
    wrap(ours)  # torch.compile() leaves a mark
    before = instances(ours)
    if when == "after_patch":
        hf_fastpath.patch(ours, quiet=True)
    wrapper = wrap(ours)
    assert hf_fastpath.patch(wrapper, quiet=True) is wrapper
    assert getattr(wrapper, name) is ours
    with pytest.raises(ValueError, match="unpatch"):
        hf_fastpath.patch(wrapper, strict=True, quiet=True)
    assert_equal_generation(ours, stock)
    assert hf_fastpath.report(wrapper).to_dict() == hf_fastpath.report(ours).to_dict()
    assert hf_fastpath.report(wrapper).stats["fast_tokens"] > 0
    assert hf_fastpath.verify(wrapper, prompt(device), 8).ok
    with hf_fastpath.patched(wrapper, quiet=True) as inside:
        assert inside is wrapper
    assert hf_fastpath.unpatch(wrapper) is wrapper
    assert_same_instances(instances(ours), before)
    with pytest.raises(ValueError, match="not patched"):
        hf_fastpath.report(wrapper)
    with hf_fastpath.patched(wrapper, quiet=True):
        assert hf_fastpath.report(ours).loop == "fast"
    assert_same_instances(instances(ours), before)
    assert hf_fastpath.verify(wrapper, prompt(device), 8).ok


def test_a_module_of_two_models_is_patched_where_it_is(device):
    """Neither of the two models is meant: modules are patched, and no generate() is ours."""
    require_native(device)
    both = nn.ModuleDict({"policy": build("llama"), "reference": build("llama", seed=1)}).to(device)
    hf_fastpath.patch(both, quiet=True)
    assert hf_fastpath.report(both).patched["layer"] == 4
    stock = build("llama").to(device)
    found, expected = (model.generate(prompt(device), **SHORT) for model in (both["policy"], stock))
    assert_same_tokens(found, expected, stock)
    hf_fastpath.unpatch(both)
