"""The vector store, LangChain's Chroma store over a `ChromaLink`, and an offline embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

from chromadb.api.models.Collection import Collection
from chromadb.api.types import validate_metadata
from chromadb.config import Settings
from chromadb.errors import NotFoundError
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel

from samkv_integrations import Engine
from samkv_integrations.chroma import (
    KEY_FIELD,
    ChromaLink,
    HashingEmbedding,
    check_name,
    chroma_errors,
)
from samkv_integrations.errors import InvalidChunk, InvalidOption
from samkv_integrations.frameworks.components import twin
from samkv_integrations.frameworks.engine_args import EngineRef, known_arguments
from samkv_integrations.store.chunk import normalise

if TYPE_CHECKING:
    from chromadb import WhereDocument
    from chromadb.api import ClientAPI
    from chromadb.api.collection_configuration import CreateCollectionConfiguration

DEFAULT_NAME = "langchain"
Where = dict[str, Any]
_OPEN_TWICE = "(if this process has already opened the database, give that client as client=)"


class _Keyless(Collection):
    """A collection that removes cache keys from results, and raises errors of this package."""

    def get(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with chroma_errors(f"collection {self.name!r} refused to be read"):
            return super().get(*args, **kwargs)

    def query(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with chroma_errors(f"collection {self.name!r} refused the query"):
            return _without_keys(super().query(*args, **kwargs))

    def search(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with chroma_errors(f"collection {self.name!r} refused the query"):
            return _without_keys(super().search(*args, **kwargs))


class SamKVChroma(Chroma):
    r"""A `Chroma` vector store that keeps chunk caches in line with its documents.

    Adding a document caches its text and writes the key of the cache into the record's metadata.
    A document with a known id is replaced. Deleting documents deletes the caches that no other
    record of the database uses. ``kv_link.sync()`` repairs deviations, for example after a raw
    ``collection.delete`` or a crash.

    The documents that a query returns omit the key, `samkv_key`, so that prompts with metadata do
    not show it; `get` returns records as they are stored.

    Documents are refused before anything is computed or written if they hold no text, exceed the
    model's context window, are images, or have metadata that Chroma does not accept.

    Args:
        collection_name, persist_directory, client, ...: all others are those of `Chroma`. Without
            ``client_settings`` Chroma sends no telemetry, as everywhere in this package.
        embedding_function: embeds documents and queries. Without one, adding documents and
            searching by text are errors; Chroma's default, a download, is not used.
        llm, engine: the component that caches, one of the two.
        cache_existing: whether to cache the existing records, with a progress bar; else the log
            warns once of a collection without caches.
        show_progress: whether to show a progress bar, on standard error, while texts are cached.

    Raises:
        InvalidOption: neither or both of ``llm`` and ``engine`` are given, the store of the engine
            lies in the collection's own folder or is another database's, or Chroma refuses
            a value.

    Instantiate:
        ```python
        from langchain_samkv import ChatSamKV, OfflineEmbeddings, SamKVChroma

        model = ChatSamKV(model="builtin", max_tokens=16)
        store = SamKVChroma("people", OfflineEmbeddings(), llm=model)  # in memory
        ```

    Use:
        ```python
        store.add_texts(["[Tobias Trulman] Tobias Trulman was born in Flevport."], ids=["tobias"])
        question = "Where was Tobias Trulman born?"
        (document,) = store.similarity_search(question, k=1)
        prompt = f"Documents:\n\n{document.page_content}\n\nQuestion: {question}"
        print(model.invoke(prompt).text, model.last_report)
        store.delete(["tobias"])  # and its cache
        ```

    Async:
        ```python
        await store.aadd_texts(["[Pavel Flalvek] Pavel Flalvek was born in Nombury."])
        documents = await store.asimilarity_search("Where was Pavel Flalvek born?", k=1)
        ```
    """

    @known_arguments
    def __init__(
        self,
        collection_name: str = DEFAULT_NAME,
        embedding_function: Embeddings | None = None,
        persist_directory: str | None = None,
        host: str | None = None,
        port: int | None = None,
        headers: dict[str, str] | None = None,
        chroma_cloud_api_key: str | None = None,
        tenant: str | None = None,
        database: str | None = None,
        client_settings: Settings | None = None,
        collection_metadata: dict[str, Any] | None = None,
        collection_configuration: CreateCollectionConfiguration | None = None,
        client: ClientAPI | None = None,
        relevance_score_fn: Callable[[float], float] | None = None,
        create_collection_if_not_exists: bool | None = True,
        *,
        ssl: bool = False,
        llm: BaseLanguageModel[Any] | None = None,
        engine: Engine | None = None,
        cache_existing: bool = False,
        show_progress: bool = False,
    ) -> None:
        check_name(collection_name)  # before the model is loaded
        self.show_progress = show_progress
        self._embedding = embedding_function or _NoEmbedding()
        self._engine = EngineRef.of(llm, engine).engine
        with chroma_errors(f"Chroma cannot open collection {collection_name!r} {_OPEN_TWICE}"):
            super().__init__(
                collection_name=collection_name, embedding_function=self._embedding,
                persist_directory=persist_directory, host=host, port=port, headers=headers,
                chroma_cloud_api_key=chroma_cloud_api_key, tenant=tenant, database=database,
                client_settings=client_settings or Settings(anonymized_telemetry=False),
                collection_metadata=collection_metadata,
                collection_configuration=collection_configuration, client=client,
                relevance_score_fn=relevance_score_fn,
                create_collection_if_not_exists=create_collection_if_not_exists, ssl=ssl,
            )  # fmt: skip
            if not create_collection_if_not_exists:
                # upstream opens it with Chroma's own embedding function
                found = self._client.get_collection(collection_name, embedding_function=None)
                self._chroma_collection = found
        self._link: ChromaLink | None = self._new_link()
        self._link.adopt(cache_existing=cache_existing)

    # upstream repeats the arguments of the constructor, which refuses unknown ones
    @classmethod
    def from_texts(  # type: ignore[override]
        cls,
        texts: Iterable[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        collection_name: str = DEFAULT_NAME,
        **kwargs: Any,
    ) -> SamKVChroma:
        """A store with these texts in it, beside what the collection holds.

        kwargs: those of the constructor.
        """
        store = cls(collection_name, embedding, **kwargs)
        store.add_texts(texts, metadatas, ids)
        return store

    def fork(self, new_name: str) -> SamKVChroma:
        """A copy of the collection, which uses the same caches; only Chroma Cloud supports it."""
        with chroma_errors(f"Chroma cannot fork collection {self._collection_name!r}"):
            forked = self._collection.fork(new_name=new_name)
        return SamKVChroma(
            forked.name, self._embedding, client=self._client, engine=self._engine,
            show_progress=self.show_progress,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> SamKVChroma:
        """A copy that shares the collection and the engine."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    __copy__ = __deepcopy__

    def __reduce__(self) -> NoReturn:
        """Raises InvalidOption: a pickle can hold neither a database nor a model."""
        raise InvalidOption(
            "a SamKVChroma cannot be pickled: it holds a database and a model; make it again in "
            "the other process, of the same arguments with an llm or engine of that process"
        )

    def _new_link(self) -> ChromaLink:
        return ChromaLink(self._collection, self._engine)

    @property
    def kv_link(self) -> ChromaLink:
        """The link between records and caches. Raises InvalidOption after a deletion."""
        if self._link is None:
            raise InvalidOption(
                f"collection {self._collection_name!r} was deleted; reset_collection() makes it "
                "again, without documents"
            )
        return self._link

    @property
    def _collection(self) -> Collection:
        with chroma_errors(f"collection {self._collection_name!r} refused the query"):
            found = super()._collection
        return _Keyless(found._client, found._model, None, None)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents that exist among these ids, in any order."""
        found = self._records(ids)
        for metadata in found["metadatas"]:
            (metadata or {}).pop(KEY_FIELD, None)
        columns = found["documents"], found["metadatas"], found["ids"]
        return [
            Document(page_content=text, metadata=metadata or {}, id=id_)
            for text, metadata, id_ in zip(*columns, strict=True)
            if text is not None
        ]

    def _records(self, ids: Sequence[str]) -> dict[str, Any]:
        if not ids:  # Chroma raises for an empty list
            return {"ids": [], "documents": [], "metadatas": []}
        return self.get(ids=list(dict.fromkeys(ids)))  # Chroma also raises for a repeated id

    # -- writing ----------------------------------------------------------------------------

    def add_texts(  # type: ignore[override]  # upstream takes any keyword there is
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: Sequence[str | None] | None = None,
        *,
        batch_size: int | None = None,
    ) -> list[str]:
        """Embed and cache texts, and write their records; returns the ids.

        ids: None for new ones.
        batch_size: LangChain's `index` passes it; ignored.

        Raises:
            InvalidOption: an embedding has another size than the collection's, an id occurs twice,
                or Chroma refuses a record, such as nested metadata.
            InvalidChunk: a text is empty, or longer than the context window; split it first.
            StoreError: the chunk store cannot be written.
        """
        if isinstance(texts, str):
            raise InvalidOption(f"texts={texts[:40]!r} is one text; give a list of texts")
        bodies = list(texts)
        given = [None] * len(bodies) if ids is None else ids
        names = [str(uuid4()) if id_ is None else id_ for id_ in given]
        known = list(metadatas or ())
        self._add(names, bodies, known + [{}] * (len(bodies) - len(known)))
        return names

    aadd_texts = twin(add_texts)

    def _add(
        self, ids: Sequence[str], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]]
    ) -> None:
        if not texts and not ids:
            return
        for record in zip(ids, texts, metadatas, strict=False):  # the link compares lengths
            _check(*record)
        embeddings = self._embedding.embed_documents(list(texts))
        self.kv_link.add(ids, texts, embeddings, metadatas, progress=self.show_progress)

    def update_document(self, document_id: str, document: Document) -> None:
        """Like `update_documents`, for one."""
        self.update_documents([document_id], [document])

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """Replace the texts of records, and delete caches that no record uses any more.

        As in Chroma, metadata are merged into those of the record.

        Raises:
            InvalidOption: a record does not exist (`add_documents` makes one), and as `add_texts`
                does.
            InvalidChunk: as `add_texts` does.
        """
        if len(ids) != len(documents):
            raise InvalidOption(f"{len(ids)} ids and {len(documents)} documents; give one of each")
        found = self._records(ids)
        old = dict(zip(found["ids"], found["metadatas"], strict=True))
        if unknown := [id_ for id_ in ids if id_ not in old]:
            raise InvalidOption(
                f"collection {self._collection_name!r} has no document {unknown[0]!r} to update; "
                "add it with add_documents"
            )
        self._add(
            ids,
            [document.page_content for document in documents],
            [{**(old[id_] or {}), **new.metadata} for id_, new in zip(ids, documents, strict=True)],
        )

    def delete(  # type: ignore[override]  # upstream takes any keyword there is
        self,
        ids: list[str] | None = None,
        where: Where | None = None,
        where_document: WhereDocument | None = None,
    ) -> None:
        """Delete documents, and the caches that no record uses any more.

        ids, where, where_document: the documents that match all of these. Unknown ids are ignored.

        Raises InvalidOption if all are empty; `reset_collection` deletes everything.
        """
        names = [ids] if isinstance(ids, str) else ids
        if not names and (names is not None or not (where or where_document)):
            raise InvalidOption(
                f"ids={ids!r}, where={where!r} and where_document={where_document!r} name no "
                "document to delete; to delete all of them, use reset_collection()"
            )
        if where_document:
            found = self.get(where=where, where_document=where_document, include=[])["ids"]
            names = found if names is None else sorted({*found} & {*names})
        if names or names is None:
            self.kv_link.delete(names, where)

    def delete_collection(self) -> None:
        """Delete the collection, and the caches that no other one uses. Repeated calls are ignored.

        If another client has deleted it, its keys are unknown, and the next `sync` of another
        collection prunes their caches.
        """
        if self._link is None:
            return
        try:
            self._link.clear()
            with chroma_errors(f"Chroma cannot delete collection {self._collection_name!r}"):
                super().delete_collection()
        except InvalidOption as error:
            if not isinstance(error.__cause__, NotFoundError):
                raise
            self._chroma_collection = None
        self._link = None

    def reset_collection(self) -> None:
        """Delete the collection as `delete_collection` does, and create an empty one."""
        with chroma_errors(f"Chroma cannot make collection {self._collection_name!r} again"):
            super().reset_collection()
        self._link = self._new_link()

    def add_images(
        self,
        uris: list[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
    ) -> NoReturn:
        """Raises InvalidOption: images have no text to cache."""
        raise InvalidOption(
            "images have no chunk caches; keep them in a collection of their own, with Chroma"
        )


class _NoEmbedding(Embeddings):
    """Stands for a missing embedding; every call raises."""

    def embed_documents(self, texts: list[str]) -> NoReturn:
        raise InvalidOption(
            "documents and questions cannot be embedded without an embedding_function; give one to "
            "the constructor"
        )

    embed_query = embed_documents  # type: ignore[assignment]  # of any arguments


def _without_keys(found: Any) -> Any:  # noqa: ANN401
    """Remove the keys from the metadata of a result."""
    for row in found["metadatas"] or ():
        for metadata in row or ():
            (metadata or {}).pop(KEY_FIELD, None)
    return found


def _check(id_: object, text: object, metadata: Mapping[str, Any]) -> None:
    """Raises if Chroma would refuse a record, or its text cannot be a chunk."""
    if not isinstance(id_, str) or not id_:
        raise InvalidOption(f"id {id_!r}; it must be a string of at least one character")
    if not isinstance(text, str):
        raise InvalidChunk(f"document {id_!r} is a {type(text).__name__}; it must be a string")
    if not normalise(text):
        raise InvalidChunk(f"document {id_!r} holds no text; leave empty documents out")
    if metadata:
        with chroma_errors(f"the metadata of document {id_!r} cannot be stored"):
            validate_metadata(dict(metadata))


class OfflineEmbeddings(Embeddings):
    """`HashingEmbedding` for LangChain: lexical, with no model to download.

    ``samkv ingest`` and the LlamaIndex quickstart write the same vectors.

    Instantiate:
        ```python
        from langchain_samkv import OfflineEmbeddings

        embeddings = OfflineEmbeddings()
        ```

    Use:
        ```python
        vector = embeddings.embed_query("Where was Tobias Trulman born?")
        vectors = embeddings.embed_documents(["Tobias Trulman was born in Flevport."])
        likeness = sum(a * b for a, b in zip(vector, vectors[0]))
        ```

    Async:
        ```python
        vector = await embeddings.aembed_query("Where was Tobias Trulman born?")
        ```
    """

    def __init__(self) -> None:
        self._embedding = HashingEmbedding()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        return self._embedding.embed(texts)

    def embed_query(self, text: str) -> list[float]:
        """The vector that a document of this text has."""
        return self.embed_documents([text])[0]
