"""Users edit keys and values of a cache by hand: afterwards FastpathCache goes on as DynamicCache does."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from faults import FORWARD, Fault, places
from models import WINDOW, build, counting, pair, prompt
from parity import assert_same_tokens
from test_cache import dynamic, states
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.ops.kv_cache import dequantized, quantized, requantized

SIZE = 16
#: parts of a FastpathCache: layers, options, tokens that it holds before it is edited
HOLDERS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "full": (("full",), {}, 20),
    "window": (("sliding",), {}, WINDOW - 4),
    "wrapped_window": (("sliding",), {}, 3 * WINDOW + 5),
    "both": (("sliding", "full"), {}, 3 * WINDOW),
    "pages": (("full", "full"), {"page_size": SIZE}, 40),
    "pages_and_window": (("full", "sliding"), {"page_size": SIZE}, 50),
    "float16": (("full", "sliding"), {"kv_dtype": torch.float16}, 40),
    "int8": (("full",), {"kv_dtype": torch.int8}, 20),
    "fp8_window": (("sliding",), {"kv_dtype": torch.float8_e4m3fn}, 40),
}
over_holders = pytest.mark.parametrize("holder", HOLDERS)
ROWS = torch.tensor([1, 0, 1])
#: functions that make new keys or values of old ones
EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "crop": lambda t: t[:, :, :-3],
    "middle": lambda t: torch.cat((t[:, :, :4], t[:, :, -6:]), dim=2),
    "prefix": lambda t: t[:, :, 5:],
    "append": lambda t: torch.cat((t, t[:, :, :2]), dim=2),
    "permute": lambda t: t[:, :, torch.randperm(t.shape[2], generator=torch.Generator().manual_seed(0))],
    "empty": lambda t: t[:, :, :0],
    "one_row": lambda t: t[:1],
    "rows": lambda t: t[ROWS.to(t.device)],
    "strided": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "same": lambda t: t,
}
over_edits = pytest.mark.parametrize("edit", EDITS)


def both_caches(holder: str, device, batch: int = 2) -> tuple[FastpathCache, Any, Callable]:
    """Make a FastpathCache and a DynamicCache that hold the same, and a function that appends states to both."""
    kinds, options, count = HOLDERS[holder]
    stock, generator = dynamic(kinds), torch.Generator().manual_seed(0)
    ours = FastpathCache.from_dynamic(stock, **options)

    def append(count: int, batch: int = batch) -> None:
        for index in range(len(kinds)):
            new = states(device, batch, count, generator)
            found = ours.update(*new, index)
            expected = stock.update(*(rounded(s, options.get("kv_dtype")) for s in new), index)
            for name, mine, theirs in zip(("keys", "values"), found, expected):
                assert torch.equal(mine, theirs), f"layer {index}: {name} of {mine.shape[2]}, not {theirs.shape[2]}"

    append(count)
    append(1)
    return ours, stock, append


def rounded(states: torch.Tensor, kv_dtype: torch.dtype | None) -> torch.Tensor:
    if kv_dtype in (None, torch.float16):
        return states if kv_dtype is None else states.half().float()
    return dequantized(*quantized(states, kv_dtype), states.dtype)


def assert_same_halves(ours: FastpathCache, stock: Any, what: str = "") -> None:
    assert ours.get_seq_length() == stock.get_seq_length(), what
    for index, (mine, theirs) in enumerate(zip(ours.layers, stock.layers, strict=True)):
        assert mine.get_seq_length() == theirs.get_seq_length(), what
        for query in (1, 4):
            assert ours.get_mask_sizes(query, index) == stock.get_mask_sizes(query, index), what
        for name in ("keys", "values"):
            assert torch.equal(getattr(mine, name).float(), getattr(theirs, name).float()), f"{what}: {index} {name}"
    assert len(list(ours)) == len(list(stock))
    for mine, theirs in zip(ours, stock):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(mine[:2], theirs[:2]))


# ---- assignments ----------------------------------------------------------------------------------------------


@pytest.mark.each_value
@over_edits
@over_holders
def test_assigned_halves(holder, edit, device):
    """Halves are assigned in either order, read in between, and appended to until windows have passed the edit."""
    for order in (("keys", "values"), ("values", "keys")):
        ours, stock, append = both_caches(holder, device)
        for mine, theirs in zip(ours.layers, stock.layers):
            for name in order:
                for layer in (mine, theirs):
                    setattr(layer, name, EDITS[edit](getattr(layer, name)))
                assert mine.get_seq_length() == theirs.get_seq_length()
                assert torch.equal(getattr(mine, name).float(), getattr(theirs, name))
        assert_same_halves(ours, stock, f"{edit} by {order}")
        batch = stock.layers[0].keys.shape[0]
        for count in (1, 1, 3, 1, 2 * WINDOW, 1):
            append(count, batch)
            assert_same_halves(ours, stock, f"{edit}, then {count}")


def converted(ours: FastpathCache, holder: str) -> FastpathCache:
    return FastpathCache.from_dynamic(ours.to_dynamic(), **HOLDERS[holder][1])


#: change of a cache as a whole -> the number of rows that it has then
CHANGES: dict[str, Callable[[Any, int], int]] = {
    "reorder": lambda cache, rows: cache.reorder_cache(torch.arange(rows).flip(0)) or rows,
    "repeat": lambda cache, rows: cache.batch_repeat_interleave(2) or 2 * rows,
    "select": lambda cache, rows: cache.batch_select_indices(torch.tensor([rows - 1])) or 1,
}


@pytest.mark.each_value
@over_edits
@over_holders
def test_what_a_cache_does_after_an_assignment(holder, edit, device):
    """Copies, pickles, conversions, reorders and selections take along halves that were assigned and not used yet."""

    def edited() -> tuple[FastpathCache, Any, Callable]:
        ours, stock, append = both_caches(holder, device)
        for layer in (*ours.layers, *stock.layers):
            layer.keys, layer.values = EDITS[edit](layer.keys), EDITS[edit](layer.values)
        return ours, stock, append

    rows = edited()[1].layers[0].keys.shape[0]
    copies = (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: converted(cache, holder))
    for number, copied in enumerate(copies):
        if number == 2 and edit == "append" and "sliding" in HOLDERS[holder][0]:
            continue  # a conversion keeps what a window shows
        ours, stock, append = edited()
        vars(ours).update(vars(copied(ours)))
        for count in (1, 3):
            append(count, rows)
            assert_same_halves(ours, stock, str(number))
    for name, change in CHANGES.items():
        if edit == "empty":  # transformers' layers that hold nothing keep their rows
            continue
        ours, stock, append = edited()
        batch = {change(cache, rows) for cache in (ours, stock)}.pop()
        for count in (1, 3):
            append(count, batch)
            assert_same_halves(ours, stock, name)
    ours, _, append = edited()
    ours.reset()
    assert ours.get_seq_length() == 0
    assert ours.update(*states(device, 3, 2, torch.Generator()), 0)[0].shape[:3] == (3, 2, 2)


def test_one_layer_alone(device):
    """The other layers are as they were: each layer goes on with its own positions."""
    for holder in HOLDERS:
        ours, stock, append = both_caches(holder, device)
        for cache in (ours, stock):
            layer = cache.layers[-1]
            layer.values, layer.keys = layer.values[:, :, 2:], layer.keys[:, :, 2:]
        for count in (1, 3):
            append(count)
        assert_same_halves(ours, stock, holder)


@over_holders
def test_a_window_is_cropped_by_hand(holder, device):
    """DynamicSlidingWindowLayer's own crop() does the same: keys, values, and the number of tokens so far."""
    for count_first in (False, True):
        ours, stock, append = both_caches(holder, device)
        for layer in (*ours.layers, *stock.layers):
            length = layer.get_seq_length() - 3
            if layer.is_sliding and count_first:
                layer.cumulative_length = length
            layer.keys, layer.values = layer.keys[:, :, :-3], layer.values[:, :, :-3]
            if layer.is_sliding:
                layer.cumulative_length = length
        assert_same_halves(ours, stock)
        for count in (1, 2, 30, 1):
            append(count)
            assert_same_halves(ours, stock)


