"""Records of a Chroma collection whose chunks many workers cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import Metadata
from samkv_integrations.cluster.ingest import ClusterIngest, cache_on_ray
from samkv_integrations.cluster.pool import WorkerPool
from samkv_integrations.frameworks.engine_args import ModelSource


def add_on_ray(
    link: ChromaLink,
    source: ModelSource,
    ids: Sequence[str],
    texts: Sequence[str],
    embeddings: Sequence[Sequence[float]],
    metadatas: Sequence[Metadata | None] | None = None,
    *,
    pool: WorkerPool,
    progress: bool = False,
) -> ClusterIngest:
    """`ChromaLink.add`, with chunks that are cached by the workers of ``pool``.

    Records are written by this process, page by page, once the caches of a page and of those before
    it are there. A text that can have no cache gets no record; a record of its id stays as it is.

    Raises InvalidOption as `ChromaLink.add` does, and what `cache_on_ray` raises.
    """
    rows = link.check(ids, texts, embeddings, metadatas)

    def write(places: range, failed: Mapping[int, str]) -> None:
        sound = [place for place in places if place not in failed]
        if sound:
            link.add(
                [ids[place] for place in sound],
                [texts[place] for place in sound],
                [embeddings[place] for place in sound],
                [rows[place] for place in sound],
                build_missing=False,
            )

    return cache_on_ray(link.engine, source, texts, pool, on_page=write, progress=progress)
