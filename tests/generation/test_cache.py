"""FastpathCache and DynamicCache: the same operations leave the same keys, values and lengths."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from causal_lm_types import small_model
from models import WINDOW, build, pair, prompt
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.cache.buffers import CAPACITY_STEP, RING_SLACK
from hf_fastpath.cache.layer import FastpathLayer
from hf_fastpath.compat import CACHE
from hf_fastpath.ops.decode_attention import MAX_QUERY_LEN
from hf_fastpath.ops.kv_cache import LARGEST_QUANT, dequantized, quantized

HEADS, HEAD_DIM = 2, 8
KINDS = {"full": DynamicLayer, "sliding": lambda: DynamicSlidingWindowLayer(sliding_window=WINDOW)}
over_kinds = pytest.mark.parametrize("kinds", [("full",), ("sliding",), ("sliding", "full")], ids="+".join)


def dynamic(kinds) -> DynamicCache:
    cache = DynamicCache()
    cache.layers.extend(KINDS[kind]() for kind in kinds)
    return cache


def states(device, batch: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, HEADS, count, HEAD_DIM)
    return tuple(torch.randn(shape, generator=generator).to(device) for _ in range(2))


def assert_alike(ours: FastpathCache, stock: DynamicCache, what: str) -> None:
    """Assert equal lengths and mask sizes, and equal keys and values that a next token sees."""
    assert ours.get_seq_length() == stock.get_seq_length(), what
    assert len(ours) == len(stock) and ours.is_sliding == stock.is_sliding
    for index, (mine, theirs) in enumerate(zip(ours.layers, stock.layers)):
        for query in (1, 5):
            sizes = ours.get_mask_sizes(query, index), stock.get_mask_sizes(query, index)
            assert sizes[0] == sizes[1], f"{what}: mask sizes {sizes}"
        if not stock.get_seq_length():
            continue
        visible = mine.keys.shape[2]  # stock may still hold more while past recording is on
        for name in ("keys", "values"):
            expected = getattr(theirs, name)[:, :, -visible:] if visible else getattr(theirs, name)[:, :, :0]
            assert torch.equal(getattr(mine, name), expected), f"{what}: layer {index} {name}"


class Walk:
    """A random sequence of operations on both caches."""

    def __init__(self, kinds, device, seed: int, kv_dtype: torch.dtype | None = None):
        self.stock, self.kv_dtype = dynamic(kinds), kv_dtype
        self.ours = FastpathCache.from_dynamic(self.stock, kv_dtype)
        self.device, self.kinds = device, kinds
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.recording = 2, False

    def update(self) -> str:
        count = self.random.choice((1, 1, 1, 2, 3, 7, 15, 16, 17, 40, 70))
        for index in range(len(self.kinds)):
            keys, values = states(self.device, self.batch, count, self.generator)
            stored = keys, values
            if self.kv_dtype is not None:
                stored = tuple(dequantized(*quantized(s, self.kv_dtype), s.dtype) for s in stored)
            seen = self.ours.update(keys, values, index), self.stock.update(*stored, index)
            for mine, theirs in zip(*seen):
                seen_by_mask = theirs[
                    :, :, -mine.shape[2] :
                ]  # before 5.23, recording layers return older states as well
                assert torch.equal(mine, seen_by_mask), f"update({count}) of layer {index} returns other states"
        return f"update({count})"

    def crop(self) -> str:
        length = self.stock.get_seq_length()
        moved_on = "sliding" in self.kinds and length >= WINDOW
        if length < 2 or (moved_on and not self.recording):
            return "nothing"
        count = self.random.randint(1, min(length - 1, 6))
        if moved_on and self.stock.layers[self.kinds.index("sliding")].keys.shape[2] - count < WINDOW - 1:
            return "nothing"  # stock itself has thrown away positions that would become visible
        self.ours.crop(-count)
        self.stock.crop(-count)
        return f"crop(-{count})"

    def reorder(self) -> str:
        order = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)], device=self.device)
        self.ours.reorder_cache(order)
        self.stock.reorder_cache(order)
        return f"reorder({order.tolist()})"

    def repeat(self) -> str:
        if self.batch > 4 or not self.stock.get_seq_length():
            return "nothing"
        self.ours.batch_repeat_interleave(2)
        self.stock.batch_repeat_interleave(2)
        self.batch *= 2
        return "repeat_interleave(2)"

    def select(self) -> str:
        if self.batch < 3 or not self.stock.get_seq_length():
            return "nothing"
        chosen = torch.tensor(sorted(self.random.sample(range(self.batch), 2)), device=self.device)
        self.ours.batch_select_indices(chosen)
        self.stock.batch_select_indices(chosen)
        self.batch = 2
        return f"select_indices({chosen.tolist()})"

    def record(self) -> str:
        if self.recording:
            return "nothing"
        self.ours.activate_past_recording()
        self.stock.activate_past_recording()
        self.recording = True
        return "activate_past_recording()"

    def copies(self) -> str:
        kept = self.ours
        self.ours = copy.deepcopy(kept)
        for layer in kept.layers:  # a copy shares no memory
            for buffer in layer.buffers:
                buffer.view(torch.uint8).fill_(0x7F)
        return "deepcopy"

    def pickles(self) -> str:
        self.ours = pickle.loads(pickle.dumps(self.ours))
        return "pickle"

    def converts(self) -> str:
        if self.recording or self.kv_dtype is not None:
            return "nothing"  # a conversion keeps what is visible; recording is for one call of generate()
        self.ours = FastpathCache.from_dynamic(self.ours.to_dynamic())
        return "to_dynamic, from_dynamic"


@pytest.mark.each_value
@over_kinds
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_dtype", LARGEST_QUANT, ids=("int8", "fp8"))
def test_random_operations_on_quants(kinds, seed, kv_dtype, device):
    """Scales go where their quants go: all layers read as the values that the quants stand for."""
    random_operations(Walk(kinds, device, seed, kv_dtype))


@over_kinds
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_match_dynamic_cache(kinds, seed, device):
    random_operations(Walk(kinds, device, seed))


def random_operations(walk: Walk) -> None:
    done = [walk.update()]
    steps = (*[walk.update] * 5, *[walk.crop] * 3, walk.reorder, walk.repeat, walk.select, walk.record)
    for _ in range(40):
        done.append(walk.random.choice((*steps, walk.copies, walk.pickles, walk.converts))())
        assert_alike(walk.ours, walk.stock, " ".join(done[-12:]))


@over_kinds
def test_reset_starts_anew_with_any_batch_size(kinds, device):
    """As with DynamicCache, the next conversation may have another number of rows."""
    generator = torch.Generator().manual_seed(0)
    stock = dynamic(kinds)
    ours = FastpathCache.from_dynamic(stock)
    for batch in (2, 2, 3):
        for count in (20, 1, 3):
            for index in range(len(kinds)):
                new = states(device, batch, count, generator)
                for mine, theirs in zip(ours.update(*new, index), stock.update(*new, index)):
                    assert torch.equal(mine, theirs)
        assert_alike(ours, stock, f"batch {batch}")
        ours.reset()
        stock = dynamic(kinds)  # a new cache, because before 5.23 transformers' own reset() left zeros behind
        assert ours.get_seq_length() == 0


def test_crop_after_the_ring_wrapped(device):
    """Without past recording, a wrapped ring can be cropped exactly by up to the slack."""
    generator = torch.Generator().manual_seed(0)
    for removed in range(1, RING_SLACK + 2):
        stock = dynamic(("sliding",))
        ours = FastpathCache.from_dynamic(stock)
        full = states(device, 1, 100, generator)
        for position in range(100):
            ours.update(*(s[:, :, position : position + 1] for s in full), 0)
        ours.crop(-removed)
        stock.update(*(s[:, :, : 100 - removed] for s in full), 0)
        assert_alike(ours, stock, f"crop(-{removed})")
        new = states(device, 1, 3, generator)
        for mine, theirs in zip(ours.update(*new, 0), stock.update(*new, 0)):
            assert torch.equal(mine, theirs)


def test_crop_beyond_the_slack_is_refused(device):
    ours = FastpathCache.from_dynamic(dynamic(("sliding",)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        ours.update(*states(device, 1, 1, generator), 0)
    before = ours.layers[0].keys.clone()
    with pytest.raises(RuntimeError, match="at most 17.*activate_past_recording"):
        ours.crop(-RING_SLACK - 2)
    assert torch.equal(ours.layers[0].keys, before)
    with pytest.raises(ValueError, match="negative"):
        ours.crop(3)


def test_a_refused_crop_changes_no_layer(device):
    """Full layers come first, and must not be cropped if a sliding-window layer then cannot be cropped."""
    ours = FastpathCache.from_dynamic(dynamic(("full", "sliding")))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for index in range(2):
            ours.update(*states(device, 1, 1, generator), index)
    with pytest.raises(RuntimeError):
        ours.crop(-40)
    assert [layer.get_seq_length() for layer in ours.layers] == [60, 60]


@over_kinds
def test_capacity_stays_within_a_quarter(kinds, device):
    """With growth token by token, there are at most 1.25 x held + 64 slots at every step."""
    ours = FastpathCache.from_dynamic(dynamic(kinds))
    generator = torch.Generator().manual_seed(0)
    moved = 0
    for position in range(1, 600):
        for index in range(len(kinds)):
            before = ours.layers[index].k_buffer
            ours.update(*states(device, 1, 1, generator), index)
            layer = ours.layers[index]
            moved += before is not layer.k_buffer
            limit = 1.25 * position + 64 if not layer.is_sliding else WINDOW + RING_SLACK
            assert layer.capacity <= max(limit, 64 if not layer.is_sliding else 0)
    assert moved <= 16 * len(kinds), "the buffers moved too often"


def test_capacity_after_a_long_prompt(device):
    ours = FastpathCache.from_dynamic(dynamic(("full", "sliding")))
    generator = torch.Generator().manual_seed(0)
    for index in range(2):
        ours.update(*states(device, 1, 1000, generator), index)
    assert ours.layers[0].capacity <= 1.25 * 1000 + 64
    assert ours.layers[1].capacity == WINDOW + RING_SLACK


@over_kinds
def test_room_for_the_expected_length_is_made_at_once(kinds, device):
    ours = FastpathCache.from_dynamic(dynamic(kinds))
    ours.expect(1100)
    generator = torch.Generator().manual_seed(0)
    first = []
    for count in (1000, *[1] * 100, MAX_QUERY_LEN):
        for index in range(len(kinds)):
            ours.update(*states(device, 1, count, generator), index)
            if count == 1000:
                ours.layers[index].take()
                first.append(ours.layers[index].k_buffer)
    for layer, buffer in zip(ours.layers, first, strict=True):
        assert layer.k_buffer is buffer
        assert layer.capacity <= 1100 + MAX_QUERY_LEN + CAPACITY_STEP


def test_a_length_that_may_never_come_takes_a_quarter_at_most(device):
    ours = FastpathCache()
    ours.expect(10**6)
    generator = torch.Generator().manual_seed(0)
    for count in (1000, 300, 1):
        ours.update(*states(device, 1, count, generator), 0)
        held = ours.get_seq_length()
        assert ours.layers[0].capacity <= 1.25 * held + CAPACITY_STEP
    ours.expect(0)  # as a later call whose text is longer than it says
    ours.update(*states(device, 1, 400, generator), 0)
    assert ours.layers[0].capacity <= 1.25 * 1701 + CAPACITY_STEP


@pytest.mark.parametrize("options", ({}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 5}))
def test_buffers_never_move_while_a_prompt_is_continued(options, device, monkeypatch):
    """This holds within a quarter of the prompt, and in the turn after it."""
    _, ours = pair("llama", device)
    made, resize = [], FastpathLayer._resize
    monkeypatch.setattr(FastpathLayer, "_resize", lambda *arguments: (made.append(arguments), resize(*arguments))[1])
    options = dict(max_new_tokens=50, eos_token_id=None, return_dict_in_generate=True, **options)
    out = ours.generate(prompt(device, 1, 300), **options)
    layers = len(out[CACHE].layers)
    assert len(made) == layers
    if "num_beams" not in options:
        more = torch.cat((out.sequences, prompt(device, 1, 90)), dim=1)
        ours.generate(more, **{CACHE: out[CACHE]}, **options)
        assert len(made) == 2 * layers


@pytest.mark.parametrize("kv_dtype", (torch.float16, torch.bfloat16, torch.float32))
@over_kinds
def test_kv_dtype_rounds_what_is_stored(kinds, kv_dtype, device):
    """Attention sees float32 states that went through the storage type, from the first call on."""
    generator = torch.Generator().manual_seed(0)
    stock = dynamic(kinds)
    ours = FastpathCache.from_dynamic(stock, kv_dtype)
    for count in (5, 1, 20, 1, 1):
        for index in range(len(kinds)):
            new = states(device, 2, count, generator)
            rounded = [s.to(kv_dtype).float() for s in new]
            for mine, theirs in zip(ours.update(*new, index), stock.update(*rounded, index)):
                assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
    assert {layer.k_buffer.dtype for layer in ours.layers} == {kv_dtype}
    back = ours.to_dynamic()
    assert back.layers[0].keys.dtype == torch.float32


def test_refuses_unknown_kv_dtype():
    with pytest.raises(ValueError, match="kv_dtype is torch.int16"):
        FastpathCache(kv_dtype=torch.int16)


def test_refuses_gradients_clearly(device):
    """The class refuses gradients, and a model in training does."""
    cache = FastpathCache()
    keys = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not record gradients.*no_grad"):
        cache.update(keys, keys, 0)
    stock, _ = pair("llama", device)
    with pytest.raises(RuntimeError, match="does not record gradients"):
        stock(prompt(device), **{CACHE: FastpathCache(stock.config)}, use_cache=True)


def test_inference_mode_then_no_grad(device):
    """A cache that was filled in inference mode is written outside that mode, and the other way round."""
    generator = torch.Generator().manual_seed(0)
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        stock, cache = dynamic(("full", "sliding")), FastpathCache.from_dynamic(dynamic(("full", "sliding")))
        for mode, count in ((first, 5), (second, 1), (second, 30), (first, 1)):
            for index in range(2):
                new = states(device, 2, count, generator)
                with mode():
                    cache.update(*new, index)
                    stock.update(*new, index)
        with second():
            cache.reorder_cache(torch.tensor([1, 0], device=device))
            stock.reorder_cache(torch.tensor([1, 0], device=device))
        assert_alike(cache, stock, f"{first.__name__} then {second.__name__}")


def test_early_initialization(device):
    for config in (build("mistral").config, build("llama").config):
        cache, stock = FastpathCache(config), DynamicCache(config=config)
        for each in (cache, stock):
            each.early_initialization(2, HEADS, HEAD_DIM, torch.float32, device)
        assert all(layer.is_initialized for layer in cache.layers)
        assert_alike(cache, stock, "early initialization")
        new = states(device, 2, 20, torch.Generator().manual_seed(0))
        for mine, theirs in zip(cache.update(*new, 0), stock.update(*new, 0)):
            assert torch.equal(mine, theirs)


@over_kinds
def test_iteration_matches_dynamic_cache(kinds, device):
    generator = torch.Generator().manual_seed(0)
    stock = dynamic(kinds)
    ours = FastpathCache.from_dynamic(stock)
    for index in range(len(kinds)):
        new = states(device, 2, 20, generator)
        ours.update(*new, index)
        stock.update(*new, index)
    entries = list(ours), list(stock)
    assert len(entries[0]) == len(entries[1]) == len(kinds)
    for mine, theirs in zip(*entries):
        for a, b in zip(mine, theirs):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b.to(a.device))


def test_is_a_transformers_cache():
    cache = FastpathCache(build("mistral").config)
    assert isinstance(cache, Cache) and len(cache) == 2 and cache.is_sliding == [True, True]
    assert not cache.is_compileable
    assert (
        cache.get_seq_length() == 0
        and cache.get_max_length() == DynamicCache(config=build("mistral").config).get_max_length()
    )
    assert "FastpathLayer" in repr(cache)


def test_keys_of_a_full_layer_can_be_assigned(device):
    """The length follows, as in transformers' layers, to whose keys some users assign."""
    cache = FastpathCache()
    cache.update(*states(device, 1, 9, torch.Generator().manual_seed(0)), 0)
    cache.layers[0].keys = cache.layers[0].keys[:, :, :4]
    cache.layers[0].values = cache.layers[0].values[:, :, :4]
    assert cache.get_seq_length() == 4
    new = states(device, 1, 1, torch.Generator().manual_seed(1))
    assert cache.update(*new, 0)[0].shape[2] == 5
    assert torch.equal(cache.layers[0].values[:, :, 4:], new[1])


