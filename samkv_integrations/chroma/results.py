"""What a link between records and chunk caches tells of its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Metadata = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class IngestResult:
    """What one `ChromaLink.add` did.

    n_cached: chunks that were read by the model, those with a broken cache among them. n_hit:
    records whose chunk was cached before, or stood in the same call already. Records without a
    cache are in neither. n_evicted: chunks of this call that had gone again at its end, for want of
    room. bytes_on_disk: what the caches that were written take, before what replaced records had
    was released.
    """

    n_records: int
    n_cached: int
    n_hit: int
    n_evicted: int = 0
    seconds: float
    bytes_on_disk: int


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """What one `ChromaLink.sync` did.

    n_records: records of the collection. n_cached: chunks that were read by the model. n_linked:
    records whose key was absent or wrong, and was set. n_skipped: records without a text, or with
    one that can be no chunk, such as one longer than the context window. n_evicted: chunks whose
    cache went for want of room, and which were left so. n_pruned: chunks that nothing referenced,
    deleted. n_in_grace: the same, kept because they are young.
    bytes_freed: what the store shrank by while it was pruned.
    """

    n_records: int
    n_cached: int
    n_linked: int
    n_skipped: int
    n_evicted: int
    n_pruned: int
    n_in_grace: int
    bytes_freed: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """One record that a query found; ``text`` is what was added, to the letter."""

    id: str
    text: str
    metadata: Metadata
    distance: float

    @property
    def source(self) -> str:
        """What it was taken from, as ``samkv ingest`` writes it down; else the record's id."""
        return str(self.metadata.get("source", self.id))


KEY_FIELD = "samkv_key"