def test_the_length_of_a_full_layer_follows_its_keys(device):
    ours, _, _ = both_caches("full", device)
    with pytest.raises(AttributeError, match="follows its keys"):
        ours.layers[0].cumulative_length = 3


@over_holders
def test_halves_that_do_not_go_together(holder, device):
    """A use in between is refused, and nothing is written; with the other half, the cache goes on."""
    for one, other in (("keys", "values"), ("values", "keys")):
        ours, stock, append = both_caches(holder, device)
        for layer in (ours.layers[0], stock.layers[0]):
            setattr(layer, one, getattr(layer, one)[:, :, :-2])
        new = states(device, 2, 1, torch.Generator().manual_seed(0))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="assign keys and values before the next use"):
                ours.update(*new, 0)
        for layer in (ours.layers[0], stock.layers[0]):
            setattr(layer, other, getattr(layer, other)[:, :, :-2])
        append(1)
        assert_same_halves(ours, stock)


@over_holders
def test_none_forgets(holder, device):
    """None is assigned with is_initialized, which a transformers layer needs, and without."""
    for sets_flag in (True, False):
        ours, stock, append = both_caches(holder, device)
        for layer in (*ours.layers, *stock.layers):
            layer.keys = layer.values = None
            assert layer.keys is None and layer.values is None
        for layer in (*stock.layers, *(ours.layers if sets_flag else ())):
            layer.is_initialized = False
        for layer in (*ours.layers, *stock.layers):
            if layer.is_sliding:
                layer.cumulative_length = 0
        assert ours.get_seq_length() == 0
        append(5, 3)
        append(1, 3)
        assert_same_halves(ours, stock)


