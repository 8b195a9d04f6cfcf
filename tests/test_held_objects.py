"""Which containers hold other objects than they held: native code and Python agree, over random changes."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch
from models import require_native
from torch import nn

from hf_fastpath import compat
from hf_fastpath.decode.state import held_objects
from hf_fastpath.decode.state.held_objects import HeldObjects
from hf_fastpath.decode.state.python_state import Walk
from hf_fastpath.decode.state.watch import Watch

WAYS = ("native", "python")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both implementations in turn."""
    if request.param == "native":
        require_native(torch.device("cpu"))
        assert held_objects._native() is not None
    else:
        monkeypatch.setattr(held_objects, "_native", lambda: None)
    return request.param


class Named:
    """An object that is equal to any other."""

    def __eq__(self, other):
        return True

    __hash__ = None


def held(containers, but_for=()):
    found = HeldObjects()
    for each in containers:
        if isinstance(each, nn.Module):
            found.attributes_of(each)
        elif isinstance(each, list):
            found.entries_of(each)
        else:
            found.items_of(each, but_for)
    return found


def places(found):
    numbers = {id(each): number for number, each in enumerate(found.containers)}
    return [numbers[id(container)] for container, _, _ in found.differing()]


CHANGES = {
    "a value": lambda c: c[2].update(a=Named()),
    "equal value": lambda c: c[2].update(b=1.0 + sum([0.5])),
    "a new key": lambda c: c[2].update(z=1),
    "a key less": lambda c: c[2].pop("a"),
    "another order": lambda c: c[2].update(a=c[2].pop("a")),
    "another key": lambda c: (c[2].pop("b"), c[2].update(x=1)),
    "cleared": lambda c: c[2].clear(),
}
OF_LISTS = {
    "an entry": lambda c: c.__setitem__(1, Named()),
    "longer": lambda c: c.append(1),
    "shorter": lambda c: c.pop(),
    "turned around": lambda c: c.reverse(),
}


def make():
    return [{}, [], {"a": Named(), "b": 1.5}, OrderedDict(c=1, d=2), [Named(), Named(), "text"], nn.Linear(2, 2)]


@pytest.mark.parametrize("change", CHANGES)
def test_dicts(change, way):
    containers = make()
    found = held(containers)
    assert places(found) == []
    CHANGES[change](containers)
    assert places(found) == [2]


@pytest.mark.parametrize("change", OF_LISTS)
def test_lists(change, way):
    containers = make()
    found = held(containers)
    OF_LISTS[change](containers[4])
    assert places(found) == [4]


def test_another_dict_of_attributes(way):
    containers = make()
    found = held(containers)
    containers[5].__dict__ = dict(containers[5].__dict__)
    assert places(found) == [5]


def test_another_type(way):
    containers = make()
    found = held(containers)
    containers[5].__class__ = nn.Identity
    assert places(found) == [5]


def test_chosen_items(way):
    space = {"a": 1, "b": Named(), "c": 3}
    found = HeldObjects()
    found.chosen_items_of(space, ("a", "b"))
    space["c"] = 4
    assert places(found) == []
    space["b"] = Named()
    ((container, now, before),) = found.differing()
    assert container is space and now[0] == before[0] == "a" and now[3] is space["b"] is not before[3]
    space["d"] = 5
    assert [(now, before) for _, now, before in found.differing()] == [([4], [3])]
    del space["d"], space["a"]
    space["x"] = 1
    assert places(found) == [0]


def test_values_that_may_be_any(way):
    space = {"a": 1, "b": 2, "c": 3}
    found = held([space], but_for={"b"})
    space["b"] = 5
    assert places(found) == []
    space["c"] = 7
    ((_, now, before),) = found.differing()
    assert (now, before) == (["a", 1, "b", "c", 7], ["a", 1, "b", "c", 3])


def test_random_changes(monkeypatch):
    """Any number of containers, of which some change: each is given, by both implementations."""
    require_native(torch.device("cpu"))
    draw = random.Random(7)
    for _ in range(100):
        containers = [
            {str(number): Named() for number in range(draw.randrange(5))}
            if draw.random() < 0.6
            else [Named() for _ in range(draw.randrange(5))]
            for _ in range(draw.randrange(1, 40))
        ]
        found = [held(containers), held(containers)]
        changed = sorted(draw.sample(range(len(containers)), draw.randrange(min(4, len(containers)) + 1)))
        for place in changed:
            container = containers[place]
            if not container or draw.random() < 0.3:
                container.append(1) if isinstance(container, list) else container.update(new=1)
            else:
                container[next(iter(container)) if isinstance(container, dict) else -1] = Named()
        assert places(found[0]) == changed
        with monkeypatch.context() as patch:
            patch.setattr(held_objects, "_native", lambda: None)
            assert places(found[1]) == changed


def _as_another_type(weight):
    weight.data = weight.data.view(torch.int16)


def _turned(weight):
    weight.data = weight.data.t()


def _smaller(weight):
    weight.data = weight.data[:2]


def _elsewhere(weight):
    weight.data = weight.data.clone()


@pytest.mark.parametrize("guards", (True, False), ids=("guards", "python"))
@pytest.mark.parametrize("change", (_as_another_type, _turned, _smaller, _elsewhere, torch.Tensor.t_))
def test_layouts_of_tensors(change, guards, monkeypatch):
    """The same parameter has other elements, or lies otherwise."""
    if not guards:
        monkeypatch.setattr(compat, "layouts_hold", lambda tensors: None)
    module = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    assert not guards or compat.layouts_hold([*module.parameters()])()
    walk = Walk()
    walk.enter(module)
    watch = Watch(walk)
    with torch.no_grad():
        assert watch.holds()
        with torch.inference_mode(), torch.autocast("cpu"):  # in which guards do not say yes
            assert watch.holds()
        change(module.weight)
        assert not watch.holds()
