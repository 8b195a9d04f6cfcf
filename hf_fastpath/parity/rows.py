"""What ``verify()`` finds: its rows, and what follows of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..tables import table


@dataclass(frozen=True)
class Row:
    """One comparison of logits over ``positions`` of every sequence; both sides are given stock's tokens.

    *ref* is stock in one pass, computed in float32 for half precision and in float64 for float32.

    Attributes:
        name: ``"short"``, ``"padded"``, ``"long"``, ``"window edge"`` or ``"sampling"``.
        batch, prompt_len, positions: number of sequences, tokens of their prompts with padding, tokens that follow.
        mean_error, max_error: |ours - ref|; ours decodes token by token through a cache.
        mean_floor, max_floor: |stock - ref|; stock decodes in the same way, so this is stock's own noise.
        kl: mean Kullback-Leibler divergence of our next token's distribution from stock's, in nats.
        top1_agreement: share of positions at which both name the same token.
        first_divergence: the first new token (from 0) in which ``generate()`` differs, or None.
        margin: distance of stock's two best logits at that token, or None.
        ok: whether the mean error is within twice the noise floor, or the generated tokens and the most likely token at
            every position are equal; and whether our logits explain a token that differs from stock's: its margin is
            within twice |ours - stock| at that token. In the row that samples, the seed has to draw all tokens from the
            logits of that very call, whose mean distance from ours of the same text is within twice the noise floor.
    """

    name: str
    batch: int
    prompt_len: int
    positions: int
    mean_error: float
    max_error: float
    mean_floor: float
    max_floor: float
    kl: float
    top1_agreement: float
    first_divergence: int | None
    margin: float | None
    ok: bool

    @property
    def tokens_equal(self) -> bool:
        """Whether ``generate()`` gives the same tokens."""
        return self.first_divergence is None

    def cells(self) -> tuple[str, ...]:
        """Return this row of the table that a Verification prints."""
        parted = "none" if self.tokens_equal else f"{self.first_divergence} (margin {self.margin:.1e})"
        sizes = f"{self.batch} x {self.prompt_len}", str(self.positions)
        errors = f"{self.max_error:.2e}", f"{self.max_floor:.2e}", f"{self.kl:.1e}"
        return self.name, *sizes, *errors, parted, "ok" if self.ok else "DIFFERENT"


_COLUMNS = ("row", "prompts", "new", "max error", "stock noise", "KL", "first other token", "verdict")


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        rows: the comparisons. All other attributes are over all rows.
        stock_loop: why the model's decode loop is stock's, so that what is compared is its patched modules; "" if the
            loop is ours.
    """

    rows: tuple[Row, ...]
    stock_loop: str = ""

    def _mean(self, name: str) -> float:
        counts = [row.batch * row.positions for row in self.rows]
        return sum(count * getattr(row, name) for count, row in zip(counts, self.rows)) / sum(counts)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def tokens_equal(self) -> bool:
        return all(row.tokens_equal for row in self.rows)

    @property
    def positions(self) -> int:
        return sum(row.positions for row in self.rows)

    @property
    def mean_error(self) -> float:
        return self._mean("mean_error")

    @property
    def max_error(self) -> float:
        return max(row.max_error for row in self.rows)

    @property
    def mean_floor(self) -> float:
        return self._mean("mean_floor")

    @property
    def max_floor(self) -> float:
        return max(row.max_floor for row in self.rows)

    @property
    def top1_agreement(self) -> float:
        return self._mean("top1_agreement")

    def row(self, name: str) -> Row | None:
        """Return the row called ``name``, or None."""
        return next((row for row in self.rows if row.name == name), None)

    def to_dict(self) -> dict:
        """Return plain data, ready for JSON."""
        names = ("ok", "tokens_equal", "positions", "mean_error", "max_error", "mean_floor", "max_floor")
        overall = {name: getattr(self, name) for name in (*names, "top1_agreement")}
        overall["stock_loop"] = self.stock_loop
        return overall | {"rows": [asdict(row) | {"tokens_equal": row.tokens_equal} for row in self.rows]}

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "DIFFERENT"
        head = (
            f"hf_fastpath.verify: {verdict} over {self.positions} positions: mean logit error {self.mean_error:.2e}, "
            f"stock's own\n{self.mean_floor:.2e}; top-1 agreement {self.top1_agreement:.4f}; "
            f"tokens {'equal' if self.tokens_equal else 'differ'}"
        )
        if self.stock_loop:
            head += f"\nthe decode loop is stock's, and its patched modules are compared: {self.stock_loop}"
        return f"{head}\n{table(_COLUMNS, [row.cells() for row in self.rows], left=('row', 'verdict'), indent=2)}"
