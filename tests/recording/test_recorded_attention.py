"""The passes of attention over recorded calls: rotations, norms of heads, projections, a model's own attention; and all
passes on a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recordings import WIDTH, assert_same, attention, calls_of, linear, logits, names, parameter, recorded
from torch import nn

from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, head_norms, lengths, modules, own_attention, passed, products, views
from hf_fastpath.recording.passes import attention as heads
from hf_fastpath.recording.recorded_step import Unrecordable

_aten = torch.ops.aten
functional = nn.functional


# ---- attention ------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM = 4, 2, 8
ANGLES = 1.0 / 100 ** (torch.arange(0, DIM, 2) / DIM)


def tables(positions: torch.Tensor, frequencies: torch.Tensor = ANGLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of half a head at positions: cos and sin [batch, query_len, head_dim / 2]."""
    angles = positions[..., None].float() * frequencies.to(positions.device)
    return angles.cos(), angles.sin()


def halves(x, positions):
    cos, sin = (torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions))
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


def scaled(x, positions):
    cos, sin = (1.25 * torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions, ANGLES / 8))
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


def neighbors(x, positions):
    cos, sin = (each.repeat_interleave(2, dim=-1).unsqueeze(1) for each in tables(positions))
    crossed = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + crossed * sin


def partial(x, positions):
    cos, sin = (torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions, ANGLES[:2]))
    turned, rest = x[..., :4], x[..., 4:]
    one, other = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-other, one), dim=-1) * sin, rest), dim=-1)


def complex_numbers(x, positions):
    cos, sin = tables(positions)
    turns = torch.polar(torch.ones_like(cos), positions[..., None].float() * ANGLES).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def half_tables(x, positions):
    cos, sin = (each.unsqueeze(1) for each in tables(positions))
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def in_place(x, positions):
    x = x.contiguous() * 1.0
    x[..., :4] = partial(x, positions)[..., :4]
    return x


def in_place_behind_another(x, positions):
    x = x.contiguous() * 1.0
    first = x[..., :4]
    first.mul_(2)
    return halves(x, positions)


#: how queries and keys are turned -> which elements turn together, how many
ROTATIONS = {
    halves: ("halves", DIM),
    scaled: ("halves", DIM),
    partial: ("halves", 4),
    half_tables: ("halves", DIM),
    neighbors: ("neighbors", DIM),
    complex_numbers: ("neighbors", DIM),
}
LAYOUTS = ("apart", "fused", "grouped")


def attending(rotation, layout: str = "apart", bias: bool = False, **options):
    """A recording of projections, rotation and attention of four heads over two."""

    def step(m, x, positions, cache):
        if layout == "apart":
            rows = m.q(x), m.k(x), m.v(x)
        elif layout == "fused":
            rows = m.qkv(x).split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        else:
            group = HEADS // KV_HEADS
            parts = m.qkv(x).view(*x.shape[:2], KV_HEADS, group + 2, DIM).split((group, 1, 1), dim=3)
            rows = [each.flatten(2) for each in parts]
        q, k, v = (each.unflatten(-1, (-1, DIM)).transpose(1, 2) for each in rows)
        if rotation is not None:
            q, k = rotation(q, positions), rotation(k, positions)
        return m.out(attention(m, q, k, v, cache, **options))

    if layout == "apart":
        inside = dict(q=linear(HEADS * DIM, bias=bias), k=linear(WIDTH, bias=bias), v=linear(WIDTH, bias=bias))
    else:
        inside = dict(qkv=linear((HEADS + 2 * KV_HEADS) * DIM, bias=bias))
    return recorded(step, **inside, out=linear(given=HEADS * DIM))


def _name(rotation) -> str:
    return "none" if rotation is None else rotation.__name__


FRONT = [views.constants, views.constant_views, views.no_change, products.split_products]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotation", (*ROTATIONS, None), ids=_name)
def test_rotations(rotation, layout):
    recording, model = attending(rotation, layout)
    assert_same(recording, model, [*FRONT, heads.rotations])
    (call,) = calls_of(recording, marks.rotated_attention)
    assert not calls_of(recording, marks.append) and not calls_of(recording, marks.attend)
    found = call.arguments
    assert (found["num_heads"], found["num_kv_heads"], found["head_dim"]) == (HEADS, KV_HEADS, DIM)
    assert found["grouped"] == (layout == "grouped")
    if rotation is None:
        assert found["cos"] is found["sin"] is None
    else:
        pairs, count = ROTATIONS[rotation]
        assert found["pairs"] == pairs and len(calls_of(recording, marks.angles)) == 1
        angles = calls_of(recording, marks.angles)[0]
        shown = [
            torch.randn(recording.fact(each).shape).to(recording.fact(each).dtype)
            for each in angles.arguments["tables"]
        ]
        assert {each.shape[-1] for each in angles.arguments["formula"](shown, pairs)} == {count}
    assert names(recording)[-2:] == ["view", "linear"] or names(recording)[-3:-1] == ["rotated_attention", "view"]


