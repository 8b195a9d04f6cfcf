"""A step as a list of named calls, and each of the passes over it by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import CPU, build, prompt, require_native

import hf_fastpath
from hf_fastpath import ops
from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.compat import ShardStyle
from hf_fastpath.decode.calls.named_calls import Call, Norm, Register, Step, in_order, run
from hf_fastpath.decode.calls.pass_table import CallList
from hf_fastpath.decode.lower import composed
from hf_fastpath.decode.lower.attend import Attention, attend
from hf_fastpath.decode.lower.positions import Positions
from hf_fastpath.decode.lower.which_op import Lower
from hf_fastpath.decode.model.weight import PlainWeight, halves, joined
from hf_fastpath.decode.ranks.process_group import SLOTS
from hf_fastpath.decode.ranks.rank_calls import Shard, gathered, summed, through_peers
from hf_fastpath.decode.run.one_call import one_call
from hf_fastpath.decode.run.passes import PASSES, prefetch_next_weight
from hf_fastpath.decode.run.program import Program
from hf_fastpath.decode.sources import steps
from hf_fastpath.ops.kv_cache import KVCache
from hf_fastpath.patching.state import state_of
from hf_fastpath.quantization import FORMATS, quantize

BATCH, LENGTH = 2, 9


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


RMS = Norm(NormKind.RMS, randn(16), None, 1e-6)


# ---- calls -------------------------------------------------------------------------------------------------


def test_arguments_go_where_the_schema_has_them():
    x, weight = randn(1, 1, 16), randn(8, 16)
    bound = in_order(ops.gemv.overload, dict(norm=RMS, programmatic_launch=True, weight=weight, x=x))
    names = [argument.name for argument in ops.gemv.overload._schema.arguments][: len(bound)]
    found = dict(zip(names, bound))
    assert found["x"] is x and found["weight"] is weight and found["norm_weight"] is RMS.weight
    assert found["norm"] == NormKind.RMS and found["norm_eps"] == 1e-6 and found["programmatic_launch"] is True
    assert found["bias"] is None and names[-1] == "programmatic_launch", "nothing behind the last argument"


def test_a_cache_is_taken_apart():
    k, v, table, q, lengths = randn(2, 1, 4, 8), randn(2, 1, 4, 8), torch.zeros(3, 3), randn(2, 1, 8), torch.ones(2)
    seen = dict(q=q, seq_lens=lengths, starts=None, scale=0.5)
    bound = in_order(ops.decode_attention.overload, dict(cache=KVCache(k, v, table=table, layer=2), **seen))
    names = [argument.name for argument in ops.decode_attention.overload._schema.arguments]
    found = dict(zip(names, bound))
    assert (found["k_cache"], found["v_cache"], found["kv_table"]) == (k, v, table) and found["layer"] == 2


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    (
        (ops.rms_norm.overload, dict(x=1, weight=2, eps=3, epsilon=4), "is given epsilon, expected some of x, weight"),
        (ops.rms_norm.overload, dict(x=1, eps=3), "is not given 'weight'"),
        (ops.gemm.overload, dict(x=1, weight=2, norm=RMS), "is given norm, expected some of x"),
        (composed.soft_capped, dict(x=1, cap=2, factor=3), "is given factor, expected some of x, cap"),
    ),
)
def test_wrong_names_are_refused(op, arguments, message):
    with pytest.raises(TypeError, match=message):
        in_order(op, arguments)


def test_a_cache_with_addresses_is_refused_where_nothing_follows_them():
    cache = KVCache(randn(1), randn(1), table=torch.zeros(1))
    with pytest.raises(TypeError, match="is given kv_table"):
        in_order(attend, dict(attention=1, q=1, cache=cache, scale=1, window=0, softcap=0, sinks=None, slopes=None))


def test_no_norm_and_no_residual_are_defaults():
    x, weight = randn(1, 1, 16), randn(8, 16)
    found = run(ops.gemv.overload, x=x, weight=weight, norm=None, residual=None)
    assert torch.equal(found, ops.gemv(x, weight))


# ---- a step of a model -------------------------------------------------------------------------------------


def behind(each: Callable, program: Program, step: Step) -> list[Call]:
    """Return the calls of a program behind a pass; the program keeps its own."""
    listing = CallList(program.calls, program.register)
    each(listing, step)
    return listing.calls


class Recorded:
    """The calls of a step over a small model's layers before any pass, with what is needed to run them.

    Args:
        how: see ``Lower``; the calls are for few rows by default.
    """

    def __init__(self, architecture: str = "llama", batch: int = BATCH, how: dict | None = None, **options: Any):
        self.model = hf_fastpath.patch(build(architecture), quiet=True, **options)
        out = self.model.generate(prompt(CPU, batch, LENGTH), max_new_tokens=2, return_dict_in_generate=True)
        self.cache = out.past_key_values
        self.cache.reserve(1)
        self.part = state_of(self.model).plans.part_of(self.model)
        self.program = Program()
        self.hidden = self.program.register()
        self.caches = [layer.kv_cache() for layer in self.cache.layers]
        length = self.cache.get_seq_length() + 1
        rotary, dtype = self.part.rotary, self.part.embedding.weight
        angles = {} if rotary is None else {None: rotary(dtype, torch.tensor([[length - 1]]))}
        lengths = torch.full((batch,), length, dtype=torch.int32)
        at = Positions(angles, lengths, None)
        hidden = self.hidden
        self.register = self.program.register()
        how = {"rows": batch} if how is None else how
        to = Lower(self.program.emit, **how | ({"attention": self.register} if how.get("attention") else {}))
        for place, layer in enumerate(self.part.layers):
            hidden = steps.decoder_layer(to, layer, hidden, self.caches[place], at, place)
        steps.head(to, self.part, hidden)
        self.given = randn(batch, 1, self.part.embedding.weight.shape[1])
        self.attention = Attention(1, length, lengths, None)

    def through(self, each: Callable, step: Step) -> list[Call]:
        """Apply one pass; return the calls, which the program keeps."""
        self.program.calls = behind(each, self.program, step)
        return self.program.calls

    @torch.inference_mode()
    def run(self, *others: tuple[Register, Any]) -> torch.Tensor:
        return self.program.run_once([(self.hidden, self.given), *others]).clone()

    def names(self) -> list[str]:
        return [name.removesuffix(".default") for name in self.program.op_names()]


def recorded(how: dict | None = None, **options: Any) -> tuple[Recorded, torch.Tensor]:
    """Record a step; return it with its result for few rows without a pass."""
    require_native(CPU)
    torch.manual_seed(5)
    untouched = Recorded(**options)
    expected = untouched.run()
    torch.manual_seed(5)
    return Recorded(how=how, **options), expected


LAYER = ["qkv_rope_append", "decode_attention", "gemv", "gemv_swiglu", "gemv"]


def test_passes_have_an_order():
    assert [each.name for each in PASSES] == [
        "one_call", "through_peers", "prefetch_next_weight", "native_calls",
    ]  # fmt: skip


@pytest.mark.parametrize("each", list(PASSES), ids=lambda each: each.name)
def test_a_pass_that_is_not_asked_changes_nothing(each):
    made, _ = recorded()
    before = list(made.program.calls)
    after = made.through(each.run, Step(rows=BATCH))
    assert all(map(lambda a, b: a is b, after, before)) and len(after) == len(before)
    assert made.names() == LAYER * len(made.part.layers) + ["gemv"]


GPT2_LAYER = ["qkv_rope_append", "decode_attention", "gemv", "gemv", "gemv"]


def one_gpt2(**changed: Any) -> tuple[Recorded, torch.Tensor]:
    """Record a step of GPT-2 for one sequence, whose layers can be one call; return it with its result."""
    return recorded(architecture="gpt2", batch=1, **changed)


def test_one_call():
    made, expected = one_gpt2()
    assert made.names() == GPT2_LAYER * len(made.part.layers) + ["gemv"]
    made.through(one_call, Step(rows=1, one_call=True))
    assert made.names() == ["decode_layers", "gemv"]
    torch.testing.assert_close(made.run(), expected)  # on a CPU the op is PyTorch's calls


@pytest.mark.parametrize("architecture", ("mistral", "gemma", "phi", "opt"))
def test_layers_of_another_form_are_no_one_call(architecture):
    """There are no kernels for rotations, other norms, gates or nn.Linear: their ops are called in turn."""
    made, _ = recorded(architecture=architecture, batch=1)
    before = made.names()
    made.through(one_call, Step(rows=1, one_call=True))
    assert made.names() == before


def _other_scale(calls):
    calls[1].arguments["scale"] *= 2


def _other_eps(calls):
    norm = calls[5].arguments["norm"]
    calls[5].arguments["norm"] = Norm(norm.kind, norm.weight, norm.bias, 0.5)


def _sinks(calls):
    calls[6].arguments["sinks"] = randn(4)


def _rotation(calls):
    calls[5].arguments["cos"] = calls[5].arguments["sin"] = randn(1, 1, 8)


def _rms_norm(calls):
    calls[8].arguments["norm"] = RMS


def _not_transposed(calls):
    calls[7].arguments["transposed"] = False


def _other_row_of_table(calls):
    """Give the second layer a row of a table that is not the second."""
    table = torch.zeros(4, 3, dtype=torch.int64)
    for place, row in ((0, 0), (5, 3)):
        cache = replace(calls[place].arguments["cache"], table=table, layer=row)
        calls[place].arguments["cache"] = calls[place + 1].arguments["cache"] = cache


def _parallel(calls):
    """Make the second layer's MLP take what its attention takes."""
    calls[8].arguments["x"] = calls[5].arguments["x"]


