"""patch(page_size=...) and FastpathCache(page_size=...) give stock's tokens; sequences and copies share pages."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from models import WINDOW, build, heldout_tokens, left_padded, prompt, require_native, trained
from parity import assert_same_tokens, both
from test_cache import Walk, assert_alike, dynamic, over_kinds, random_operations, states

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.cache.paged_layer import PagedLayer
from hf_fastpath.cache.pages import PageTable
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans import decode_plan as plan_module

SIZE = 16
#: separate and joined projections, norms of heads, soft caps and windows beside full layers, sinks, heads of 40
FAMILIES = ("gpt2", "llama", "mistral", "phi3", "qwen3", "gemma2", "gpt_oss", "falcon")
GREEDY = dict(max_new_tokens=40, do_sample=False)


def paged(stock, page_size: int = SIZE, **options):
    return hf_fastpath.patch(copy.deepcopy(stock), page_size=page_size, quiet=True, **options)


def pages_of(cache: FastpathCache) -> tuple[int, int]:
    """Return the number of different pages of all sequences, and the number with shared pages counted each time."""
    (table,) = cache.tables.tables.values()
    return len({page for row in table.rows for page in row}), sum(map(len, table.rows))


# ---- the cache ------------------------------------------------------------------------------------------------


class PagedWalk(Walk):
    """A random walk whose copies share pages, and keep what they held."""

    def __init__(self, kinds, device, seed: int):
        super().__init__(kinds, device, seed)
        self.ours = FastpathCache.from_dynamic(self.stock, page_size=SIZE)
        self.kept: list[tuple[FastpathCache, object]] = []

    def copies(self) -> str:
        kept = self.ours
        self.ours = copy.deepcopy(kept)
        if self.random.random() < 0.5:  # either cache goes on
            self.ours, kept = kept, self.ours
        self.kept.append((kept, copy.deepcopy(self.stock)))
        for ours, stock in self.kept:
            assert_alike(ours, stock, "a copy")
        return "deepcopy"

    def converts(self) -> str:
        if self.recording:
            return "nothing"
        self.ours = FastpathCache.from_dynamic(self.ours.to_dynamic(), page_size=SIZE)
        return "to_dynamic, from_dynamic"


@over_kinds
@pytest.mark.parametrize("seed", range(8))
def test_random_operations_match_dynamic_cache(kinds, seed, device):
    walk = PagedWalk(kinds, device, seed)
    random_operations(walk)
    for ours, stock in walk.kept:
        assert_alike(ours, stock, "a copy")


def test_every_page_is_counted_and_given_back(device):
    cache = FastpathCache.from_dynamic(dynamic(("full", "full")), page_size=SIZE)
    generator, counts = torch.Generator().manual_seed(0), cache.page_counts

    def update(count: int, batch: int) -> None:
        new = [states(device, batch, count, generator) for _ in range(2)]
        for index in range(2):
            cache.update(*new[index], index)

    update(40, 1)
    assert (counts.used, counts.unshared) == pages_of(cache) == (3, 3)
    cache.batch_repeat_interleave(4)
    assert (counts.used, counts.unshared) == pages_of(cache) == (3, 12)
    update(1, 4)  # three of four sequences copy the page that is half full
    assert (counts.used, counts.unshared) == pages_of(cache) == (6, 12)
    update(7, 4)
    assert counts.used == 6
    update(1, 4)  # each sequence takes one more page
    assert (counts.used, counts.unshared) == pages_of(cache) == (10, 16)
    cache.reorder_cache(torch.tensor([2, 2, 0, 2], device=device))
    assert (counts.used, counts.unshared) == pages_of(cache) == (2 + 2 * 2, 16)
    cache.crop(-2)
    assert (counts.used, counts.unshared) == pages_of(cache) == (4, 12)
    other = copy.deepcopy(cache)
    assert (counts.used, counts.unshared) == (4, 24) and other.layers[0].k_buffer is cache.layers[0].k_buffer
    del other
    gc.collect()
    assert (counts.used, counts.unshared) == (4, 12)
    assert counts.most_used == 10 and counts.allocated >= 10
    cache.reset()
    assert (counts.used, counts.unshared) == (0, 0)


def test_memory_grows_by_a_quarter_and_only_when_all_pages_are_taken(device):
    cache = FastpathCache.from_dynamic(dynamic(("full",)), page_size=SIZE)
    generator = torch.Generator().manual_seed(0)
    moved = 0
    for position in range(1, 1000):
        before = cache.layers[0].k_buffer
        cache.update(*states(device, 1, 1, generator), 0)
        moved += cache.layers[0].k_buffer is not before
        assert cache.page_counts.allocated <= 1.25 * position / SIZE + 2
    assert moved <= 20


def test_reset_starts_anew_with_any_batch_size(device):
    generator = torch.Generator().manual_seed(0)
    cache = FastpathCache.from_dynamic(dynamic(("full", "sliding")), page_size=SIZE)
    for batch in (2, 3, 1):
        stock = dynamic(("full", "sliding"))
        for count in (20, 1, 3):
            for index in range(2):
                new = states(device, batch, count, generator)
                for mine, theirs in zip(cache.update(*new, index), stock.update(*new, index)):
                    assert torch.equal(mine, theirs)
        assert_alike(cache, stock, f"batch {batch}")
        cache.reset()
        assert cache.page_counts.used == 0


def test_pickles_and_refusals(device):
    cache = FastpathCache.from_dynamic(dynamic(("full",)), page_size=SIZE)
    cache.update(*states(device, 2, 20, torch.Generator().manual_seed(0)), 0)
    loaded = pickle.loads(pickle.dumps(cache))
    assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys) and loaded.page_size == SIZE
    assert isinstance(loaded.layers[0], PagedLayer) and "2 pages of 16" in repr(loaded)
    for bad in (15, 8, 24, 0, True, "16"):
        with pytest.raises(ValueError, match="page_size"):
            FastpathCache(page_size=bad)
    with pytest.raises(ValueError, match="int8"):
        FastpathCache(page_size=SIZE, kv_dtype=torch.int8)
    with pytest.raises(ValueError, match="page_size"):
        hf_fastpath.patch(build("llama"), page_size=12)
    with pytest.raises(NotImplementedError, match="on the cache"):
        cache.layers[0].reorder_cache(torch.tensor([1, 0]))


# ---- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_stocks(family, device):
    """Greedy search, sampling, and several sequences of a prompt go past the windows' edge."""
    stock = build(family).to(device)
    ours = paged(stock)
    given = left_padded(device, 3, WINDOW + 5) if family != "gemma2" else dict(input_ids=prompt(device, 3, WINDOW + 5))
    for options in (
        GREEDY,
        dict(do_sample=True, max_new_tokens=40),
        dict(do_sample=True, max_new_tokens=20, num_return_sequences=3, top_k=9),
        GREEDY | dict(prefill_chunk_size=7),
    ):
        found, expected = both(stock, ours, **given, **options)
        assert_same_tokens(found, expected, stock)
    stats = hf_fastpath.report(ours).stats
    assert stats["fallback_tokens"] == 0 and stats["fast_tokens"] > 0
    has_pages = family != "mistral"  # every layer of Mistral has a window
    assert (stats["pages"]["most_used"] > 0) == has_pages
    assert ("positions used" in str(hf_fastpath.report(ours))) == has_pages
    assert ("window_not_paged" in stats["reasons"]) == (family in ("mistral", "gemma2", "gpt_oss"))