def _only_queries(x, positions):
    return halves(x, positions) if x.shape[1] == HEADS else x


def _other_angles(x, positions):
    return halves(x, positions if x.shape[1] == HEADS else positions + 1)


def _squared(x, positions):
    return halves(x, positions).square()


ODD = (_only_queries, _other_angles, _squared, in_place, in_place_behind_another)


@pytest.mark.parametrize("rotation", ODD, ids=lambda each: each.__name__)
def test_what_is_nearly_a_rotation_stays(rotation):
    recording, model = attending(rotation)
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert not calls_of(recording, marks.rotated_attention)
    assert len(calls_of(recording, marks.append)) == len(calls_of(recording, marks.attend)) == 1


@pytest.mark.parametrize("learned", (nn.Parameter(torch.ones(DIM)), torch.ones(DIM)), ids=("parameter", "buffer"))
def test_a_factor_that_may_change_stays(learned):
    """It is one when the step is recorded, as in a model that was just made, and in one of two layers."""

    def step(m, x, positions, cache):
        for layer in range(2):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            q = halves(q, positions) * (m.factor if layer else 1)
            x = x + m.out(attention(m, q, halves(k, positions), v, cache, layer=layer))
        return x

    inside = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    recording, model = recorded(step, layers=2, **inside, factor=learned)
    plain, _ = recorded(step, layers=2, **inside, factor=learned)
    plain.calls[0].arguments["weight"] = model.embed.weight
    before = logits(plain)
    assert_same(recording, model, PASSES)
    with torch.no_grad():
        model.body.factor.mul_(-1.5)
    expected = logits(plain)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(logits(recording), expected, rtol=1e-9, atol=1e-12)


def test_options_of_attention_are_kept():
    recording, model = attending(halves, scaling=0.7, softcap=5.0, s_aux=None)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.projected_attention)
    assert (call.arguments["scale"], call.arguments["softcap"], call.arguments["layer"]) == (0.7, 5.0, 0)


def test_layers_share_their_angles():
    def step(m, x, positions, cache):
        for layer in range(2):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            q, k = halves(q, positions), halves(k, positions)
            x = x + m.out(attention(m, q, k, v, cache, layer=layer))
        return x

    recording, model = recorded(
        step, layers=2, q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM)
    )
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert len(calls_of(recording, marks.rotated_attention)) == 2
    assert [call.arguments["layer"] for call in calls_of(recording, marks.rotated_attention)] == [0, 1]


