"""Exact beginnings of prompts, kept: caches of chunks as they stand behind the head of a prompt.

The head is what stands before the first chunk: the chat template's beginning and a system prompt.
Behind it the first chunk's entries are full prefill's, so none of its tokens has to be recomputed.
Such a cache is an ordinary chunk cache whose prefix is the head, see `Fingerprint.behind`.
"""

from __future__ import annotations

from functools import partial

from samkv_integrations.cache.chunk import ChunkRef
from samkv_integrations.engine.chunks import Chunks
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.scheduler import Scheduler
from samkv_integrations.prompt.resolve import Resolved


class Beginnings:
    """Makes exact caches of first chunks in idle time of the scheduler. For many threads.

    One is made once a chunk has stood first behind a head, from its cache, and was not exact there.
    It never makes an answer wait, and never evicts another cache: without room it is not made.
    """

    def __init__(self, chunks: Chunks, scheduler: Scheduler) -> None:
        self._chunks, self._scheduler = chunks, scheduler

    def after(self, resolved: Resolved, report: Report, began: float) -> None:
        """Have one made for the first chunk of a prompt that was answered, if it lacks one.

        began: when the question began, see `Chunks.forgetting`.
        """
        first = resolved.chunks[0] if resolved.chunks else None
        if first is None or first.stored is None or first.is_exact or not first.may_be_exact:
            return
        head = tuple(resolved.token_ids[: first.runs[0].position])
        # full prefill reads no cache, and behind the prefix of all caches each is exact as it is
        if report.ran in ("recompute", "prefix") or head == self._chunks.prefix.token_ids:
            return
        chunk = ChunkRef(key=first.key, text="", token_ids=first.token_ids, state="cached")
        make = partial(self._chunks.make_behind, chunk, head, began)
        self._scheduler.run_when_idle(make)