@pytest.mark.parametrize("kv_dtype", ("auto", torch.float16))
def test_loops_of_the_trained_model(kv_dtype, device):
    """Beams, prompt lookup, an assistant, a chat over a kept cache and copies of a prefix give the same tokens as
    without pages."""
    stock, _ = trained(device)
    ours, ids = paged(stock, kv_dtype=kv_dtype), heldout_tokens(70).to(device)
    unpaged = hf_fastpath.patch(copy.deepcopy(stock), kv_dtype=kv_dtype, quiet=True)
    plain = ours.generate(ids, **GREEDY)
    if kv_dtype == "auto":
        assert torch.equal(plain, stock.generate(ids, **GREEDY))
    assert torch.equal(plain, unpaged.generate(ids, **GREEDY))
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": copy.deepcopy(stock)}):
        assert torch.equal(ours.generate(ids, **options, **GREEDY), plain), options
    for options in (dict(num_beams=4), dict(num_beams=4, num_return_sequences=2, do_sample=True)):
        found, expected = both(unpaged, ours, inputs=ids.view(2, 35), **GREEDY | options)
        assert torch.equal(found, expected)
    prefix = ours.generate(ids[:, :50], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)[CACHE]
    for _ in range(2):
        assert torch.equal(ours.generate(ids, **{CACHE: copy.deepcopy(prefix)}, **GREEDY), plain)
    cache = FastpathCache(ours.config, None if kv_dtype == "auto" else kv_dtype, SIZE)
    first = ours.generate(ids, **{CACHE: cache}, max_new_tokens=15, do_sample=False)
    assert torch.equal(ours.generate(first, **{CACHE: cache}, max_new_tokens=25, do_sample=False), plain)


