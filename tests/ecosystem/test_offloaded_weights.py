"""accelerate leaves weights in host memory: plans and prompts read them there, on a GPU through a ring of its memory.

On the CPU, weights that are there already claim to be elsewhere, so that the ring is used; locks of pages are noted.
"""

from __future__ import annotations

import copy
import gc
import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, attach_align_device_hook_on_blocks
from accelerate.utils import OffloadedWeightsLoader, extract_submodules_state_dict
from models import (
    CPU,
    SHORT,
    TINY_PYTHON,
    assert_same_instances,
    blocks_of,
    build,
    counting,
    heldout_tokens,
    instances,
    left_padded,
    over_architectures,
    prompt,
    require_native,
)
from parity import assert_same_tokens, both
from said import logged
from transformers import AutoModelForCausalLM, LogitsProcessorList

import hf_fastpath
from hf_fastpath.compat import CACHE, lock_pages
from hf_fastpath.decode.model.layer_part import LayerPart
from hf_fastpath.decode.placed import fetch, offloaded, page_lock
from hf_fastpath.decode.run.program import Program
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import placed_model
from hf_fastpath.recording.placed_model import PlacedModel

#: bytes from which on the small models' tensors pass through the ring: matrices do, norms and biases do not
KEPT = 2048


class Locks:
    """Locks of pages that are only noted."""

    def __init__(self):
        self.held: dict[int, int] = {}
        self.most = 0
        self.error: str | None = None

    def lock(self, address, num_bytes, device):
        if self.error is None:
            assert not any(address < first + size and first < address + num_bytes for first, size in self.held.items())
            self.held[address] = num_bytes
            self.most = max(self.most, len(self.held))
        return self.error

    def unlock(self, address, device):
        del self.held[address]


@pytest.fixture(autouse=True)
def memory_of_other_tests():
    """Let models of other tests let go of their memory."""
    gc.collect()
    yield


@pytest.fixture
def locks(monkeypatch, device):
    """Use the ring on every device, and locks that are only noted on the CPU."""
    require_native(device)
    found = Locks()
    monkeypatch.setattr(fetch, "KEPT_BYTES", KEPT)
    if device.type == "cpu":
        monkeypatch.setattr(offloaded.Waiting, "is_elsewhere", lambda waiting, tensor: True)
        monkeypatch.setattr(page_lock, "lock_pages", found.lock)
        monkeypatch.setattr(page_lock, "unlock_pages", found.unlock)
    yield found
    gc.collect()  # as long as these functions stand for CUDA's


def last_layers(model) -> list[str]:
    """Return the names of all layers but the first, and, if it is not tied, of the head with the norm in front."""
    behind = [] if model.config.tie_word_embeddings else ["model.norm", "model.rotary_emb", "lm_head"]
    return [name for name in blocks_of(model) if name.split(".")[-1] in ("1", "2", "3") or name in behind]


def to_host(model, names: list[str]) -> dict[str, torch.Tensor]:
    """Keep blocks of these names in host memory, with hooks on all blocks; return the weights that are kept so."""
    blocks, here = blocks_of(model), model.device
    weights = extract_submodules_state_dict({name: each.cpu() for name, each in model.state_dict().items()}, names)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=dict.fromkeys(["", *blocks], here),
        offload={name: name in names for name in blocks},
        weights_map=OffloadedWeightsLoader(state_dict=weights),
        skip_keys=CACHE,
        tied_params_map={},
    )
    return weights


@pytest.fixture
def offload(locks, device):
    """A function that makes stock, the same model patched and with its last layers in host memory, and the weights
    there."""

    models = []

    def make(architecture: str = "llama", when: str = "before_patch", of=last_layers, **changes):
        stock = build(architecture, **dict(num_hidden_layers=4) | changes).to(device)
        ours = copy.deepcopy(stock)
        if when == "after_patch":
            hf_fastpath.patch(ours, quiet=True)
        weights = to_host(ours, of(ours))
        models.append(ours)
        return stock, hf_fastpath.patch(ours, quiet=True), weights

    yield make
    for model in models:  # also if a failed test holds them
        hf_fastpath.unpatch(model)


