"""compare_formats(): its figures and the same figures computed with stock code and dequantized weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from models import CPU, TINY_PYTHON, assert_same_instances, build, heldout_tokens, instances, require_native, trained
from torch import nn
from torch.nn import functional

import hf_fastpath
from hf_fastpath.cli import main as cli
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.quantization import FORMATS

TOKENS = 300


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[:, :-1], use_cache=False).logits[0].double().log_softmax(-1)


def test_figures_are_those_of_the_dequantized_model():
    stock = copy.deepcopy(trained(CPU)[0])
    ids = heldout_tokens(TOKENS)
    before, values = instances(stock), copy.deepcopy(stock.state_dict())
    found = hf_fastpath.compare_formats(stock, {"input_ids": ids}, ("int8", "int4"), lm_head="int8")
    assert_same_instances(instances(stock), before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in stock.state_dict().items())
    own = log_probabilities(stock, ids)
    text = ids[0, 1:]
    assert found.positions == len(text) == TOKENS - 1
    assert found.own.perplexity == pytest.approx(functional.nll_loss(own, text).exp().item(), rel=1e-4)
    assert (found.own.kl, found.own.top1_agreement, found.change(found.own)) == (0, 1, 0)
    for row in found.rows:
        same = copy.deepcopy(stock)
        same.lm_head.weight = nn.Parameter(same.lm_head.weight.clone())  # else the tied embeddings would change too
        patched = hf_fastpath.patch(copy.deepcopy(stock), weights=row.weights, lm_head="int8", quiet=True)
        for name, module in patched.named_modules():
            if type(module) is PackedLinear:
                same.get_submodule(name).weight.data = module.packed.dequantize()
        theirs = log_probabilities(same, ids)
        each = (own.exp() * (own - theirs)).sum(-1)
        assert row.perplexity == pytest.approx(functional.nll_loss(theirs, text).exp().item(), rel=1e-4)
        assert row.kl == pytest.approx(each.mean().item(), rel=1e-2)
        assert row.max_kl == pytest.approx(each.max().item(), rel=1e-2)
        agreement = (theirs.argmax(-1) == own.argmax(-1)).double().mean().item()
        assert row.top1_agreement == pytest.approx(agreement, abs=1.5 / TOKENS)  # a tie may fall either way
    int8, int4 = found.rows
    assert 0 < int8.kl < int4.kl / 20 and int4.weight_bytes < int8.weight_bytes < found.own.weight_bytes
    assert all(name in str(found) for name in ("own", "int8", "int4", f"{TOKENS - 1} tokens"))


def test_arguments_are_checked():
    model, ids = build("llama"), torch.ones(1, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match="int3"):
        hf_fastpath.compare_formats(model, ids, ("int3",))
    with pytest.raises(ValueError, match="got 2 sequences"):
        hf_fastpath.compare_formats(model, ids.repeat(2, 1))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        hf_fastpath.compare_formats(model, ids[:, :1])
    with pytest.raises(ValueError, match="patched model"):
        hf_fastpath.compare_formats(hf_fastpath.patch(model, quiet=True), ids)


def test_every_format_by_default():
    ids = torch.randint(3, 300, (1, 20))
    found = hf_fastpath.compare_formats(build("gpt2"), ids)
    assert [row.weights for row in found.rows] == list(FORMATS)
    assert all(row.kl > 0 and row.max_kl >= row.kl for row in found.rows)


def test_command_line(capsys, tmp_path):
    text = TINY_PYTHON / "heldout.txt"
    arguments = ["verify", str(TINY_PYTHON), "--device", "cpu", "--weights", "int8", "--tokens", "60"]
    assert cli.main([*arguments, "--text", str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["positions"] == 59 and [row["weights"] for row in found["rows"]] == ["int8"]
    assert abs(found["rows"][0]["perplexity_change_percent"]) < 2
    assert cli.main(arguments) == 0  # the text is the prompt
    assert "same top-1" in capsys.readouterr().out
    for wrong in (["--text", str(tmp_path / "none.txt")], ["--lm-head", "int4"], ["--weights", "int3"]):
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments, *wrong])
        assert caught.value.code == 2