def test_packed_weights(device):
    stock, _ = trained(device)
    ids = heldout_tokens(40).to(device)
    models = paged(stock, weights="int8"), hf_fastpath.patch(copy.deepcopy(stock), weights="int8", quiet=True)
    found, expected = (model.generate(ids, **GREEDY) for model in models)
    assert torch.equal(found, expected)


def test_verify(device):
    stock, _ = trained(device)
    assert hf_fastpath.verify(paged(stock), heldout_tokens(40).to(device), max_new_tokens=20).ok


# ---- sharing ----------------------------------------------------------------------------------------------------


def test_sequences_of_a_prompt_share_its_pages(device):
    """The prompt is read once, and each sequence adds its own pages."""
    ours = paged(build("llama").to(device))
    given = dict(do_sample=True, max_new_tokens=33, return_dict_in_generate=True)  # 32 of them are in the cache
    ours.generate(prompt(device, 2, 100), num_return_sequences=4, **given)
    pages = hf_fastpath.report(ours).stats["pages"]
    assert pages["most_used"] == 2 * 6 + 8 * 3 and pages["most_unshared"] == 8 * 9


def test_beams_share_their_past(device):
    """The common past of beams is stored once; the cache of a wide search holds little more than one beam's."""
    ours = paged(build("llama").to(device))
    out = ours.generate(prompt(device, 1, 320), num_beams=4, return_dict_in_generate=True, **GREEDY)
    used, unshared = pages_of(out[CACHE])
    assert unshared == 4 * 23 and used <= 20 + 4 * 3


def test_copies_of_a_prefix_share_it(device):
    ours = paged(build("llama").to(device))
    text = prompt(device, 1, 320)
    out = ours.generate(text, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    prefix, copies = out[CACHE], []
    for seed in range(4):
        copies.append(copy.deepcopy(prefix))
        turn = torch.cat((text, prompt(device, 1, 9, seed=seed)), dim=1)
        ours.generate(turn, **{CACHE: copies[-1]}, max_new_tokens=8, do_sample=False)
    counts = prefix.page_counts
    assert counts.unshared == 20 + 4 * 21 and counts.used == 20 + 4


# ---- plans ------------------------------------------------------------------------------------------------------


def test_one_plan_serves_all_tables(device, monkeypatch):
    """Pages are given between the steps: one plan, and on CUDA one capture, serves every prompt, growth and copy."""
    require_native(device)
    captured, given = [], []
    capture, reserve = plan_module.capture, PageTable.reserve
    monkeypatch.setattr(plan_module, "capture", lambda *args: (captured.append(args), capture(*args))[1])
    monkeypatch.setattr(PageTable, "reserve", lambda *args: (given.append(args), reserve(*args))[1])
    stock = build("llama").to(device)
    ours = paged(stock)
    for length in (5, 40, 200):
        ids = prompt(device, 2, length)
        found, expected = (model.generate(ids, max_new_tokens=150, do_sample=False) for model in (ours, stock))
        assert_same_tokens(found, expected, stock)
    assert len(vars(ours)["_hf_fastpath"].plans) == 1 and given
    assert len(captured) == (device.type == "cuda")
    other = FastpathCache(ours.config, page_size=4 * SIZE)  # other pages need a plan of their own
    assert_same_tokens(ours.generate(ids, **{CACHE: other}, **GREEDY), stock.generate(ids, **GREEDY), stock)
    assert len(vars(ours)["_hf_fastpath"].plans) == 2