@torch.no_grad()
def test_first_states_of_a_prompt_wait_for_the_next(device):
    """They are not copied for a text of one token, unless others hold them, or more than they lies in their memory."""
    ours, stock = FastpathCache(), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    first = states(device, 2, 7, generator)
    with ours.reading_prompt():
        found = ours.update(*first, 0)
        whole = torch.cat(states(device, 2, 7, generator), dim=-1)
        ours.update(*whole.chunk(2, dim=-1), 1)
        alike = states(device, 2, 7, generator)[0]
        ours.update(alike, alike, 2)
        with torch.inference_mode():
            ours.update(*states(device, 2, 7, generator), 3)
    stock.update(*first, 0)
    ours.update(*states(device, 2, 7, generator), 4)
    layer, *others = ours.layers
    assert found[0] is first[0] and layer.k_buffer is None and ours.get_seq_length() == 7
    assert all(each.k_buffer is not None for each in others)
    assert layer.get_mask_sizes(1) == stock.layers[0].get_mask_sizes(1)
    layer.keys[0] += 1  # as stock, which hands out what it holds
    stock.layers[0].keys[0] += 1
    later = states(device, 2, 1, generator)
    for half, expected in zip(ours.update(*later, 0), stock.update(*later, 0)):
        assert torch.equal(half, expected)
    assert layer.k_buffer is not None and layer.capacity % CAPACITY_STEP == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ("glm4", "deepseek_v3"))
def test_a_prompt_alone_is_not_copied(name):
    """Of a prompt that the model's own modules read; the cache that is handed out can be edited and continued."""
    stock = small_model(name)
    ours, ids = hf_fastpath.patch(copy.deepcopy(stock), quiet=True), torch.randint(3, 90, (2, 9))
    options = dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    found = [model.generate(ids, max_new_tokens=1, **options) for model in (stock, ours)]
    assert all(layer.k_buffer is None for layer in found[1][CACHE].layers)
    texts = []
    for model, each in zip((stock, ours), found):
        each[CACHE].layers[0].keys.mul_(0.5)
        each[CACHE].crop(-2)
        more = torch.cat((each.sequences[:, :-3], ids), dim=1)
        texts.append(model.generate(more, max_new_tokens=6, **{CACHE: each[CACHE]}, **options).sequences)
    assert torch.equal(*texts)
