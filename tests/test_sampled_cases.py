"""Which cases `make test` takes of a test's many: what the markers of ``conftest.py`` promise."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import sampled

DEVICES, SIZES, NAMES, MANY = ("cpu", "cuda"), (1, 2, 3, 4), ("a", "b", "c"), ([0], [1])
EACH_VALUE, EACH_PAIR = pytest.mark.each_value.mark, pytest.mark.each_pair.mark


class Case:
    """What the sample looks at of one of pytest's items."""

    originalname = "test"

    def __init__(self, params: dict[str, Any], markers: tuple[pytest.Mark, ...]):
        self.callspec, self.nodeid, self.markers = SimpleNamespace(params=params), str(params), markers

    def iter_markers(self):
        return iter(self.markers)

    def get_closest_marker(self, name: str):
        return next((each for each in self.markers if each.name == name), None)


def cases(*markers: pytest.Mark) -> list[Case]:
    """Return a case of each device, size, name and list, with markers, the closest first."""
    every = itertools.product(DEVICES, SIZES, NAMES, MANY)
    return [Case(dict(zip(("device", "size", "name", "many"), each)), markers) for each in every]


@pytest.mark.parametrize(("mark", "together", "most"), ((EACH_VALUE, 1, 2 * 4), (EACH_PAIR, 2, 2 * 14)))
def test_each_value_and_each_pair_occur_on_each_device(mark, together, most):
    every = cases(mark)
    taken = sampled(every)
    assert len(taken) <= most < len(every)

    def seen(found) -> set:
        return {
            (each.callspec.params["device"], *((name, str(each.callspec.params[name])) for name in names))
            for each in found
            for names in itertools.combinations(("many", "name", "size"), together)
        }

    assert seen(taken) == seen(every)


def test_each_nth_case():
    every = cases(pytest.mark.every(5).mark)
    places = [place for place, each in enumerate(every) if each in sampled(every)]
    assert {later - earlier for earlier, later in itertools.pairwise(places)} == {5}


def test_the_function_says_it_rather_than_its_file():
    every_other = pytest.mark.every(2).mark
    assert len(sampled(cases(every_other, EACH_VALUE))) == len(cases()) / 2
    assert len(sampled(cases(EACH_VALUE, every_other))) <= 2 * 4


def test_a_test_without_arguments_runs():
    one = Case({}, (EACH_VALUE,))
    del one.callspec
    assert sampled([one]) == {one}
