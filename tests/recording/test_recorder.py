"""What is recorded of a model's own forward, and what is refused."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch
from causal_lm_types import small_model
from models import assert_same_instances, instances
from recordings import (
    VOCAB,
    WIDTH,
    Decoder,
    Of,
    attention,
    calls_of,
    linear,
    logits,
    names,
    parameter,
    recorded,
    registers_read,
    tensors_in,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, chunked_causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_fastpath
from hf_fastpath.errors import UnsupportedModelError
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import passed
from hf_fastpath.recording.placed_model import RecordedAlone
from hf_fastpath.recording.probing import seeded
from hf_fastpath.recording.recorded_step import Unrecordable
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record, why_other_in_training

_aten = torch.ops.aten
#: a type without an architecture file, and another whose experts have one call
TYPES = ("glm4", "qwen2_moe")


def heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, query_len, features] as two heads."""
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


# ---- what stands in a recording -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "query_len"), ((1, 1), (3, 1), (2, 5)))
def test_inputs_are_tokens_and_positions(batch, query_len):
    recording, model = recorded(lambda m, x, positions, cache: x * positions[..., None], batch, query_len)
    assert recording.fact(recording.tokens).shape == recording.fact(recording.positions).shape == (batch, query_len)
    assert recording.fact(recording.logits).shape == (batch, query_len, WIDTH)
    read = set().union(*map(registers_read, recording.calls))
    assert {recording.tokens.index, recording.positions.index} <= read
    made = {call.out.index for call in recording.calls}
    assert read - made == {recording.tokens.index, recording.positions.index}, "nothing else comes from outside"
    one, other = (logits(recording, position=position) for position in (0, 7))
    assert torch.equal(one[:, :1], torch.zeros_like(one[:, :1])) and bool((other != 0).all())


@pytest.mark.parametrize("model_type", TYPES)
def test_the_models_own_tensors_are_in_the_calls(model_type):
    model = small_model(model_type)
    recording = record(Skeleton(model), 1, 1)
    own = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
    found = tensors_in(recording)
    assert all(id(each) in own for each in found), "a copy, or a tensor without data"
    assert {own[id(each)] for each in found} >= set(dict(model.named_parameters())), "every weight is read"


def test_tensors_without_data_are_like_the_models_own():
    """Sizes, strides, types and what shares memory with what."""
    model = small_model("glm4").bfloat16()
    inner = model.model
    inner.register_buffer("table", torch.randn(3, 8, dtype=torch.complex64).mT)
    inner.register_buffer("row", inner.table[2])
    inner.wide = torch.randn(4, 1).expand(4, 6)
    inner.numbers = inner.register_buffer("bytes", torch.zeros(5, dtype=torch.uint8)) or inner.bytes[1:3]
    copied = Skeleton(model).copy
    pairs = [*zip(model.parameters(), copied.parameters()), *zip(model.buffers(), copied.buffers())]
    pairs += [(getattr(inner, name), getattr(copied.model, name)) for name in ("wide", "numbers")]
    for one, other in pairs:
        assert type(other) is FakeTensor and isinstance(other, nn.Parameter) == isinstance(one, nn.Parameter)
        facts = [(each.shape, each.stride(), each.dtype, each.device) for each in (one, other)]
        assert facts[0] == facts[1]
    for one, other in (("table", "row"), ("bytes", "numbers")):
        memory = [getattr(copied.model, each).untyped_storage()._cdata for each in (one, other)]
        assert memory[0] == memory[1], "what is written to one of them is read from the other"


def test_tied_weights_are_one_tensor():
    shared = linear()
    recording, model = recorded(lambda m, x, *_: m.two(m.one(x)), one=shared, two=shared)
    weights = [call.arguments["weight"] for call in calls_of(recording, marks.linear)]
    assert len(weights) == 2 and all(each is model.body.one.weight for each in weights)