def programs_of(model) -> list[fetch.Fetching]:
    return [plan.program for plan in state_of(model).plans]


@over_architectures
@pytest.mark.parametrize("when", ("before_patch", "after_patch"))
def test_tokens_are_stocks(offload, device, when, architecture):
    """Greedy, padded, sampled and several prompts; the ring is too small for all weights, so that copies wait."""
    stock, ours, _ = offload(architecture, when)
    cases = (dict(input_ids=prompt(device)), SHORT), (left_padded(device, 3), SHORT)
    cases += ((left_padded(device, 2), SHORT | dict(do_sample=True, top_k=20)),)
    for inputs, options in cases:
        with counting(ours) as counts:
            found, expected = both(stock, ours, **inputs, **options)
        assert_same_tokens(found, expected, stock, inputs.get("attention_mask"))
        assert counts.fast and set(counts.reasons) == {"over_the_bus"}, counts.reasons
    for program in programs_of(ours):
        loads = program._copies.loads
        assert len(loads) > 6 and any(load.behind >= 0 for load in loads)
        assert all(load.behind < number for number, load in enumerate(loads))


@pytest.mark.parametrize("architecture", ("phi3", "mixtral", "gemma2", "qwen3"))
def test_other_structures(offload, device, architecture):
    """Halves of one weight, stacks of experts, soft-caps and windows whose prompts are stock's, norms of heads."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if architecture == "gemma2" else {}
    stock, ours, _ = offload(architecture, **kinds)
    for batch in (1, 2):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=prompt(device, batch, 21), **SHORT)
        assert_same_tokens(found, expected, stock)
        assert counts.fast == 12 * batch, counts.reasons


#: norms behind the blocks, states, latents and experts, biases of scores, keys and values that layers share
_RECORDED = ("glm4", "qwen3_5_text", "deepseek_v3", "mpt", "gemma4_text", "jamba", "granitemoehybrid")


@pytest.mark.parametrize("model_type", _RECORDED)
def test_recorded_models(locks, device, model_type):
    """Steps bring weights; prompts pass the hooks."""
    stock = causal_lm_types.small_model(model_type).to(device)
    ours = copy.deepcopy(stock)
    waiting = [name for name in blocks_of(ours) if name.split(".")[-1] in ("1", "2", "3")]
    parameters = dict(ours.named_parameters())  # buffers are brought to the GPU once
    weights = (each for name, each in to_host(ours, waiting).items() if name in parameters)
    memory = {each.untyped_storage().data_ptr() for each in weights}
    try:
        hf_fastpath.patch(ours, quiet=True)
        report = hf_fastpath.report(ours)
        assert (report.architecture, report.loop) == ("recorded", "fast")
        for batch in (1, 2, 1):
            ids = causal_lm_types.prompt(batch, 11, seed=batch).to(device)
            with counting(ours) as counts:
                found, expected = both(stock, ours, input_ids=ids, **SHORT)
            assert_same_tokens(found, expected, stock)
            stats = hf_fastpath.report(ours).stats
            assert counts.fast == 12 * batch and set(counts.reasons) == {"over_the_bus"}, stats
        for program in programs_of(ours):
            assert len(program._copies.loads) > 2
            for call in program.calls:
                read = {each.untyped_storage().data_ptr() for each in fetch.tensors_in(call.arguments)}
                assert not read & memory, f"{call} reads host memory"
        assert len({program._copies.ring for program in programs_of(ours)}) == 1 < len(programs_of(ours))
        del program
        assert hf_fastpath.report(ours).page_locked_bytes
    finally:
        hf_fastpath.unpatch(ours)
    assert not page_lock.locked_bytes()


@pytest.mark.parametrize("model_type", ("glm4", "deepseek_v3"))
def test_recorded_models_beside_layers_elsewhere(locks, device, monkeypatch, model_type):
    """The first layer claims to be on another GPU, and the second waits in host memory."""
    if device.type == "cuda":
        pytest.skip("only a CPU's device can claim to be another")
    elsewhere, of_first = torch.device("cpu", 1), set()

    def device_of(part, tensor):
        of_first.update(id(each) for name, each in part.module.named_parameters() if ".layers.0." in name)
        return elsewhere if id(tensor) in of_first else CPU

    monkeypatch.setattr(PlacedModel, "device_of", device_of)
    monkeypatch.setattr(placed_model, "_COPIED_BYTES", 1024)
    stock = causal_lm_types.small_model(model_type)
    ours = copy.deepcopy(stock)
    to_host(ours, [name for name in blocks_of(ours) if name.endswith(".layers.1")])
    try:
        hf_fastpath.patch(ours, quiet=True)
        for batch in (1, 2):
            ids = causal_lm_types.prompt(batch, 11, seed=batch)
            with counting(ours) as counts:
                found, expected = both(stock, ours, input_ids=ids, **SHORT)
            assert_same_tokens(found, expected, stock)
            assert counts.fast == 12 * batch and set(counts.reasons) == {"over_the_bus"}, counts.reasons
        for program in programs_of(ours):
            assert [stage.device for stage in program._stages] == [CPU, elsewhere, CPU]
            first, middle, last = (stage.program for stage in program._stages)
            assert last._copies.loads and not first._copies.loads and type(middle) is Program
        del program, first, middle, last
    finally:
        hf_fastpath.unpatch(ours)


@pytest.mark.parametrize("model_type", ("t5", "whisper"))
def test_decoders_behind_an_encoder(locks, device, model_type):
    """The table of biases, which a call reads once, may wait in host memory as well."""
    stock = encoder_decoder_types.small_model(model_type).to(device)
    ours = copy.deepcopy(stock)
    names = [name for name in blocks_of(ours) if "decoder.block." in name or "decoder.layers." in name]
    to_host(ours, [name for name in names if name.split(".")[-1] != "1"])
    try:
        hf_fastpath.patch(ours, quiet=True)
        for batch in (1, 2):
            given = encoder_decoder_types.output(stock, batch, 9, padding=2 * (batch > 1))
            given = {name: each.to(device) for name, each in given.items()}
            given["decoder_input_ids"] = encoder_decoder_types.start(batch).to(device)
            with counting(ours) as counts:
                results = [encoder_decoder_types.generate(model, given, **SHORT) for model in (ours, stock)]
            assert torch.equal(*results)
            stats = hf_fastpath.report(ours).stats
            assert counts.fast == 12 * batch and set(counts.reasons) == {"over_the_bus"}, stats
    finally:
        hf_fastpath.unpatch(ours)


def test_prompts_do_not_pass_the_hooks(offload, device, monkeypatch):
    """A prompt runs over the ring, too; then no module has got new parameters, and the plan stays."""
    stock, ours, _ = offload()
    before, calls = instances(ours), []
    real = AlignDevicesHook.pre_forward

    def noted(hook, module, *args, **kwargs):
        calls.append(type(module).__name__)
        return real(hook, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", noted)
    for length in (3, 40):
        found = ours.generate(prompt(device, 1, length), **SHORT)
        assert_same_tokens(found, stock.generate(prompt(device, 1, length), **SHORT), stock)
    assert set(calls) <= {"LlamaRotaryEmbedding"}, "a prompt went through accelerate's hooks"
    assert_same_instances(instances(ours), before)
    assert len(programs_of(ours)) == 1


def test_beams(offload, device):
    """Their prompt passes the hooks, which put new parameters in place; plans of both widths use one ring."""
    stock, ours, _ = offload()
    found, expected = both(stock, ours, input_ids=prompt(device, 2), **SHORT | dict(num_beams=2))
    assert_same_tokens(found, expected)
    found, expected = both(stock, ours, input_ids=prompt(device, 2), **SHORT)
    assert_same_tokens(found, expected, stock)
    again = ours.generate(prompt(device, 2), **SHORT)
    assert_same_tokens(again, expected, stock)
    assert len({program._copies.ring for program in programs_of(ours)}) == 1 < len(programs_of(ours))


def test_drafts(offload, device):
    """Plans of several widths verify drafts over the same ring."""
    stock, ours, _ = offload()
    ids = prompt(device, 1, 9).repeat(1, 4)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, **SHORT, prompt_lookup_num_tokens=3)
    assert_same_tokens(found, expected, stock)
    assert counts.fast == 12, counts.reasons
    assert len({program._copies.ring for program in programs_of(ours)}) == 1 < len(programs_of(ours))


def test_a_conversation_goes_on(offload, device):
    stock, ours, _ = offload()
    cache, ids = hf_fastpath.FastpathCache(ours.config), prompt(device)
    first = ours.generate(ids, **SHORT, **{CACHE: cache})
    again = torch.cat((first, prompt(device, 1, 5)), dim=1)
    with counting(ours) as counts:
        found = ours.generate(again, **SHORT, **{CACHE: cache})
    assert counts.fast == 12, counts.reasons
    assert_same_tokens(found, stock.generate(again, **SHORT), stock)


@pytest.mark.parametrize("name", ("model.layers.2.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"))
def test_edits_take_effect(offload, device, name):
    """In place, or with another tensor in its place: of what passes through the ring, and of what stays on the GPU."""
    stock, ours, weights = offload()
    ids, own = prompt(device), stock.get_parameter(name)
    before = ours.generate(ids, **SHORT)
    with torch.no_grad():
        own.mul_(-2)
        weights[name].mul_(-2)
    found, expected = both(stock, ours, input_ids=ids, **SHORT)
    assert_same_tokens(found, expected, stock)
    assert not torch.equal(found, before), "the edit changes no token, and shows nothing"
    with torch.no_grad():
        own.mul_(-0.5)
    weights[name] = weights[name] * -0.5
    assert_same_tokens(ours.generate(ids, **SHORT), before, stock)


@pytest.mark.parametrize("name", ("model.layers.2.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"))
def test_edits_by_a_callback_take_effect(offload, device, name):
    """A logits processor of the user's edits a weight between two tokens; a GPU that is busy has to be waited for."""
    stock, ours, weights = offload()

    def editing(weight, at):
        def process(ids, scores):
            if ids.shape[1] == at - 1 and device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            if ids.shape[1] == at:
                with torch.no_grad():
                    weight.mul_(-2)
            return scores

        return LogitsProcessorList([process])

    ids = prompt(device)
    plain = stock.generate(ids, **SHORT)
    expected = stock.generate(ids, **SHORT, logits_processor=editing(stock.get_parameter(name), 15))
    found = ours.generate(ids, **SHORT, logits_processor=editing(weights[name], 15))
    assert_same_tokens(found, expected)
    assert not torch.equal(expected, plain)


