"""Exact beginnings of prompts, kept: caches of chunks as they stand behind the head of a prompt.

The head is what stands before the first chunk: the chat template's beginning and a system prompt.
Behind it the first chunk's entries are full prefill's, so none of its tokens has to be recomputed.
Such a cache is an ordinary chunk cache whose prefix is the head, see `Fingerprint.behind`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from samkv_integrations.cache.chunk import ChunkCache, ChunkRef
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.prompt.resolve import Resolved

MOST_SEEN = 1024
"""Heads of prompts that are remembered, those seen last."""


class Beginnings:
    """Makes exact caches of first chunks in idle time of the scheduler. For many threads.

    One is made once a chunk has stood first, from its cache, behind a head that another question of
    this engine had before: a head with a date in it never comes again. It never makes an answer
    wait, and never evicts another cache: without room it is not made.
    """

    def __init__(self, chunks: Chunks, scheduler: Scheduler) -> None:
        self._chunks, self._scheduler = chunks, scheduler
        self._lock = threading.Lock()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._storing: list[threading.Thread] = []

    def after(self, resolved: Resolved, report: Report) -> None:
        """Have one made for the first chunk of a prompt that was answered, if it lacks one."""
        first = resolved.chunks[0] if resolved.chunks else None
        if first is None or first.stored is None or first.is_exact or not first.may_be_exact:
            return
        head = tuple(resolved.token_ids[: first.runs[0].position])
        # full prefill reads no cache, and behind the prefix of all caches each is exact as it is
        if report.ran in ("recompute", "prefix") or head == self._chunks.prefix:
            return
        since = resolved.n_deletions
        if since is None or not self._has_seen(head):
            return
        chunk = ChunkRef(key=first.key, text="", token_ids=first.token_ids, state="cached")
        mine = weakref.ref(self)  # an engine that is dropped makes none

        def make(check: Callable[[], None]) -> None:
            if (beginnings := mine()) is not None:
                beginnings._make(chunk, head, since, check)

        self._scheduler.run_when_idle(make)

    def _has_seen(self, head: tuple[int, ...]) -> bool:
        with self._lock:
            is_known = hash(head) in self._seen
            self._seen[hash(head)] = None
            self._seen.move_to_end(hash(head))
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        return is_known

    def _make(
        self, chunk: ChunkRef, head: tuple[int, ...], since: int, check: Callable[[], None]
    ) -> None:
        """In the model's thread, which only computes: a store may keep its caller waiting."""
        cache = self._chunks.compute_behind(chunk, head, check)
        if cache is not None:
            self._store(cache, since)

    def _store(self, cache: ChunkCache, since: int) -> None:
        thread = threading.Thread(
            target=self._chunks.keep_behind, args=(cache, since), name="samkv-store", daemon=True
        )
        with self._lock:
            self._storing = [each for each in self._storing if each.is_alive()]
            self._storing.append(thread)
            thread.start()

    def finish(self) -> None:
        """Make now what waits for idle time, and wait until it is stored."""
        self._scheduler.finish_idle()
        with self._lock:
            storing = list(self._storing)
        for thread in storing:
            thread.join()
