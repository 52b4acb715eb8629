"""Exact beginnings: a second cache of a chunk, computed behind the head of a prompt.

The head is the text before the first chunk, such as the chat template's beginning and a system
prompt. Behind it the first chunk's entries equal full prefill's, so none of its tokens has to be
recomputed. The cache is an ordinary chunk cache whose prefix is the head, see `Fingerprint.behind`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from samkv_integrations.cache.chunk import ChunkCache, ChunkRef
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.prefill import entries_before, prefill
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.errors import StoreError
from samkv_integrations.prompt.resolve import Resolved

MOST_SEEN = 1024
"""Prompt heads that are remembered; the one seen longest ago goes first."""


class Beginnings:
    """Computes exact beginnings while the scheduler is idle. Thread-safe.

    A chunk gets one if it stood first in a prompt, was answered from its cache, and an earlier
    question of this engine had the same head: a head with a date in it never comes again. No answer
    waits for it, and no other cache is evicted for it: without room in the store it is skipped.
    """

    def __init__(self, chunks: Chunks, scheduler: Scheduler) -> None:
        self._chunks, self._scheduler = chunks, scheduler
        self._lock = threading.Lock()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._storing: list[threading.Thread] = []

    def after(self, resolved: Resolved, report: Report) -> None:
        """Schedule one for the first chunk of a prompt that was answered, if it has none yet."""
        first = resolved.chunks[0] if resolved.chunks else None
        if first is None or first.stored is None or first.is_exact or not first.may_be_exact:
            return
        head = tuple(resolved.token_ids[: first.runs[0].position])
        # full prefill reads no cache, and right behind the common prefix every cache is exact
        if report.ran in ("recompute", "prefix") or head == self._chunks.prefix:
            return
        with self._lock:
            is_known = hash(head) in self._seen
            self._seen[hash(head)] = None
            self._seen.move_to_end(hash(head))
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        if not is_known:
            return
        chunk = ChunkRef(key=first.key, text="", token_ids=first.token_ids, state="cached")
        since = resolved.since
        mine = weakref.ref(self)  # nothing is computed for an engine that was dropped

        def make(check: Callable[[], None]) -> None:
            if (beginnings := mine()) is None:
                return
            if (cache := beginnings.compute(chunk, head, check)) is not None:
                beginnings._keep(cache, since)

        self._scheduler.run_when_idle(make)

    def compute(
        self, chunk: ChunkRef, head: tuple[int, ...], check: Callable[[], None]
    ) -> ChunkCache | None:
        """Compute the cache of a chunk behind the token ids ``head``, in the model's thread.

        Returns None if it exists already, or if the model has changed meanwhile. check: called
        before every layer; it may raise to end the pass.
        """
        chunks = self._chunks
        fingerprint, is_same_model = chunks.while_computing()
        made_by = chunks.store.behind(fingerprint, head)
        key = chunks.store.key(made_by, chunk.token_ids)
        if chunks.store.contains(key, made_by):
            return None
        with chunks.model.interruptible(check):
            before = entries_before(chunks.model, head)
            (cache,) = prefill(chunks.model, [replace(chunk, key=key)], made_by, before)
        return cache if is_same_model() else None

    def _keep(self, cache: ChunkCache, since: int) -> None:
        """Store a cache in a thread of its own, because a disk may be slow."""

        def store() -> None:
            with suppress(StoreError):  # no room, or a failure: the next question tries again
                self._chunks.keep(since, cache)

        thread = threading.Thread(target=store, name="samkv-store", daemon=True)
        with self._lock:
            self._storing = [each for each in self._storing if each.is_alive()]
            self._storing.append(thread)
            thread.start()

    def finish(self) -> None:
        """Compute now what is scheduled, and wait until it is stored."""
        self._scheduler.finish_idle()
        with self._lock:
            storing = list(self._storing)
        for thread in storing:
            thread.join()