def test_edits_behind_a_forward_come_after_it(offload, device):
    """The model is called by the user, on a prompt and on a token, and gives logits that are still being computed."""
    stock, ours, weights = offload()
    name, ids = "model.layers.2.mlp.down_proj.weight", prompt(device)
    weight = weights[name]
    cache, expected = hf_fastpath.FastpathCache(ours.config), stock(ids).logits
    for tokens in (ids[:, :-1], ids[:, -1:]):
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            found = ours(tokens, **{CACHE: cache}).logits
            weight.mul_(-2)
            if device.type == "cuda":
                torch.cuda.synchronize()
            weight.mul_(-0.5)
        torch.testing.assert_close(found[:, -1], expected[:, cache.get_seq_length() - 1])


def test_weights_that_begin_with_a_page(offload, locks, device):
    """Copies that accelerate makes beside locked pages: its hooks bring the weights to modules that run as stock."""
    stock, ours, weights = offload()
    for name, each in weights.items():
        buffer = torch.empty(each.numel() + mmap.PAGESIZE // each.element_size(), dtype=each.dtype)
        skipped = -buffer.data_ptr() % mmap.PAGESIZE // each.element_size()
        weights[name] = buffer[skipped : skipped + each.numel()].view_as(each).copy_(each)
    found, expected = both(stock, ours, input_ids=prompt(device), **SHORT)
    assert_same_tokens(found, expected, stock)
    assert page_lock.locked_bytes()
    for first, size in locks.held.items():
        assert not any(first <= each.data_ptr() < first + size for each in weights.values())
    assert hf_fastpath.verify(ours, prompt(device, 1, 40), max_new_tokens=4).ok


def test_what_lies_in_the_ring_is_never_read_again(offload, device):
    """Every step copies anew."""
    stock, ours, _ = offload()
    expected = ours.generate(prompt(device), **SHORT)
    (program,) = programs_of(ours)
    program._copies.ring.memory.fill_(255)  # NaN
    assert torch.equal(ours.generate(prompt(device), **SHORT), expected)


def test_copies_may_come_as_late_as_calls_wait_for_them(offload, device, monkeypatch):
    """A stream of copies may be slow: whatever a call does not wait for comes behind that call."""
    started: deque = deque()

    def start(copies, behind):
        started.extend(load for load in copies.loads if load.behind == behind)

    def arrive(copies, number):
        load = None
        while load is not copies.loads[number]:
            load = started.popleft()
            for target, source in load.copies:
                target.copy_(source, non_blocking=True)

    monkeypatch.setattr(fetch, "start_copies", start)
    monkeypatch.setattr(fetch, "await_copies", arrive)
    stock, ours, _ = offload()
    found, expected = both(stock, ours, **left_padded(device, 2), **SHORT)
    assert_same_tokens(found, expected, stock, left_padded(device, 2)["attention_mask"])
    assert not started


def test_pages_are_locked_once_and_let_go(offload, locks, device):
    """Plans and programs share the locks; unpatch() lets go of them without a garbage collection."""
    _, ours, weights = offload()
    hf_fastpath.report(ours)
    assert not page_lock.locked_bytes()
    for batch in (1, 2, 3):
        ours.generate(prompt(device, batch), **SHORT)
        ours.generate(prompt(device, batch), **SHORT | dict(do_sample=True))
    locked = page_lock.locked_bytes()
    passing = [each for each in weights.values() if fetch._passes(each)]
    streamed = sum(each.nbytes for each in passing)
    assert 0 < streamed - locked < 2 * mmap.PAGESIZE * len(passing), "all but the ends"
    report = hf_fastpath.report(ours)
    assert report.host_bytes == streamed and report.page_locked_bytes == locked
    assert f"bus: {streamed / 1e9:.3f} GB of weights come from host memory for a step" in str(report)
    assert report.stats["details"]["over_the_bus"] == [f"{streamed / 1e9:.4g} GB a step"]
    if device.type == "cpu":
        assert sum(locks.held.values()) == locked and len(locks.held) == locks.most
    else:
        for copies in [program._copies for program in programs_of(ours)]:
            copied = [source for load in copies.loads for _, source in load.copies if source.device == CPU]
            assert sum(source.nbytes for source in copied) == locked and all(source.is_pinned() for source in copied)
        del copies, copied
    hf_fastpath.unpatch(ours)
    assert not page_lock.locked_bytes() and not locks.held and not fetch._rings


def test_without_locks_copies_wait(offload, locks, device, monkeypatch):
    """The system does not lock pages: tokens are right all the same, with a reason."""
    monkeypatch.setattr(page_lock, "lock_pages", lambda *_: "no room")
    stock, ours, _ = offload()
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device), **SHORT)
    assert_same_tokens(found, expected, stock)
    assert counts.fast == 12 and set(counts.reasons) == {"over_the_bus", "not_page_locked"}
    (program,) = programs_of(ours)
    assert "no room" in hf_fastpath.report(ours).stats["details"]["not_page_locked"][0]
    assert not page_lock.locked_bytes()
    if device.type == "cuda":
        assert [plan.graph for plan in state_of(ours).plans] == [program]


