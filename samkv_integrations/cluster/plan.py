"""What an ingest has to do, cut up so that it does not depend on who does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from samkv_integrations.cache.chunk import ChunkRef
from samkv_integrations.cluster.work import Batch
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.prefill import batches
from samkv_integrations.errors import InvalidChunk

VERIFIED_AT_ONCE = 64
"""Chunks that have a cache, to a batch: each is read as a whole."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chunks of some texts, and the batches that make sure of their caches.

    refs: chunk of each text; None for one that can have no cache, which ``failed`` says why, by
        place. pages: places of the texts. batches: in the order of the pages, and in each what is
        missing first.
    """

    refs: Sequence[ChunkRef | None]
    failed: dict[int, str]
    pages: Sequence[range]
    batches: Sequence[Batch]

    @classmethod
    def of(cls, engine: Engine, texts: Sequence[str], page_size: int) -> Plan:
        """Looks at ``texts``, and settles the block size; nothing is computed.

        A pass over several chunks gives numbers that depend, in their last bits, on which they
        are. So chunks are put together here as `ChromaLink.add` does it in one process.

        page_size: texts a page. Raises StoreError as `Chunks.agree` does.
        """
        found, failed = engine.chunks.refer(texts), {}
        for place, ref in enumerate(found):
            try:
                engine.chunks.require_fit([ref])
            except InvalidChunk as error:
                failed[place] = str(error)
        sound = [place for place in range(len(found)) if place not in failed]
        agreed = engine.chunks.agree([found[place] for place in sound])
        at_place = dict(zip(sound, agreed, strict=True))
        refs = [at_place.get(place) for place in range(len(found))]
        pages = [
            range(start, min(start + page_size, len(refs)))
            for start in range(0, len(refs), page_size)
        ]
        return cls(refs=refs, failed=failed, pages=pages, batches=[*_batches(engine, refs, pages)])

    @property
    def n_chunks(self) -> int:
        """Chunks, each key once."""
        return sum(len(batch.texts) for batch in self.batches)

    @property
    def missed(self) -> list[ChunkRef]:
        """Chunks that had no cache, each once."""
        texts = {text for batch in self.batches if batch.is_missed for text in batch.texts}
        return [*{ref.key: ref for ref in self.refs if ref and ref.text in texts}.values()]


def _batches(
    engine: Engine, refs: Sequence[ChunkRef | None], pages: Sequence[range]
) -> Iterator[Batch]:
    seen: set[str] = set()
    number = count()
    for page, places in enumerate(pages):
        new: dict[str, ChunkRef] = {}
        for place in places:
            ref = refs[place]
            if ref is not None and ref.key not in seen:
                new.setdefault(ref.key, ref)
        seen |= new.keys()
        looked_up = engine.chunks.look_up(list(new.values()), "exists")
        for group in batches([ref for ref in looked_up if ref.state == "missed"]):
            yield _batch(next(number), page, group, is_missed=True)
        there = [ref for ref in looked_up if ref.state == "cached"]
        for start in range(0, len(there), VERIFIED_AT_ONCE):
            group = there[start : start + VERIFIED_AT_ONCE]
            yield _batch(next(number), page, group, is_missed=False)


def _batch(number: int, page: int, group: Sequence[ChunkRef], *, is_missed: bool) -> Batch:
    texts = tuple(ref.text for ref in group)
    return Batch(number=number, page=page, texts=texts, is_missed=is_missed)
