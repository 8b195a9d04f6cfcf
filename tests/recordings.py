"""Recordings of small decoders, and what they compute: what the tests of the recorder and of its passes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fastpath.compat import CACHE
from hf_fastpath.decode.calls import named_calls
from hf_fastpath.decode.calls.named_calls import Call, HeadNorms, Norm
from hf_fastpath.decode.calls.pass_table import Pass
from hf_fastpath.decode.ranks.rank_calls import gathered
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import modules, products, views
from hf_fastpath.recording.probing import evaluate
from hf_fastpath.recording.recorded_step import Recording, registers_in
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.stand_ins import StandIns
from hf_fastpath.recording.step import record

WIDTH, VOCAB = 16, 13
#: passes in front of those that find gates and activations
FEED_FORWARD = [modules.module_formulas, modules.activation_functions, views.no_change, products.split_products]
#: below every position that a small decoder knows
POSITION = 9


class Decoder(PreTrainedModel):
    """A decoder whose inside is one module.

    Args:
        body: takes hidden states [batch, query_len, 16], positions [batch, query_len] and the cache, and gives logits.
        layers: of the cache.
        entries: of the config.
    """

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, body: nn.Module, layers: int = 1, **entries: Any):
        sizes = dict(hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
        eager = dict(attn_implementation="eager")  # PyTorch's attention has no soft-caps
        super().__init__(LlamaConfig(num_hidden_layers=layers, vocab_size=VOCAB, **(sizes | eager | entries)))
        self.embed, self.body = nn.Embedding(VOCAB, WIDTH), body
        self.eval()

    def forward(self, input_ids, position_ids=None, use_cache=None, return_dict=None, **others):
        return SimpleNamespace(logits=self.body(self.embed(input_ids), position_ids, others[CACHE]))


class Of(nn.Module):
    """A module out of a function.

    Args:
        function: takes the module, hidden states, positions and the cache.
        inside: modules, parameters (tensors of floats), buffers (other tensors), and anything else, by name.
    """

    def __init__(self, function: Callable[..., Any], **inside: Any):
        super().__init__()
        self.function = function
        for name, value in inside.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x, positions=None, cache=None):
        return self.function(self, x, positions, cache)


class Experts(nn.Module):
    """Experts behind transformers' seam."""

    def __init__(self, num_experts: int = 6, width: int = 8, act_fn=None, has_gate=True, has_bias=False, **how):
        super().__init__()
        first, features = ("gate_up_proj", 2 * width) if has_gate else ("up_proj", width)
        sides = {first: (features, WIDTH), "down_proj": (WIDTH, width)}
        for name, each in sides.items():
            each = each[::-1] if how.get("is_transposed") else each
            setattr(self, name, nn.Parameter(torch.randn(num_experts, *each) / 4))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(num_experts, sides[name][0])))
        self.act_fn = act_fn or nn.SiLU()
        how = dict(is_transposed=False, is_concatenated=True, has_post_expert_norm=False) | how
        vars(self).update(how, has_gate=has_gate, has_bias=has_bias, _is_expert_parallel=False, num_experts=num_experts)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1) if self.is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
        return self.act_fn(gate) * up

    def forward(self, x, ids, weights):
        return ALL_EXPERTS_FUNCTIONS["hf_fastpath_recorded"](self, x, ids, weights)


def softmax_first(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of two experts, of a row's scores [rows, experts]."""
    weights, ids = scores.softmax(-1, dtype=torch.float32).topk(2, dim=-1)
    return ids, weights.to(scores.dtype)


def parameter(*shape: int) -> nn.Parameter:
    """Random numbers, none of them close to zero or one."""
    return nn.Parameter(torch.rand(shape) + 1.5)


def linear(features: int = WIDTH, given: int = WIDTH, bias: bool = False) -> nn.Linear:
    """A projection with random numbers."""
    return nn.Linear(given, features, bias=bias)


def rms_one_plus(m, x, *_):
    """An RMS norm whose weight is added to one."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + m.eps)
    return (wide * (1.0 + m.weight.float())).type_as(x)


def plain_rms(m, x, *_):
    """An RMS norm without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.eps)


def recorded(
    function: Callable[..., Any] | nn.Module,
    batch: int = 1,
    query_len: int = 1,
    layers: int = 1,
    entries: dict[str, Any] | None = None,
    **inside: Any,
) -> tuple[Recording, Decoder]:
    """The recording of a decoder around a function or a module, before any pass, and the decoder; ``entries`` are of
    its config."""
    model = Decoder(function if isinstance(function, nn.Module) else Of(function, **inside), layers, **(entries or {}))
    recording = record(Skeleton(model), batch, query_len)
    recording.drop_unread()
    return recording, model


