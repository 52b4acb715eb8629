"""The vector store: LlamaIndex's Chroma store over a `ChromaLink`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chromadb.api.models.Collection import Collection
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.chroma.base import _to_chroma_filter

from llama_index.llms.samkv.transform import body_of
from samkv_integrations import Engine
from samkv_integrations.chroma import (
    KEY_FIELD,
    ChromaLink,
    chroma_errors,
    connect_collection,
    open_collection,
)
from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.components import twin
from samkv_integrations.frameworks.engine_args import EngineRef, known_arguments


class SamKVChromaVectorStore(ChromaVectorStore):
    """A `ChromaVectorStore` that keeps chunk caches in line with its nodes.

    Adding a node caches its text and writes the key of the cache into the record's metadata, but
    not into the nodes that a query returns. A node with a known id is replaced. Deleting nodes
    deletes the caches that no other record of the database uses. ``kv_link.sync()`` repairs
    deviations, for example after a raw ``collection.delete`` or a crash.

    Images and nodes without text are stored without a key. A node longer than the model's context
    window is refused, because no prompt could hold it.

    Args:
        chroma_collection: a collection of a synchronous client, without an embedding function.
        llm, engine: the component that caches, one of the two.
        cache_existing: whether to cache the existing records, with a progress bar; else the log
            warns once of a collection without caches.
        show_progress: whether to show a progress bar, on standard error, while texts are cached.
            LlamaIndex's own ``show_progress`` of an index or a pipeline has no effect here.
        persist_dir, host, port, ssl: location of the collection, for `to_dict` only; `from_params`
            sets them.

    Copies share the collection and the engine. A pickle has neither and cannot be used.

    Instantiate:
        ```python
        from llama_index.llms.samkv import SamKVLLM
        from llama_index.vector_stores.samkv import SamKVChromaVectorStore

        llm = SamKVLLM(model_name="builtin", kv_dir="kv", max_new_tokens=16)
        store = SamKVChromaVectorStore.from_params("people", persist_dir="chroma", llm=llm)
        ```

    Use:
        ```python
        from llama_index.core import StorageContext, VectorStoreIndex
        from llama_index.core.schema import TextNode
        from llama_index.llms.samkv.quickstart import OfflineEmbedding

        nodes = [TextNode(text="[Tobias Trulman] Tobias Trulman was born in Flevport.")]
        context = StorageContext.from_defaults(vector_store=store)
        embedding = OfflineEmbedding()  # or any other
        index = VectorStoreIndex(nodes, storage_context=context, embed_model=embedding)
        print(index.as_query_engine(llm=llm).query("Where was Tobias Trulman born?"))
        ```

    Async:
        ```python
        nodes = await store.aget_nodes()
        await store.adelete_nodes([node.node_id for node in nodes])  # and their caches
        ```
    """

    show_progress: bool = Field(default=False, description="Whether to show a progress bar.")

    _link: ChromaLink | None = PrivateAttr(default=None)

    @known_arguments
    def __init__(
        self,
        chroma_collection: Collection,
        *,
        llm: LLM | None = None,
        engine: Engine | None = None,
        persist_dir: str | None = None,
        host: str | None = None,
        port: int | None = None,
        ssl: bool = False,
        cache_existing: bool = False,
        show_progress: bool = False,
    ) -> None:
        link = ChromaLink(chroma_collection, EngineRef.of(llm, engine).engine)
        link.adopt(cache_existing=cache_existing)
        super().__init__(
            chroma_collection=chroma_collection, collection_name=chroma_collection.name,
            persist_dir=persist_dir, host=host, port=port, ssl=ssl,
        )  # fmt: skip
        self.show_progress = show_progress
        self._link = link

    @classmethod
    def from_collection(cls, collection: Collection, **kwargs: Any) -> SamKVChromaVectorStore:
        """The same as the constructor, whose arguments ``kwargs`` are."""
        return cls(collection, **kwargs)

    @classmethod  # upstream takes any keyword there is
    def from_params(  # type: ignore[override]
        cls,
        collection_name: str,
        host: str | None = None,
        port: int | str | None = None,
        ssl: bool = False,
        headers: Mapping[str, str] | None = None,
        persist_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> SamKVChromaVectorStore:
        """A store on a collection, which is created if it does not exist.

        persist_dir: folder of the database; or host, port, ssl, headers: those of a Chroma server.
        kwargs: llm, engine, cache_existing and show_progress, as for the constructor.

        Raises:
            InvalidOption: neither or both of folder and server are given, or Chroma raises.
        """
        if (persist_dir is None) == (host is None) or (host is None) != (port is None):
            raise InvalidOption("give either persist_dir, or host and port")
        where: dict[str, Any]
        if host is None:
            assert persist_dir is not None
            collection = open_collection(persist_dir, collection_name, create=True)
            where = {"persist_dir": str(persist_dir)}
        elif not str(port).isdecimal():
            raise InvalidOption(f"port={port!r}; it must be a number")
        else:
            where = {"host": host, "port": int(str(port)), "ssl": ssl}
            collection = connect_collection(
                name=collection_name, create=True, headers=headers, **where
            )
        return cls(collection, **kwargs, **where)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised indices."""
        return "SamKVChromaVectorStore"

    @property
    def kv_link(self) -> ChromaLink:
        """The link between records and caches: `sync`, `release`. InvalidOption after a pickle."""
        if self._link is None:
            raise InvalidOption(
                "this vector store came out of a pickle, without its collection and engine; "
                "make it again with a collection and llm=... or engine=..."
            )
        return self._link

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> SamKVChromaVectorStore:
        """A copy that shares the collection and the engine."""
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = BaseModel.__getstate__(self)
        # Neither a database nor a model goes into a pickle.
        state["__pydantic_private__"] = {"_link": None}
        return state

    # -- writing ----------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **add_kwargs: Any) -> list[str]:
        """Cache the nodes' texts and write their records; returns the nodes' ids.

        For a node of `SamKVCacheTransform` it only checks that the file exists.

        add_kwargs: LlamaIndex passes them to every vector store; ignored.

        Raises:
            InvalidOption: a node has no embedding or one of another size than the collection's, an
                id occurs twice, or Chroma refuses a record, such as nested metadata.
            InvalidChunk: a text is longer than the context window; split it first.
            StoreError: the chunk store cannot be written.
        """
        ids = [node.node_id for node in nodes]
        self.kv_link.add(
            ids, [node.get_content(MetadataMode.NONE) for node in nodes],
            [_embedding(node) for node in nodes], [_metadata(node) for node in nodes],
            progress=self.show_progress,
            without_cache={node.node_id for node in nodes if not body_of(node)},
        )  # fmt: skip
        return ids

    async_add = twin(add)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document, and the caches that no record uses any more.

        delete_kwargs: LlamaIndex passes them to every vector store; ignored.
        """
        self.kv_link.delete(where={"document_id": ref_doc_id})

    adelete = twin(delete)

    # Upstream declares a list of filters and takes one object, as the base class declares.
    def delete_nodes(  # type: ignore[override]
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes, and the caches that no record uses any more.

        node_ids, filters: which nodes; with both, those of ``node_ids`` that match.
        delete_kwargs: LlamaIndex passes them to every vector store; ignored.

        Raises InvalidOption if neither is given; to delete all nodes there is `clear`.
        """
        self.kv_link.delete(ids=node_ids, where=_where(filters))

    adelete_nodes = twin(delete_nodes)

    def clear(self) -> None:
        """Delete all nodes of the collection, and the caches that no other collection uses."""
        self.kv_link.clear()

    aclear = twin(clear)

    # -- reading ----------------------------------------------------------------------------

    def get_nodes(  # type: ignore[override]
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """The nodes with these ids that match the filters; without either, all."""
        where = _where(filters)
        with chroma_errors(f"collection {self.kv_link.collection.name!r} refused to be read"):
            found = self._get(None, where=where or {}, ids=node_ids or None)
        return _without_keys(found.nodes or [])

    aget_nodes = twin(get_nodes)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to the query's embedding.

        kwargs: those of `ChromaVectorStore.query`.

        Raises InvalidOption if Chroma refuses the query, such as an embedding of another size.
        """
        with chroma_errors(f"collection {self.kv_link.collection.name!r} refused the query"):
            result = super().query(query, **kwargs)
        _without_keys(result.nodes or [])
        return result

    aquery = twin(query)


def _embedding(node: BaseNode) -> list[float]:
    if node.embedding is None:
        raise InvalidOption(f"node {node.node_id!r} has no embedding; embed nodes before adding")
    return node.embedding


def _metadata(node: BaseNode) -> dict[str, Any]:
    """The metadata of a node's record, as `ChromaVectorStore` writes them."""
    try:
        fields = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    except ValueError as error:
        raise InvalidOption(f"node {node.node_id!r} cannot be stored: {error}") from error
    # Chroma would omit fields that are None, and filters could not find them.
    return {name: "" if value is None else value for name, value in fields.items()}


def _where(filters: MetadataFilters | None) -> dict[str, Any] | None:
    if filters is None:
        return None
    if not isinstance(filters, MetadataFilters):
        raise InvalidOption(f"filters={filters!r:.60}; it must be MetadataFilters")
    try:
        where: dict[str, Any] = _to_chroma_filter(filters)
    except ValueError as error:
        raise InvalidOption(f"Chroma cannot use these filters: {error}") from error
    return where or None


def _without_keys(nodes: Sequence[BaseNode]) -> list[BaseNode]:
    """Remove the keys, which are internal, from nodes that a query has just made.

    They are in the metadata of records that LlamaIndex did not write.
    """
    for node in nodes:
        node.metadata.pop(KEY_FIELD, None)
    return list(nodes)
