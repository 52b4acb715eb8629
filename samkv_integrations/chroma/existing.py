"""A collection that was filled before it was linked, or under another model: nothing is cached."""

from __future__ import annotations

import logging

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.records import Records
from samkv_integrations.engine.engine import Engine

_SAMPLE = 16
"""Records that are looked at: enough to tell a collection without caches from one with some."""

_log = logging.getLogger(__name__)


def warn_if_uncached(records: Records, engine: Engine) -> None:
    """Log a warning with the next step if none of the first records has a cache in the store."""
    collection = records.collection
    rows = records.read(collection, limit=_SAMPLE, include=["documents"])
    chunks = engine.chunks
    found = chunks.refer([text for text in rows["documents"] or () if text])
    fit = [ref for ref in found if chunks.fits(ref)]
    if not fit or any(ref.state == "cached" for ref in chunks.look_up(fit, "exists")):
        return
    with chroma_errors(f"collection {collection.name!r} cannot be counted"):
        n_records = collection.count()
    store = engine.store
    _log.warning(
        "collection %r holds %d records, and those looked at have no chunk cache in %s (namespace "
        "%r, model %r): prompts find nothing of them. Next step: give cache_existing=True, or call "
        "kv_link.sync(), or run 'samkv store sync'",
        collection.name,
        n_records,
        store.path if isinstance(store, ChunkStore) else "memory",
        store.namespace,
        engine.model.name,
    )