def _bias(calls):
    """Take the bias of the second layer's projection away."""
    calls[7].arguments["bias"] = None


def _activation(calls):
    calls[7].arguments["activation"] = Activation.RELU


def _op_between(calls):
    """Put an op between two layers."""
    out = Register(calls[4].out.index)
    calls.insert(5, Call(torch.ops.aten.neg.default, {"self": calls[4].out}, out))
    calls[6].arguments["x"] = calls[8].arguments["residual"] = out


def _read_behind(calls):
    """Let what is inside the layers be read behind them, too."""
    out = Register(calls[-1].out.index + 1)
    calls.append(Call(torch.ops.aten.sum.default, {"self": calls[-3].out}, out))


@pytest.mark.parametrize(
    "change",
    (
        _other_scale,
        _other_eps,
        _sinks,
        _rotation,
        _rms_norm,
        _not_transposed,
        _other_row_of_table,
        _parallel,
        _bias,
        _activation,
        _op_between,
        _read_behind,
    ),
    ids=lambda f: f.__name__,
)
def test_layers_that_differ_are_no_one_call(change):
    made, _ = one_gpt2()
    change(made.program.calls)
    before = made.names()
    made.through(one_call, Step(rows=1, one_call=True))
    assert made.names() == before


# ---- which op computes what ----------------------------------------------------------------------------------

