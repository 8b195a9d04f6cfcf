"""Several tokens at once behind others that the cache holds: turns of a chat, chunks of a prompt, drafts to verify."""

from __future__ import annotations

import pytest
import torch
from models import SHORT, WINDOW, counting, fresh, left_padded, pair, prompt
from parity import LogitRule, RoundingCache, both, float64_copy, walk

from hf_fastpath import FastpathCache, ops
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.lower import attend
from hf_fastpath.ops.kv_cache import KVCache, quantized
from hf_fastpath.patching import forwards

LENGTHS = (23, 5, 2, 16, 1, 9, 3)


@pytest.fixture
def steps_of(monkeypatch) -> list[int]:
    """Collect the number of tokens of every attention over a cache that the ops took."""
    lengths = []

    def noted(patch, part, x, args, kwargs):
        found = over_cache(patch, part, x, args, kwargs)
        if isinstance(found, forwards._OverCache):
            lengths.append(found.num_tokens)
        return found

    over_cache = forwards._over_cache
    monkeypatch.setattr(forwards, "_over_cache", noted)
    return lengths


def _texts(device, padded: bool, seed: int):
    sizes = device, 3, sum(LENGTHS), seed
    inputs = left_padded(*sizes) if padded else {"input_ids": prompt(*sizes)}
    return inputs["input_ids"], inputs.get("attention_mask")


@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "mistral", "gemma2", "gpt_oss", "phi3"))
def test_logits(architecture, padded, device, steps_of):
    """Logits are no further from float64 than stock's; the ops take several tokens over our cache if rows are few."""
    stock, ours = pair(architecture, device)
    ref, rule = float64_copy(stock), LogitRule()
    for seed in range(4):  # of one text, errors of float32 differ by a seventh either way
        text, mask = _texts(device, padded, seed)
        with counting(ours) as counts:
            found = walk(ours, text, LENGTHS, FastpathCache(ours.config), mask)
        expected = walk(stock, text, LENGTHS, RoundingCache(stock.config, torch.float32), mask)
        truth = walk(ref, text, LENGTHS, RoundingCache(ref.config, torch.float32), mask)
        real = torch.ones_like(text, dtype=torch.bool) if mask is None else mask.bool()
        rule.add(*(logits[real] for logits in (found, expected, truth)))
    rule.check(architecture)
    assert {5, 2, 3} <= set(steps_of)  # at most 15 rows
    if architecture not in ("mistral", "gemma2", "gpt_oss"):  # a full window comes with a mask for single tokens too
        assert not padded or set(counts.reasons) <= {"attention_mask"}
        assert padded or not counts.reasons


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "gemma2"))
def test_logits_of_many_rows(architecture, padded, dtype, cuda, steps_of):
    """With tensor cores, the ops take any number of rows."""
    stock, ours = pair(architecture, cuda, dtype)
    ref, rule = float64_copy(stock), LogitRule()
    for seed in range(2):
        text = prompt(cuda, 3, 400, seed=seed)
        mask = torch.ones_like(text)
        if padded:
            mask[1, :37] = 0
        lengths = (150, 100, 7, 120, 23)
        caches = [RoundingCache(model.config, dtype) for model in (stock, ref)]
        found = walk(ours, text, lengths, FastpathCache(ours.config), mask)
        expected, truth = (walk(model, text, lengths, cache, mask) for model, cache in zip((stock, ref), caches))
        rule.add(*(logits[mask.bool()] for logits in (found, expected, truth)))
    rule.check(f"{architecture} {dtype}")
    if architecture != "gemma2":  # its windows end inside
        assert {100, 7, 120, 23} <= set(steps_of)


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "mistral"))
def test_logits_of_many_rows_on_a_cpu(architecture, padded, dtype, steps_of):
    """The ops also take more rows than those of a token step, whichever attention they use."""
    cpu = torch.device("cpu")
    stock, ours = pair(architecture, cpu, dtype)
    ref, rule = float64_copy(stock), LogitRule()
    lengths = (130, 17, 3, 40, 16, 1) if architecture != "mistral" else (5, WINDOW + 3, 20)
    for seed in range(2):
        text = prompt(cpu, 2, sum(lengths), seed=seed)
        mask = torch.ones_like(text)
        if padded:
            mask[1, :9] = 0
        caches = [RoundingCache(model.config, dtype) for model in (stock, ref)]
        found = walk(ours, text, lengths, FastpathCache(ours.config), mask)
        expected, truth = (walk(model, text, lengths, cache, mask) for model, cache in zip((stock, ref), caches))
        rule.add(*(logits[mask.bool()] for logits in (found, expected, truth)))
    rule.check(f"{architecture} {dtype}", least_positions=100)
    if architecture != "mistral":  # its ring has no room for all of them
        assert {17, 40} <= set(steps_of)


