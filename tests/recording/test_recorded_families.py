"""Models without an architecture file, one of each kind: their recorded steps give stock's tokens in every way to
generate, follow the model as it changes, and leave it as it was."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import transformers
from causal_lm_types import VOCAB, small_config, small_model
from models import (
    CPU,
    assert_same_instances,
    counting,
    hidden_files,
    instances,
    require_native,
    skip_if_cache_is_named_otherwise,
)
from packaging.version import Version
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans.decode_plan import DecodePlan
from hf_fastpath.errors import FallbackError
from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording.recorded_model import RecordedModel

#: of each test every fourth case; all of them with ``--full``
pytestmark = pytest.mark.every(4)

#: type -> what there is none of in the families with a file
TYPES = {
    "aria_text": "shared experts, transposed experts with gate and up one after the other",
    "bert": "learned positions and types of tokens, norms behind, an encoder that generates",
    "codegen": "fused projections in an order of its own, neighbors that turn together, parallel blocks",
    "ctrl": "positions of sines that are added, projections with bias",
    "cwm": "windows in some layers",
    "exaone4": "norms behind attention and MLP and over heads, windows, layers without rotation",
    "glm4": "four norms in a layer, a part of each head turns as neighbors, fused gate and up",
    "gpt_neo": "attention of its own, with windows in a table of positions",
    "helium": "neighbors that turn together, as Llama otherwise",
    "granitemoe": "factors everywhere, routed experts",
    "jais2": "squared ReLU, layer norms with bias",
    "llama4_text": "windows that begin anew, experts that are all given every row, complex rotations",
    "minimax_m2": "a router of sigmoids with a bias, norms over all heads",
    "mpt": "attention of its own with ALiBi, a fused projection",
    "nemotron": "layer norms with 1 + weight, squared ReLU, a part of each head turns",
    "qwen2_moe": "shared experts behind a gate",
    "roberta-prelayernorm": "two products with an activation behind the layers",
    "whisper": "learned positions that are looked up in a tensor",
}
#: types whose forward can be recorded from this version of transformers on
READ_ON_THE_HOST = {"aria_text": "5.24", "codegen": "5.24"}
#: types whose windows may begin at different places for tokens that are read at once
BEGIN_ANEW = {"llama4_text"}
GREEDY = dict(max_new_tokens=12, do_sample=False)
over_types = pytest.mark.parametrize("model_type", TYPES)
#: types that `make test` tries what does not depend on the type with; `make test-full` takes all
_USUAL = ("glm4", "qwen2_moe")
over_usual = pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in _USUAL else pytest.mark.full) for each in TYPES]
)
over_two = pytest.mark.parametrize("model_type", _USUAL)


@functools.cache
def _pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    stock = small_model(model_type)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Stock and patched, made once; tests do not change them."""
    require_native(CPU)
    if model_type in READ_ON_THE_HOST and Version(transformers.__version__) < Version(READ_ON_THE_HOST[model_type]):
        pytest.skip(f"{model_type} reads numbers on the host in transformers {transformers.__version__}")
    return _pair(model_type)


