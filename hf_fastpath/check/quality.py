"""compare_formats(model, inputs): what each format of quantized weights costs a model on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..options import HEADS
from ..parity.comparison import decode_logits, sequences
from ..patching.api import patched
from ..patching.state import state_of
from ..progress import counted
from ..quantization import FORMATS
from ..tables import table
from ..traffic import weight_bytes

#: positions whose distributions are compared at once, in float64
_PIECE = 64


@dataclass(frozen=True)
class FormatRow:
    """A model in one format, on the text of its :class:`Quality`, decoded token by token.

    Attributes:
        weights, lm_head: as ``patch()`` takes them; None for the model's own.
        weight_bytes: bytes of weights that a token reads.
        perplexity: of the text's tokens, without the first.
        kl: mean Kullback-Leibler divergence of the next token's distribution from that with the model's own weights, in
            nats; ``max_kl`` is the largest.
        top1_agreement: share of positions at which both name the same token.
    """

    weights: str | None
    lm_head: str
    weight_bytes: int
    perplexity: float
    kl: float
    max_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class Quality:
    """What ``compare_formats`` found: printable, and plain data through ``to_dict()``.

    Attributes:
        positions: number of tokens that were predicted.
        own: the row of the model with its own weights.
        rows: the rows of the formats.
    """

    positions: int
    own: FormatRow
    rows: tuple[FormatRow, ...]

    def change(self, row: FormatRow) -> float:
        """Return how much larger a row's perplexity is than with the model's own weights, in per cent."""
        return 100 * (row.perplexity / self.own.perplexity - 1)

    def to_dict(self) -> dict:
        """Return plain data, ready for JSON."""
        return {
            "positions": self.positions,
            "own": asdict(self.own),
            "rows": [asdict(row) | {"perplexity_change_percent": self.change(row)} for row in self.rows],
        }

    def __str__(self) -> str:
        columns = ("weights", "head", "MB a token", "perplexity", "change", "mean KL", "max", "same top-1")
        rows = [
            (
                *(row.weights or "own", row.lm_head, f"{row.weight_bytes / 1e6:.2f}", f"{row.perplexity:.4f}"),
                *(
                    f"{self.change(row):+.2f}%",
                    f"{row.kl:.6f}",
                    f"{row.max_kl:.4f}",
                    f"{100 * row.top1_agreement:.2f}%",
                ),
            )
            for row in (self.own, *self.rows)
        ]
        head = f"quality of quantized weights over {self.positions} tokens"
        return f"{head}\n{table(columns, rows, left=('weights', 'head'))}"


def _row(own: torch.Tensor, logits: torch.Tensor, text: torch.Tensor, **known: Any) -> FormatRow:
    """Compute the figures of ``logits`` [positions, vocab_size] for the tokens ``text`` [positions] that follow."""
    nll, kl, agreeing, most = 0.0, 0.0, 0, 0.0
    for mine, theirs, tokens in zip(logits.split(_PIECE), own.split(_PIECE), text.split(_PIECE)):
        log_mine, log_own = mine.double().log_softmax(-1), theirs.double().log_softmax(-1)
        nll += float(functional.nll_loss(log_mine, tokens, reduction="sum"))
        each = (log_own.exp() * (log_own - log_mine)).sum(-1)
        kl, most = kl + float(each.sum()), max(most, float(each.max()))
        agreeing += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
    count = len(text)
    perplexity = float(torch.tensor(nll / count, dtype=torch.float64).exp())
    return FormatRow(**known, perplexity=perplexity, kl=kl / count, max_kl=most, top1_agreement=agreeing / count)


@torch.no_grad()
def compare_formats(
    model: nn.Module, inputs: Any, weights: Sequence[str] = tuple(FORMATS), lm_head: str = HEADS[0]
) -> Quality:
    """Measure the perplexity of a text, and the divergence from the model's own weights, for each format.

    The text is decoded token by token with the kernels of ``generate()``, with the model's own weights and then in
    every format. Afterwards the model is as it was.

    Args:
        model: a causal LM that is not patched, and takes ``patch(weights=...)``.
        inputs: input_ids [1, seq_len] of at least two tokens, or a mapping that holds them (a tokenizer's output).
        weights: formats, as ``patch()`` takes them.
        lm_head: as ``patch()`` takes it, with each format.

    Raises:
        ValueError: the model is patched, a format or the inputs are not valid, or ``patch()`` does not take them.
    """
    if state_of(model) is not None:
        raise ValueError("compare_formats() got a patched model: unpatch(model) first")
    unknown = [name for name in weights if name not in FORMATS]
    if unknown or not weights:
        raise ValueError(f"weights is {list(weights)!r}, expected some of {', '.join(FORMATS)}")
    ids = sequences(inputs).to(next(model.parameters()).device)
    if len(ids) != 1:
        raise ValueError(f"compare_formats() got {len(ids)} sequences, expected one")
    text = ids[0, 1:]

    def decoded(**options: Any) -> tuple[torch.Tensor, int]:
        bar.set_description_str(
            f"hf_fastpath: {options.get('weights', 'own')} weights, {len(text)} tokens", refresh=False
        )
        with patched(model, quiet=True, **options):
            result = decode_logits(model, ids[:, :-1], 1, fast=True)[0], weight_bytes(model)
        bar.update()
        return result

    rows = []
    with counted(1 + len(weights), "hf_fastpath: formats") as bar:
        own, own_bytes = decoded()
        for format in weights:
            logits, num_bytes = decoded(weights=format, lm_head=lm_head)
            rows.append(_row(own, logits, text, weights=format, lm_head=lm_head, weight_bytes=num_bytes))
    first = _row(own, own, text, weights=None, lm_head=HEADS[0], weight_bytes=own_bytes)
    return Quality(len(text), first, tuple(rows))
