"""Whatever Python value or tensor of a recorded model is edited between two calls, the next tokens are stock's.

Values are found by going through the model as it is: attributes of modules, what containers, objects and functions
hold, the configuration, and the defaults of ``generate()``. A seed chooses one, and what becomes of it.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from causal_lm_types import small_model
from encoder_decoder_types import small_model as small_encoder_decoder
from own_decoders import own_model
from torch import nn

import hf_fastpath

#: attributes of every module that are PyTorch's bookkeeping
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
_OPTIONS = dict(max_new_tokens=6, do_sample=False)
MODELS: dict[str, Callable[[], Any]] = {
    "glm4": lambda: small_model("glm4"),
    "lfm2": lambda: small_model("lfm2"),
    "deepseek_v2": lambda: small_model("deepseek_v2"),
    "bart": lambda: small_encoder_decoder("bart"),
    "own": lambda: own_model("DeepInside"),
    "closure": lambda: own_model("Enclosed"),
}
#: edits of each model in every run, and with ``--full``
_EDITS, _MANY_EDITS = 6, 60

Place = tuple[Any, ...]


@functools.cache
def pair(name: str) -> tuple[Any, Any]:
    """Return (stock, patched); tests bring them back to what they were."""
    # copies share functions, and configurations lists that are their class's: hence copies of two models
    stock, ours = (copy.deepcopy(MODELS[name]()).eval() for _ in range(2))
    return stock, hf_fastpath.patch(ours, quiet=True)


# ---- where values are -------------------------------------------------------------------------------------------


def inside(value: Any) -> Iterator[tuple[tuple, Any]]:
    """Yield (step, value) of what a value holds."""
    if isinstance(value, nn.Module):
        own = {name: each for name, each in vars(value).items() if name not in _BOOKKEEPING}
        own |= {name: each for name, each in value.named_parameters(recurse=False)}
        own |= {name: each for name, each in value.named_buffers(recurse=False)}
        yield from (((getattr, name), each) for name, each in own.items() if not name.startswith("_hf_fastpath"))
        yield from (((getattr, name), each) for name, each in value.named_children())
    elif isinstance(value, dict):
        yield from (((dict.__getitem__, name), each) for name, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (((type(value).__getitem__, place), each) for place, each in enumerate(value))
    elif isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        yield from (((cell_of, place), each.cell_contents) for place, each in enumerate(cells))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, types.MethodType, torch.Tensor)):
        if type(value).__module__.partition(".")[0] not in ("torch", "hf_fastpath"):
            yield from (((getattr, name), each) for name, each in vars(value).items())


def cell_of(function: types.FunctionType, place: int) -> Any:
    return function.__closure__[place].cell_contents


def places(model: Any) -> list[Place]:
    """Return the steps from a model to every value that can be edited."""
    found: list[Place] = []
    seen, waiting = {id(model)}, [((), model)]
    while waiting:
        path, value = waiting.pop()
        for step, each in inside(value):
            if isinstance(each, (bool, int, float, str, torch.Tensor)):
                found.append((*path, step))
            elif id(each) not in seen:
                seen.add(id(each))
                waiting.append(((*path, step), each))
    return found


def follow(model: Any, path: Place) -> Any:
    for read, name in path:
        model = read(model, name)
    return model


def is_tensor(model: Any, path: Place) -> bool:
    return isinstance(follow(model, path), torch.Tensor)


def put(model: Any, path: Place, value: Any) -> None:
    *outer, (read, name) = path
    holder = follow(model, outer)
    if read is getattr:
        setattr(holder, name, value)
    elif read is cell_of:
        holder.__closure__[name].cell_contents = value
    elif isinstance(holder, tuple):
        put(model, outer, (*holder[:name], value, *holder[name + 1 :]))
    else:
        holder[name] = value


def edited(value: Any, draw: random.Random) -> Any:
    """Return another value of the same kind; a tensor is edited in place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw.choice((1, -1, 3))
    if isinstance(value, float):
        return value * draw.choice((0.5, 2.0, -1.0)) + draw.choice((0.0, 0.25))
    if isinstance(value, str):
        return draw.choice((value + "_", value.upper(), "sdpa", "eager"))
    changed = value.detach().clone()
    changed = changed * 1.5 if changed.is_floating_point() or changed.is_complex() else changed.flip(-1)
    if draw.random() < 0.5:
        with torch.no_grad():
            value.copy_(changed)
        return value
    return nn.Parameter(changed, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else changed


def outcome(model: Any) -> Any:
    torch.manual_seed(1)
    ids = torch.arange(4, 13)[None]
    try:
        with torch.no_grad():
            return model.generate(ids, **_OPTIONS).tolist()
    except Exception as error:
        return type(error).__name__


def is_finite(model: Any) -> bool:
    ids = torch.arange(4, 13)[None]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return bool(model(ids, **more).logits.isfinite().all())


@pytest.mark.parametrize("name", MODELS)
def test_edits_of_any_value_take_effect(name, request):
    stock, ours = pair(name)
    before = outcome(stock)
    assert outcome(ours) == before
    fast = hf_fastpath.report(ours).stats["fast_tokens"]
    assert fast, hf_fastpath.report(ours)
    found, differing = places(stock), 0
    for seed in range(_MANY_EDITS if request.config.getoption("--full") else _EDITS):
        kind = random.Random(f"{name} {seed}")
        path = kind.choice([each for each in found if is_tensor(stock, each) == (seed % 3 == 0)])
        told = f"seed {seed}: {'.'.join(str(step) for _, step in path)}"
        kept = []
        for model in (stock, ours):
            draw, value = random.Random(seed), follow(model, path)
            kept.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
            put(model, path, edited(value, draw))
        expected = outcome(stock)
        if isinstance(expected, str) or is_finite(stock):
            assert outcome(ours) == expected, told
            differing += expected != before
        for model, value in zip((stock, ours), kept):
            now = follow(model, path)
            if isinstance(value, torch.Tensor) and now.shape == value.shape:
                with torch.no_grad():
                    now.copy_(value)
            else:
                put(model, path, value)
        if outcome(stock) != before:  # stock has made something of the edit that stays
            pair.cache_clear()
            stock, ours = pair(name)
        assert outcome(ours) == before, f"{told}: what was there before is not there again"
    assert hf_fastpath.report(ours).stats["fast_tokens"] >= fast
    assert differing or not request.config.getoption("--full"), "no edit changes a token"