def names(recording: Recording) -> list[str]:
    """What is called, in order, without looking tokens up."""
    found = [getattr(call.op, "__name__", str(call.op)).partition(".")[0] for call in recording.calls]
    return [name for name in found if name != "embedding"]


def calls_of(recording: Recording, op: Any) -> list[Call]:
    """The calls of an op."""
    return [call for call in recording.calls if call.op is op]


def tensors_in(recording: Recording) -> list[torch.Tensor]:
    """Tensors that calls hold."""
    found: list[torch.Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Norm):
            visit([value.weight, value.bias])
        elif isinstance(value, nn.Module):  # experts
            visit(list(value.parameters()))
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)

    for call in recording.calls:
        visit(list(call.arguments.values()))
    return found


# ---- what a recording computes --------------------------------------------------------------------------------------


def logits(recording: Recording, seed: int = 0, position: int = POSITION) -> torch.Tensor:
    """What the calls give in float64, over a cache of random keys, values and states."""
    return computed(recording, seed, position)[0]


def computed(recording: Recording, seed: int = 0, position: int = POSITION) -> list[torch.Tensor]:
    """The logits as of :func:`logits`, and what the calls leave in each state."""
    generator = torch.Generator().manual_seed(seed)
    shape = recording.batch, recording.query_len
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    positions = position + torch.arange(shape[1]).expand(shape)
    given = {recording.tokens.index: tokens, recording.positions.index: positions}
    states = [register for found in recording.states for register in found]
    for register in states:
        shape = recording.fact(register).shape
        given[register.index] = torch.randn(shape, generator=generator, dtype=torch.float64)
    calls = [
        Call(_computing(recording, call, seed, positions[0]), call.arguments, call.out) for call in recording.calls
    ]
    with torch.no_grad():
        values = evaluate(calls, given, _stood_for(recording))
    return [values[recording.logits.index], *(values[register.index] for register in states)]


def _stood_for(recording: Recording) -> dict[int, torch.Tensor]:
    """Return by the id of each stand-in in a list the matrix that it stands for, of weights with adapters."""
    stand_ins, found = StandIns(recording), {}
    for call in recording.calls:
        for each in named_calls.tensors_in(call.arguments):
            if each in stand_ins:
                weight = stand_ins.weight(each, bool(call.arguments.get("transposed")))
                added = sum(part.scale * part.up.double() @ part.down.double() for part in weight.adapters)
                matrix = weight.base.matrix.double()
                found[id(each)] = matrix + (added.t() if weight.base.transposed else added)
    return found


def _computing(recording: Recording, call: Call, seed: int, positions: torch.Tensor) -> Callable[..., Any]:
    """Give a call's op, or what computes what needs a cache."""
    if call.op is marks.text_positions:
        return lambda query_len: positions
    if call.op is marks.angles:
        rows = -1, recording.query_len
        return lambda tables, formula, dtype, pairs: [
            each.reshape(*rows, each.shape[-1]) for each in formula(tables, pairs)
        ]
    store = _Store(seed, (recording.batch, recording.query_len), recording.past)
    if call.op is marks.append:
        return store
    if call.op in marks.OF_RANKS:
        return _of_alike_ranks(call)
    function = {
        marks.attend: _attend,
        marks.rotated_attention: _rotated,
        marks.projected_attention: _projected,
    }.get(call.op)
    if function is None:
        return call.op
    shape = recording.fact(call.out).shape
    return lambda **arguments: function(store, **arguments).reshape(shape)


def _of_alike_ranks(call: Call) -> Callable[..., torch.Tensor]:
    """Give what a call computes if all ranks have the same."""
    count = call.arguments["shard"].ranks.size
    if call.op is gathered:
        return lambda x, shard, first_end=0, second_end=0: torch.cat(
            [part for part in x.tensor_split((first_end, second_end), dim=-1) for _ in range(count)], dim=-1
        )
    return lambda x, residual, shard: count * x + (0 if residual is None else residual)


@dataclass(frozen=True)
class _Store:
    """A cache: what ``update()`` gives.

    Attributes:
        seed: of what it holds.
        tokens: sequences, and new tokens of each.
        past: tokens that it holds.
    """

    seed: int
    tokens: tuple[int, int]
    past: int

    def __call__(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + layer)
        shapes = [(*each.shape[:2], self.past, each.shape[3]) for each in (k, v)]
        past = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [torch.cat((before, new), dim=2) for before, new in zip(past, (k, v))]