@over_architectures
def test_beside_layers_elsewhere(offload, device, monkeypatch, architecture):
    """The layer that is not offloaded claims to be on another device: a step goes there and back."""
    if device.type == "cuda":
        pytest.skip("only a CPU's device can claim to be another")
    elsewhere = torch.device("cpu", 1)
    monkeypatch.setattr(LayerPart, "device", elsewhere)
    stock, ours, _ = offload(architecture)
    for inputs in (left_padded(device, 2), left_padded(device, 3)):
        with counting(ours) as counts:
            found, expected = both(stock, ours, **inputs, **SHORT)
        assert_same_tokens(found, expected, stock, inputs["attention_mask"])
        assert counts.fast and set(counts.reasons) == {"over_the_bus"}, counts.reasons
    for program in programs_of(ours):
        assert [stage.device for stage in program._stages] == [CPU, elsewhere, CPU]
        first, middle, last = (stage.program for stage in program._stages)
        assert last._copies.loads and not first._copies.loads and type(middle) is Program


def test_memory_for_one_layer_is_enough(offload, device, monkeypatch):
    """Where there is no memory for two layers, the ring holds one."""
    real, asked = fetch.Ring.__init__, []

    def scarce(ring, device, num_bytes):
        asked.append(num_bytes)
        if num_bytes == asked[0]:
            raise torch.OutOfMemoryError("two layers")
        real(ring, device, num_bytes)

    monkeypatch.setattr(fetch.Ring, "__init__", scarce)
    stock, ours, _ = offload()
    found, expected = both(stock, ours, input_ids=prompt(device), **SHORT)
    assert_same_tokens(found, expected, stock)
    assert set(asked) == {2 * asked[1], asked[1]}