MANY = dict(rows=1000)


@pytest.mark.parametrize("weights", (None, "int8", "int4_g32"))
def test_many_rows(weights):
    made, expected = recorded(weights=weights, how=MANY)
    assert not {"gemv", "gemv_swiglu", "qkv_rope_append", "packed_gemv", "packed_gemv_swiglu"} & set(made.names())
    assert {"rms_norm", "rope_append", "decode_attention"} <= set(made.names())
    torch.testing.assert_close(made.run(), expected)


def test_projections_of_one_input_share_its_norm():
    """Qwen3's queries and keys have norms of their own, and show this."""
    made, expected = recorded(architecture="qwen3", how=MANY)
    layers = len(made.part.layers)
    norms = made.names().count("rms_norm")
    assert norms == 2 * layers + 1, "one for query, key and value, one for the MLP, and the last"
    torch.testing.assert_close(made.run(), expected)


def test_another_attention():
    made, expected = recorded(how=dict(rows=BATCH, attention=True))
    assert made.names().count("attend") == len(made.part.layers) and "decode_attention" not in made.names()
    torch.testing.assert_close(made.run((made.register, made.attention)), expected)


def test_weights_side_by_side_are_one():
    """And so are halves of one; what is apart, or of other numbers, is not."""
    whole = quantize(randn(96, 256), FORMATS["int4_g32"])
    first, second, third = whole.split([32, 16, 48])
    together = joined([first, second, third])
    assert all(torch.equal(getattr(together, name), getattr(whole, name)) for name in ("quants", "scales"))
    assert together.quants.data_ptr() == whole.quants.data_ptr() and together.out_features == 96
    assert [each.out_features for each in halves(together)] == [48, 48]
    other = quantize(randn(32, 256), FORMATS["int4_g32"])
    assert joined([first, other]) is None and joined([second, first]) is None and joined([first, third]) is None
    assert joined([first, PlainWeight(randn(4, 256))]) is None
    assert joined([first, replace(second, multiplier=4 * second.multiplier)]) is None


