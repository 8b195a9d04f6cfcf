"""patch(prefix_cache=...): a prompt that begins as an earlier text is read from there on; tokens are stock's."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import causal_lm_types
import pytest
import torch
from models import CPU, build, require_native, skip_if_cache_is_named_otherwise
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_fastpath
from hf_fastpath.cache.fastpath_cache import FastpathCache
from hf_fastpath.cache.prefixes import PAGE, PrefixStore
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import prefixes as prefixes_module
from hf_fastpath.decode.state.weights_sum import PendingSum, weights_sum
from hf_fastpath.patching.state import state_of

#: of each test every other case; all of them with ``--full``
pytestmark = pytest.mark.every(2)

#: whole layers, learned positions, windows, windows and states, latents, slopes, states that stock's forward does not
#: go on from, and some that it does
LISTED = ("llama", "gpt2", "gemma2", "mistral", "gpt_oss")
RECORDED = ("glm4", "bloom", "deepseek_v3", "lfm2", "falcon_h1", "qwen3_next", "granitemoehybrid", "mamba", "mamba2")
NEW = 8


def pair(name: str, device: torch.device = CPU, **options) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (stock, patched): the same random model twice."""
    require_native(device)
    skip_if_cache_is_named_otherwise(name)
    stock = (build(name) if name in LISTED else causal_lm_types.small_model(name)).to(device)
    options = {"prefix_cache": "50MB"} | options
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)


def texts(*lengths: int, seed: int = 0, vocab: int = 90) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (1, length), generator=generator) for length in lengths]


def answer(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **given | options)


def known(model: PreTrainedModel) -> int:
    return hf_fastpath.report(model).stats["prefixes"]["known_tokens"]


def kept(model: PreTrainedModel) -> int:
    return hf_fastpath.report(model).stats["prefixes"]["kept_bytes"]


def not_read(stock: PreTrainedModel, ours: PreTrainedModel, ids: torch.Tensor, **options) -> int:
    """Compare an answer with stock's; return how many tokens of the prompt were not read again."""
    before, ids = known(ours), ids.to(stock.device)
    assert torch.equal(answer(ours, ids, **options), answer(stock, ids, **options))
    return known(ours) - before


# ---- chats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*LISTED, *RECORDED))
def test_a_chat_that_sends_its_whole_text(name, device):
    stock, ours = pair(name, device)
    ids, new, newer = (each.to(device) for each in texts(70, 9, 5))
    assert not_read(stock, ours, ids) == 0
    for turn in (new, newer):
        held = len(answer(stock, ids)[0]) - 1
        ids = torch.cat((answer(stock, ids), turn), dim=1)
        assert not_read(stock, ours, ids) in (held, held // PAGE * PAGE)
    assert hf_fastpath.report(ours).stats["fallback_tokens"] == 0


@pytest.mark.parametrize("options", ({"page_size": 16}, {"kv_dtype": "int8"}, {"kv_dtype": torch.float16}), ids=str)
@pytest.mark.parametrize("name", ("llama", "gemma2", "glm4"))
def test_every_way_to_store_keys_and_values(name, options, device):
    plain = pair(name, device, prefix_cache=None, **options)[1]
    ours = pair(name, device, **options)[1]
    ids = texts(70)[0].to(device)
    for turn in texts(9, 5, 3):
        assert torch.equal(answer(ours, ids), answer(plain, ids))
        ids = torch.cat((answer(plain, ids), turn.to(device)), dim=1)
    assert known(ours) >= 2 * PAGE


@pytest.mark.parametrize("name", ("llama", "gemma2", "lfm2", "granitemoehybrid"))
def test_a_beginning_that_texts_share(name, device):
    """Layers with windows or states keep the end of the shared part once a second text has shown where it is."""
    stock, ours = pair(name, device)
    system, *others = texts(2 * PAGE + 5, 20, 21, 22)
    found = [not_read(stock, ours, torch.cat((system, each), dim=1)) for each in others]
    assert found[0] == 0 and found[2] >= 2 * PAGE


def test_a_shorter_text_and_the_same_again(device):
    stock, ours = pair("llama", device)
    ids = texts(3 * PAGE)[0]
    assert not_read(stock, ours, ids) == 0
    assert not_read(stock, ours, ids) == 3 * PAGE - 1  # the last token gives the logits
    assert not_read(stock, ours, ids[:, : PAGE + 3]) == PAGE
    assert not_read(stock, ours, ids[:, : PAGE - 3]) == 0


# ---- many sequences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_batches_with_padding(name, device):
    stock, ours = pair(name, device)
    shared, first, second, third = texts(2 * PAGE, 3, 9, 14)
    rows = [torch.cat((shared, each), dim=1)[0] for each in (first, second, third)]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows]).to(device)
    mask = (torch.arange(width) >= torch.tensor([[width - len(row)] for row in rows])).long().to(device)
    assert not_read(stock, ours, ids, attention_mask=mask) == 0
    # all rows read as many columns as the one with the least padding has to
    assert not_read(stock, ours, ids, attention_mask=mask) > 3 * PAGE
    assert not_read(stock, ours, rows[1][None]) > PAGE


