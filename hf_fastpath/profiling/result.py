"""What ``profile()`` returns: the times of a step's calls as a table, as data, and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..tables import table
from . import page, picture
from .times import CallTime, Scaled, StepTimes

#: endings of the names of files that :meth:`StepProfile.save` writes
ENDINGS = (".svg", ".html", ".json", ".txt")


def check_name(path: str | Path) -> str:
    """Return the ending of a file's name.

    Raises:
        ValueError: it is not one of ENDINGS.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"save() got {str(path)!r}, expected a name that ends in {', '.join(ENDINGS)}")
    return ending


@dataclass(frozen=True)
class StepProfile(StepTimes):
    """What ``profile()`` returns: printable, data through ``to_dict()`` and ``to_json()``, a picture by ``save()``.

    :class:`.times.StepTimes` has the attributes."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the data as JSON, which :meth:`from_json` reads."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Return the profile that :meth:`to_json` has written.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            found = json.loads(text)
            scaled = None if found["scaled"] is None else Scaled(**found["scaled"])
            calls = tuple(_call(each) for each in found["calls"])
            return cls(**found | {"scaled": scaled, "calls": calls})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            names = ", ".join(each.name for each in fields(cls))
            raise ValueError(f"this is no JSON of a StepProfile ({error}), expected an object of {names}") from error

    def save(self, path: str | Path) -> None:
        """Write the profile into a file: ``.svg`` is the picture, ``.html`` the picture over the table, ``.json`` the
        data, ``.txt`` the table of all calls.

        Raises:
            ValueError: the name has another ending.
        """
        ending = check_name(path)
        made = {".svg": picture.svg, ".html": page.html, ".json": StepProfile.to_json, ".txt": _all_text}[ending](self)
        Path(path).write_text(made, encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, all_calls: bool = False) -> str:
        """Return the profile as text.

        Args:
            all_calls: show every call; else layers that are alike are shown once, with the means of their calls.
        """
        return "\n".join([*self.summary(), "", self._kinds(), "", self._calls(all_calls)])

    def _kinds(self) -> str:
        rows = [
            (kind, str(count), *self.cells(us, moved or None)) for kind, (count, us, moved) in self.by_kind().items()
        ]
        return table(("kind", "calls", "us", "bytes", "% of R", "% of step"), rows, left=("kind",))

    def _calls(self, all_calls: bool) -> str:
        lines = []
        for title, calls in self.in_order() if all_calls else self.groups():
            rows = [(call.op, call.module, call.sizes, *self.cells(call.us, call.bytes), call.runs) for call in calls]
            columns = ("call", "module", "sizes", "us", "bytes", "% of R", "% of step", "by")
            words = ("call", "module", "sizes", "by")
            lines += [title, table(columns, rows, left=words, indent=2)]
        return "\n".join(lines)


def _call(found: dict[str, Any]) -> CallTime:
    shapes = tuple(tuple(each) for each in found["weights"])
    return CallTime(**found | {"shape": tuple(found["shape"]), "weights": shapes})


def _all_text(profile: StepProfile) -> str:
    return profile.text(all_calls=True) + "\n"
