"""Arguments of a forward that tokens behind a prompt do not depend on, and those on which they do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from recordings import VOCAB, WIDTH, Decoder, Of, linear

from hf_fastpath.recording.arguments import described, why_it_matters
from hf_fastpath.recording.skeleton import Skeleton


class _Reading(Decoder):
    """A decoder that reads ``bias`` with every token, looks at ``sizes`` of an image if there is one, and takes another
    way if ``scaled``."""

    def forward(self, input_ids, bias=None, sizes=None, image=None, scaled=False, **others):
        logits = super().forward(input_ids, **others).logits
        if image is not None:
            logits = logits + sizes.sum()
        if bias is not None:
            logits = logits + bias
        return SimpleNamespace(logits=logits * 2 if scaled else logits)


@pytest.mark.parametrize(
    ("arguments", "why"),
    (
        (dict(sizes=torch.ones(2, 2)), None),
        (dict(sizes=torch.ones(2, 2), other=3), None),
        (dict(bias=torch.ones(VOCAB), sizes=torch.ones(2, 2)), "bias is read with every token"),
        (dict(sizes=torch.ones(2, 2), image=torch.ones(1)), "sizes is read with every token"),
        (dict(scaled=True), "the forward makes other calls with them"),
        (dict(sizes=[torch.ones(2)]), "sizes is a list"),
    ),
)
@pytest.mark.parametrize("batch", (1, 3))
def test_what_a_step_reads(batch, arguments, why):
    model = _Reading(Of(lambda m, x, *_: m.head(x), head=linear(VOCAB, WIDTH)))
    assert why_it_matters(Skeleton(model), batch, arguments) == why


def test_described():
    """Two calls whose arguments are described alike need one look."""
    assert described(torch.zeros(2, 3)) == described(torch.ones(2, 3)) != described(torch.zeros(3, 2))
    assert described(True) == True != described(False)  # noqa: E712
    assert described([1]) is list