def test_verify_and_unpatch(offload, device):
    _, ours, _ = offload()
    before = instances(hf_fastpath.unpatch(ours))
    hf_fastpath.patch(ours, quiet=True)
    result = hf_fastpath.verify(ours, prompt(device, 1, 40), max_new_tokens=8)
    assert result.ok, result
    hf_fastpath.unpatch(ours)
    assert [list(contents) for contents in instances(ours).values()] == [list(each) for each in before.values()]


def with_embeddings(model) -> list[str]:
    return [*last_layers(model), "model.embed_tokens"]


def test_tables_of_embeddings_are_declined(offload, device):
    """A step reads one row of them; they are not brought as a whole."""
    with logged("offloaded"):
        stock, ours, _ = offload(of=with_embeddings)
    report = hf_fastpath.report(ours)
    assert report.loop == "offloaded" and "model.embed_tokens: Embedding" in report.details["loop: offloaded"][0]
    found, expected = both(stock, ours, input_ids=prompt(device), **SHORT)
    assert_same_tokens(found, expected, stock)


def test_weights_are_not_quantized(locks, device):
    ours = build("llama").to(device)
    to_host(ours, ["model.layers.1"])
    with pytest.raises(ValueError, match="meta"):
        hf_fastpath.patch(ours, weights="int8", quiet=True)


