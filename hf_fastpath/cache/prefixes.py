"""Prefixes: what a model has made of texts, kept for texts that begin alike.

Keys and values of layers without a window are kept in pages of :data:`PAGE` tokens, which all texts that begin alike
share. A window and a state hold the end of a text alone: copies of such layers are kept at *marks*, at any token.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .fastpath_cache import FastpathCache
from .layer import FastpathLayer
from .states import StateLayer

#: tokens of a page
PAGE = 32
#: pages that are copied at once
_AT_ONCE = 16

Tokens = tuple[int, ...]


@dataclass(eq=False)
class _Mark:
    """The end of a text: what layers with a window or states hold there, and what is behind the last whole page.

    Attributes:
        page: the last whole page.
        tokens: those behind it, fewer than a page has.
        layers: index -> a copy of a layer of one sequence.
        stored: of the tokens, what buffers of layers without a window hold.
        num_bytes: size of it all.
        logits: [1, vocab_size] of the token that follows, if the text was read up to here.
    """

    page: _Page
    tokens: Tokens
    layers: dict[int, Any]
    stored: list[torch.Tensor]
    num_bytes: int
    logits: torch.Tensor | None = None

    def forget(self) -> None:
        self.page.marks.pop(self.tokens, None)


@dataclass(eq=False)
class _Page:
    """Keys and values of PAGE tokens behind those of other pages.

    Attributes:
        before: the page before; None at the beginning of a text.
        tokens: those of the page.
        stored: what is in the page, a row of :func:`_packed`.
        behind: tokens -> the page that follows.
        marks: tokens -> the mark behind them.
        num_bytes: size of what is stored.
    """

    before: _Page | None = None
    tokens: Tokens = ()
    stored: list[torch.Tensor] = field(default_factory=list)
    behind: dict[Tokens, _Page] = field(default_factory=dict)
    marks: dict[Tokens, _Mark] = field(default_factory=dict)
    num_bytes: int = 0

    def forget(self) -> None:
        assert self.before is not None, "the beginning of a text is no page"
        self.before.behind.pop(self.tokens, None)

    def path(self) -> Iterator[_Page]:
        """Yield this page and those before it, the last one first."""
        page: _Page | None = self
        while page is not None and page.before is not None:
            yield page
            page = page.before


@dataclass(frozen=True)
class Found:
    """What is kept of the beginning of a text.

    Attributes:
        count: number of tokens.
        pages: what is stored of each page.
        mark: the mark behind them; None if no layer needs one.
    """

    count: int = 0
    pages: tuple[list[torch.Tensor], ...] = ()
    mark: _Mark | None = None


class PrefixStore:
    """Pages and marks of a model's texts; what was not used for longest goes first.

    Args:
        limit: bytes that are kept at most.
    """

    def __init__(self, limit: int):
        self.limit, self.num_bytes = limit, 0
        self._roots: list[tuple[Any, _Page]] = []  # a state of the model, and the beginning of all texts it has read
        #: a page stands in front of all that is behind it
        self._by_use: OrderedDict[int, _Page | _Mark] = OrderedDict()
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._roots, self.num_bytes = [], 0
            self._by_use.clear()

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, guard: Any, tokens: Sequence[int], most: int, at_marks: bool) -> Found:
        """Return what is kept of a text's first tokens.

        Args:
            guard: the model's state; texts that were read in another one are not found.
            tokens: of the text.
            most: number of tokens that are wanted at most; or all, if the logits behind them are kept.
            at_marks: layers have a window or states.
        """
        with self._lock:
            pages = self._known(guard, tokens)
            best, mark = 0, None
            if at_marks:
                for number, page in enumerate(pages):
                    for behind, each in page.marks.items():
                        end = number * PAGE + len(behind)
                        is_wanted = end <= most or (end == len(tokens) and each.logits is not None)
                        if best < end and is_wanted and behind == tuple(tokens[number * PAGE : end]):
                            best, mark = end, each
            elif len(pages) > 1:
                best = min(most, (len(pages) - 1) * PAGE)
            if not best:
                return Found()
            used = pages[1 : 1 + (best // PAGE if at_marks else -(-best // PAGE))]
            self._use([*([] if mark is None else [mark]), *reversed(used)])
            return Found(best, tuple(page.stored for page in used), mark)

    def newest_guard(self, fits: Callable[[Any], bool]) -> Any | None:
        """Return the state, of those that fit, in which the model has read a text that was kept last; None for none."""
        with self._lock:
            of_texts = (guard for guard, root in reversed(self._roots) if root.behind or root.marks)
            return next(filter(fits, of_texts), None)

    def common(self, guard: Any, tokens: Sequence[int]) -> int:
        """Return how many tokens, in whole pages, some text has begun with that was read before."""
        with self._lock:
            return (len(self._known(guard, tokens)) - 1) * PAGE

    def _known(self, guard: Any, tokens: Sequence[int]) -> list[_Page]:
        """Return the beginning of all texts, and the pages that hold the first tokens of this one."""
        found = [self._root(guard)]
        for first in range(0, len(tokens) - PAGE + 1, PAGE):
            page = found[-1].behind.get(tuple(tokens[first : first + PAGE]))
            if page is None:
                break
            found.append(page)
        return found

    def _root(self, guard: Any) -> _Page:
        for place, (known, root) in enumerate(self._roots):
            if known == guard:
                self._roots.append(self._roots.pop(place))  # the newest is the last
                return root
        self._roots = [(known, root) for known, root in self._roots if root.behind or root.marks]
        self._roots.append((guard, _Page()))
        return self._roots[-1][1]

    def _use(self, things: Sequence[_Page | _Mark]) -> None:
        """Note that things were used; what is behind a page comes before the page."""
        for each in things:
            self._by_use[id(each)] = each
            self._by_use.move_to_end(id(each))

    # ---- keeping --------------------------------------------------------------------------------------------------

    def keep(
        self,
        guard: Any,
        tokens: Sequence[int],
        cache: FastpathCache,
        row: int,
        padding: int,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Keep a text that a cache holds.

        Args:
            guard: the state of the model that has read it.
            tokens: those of the text that are to be kept, not more than the cache holds.
            cache: of one or several texts.
            row: which of its sequences the text is.
            padding: number of positions before the text.
            logits: [1, vocab_size] of the token that follows, or None.
        """
        with self._lock, torch.no_grad(), torch.inference_mode(False):
            pages = self._known(guard, tokens)
            path = list(pages[-1].path())
            self._use(path)
            for first in range((len(pages) - 1) * PAGE, len(tokens) - PAGE + 1, PAGE * _AT_ONCE):
                count = min(_AT_ONCE, (len(tokens) - first) // PAGE)
                rows = _packed(cache, row, padding + first, count)
                for number in range(count):
                    stored = [each[number].clone() for each in rows]
                    begin = first + number * PAGE
                    page = _Page(pages[-1], tuple(tokens[begin : begin + PAGE]), stored, num_bytes=_size(stored))
                    if not self._make_room(page.num_bytes, pages):
                        return
                    pages[-1].behind[page.tokens] = page
                    self._add(page, pages)
                    pages.append(page)
            if has_ends(cache):
                behind = tuple(tokens[(len(pages) - 1) * PAGE :])
                self._mark(behind, cache, row, padding, pages, None if logits is None else logits.clone())

    def _mark(
        self,
        behind: Tokens,
        cache: FastpathCache,
        row: int,
        padding: int,
        pages: list[_Page],
        logits: torch.Tensor | None,
    ) -> None:
        known = pages[-1].marks.get(behind)
        if known is not None and (logits is None or known.logits is not None):
            return self._use([known, *reversed(pages[1:])])
        if known is not None:
            self._forget(known)
        first = padding + (len(pages) - 1) * PAGE
        layers = {index: _of_row(layer, row) for index, layer in enumerate(cache.layers) if _holds_an_end(layer)}
        stored = [each[row : row + 1].clone() for each in _stored(cache, first, first + len(behind))]
        num_bytes = _size(stored) + sum(map(_layer_bytes, layers.values())) + (0 if logits is None else logits.nbytes)
        mark = _Mark(pages[-1], behind, layers, stored, num_bytes, logits)
        if self._make_room(num_bytes, pages):
            pages[-1].marks[behind] = mark
            self._add(mark, pages)

    def _add(self, made: _Page | _Mark, pages: list[_Page]) -> None:
        self.num_bytes += made.num_bytes
        self._use([made, *reversed(pages[1:])])

    def _make_room(self, num_bytes: int, pages: list[_Page]) -> bool:
        """Forget what was not used for longest, but none of these pages; return whether there is room."""
        needed = {id(page) for page in pages}
        while self.num_bytes + num_bytes > self.limit:
            name, oldest = next(iter(self._by_use.items()), (0, None))
            if oldest is None or name in needed:
                return False
            self._forget(oldest)
        return True

    def _forget(self, thing: _Page | _Mark) -> None:
        del self._by_use[id(thing)]
        thing.forget()
        self.num_bytes -= thing.num_bytes


def has_ends(cache: FastpathCache) -> bool:
    """Whether layers hold the end of a text alone."""
    return any(map(_holds_an_end, cache.layers))


def load(cache: FastpathCache, found: Sequence[Found], paddings: Sequence[int], count: int) -> None:
    """Let a cache hold the beginnings of texts.

    Args:
        cache: an empty one, ready for states of the model.
        found: what is kept of each sequence; of one alone if there are marks.
        paddings: number of positions before each text, which will hold zeros.
        count: number of positions that the cache is to hold, paddings among them; up to the mark if there is one.
    """
    with torch.no_grad(), torch.inference_mode(False):
        rows = [_unpacked(cache, each, padding, count) for each, padding in zip(found, paddings)]
        buffers = iter([torch.cat(each) if len(each) > 1 else each[0] for each in zip(*rows)])
        for layer in _whole_layers(cache):
            layer.append_stored(tuple(itertools.islice(buffers, len(layer.stored(0, 0)))))
        mark = found[0].mark
        for index, layer in {} if mark is None else mark.layers.items():
            made = copy.deepcopy(layer)
            if isinstance(made, FastpathLayer):
                made.expected_length = cache.expected_length
            cache.layers[index] = made


# ---- how pages are stored -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """Where a page has what belongs into a buffer of a layer, [batch, heads, positions, ...].

    Attributes:
        heads, others: sizes of the buffer.
        group: tensor of the page.
        first, size: elements there.
    """

    heads: int
    others: tuple[int, ...]
    group: int
    first: int
    size: int


def _slots(cache: FastpathCache) -> list[_Slot]:
    """Return a slot for each buffer; those of one device and dtype are one tensor in a page."""
    groups: dict[Any, int] = {}
    sizes: list[int] = []
    found = []
    for each in _stored(cache, 0, 0):
        _, heads, _, *others = each.shape
        group = groups.setdefault((each.device, each.dtype), len(groups))
        if group == len(sizes):
            sizes.append(0)
        size = heads * PAGE * math.prod(others)
        found.append(_Slot(heads, tuple(others), group, sizes[group], size))
        sizes[group] += size
    return found


def _packed(cache: FastpathCache, row: int, first: int, count: int) -> list[torch.Tensor]:
    """Return ``count`` pages of a sequence from position ``first`` on: [count, elements] of each group."""
    slots = _slots(cache)
    groups: list[list[torch.Tensor]] = [[] for _ in range(1 + max((slot.group for slot in slots), default=-1))]
    for slot, each in zip(slots, _stored(cache, first, first + count * PAGE)):
        groups[slot.group].append(each[row].unflatten(1, (count, PAGE)).transpose(0, 1).reshape(count, -1))
    return [torch.cat(each, dim=1) for each in groups]


def _unpacked(cache: FastpathCache, found: Found, padding: int, count: int) -> list[torch.Tensor]:
    """Return what belongs into each buffer of a sequence, [1, heads, count, ...]."""
    padding = min(padding, count)
    groups = [torch.stack(each) for each in zip(*found.pages)]
    tails = [] if found.mark is None else found.mark.stored
    made = []
    for number, (slot, like) in enumerate(zip(_slots(cache), _stored(cache, 0, 0))):
        pieces = [like.new_zeros(1, slot.heads, padding, *slot.others)]
        if groups:
            pages = groups[slot.group].narrow(1, slot.first, slot.size).unflatten(1, (slot.heads, PAGE, *slot.others))
            pieces.append(pages.transpose(0, 1).flatten(1, 2)[None, :, : count - padding])
        pieces += tails[number : number + 1]
        made.append(torch.cat(pieces, dim=2))
    return made


def _stored(cache: FastpathCache, first: int, end: int) -> list[torch.Tensor]:
    """Return what buffers hold of these positions, [batch, heads, positions, ...] each, of layers without a window."""
    return [each for layer in _whole_layers(cache) for each in layer.stored(first, end)]


def _whole_layers(cache: FastpathCache) -> list[FastpathLayer]:
    return [layer for layer in cache.key_layers if not _holds_an_end(layer)]


def _holds_an_end(layer: Any) -> bool:
    return isinstance(layer, StateLayer) or getattr(layer, "sliding_window", None) is not None


def _of_row(layer: Any, row: int) -> Any:
    """Return a copy of a layer for one of its sequences."""
    made = copy.deepcopy(layer)
    batch = len(layer.states[0]) if isinstance(layer, StateLayer) else layer.batch_size
    if batch > 1:
        made.batch_select_indices(torch.tensor([row], device=made.device))
    return made


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _layer_bytes(layer: Any) -> int:
    states = layer.states if isinstance(layer, StateLayer) else []
    return _size([*states, *getattr(layer, "buffers", ())])
