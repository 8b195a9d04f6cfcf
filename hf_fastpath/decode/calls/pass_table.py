"""Tables of passes: what each pass finds, which passes it comes behind and why, and which are switched off.

A pass changes a list of calls in place, so that the list computes the same. The rows of a table are its passes in their
order; a table is checked where it is defined. ``HF_FASTPATH_PASSES=-name,-other`` switches passes off, and
``HF_FASTPATH_DUMP`` names a folder for the list behind each pass, see :mod:`.pass_dump`.
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ... import switches
from .named_calls import Call, Register
from .pass_dump import dump_of

PASSES = "HF_FASTPATH_PASSES"
#: the tables whose passes the variable knows
_tables: list[PassTable] = []


class Listing(Protocol):
    """What passes change: a recorded step, or the :class:`CallList` of a plan."""

    calls: list[Call]


@dataclass
class CallList:
    """Calls of a plan that passes change.

    Attributes:
        calls: in order.
        register: makes a new register.
        in_native_code: the native library makes calls that follow one another.
    """

    calls: list[Call]
    register: Callable[[], Register]
    in_native_code: bool = False


@dataclass(frozen=True, eq=False)
class Pass:
    """A row of a table of passes.

    Attributes:
        name: of the pass, in ``HF_FASTPATH_PASSES`` and in names of files; rows of one name are one pass.
        run: changes the calls of its first argument in place. The second argument says whose calls they are: the
            :class:`.named_calls.Step` of a plan, the model of a recording.
        finds: one sentence: what the pass finds, and what it makes of it.
        after: passes that have to run before this row -> why; ``"name#2"`` is the second row of a pass.
        needed: why the pass cannot be switched off; "" if it can.
        again: why the pass runs at this place once more; "" in its first row.
    """

    name: str
    run: Callable[[Any, Any], None]
    finds: str
    after: Mapping[str, str] = field(default_factory=dict)
    needed: str = ""
    again: str = ""

    def once_more(self, again: str, after: Mapping[str, str]) -> Pass:
        """Return a further row of this pass.

        Args:
            again: why it is needed.
            after: passes that have to run before this row, beside those before the first.
        """
        return replace(self, again=again, after={**self.after, **after})


class PassTable:
    """Passes in their order; iterating gives the rows.

    Args:
        what: what the passes are over, for errors.
        rows: in order.
        behind: runs behind each pass, and before the first.

    Attributes:
        keys: of each row its name, with ``#2`` behind it for the second row of a pass.

    Raises:
        ValueError: a row has no name, no sentence or no reason to run again, two passes have one name, or a row stands
            in front of one that it has to come behind.
    """

    def __init__(self, what: str, rows: Sequence[Pass], behind: Callable[[Any], None] = lambda listing: None):
        self.what, self.rows, self.behind = what, tuple(rows), behind
        self.keys = tuple(_checked(what, self.rows))

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Pass:
        """Return the first row of a pass."""
        return next(row for row in self.rows if row.name == name)

    def apply(self, listing: Listing, given: Any, title: str, without: Collection[str] = ()) -> None:
        """Run all passes but those that are switched off.

        Args:
            listing: has the calls.
            given: the second argument of the passes.
            title: of the folder with the files of this list, if there is one.
            without: names of passes that are left out as well.
        """
        off = switched_off().union(without)
        self.behind(listing)
        dump = dump_of(title, listing.calls)
        for number, row in enumerate(self.rows, 1):
            if row.name in off:
                continue
            row.run(listing, given)
            self.behind(listing)
            if dump is not None:
                dump.note(number, row.name, listing.calls)


def _checked(what: str, rows: Sequence[Pass]) -> Iterator[str]:
    """Yield the keys of rows that make a table."""
    seen: dict[str, Pass] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.name] += 1
        key = row.name if counts[row.name] == 1 else f"{row.name}#{counts[row.name]}"
        who = f"passes over {what}, {key}"
        first = seen.get(row.name)
        if not row.name.isidentifier() or row.name != row.name.lower():
            raise ValueError(f"{who}: the name is {row.name!r}, expected a word in small letters")
        if not row.finds.strip() or not row.finds.endswith("."):
            raise ValueError(f"{who}: finds is {row.finds!r}, expected a sentence")
        if first is not None and first.run is not row.run:
            raise ValueError(f"{who}: two passes have this name, expected a name for each")
        if (first is not None) != bool(row.again.strip()):
            raise ValueError(f"{who}: again is {row.again!r}, expected a reason in every row but a pass's first")
        for name, why in row.after.items():
            if not why.strip():
                raise ValueError(f"{who}: there is no reason why it comes after {name}")
            if name not in seen:
                raise ValueError(f"{who} comes after {name} ({why}), which is not in front of it")
        seen[key] = row
        yield key


def declare(table: PassTable) -> PassTable:
    """Let ``HF_FASTPATH_PASSES`` know the passes of a table.

    Raises:
        ValueError: a pass of another table has the same name.
    """
    known = {row.name for other in _tables for row in other}
    if twice := sorted(known & {row.name for row in table}):
        raise ValueError(f"passes over {table.what}: {', '.join(twice)} are names in another table, expected new ones")
    _tables.append(table)
    return table


def switched_off() -> frozenset[str]:
    """Return the names of the passes that ``HF_FASTPATH_PASSES`` switches off.

    Raises:
        ValueError: the variable names no pass, or one that cannot be switched off.
    """
    return _parsed(switches.word(PASSES) or "", len(_tables))


@functools.lru_cache(maxsize=8)
def _parsed(value: str, tables: int) -> frozenset[str]:
    known = {row.name: row for table in _tables[:tables] for row in table}
    found = set()
    for each in filter(None, map(str.strip, value.split(","))):
        name = each.removeprefix("-")
        if name == each or name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean -{close[0]}?)" if close else ""
            expected = f"expected -name of passes to switch off, out of {', '.join(known)}"
            raise ValueError(f"{PASSES} has {each!r}, {expected}{hint}")
        if why := known[name].needed:
            raise ValueError(f"{PASSES} has {each!r}, but this pass cannot be switched off: {why}; leave it out")
        found.add(name)
    return frozenset(found)
