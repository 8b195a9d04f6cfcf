"""Short prompts, which a graph of a longer prompt reads; on the CPU the graph's calls are made one by one."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from calls_for_graphs import use_calls
from causal_lm_types import small_model
from models import SHORT, build, counting, fresh, left_padded, prompt
from parity import LogitRule, both, float64_copy
from torch import nn

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import graphs_of_model, prompt_lists, short_prompts


class Readers:
    """Lengths that graphs were made for, and numbers of tokens of the prompts that graphs have read."""

    def __init__(self, monkeypatch, device):
        self.made: list[int] = []
        self.read: list[int] = []
        made, run = short_prompts.ShortPrompts.capture, short_prompts.ShortPrompts._run

        def capture(reader):
            self.made.append(reader._length)
            made(reader)

        def noted(reader, prompts, *behind):
            if reader._graph is not None:
                self.read += [prompt.tokens.shape[1] for prompt in prompts]
            return run(reader, prompts, *behind)

        monkeypatch.setattr(short_prompts.ShortPrompts, "capture", capture)
        monkeypatch.setattr(short_prompts.ShortPrompts, "_run", noted)
        use_calls(monkeypatch, device)


@pytest.fixture
def readers(monkeypatch, device) -> Readers:
    return Readers(monkeypatch, device)


def _same(stock, ours, ids, **options):
    ids = ids % stock.config.vocab_size
    found, expected = both(stock, ours, input_ids=ids, **SHORT, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("architecture", ("gpt2", "llama", "gpt_neox", "olmo2", "opt", "phi3", "falcon"))
def test_tokens_equal(architecture, device, readers):
    stock, ours = fresh(architecture, device)
    for seed, length in enumerate((30, 32, 2, 25, 60, 64, 33, 31)):
        with counting(ours) as counts:
            _same(stock, ours, prompt(device, 1, length, seed=seed))
        assert not counts.reasons
    assert readers.made == [32, 64] and readers.read == [32, 2, 25, 64, 33, 31]


@pytest.mark.parametrize("length", (1, 9, 32))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("architecture", ("llama", "falcon"))
def test_the_first_prompts_have_the_bits_of_the_later_ones(architecture, dtype, length, device, readers):
    """A user who asks again gets the same answer, however many prompts were there before."""
    model = hf_fastpath.patch(build(architecture).to(device, dtype), quiet=True)
    ids = prompt(device, 2, length)
    logits = [model.generate(ids, output_logits=True, return_dict_in_generate=True, **SHORT).logits for _ in range(4)]
    assert readers.read == [length] * 3
    assert all(torch.equal(torch.stack(each), torch.stack(logits[0])) for each in logits)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_float32_is_read_as_stock_reads_it(dtype, device, readers, monkeypatch):
    """With as many rows as the prompt has, whose sums cuBLAS rounds as it does for stock."""
    monkeypatch.setattr(short_prompts, "DTYPES", short_prompts.DTYPES - {torch.float32})
    model = hf_fastpath.patch(build("llama").to(device, dtype), quiet=True)
    for _ in range(3):
        model.generate(prompt(device, 2, 9), **SHORT)
    assert readers.made == ([] if dtype == torch.float32 else [32])


@pytest.mark.parametrize("name", ("apertus", "bart", "glm4", "helium", "minicpm3", "persimmon", "xglm"))
def test_recorded_models(name, device, readers):
    stock = small_model(name).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for seed, length in enumerate((30, 32, 20, 21, 9)):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
    assert readers.made == [32] and readers.read == [20, 21, 9]


def test_mixtures_whose_rows_are_tokens(device, readers):
    """What a step of one token makes of each row, up to the last layer, which goes over the last row alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the host waits for other experts' choice
    stock = small_model("deepseek_v2").to(device, dtype)
    models = hf_fastpath.patch(copy.deepcopy(stock), quiet=True), stock, float64_copy(stock)
    how = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    rule = LogitRule()
    for seed in range(36):
        ids = prompt(device, 8, 17 + seed % 16, seed=seed) % 150 + 3  # none is padding
        rule.add(*(model.generate(ids, **how).logits[0].double() for model in models))
    assert readers.made == [32] and len(readers.read) >= 32
    rule.check("prompts by rows")