@over_holders
def test_is_initialized_alone_forgets(holder, device):
    ours, stock, append = both_caches(holder, device)
    for layer in (*ours.layers, *stock.layers):
        layer.is_initialized = False
    assert ours.get_seq_length() == stock.get_seq_length()
    for count in (1, 1, WINDOW, 1):
        append(count)
        assert_same_halves(ours, stock)


def test_other_dtypes(device):
    """torch.cat would give the same dtype: nothing is rounded, unless kv_dtype asks for it."""
    for kinds in (("full",), ("sliding",)):
        for page_size in (None, SIZE):
            for dtype in (torch.float16, torch.bfloat16):
                stock, generator = dynamic(kinds), torch.Generator().manual_seed(0)
                ours = FastpathCache.from_dynamic(stock, page_size=page_size)
                for cache in (ours, stock):
                    cache.update(*states(device, 2, 30, torch.Generator().manual_seed(1)), 0)
                    layer = cache.layers[0]
                    layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
                    assert layer.keys.dtype == dtype
                new = states(device, 2, 1, generator)
                for mine, theirs in zip(ours.update(*new, 0), stock.update(*new, 0)):
                    assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
                for cache in (ours, stock):  # a cache of that dtype now gets wider states
                    cache.layers[0].keys = cache.layers[0].keys.to(dtype)
                    cache.layers[0].values = cache.layers[0].values.to(dtype)
                assert_same_halves(ours, stock)
    for bad in (torch.ones(1, 2, 3, 8, dtype=torch.int64), [1]):
        with pytest.raises(TypeError, match=r"FastpathLayer\.keys got"):
            ours.layers[0].keys = bad


def test_wider_states_than_the_cache_holds(device):
    """torch.cat takes the wider type; so do buffers and pages, unless kv_dtype names a type."""
    for options in ({}, {"page_size": SIZE}, {"kv_dtype": torch.float16}):
        for kind in ("full", "sliding"):
            stock, generator = dynamic((kind,)), torch.Generator().manual_seed(0)
            ours = FastpathCache.from_dynamic(stock, **options)
            old = [s.half() for s in states(device, 2, 30, generator)]
            new = states(device, 2, 1, generator)
            ours.update(*old, 0), stock.update(*old, 0)
            given = [s.half() for s in new] if "kv_dtype" in options else new
            for mine, theirs in zip(ours.update(*new, 0), stock.update(*given, 0)):
                assert mine.dtype == torch.float32 and torch.equal(mine, theirs.float())


def test_gradients_are_refused(device):
    ours, _, _ = both_caches("full", device)
    ours.layers[0].keys = ours.layers[0].keys.clone().requires_grad_()
    new = states(device, 2, 1, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="require gradients"):
        ours.update(*new, 0)
    with torch.no_grad():
        assert ours.update(*new, 0)[0].shape[2] == 22