def _attend(store, q, states, layer, scale, window, softcap=0.0, sinks=None, slopes=None, bias=None, encoded=None):
    assert encoded is None  # no encoder is stored here
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in states)
    scores = q @ k.mT * scale
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    rows, columns = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * columns
    if bias is not None:
        scores = scores + bias[:, (rows - columns).clamp(0, bias.shape[1] - 1)]
    seen = (columns <= rows) if not window else (columns <= rows) & (columns > rows - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def _rotated(
    store, sources, grouped, cos, sin, pairs, layer, num_heads, num_kv_heads, head_dim, head_norms=None, factor=None,
    **attend
):  # fmt: skip
    rows = torch.cat([each.reshape(*store.tokens, -1) for each in sources], dim=-1)
    if grouped:
        heads = rows.unflatten(-1, (num_kv_heads, num_heads // num_kv_heads + 2, head_dim))
        parts = [each.flatten(2, 3) for each in heads.split((num_heads // num_kv_heads, 1, 1), dim=3)]
    else:
        parts = list(rows.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=2))
    if head_norms is not None:
        for place, weight in enumerate((head_norms.q, head_norms.k)):
            each = parts[place].flatten(2).unflatten(-1, (-1, weight.numel()))
            of_norm = head_norms.weight_offset + weight
            each = nn.functional.rms_norm(each, weight.shape, of_norm.to(each.dtype), head_norms.eps)
            parts[place] = each.reshape(parts[place].shape)
    q, k, v = (each.transpose(1, 2) for each in parts)
    if cos is not None:
        q, k = (_turned(each, cos[:, None], sin[:, None], pairs) for each in (q, k))
    if factor is not None:
        q = q * factor.reshape(-1, 1, q.shape[2], 1)
    return _attend(store, q, store(k, v, layer), layer, **attend)


def _projected(store, x, weights, biases, transposed, norm=None, **others):
    x = x if norm is None else marks.normed(x, norm)
    rows = [marks.linear(x, weight, bias, transposed) for weight, bias in zip(weights, biases)]
    return _rotated(store, rows, False, **others)


def _turned(x, cos, sin, pairs):
    count = cos.shape[-1]
    part, rest = x[..., :count], x[..., count:]
    pairs_of = (count // 2, 2) if pairs == "neighbors" else (2, count // 2)
    both = part.unflatten(-1, pairs_of)
    both = both if pairs == "neighbors" else both.mT
    one, other = both.unbind(-1)
    crossed = torch.stack((-other, one), dim=-1)
    crossed = (crossed if pairs == "neighbors" else crossed.mT).flatten(-2)
    return torch.cat((part * cos + crossed * sin, rest), dim=-1)


def through(recording: Recording, model: nn.Module, passes: Iterable[Pass | Callable[..., None]]) -> None:
    """Put a recording through passes, rows of the table or their functions."""
    for each in passes:
        (each.run if isinstance(each, Pass) else each)(recording, model)
        recording.drop_unread()


def assert_same(recording: Recording, model: nn.Module, passes: Iterable[Pass | Callable[..., None]]) -> None:
    """Put a recording through passes, and assert that each of them leaves what it computes as it was.

    Raises:
        AssertionError: which pass changed it.
    """
    places = [(seed, position) for seed, position in ((0, POSITION), (1, 0), (2, 31))]
    before = [computed(recording, *place) for place in places]
    assert all(torch.isfinite(each).all() and each.abs().max() > 0 for found in before for each in found)
    for each in passes:
        numbers, _held = _written_down(recording)
        through(recording, model, [each])
        if _written_down(recording)[0] == numbers:
            continue
        name = each.name if isinstance(each, Pass) else each.__name__
        for place, expected in zip(places, before):
            for found, wanted in zip(computed(recording, *place), expected, strict=True):
                same = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
                assert same, f"{name} changed what is computed: {found.flatten()[:4]}, {wanted.flatten()[:4]}"


def _written_down(recording: Recording) -> tuple[list[int], list[Any]]:
    """Return the identities of all that a pass may change of a recording, and these objects, so that meanwhile none of
    the numbers comes to stand for a new one."""
    held: list[Any] = [recording.logits, *recording.values]
    waiting: list[Any] = [*recording.states, *recording.calls]
    while waiting:
        value = waiting.pop()
        held.append(value)
        if isinstance(value, Call):
            waiting += [value.op, value.out, *value.arguments, *value.arguments.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, (Norm, HeadNorms)):
            waiting += (getattr(value, each.name) for each in dataclasses.fields(value))
    return list(map(id, held)), held


# ---- attention ------------------------------------------------------------------------------------------------------


def attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, **options: Any) -> Any:
    """Attention of transformers' interface over ``cache``: features [batch, query_len, heads * head_dim]."""
    layer = options.pop("layer", 0)
    k, v = cache.update(k, v, layer)
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    module.is_causal = True
    out, _ = ALL_ATTENTION_FUNCTIONS["hf_fastpath_recorded"](module, q, k, v, None, **options)
    return out.flatten(2)


def registers_read(call: Call) -> set[int]:
    """Numbers of the registers that a call reads."""
    return {register.index for value in call.arguments.values() for register in registers_in(value)}