def test_other_masks_are_stocks(device, steps_of):
    """A mask that hides more than padding is left to stock, and named."""
    stock, ours = fresh("llama", device)
    ids = prompt(device, 2, 20)
    found = []
    for model, cache in ((stock, None), (ours, FastpathCache(ours.config))):
        with torch.no_grad():
            past = model(ids[:, :12], use_cache=True, **{CACHE: cache})[CACHE]
            mask = torch.ones(2, 1, 8, 20, dtype=torch.bool, device=device).tril(12)
            mask[:, :, :, 5] = False
            with counting(ours) as counts:
                found.append(model(ids[:, 12:], attention_mask=mask, **{CACHE: past}).logits)
    assert counts.reasons == {"attention_mask": 1} and not steps_of
    torch.testing.assert_close(found[1], found[0])


def test_drafts_of_an_early_exit(device, steps_of):
    """The ops verify drafts that transformers' own loop makes, and the tokens are stock's."""
    stock, ours = fresh("llama", device)
    inputs = {"input_ids": prompt(device, 1, 6).repeat(1, 4)} | SHORT | {"do_sample": True}
    found, expected = both(stock, ours, **inputs, assistant_early_exit=1)
    assert torch.equal(found, expected)
    assert any(length > 1 for length in steps_of)


def test_the_table():
    """Tokens behind others never take PyTorch's attention with a mask if a kernel can take them."""
    for rows in (1, 64, 65, 10000):
        assert attend.route_of(rows, 5, is_plain=False, cuts=True, fits=True, hopper=False) == "append"
        assert attend.route_of(rows, 5, is_plain=True, cuts=False, fits=True, hopper=True) == "append"
        assert attend.route_of(rows, 5, is_plain=True, cuts=False, fits=False, hopper=True) == "sdpa"
        assert attend.route_of(rows, 5, is_plain=False, cuts=True, fits=False, hopper=True) == "masked"
        assert attend.route_of(rows, 0, is_plain=True, cuts=False, fits=True, hopper=True) == "append"
        assert attend.route_of(rows, 0, is_plain=True, cuts=False, fits=True, hopper=False) == "sdpa"
    assert attend.route_of(64, 5, is_plain=True, cuts=False, fits=True, hopper=False) == "append"
    assert attend.route_of(65, 5, is_plain=True, cuts=False, fits=True, hopper=False) == "flash"


@pytest.mark.parametrize("kv", (None, torch.int8), ids=("plain", "int8"))
@pytest.mark.parametrize("window", (0, 100))
@pytest.mark.parametrize("past, tokens", ((320, 37), (50, 307)), ids=("few", "many"))
@pytest.mark.parametrize("changes", ("sinks", "softcap", "slopes", "nothing"))
def test_attention_in_pieces(changes, past, tokens, window, kv):
    """Sixteen tokens at a time, or parts of the keys with a mask, give the same as all at once."""
    length = past + tokens
    lengths, starts = torch.tensor([length] * 2, dtype=torch.int32), torch.tensor([0, 30], dtype=torch.int32)
    q = torch.randn(2, tokens, 4, 32)
    caches, scales = [torch.randn(2, 2, length + 5, 32) for _ in range(2)], ()
    if kv is not None:
        caches, scales = zip(*(quantized(cache, kv) for cache in caches))
    attention = attend.Attention(tokens, length, lengths, starts)
    how = dict(softcap=0.0, sinks=None, slopes=None)
    values = {"sinks": torch.randn(4), "softcap": 0.8, "slopes": 2.0 ** -torch.arange(1, 5)}
    how |= {name: value for name, value in values.items() if name == changes}
    found = attention.over(q, KVCache(*caches, *scales), 0.2, window, **how)
    k_scales, v_scales = scales or (None, None)
    expected = ops.decode_attention.reference(
        q, *caches, lengths, starts, 0.2, window, **how, k_scales=k_scales, v_scales=v_scales
    )
    real = torch.arange(past, length) >= starts[:, None]  # nobody reads what padding sees
    torch.testing.assert_close(found[real], expected[real])


