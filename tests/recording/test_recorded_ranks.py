"""Recordings of a rank's step: what ranks put together, and what passes make of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, linear, names, recorded, through
from torch import nn
from torch.nn import functional

from hf_fastpath.compat import ShardStyle
from hf_fastpath.decode.rank_calls import SHARD_KEY, Shard, gathered, own_inputs, summed
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import late_sums, passed, products, views
from hf_fastpath.recording.probing import evaluate

COUNT = 2


def spread(module: nn.Module, style: ShardStyle, total: int) -> nn.Module:
    """Make a module a shard of the second of two ranks."""
    ranks = SimpleNamespace(rank=1, size=COUNT)
    first = total // COUNT
    vars(module)[SHARD_KEY] = Shard(ranks, style, first, total, WIDTH, torch.float32)
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


def test_no_proof_asks_other_ranks():
    recording, model = recorded(lambda m, x, *_: m.first(m.one(x)), one=linear(8), first=rows())
    through(recording, model, [late_sums.late_sums])
    tokens, positions = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    given = {recording.tokens.index: tokens, recording.positions.index: positions}
    with pytest.raises(NotImplementedError, match="no other rank"):
        evaluate(recording.calls, given)