def test_prefetch_next_weight():
    made, expected = recorded()
    calls = made.through(prefetch_next_weight, Step(rows=BATCH, programmatic_launch=True))
    matrices = {"gemv": "weight", "gemv_swiglu": "gate_weight", "qkv_rope_append": "q_weight"}
    told = 0
    for call, following in zip(calls, calls[1:]):
        name = following.name.removesuffix(".default")
        if call.name.startswith("gemv") and name in matrices:
            assert call.arguments["next_weight"] is following.arguments[matrices[name]]
            told += 1
        else:
            assert "next_weight" not in call.arguments
    assert told == 3 * len(made.part.layers) - (0 if told % 3 == 0 else 1)
    assert torch.equal(made.run(), expected)


def test_the_first_of_several_matrices_is_fetched():
    program = Program()
    x, weights = program.register(), [torch.zeros(8, 8) for _ in range(4)]
    hidden = program.emit(ops.gemv.overload, x=x, weight=weights[0])
    program.emit(ops.joined_gemv.overload, x=hidden, weights=weights[1:])
    first, second = behind(prefetch_next_weight, program, Step(rows=1, programmatic_launch=True))
    assert first.arguments["next_weight"] is weights[1] and "next_weight" not in second.arguments


def test_ranks_send_through_the_memory_of_gpus():
    """Calls of a captured step become ops whose slots rotate: no call has a neighbor's, also from step to step."""
    ranks = SimpleNamespace(rank=0, size=2, peers=SimpleNamespace(buffers=lambda dtype: [dtype] * 2, status="status"))
    shard = Shard(ranks, ShardStyle.ROWS, 0, 64, 64, torch.float32)
    head = Shard(ranks, ShardStyle.GATHERED, 0, 2 * 40, 40, torch.float32)
    odd = Shard(ranks, ShardStyle.GATHERED, 0, 79, 40, torch.float32)
    for count in range(2, 12):
        program = Program()
        x = program.register()
        for _ in range(count - 1):
            x = program.emit(summed, x=x, residual=x, shard=shard)
        program.emit(gathered, x=x, shard=odd)
        program.emit(gathered, x=x, shard=head)
        before = list(program.calls)
        plain = behind(through_peers, program, Step(rows=1))
        assert plain == before and [call.op for call in plain] == [summed] * (count - 1) + [gathered] * 2
        made = behind(through_peers, program, Step(rows=1, programmatic_launch=True))
        assert [call.out for call in made] == [call.out for call in before]
        assert made[-2].op is gathered, "shards of different widths go through torch.distributed"
        sent = [call for call in made if call.op in (ops.sum_ranks.overload, ops.gather_ranks.overload)]
        slots = [call.arguments["slot"] for call in sent]
        assert len(sent) == count and slots[0] == 0 and slots[-1] == SLOTS - 1
        turns = slots * 2
        assert all(here != there for here, there in zip(turns, turns[1:])), slots
        large = behind(through_peers, program, Step(rows=10**5, programmatic_launch=True))
        assert large == before


def test_recording_holds_on_to_nothing():
    """Binders are kept by op, which is a function of a module and never one that a step has made for itself."""
    made, _ = recorded(how=dict(rows=1000, beside=True))
    for call in made.program.calls:
        op = call.op
        assert isinstance(op, torch._ops.OpOverload) or getattr(sys.modules[op.__module__], op.__name__) is op