@pytest.mark.parametrize("name", ("llama", "mistral", "lfm2"))
def test_sequences_of_one_prompt(name, device):
    stock, ours = pair(name, device)
    ids = texts(2 * PAGE + 1)[0].to(device)
    options = dict(do_sample=True, num_return_sequences=3, temperature=1.3, max_new_tokens=6)
    for _ in range(2):
        for model in (stock, ours):
            torch.manual_seed(3)
            found = answer(model, ids, **options)
            if model is stock:
                expected = found
        assert torch.equal(found, expected)
    assert known(ours) >= 2 * PAGE


# ---- who may change what was kept ---------------------------------------------------------------------------------


def _one_element(model: PreTrainedModel) -> None:
    next(model.parameters()).data[7, 3] += 0.5


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def _loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: each * 1.2 for name, each in model.state_dict().items()})


def _swapped(model: PreTrainedModel) -> None:
    weight = next(model.parameters()).data
    weight[[5, 9]] = weight[[9, 5]]


def _stepped(model: PreTrainedModel) -> None:
    for each in model.parameters():
        each.grad = torch.full_like(each, 0.01)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def _replaced(model: PreTrainedModel) -> None:
    weight = model.get_input_embeddings().weight
    model.get_input_embeddings().weight = torch.nn.Parameter(weight * 1.1, requires_grad=False)


@pytest.mark.parametrize("change", (_one_element, _in_place, _loaded, _swapped, _stepped, _replaced))
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_what_other_weights_have_read_is_not_used(name, change, device):
    stock, ours = pair(name, device)
    ids = texts(2 * PAGE)[0]
    not_read(stock, ours, ids)
    for model in (stock, ours):
        change(model)
    assert not_read(stock, ours, ids) == 0
    assert not_read(stock, ours, ids) == 2 * PAGE - 1


def test_texts_are_read_while_weights_are_summed(device, monkeypatch):
    """The newest weights are taken for those of now, and what was read so is read again if they are not; then nothing
    is taken for granted until they have stayed."""
    read = []
    before = prefixes_module.PrefixCall._read_meanwhile
    monkeypatch.setattr(PendingSum, "is_done", lambda self: False)
    monkeypatch.setattr(
        prefixes_module.PrefixCall, "_read_meanwhile", lambda *given: (read.append(before(*given)), read[-1])[1]
    )
    stock, ours = pair("llama", device)
    ids = texts(2 * PAGE)[0]
    assert not_read(stock, ours, ids) == 0 and read.pop() is None
    assert not_read(stock, ours, ids) == 2 * PAGE - 1 and read.pop() is not None
    for _ in range(2):
        for model in (stock, ours):
            _in_place(model)
        assert not_read(stock, ours, ids) == 0 and read.pop() is None
    assert not_read(stock, ours, ids) == 2 * PAGE - 1 and read.pop() is None
    assert not_read(stock, ours, ids) == 2 * PAGE - 1 and read.pop() is not None