def test_all_weights_in_the_hosts_memory_are_read_where_they_lie(locks):
    """The device that computes is the CPU: nothing is copied."""
    stock = build("llama")
    ours = copy.deepcopy(stock)
    weights = to_host(ours, blocks_of(ours))
    locks_before = dict(locks.held)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(offloaded.Waiting, "is_elsewhere", lambda waiting, tensor: tensor.device != waiting._home)
        hf_fastpath.patch(ours, quiet=True)
        with counting(ours) as counts:
            found = ours.generate(prompt(CPU), **SHORT)
        held = [each for call in programs_of(ours)[0].calls for each in fetch.tensors_in(call.arguments)]
        assert hf_fastpath.verify(ours, prompt(CPU, 1, 40), max_new_tokens=4).ok
    assert_same_tokens(found, stock.generate(prompt(CPU), **SHORT), stock)
    assert counts.fast == 12 and not counts.reasons and locks.held == locks_before
    assert {each.data_ptr() for each in weights.values()} <= {each.data_ptr() for each in held}


# ---- locks of pages ------------------------------------------------------------------------------------------------


def at(buffer: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return the bytes of ``buffer`` from ``first`` to ``end``, counted from its first whole page."""
    start = -buffer.data_ptr() % mmap.PAGESIZE
    return buffer[start + first : start + end]


@pytest.mark.parametrize("device", (CPU,))
def test_pages_that_hold_something_else_are_not_locked(locks, device):
    page, buffer = mmap.PAGESIZE, torch.zeros(12 * mmap.PAGESIZE, dtype=torch.uint8)
    start = at(buffer, 0, 1).data_ptr()
    ends = (100, 3 * page + 100), (page, 4 * page), (3 * page + 100, 5 * page), (5 * page + 1, 7 * page - 1)
    tensors = [at(buffer, *each) for each in ends]
    held = page_lock.lock(tensors, device)
    assert locks.held == {start + page: 3 * page, start + 4 * page: page}, "views of the same memory in one run"
    assert page_lock.lock(tensors[2:3], device) == [held[1]] and page_lock.lock(tensors[::-1], device) == held
    del held
    assert not locks.held


def test_a_part_is_copied_from_locked_pages_or_others(locks, device):
    """Rows of a weight begin on pages that are locked, and end with the weight on one that is not."""
    page = mmap.PAGESIZE
    whole = at(torch.zeros(12 * page, dtype=torch.uint8).random_(), 100, 4 * page + 100)
    held = page_lock.lock([whole], device)
    first = whole.data_ptr() - 100 + page
    assert sum(each.num_bytes for each in held) == 3 * page
    for begin, end in ((3 * page + 50, 4 * page), (page, 4 * page), (200, 300), (2 * page, 2 * page + 8)):
        part = whole[begin:end]
        copy = torch.zeros_like(part, device=device)
        for source, target in fetch.by_pages(part, copy):
            inside = [
                first <= each < first + 3 * page for each in (source.data_ptr(), source.data_ptr() + len(source) - 1)
            ]
            assert inside[0] == inside[1]
            target.copy_(source)
        assert torch.equal(copy.cpu(), part)
    turned = whole[:64].view(8, 8).t()
    assert fetch.by_pages(turned, turned) == [(turned, turned)]
    assert fetch.by_pages(*[torch.ones(3)] * 2)[0][0].dtype == torch.float32


@pytest.mark.parametrize("device", (CPU,))
def test_nothing_stays_locked_behind_an_error(locks, device, monkeypatch):
    buffer = torch.zeros(12 * mmap.PAGESIZE, dtype=torch.uint8)
    real, calls = page_lock.lock_pages, []
    monkeypatch.setattr(
        page_lock, "lock_pages", lambda *given: calls.append(1) or (real(*given) if not calls[1:] else "no")
    )
    with pytest.raises(RuntimeError, match=r"did not lock 0.000 GB of host memory: no"):
        page_lock.lock([at(buffer, place, place + 2 * mmap.PAGESIZE) for place in (0, 4 * mmap.PAGESIZE)], device)
    assert len(calls) == 2 and not locks.held


@pytest.mark.parametrize("device", (CPU,))
def test_locks_of_the_users_stay_as_they_are(locks, device, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    assert page_lock.lock([torch.zeros(10_000)], device) == [] and not locks.held


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def dispatched(cuda, monkeypatch):
    """A function that makes stock on the GPU, and the same model patched with a device map of GPU and CPU."""
    require_native(cuda)
    monkeypatch.setattr(fetch, "KEPT_BYTES", KEPT)

    def make(architecture: str = "llama", **changes):
        stock = build(architecture, **dict(num_hidden_layers=4) | changes)
        ours = copy.deepcopy(stock)
        places = {name: "cpu" if name in last_layers(ours) else 0 for name in blocks_of(ours)}
        dispatch_model(ours, places, main_device=0, skip_keys=CACHE)
        return stock.to(cuda), hf_fastpath.patch(ours, quiet=True)

    return make


@over_architectures
def test_a_device_map_of_gpu_and_cpu(dispatched, cuda, architecture):
    """Steps are captured, with their copies."""
    stock, ours = dispatched(architecture)
    for batch in (1, 3, 20):
        with counting(ours) as counts:
            found, expected = both(stock, ours, **left_padded(cuda, batch), **SHORT)
        assert_same_tokens(found, expected, stock, left_padded(cuda, batch)["attention_mask"])
        assert counts.fast == 12 * batch and set(counts.reasons) == {"over_the_bus"}, counts.reasons
    for plan in state_of(ours).plans:
        assert isinstance(plan.program._graph, torch.cuda.CUDAGraph) and plan.program._copies.pages


def test_a_device_map_of_two_gpus_and_cpu(cuda, monkeypatch):
    """A step goes to the second GPU and back; the first fetches what is in host memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    monkeypatch.setattr(fetch, "KEPT_BYTES", KEPT)
    stock = build("llama", num_hidden_layers=4)
    ours = copy.deepcopy(stock)
    places = {name: "cpu" if name in last_layers(ours) else 0 for name in blocks_of(ours)} | {"model.layers.1": 1}
    dispatch_model(ours, places, main_device=0, skip_keys=CACHE)
    hf_fastpath.patch(ours, quiet=True)
    stock.to(cuda)
    for batch in (1, 3):
        inputs = left_padded(cuda, batch)
        with counting(ours) as counts:
            found, expected = both(stock, ours, **inputs, **SHORT)
        assert_same_tokens(found, expected, stock, inputs["attention_mask"])
        assert counts.fast == 12 * batch and set(counts.reasons) == {"over_the_bus"}, counts.reasons


def test_threads_share_the_ring(dispatched, cuda):
    """Each thread has a stream of its own, and steps of both use one ring."""
    stock, ours = dispatched()
    prompts = [prompt(cuda, 1, length) for length in (9, 14)]
    expected = [stock.generate(ids, **SHORT) for ids in prompts]
    torch.cuda.synchronize()

    def generate(ids):
        with torch.cuda.stream(torch.cuda.Stream()):
            made = [ours.generate(ids, **SHORT) for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, prompts))
    for made, tokens in zip(found, expected):
        assert all(torch.equal(each, tokens) for each in made)