def fresh(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Stock and patched, of which a test may change either."""
    stock, ours = pair(model_type)
    return copy.deepcopy(stock), copy.deepcopy(ours)


def prompt(batch: int = 1, length: int = 9, seed: int = 0) -> torch.Tensor:
    """[batch, length] random token ids."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed + 31 * batch))


def padded(batch: int, length: int = 11) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded in front."""
    ids = prompt(batch, length)
    mask = (torch.arange(length) >= (3 * torch.arange(batch) % (length - 2))[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_equal(ours: PreTrainedModel, stock: PreTrainedModel, inputs: dict | None = None, **options) -> None:
    """Assert that both give the same tokens, all of them by our loop."""
    inputs = {"input_ids": prompt()} if inputs is None else inputs
    results = []
    with counting(ours) as counts:
        for model in (ours, stock):
            torch.manual_seed(7)
            results.append(model.generate(**inputs, **(GREEDY | options)))
    found, expected = results
    assert torch.equal(found, expected), f"\nours  {found.tolist()}\nstock {expected.tolist()}"
    assert counts.fast == found[:, inputs["input_ids"].shape[1] :].numel() and not counts.fallback, counts.reasons


def assert_equal_beams(ours: PreTrainedModel, stock: PreTrainedModel) -> None:
    """Assert that beam search gives the same tokens by steps of a plan."""
    options = dict(num_beams=3, num_return_sequences=2, **GREEDY)
    with counting(ours) as counts:
        found = ours.generate(prompt(), **options)
    assert torch.equal(found, stock.generate(prompt(), **options))
    assert counts.fast and not counts.reasons, counts.reasons


def assert_equal_drafts(ours: PreTrainedModel, stock: PreTrainedModel) -> None:
    """Assert that prompt lookup gives the tokens of plain search, all of them by our loop."""
    ids = prompt(1, 6).repeat(1, 4)
    with counting(ours) as counts:
        found = ours.generate(ids, prompt_lookup_num_tokens=4, max_new_tokens=24, do_sample=False)
    assert torch.equal(found, stock.generate(ids, max_new_tokens=24, do_sample=False))
    assert counts.fast == 24 and not counts.fallback, counts.reasons


def plans_of(model: PreTrainedModel) -> list[DecodePlan]:
    """Decode plans that wait."""
    return list(state_of(model).plans)


# ---- every way to generate ------------------------------------------------------------------------------------------


@over_types
def test_the_report_says_recorded(model_type):
    _, ours = pair(model_type)
    report = hf_fastpath.report(ours)
    assert (report.architecture, report.loop, report.patched, report.declined) == ("recorded", "fast", {}, {})
    assert "recorded" in str(report) and "decode loop: fast" in str(report)


@over_types
def test_greedy(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock)
    first, second = (stock.generate(prompt(seed=seed), **GREEDY)[:, 9:] for seed in (0, 1))
    assert not torch.equal(first, second), "the prompt has to matter"


@over_types
def test_sampling(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock, do_sample=True, temperature=0.9, top_k=20, top_p=0.9)


@over_types
def test_a_padded_batch(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock, padded(3))


@over_types
def test_batches_up_to_sixteen(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock, padded(16), max_new_tokens=6)


@over_types
def test_beyond_windows_and_buffers(model_type):
    """Three times a window of eight tokens, and more than the cache has room for at first."""
    stock, ours = pair(model_type)
    assert_equal(ours, stock, padded(2), max_new_tokens=40)


@over_types
def test_a_conversation_goes_on(model_type):
    stock, ours = pair(model_type)
    ends = []
    for model in (ours, stock):
        inputs = padded(2)
        ids, mask, options = inputs["input_ids"], inputs["attention_mask"], {}
        for turn in range(3):
            with counting(ours) as counts:
                out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY, **options)
            if model is ours:
                assert counts.fast == 24 and not counts.fallback, counts.reasons
                assert isinstance(out[CACHE], FastpathCache)
            ids = torch.cat((out.sequences, prompt(2, 3, seed=turn)), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
            options = {CACHE: out[CACHE]}
        ends.append(ids)
    assert torch.equal(*ends)


@pytest.mark.parametrize("model_type", ("glm4", "qwen2_moe", "mpt", "bart", "falcon_mamba"))
def test_prompts_of_embeddings(model_type):
    """Also of types whose forward takes no positions; a second turn gives the embeddings of the whole text."""
    skip_if_cache_is_named_otherwise(model_type)
    stock, ours = pair(model_type)
    ends = []
    for model in (ours, stock):
        inputs = padded(2)
        ids, mask, options = inputs["input_ids"], inputs["attention_mask"], {}
        for turn in range(1 if model_type == "falcon_mamba" else 2):  # which reads what follows token by token
            embeds = model.get_input_embeddings()(ids).detach()
            with counting(ours) as counts:
                options |= dict(inputs_embeds=embeds, attention_mask=mask, return_dict_in_generate=True)
                out = model.generate(**options, **GREEDY)
            assert model is stock or (counts.fast == 24 and not counts.fallback), counts.reasons
            ids = torch.cat((ids, out.sequences, prompt(2, 3, seed=turn)), dim=1)
            mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
            options = {CACHE: out[CACHE]}
        ends.append(ids)
    assert torch.equal(*ends)


@pytest.mark.parametrize("name", ("eager", "sdpa"))
def test_soft_caps_are_those_of_the_implementation(name):
    """PyTorch's attention has none: old releases of transformers leave the cap out, new ones refuse the choice."""
    require_native(CPU)
    stock = small_model("vaultgemma", seed=1)
    stock.config.attn_logit_softcapping = 0.5
    for layer in stock.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.5
    try:
        stock.set_attn_implementation(name)
    except ValueError as error:
        pytest.skip(str(error)[:80])
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with counting(ours) as counts:
        found, expected = (each.generate(torch.tensor([[5, 9, 33, 7]]), **options).logits for each in (ours, stock))
    assert counts.fast == 6
    torch.testing.assert_close(found, expected)


class _Interrupted(LogitsProcessor):
    def __call__(self, ids, scores):
        if ids.shape[1] == 13:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("model_type", ("glm4", "cwm", "gemma3n_text"))
def test_a_call_that_was_broken_off(model_type):
    """The cache holds what all layers hold; some of Gemma 3n's read what others hold, and hold nothing themselves."""
    stock, ours = pair(model_type)
    cache = FastpathCache(ours.config)
    with pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(2), **{CACHE: cache}, logits_processor=LogitsProcessorList([_Interrupted()]), **GREEDY)
    (held,) = {layer.cumulative_length for layer in cache.key_layers}
    expected = stock.generate(prompt(2), **GREEDY)
    read = expected[:, : held + 1]
    options = GREEDY | dict(max_new_tokens=expected.shape[1] - read.shape[1])
    assert 0 < held <= 13 and torch.equal(ours.generate(read, **{CACHE: cache}, **options), expected)