@pytest.mark.parametrize("model_type", TYPES)
def test_recording_leaves_the_model_alone(model_type):
    model = small_model(model_type)
    module = sys.modules[type(model).__module__]
    before = instances(model), copy.deepcopy(model.state_dict()), dict(vars(module)), model.config.to_dict()
    classes = {type(each): dict(vars(type(each))) for each in model.modules()}
    implementation = model.config._attn_implementation
    grad, default = torch.is_grad_enabled(), torch.get_default_dtype()
    record(Skeleton(model), 1, 1)
    assert_same_instances(instances(model), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert list(vars(module)) == list(before[2])
    assert all(vars(module)[name] is value for name, value in before[2].items()), "transformers' module was changed"
    assert all(dict(vars(cls)) == contents for cls, contents in classes.items()), "a class was changed"
    assert model.config.to_dict() == before[3] and model.config._attn_implementation == implementation
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, default)


@pytest.mark.parametrize("model_type", ("llama", "glm4"))
def test_a_patched_model_is_recorded_as_stock(model_type):
    model = small_model(model_type)
    stock = [call.name for call in record(Skeleton(model), 1, 1).calls]
    hf_fastpath.patch(model, quiet=True)
    before = instances(model)
    assert [call.name for call in record(Skeleton(model), 1, 1).calls] == stock
    assert_same_instances(instances(model), before)


def test_recording_draws_no_random_numbers():
    model = small_model("glm4")
    state = torch.get_rng_state()
    assert not isinstance(RecordedAlone(model).model_part(model).reason(), str)
    assert torch.equal(torch.get_rng_state(), state)


def test_recording_a_model_in_inference_mode():
    with torch.inference_mode():
        recording, _ = recorded(lambda m, x, *_: m.out(x), out=linear())
    assert calls_of(recording, marks.linear) and torch.isfinite(logits(recording)).all()


def test_modules_of_one_call_are_one_call():
    inside = dict(
        norm=nn.LayerNorm(WIDTH), rms=nn.RMSNorm(WIDTH, eps=1e-5), out=linear(bias=True), square=parameter(16, 16)
    )
    recording, model = recorded(lambda m, x, *_: m.out(m.rms(m.norm(x))) @ m.square, **inside)
    assert names(recording) == ["normed", "normed", "linear", "matmul"]
    layer, rms = (call.arguments["norm"] for call in calls_of(recording, marks.normed))
    assert layer.weight is model.body.norm.weight and layer.bias is model.body.norm.bias
    assert rms.weight is model.body.rms.weight and rms.bias is None and rms.eps == 1e-5


def test_attention_and_the_cache_are_one_call_each():
    def step(m, x, positions, cache):
        return attention(m, heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), cache, scaling=0.3)

    recording, _ = recorded(step, q=linear(), k=linear(), v=linear())
    (append,), (attend,) = calls_of(recording, marks.append), calls_of(recording, marks.attend)
    assert attend.arguments["states"].index == append.out.index
    given = {name: attend.arguments[name] for name in ("layer", "scale", "window", "softcap", "sinks")}
    assert given == dict(layer=0, scale=0.3, window=0, softcap=0.0, sinks=None)
    past = recording.facts[append.out.index][0].shape[2]
    assert past > 1, "the step stands behind others"


def test_options_of_attention():
    def step(m, x, positions, cache):
        h = [heads(x) for _ in range(3)]
        first = attention(m, *h, cache, softcap=20.0, s_aux=m.sinks)
        return attention(m, *(heads(first) for _ in range(3)), cache, layer=1)

    recording, model = recorded(step, layers=2, sinks=parameter(2))
    first, second = calls_of(recording, marks.attend)
    assert first.arguments["softcap"] == 20.0 and first.arguments["sinks"] is model.body.sinks
    assert [each.arguments["layer"] for each in (first, second)] == [0, 1]
    assert second.arguments["scale"] == 8**-0.5 and second.arguments["sinks"] is None


def test_windows_of_the_cache_and_of_masks():
    model = small_model("exaone4")
    windows = [call.arguments["window"] for call in calls_of(record(Skeleton(model), 1, 1), marks.attend)]
    assert len(set(windows)) == 2 and set(windows) == {0, model.config.sliding_window}