@pytest.mark.parametrize("rounds", (1, 3))
def test_graphs_of_several_threads(rounds, device, readers):
    """Graphs of one model share memory, and so one runs after the other, whatever streams their threads have."""
    dtype = torch.bfloat16
    model = hf_fastpath.patch(build("llama").to(device, dtype), quiet=True)
    texts = [prompt(device, 1, length, seed=length) for length in (9, 30, 40, 60, 90, 120)]
    how = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)

    def read(place: int) -> list[torch.Tensor]:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            made = [model.generate(texts[(place + each) % len(texts)], **how).logits[0].cpu() for each in range(24)]
        return made

    for text in texts:
        for _ in range(3):
            model.generate(text, **how)
    expected = [model.generate(text, **how).logits[0].cpu() for text in texts]
    for _ in range(rounds):
        with ThreadPoolExecutor(4) as pool:
            for place, made in enumerate(pool.map(read, range(4))):
                for number, logits in enumerate(made):
                    assert torch.equal(logits, expected[(place + number) % len(texts)])


@pytest.mark.parametrize("architecture", ("mistral", "gemma3_text", "gpt_oss"))
def test_windows_that_end_inside_of_a_prompt(architecture, device, readers):
    """Also in what fills the prompt up: the cache gets the newest of the prompt's own tokens."""
    stock, ours = fresh(architecture, device, sliding_window=13)
    for seed, length in enumerate((60, 64, 2, 45, 30, 31)):
        with counting(ours) as counts:
            _same(stock, ours, prompt(device, 1, length, seed=seed))
        assert not counts.reasons
    assert readers.made == [64, 32] or readers.made == []  # float32 products of experts wait for the host on a GPU
    assert readers.read == ([64, 45, 30, 31] if readers.made else [])


def test_longer_prompts_of_thin_models(device, readers, monkeypatch):
    stock, ours = fresh("llama", device)
    for seed, length in enumerate((700, 768, 601)):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
    assert readers.made == [768] and readers.read == [768, 601]
    monkeypatch.setattr(graphs_of_model, "_OF_LAUNCHES", 1.0)
    for seed, length in enumerate((900, 901, 601)):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
    assert readers.made == [768] and readers.read == [768, 601], "no more of these than what launches are worth"


def test_several_sequences(device, readers):
    stock, ours = fresh("llama", device)
    for seed in range(4):
        _same(stock, ours, prompt(device, 3, 40 - seed, seed=seed))
    assert readers.made == [64] and readers.read == [39, 38, 37]


def test_padding_and_turns_are_left_to_single_calls(device, readers):
    stock, ours = fresh("llama", device)
    for _ in range(3):
        found, expected = both(stock, ours, **left_padded(device, 2, 30), **SHORT)
        assert torch.equal(found, expected)
    assert not readers.made
    for seed in range(3):  # graphs read prompts from the second one on, and not the turns behind them
        texts = []
        for model in (stock, ours):
            cache = FastpathCache(model.config) if model is ours else None
            given = {} if cache is None else {CACHE: cache}
            first = model.generate(prompt(device, 1, 40, seed=seed), return_dict_in_generate=True, **SHORT, **given)
            whole = torch.cat((first.sequences, prompt(device, 1, 21, seed=seed + 9)), dim=1)
            texts.append(model.generate(whole, **{CACHE: getattr(first, CACHE)}, **SHORT))
        assert torch.equal(*texts)
    assert readers.made == [64] and readers.read == [40, 40]


def test_learned_positions_up_to_the_last(device, readers):
    """What fills a prompt up has no positions of its own."""
    stock, ours = fresh("gpt2", device, n_positions=40)
    for seed in range(4):
        ids = prompt(device, 1, 36, seed=seed)
        found, expected = both(stock, ours, input_ids=ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, expected)
    assert readers.read == [36, 36, 36]


