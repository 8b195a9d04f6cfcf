"""greedy_token: the results of torch.argmax and transformers' bookkeeping; ties, NaN, end tokens, the record."""

from __future__ import annotations

import pytest
import torch
from checks import DTYPES, arguments, is_native, over_dtypes, replaced, tensors, written
from memory import duplicate, same_bits

from hf_fastpath.ops.greedy_token import SPEC
from hf_fastpath.registry import OpInputError, Sample


def assert_matches(sample: Sample) -> dict[str, torch.Tensor]:
    """Assert that the op leaves every tensor as the reference does; return the tensors by name."""
    mine, expected = sample.map_tensors(duplicate), sample.map_tensors(duplicate)
    SPEC(**arguments(SPEC, mine))
    SPEC.reference(**arguments(SPEC, expected))
    for name, tensor in tensors(SPEC, expected).items():
        assert same_bits(tensors(SPEC, mine)[name], tensor), name
        assert name in written(SPEC) or same_bits(tensor, tensors(SPEC, sample)[name]), f"{name} was written"
    return tensors(SPEC, mine)


def make(device, logits, **options) -> Sample:
    """Make a call on ``logits`` with every row unfinished."""
    batch = logits.shape[0]
    call = {
        "logits": logits,
        "unfinished": torch.ones(batch, device=device, dtype=torch.long),
        "tokens": torch.full((batch, 1), -1, device=device),
        "positions": torch.zeros(batch, 1, device=device, dtype=torch.long),
        "seq_lens": torch.ones(batch, device=device, dtype=torch.int32),
        "record": torch.full((4, 2, batch), -1, device=device),
    }
    return Sample(**(call | options))


@over_dtypes
def test_greedy_token_matches_reference(device, dtype):
    for sample in SPEC.samples(device, dtype):
        assert_matches(sample)


@over_dtypes
def test_greedy_token_handles_odd_sizes(device, dtype):
    for batch, vocab_size in ((1, 2), (2, 7), (3, 33), (16, 1025), (5, 4097), (1, 128256), (2, 50257)):
        assert_matches(make(device, torch.randn(batch, vocab_size, device=device).to(dtype)))


@over_dtypes
def test_greedy_token_handles_views(device, dtype):
    """Rows may start anywhere, and rows and columns may be strided; written tensors have to be contiguous."""
    wide = torch.randn(6, 300, device=device).to(dtype)
    for logits in (wide[:, 1:290], wide[::2], wide[1:, 8:], wide.t()[:6].t(), wide[:, ::3], wide[:1].expand(4, -1)):
        assert_matches(make(device, logits))
    sample = make(device, wide)
    for name in ("tokens", "positions", "unfinished", "seq_lens"):
        given = tensors(SPEC, sample)[name]
        spread = torch.zeros((*given.shape, 2), device=device, dtype=given.dtype)[..., 0]
        with pytest.raises(OpInputError, match=f"{name} is written and has strides"):
            SPEC(**arguments(SPEC, replaced(SPEC, sample, **{name: spread})))


@over_dtypes
def test_greedy_token_writes_every_element(device, dtype):
    """The op writes the record's own slot of every row, and no other."""
    logits = torch.randn(3, 500, device=device).to(dtype)
    lens = torch.tensor([0, 5, 1_000_006], device=device, dtype=torch.int32)
    got = assert_matches(make(device, logits, seq_lens=lens))
    assert (got["record"] != -1).sum() == 6
    assert got["record"][[1, 2, 3], 0, [0, 1, 2]].tolist() == logits.argmax(-1).tolist()


@over_dtypes
def test_greedy_token_ties_and_special_values(device, dtype):
    """The first of equal values wins, also of zeros of both signs; NaN is the largest; infinities are ordered."""
    inf, nan = float("inf"), float("nan")
    rows = [
        [0.0, 1.0, 1.0, 0.5],
        [-0.0, 0.0, -1.0, -1.0],
        [0.0, -0.0, -1.0, -1.0],
        [1.0, nan, inf, nan],
        [-inf, -inf, -inf, -inf],
        [-inf, -3.0, -inf, -3.0],
        [inf, inf, 0.0, 0.0],
    ]
    got = assert_matches(make(device, torch.tensor(rows, device=device).to(dtype)))
    assert got["tokens"].flatten().tolist() == [1, 0, 0, 1, 0, 1, 0]
    for place in (0, 1, 17, 1023, 1024, 5000, 9999):
        logits = torch.zeros(1, 10000, device=device, dtype=dtype)
        logits[0, place:] = 2.0
        assert assert_matches(make(device, logits))["tokens"].item() == place