def test_weights_that_come_back(device):
    stock, ours = pair("llama", device)
    ids, weight = texts(2 * PAGE)[0], next(ours.parameters())
    not_read(stock, ours, ids)
    before = weight.data.clone()
    weight.data.mul_(2)
    answer(ours, ids.to(device))
    weight.data.copy_(before)
    assert not_read(stock, ours, ids) == 2 * PAGE - 1


def test_a_value_of_a_module(device):
    stock, ours = pair("glm4", device)
    ids = texts(2 * PAGE)[0]
    not_read(stock, ours, ids)
    for model in (stock, ours):
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.5
    assert not_read(stock, ours, ids) == 0


def test_adapters(device):
    peft = pytest.importorskip("peft")
    stock, ours = (peft.get_peft_model(build("llama").to(device), peft.LoraConfig(r=4)) for _ in range(2))
    for model in (stock, ours):
        model.add_adapter("other", peft.LoraConfig(r=4))
        model.set_adapter("other")
        model.set_adapter("default")  # from now on each module has a list of its own
        torch.manual_seed(5)
        for name, each in model.named_parameters():
            if "lora_" in name:
                each.data.normal_(std=0.2)
    hf_fastpath.patch(ours, prefix_cache="50MB", quiet=True)
    inner, ids = ours.get_base_model(), texts(2 * PAGE)[0].to(device)

    def read_again() -> int:
        before = known(inner)
        given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(ours.generate(**given), stock.generate(**given))
        return known(inner) - before

    assert read_again() == 0
    for model in (stock, ours):
        model.set_adapter("other")
    assert read_again() == 0
    for model in (stock, ours):
        model.set_adapter("default")
    assert read_again() > 0
    for model in (stock, ours):
        model.merge_adapter()
    assert read_again() == 0


def test_a_callback_that_changes_weights(device):
    """What was read before the change is of other weights."""
    ours = pair("llama", device)[1]
    weight, ids = next(ours.parameters()), texts(2 * PAGE)[0].to(device)

    class Changes(LogitsProcessor):
        def __call__(self, tokens, scores):
            weight.data.mul_(1.01)
            return scores

    answer(ours, ids, logits_processor=LogitsProcessorList([Changes()]))
    answer(ours, ids)
    assert known(ours) == 0 and kept(ours) > 0


