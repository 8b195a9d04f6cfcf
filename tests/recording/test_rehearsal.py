"""What a first forward leaves in a cache is the same whether all layers run or one of those that are alike."""

import pytest
import torch
from causal_lm_types import small_config
from models import skip_if_cache_is_named_otherwise
from test_states import TYPES
from transformers import AutoModelForCausalLM

from hf_fastpath.compat import RecordingCache
from hf_fastpath.recording import rehearsal
from hf_fastpath.recording.recorder import Recorder, recorder
from hf_fastpath.recording.skeleton import Skeleton

#: types whose layers are all of one kind
UNIFORM = ("mamba", "mamba2", "falcon_h1")


def recorder_of(model_type: str, **entries) -> Recorder:
    """A recorder of a model without weights; ``entries`` change its config."""
    skip_if_cache_is_named_otherwise(model_type)
    config = small_config(model_type)
    for name, value in entries.items():
        setattr(config, name, value)
    return Recorder(Skeleton(AutoModelForCausalLM.from_config(config).eval()))


def found(noting: Recorder, made) -> tuple[RecordingCache, list]:
    """The cache that ``made(recorder)`` gives, and what is known of each state in it."""
    token = recorder.set(noting)
    try:
        with torch.inference_mode(False), torch.no_grad(), noting.skeleton.mode:
            cache = made(noting)
    finally:
        recorder.reset(token)
    known = [
        [(each.shape, each.stride(), each.dtype, each.device) for each in states.values()] for states in cache.states()
    ]
    return cache, known


def of_all_layers(noting: Recorder) -> RecordingCache:
    cache = noting.new_cache()
    rehearsal.rehearse(noting, 2, cache, {})
    return cache


@pytest.mark.parametrize("model_type", TYPES)
def test_states_are_those_that_all_layers_leave(model_type, monkeypatch):
    noting, ran = recorder_of(model_type), []
    monkeypatch.setattr(RecordingCache, "copy_states", _noting(RecordingCache.copy_states, ran))
    before = [dict(vars(module)) for module in noting.skeleton.copy.modules()]
    cache, states = found(noting, lambda each: rehearsal.cache_with_states(each, 2))
    assert [vars(module) for module in noting.skeleton.copy.modules()] == before
    full, expected = found(noting, of_all_layers)
    assert any(states) and states == expected
    places = [state.untyped_storage()._cdata for layer in cache.states() for state in layer.values()]
    assert len(set(places)) == len(places)
    plain = [[_without_tensors(vars(layer)) for layer in each.layers] for each in (cache, full)]
    assert plain[0] == plain[1]
    if model_type in UNIFORM:
        assert [other for _, other in ran] == list(range(1, len(cache.kinds)))


def _noting(original, ran):
    def copy_states(self, first, other):
        ran.append((first, other))
        original(self, first, other)

    return copy_states


def _without_tensors(value):
    if isinstance(value, dict):
        return {name: _without_tensors(each) for name, each in value.items() if name != "_append"}
    return None if isinstance(value, torch.Tensor) else value


def test_all_layers_run_if_one_needs_what_another_leaves_outside_of_the_cache(monkeypatch):
    noting = recorder_of("mamba")

    def refuse(*_args, **_kwargs):
        raise KeyError("what the layer before would have left")

    monkeypatch.setattr(RecordingCache, "copy_states", refuse)
    _, states = found(noting, lambda each: rehearsal.cache_with_states(each, 2))
    assert states == found(noting, of_all_layers)[1] and all(states)


def test_layers_that_differ_are_not_alike():
    noting = recorder_of("mamba")
    first, second = noting.skeleton.copy.backbone.layers[:2]
    made_of = rehearsal._made_of(first, 0)
    assert made_of is not None and made_of == rehearsal._made_of(second, 1)
    assert rehearsal._made_of(second, 0) is None, "its states are not those of layer 0"
    assert rehearsal._made_of(second.norm, 1) is None, "it has no states"
    second.mixer.conv1d.dilation = (2,)
    assert made_of != rehearsal._made_of(second, 1)