def test_weights_that_were_changed_and_moved(device, readers):
    stock, ours = fresh("llama", device)
    for seed in range(3):
        _same(stock, ours, prompt(device, 1, 30, seed=seed))
    with torch.no_grad():
        for model in (stock, ours):
            model.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    _same(stock, ours, prompt(device, 1, 30, seed=7))
    assert readers.read == [30, 30, 30]
    for model in (stock, ours):
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight.flip(0))
    for seed in range(3):
        _same(stock, ours, prompt(device, 1, 30, seed=seed))
    assert readers.made == [32, 32] and readers.read == [30] * 5


@pytest.mark.parametrize("length", (30, 32))
def test_a_model_that_is_not_causal_keeps_single_calls(length, device, readers, monkeypatch):
    """Of a recorded model nobody knows whether tokens behind others change what these give; also of a prompt that needs
    no filling."""
    stock = small_model("glm4").to(device)

    class Forward(type(stock.model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states + hidden_states.mean(dim=1, keepdim=True))

    stock.model.norm.__class__ = Forward
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    compared = []
    hides = short_prompts.ShortPrompts.hides_what_is_behind
    noted = lambda *given: compared.append(hides(*given)) or compared[-1]  # noqa: E731
    monkeypatch.setattr(short_prompts.ShortPrompts, "hides_what_is_behind", noted)
    for seed in range(5):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
    assert not readers.made and compared == [False]


@pytest.mark.parametrize("options", ({"page_size": 16}, {"kv_dtype": torch.int8}), ids=("pages", "int8"))
def test_caches_of_other_forms_keep_single_calls(options, device, readers):
    stock, _ = fresh("llama", device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
    for seed in range(3):
        with counting(ours) as counts:
            ours.generate(prompt(device, 1, 30, seed=seed), **SHORT)
        assert counts.fast and not counts.reasons
    assert not readers.made


def test_a_model_that_computes_with_the_number_of_tokens_keeps_single_calls(device, readers):
    stock = small_model("glm4").to(device)

    class Forward(type(stock.model.norm)):
        def forward(self, hidden_states):
            count = hidden_states.shape[1]
            found = super().forward(hidden_states)
            return found if count == 1 else found + found.roll(1, -1) * (count / 30)

    stock.model.norm.__class__ = Forward
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for seed, length in enumerate((30, 28, 26, 20, 24)):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
    assert not readers.made


def test_memory_that_is_short(device, readers, monkeypatch):
    stock, ours = fresh("llama", device)
    monkeypatch.setattr(short_prompts, "MOST_BYTES", 1)
    for seed in range(3):
        _same(stock, ours, prompt(device, 1, 30, seed=seed))
    assert not readers.made


def test_graphs_that_are_too_many(device, readers, monkeypatch):
    """The one that was not used for longest goes, and comes back if it is asked for again."""
    stock, ours = fresh("llama", device)
    monkeypatch.setattr(prompt_lists, "MAX_PROGRAMS", 1)
    for seed, length in enumerate((30, 30, 60, 60, 60, 30, 30, 30)):
        _same(stock, ours, prompt(device, 1, length, seed=seed))
        programs = vars(ours)["_hf_fastpath"].plans.snapshot.prompt_programs.values()
        assert sum(isinstance(each, short_prompts.ShortPrompts) for each in programs) == 1
    assert readers.made == [32, 64, 32]


def test_graphs_of_a_model_have_one_memory(device, readers):
    """Also that of a text that is longer than all before, which then has more."""
    stock, ours = fresh("llama", device)
    for seed, length in enumerate((30, 500, 30, 500, 30, 700, 700, 30, 500, 700)):
        _same(stock, ours, prompt(device, 1 + (seed == 9), length, seed=seed))
    programs = vars(ours)["_hf_fastpath"].plans.snapshot.prompt_programs.values()
    held = [each._held()[0].untyped_storage() for each in programs if isinstance(each, short_prompts.ShortPrompts)]
    layer = ours.config.num_key_value_heads * ours.config.head_dim * 4
    assert len(held) == 4 and {each.nbytes() // layer for each in held} == {512, 768, 1536}
    assert len({each.data_ptr() for each in held}) == 3, "of 32 and of 512 tokens"