class OnePlus(nn.Module):
    """An RMS norm with the factor 1 + weight."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = parameter(size)

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, 1e-6)


def _rms_norm(size: int, eps: float = 1e-6) -> nn.RMSNorm:
    made = nn.RMSNorm(size, eps=eps)
    made.weight = parameter(size)
    return made


def _plain_norm(x):
    return functional.rms_norm(x, (DIM,), None, 1e-6)


def norm_behind(x, positions):
    """Llama 4 and nanochat norm queries and keys that are turned already."""
    return _plain_norm(halves(x, positions))


def norm_in_front(x, positions):
    return neighbors(_plain_norm(x), positions)


@pytest.mark.parametrize(("rotation", "pairs"), ((norm_behind, "halves"), (norm_in_front, "neighbors")))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_without_weights_are_one_call_with_rotation(layout, rotation, pairs):
    recording, model = attending(rotation, layout)
    assert_same(recording, model, [*FRONT, heads.rotations])
    (call,) = calls_of(recording, marks.rotated_attention)
    found = call.arguments["head_norms"]
    assert (call.arguments["pairs"], found.eps) == (pairs, 1e-6) and "normed" not in names(recording)
    assert found.q.tolist() == found.k.tolist() == [1.0] * DIM


def norm_of_a_part(x, positions):
    return torch.cat((functional.rms_norm(halves(x, positions)[..., :4], (4,), None, 1e-6), x[..., 4:]), dim=-1)


def norm_behind_a_factor(x, positions):
    return _plain_norm(scaled(x, positions) * (1.0 if x.shape[1] == HEADS else 3.0))


@pytest.mark.parametrize("rotation", (norm_of_a_part, norm_behind_a_factor), ids=_name)
def test_other_norms_of_turned_heads_stay(rotation):
    recording, model = attending(rotation)
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert "normed" in names(recording)


def _late(positions):
    """A factor that is one up to position 5,000, far behind every position that is tried."""
    return (1 + 0.1 * torch.log1p(torch.floor(positions.float() / 5000)))[:, None, :, None]


def late_factor(x, positions):
    """Ministral 3 multiplies queries by a number that grows with their position."""
    turned = halves(x, positions)
    return turned * _late(positions) if x.shape[1] == HEADS else turned


def late_factor_alone(x, positions):
    return x * _late(positions) if x.shape[1] == HEADS else x


@pytest.mark.parametrize("rotation", (late_factor, late_factor_alone), ids=_name)
def test_a_factor_of_queries(rotation):
    recording, model = attending(rotation)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.projected_attention)
    assert recording.fact(call.arguments["factor"]).numel() == 1
    one, other = (logits(recording, position=position) for position in (9, 20_000))
    if rotation is late_factor_alone:
        assert not torch.allclose(one, other), "the factor counts"


def late_factor_of_both(x, positions):
    return halves(x, positions) * _late(positions)


def late_rotation(x, positions):
    return halves(x, positions) + (_late(positions) - 1) * x.flip(-1)


@pytest.mark.parametrize("rotation", (late_factor_of_both, late_rotation), ids=_name)
def test_what_differs_at_positions_that_are_not_tried_stays(rotation):
    recording, model = attending(rotation)
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert not calls_of(recording, marks.rotated_attention)


def normed_heads(q_norm: nn.Module, k_norm: nn.Module, rotation: Any = halves, of_all: bool = False):
    """A recording of attention of queries and keys with norms, which are of each head or ``of_all`` at once."""

    def step(m, x, positions, cache):
        q, k, v = m.q(x), m.k(x), m.v(x)
        if of_all:
            q, k = m.q_norm(q), m.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, DIM)) for each in (q, k, v))
        if not of_all:
            q, k = m.q_norm(q), m.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return m.out(attention(m, rotation(q, positions), rotation(k, positions), v, cache))

    inside = dict(q=linear(HEADS * DIM, bias=True), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    return recorded(step, **inside, q_norm=q_norm, k_norm=k_norm)


FRONT_OF_HEADS = [*FRONT, heads.rotations, head_norms.head_norms, heads.projections]


@pytest.mark.parametrize("rotation", (halves, neighbors, partial), ids=_name)
@pytest.mark.parametrize("of_all", (False, True))
@pytest.mark.parametrize(("norm", "offset"), ((_rms_norm, 0.0), (OnePlus, 1.0)), ids=("rms", "one_plus"))
def test_norms_of_heads_are_one_call_with_rotation(norm, offset, of_all, rotation):
    q_norm, k_norm = (norm(count * DIM if of_all else DIM) for count in (HEADS, KV_HEADS))
    recording, model = normed_heads(q_norm, k_norm, rotation, of_all)
    assert_same(recording, model, [modules.module_formulas, *FRONT_OF_HEADS])
    (call,) = calls_of(recording, marks.projected_attention)
    found = call.arguments["head_norms"]
    assert found.q is model.body.q_norm.weight and found.k is model.body.k_norm.weight
    assert found.eps == pytest.approx(1e-6) and found.weight_offset == offset
    assert not calls_of(recording, marks.normed)


@pytest.mark.parametrize(("batch", "query_len"), ((1, 1), (3, 1), (2, 3)))
def test_norms_of_heads_beside_gates(batch, query_len):
    """Queries and gates are one projection, head by head (Qwen3-Next): the call takes queries where they lie."""

    def step(m, x, positions, cache):
        q, gate = m.q(x).view(*x.shape[:2], HEADS, 2 * DIM).chunk(2, dim=-1)
        k, v = (each(x).unflatten(-1, (-1, DIM)) for each in (m.k, m.v))
        q, k, v = (each.transpose(1, 2) for each in (m.q_norm(q), m.k_norm(k), v))
        out = attention(m, halves(q, positions), halves(k, positions), v, cache)
        return m.out(out * gate.reshape(*x.shape[:2], -1).sigmoid())

    inside = dict(q=linear(2 * HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    recording, model = recorded(step, batch, query_len, **inside, q_norm=OnePlus(DIM), k_norm=OnePlus(DIM))
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.rotated_attention)
    found, (q, k, _) = call.arguments["head_norms"], map(recording.fact, call.arguments["sources"])
    assert found.q is model.body.q_norm.weight and found.k is model.body.k_norm.weight and found.weight_offset == 1
    assert q.shape == (batch, query_len, HEADS, DIM) and q.stride(2) == 2 * DIM and k.shape[2:] == (KV_HEADS * DIM,)
    assert not calls_of(recording, marks.normed)


def test_norms_of_heads_that_differ_stay_in_front_of_rotation():
    for q_norm, k_norm in (
        (_rms_norm(DIM), _rms_norm(DIM, eps=1e-3)),
        (_rms_norm(DIM), OnePlus(DIM)),
        (_rms_norm(DIM), nn.LayerNorm(DIM)),
        (_rms_norm(DIM), nn.Identity()),
    ):
        recording, model = normed_heads(q_norm, k_norm)
        assert_same(recording, model, [modules.module_formulas, *FRONT_OF_HEADS])
        (call,) = calls_of(recording, marks.rotated_attention)
        assert "head_norms" not in call.arguments and calls_of(recording, marks.normed)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("layout", ("apart", "fused"))
@pytest.mark.parametrize(
    "rotation", (halves, partial, scaled, None), ids=lambda each: getattr(each, "__name__", "none")
)
def test_projections_are_one_call_with_attention(rotation, layout, bias):
    recording, model = attending(rotation, layout, bias)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.projected_attention)
    assert len(calls_of(recording, marks.linear)) == 1, "the one behind attention"
    assert [each.shape[0] for each in call.arguments["weights"]] == [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    assert rotation is None or call.arguments["pairs"] == ROTATIONS[rotation][0]
    assert all((each is not None) == bias for each in call.arguments["biases"])


def test_projections_by_group_stay_together():
    recording, model = attending(halves, "grouped")
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    assert not calls_of(recording, marks.projected_attention)
    assert len(calls_of(recording, marks.rotated_attention)) == 1


def test_projections_that_are_read_twice_stay_apart():
    def step(m, x, positions, cache):
        rows = m.q(x), m.k(x), m.v(x)
        q, k, v = (each.unflatten(-1, (-1, DIM)).transpose(1, 2) for each in rows)
        return m.out(attention(m, q, k, v, cache)) * rows[1]

    recording, model = recorded(step, q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    assert not calls_of(recording, marks.projected_attention)


# ---- attention of a model's own -------------------------------------------------------------------------------------


def own(weigh, layers: int = 1, query_len: int = 1, **inside):
    """A recording of attention that the model computes by itself; ``weigh`` makes weights of scores."""

    def step(m, x, positions, cache):
        for layer in range(layers):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            k, v = cache.update(k, v, layer)
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
            weights = weigh(m, q @ k.transpose(-1, -2), layer)
            x = x + m.out((weights @ v).transpose(1, 2).flatten(2))
        return x

    modules_ = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    return recorded(step, layers=layers, query_len=query_len, **modules_, **inside)


SLOPES = 2.0 ** -torch.arange(1, 1 + HEADS)


def _plain_scores(m, scores, layer):
    return (scores / DIM**0.5).softmax(-1)


def _other_scale(m, scores, layer):
    return torch.softmax(scores * 0.4, dim=-1, dtype=torch.float32)


def _alibi(m, scores, layer):
    bias = m.slopes[:, None, None] * torch.arange(scores.shape[-1])
    return (scores * DIM**-0.5 + bias).softmax(-1)


@pytest.mark.parametrize(
    ("weigh", "scale", "slopes"),
    ((_plain_scores, DIM**-0.5, None), (_other_scale, 0.4, None), (_alibi, DIM**-0.5, SLOPES)),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_attention_of_a_models_own(weigh, scale, slopes):
    recording, model = own(weigh, slopes=SLOPES.clone())
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    (call,) = calls_of(recording, marks.attend)
    assert call.arguments["scale"] == pytest.approx(scale) and call.arguments["window"] == 0
    found = call.arguments["slopes"]
    assert found is None if slopes is None else torch.allclose(found, slopes)
    assert "_softmax" not in names(recording) and "bmm" not in names(recording)


def _banded(m, scores, layer):
    """Attention with the row of a table of positions that says which others a token sees, as GPT-Neo keeps one."""
    count, length = scores.shape[-2:]
    return scores.masked_fill(~m.seen[:, :, length - count : length, :length], torch.finfo(scores.dtype).min).softmax(
        -1
    )


def _band(window: int) -> torch.Tensor:
    table = torch.ones(64, 64, dtype=torch.bool).tril().view(1, 1, 64, 64)
    return table ^ table.tril(-window)


@pytest.mark.parametrize("query_len", (1, 3))
@pytest.mark.parametrize(("window", "found"), ((7, 7), (64, 0)))
def test_windows_in_a_table_of_positions(window, found, query_len):
    recording, model = own(_banded, seen=_band(window), query_len=query_len)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    (call,) = calls_of(recording, marks.attend)
    assert call.arguments["window"] == found


@pytest.mark.parametrize(
    "table", (_band(7) | (torch.arange(64) == 3), _band(7).roll(1, dims=2)), ids=("a token for all", "other rows")
)
def test_tables_of_positions_that_are_no_window_stay(table):
    recording, model = own(_banded, seen=table)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    assert not calls_of(recording, marks.attend)


def _capped(m, scores, layer):
    return (5 * torch.tanh(scores / 5)).softmax(-1)


def _sigmoids(m, scores, layer):
    return torch.sigmoid(scores)


def _squared_distance(m, scores, layer):
    return (scores - 1e-4 * torch.arange(scores.shape[-1]).square()).softmax(-1)


@pytest.mark.parametrize("weigh", (_capped, _sigmoids, _squared_distance), ids=lambda each: each.__name__)
def test_what_is_nearly_attention_stays(weigh):
    recording, model = own(weigh)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    assert not calls_of(recording, marks.attend)


def test_layers_whose_masks_differ_are_told_apart():
    def masked(m, scores, layer):
        seen = (m.all, m.near)[layer][: scores.shape[-1]]
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)

    everything = torch.ones(64, dtype=torch.bool)
    near = torch.arange(64) > 40
    recording, model = own(masked, layers=2, all=everything, near=near)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    assert [call.arguments["layer"] for call in calls_of(recording, marks.attend)] in ([], [0])


def test_positions_are_counted_from_the_cache():
    def step(m, x, positions, cache):
        start = cache.get_seq_length()
        places = torch.arange(start, start + x.shape[1])
        return m.out(x + m.learned(places))

    recording, model = recorded(step, out=linear(), learned=nn.Embedding(64, WIDTH))
    lengths.positions_in_text(recording, model)
    recording.drop_unread()
    assert len(calls_of(recording, marks.text_positions)) == 1
    table = model.body.learned.weight.double()
    one, other = (logits(recording, position=position) for position in (3, 8))
    expected = (table[8] - table[3]) @ model.body.out.weight.double().t()
    torch.testing.assert_close((other - one)[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_sizes_that_follow_the_text_are_refused():
    recording, model = recorded(lambda m, x, positions, cache: x * torch.ones(cache.get_seq_length()).sum())
    with pytest.raises(Unrecordable, match="a size that follows the length of the text"):
        passed(recording, model)


# ---- a layer --------------------------------------------------------------------------------------------------------


def test_attention_gives_features_side_by_side():
    recording, model = attending(halves)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections, heads.flat_attention, views.no_change])
    assert names(recording)[-2:] == ["projected_attention", "linear"]
    assert recording.fact(recording.calls[-2].out).shape == (1, 1, HEADS * DIM)


@pytest.mark.each_pair
@pytest.mark.parametrize(("batch", "query_len"), ((3, 1), (1, 4), (2, 3)))
@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda each: each.__name__)
def test_all_passes_on_a_layer_of_several_tokens(rotation, batch, query_len):
    def step(m, x, positions, cache):
        y = m.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
        q, k = rotation(q, positions), rotation(k, positions)
        x = x + m.out(attention(m, q, k, v, cache))
        y = m.norm(x)
        return x + m.down(functional.silu(m.gate(y)) * m.up(y))

    inside = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    inside |= dict(norm=nn.RMSNorm(WIDTH, eps=1e-6), gate=linear(24), up=linear(24), down=linear(given=24))
    recording, model = recorded(step, batch, query_len, **inside)
    assert_same(recording, model, PASSES)
    behind = [call.op for call in recording.calls if call.op not in (_aten.view.default,)][-4:]
    assert behind == [marks.projected_attention, marks.linear, marks.gated, marks.linear]
