"""Texts of chunks in memory, found by their bare forms: the longest that a text begins with."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import AnyStr

from samkv_integrations.cache.bare import LOOKUP_CHARS, bare_form
from samkv_integrations.cache.base import MAX_ALIKE, MAX_STEPS, Beginnings


@dataclass(frozen=True)
class _Cursor:
    """A state of an index: an era without deletions, and how many heads it had by then."""

    era: object
    n_heads: int


class TextIndex:
    """Bare forms of bodies, sorted. Safe to use from many threads.

    A form shorter than `LOOKUP_CHARS` is not kept. Each body stays until all its sources are
    removed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forms: list[str] = []  # sorted
        self._bodies: dict[str, dict[str, set[Hashable]]] = {}  # form -> body -> sources
        self._heads: dict[str, int] = {}  # -> forms that begin so; in the order they were added
        self._longest: int | None = 0  # None: not known
        self._era = object()

    def add(self, body: str, source: Hashable) -> None:
        """Keep a body, which ``source`` has."""
        form, _ = bare_form(body)
        head = form[:LOOKUP_CHARS]
        if len(head) < LOOKUP_CHARS:
            return
        with self._lock:
            if form not in self._bodies:
                insort(self._forms, form)
                self._heads[head] = self._heads.get(head, 0) + 1
                if self._longest is not None:
                    self._longest = max(self._longest, len(form))
            self._bodies.setdefault(form, {}).setdefault(body, set()).add(source)

    def remove(self, body: str, source: Hashable) -> None:
        """Let go of a body, unless another source has it too."""
        form, _ = bare_form(body)
        head = form[:LOOKUP_CHARS]
        with self._lock:
            bodies = self._bodies.get(form, {})
            sources = bodies.get(body, set())
            sources.discard(source)
            if sources or not bodies:
                return
            bodies.pop(body, None)
            if bodies:
                return
            del self._bodies[form], self._forms[bisect_left(self._forms, form)]
            self._heads[head] -= 1
            if not self._heads[head]:
                del self._heads[head]
            if len(form) == self._longest:
                self._longest = None
            self._era = object()

    def beginnings(self, since: Hashable | None = None) -> Beginnings:
        """See `Store.beginnings`."""
        with self._lock:
            if self._longest is None:
                self._longest = max(map(len, self._forms), default=0)
            is_all = not isinstance(since, _Cursor) or since.era is not self._era
            known = since.n_heads if isinstance(since, _Cursor) and not is_all else 0
            new = islice(self._heads, known, None) if known < len(self._heads) else ()
            cursor = _Cursor(self._era, len(self._heads))
            return Beginnings(cursor=cursor, heads=list(new), longest=self._longest, is_all=is_all)

    def texts_like(self, bare: str) -> Iterator[tuple[str, list[str]]]:
        """See `Store.texts_like`. Each step takes time in the logarithm of the number of texts."""
        n_steps = 0
        while len(bare) >= LOOKUP_CHARS and n_steps < MAX_STEPS:
            with self._lock:
                at = bisect_right(self._forms, bare)
                form = self._forms[at - 1] if at else ""
                bodies = list(islice(self._bodies.get(form, ()), MAX_ALIKE))
            if form and bare.startswith(form):
                yield form, bodies
                n_steps, bare = 0, form[:-1]
            else:
                # whatever `bare` begins with sorts between its own beginning and `form`
                n_steps, bare = n_steps + 1, common_beginning(bare, form)


def common_beginning(one: AnyStr, other: AnyStr) -> AnyStr:
    """What both texts begin with; halving, as comparing characters in Python takes far longer."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return one[:low]