def test_the_table_of_a_cpu():
    """A call that only one of the two can take goes there; few tokens behind many go to the cache's own kernel."""
    for tokens, past in ((17, 0), (64, 511), (65, 10000), (500, 0)):
        assert attend.route_on_cpu(tokens, past, cuts=False, changes=False) == "sdpa"
        for how in (dict(cuts=True, changes=False), dict(cuts=False, changes=True)):
            assert attend.route_on_cpu(tokens, past, **how) == ("decode" if tokens <= 64 else "masked")
    assert attend.route_on_cpu(64, 512, cuts=False, changes=False) == "decode"


# ---- masks --------------------------------------------------------------------------------------------------------


def made(device, starts, past: int, query_len: int, window: int | None = None) -> torch.Tensor:
    """Make the mask of transformers, over the keys that the cache returns."""
    held = past if window is None else min(past, window - 1)
    positions = torch.arange(past - held, past + query_len, device=device)
    queries = positions[-query_len:, None]
    seen = (positions <= queries) & (positions >= torch.tensor(starts, device=device)[:, None, None])
    if window is not None:
        seen &= positions > queries - window
    return seen[:, None]


@pytest.mark.parametrize("window", (None, 4, WINDOW, 100))
@pytest.mark.parametrize("starts", ((0,), (0, 0), (3, 0), (12, 7)))
def test_plain_masks(starts, window, device):
    for past, query_len in ((12, 1), (12, 5), (40, 3)):
        found = attend.plain_mask(made(device, starts, past, query_len, window), past, query_len, window)
        oldest = 0 if window is None else max(0, past - window + 1)
        matters = [start if start > oldest else oldest for start in starts]
        if max(starts) <= oldest:
            assert found is not None and found.starts is None
        else:
            assert found is not None and found.starts.dtype == torch.int32
            assert [max(each, oldest) for each in found.starts.tolist()] == matters


def test_masks_that_are_not_plain(device):
    plain = made(device, (0, 2), 12, 5)
    for change in (lambda m: m.fill_(True), lambda m: m[1, 0, 2, 6].fill_(False), lambda m: m[0, 0, 0].fill_(False)):
        other = plain.clone()
        change(other)
        assert attend.plain_mask(other, 12, 5, None) is None
    assert attend.plain_mask(plain.float(), 12, 5, None) is None and attend.plain_mask(plain.int(), 12, 5, None) is None
    assert attend.plain_mask(plain, 11, 5, None) is None
    assert attend.plain_mask(plain, 12, 5, 100) is not None and attend.plain_mask(plain, 12, 5, 6) is None


def test_additive_masks(device):
    plain = made(device, (0, 2), 12, 5)
    added = torch.zeros(plain.shape, device=device).masked_fill(~plain, torch.finfo(torch.float32).min)
    assert attend.plain_mask(added, 12, 5, None).starts.tolist() == [0, 2]
    assert attend.plain_mask(added / 2, 12, 5, None) is None
    added[0, 0, 1, 3] = -1.0
    assert attend.plain_mask(added, 12, 5, None) is None


def test_masks_are_compared_once(device, monkeypatch):
    """The layers of a forward share the answer; a mask that was written to counts as a new mask."""
    compared, compare = [], attend._compare

    def noted(*arguments):
        compared.append(arguments)
        return compare(*arguments)

    monkeypatch.setattr(attend, "_compare", noted)
    mask = made(device, (0, 2), 12, 5)
    first = attend.plain_mask(mask, 12, 5, None)
    assert attend.plain_mask(mask, 12, 5, None) is first and len(compared) == 1
    mask[1, 0, 2, 6] = False
    assert attend.plain_mask(mask, 12, 5, None) is None and len(compared) == 2
