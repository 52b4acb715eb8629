"""The link between a Chroma collection and chunk caches, for every framework and for none.

Chroma keeps texts, embeddings and metadata; the store keeps the caches. What ties them is the key
in the metadata of each record, and even that can be computed again from the record's text.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samkv_integrations.chunk import normalise
from samkv_integrations.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, MissingExtra, UnknownOption
from samkv_integrations.store import ChunkStore

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

KEY_FIELD = "samkv_key"

Metadata = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class IngestResult:
    """What one `ChromaLink.add` did.

    n_cached: chunks that were read by the model. n_hit: records whose chunk was cached before, or
    stood in the same call already. bytes_on_disk: bytes added to the store.
    """

    n_records: int
    n_cached: int
    n_hit: int
    seconds: float
    bytes_on_disk: int


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """One record that a query found; ``text`` is what was added, to the letter."""

    id: str
    text: str
    metadata: Metadata
    distance: float


class ChromaLink:
    """A collection whose records have chunk caches.

    Args:
        collection: a Chroma collection, see `open_collection`.
        engine: caches the chunks.

    Raises:
        InvalidOption: the store of ``engine`` lies in the collection's own folder, where Chroma
            may clean up.
    """

    def __init__(self, collection: Collection, engine: Engine) -> None:
        self.collection = collection
        self.engine = engine
        # A collection has no public way to its client, which alone knows folder and batch size.
        self._client = collection._client
        settings = self._client.get_settings()
        if settings.is_persistent and isinstance(engine.store, ChunkStore):
            folder, caches = Path(settings.persist_directory).resolve(), engine.store.path.resolve()
            if caches.is_relative_to(folder):
                raise InvalidOption(
                    f"the chunk caches in {caches} lie inside Chroma's folder {folder}; "
                    f"give a folder beside it, such as {folder.with_name(folder.name + '-kv')}"
                )

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        embeddings: Sequence[Sequence[float]],
        metadatas: Sequence[Metadata | None] | None = None,
        progress: bool = False,
    ) -> IngestResult:
        """Cache the chunks, then write their records; records with these ids are replaced.

        Calling it again after it was interrupted computes only what is missing.

        Raises:
            InvalidOption: lengths differ, an id occurs twice, or Chroma refuses a record.
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written.
        """
        began = time.perf_counter()
        rows: Sequence[Metadata | None] = [None] * len(ids) if metadatas is None else metadatas
        lengths = [len(ids), len(texts), len(embeddings), len(rows)]
        if len(set(lengths)) > 1:
            raise InvalidOption(
                "{} ids, {} texts, {} embeddings and {} metadatas; "
                "give one of each a record".format(*lengths)
            )
        if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
            raise InvalidOption(f"id {twice[0]!r} occurs twice; every record needs its own")
        bytes_before = self.engine.store.stats().bytes
        new = {normalise(text) for text in texts if self.engine.handle_of(text) is None}
        keys = self.engine.cache_chunks(texts, progress=progress)
        records = [{**(row or {}), KEY_FIELD: key} for row, key in zip(rows, keys, strict=True)]
        size = self._client.get_max_batch_size()
        for at in range(0, len(ids), size):
            part = slice(at, at + size)
            with _chroma_errors(f"collection {self.collection.name!r} refused the records"):
                self.collection.upsert(
                    ids=list(ids[part]),
                    documents=list(texts[part]),
                    embeddings=list(embeddings[part]),
                    metadatas=list(records[part]),
                )
        return IngestResult(
            n_records=len(ids),
            n_cached=len(new),
            n_hit=len(ids) - len(new),
            seconds=time.perf_counter() - began,
            bytes_on_disk=self.engine.store.stats().bytes - bytes_before,
        )

    def query(self, embedding: Sequence[float], k: int) -> list[Retrieved]:
        """The ``k`` records nearest to ``embedding``, nearest first; fewer if there are fewer.

        Raises:
            EmptyInput: the collection is empty.
            InvalidOption: ``k`` is not positive, the embedding has another length than those in
                the collection, or a record was added without a text.
        """
        name = self.collection.name
        if k < 1:
            raise InvalidOption(f"k={k}; it must be at least 1")
        if not self.collection.count():
            raise EmptyInput(f"collection {name!r} is empty; ingest documents into it first")
        with _chroma_errors(f"collection {name!r} refused the query"):
            found = self.collection.query(
                query_embeddings=[embedding],
                n_results=k,
                include=["documents", "metadatas", "distances"],
            )
        documents, metadatas, distances = found["documents"], found["metadatas"], found["distances"]
        assert documents and metadatas and distances  # they were asked for
        columns = found["ids"][0], documents[0], metadatas[0], distances[0]
        results = []
        for id_, text, metadata, distance in zip(*columns, strict=True):
            if text is None:
                raise InvalidOption(
                    f"record {id_!r} of collection {name!r} has no text; add it again with one"
                )
            results.append(
                Retrieved(id=id_, text=text, metadata=dict(metadata or {}), distance=distance)
            )
        return results


def open_collection(path: str | os.PathLike[str], name: str, create: bool) -> Collection:
    """The collection called ``name`` of the Chroma database in folder ``path``.

    Chroma sends no telemetry and gets no embedding function: embeddings are always given to it.
    One process must not open a folder in another way too, with ``chromadb.PersistentClient`` and
    other settings: Chroma refuses that.

    create: whether to make what is missing of the folder and the collection.

    Raises:
        UnknownOption: there is no such collection; lists those that exist.
        InvalidOption: there is no database, it cannot be opened, or Chroma refuses the name.
    """
    try:
        from chromadb import PersistentClient
        from chromadb.config import Settings
        from chromadb.errors import NotFoundError
    except ImportError as error:
        raise MissingExtra.of("chromadb", "chroma") from error
    folder = Path(path)
    if not create and not (folder / "chroma.sqlite3").is_file():
        raise InvalidOption(f"{folder} holds no Chroma database; ingest documents into it first")
    with _chroma_errors(f"Chroma cannot open {folder}"):
        client = PersistentClient(folder, settings=Settings(anonymized_telemetry=False))
    with _chroma_errors(f"Chroma cannot open collection {name!r}"):
        if create:
            return client.get_or_create_collection(name, embedding_function=None)
        try:
            return client.get_collection(name, embedding_function=None)
        except NotFoundError as error:
            known = [collection.name for collection in client.list_collections()]
            raise UnknownOption.among("collection", name, known or ["none"]) from error


@contextmanager
def _chroma_errors(what: str) -> Iterator[None]:
    """Chroma's complaints about its arguments as ours."""
    from chromadb.errors import ChromaError

    try:
        yield
    except (ChromaError, ValueError, TypeError) as error:
        raise InvalidOption(f"{what}: {error}") from error


class HashingEmbedding:
    """Lexical embeddings, computed offline without a model: hashed words and pairs of words.

    Texts are near when they share words. Good enough for tests, demonstrations and questions that
    name what they ask about; paraphrases need a learned embedding.
    """

    def __init__(self, n_dims: int = 1024) -> None:
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ImportError as error:
            raise MissingExtra.of("scikit-learn", "chroma") from error
        if n_dims < 1:
            raise InvalidOption(f"n_dims={n_dims}; it must be at least 1")
        self._vectorizer = HashingVectorizer(
            n_features=n_dims, ngram_range=(1, 2), lowercase=True, norm="l2"
        )

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        if not texts:
            return []
        vectors: list[list[float]] = self._vectorizer.transform(texts).toarray().tolist()
        return vectors
