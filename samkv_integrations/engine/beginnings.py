"""Exact beginnings: a second cache of a chunk, computed behind the head of a prompt.

The head is the text before the first chunk, such as the chat template's beginning and a system
prompt. Behind it the first chunk's entries equal full prefill's, so none of its tokens has to be
recomputed. The cache is an ordinary chunk cache whose prefix is the head, see `Fingerprint.behind`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from samkv_integrations.cache.chunk import ChunkRef
from samkv_integrations.engine.chunks import Chunks, RecentKeys
from samkv_integrations.engine.prefill import entries_before, prefill
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.errors import StoreError
from samkv_integrations.prompt.resolve import Resolved


class Beginnings:
    """Computes exact beginnings while the scheduler is idle. Thread-safe.

    A chunk gets one if it stood first in a prompt, was answered from its cache, and an earlier
    question of this engine had the same head: a head with a date in it never comes again. No answer
    waits for the pass, and no other cache is evicted for it: without room in the store it is
    skipped.
    """

    def __init__(self, chunks: Chunks, scheduler: Scheduler) -> None:
        self._chunks, self._scheduler = chunks, scheduler
        self._heads = RecentKeys()  # of prompts, by their hash

    def after(self, resolved: Resolved, report: Report) -> None:
        """Schedule one for the first chunk of a prompt that was answered, if it has none yet."""
        first = resolved.chunks[0] if resolved.chunks else None
        if first is None or first.stored is None or first.is_exact or not first.may_be_exact:
            return
        head = tuple(resolved.token_ids[: first.runs[0].position])
        # full prefill reads no cache, and right behind the common prefix every cache is exact
        if report.ran in ("recompute", "prefix") or head == self._chunks.prefix:
            return
        name = str(hash(head))
        is_known = self._heads.take(name) is not None
        self._heads.add([name])
        if not is_known:
            return
        chunk = ChunkRef(key=first.key, text="", token_ids=first.token_ids, state="cached")
        since = resolved.since  # of which else the work would hold the caches
        mine = weakref.ref(self)  # nothing is computed for an engine that was dropped

        def make(check: Callable[[], None]) -> None:
            if (beginnings := mine()) is not None:
                beginnings.make(chunk, head, since, check)

        self._scheduler.run_when_idle(make)

    def make(
        self, chunk: ChunkRef, head: tuple[int, ...], since: int, check: Callable[[], None]
    ) -> None:
        """Compute and store the cache of a chunk behind the token ids ``head``, unless it exists.

        since: see `Chunks.deletions`. check: called before every layer; it may raise to end the
        pass.
        """
        chunks = self._chunks
        fingerprint, is_same_model = chunks.while_computing()
        made_by = chunks.store.behind(fingerprint, head)
        key = chunks.store.key(made_by, chunk.token_ids)
        if chunks.store.contains(key, made_by):
            return
        with chunks.model.interruptible(check):
            before = entries_before(chunks.model, head)
            (cache,) = prefill(chunks.model, [replace(chunk, key=key)], made_by, before)
        if is_same_model():
            with suppress(StoreError):  # no room, or a failure: the next question tries again
                chunks.keep(since, cache)