def test_from_pretrained_with_a_device_map(cuda, monkeypatch):
    """transformers loads the weights; some may lie in the file's memory."""
    require_native(cuda)
    monkeypatch.setattr(fetch, "KEPT_BYTES", KEPT)
    stock = AutoModelForCausalLM.from_pretrained(TINY_PYTHON, dtype=torch.float32, device_map={"": 0})
    inside = [name for name in blocks_of(stock) if name.startswith("model.layers.")]
    places = {name: "cpu" if name in inside[1:] else 0 for name in blocks_of(stock)}
    ours = AutoModelForCausalLM.from_pretrained(TINY_PYTHON, dtype=torch.float32, device_map=places)
    hf_fastpath.patch(ours, quiet=True)
    ids = heldout_tokens(40).to(cuda)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, max_new_tokens=60, do_sample=False)
    assert_same_tokens(found, expected, stock)
    assert counts.fast == found.shape[1] - 40 and set(counts.reasons) == {"over_the_bus"}, counts.reasons


def test_cuda_says_why_it_does_not_lock(cuda):
    """An address that is no memory of the process; the next kernel does not raise CUDA's error."""
    torch.ones(1, device=cuda)
    assert lock_pages(mmap.PAGESIZE, mmap.PAGESIZE, cuda)
    assert torch.ones(2, device=cuda).sum().item() == 2