def test_spans_name_the_modules():
    recording, model = recorded(
        lambda m, x, *_: m.out(m.act(m.inner.scaled(x))),
        act=nn.SiLU(),
        inner=nn.ModuleDict({"scaled": Of(lambda m, x, *_: x * m.factor, factor=parameter(WIDTH))}),
        out=linear(),
    )
    assert [span.path for span in recording.spans] == ["body.inner.scaled", "body.act"]
    scaled, act = recording.spans
    assert scaled.outputs[0].index == act.inputs[0].index
    assert [call.op for call in scaled.calls] == [_aten.mul.Tensor]


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    (
        lambda x: x.clone().mul_(2).add_(1),
        lambda x: nn.functional.relu(x + 1, inplace=True),
        lambda x: (x + 1).clamp_(min=0.5),
        lambda x: (x + 1).masked_fill_(x > 0, 0.25),
    ),
    ids=("mul_ add_", "relu_", "clamp_", "masked_fill_"),
)
def test_writing_into_a_tensor_of_its_own_gives_a_new_one(function):
    recording, model = recorded(lambda m, x, *_: m.out(function(x)), out=linear())
    assert not recording.mutated
    assert not any(op._schema.is_mutable for call in recording.calls if hasattr(op := call.op, "_schema"))
    assert_computes(recording, model, function)


