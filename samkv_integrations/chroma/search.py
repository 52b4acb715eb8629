"""Finds the records of a collection that fit a question, by words and by vectors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from samkv_integrations.chroma.client import chroma_errors
from samkv_integrations.chroma.embedding import Embedding, fused
from samkv_integrations.chroma.records import Metadata, Records, Retrieved
from samkv_integrations.chroma.words import WordIndex
from samkv_integrations.errors import EmptyInput, InvalidOption

DEPTH = 100
"""Records of each ranking, of words and of vectors, that `by_question` fuses."""

_log = logging.getLogger(__name__)


def by_question(
    records: Records, words: WordIndex, embedding: Embedding | None, question: str, k: int
) -> list[Retrieved]:
    """The ``k`` records that fit a question best, the best first.

    By words: those that share words with it, by BM25. There are fewer if fewer share a word, and
    the first records if none does. ``distance`` is SQLite's BM25, which is less for better ones.

    With an embedding also by vectors: the best `DEPTH` of both are `fused`, and ``distance`` is
    minus their score.

    Raises as `ChromaLink.search` does.
    """
    _check_count(k)
    n_records, same = _require_records(records), list[str]()
    if words.count() != n_records:
        words.rebuild(n_records)
    near, most = list[str](), k
    if embedding is not None:
        most = max(k, DEPTH)
        nearest = _nearest(records, embedding.embed_question(question), most)
        near = [id_ for id_, text, *_ in nearest if text]
    for _ in range(2):
        matched = words.search(question, most)
        scores = {id_: score for id_, (_, score) in matched.items()}
        if near:  # then the first records, whose score is 0, are no help
            ranked = fused([id_ for id_, score in scores.items() if score], near)
            scores = {id_: -score for id_, score in ranked.items()}
        found = [*scores][:k]
        if not found:  # no record has a text
            break
        page = records.read(records.collection, ids=found, include=["documents", "metadatas"])
        parts = page["ids"], page["documents"] or (), page["metadatas"] or ()
        rows = {id_: (text, row) for id_, text, row in zip(*parts, strict=True) if text}
        # a text that the index of words does not know was found by its vector
        same = [id_ for id_ in found if id_ in rows and _is_same(matched, id_, rows[id_][0])]
        if len(same) == len(found):
            break
        words.rebuild()  # another client has changed records
    return [
        Retrieved(
            id=id_,
            text=rows[id_][0],
            metadata=dict(rows[id_][1] or {}),
            distance=scores[id_],
        )
        for id_ in same
    ]


def by_vector(records: Records, vector: Sequence[float], k: int) -> list[Retrieved]:
    """The ``k`` records nearest to ``vector``; see `ChromaLink.query`."""
    _check_count(k)
    if not len(vector):
        raise InvalidOption("the vector is empty; give the embedding of the question")
    _require_records(records)
    rows = _nearest(records, vector, k)
    if without_text := [id_ for id_, text, *_ in rows if text is None]:
        # Each process has an index of its own; all processes share the records.
        _log.warning(
            "record %r of collection %r has no text and is left out; add it again with one, or "
            "start this process again if another one has deleted it",
            without_text[0], records.collection.name,
        )  # fmt: skip
    return [
        Retrieved(id=id_, text=text, metadata=dict(metadata or {}), distance=distance)
        for id_, text, metadata, distance in rows
        if text is not None
    ]


def _check_count(k: int) -> None:
    if k < 1:
        raise InvalidOption(f"{k} chunks to retrieve; ask for at least 1")


def _require_records(records: Records) -> int:
    """The number of records. Raises EmptyInput if there is none."""
    name = records.collection.name
    with chroma_errors(f"collection {name!r} refused the query"):
        n_records = records.collection.count()
    if not n_records:
        raise EmptyInput(f"collection {name!r} is empty; ingest documents into it first")
    return n_records


def _nearest(
    records: Records, vector: Sequence[float], k: int
) -> list[tuple[str, str | None, Metadata | None, float]]:
    """Id, text, metadata and distance of the records nearest to ``vector``."""
    with chroma_errors(f"collection {records.collection.name!r} refused the query"):
        found = records.collection.query(
            query_embeddings=[vector],
            n_results=k,
            include=["documents", "metadatas", "distances"],
        )
    documents, metadatas = found["documents"], found["metadatas"]
    distances = found["distances"]
    assert documents and metadatas and distances  # they were asked for
    return list(zip(found["ids"][0], documents[0], metadatas[0], distances[0], strict=True))


def _is_same(matched: Mapping[str, tuple[str, float]], id_: str, text: str) -> bool:
    """Whether the index of words has this text for the record, or did not find the record."""
    return id_ not in matched or matched[id_][0] == text