def test_halves_on_another_device_wait_there(device):
    """A user offloads halves by hand: nothing happens until the next use, which names both devices."""
    ours, stock, append = both_caches("full", device)
    kept = ours.layers[0].keys.clone(), ours.layers[0].values.clone()
    ours.layers[0].keys, ours.layers[0].values = (half.to("meta") for half in kept)
    assert ours.layers[0].keys.device.type == "meta" and ours.get_seq_length() == 21
    ours.layers[0].keys, ours.layers[0].values = kept
    append(1)
    assert_same_halves(ours, stock)
    ours.layers[0].keys, ours.layers[0].values = (half.to("meta") for half in kept)
    with pytest.raises(RuntimeError, match="on meta"):
        ours.update(*states(device, 2, 1, torch.Generator().manual_seed(0)), 0)


# ---- changes in place -----------------------------------------------------------------------------------------

#: functions that write into keys or values
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(0.5),
    "set slice": lambda t: t.__setitem__((slice(None), 0, slice(2, 5)), 0.25),
    "set mask": lambda t: t.__setitem__(t > 1, 1.0),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "fill_ of a view": lambda t: t[1:, :, -3:].fill_(2.0),
    "a view of a view": lambda t: t.transpose(1, 2)[:, 1].select(1, 0).unsqueeze(0).zero_(),
    "index_copy_": lambda t: t.index_copy_(2, torch.tensor([0, 3], device=t.device), t[:, :, [5, 6]].clone()),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1], device=t.device), 1.5),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, 0.0),
    "scatter_": lambda t: t.scatter_(2, torch.ones_like(t[:, :, :1], dtype=torch.long), 3.0),
    "out=": lambda t: torch.add(t, 1.0, out=t),
    "out= of a view": lambda t: torch.neg(t[0], out=t[0]),
    "an operator": lambda t: t.__iadd__(t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "data": lambda t: t.data.mul_(3.0),
    "detached": lambda t: t.detach().add_(1.0),
    "the last of the rows": lambda t: t.unbind(0)[-1].zero_(),
    "NumPy": lambda t: np.negative(t.numpy(), out=t.numpy()) if t.device.type == "cpu" else t.neg_(),
    "a head made NaN": lambda t: t[0, 0, 0].fill_(float("nan")),
}