def _half(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    y[..., : WIDTH // 2] += 1
    return y


def _view_first(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    seen = y.view(-1)
    y.mul_(3)
    return seen.view(x.shape) + y


def _rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[..., 3:5] = x[..., :2]
    return y


def _scattered(x: torch.Tensor) -> torch.Tensor:
    best = x.topk(3, dim=-1).indices
    return torch.zeros_like(x).scatter_(-1, best, 1.0) * x


@pytest.mark.parametrize("function", (_half, _view_first, _rows, _scattered))
def test_writing_into_memory_that_others_share_stays_right(function):
    recording, model = recorded(lambda m, x, *_: m.out(function(x)), out=linear())
    assert_computes(recording, model, function)
    expected = logits(recording)
    passed(recording, model)
    torch.testing.assert_close(logits(recording), expected, rtol=1e-9, atol=1e-12)


def assert_computes(recording, model, function) -> None:
    """Assert that a recording is ``out(function(embeddings))``."""
    wide = copy.deepcopy(model).double()
    for seed in range(3):
        expected = wide.body.out(function(wide.embed(_token(seed))))
        torch.testing.assert_close(logits(recording, seed), expected, rtol=1e-9, atol=1e-12)


def _token(seed: int) -> torch.Tensor:
    """[1, 1] what :func:`recordings.logits` gives as token."""
    return torch.randint(0, VOCAB, (1, 1), generator=torch.Generator().manual_seed(seed))


def test_constants_are_calls_of_their_own():
    def step(m, x, *_):
        return x * torch.arange(WIDTH).float() + torch.tensor(0.5) + torch.ones(WIDTH)

    recording, model = recorded(step)
    assert [each.tolist() for each in tensors_in(recording) if each is not model.embed.weight] == [0.5]
    expected = model.embed.weight[_token(0)].double() * torch.arange(WIDTH) + 1.5
    torch.testing.assert_close(logits(recording), expected, rtol=1e-9, atol=1e-12)


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "item": (lambda m, x, *_: x * x.sum().item(), "x.sum().item()"),
    "boolean": (lambda m, x, *_: x if x.sum() > 0 else -x, "if x.sum() > 0"),
    "tolist": (lambda m, x, *_: x * x[0, 0].tolist()[0], "tolist()"),
    "nonzero": (lambda m, x, *_: x[:, :, : len((x > 0).nonzero())], "nonzero()"),
    "mask": (lambda m, x, *_: x[x > 0].sum() * x, "x[x > 0]"),
    "buffer": (lambda m, x, *_: x + m.seen.add_(1), "m.seen.add_(1)"),
    "parameter": (lambda m, x, *_: x * m.factor.mul_(2), "m.factor.mul_(2)"),
    "dropout": (lambda m, x, *_: m.drop.train()(x), "m.drop.train()(x)"),
    "random": (lambda m, x, *_: x + torch.randn_like(x), "torch.randn_like(x)"),
    "an error": (lambda m, x, *_: x.reshape(-1, 7), "x.reshape(-1, 7)"),
    "logits": (lambda m, x, *_: x[:, 0], "logits of shape"),
    "numpy": (lambda m, x, *_: x * float(x.detach().numpy().sum()), "numpy()"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_line(case):
    function, line = REFUSED[case]
    inside = dict(seen=torch.zeros(WIDTH), factor=parameter(WIDTH), drop=nn.Dropout(0.5))
    model = Decoder(Of(function, **inside))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Unrecordable) as refused:
        record(Skeleton(model), 1, 1)
    assert line in str(refused.value)
    if not line.startswith("logits"):
        number = inspect.getsource(sys.modules[__name__]).splitlines()[function.__code__.co_firstlineno - 1]
        assert f"test_recorder.py:{function.__code__.co_firstlineno}" in str(refused.value), number
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("step", "reason"),
    (
        (lambda m, x, positions, cache: x + cache.rnn_state, "a cache of a class of its own, with rnn_state"),
        (lambda m, x, positions, cache: copy.deepcopy(cache.layers), "a layer of the cache is copied"),
        (lambda m, x, positions, cache: x[9], "IndexError: index 9 is out of bounds"),
    ),
)
def test_refusals_say_what_the_model_does(step, reason):
    with pytest.raises(Unrecordable, match=rf"{reason}.*, at test_recorder.py:{step.__code__.co_firstlineno}: "):
        recorded(step)


def test_dropout_at_evaluation_is_nothing():
    recording, _ = recorded(lambda m, x, *_: m.out(m.drop(x)), drop=nn.Dropout(0.5), out=linear())
    assert names(recording) == ["linear"]


def test_a_model_in_training_mode_is_recorded_as_in_evaluation():
    model = Decoder(Of(lambda m, x, *_: m.drop(x) * 2, drop=nn.Dropout(0.5)))
    model.train()
    with pytest.raises(Unrecordable, match=r"draws random numbers"):
        record(Skeleton(model, evaluates=False), 1, 1)
    assert "draws random numbers" in why_other_in_training(model) and model.body.drop.training
    assert names(record(Skeleton(model), 1, 1)) == ["mul"]
    assert why_other_in_training(model.eval()) is None
    recording, _ = recorded(lambda m, x, *_: m.drop(x) * 2, drop=nn.Dropout(0.0))
    assert names(recording) == ["mul"]


def _chunked(m, x, cache, padding=None):
    """Attention under transformers' mask of windows that begin anew, which holds a tensor of the padding."""
    starts = torch.zeros(len(x), dtype=torch.long) if padding is None else padding
    how = ALL_MASK_ATTENTION_FUNCTIONS["hf_fastpath_recorded"]
    mask = how(len(x), x.shape[1], 48, mask_function=chunked_causal_mask_function(8, starts))
    states, m.is_causal = cache.update(heads(x), heads(x), 0), True
    return ALL_ATTENTION_FUNCTIONS["hf_fastpath_recorded"](m, heads(x), *states, mask)[0].flatten(2)


def test_windows_that_begin_anew():
    window = dict(sliding_window=8, layer_types=["sliding_attention"])
    recording, _ = recorded(lambda m, x, positions, cache: _chunked(m, x, cache), entries=window)
    (call,) = calls_of(recording, marks.attend)
    assert type(call.arguments["window"]) is marks.Chunk and call.arguments["window"] == 8
    with pytest.raises(Unrecordable, match="several tokens at once"):
        recorded(lambda m, x, positions, cache: _chunked(m, x, cache), query_len=2, entries=window)
    with pytest.raises(Unrecordable, match="neither causal nor a window"):
        recorded(lambda m, x, positions, cache: _chunked(m, x, cache, positions[:, 0]), entries=window)


def test_attention_over_other_states_is_refused():
    def step(m, x, positions, cache):
        k, v = cache.update(heads(x), heads(x), 0)
        m.is_causal = True
        return ALL_ATTENTION_FUNCTIONS["hf_fastpath_recorded"](m, heads(x), 2 * k, v, None)[0].flatten(2)

    with pytest.raises(Unrecordable, match="other keys and values than the cache gave"):
        recorded(step)


def test_attention_that_sees_the_future_is_refused():
    def step(m, x, positions, cache):
        states = cache.update(heads(x), heads(x), 0)
        m.is_causal = False
        return ALL_ATTENTION_FUNCTIONS["hf_fastpath_recorded"](m, heads(x), *states, None)[0].flatten(2)

    with pytest.raises(Unrecordable, match="not causal"):
        recorded(step, query_len=2)
    recorded(step)  # the last token sees all others in any case


def test_a_tensor_that_no_module_holds_is_refused_or_the_one():
    held = [torch.rand(WIDTH)]
    recording, _ = recorded(lambda m, x, *_: x * held[0])
    assert any(each is held[0] for each in tensors_in(recording))


# ---- what users put into a model ------------------------------------------------------------------------------------


class Seen(Exception):
    """A hook or a forward of the user's ran."""


def _raise(*args, **kwargs):
    raise Seen


@pytest.mark.parametrize(
    "register",
    (
        lambda module: module.register_forward_hook(_raise),
        lambda module: module.register_forward_pre_hook(_raise),
    ),
    ids=("hook", "pre-hook"),
)
@pytest.mark.parametrize("where", ("model.layers.0.mlp", "model.layers.1.input_layernorm", "lm_head", "model", ""))
def test_hooks_are_never_run_by_recording(register, where):
    model = small_model("glm4")
    register(model.get_submodule(where))
    reason = RecordedAlone(model).model_part(model).reason()
    assert reason == "hooks" and "_raise" in reason.what, reason
    if where:
        with pytest.raises(UnsupportedModelError, match="hooks"):
            hf_fastpath.patch(model, quiet=True)


def test_hooks_on_all_modules_are_never_run_by_recording():
    model = small_model("glm4")
    handle = nn.modules.module.register_module_forward_hook(_raise)
    try:
        assert RecordedAlone(model).model_part(model).reason() == "hooks"
    finally:
        handle.remove()


@pytest.mark.parametrize("where", ("model.layers.0.mlp", "lm_head", "model", ""))
def test_forwards_of_instances_are_never_run_by_recording(where):
    model = small_model("glm4")
    model.get_submodule(where).forward = _raise
    reason = RecordedAlone(model).model_part(model).reason()
    assert reason == ("instance_forward" if where else "model_forward") and "_raise" in reason.what, reason


def test_a_class_of_the_users_is_recorded_as_it_is():
    model = small_model("glm4")

    class Doubled(type(model.model.norm)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model.model.norm.__class__ = Doubled
    part = RecordedAlone(model).model_part(model)
    assert part.reason() is None
    ops = [call.op for call in record(Skeleton(model), 1, 1).calls]
    stock = [call.op for call in record(Skeleton(small_model("glm4")), 1, 1).calls]
    assert len(ops) == len(stock) + 1


def test_probing_leaves_all_generators_as_they_were(monkeypatch):
    """torch.manual_seed() seeds the generators of GPUs as well, which only a fork of these would bring back."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("all generators were seeded"))
    before = torch.get_rng_state()
    with seeded():
        one = torch.randn(3)
    with seeded():
        assert torch.equal(torch.randn(3), one)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_line_whose_arguments_are_on_others():
    def step(m, x, positions, cache):
        return torch.index_select(
            x,
            9,
            positions[0],
        )

    with pytest.raises(Unrecordable, match=r": return torch.index_select\(\.\.\.\)"):
        recorded(step)
