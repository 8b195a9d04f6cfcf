"""Recordings of a rank's step: what ranks put together, and what passes make of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, linear, names, recorded, through
from torch import nn
from torch.nn import functional

from hf_fastpath.compat import ShardStyle
from hf_fastpath.decode.ranks.rank_calls import SHARD_KEY, Shard, gathered, own_inputs, summed
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import joined_products, late_sums, passed, products, views
from hf_fastpath.recording.probing import evaluate

COUNT = 2


def spread(module: nn.Module, style: ShardStyle, total: int) -> nn.Module:
    """Make a module a shard of the second of two ranks."""
    ranks, features = SimpleNamespace(rank=1, size=COUNT), len(module.weight)
    vars(module)[SHARD_KEY] = Shard(ranks, style, total // COUNT, total, features, torch.float32)
    return module


def rows(given: int = WIDTH // COUNT, style: ShardStyle = ShardStyle.ROWS) -> nn.Module:
    """A projection whose input features are spread."""
    return spread(linear(given=given), style, WIDTH)


def test_residuals_and_norms_behind_a_sum():
    def step(m, x, *_):
        x = x + m.first(m.one(x))
        return m.out(functional.rms_norm(x, (WIDTH,), m.norm, 1e-6))

    inside = dict(one=linear(WIDTH // COUNT), first=rows(), out=linear(), norm=nn.Parameter(torch.rand(WIDTH) + 1))
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [late_sums.late_sums, products.residuals, products.norms_in_front])
    assert names(recording) == ["linear", "linear", "summed", "linear"]
    product, total = recording.calls[-3:-1]
    assert product.arguments.get("residual") is None and total.arguments["residual"] is not None


def test_two_outputs_are_summed_once():
    def step(m, x, *_):
        half = m.one(x)
        shared = m.first(half)
        routed = m.second(half.view(-1, WIDTH // COUNT)).view(x.shape)
        return x + (routed + shared)

    recording, model = recorded(step, batch=2, one=linear(WIDTH // COUNT), first=rows(), second=rows())
    assert len(calls_of(recording, summed)) == 2
    passes = [late_sums.late_sums, products.unflattened, views.no_change, products.residuals]
    assert_same(recording, model, passes)
    (total,) = calls_of(recording, summed)
    assert total.arguments["residual"] is not None and recording.calls[-1] is total
    assert not {"add", "view"} & set(names(recording))


@pytest.mark.parametrize(
    "reads",
    (lambda m, y: y * y, lambda m, y: m.out(y.view(1, -1, 4).repeat(1, 1, 4))[:, :1], lambda m, y: m.out(y) + y),
)
def test_sums_stay_where_other_features_or_several_calls_read_them(reads):
    recording, model = recorded(lambda m, x, *_: reads(m, m.first(m.one(x))), one=linear(8), first=rows(), out=linear())
    before = names(recording)
    assert_same(recording, model, [late_sums.late_sums])
    assert names(recording) == before


def test_a_gate_of_gathered_features():
    def step(m, x, *_):
        gate, up = m.both(x).chunk(2, dim=-1)
        return m.down(up * functional.silu(gate))

    both = spread(linear(WIDTH), ShardStyle.GATHERED, 2 * WIDTH)
    recording, model = recorded(step, both=both, down=rows(style=ShardStyle.SPLIT_ROWS))
    recording = passed(recording, model)
    ((whole,), (glu,), (part,)) = (calls_of(recording, op) for op in (gathered, marks.glu, own_inputs))
    assert recording.fact(whole.out).shape[-1] == 2 * WIDTH
    assert recording.fact(glu.out).shape[-1] == WIDTH and recording.fact(part.out).shape[-1] == WIDTH // COUNT
    assert not {"mul", "activated"} & set(names(recording))


@pytest.mark.parametrize(("sizes", "ends"), (((16, 8, 24), (16, 24)), ((16, 8), (0, 16))))
def test_what_one_product_gives_is_gathered_at_once(sizes, ends):
    def step(m, x, *_):
        return m.out(torch.cat([getattr(m, f"part{place}")(x) for place in range(len(sizes))], dim=-1))

    parts = {f"part{n}": spread(linear(size), ShardStyle.GATHERED, COUNT * size) for n, size in enumerate(sizes)}
    recording, model = recorded(step, **parts, out=linear(given=COUNT * sum(sizes)))
    assert_same(recording, model, [joined_products.joined_products, joined_products.joined_gathers])
    assert names(recording) == ["joined_linear", "gathered", *["slice"] * len(sizes), "cat", "linear"]
    (call,) = calls_of(recording, gathered)
    assert (call.arguments["first_end"], call.arguments["second_end"]) == ends
    assert call.arguments["shard"].total == COUNT * call.arguments["shard"].features == COUNT * sum(sizes)


@pytest.mark.parametrize("last", (4, 8))
def test_gathers_of_odd_features_stay_apart(last):
    """Of 4 features, which kernels do not send, and of one more than the other rank has."""

    def step(m, x, *_):
        return m.out(torch.cat((m.one(x), m.other(x)), dim=-1))

    one = spread(linear(), ShardStyle.GATHERED, COUNT * WIDTH)
    other = spread(linear(last), ShardStyle.GATHERED, COUNT * last - (last == 8))
    given = sum(vars(each)[SHARD_KEY].total for each in (one, other))
    recording, model = recorded(step, one=one, other=other, out=linear(given=given))
    through(recording, model, [joined_products.joined_products, joined_products.joined_gathers])
    assert len(calls_of(recording, gathered)) == 2


def test_no_proof_asks_other_ranks():
    recording, model = recorded(lambda m, x, *_: m.first(m.one(x)), one=linear(8), first=rows())
    through(recording, model, [late_sums.late_sums])
    tokens, positions = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    given = {recording.tokens.index: tokens, recording.positions.index: positions}
    with pytest.raises(NotImplementedError, match="no other rank"):
        evaluate(recording.calls, given)