@pytest.mark.each_value
@pytest.mark.parametrize("write", WRITES)
@over_holders
def test_changed_in_place(holder, write, device):
    """One half or both are changed, read again at once, and appended to afterwards."""
    kv_dtype = HOLDERS[holder][1].get("kv_dtype")
    for names in (("keys",), ("values",), ("keys", "values")):
        ours, stock, _ = both_caches(holder, device)
        for mine, theirs in zip(ours.layers, stock.layers):
            for name in names:
                if kv_dtype is not None:  # the values that are stored of stock's
                    half = getattr(mine, name).float().clone()
                    WRITES[write](half)
                    half = rounded_again(half, kv_dtype)
                    setattr(theirs, name, half)
                else:
                    WRITES[write](getattr(theirs, name))
                WRITES[write](getattr(mine, name))
        new = states(device, 2, 1, torch.Generator().manual_seed(5))
        for index in range(len(ours.layers)):
            found = ours.update(*new, index)
            expected = stock.update(*(rounded(s, kv_dtype) for s in new), index)
            for mine, theirs in zip(found, expected):
                assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def rounded_again(states: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    if kv_dtype == torch.float16:
        return states.half().float()
    return dequantized(*requantized(states, kv_dtype), states.dtype)


@over_holders
def test_changed_through_iteration(holder, device):
    ours, stock, append = both_caches(holder, device)
    for cache in (ours, stock):
        for keys, values, *_ in cache:
            keys[:, :, 0].zero_()
            values[:, :, -1].zero_()
    assert_same_halves(ours, stock)
    append(1)
    assert_same_halves(ours, stock)


@over_holders
def test_what_was_shown_before_is_the_users(holder, device):
    """Once the cache has grown, an older tensor is as it was, and changes of it do not reach the cache."""
    ours, stock, append = both_caches(holder, device)
    shown = [(layer.keys, layer.values) for layer in ours.layers]
    before = copy.deepcopy(shown)
    append(1)
    for pair_of, was in zip(shown, before):
        for half, old in zip(pair_of, was):
            assert torch.equal(half, old)
            half.zero_()
    assert_same_halves(ours, stock)
    append(30)
    assert_same_halves(ours, stock)


def test_a_kept_tensor_can_be_put_back(device):
    """A crop, or a reset, and other tokens come in between."""
    for holder in ("full", "pages", "window"):
        for forget in ("crop", "reset"):
            ours, stock, append = both_caches(holder, device)
            kept = [(layer.keys, layer.values) for layer in ours.layers]
            was = copy.deepcopy(stock)
            ours.crop(-4) if forget == "crop" else ours.reset()
            new = states(device, 2, 3, torch.Generator().manual_seed(9))
            for index in range(len(ours.layers)):
                ours.update(*new, index)
            for layer, (keys, values) in zip(ours.layers, kept):
                layer.keys, layer.values = keys, values
                if layer.is_sliding:
                    layer.cumulative_length = was.get_seq_length()
            assert_same_halves(ours, was)


@over_holders
def test_keys_are_plain_tensors(holder, device):
    """Code that reads tensors can read them: they are saved, pickled, copied, concatenated, compiled."""
    torch._dynamo.reset()  # the compiler compiles a function only a few times
    ours, stock, _ = both_caches(holder, device)
    for mine, theirs in zip(ours.layers, stock.layers):
        half = mine.keys
        assert type(half) is torch.Tensor and half.dtype in (torch.float32, torch.float16)
        file = io.BytesIO()
        torch.save(half, file)
        file.seek(0)
        for found in (torch.load(file), pickle.loads(pickle.dumps(half)), copy.deepcopy(half), half.to(torch.float64)):
            assert torch.equal(found.float(), theirs.keys)
        traced = torch.compile(lambda t: t * 2, backend="eager", fullgraph=True)
        assert torch.equal(traced(half).float(), (theirs.keys.to(half.dtype) * 2).float())


def test_reading_leaves_shared_pages_shared(device):
    """A crop by assignment shares the pages that it leaves, and a change of one sequence copies only its own pages."""
    cache = FastpathCache.from_dynamic(dynamic(("full",)), page_size=SIZE)
    cache.update(*states(device, 1, 60, torch.Generator().manual_seed(0)), 0)
    cache.batch_repeat_interleave(3)
    counts, layer = cache.page_counts, cache.layers[0]
    assert layer.keys.shape == layer.values.shape
    cache.take()
    assert (counts.used, counts.unshared) == (4, 12)
    other = copy.deepcopy(cache)
    before = other.layers[0].keys.clone()
    layer.keys, layer.values = layer.keys[:, :, :40], layer.values[:, :, :40]
    cache.take()
    assert counts.used == 4
    layer.keys[:, :, 35:] = 0
    cache.take()
    assert torch.equal(other.layers[0].keys, before) and counts.used > 4
    layer.keys, layer.values = layer.keys[:2], layer.values[:2]
    cache.take()
    assert len(layer.table.rows) == 2 and torch.equal(other.layers[0].keys, before)
    del cache, layer
    other.reset()
    assert counts.used == counts.unshared == 0


@pytest.mark.parametrize("kv_dtype", (torch.int8, torch.float8_e4m3fn), ids=("int8", "fp8"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_quants_that_were_quants_stay_what_they_were(kv_dtype, dtype):
    """Heads of all sizes are read and assigned again without a loss."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(20000, 32, generator=generator) * torch.logspace(-3, 2, 20000)[:, None]
    once = dequantized(*quantized(heads.to(dtype), kv_dtype), dtype)
    again = dequantized(*requantized(once, kv_dtype), dtype)
    assert torch.equal(once, again)


# ---- tokens ---------------------------------------------------------------------------------------------------

MODELS = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3_text", {}),
    "pages": ("llama", {"page_size": SIZE}),
}
#: edits that are made to every layer
MODEL_EDITS = {name: EDITS[name] for name in ("crop", "middle", "prefix", "append", "one_row", "rows", "strided")}
MODEL_EDITS["scaled"] = lambda t: t.mul_(0.5)


@pytest.mark.each_value
@pytest.mark.parametrize("edit", MODEL_EDITS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", (WINDOW - 5, 2 * WINDOW + 3))
def test_forwards_over_an_edited_cache(name, edit, length, device):
    """Single tokens, and three at once, give stock's logits, or an error if stock raises one."""
    family, options = MODELS[name]
    stock, _ = pair(family, device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
    ids = prompt(device, 2, length)
    caches = []
    for model, layers in ((ours, "all"), (stock, "all"), (ours, "one"), (stock, "one")):
        out = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        cache = out[CACHE]
        for layer in cache.layers if layers == "all" else cache.layers[1:]:
            keys, values = (MODEL_EDITS[edit](half) for half in (layer.keys, layer.values))
            layer.keys, layer.values = keys, values
        caches.append(cache)
    for mine, theirs in (caches[:2], caches[2:]):
        batch = theirs.layers[0].keys.shape[0]
        for count in (1, 1, 3, 1):
            new = prompt(device, batch, count, seed=count)
            results = []
            for model, cache in ((ours, mine), (stock, theirs)):
                try:
                    with torch.no_grad():
                        results.append(model(new, **{CACHE: cache}).logits)
                except RuntimeError as error:
                    results.append(error)
            if isinstance(results[1], RuntimeError):
                assert isinstance(results[0], RuntimeError), f"stock: {results[1]}"
                break
            assert isinstance(results[0], torch.Tensor), results[0]
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        else:
            assert mine.get_seq_length() == theirs.get_seq_length()


@pytest.mark.each_value
@pytest.mark.parametrize("edit", MODEL_EDITS)
@pytest.mark.parametrize("name", MODELS)
def test_generate_over_an_edited_cache(name, edit, device):
    """If all layers are edited alike, tokens are stock's, made by the decode loop unless a window was cut."""
    family, options = MODELS[name]
    stock, _ = pair(family, device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
    ids = prompt(device, 2, 12)
    found = []
    for model in (ours, stock):
        cache = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)[CACHE]
        for layer in cache.layers:
            keys, values = (MODEL_EDITS[edit](half) for half in (layer.keys, layer.values))
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length = keys.shape[2]
        length, batch = cache.get_seq_length(), cache.layers[0].keys.shape[0]
        text = prompt(device, batch, length + 1, seed=3)
        with counting(ours) as counts:
            found.append(model.generate(text, **{CACHE: cache}, max_new_tokens=10, do_sample=False))
        if model is ours:
            assert not counts.reasons, counts.reasons
    assert_same_tokens(*found, stock)


# ---- forwards that fail -----------------------------------------------------------------------------------------


def contents(cache: FastpathCache) -> list[tuple]:
    """Return what a cache holds, without reading the keys through the layer."""
    return [(layer.get_seq_length(), *map(torch.clone, copy.deepcopy(layer).copies())) for layer in cache.layers]


def assert_unchanged(cache: FastpathCache, before: list[tuple]) -> None:
    now = contents(cache)
    assert [length for length, *_ in now] == [length for length, *_ in before]
    for mine, was in zip(now, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], was[1:]))


BATCHES = [(1, 2), (2, 1), (2, 3), (17, 2), (2, 17)]
LOADED = {**MODELS, "int8": ("llama", {"kv_dtype": "int8"})}


@pytest.mark.each_value
@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("length", (7, 2 * WINDOW + 3))
def test_another_batch_is_refused(name, length, device):
    """Every kind of call refuses it before anything is written; then the right batch goes on as if nothing had been."""
    family, options = LOADED[name]
    ours = hf_fastpath.patch(copy.deepcopy(pair(family, device)[0]), quiet=True, **options)
    for held, given in BATCHES:
        out = ours.generate(
            prompt(device, held, length), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
        cache, text = out[CACHE], out.sequences
        before, control = contents(cache), copy.deepcopy(cache)
        for count in (1, 2, 30):
            with torch.no_grad(), pytest.raises(RuntimeError, match=f"batch {given}.*batch {held}"):
                ours(prompt(device, given, count), **{CACHE: cache})
            assert_unchanged(cache, before)
        for extra in ({}, {"do_sample": True}, {"prefill_chunk_size": 2}):
            with pytest.raises(RuntimeError, match=f"batch {given}.*batch {held}"):
                ours.generate(prompt(device, given, length + 9), **{CACHE: cache}, max_new_tokens=3, **extra)
            assert_unchanged(cache, before)
        expected = ours.generate(text, **{CACHE: control}, max_new_tokens=6, do_sample=False)
        assert torch.equal(ours.generate(text, **{CACHE: cache}, max_new_tokens=6, do_sample=False), expected)


def test_another_model_is_refused(device):
    """The other model has other heads, another head size, or another device."""
    stock, ours = pair("llama", device)
    cache = ours.generate(prompt(device), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)[CACHE]
    before = contents(cache)
    others = dict(num_key_value_heads=2), dict(head_dim=40), dict(num_key_value_heads=4, head_dim=32)
    for sizes in others:
        other = hf_fastpath.patch(build("llama", **sizes).to(device), quiet=True)
        for count in (1, 2, 30):
            with torch.no_grad(), pytest.raises(RuntimeError, match="num_kv_heads .* expected those of what it holds"):
                other(prompt(device, 1, count), **{CACHE: cache})
        with pytest.raises(RuntimeError, match="num_kv_heads .* expected those of what it holds"):
            other.generate(prompt(device, 1, 40), **{CACHE: cache}, max_new_tokens=2)
        with torch.no_grad(), pytest.raises(RuntimeError, match="num_kv_heads .* expected those of what it holds"):
            build("llama", **sizes).to(device)(prompt(device, 1, 2), **{CACHE: cache})  # stock code runs
        assert_unchanged(cache, before)
    on_meta = {"dtype": torch.float32, "device": torch.device("meta")}
    with pytest.raises(RuntimeError, match="on meta, expected"):
        cache.layers[0].admit((1, 1, 80), (1, 1, 80), **on_meta)


class Stop(BaseException):
    """An exception that no code catches."""


PLACES: dict[str, Callable[[Any], Any]] = {
    "the second layer": lambda decoder: layers_of(decoder)[1],
    "behind the first layer": lambda decoder: layers_of(decoder)[0],
    "the last MLP": lambda decoder: layers_of(decoder)[-1].mlp,
    "behind all layers": lambda decoder: decoder.norm if hasattr(decoder, "norm") else decoder.ln_f,
}


def layers_of(decoder) -> Any:
    return decoder.layers if hasattr(decoder, "layers") else decoder.h


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOADED)
def test_a_forward_that_fails_leaves_the_cache_as_it_was(name, place, device):
    """A user's hook raises, in a forward of one token, of a few, and of more than a window keeps, with a past and
    without, and after an edit that was not used yet."""
    family, options = LOADED[name]
    ours = hf_fastpath.patch(copy.deepcopy(pair(family, device)[0]), quiet=True, **options)
    decoder = ours.get_decoder()
    module, failing = PLACES[place](decoder), []

    def hook(*_: Any) -> None:
        if failing:
            raise Stop

    (module.register_forward_hook if place.startswith("behind") else module.register_forward_pre_hook)(hook)
    for past in (0, 5, 2 * WINDOW + 3):
        for edited in (False, True) if past else (False,):
            for count in (1, 3, 30):
                cache = FastpathCache(ours.config, options.get("kv_dtype") and torch.int8, options.get("page_size"))
                with torch.no_grad():
                    if past:
                        ours(prompt(device, 2, past), **{CACHE: cache})
                    if edited:
                        for layer in cache.layers:
                            layer.keys.mul_(0.5)
                            layer.values = layer.values * 2
                    control, new = copy.deepcopy(cache), prompt(device, 2, count, seed=1)
                    failing.append(True)
                    with pytest.raises(Stop):
                        ours(new, **{CACHE: cache})
                    failing.clear()
                    assert cache.get_seq_length() == past
                    assert [layer.get_seq_length() for layer in cache.layers] == [past] * 2
                    for _ in range(2):
                        found, expected = (ours(new, **{CACHE: each}).logits for each in (cache, control))
                        assert torch.equal(found, expected), (past, edited, count)


@pytest.fixture
def few_objects():
    """Let collections look at new objects alone: a process of many tests has millions of older ones."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("name", LOADED)
def test_a_forward_that_is_interrupted_leaves_the_cache_as_it_was(name, request, few_objects):
    """The interrupt comes at any line in our files; `make test-full` tries five times as many lines. After the last
    layer the cache is complete."""
    count_of_places = 30 if request.config.getoption("--full") else 6
    device = torch.device("cpu")
    family, options = LOADED[name]
    ours = hf_fastpath.patch(copy.deepcopy(pair(family, device)[0]), quiet=True, **options)
    for past, count in ((5, 1), (2 * WINDOW, 3), (0, 4)):
        filled = FastpathCache(ours.config, options.get("kv_dtype") and torch.int8, options.get("page_size"))
        new = prompt(device, 1, count, seed=1)
        with torch.no_grad():
            if past:
                ours(prompt(device, 1, past), **{CACHE: filled})
            for _ in range(2):  # so that there are pages enough, and a plan for a single token
                ours(new, **{CACHE: copy.deepcopy(filled)})
            cache = copy.deepcopy(filled)
            gc.collect()
            with Fault(FORWARD) as whole:
                expected = ours(new, **{CACHE: cache}).logits
            for at in places(whole.lines, count_of_places):
                cache = copy.deepcopy(filled)
                gc.collect()  # an interrupt inside of a __del__ is swallowed by Python
                with Fault(FORWARD, at) as fault, pytest.raises(KeyboardInterrupt):
                    ours(new, **{CACHE: cache})
                lengths = {layer.get_seq_length() for layer in cache.layers}
                assert lengths == {past} or lengths == {past + count}, fault.where
                cache.crop(past - cache.get_seq_length())
                assert torch.equal(ours(new, **{CACHE: cache}).logits, expected), fault.where


def test_layers_that_a_failed_forward_made_are_gone(device):
    """This is a cache without a config; unpatch() removes the guard."""
    stock, ours = pair("llama", device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    handle = ours.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Stop))
    cache = FastpathCache()
    with torch.no_grad(), pytest.raises(Stop):
        ours(prompt(device), **{CACHE: cache})
    assert len(cache.layers) == 0
    handle.remove()
    out = ours.generate(prompt(device), **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    assert_same_tokens(out, stock.generate(prompt(device), max_new_tokens=4, do_sample=False), stock)
    hf_fastpath.unpatch(ours)
    assert "forward" not in vars(ours.model)


# ---- between the steps of generate() ------------------------------------------------------------------------------


class Editing:
    """A streamer that changes the cache after the fourth token."""

    def __init__(self, cache: Any, change: Callable[[Any], None]):
        self.cache, self.change, self.count = cache, change, 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 5:
            for layer in self.cache.layers:
                self.change(layer)

    def end(self) -> None:
        pass


def halve(layer: Any) -> None:
    layer.keys.mul_(0.5)
    layer.values.mul_(2.0)


def evict(layer: Any) -> None:
    layer.keys, layer.values = (torch.cat((t[:, :, :3], t[:, :, -5:]), dim=2) for t in (layer.keys, layer.values))


@pytest.mark.parametrize("name", ("gpt2", "llama", "mistral", "pages"))
def test_changed_between_two_steps_of_generate(name):
    """A streamer changes the cache, in place and by taking positions out; the tokens are stock's."""
    device = torch.device("cpu")  # where the host sees every token before the next
    family, options = MODELS[name]
    stock, _ = pair(family, device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
    for change in (halve, evict) if family != "mistral" else (halve,):
        found = []
        for model in (ours, stock):
            cache = DynamicCache(config=model.config)
            if model is ours:
                cache = FastpathCache(model.config, page_size=options.get("page_size"))
            given = {CACHE: cache, "streamer": Editing(cache, change)}
            found.append(model.generate(prompt(device, 1, 9), **given, max_new_tokens=12, do_sample=False))
        assert torch.equal(*found), change


def test_layers_changed_unevenly_between_two_steps(device):
    stock, _ = pair("llama", device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    cache = FastpathCache(ours.config)

    def uneven(layer: Any) -> None:
        if layer is cache.layers[1]:
            evict(layer)

    with pytest.raises(RuntimeError, match="change all layers alike"):
        given = {CACHE: cache, "streamer": Editing(cache, uneven)}
        ours.generate(prompt(device), **given, max_new_tokens=30, do_sample=False)