def test_greedy_token_finishes_rows(device):
    """A row that chooses an end token stays finished and is padded from then on."""
    logits = torch.zeros(3, 10, device=device)
    logits[:, 4] = 1.0
    logits[1, 7] = 2.0
    end = {"eos_tokens": torch.tensor([7, 9], device=device), "pad_token": torch.tensor([2], device=device)}
    sample = make(device, logits, **end, unfinished=torch.tensor([1, 1, 0], device=device))
    got = assert_matches(sample)
    assert got["tokens"].flatten().tolist() == [4, 7, 2] and got["unfinished"].tolist() == [1, 0, 0]
    again = assert_matches(replaced(SPEC, sample, unfinished=got["unfinished"]))
    assert again["tokens"].flatten().tolist() == [4, 2, 2] and again["unfinished"].tolist() == [1, 0, 0]


def test_greedy_token_records_in_pinned_memory(cuda):
    """The host reads what a CUDA call wrote, once an event after it has passed."""
    sample = make(cuda, torch.randn(2, 1000, device=cuda), record=torch.zeros(4, 2, 2, dtype=torch.long).pin_memory())
    SPEC(**arguments(SPEC, sample))
    torch.cuda.synchronize()
    given = sample.kwargs
    assert given["record"][2, 0].tolist() == given["logits"].argmax(-1).tolist() == given["tokens"].flatten().tolist()


def test_greedy_token_opcheck(device):
    for sample in SPEC.samples(device, torch.float32):
        torch.library.opcheck(SPEC.overload, sample.args, sample.kwargs)


def test_greedy_token_replays_in_cuda_graph(cuda):
    sample = make(
        cuda, torch.randn(2, 3000, device=cuda), seq_lens=torch.tensor([1, 1], device=cuda, dtype=torch.int32)
    )
    given = arguments(SPEC, sample)
    SPEC(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SPEC.overload(**given)
    for step in range(3, 7):
        given["logits"].copy_(torch.randn(2, 3000, device=cuda))
        graph.replay()
        assert given["tokens"].flatten().tolist() == given["logits"].argmax(-1).tolist()
        assert given["seq_lens"].tolist() == [step, step]


def test_greedy_token_rejects_bad_input(device):
    sample = make(device, torch.randn(2, 50, device=device))
    logits = sample.kwargs["logits"]
    bad = (
        ({"logits": logits.double()}, "logits is torch.float64"),
        ({"logits": logits[0]}, "logits is"),
        ({"logits": logits[:, :0]}, "logits is"),
        ({"tokens": torch.zeros(3, 1, device=device, dtype=torch.long)}, "tokens has shape"),
        ({"seq_lens": torch.zeros(2, device=device, dtype=torch.long)}, "seq_lens has dtype"),
        ({"positions": torch.zeros(3, 1, device=device, dtype=torch.long)}, "positions has shape"),
        ({"record": torch.zeros(4, 2, 3, device=device, dtype=torch.long)}, "record is"),
        ({"record": torch.zeros(0, 2, 2, device=device, dtype=torch.long)}, "record is"),
        ({"eos_tokens": torch.zeros(1, device=device, dtype=torch.long)}, "eos_tokens and pad_token go together"),
    )
    for change, message in bad:
        call = replaced(SPEC, sample, **change)
        with pytest.raises(OpInputError, match=message):
            SPEC(**call.kwargs)
        if is_native(SPEC, device):
            with pytest.raises(RuntimeError):
                SPEC.overload(**call.kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_token_reference_is_transformers(dtype):
    """Several steps of the reference give what the lines of ``GenerationMixin._sample`` give."""
    from transformers.generation.stopping_criteria import EosTokenCriteria

    criterion, pad = EosTokenCriteria([3, 5]), torch.tensor(0)
    sample = make(torch.device("cpu"), torch.zeros(4, 8), eos_tokens=torch.tensor([3, 5]), pad_token=pad)
    unfinished = torch.ones(4, dtype=torch.long)
    for _ in range(6):
        logits = torch.randn(4, 8).to(dtype)
        SPEC.reference(**(sample.kwargs | {"logits": logits}))
        tokens = torch.argmax(logits.float(), dim=-1) * unfinished + pad * (1 - unfinished)
        unfinished = unfinished & ~criterion(tokens[:, None], None)
        assert sample.kwargs["tokens"][:, 0].tolist() == tokens.tolist()
        assert sample.kwargs["unfinished"].tolist() == unfinished.tolist()