def test_sums_of_weights():
    """Every byte counts, and where it is."""
    tensors = [torch.randn(size) for size in ((3,), (1000, 1000), (7, 5))] + [torch.ones(3, dtype=torch.int8)]
    first = weights_sum(tensors)
    assert weights_sum([each.clone() for each in tensors]) == first
    for tensor in tensors:
        flat = tensor.view(-1)
        for place in {0, len(flat) // 2, len(flat) - 1}:
            before = flat[place].clone()
            flat[place] += 1
            assert weights_sum(tensors) != first
            flat[place] = before
    rows = tensors[1]
    for one, other in ((0, 1), (3, 800)):
        rows[[one, other]] = rows[[other, one]]
        assert weights_sum(tensors) != first
        rows[[one, other]] = rows[[other, one]]
    assert weights_sum(tensors) == first
    assert weights_sum([*tensors, torch.empty(5, device="meta")]) == first


# ---- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("llama", "gemma2", "lfm2"))
def test_the_limit(name):
    stock, ours = pair(name)
    for ids in texts(*[3 * PAGE] * 3):
        not_read(stock, ours, ids)
    limit = kept(ours) // 2
    stock, ours = pair(name, prefix_cache=limit)
    for seed in range(6):
        ids = texts(3 * PAGE, seed=seed)[0]
        assert not_read(stock, ours, ids) == 0
        assert kept(ours) <= limit
        assert not_read(stock, ours, ids) > 0, "the newest text is there"


def test_a_limit_that_a_text_does_not_fit_into():
    stock, ours = pair("llama", prefix_cache=1)
    ids = texts(3 * PAGE)[0]
    assert [not_read(stock, ours, ids) for _ in range(2)] == [0, 0] and kept(ours) == 0


def test_what_is_used_stays():
    """Of texts that share a beginning, the beginning goes last."""
    ours = pair("llama", prefix_cache=None)[1]
    cache = FastpathCache(ours.config)
    shared, *ends = (each[0].tolist() for each in texts(PAGE, PAGE, PAGE, PAGE))
    with torch.no_grad():
        ours(texts(2 * PAGE)[0], use_cache=True, **{CACHE: cache})
    store = PrefixStore(10**9)
    store.keep("guard", shared, cache, 0, 0)
    store = PrefixStore(3 * store.num_bytes)
    cache.take()
    for end in ends:
        store.keep("guard", shared + end, cache, 0, 0)
        store.find("guard", shared + ends[0], 2 * PAGE, False)
    counts = [store.find("guard", shared + end, 2 * PAGE, False).count for end in ends]
    assert counts == [2 * PAGE, PAGE, 2 * PAGE]
    assert store.find("another", shared, PAGE, False).count == 0
    assert store.num_bytes <= store.limit
    store.clear()
    assert store.find("guard", shared, PAGE, False).count == store.num_bytes == 0


def test_what_the_caller_gets_is_the_callers_own(device):
    stock, ours = pair("mistral", device)
    ids = texts(2 * PAGE)[0].to(device)
    for _ in range(2):
        cache = answer(ours, ids, return_dict_in_generate=True)[CACHE]
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
    assert not_read(stock, ours, ids) == 2 * PAGE


def test_in_and_out_of_inference_mode(device):
    for name in ("llama", "lfm2"):
        stock, ours = pair(name, device)
        ids = texts(2 * PAGE)[0]
        for mode in (True, False, True, False):
            with torch.inference_mode(mode):
                not_read(stock, ours, ids)
        assert known(ours) > 3 * PAGE


def test_unpatch_forgets():
    ours = pair("llama")[1]
    answer(ours, texts(2 * PAGE)[0])
    prefixes = state_of(ours).prefixes
    assert prefixes.store.num_bytes > 0
    hf_fastpath.unpatch(ours)
    assert prefixes.store.num_bytes == 0


def test_lack_of_memory(monkeypatch):
    """The call itself is done."""
    stock, ours = pair("llama")
    ids = texts(2 * PAGE)[0]

    def fail(*given):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "keep", fail)
        not_read(stock, ours, ids)
    assert [not_read(stock, ours, ids) for _ in range(2)] == [0, 2 * PAGE - 1]


# ---- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("llama", "lfm2"))
def test_positions_of_the_users_own(name):
    """Keys that stand elsewhere are others."""
    stock, ours = pair(name)
    ids = texts(2 * PAGE)[0]
    not_read(stock, ours, ids)
    positions = torch.arange(5, 5 + 2 * PAGE)[None]
    assert not_read(stock, ours, ids, position_ids=positions) == 0
    assert not_read(stock, ours, ids) > PAGE


def test_a_cache_of_the_users_own():
    stock, ours = pair("llama")
    ids, more = texts(2 * PAGE, 9)
    not_read(stock, ours, ids)
    cache = FastpathCache(ours.config)
    found = answer(ours, ids, **{CACHE: cache})
    assert torch.equal(found, answer(stock, ids)) and known(ours) == 2 * PAGE - 1
    text = torch.cat((found, more), dim=1)
    assert torch.equal(answer(ours, text, **{CACHE: cache}), answer(stock, text))


@pytest.mark.parametrize("options", ({"prompt_lookup_num_tokens": 3}, {"num_beams": 2}, {"prefill_chunk_size": 7}))
def test_other_ways_to_decode(options, device):
    for name in ("llama", "glm4"):
        stock, ours = pair(name, device)
        ids = texts(2 * PAGE)[0]
        found = [not_read(stock, ours, ids, **options) for _ in range(2)]
        assert found == [0, 0 if "num_beams" in options else 2 * PAGE - 1]


