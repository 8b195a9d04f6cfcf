"""The picture of a profile: each layer as a bar of its calls, over a bar of the limit that the memory sets.

The SVG is written by hand, in colors that are read on white and on black; a reader's setting for dark pages chooses."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .described import KINDS, PYTORCH, VIEWS
from .times import CallTime, StepTimes

#: width of the picture, of the names of layers, and of the numbers behind the bars, in pixels
_WIDTH, _NAMES, _NUMBERS = 960, 170, 150
#: height of a layer, of its bar and of the bar of its limit
_ROW, _BAR, _LIMIT = 27, 14, 5
#: height of the headline and of a line of the legend
_TOP, _LINE = 62, 22
#: kind -> color on white, color on black
_COLORS = {
    "products": ("#3565c0", "#6d9bf1"),
    "attention": ("#c2571a", "#f0935a"),
    "experts": ("#2b8a5e", "#5cc796"),
    "states": ("#8a56ac", "#c295e4"),
    "adapters": ("#a8376b", "#ee85b5"),
    "norms": ("#8f7a12", "#d9c04a"),
    "tokens": ("#4a8c99", "#7cc7d6"),
    "ranks": ("#6a7f2a", "#aac45c"),
    "layers": ("#3565c0", "#6d9bf1"),
    PYTORCH: ("#c02f3d", "#ff7b86"),
    VIEWS: ("#9a9a9a", "#7d7d7d"),
}
assert set(_COLORS) == set(KINDS)


def _class(kind: str) -> str:
    return f"k{KINDS.index(kind)}"


def style() -> str:
    """Return the rules for colors, for light and for dark pages."""
    light = "".join(f".{_class(kind)}{{fill:{color}}}" for kind, (color, _) in _COLORS.items())
    dark = "".join(f".{_class(kind)}{{fill:{color}}}" for kind, (_, color) in _COLORS.items())
    plain = ".page{fill:#fff}text{fill:#1c1c1c}.soft{fill:#5a5a5a}.limit{fill:#1c1c1c}.gap{stroke:#fff}"
    night = ".page{fill:#16181d}text{fill:#e8e8e8}.soft{fill:#a8a8a8}.limit{fill:#e8e8e8}.gap{stroke:#16181d}"
    return f"{plain}{light}@media(prefers-color-scheme:dark){{{night}{dark}}}"


def svg(profile: StepTimes) -> str:
    """Return the picture as the text of an SVG file."""
    groups = [each for each in profile.layers() if any(call.us or call.bytes for call in each[1])]
    longest = max([*(sum(call.us for call in calls) for _, calls in groups), 1e-9])
    longest = max([longest, *(profile.limit_us(_bytes(calls)) for _, calls in groups)])
    scale = (_WIDTH - _NAMES - _NUMBERS) / longest
    kinds = [kind for kind in KINDS if any(call.kind == kind and call.us for call in profile.calls)]
    legend, lines = _legend(kinds)
    top = _TOP + lines * _LINE
    height = top + len(groups) * _ROW + 14
    body = [_headline(profile), legend]
    for place, (name, calls) in enumerate(groups):
        body.append(_layer(profile, name, calls, top + place * _ROW, scale))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">\n<title>{escape(_title(profile))}</title>\n'
        f'<style>{style()}</style>\n<rect class="page" width="{_WIDTH}" height="{height}"/>\n' + "\n".join(body) + "\n"
        "</svg>\n"
    )


def _title(profile: StepTimes) -> str:
    return f"A decode step of {profile.model} {profile.dtype}, batch {profile.batch}, context {profile.context}"


def _bytes(calls: Sequence[CallTime]) -> int:
    return sum(call.bytes or 0 for call in calls)


def _headline(profile: StepTimes) -> str:
    limit = profile.limit_us(profile.bytes)
    share = 100 * limit / profile.us if profile.us else 0.0
    second = (
        f"{profile.us:,.1f} us a step, {share:.0f} % of what R = {profile.bandwidth / 1e9:,.0f} GB/s allows; "
        f"the host costs {profile.host_us:,.1f} us a token; PyTorch's calls take {profile.torch_percent:.1f} %"
    )
    name = f"{_title(profile)}, on {profile.device}"
    return (
        f'<text x="12" y="24" font-size="15" font-weight="600">{escape(_short(name, 118))}</text>\n'
        f'<text x="12" y="44" class="soft">{escape(second)}</text>'
    )


def _legend(kinds: Sequence[str]) -> tuple[str, int]:
    """Return a legend of these kinds and of the limit, and how many lines it takes."""
    parts, x, line = [], 12, 0
    for name, mark in [(kind, _class(kind)) for kind in kinds] + [("limit: bytes / R", "limit")]:
        wide = 30 + 7 * len(name)
        if x + wide > _WIDTH:
            x, line = 12, line + 1
        y = _TOP + line * _LINE
        thick = _LIMIT if mark == "limit" else 11
        parts.append(f'<rect class="{mark}" x="{x}" y="{y + (11 - thick) / 2:g}" width="11" height="{thick}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{escape(name)}</text>')
        x += wide
    return "\n".join(parts), line + 1


def _layer(profile: StepTimes, name: str, calls: Sequence[CallTime], y: int, scale: float) -> str:
    us, limit = sum(call.us for call in calls), profile.limit_us(_bytes(calls))
    share = f", {100 * limit / us:.0f} % of R" if us and limit else ""
    parts = [f'<text x="{_NAMES - 10}" y="{y + 12}" text-anchor="end">{escape(_short(name, 24, at_end=True))}</text>']
    x = float(_NAMES)
    for call in calls:
        wide = call.us * scale
        if wide > 0:
            parts.append(
                f'<rect class="{_class(call.kind)}" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}">'
                f"<title>{escape(_told(call))}</title></rect>"
            )
            if wide > 3:  # a gap that separates neighbors of one color
                parts.append(f'<path class="gap" d="M{x + wide:.2f} {y}v{_BAR}" stroke-width="0.8"/>')
        x += wide
    parts.append(
        f'<rect class="limit" x="{_NAMES}" y="{y + _BAR + 1}" width="{limit * scale:.2f}" height="{_LIMIT}">'
        f"<title>{escape(f'{name}: {_bytes(calls):,} bytes, {limit:,.2f} us at R')}</title></rect>"
    )
    right = max(x, _NAMES + limit * scale)
    parts.append(f'<text class="soft" x="{right + 8:.2f}" y="{y + 12}">{us:,.1f} us{share}</text>')
    return "\n".join(parts)


def _told(call: CallTime) -> str:
    moved = "" if call.bytes is None else f", {call.bytes:,} bytes"
    of_r = "" if call.percent_of_r is None else f", {call.percent_of_r:.1f} % of R"
    return f"{call.op} ({call.runs}) {call.module} {call.sizes}: {call.us:,.2f} us{moved}{of_r}"


def _short(text: str, most: int, at_end: bool = False) -> str:
    """Return a text of at most so many characters, cut at its beginning if its end says more."""
    if len(text) <= most:
        return text
    return f"…{text[1 - most :]}" if at_end else f"{text[: most - 1]}…"
