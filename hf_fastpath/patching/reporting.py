"""The report on a patched model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..cache.pages import PageCounts
from ..decode.calls.named_calls import Call
from ..decode.calls.whose import torch_calls
from ..decode.loops.eligibility import torch_reason, uncovered_reason
from ..decode.placed import fetch, page_lock
from ..decode.sources.step_source import StepSource
from ..native import loader
from ..reasons import check, explained, named
from ..recording.family import RECORDED
from ..stats import PrefixCounts, Stats
from .plan import PatchPlan


def loop_reason_now(plan: PatchPlan, part: StepSource | None) -> str | None:
    """Return why ``generate()`` would use transformers' loop on a model as it is now, or None.

    Args:
        plan: the plan that was made of the model.
        part: the model in its roles as it is now, or None.
    """
    reason = uncovered_reason(plan.loop_reason, plan.model, part)
    if reason is None and part is not None:
        reason = torch_reason(plan.model) or part.reason()
    return reason


@dataclass(frozen=True)
class Report:
    """What ``report(model)`` returns: printable, and plain data through ``to_dict()``.

    Attributes:
        architecture: name of the architecture that covers the model.
        like: the listed architecture that the model's structure was recognized as, or None if it has a file of its own.
        patched: part -> number of modules with our forward.
        declined: "part: reason code" -> number of modules that kept their stock forwards.
        loop: ``"fast"``, or the reason code for which generate() would use transformers' loop now.
        ranks: which of the processes over which the model is spread this is, and what their sums go through; or None.
        details: "part: reason code", and "loop: reason code" -> the modules with their classes, the arguments or the
            settings that the reason is about.
        kernels: the kernels that serve each device.
        huge_page_bytes: bytes of parameters in host memory that lie in pages of 2 MB so far: a thread moves large
            models there behind ``patch()``.
        host_bytes: bytes of weights that a step copies from host memory to a GPU.
        page_locked_bytes: bytes of host memory that the process has page-locked for that now, for all models.
        step_calls: number of calls of the newest step, 0 if none is kept.
        torch_calls: those of them that are PyTorch's, name -> number.
        torch_percent: share of a step in PyTorch's calls, as ``profile()`` has measured it last; else None.
        stats: counters since ``patch()``: fast and fallback tokens, reasons, tokens per second.
    """

    architecture: str
    like: str | None
    patched: dict[str, int]
    declined: dict[str, int]
    loop: str
    ranks: str | None
    details: dict[str, list[str]]
    kernels: list[str]
    huge_page_bytes: int
    host_bytes: int
    page_locked_bytes: int
    step_calls: int
    torch_calls: dict[str, int]
    torch_percent: float | None
    stats: dict

    @classmethod
    def of(
        cls,
        plan: PatchPlan,
        part: StepSource | None,
        stats: Stats,
        huge_page_bytes: int = 0,
        step: Sequence[Call] = (),
        torch_percent: float | None = None,
    ) -> Report:
        """Make the present report of a model.

        Args:
            plan: the plan that was made of the model.
            part: the model in its roles as it is now, or None.
            stats, huge_page_bytes: counted since the model was patched.
            step: the calls of the newest step.
            torch_percent: share of a step in PyTorch's calls, if it was measured.
        """
        loop_reason = loop_reason_now(plan, part)
        declined = Counter(f"{kind}: {reason}" for _, kind, reason in plan.declined)
        details: dict[str, list[str]] = {}
        for name, kind, reason in plan.declined:
            details.setdefault(f"{kind}: {reason}", []).append(getattr(reason, "what", "") or name)
        if loop_reason is not None and (what := named(loop_reason, plan.model).what):
            details[f"loop: {loop_reason}"] = [what]
        found = plan.recorded or plan.architecture
        return cls(
            architecture="" if found is None else found.name,
            like=None if found is None else found.like,
            patched=dict(plan.patched),
            declined=dict(declined),
            loop="fast" if loop_reason is None else check(loop_reason),
            ranks=None if part is None or part.ranks is None else f"{part.ranks}, sums through {part.ranks.transport}",
            details=details,
            kernels=[str(status) for status in loader.status().values() if status.native],
            huge_page_bytes=huge_page_bytes,
            host_bytes=0 if part is None else fetch.host_bytes(part),
            page_locked_bytes=page_lock.locked_bytes(),
            step_calls=len(step),
            torch_calls=torch_calls(step),
            torch_percent=torch_percent,
            stats=stats.to_dict(),
        )

    def to_dict(self) -> dict:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def parts(self) -> list[str]:
        """Return lines on what is fast and what is stock."""
        fast = ", ".join(f"{count} {part}" for part, count in self.patched.items()) or "nothing"
        family = self.architecture if self.like is None else f"{self.architecture} (structural: like {self.like})"
        what = f"{fast} patched"
        if self.architecture == RECORDED and self.loop == "fast":
            what = "a step recorded from the model's own forward"
        lines = [f"hf_fastpath on {family}: {what}; decode loop: {self._loop()}"]
        if self.ranks is not None:
            lines.append(f"  tensor parallel: {self.ranks}")
        return lines + [f"  stock: {count} {self._declined(what)}" for what, count in self.declined.items()]

    def __str__(self) -> str:
        lines = self.parts()
        lines += [f"  kernels: {line}" for line in self.kernels] or ["  kernels: none, PyTorch references"]
        if self.huge_page_bytes:
            lines.append(f"  memory: {self.huge_page_bytes / 1e9:.2f} GB of weights in pages of 2 MB")
        if self.host_bytes:
            locked = f"{self.page_locked_bytes / 1e9:.3f} GB are page-locked now"
            lines.append(f"  bus: {self.host_bytes / 1e9:.3f} GB of weights come from host memory for a step; {locked}")
        if self.step_calls:
            lines.append(f"  step: {self._step()}")
        stats = self.stats
        if stats["fast_tokens"] or stats["fallback_tokens"]:
            speed = stats["last_tokens_per_second"]
            lines.append(
                f"  tokens: {stats['fast_tokens']} fast, {stats['fallback_tokens']} stock"
                + (f"; last generate() {speed:.1f} tok/s" if speed else "")
            )
        if stats["pages"] is not None and stats["pages"]["most_used"]:
            lines.append(f"  pages: {PageCounts(**stats['pages'])}")
        if stats["prefixes"] is not None:
            lines.append(f"  prefixes: {PrefixCounts(**stats['prefixes'])}")
        if shared := stats["shared_steps"]:
            steps, rows = sum(shared.values()), sum(rows * count for rows, count in shared.items())
            count = stats["given_up_slots"]
            again = f"; {count} times a text was read again for want of memory" if count else ""
            lines.append(f"  shared: {steps} steps of {rows / steps:.1f} rows a step, at most {max(shared)}{again}")
        for code, count in stats["reasons"].items():
            lines.append(f"  {count} x {explained(code, _several(stats['details'].get(code, [])))}")
        return "\n".join(lines)

    def _loop(self) -> str:
        if self.loop == "fast":
            return self.loop
        return f"stock ({explained(self.loop, _several(self.details.get(f'loop: {self.loop}', [])))})"

    def _step(self) -> str:
        """Return how much of a step is PyTorch's."""
        names = (name if count == 1 else f"{count} {name}" for name, count in self.torch_calls.items())
        of_torch = f"{sum(self.torch_calls.values())} of {self.step_calls} calls are PyTorch's"
        shown = f" ({', '.join(names)})" if self.torch_calls else ""
        share = "" if self.torch_percent is None else f", {self.torch_percent:.1f} % of its time when profiled"
        return of_torch + shown + share

    def _declined(self, what: str) -> str:
        part, _, code = what.partition(": ")
        return f"{part}: {explained(code, _several(self.details[what]))}"


def _several(things: list[str]) -> str:
    """Return the first of ``things``, and how many more there are."""
    more = len(things) - 1
    return "".join(things[:1]) + (f", and {more} more" if more > 0 else "")