@pytest.mark.parametrize("name", ("llama", "gemma2", "glm4", "lfm2"))
def test_scores_of_a_known_text(name, device):
    stock, ours = pair(name, device)
    ids = texts(2 * PAGE + 7)[0].to(device)
    asked = dict(output_logits=True, return_dict_in_generate=True)
    expected = torch.stack(answer(stock, ids, **asked).logits)
    for _ in range(2):
        found = torch.stack(answer(ours, ids, **asked).logits)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert known(ours) > PAGE


def test_states_that_stock_does_not_go_on_from(monkeypatch):
    """A rest is then read token by token, or the whole text again."""
    stock, ours = pair("mamba")
    calls = []
    by_steps = prefixes_module.PrefixCall._by_steps
    monkeypatch.setattr(
        prefixes_module.PrefixCall,
        "_by_steps",
        lambda self, *places: (calls.append(places), by_steps(self, *places))[1],
    )
    ids, few, many = texts(3 * PAGE, 5, 40)
    not_read(stock, ours, ids)
    assert not_read(stock, ours, torch.cat((ids, few), dim=1)) == 3 * PAGE
    assert calls == [(3 * PAGE, 3 * PAGE + 5)]
    assert not_read(stock, ours, torch.cat((ids, many), dim=1)) == 0
    assert len(calls) == 1


def test_threads():
    stock, ours = pair("llama")
    system, *others = texts(PAGE, *range(3, 15))
    prompts = [torch.cat((system, each), dim=1) for each in others]
    expected = [answer(stock, each) for each in prompts]
    barrier = threading.Barrier(4)

    def run(number: int) -> bool:
        if number < 4:
            barrier.wait()
        return torch.equal(answer(ours, prompts[number]), expected[number])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(len(prompts))))
    assert known(ours) >= PAGE


@pytest.mark.parametrize("error", (KeyboardInterrupt, RuntimeError))
def test_a_call_that_is_broken_off(error):
    stock, ours = pair("llama")
    ids = texts(2 * PAGE)[0]

    class Fails(LogitsProcessor):
        def __call__(self, tokens, scores):
            if tokens.shape[1] > ids.shape[1] + 2:
                raise error
            return scores

    not_read(stock, ours, ids[:, :-3])
    with pytest.raises(error):
        answer(ours, ids, logits_processor=LogitsProcessorList([Fails()]))
    assert not_read(stock, ours, ids) == PAGE


# ---- the argument -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, size",
    (("2GB", 2 * 10**9), ("1.5 gb", 15 * 10**8), ("512MiB", 2**29), ("64k", 64_000), ("700", 700), (4096, 4096)),
)
def test_sizes(given, size):
    ours = hf_fastpath.patch(build("llama"), prefix_cache=given, quiet=True)
    assert hf_fastpath.report(ours).stats["prefixes"]["limit_bytes"] == size


@pytest.mark.parametrize("given", ("", "two GB", "-1GB", "0", 0, -5, 1.5, True, b"2GB", ["2GB"]))
def test_sizes_that_are_none(given):
    model = build("llama")
    with pytest.raises(ValueError, match="prefix_cache is .*expected a number of bytes"):
        hf_fastpath.patch(model, prefix_cache=given, quiet=True)
    assert state_of(model) is None


def test_the_report():
    ours = pair("llama", prefix_cache="2GB")[1]
    ids = texts(2 * PAGE)[0]
    for _ in range(2):
        answer(ours, ids)
    assert f"prefixes: {2 * PAGE - 1} of {4 * PAGE} tokens of prompts not read again" in str(hf_fastpath.report(ours))
    plain = hf_fastpath.patch(build("llama"), quiet=True)
    assert "prefixes:" not in str(hf_fastpath.report(plain)) and hf_fastpath.report(plain).stats["prefixes"] is None