@over_types
def test_beams(model_type):
    stock, ours = pair(model_type)
    assert_equal_beams(ours, stock)


@over_types
def test_prompt_lookup(model_type):
    stock, ours = pair(model_type)
    if model_type not in BEGIN_ANEW:
        return assert_equal_drafts(ours, stock)
    with counting(ours) as counts:
        found = ours.generate(prompt(), prompt_lookup_num_tokens=4, **GREEDY)
    assert torch.equal(found, stock.generate(prompt(), **GREEDY))
    assert not counts.fast and counts.reasons["not_recorded"], counts.reasons


@over_usual
def test_strict(model_type):
    stock, ours = pair(model_type)
    strict = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, strict=True)
    assert_equal(strict, stock, padded(2))
    with pytest.raises(FallbackError, match="strict=True"):
        strict.generate(prompt(), use_cache=False, **GREEDY)


@over_usual
def test_scores_and_logits(model_type):
    stock, ours = pair(model_type)
    options = dict(output_logits=True, output_scores=True, return_dict_in_generate=True, **GREEDY)
    found, expected = (model.generate(**padded(2), **options) for model in (ours, stock))
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("logits", "scores"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@over_usual
def test_ends_of_sequences(model_type):
    stock, ours = pair(model_type)
    text = stock.generate(**padded(3), **GREEDY)[:, 11:]
    end = Counter(text[:, 3:9].flatten().tolist()).most_common(1)[0][0]
    assert_ends = dict(eos_token_id=end, pad_token_id=0, max_new_tokens=12, do_sample=False)
    found, expected = (model.generate(**padded(3), **assert_ends) for model in (ours, stock))
    assert torch.equal(found, expected) and bool((found[:, 11:] == end).any())


@over_usual
def test_calls_of_the_model_are_stocks(model_type):
    """Without a generate(), nothing is ours: logits of both are the same to the last bit."""
    stock, ours = pair(model_type)
    with torch.no_grad():
        assert torch.equal(ours(prompt(2)).logits, stock(prompt(2)).logits)


# ---- plans ----------------------------------------------------------------------------------------------------------


@over_usual
def test_a_second_call_takes_the_same_plan(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    (plan,) = plans_of(ours)
    part = state_of(ours).plans.part_of(ours)
    assert_equal(ours, stock, {"input_ids": prompt(seed=3)})
    assert plans_of(ours) == [plan] and state_of(ours).plans.part_of(ours) is part
    assert_equal(ours, stock, padded(2))
    assert len(plans_of(ours)) == 2 and plan in plans_of(ours)


@over_usual
def test_a_batch_that_is_too_large_for_kernels_of_experts(model_type):
    """On a CPU, steps of more rows run one expert after the other."""
    stock, ours = pair(model_type)
    inputs = padded(MAX_ROWS + 1)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **(GREEDY | {"max_new_tokens": 3}))
    assert torch.equal(found, stock.generate(**inputs, **(GREEDY | {"max_new_tokens": 3})))
    assert counts.fast == found[:, 11:].numel() and not counts.reasons


# ---- a model that changes -------------------------------------------------------------------------------------------


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return weights of every kind, one of each: matrices by the name of their module, vectors, cubes."""
    found = {}
    for name, each in model.named_parameters():
        kind = name.rpartition(".")[0].rpartition(".")[2] if each.dim() == 2 else ""
        found.setdefault((each.dim(), kind.partition("_")[0]), (name, each))
    return list(found.values())


def _assert_follows(ours: nn.Module, stock: nn.Module, before: torch.Tensor, name: str) -> bool:
    with counting(ours) as counts:
        found = ours.generate(prompt(2), output_logits=True, return_dict_in_generate=True, **GREEDY)
    expected = stock.generate(prompt(2), output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(found.sequences, expected.sequences), name
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    assert counts.fast == 24 and not counts.fallback, (name, counts.reasons)
    return not torch.equal(expected.sequences, before)


@over_usual
def test_every_weight_that_changes_in_place_is_seen(model_type):
    stock, ours = fresh(model_type)
    before = stock.generate(prompt(2), **GREEDY)
    ours.generate(prompt(2), **GREEDY)
    changed = 0
    for name, _ in _parameters(ours):
        for model in (ours, stock):
            with torch.no_grad():
                model.get_parameter(name).mul_(-1.1)
        changed += _assert_follows(ours, stock, before, name)
        before = stock.generate(prompt(2), **GREEDY)
    assert changed > len(_parameters(ours)) // 2, "weights have to matter"


@over_two
def test_every_parameter_that_is_replaced_is_seen(model_type):
    stock, ours = fresh(model_type)
    before = stock.generate(prompt(2), **GREEDY)
    ours.generate(prompt(2), **GREEDY)
    changed = 0
    for name, parameter in _parameters(ours):
        new = nn.Parameter(-1.1 * parameter.detach())
        for model in (ours, stock):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, new)
        changed += _assert_follows(ours, stock, before, name)
        before = stock.generate(prompt(2), **GREEDY)
    assert changed > len(_parameters(ours)) // 2, "weights have to matter"


@over_usual
def test_every_buffer_that_changes_in_place_is_seen(model_type):
    """Angles and biases of routers, too: whatever the forward reads."""
    stock, ours = fresh(model_type)
    ours.generate(prompt(2), **GREEDY)
    for name, buffer in ours.named_buffers():
        if buffer.is_floating_point() and buffer.numel():
            for model in (ours, stock):
                model.get_buffer(name).mul_(0.9)
            _assert_follows(ours, stock, prompt(2), name)


@over_two
@pytest.mark.parametrize("assign", (False, True))
def test_load_state_dict_is_seen(assign, model_type):
    stock, ours = fresh(model_type)
    before = ours.generate(prompt(2), **GREEDY)
    other = small_model(model_type, seed=1)
    for model in (ours, stock):
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert _assert_follows(ours, stock, before, "all")
    assert torch.equal(ours.generate(prompt(2), **GREEDY), other.generate(prompt(2), **GREEDY))


@over_two
def test_a_type_that_changes_is_seen(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    for dtype in (torch.bfloat16, torch.float32):
        ours.to(dtype), stock.to(dtype)
        with counting(ours) as counts:
            ours.generate(prompt(), **GREEDY)
        assert counts.fast == 12 and not counts.fallback, counts.reasons
        assert plans_of(ours)[0].logits.dtype == dtype
    assert_equal(ours, stock)


@over_two
def test_a_module_that_is_replaced_is_seen(model_type):
    stock, ours = fresh(model_type)
    before = ours.generate(prompt(2), **GREEDY)
    for model in (ours, stock):
        torch.manual_seed(3)
        old = model.get_output_embeddings()
        model.set_output_embeddings(nn.Linear(old.in_features, old.out_features, bias=True))
    assert _assert_follows(ours, stock, before, "lm_head")


@over_two
def test_a_setting_that_is_changed_is_seen(model_type):
    stock, ours = fresh(model_type)
    before = ours.generate(prompt(2), **GREEDY)
    for model in (ours, stock):
        for layer in model.model.layers:
            layer.self_attn.scaling = 2.5
    assert _assert_follows(ours, stock, before, "scaling")


@over_usual
def test_a_hook_makes_it_stock(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    seen = []
    inner = [module for module in ours.modules() if isinstance(module, (nn.Linear, nn.LayerNorm))][-1]
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    with counting(ours) as counts:
        found = ours.generate(prompt(), **GREEDY)
    assert torch.equal(found, stock.generate(prompt(), **GREEDY))
    assert not counts.fast and counts.reasons == {"hooks": 1}
    assert len(seen) >= 12, "the hook ran in every step"
    assert hf_fastpath.report(ours).loop == "hooks" and "hook" in str(hf_fastpath.report(ours))
    handle.remove()
    assert_equal(ours, stock)


@over_two
def test_a_forward_of_an_instance_makes_it_stock(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    module = ours.model.layers[0].mlp
    own = type(module).forward
    module.forward = lambda x: own(module, x) * 2
    with counting(ours) as counts:
        ours.generate(prompt(), **GREEDY)
    assert not counts.fast and counts.reasons == {"instance_forward": 1}
    del module.forward
    assert_equal(ours, stock)


@over_two
def test_training_between_calls(model_type):
    stock, ours = fresh(model_type)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, stock)]
    for _ in range(2):
        before = stock.generate(prompt(2), **GREEDY)
        for model, optimizer in zip((ours, stock), optimizers):
            model.train()
            model(prompt(2), labels=prompt(2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
        assert _assert_follows(ours, stock, before, "trained")


# ---- unpatch, copies, threads ---------------------------------------------------------------------------------------


@over_usual
def test_unpatch_restores_everything(model_type):
    require_native(CPU)
    model = small_model(model_type)
    expected = model.generate(prompt(), **GREEDY)
    before, weights = instances(model), copy.deepcopy(model.state_dict())
    config = model.config.to_dict()
    hf_fastpath.patch(model, quiet=True)
    assert hf_fastpath.report(model).loop == "fast"
    assert torch.equal(model.generate(prompt(), **GREEDY), expected)
    model.generate(prompt(), prompt_lookup_num_tokens=3, **GREEDY)
    hf_fastpath.unpatch(model)
    assert_same_instances(instances(model), before)
    assert list(model.state_dict()) == list(weights)
    for name, value in model.state_dict().items():
        assert value.view(torch.uint8).equal(weights[name].view(torch.uint8)) if value.dim() else value == weights[name]
    assert model.config.to_dict() == config
    assert torch.equal(model.generate(prompt(), **GREEDY), expected)


@over_usual
def test_patching_changes_nothing_but_the_model(model_type):
    """Modules keep their own forwards: what is recorded is not bound."""
    stock, ours = pair(model_type)
    assert not [name for name, module in ours.named_modules() if name and "forward" in vars(module)]
    assert ours.state_dict().keys() == stock.state_dict().keys()


@over_two
def test_a_deep_copy_stays_patched(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    made = copy.deepcopy(ours)
    assert hf_fastpath.report(made).architecture == "recorded"
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(-1.05)
    assert_equal(ours, stock)
    changed = copy.deepcopy(stock)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(-1.05)
    assert_equal(made, changed)


@over_two
def test_a_pickle_is_stock(model_type):
    stock, ours = fresh(model_type)
    assert_equal(ours, stock)
    made = pickle.loads(pickle.dumps(ours))
    assert state_of(made) is None and torch.equal(made.generate(prompt(), **GREEDY), stock.generate(prompt(), **GREEDY))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert state_of(loaded) is None
    assert_equal(hf_fastpath.patch(loaded, quiet=True), stock)


@over_two
def test_threads(model_type):
    stock, ours = fresh(model_type)
    expected = [stock.generate(prompt(seed=seed), **GREEDY) for seed in range(4)]
    found: dict[int, torch.Tensor] = {}

    def run(seed: int) -> None:
        torch.set_num_threads(1)
        found[seed] = ours.generate(prompt(seed=seed), **GREEDY)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(4))
    assert all(torch.equal(found[seed], each) for seed, each in enumerate(expected))
    assert hf_fastpath.report(ours).stats["fast_tokens"] == 48


# ---- families with a file, recorded ---------------------------------------------------------------------------------

#: what a step begins with, which differs: tokens and positions are looked up in other ways
DESCRIBED = ("llama", "mistral", "qwen2", "phi3", "gpt2", "qwen3", "olmo2", "gemma3_text")


def _layers(model: PreTrainedModel) -> list[str]:
    """Names of the calls of a step from the first layer on, each by itself."""
    names = plans_of(model)[0].program.op_names()
    first = next(place for place, name in enumerate(names) if name.startswith(("qkv_rope_append", "gemv", "rms_norm")))
    return [name for name in names[first:] if name not in ("getitem", "run_angles")]


def test_a_long_prompt_of_phi3():
    """Phi-3's class lets go of the cache it is given where a prompt is longer than scaled positions begin; a list of
    calls reads the prompt, also where its window ends inside."""
    require_native(CPU)
    config = small_config("phi3")
    config.sliding_window = 8
    stock = type(small_model("phi3"))(config).eval()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ids = prompt(1, config.original_max_position_embeddings + 1)
    assert torch.equal(ours.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


@pytest.mark.parametrize("model_type", DESCRIBED)
def test_recording_gives_the_calls_that_a_file_gives(model_type):
    require_native(CPU)
    stock = small_model(model_type)
    if hasattr(stock.config, "original_max_position_embeddings"):
        stock.config.original_max_position_embeddings = 4096  # see test_a_long_prompt_of_phi3
    made = []
    for recorded in (False, True):
        with hidden_files() if recorded else nullcontext():
            ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
            assert isinstance(state_of(ours).decided.family.model_part(ours), RecordedModel) == recorded
            assert_equal(ours, stock)
            assert_equal(ours, stock, padded(2))
            made.append(_layers(ours))
    described, recorded_names = made
    assert recorded_names == described
