"""verify(): what it finds on a right model and on a wrong one."""

from __future__ import annotations

import json

import pytest
import torch
from models import CPU, assert_same_instances, heldout_tokens, instances, trained

import hf_fastpath


def test_verify_on_the_trained_model(device):
    stock, ours = trained(device)
    ids = heldout_tokens(40).to(device)
    before = instances(stock)
    for model in (stock, ours):
        result = hf_fastpath.verify(model, {"input_ids": ids}, max_new_tokens=24)
        assert result.ok and result.tokens_equal and result.positions == 24 and result.top1_agreement == 1
        assert result.max_error >= result.mean_error > 0 and result.mean_floor > 0
        assert set(json.loads(json.dumps(result.to_dict()))) >= {"ok", "mean_error", "mean_floor"}
        assert "ok over 24 positions" in str(result)
    assert_same_instances(instances(stock), before)
    assert hf_fastpath.report(ours).loop == "fast"


def test_verify_sees_a_wrong_model(monkeypatch, device):
    """A decode step that is off is reported, not averaged away."""
    from hf_fastpath.decode.plan import DecodePlan

    stock, _ = trained(device)
    real = DecodePlan.step
    monkeypatch.setattr(DecodePlan, "step", lambda self, tokens=None: real(self, tokens).flip(-1))
    result = hf_fastpath.verify(stock, heldout_tokens(20).to(device), max_new_tokens=8)
    assert not result.ok and result.top1_agreement < 1 and "DIFFERENT" in str(result)


def test_verify_gives_clear_errors():
    stock, _ = trained(CPU)
    with pytest.raises(ValueError, match="expected \\[batch, at least 2 tokens\\]"):
        hf_fastpath.verify(stock, torch.ones(5, dtype=torch.long))
    assert "_hf_fastpath" not in vars(stock)
