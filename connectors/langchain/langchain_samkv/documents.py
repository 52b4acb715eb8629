"""Documents: cache them before they are indexed, announce them after retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from pydantic import Field

from samkv_integrations.errors import InvalidOption
from samkv_integrations.frameworks.components import twin
from samkv_integrations.frameworks.engine_args import WithEngine
from samkv_integrations.option import OnMiss
from samkv_integrations.prompt.handles import is_handle
from samkv_integrations.store.chunk import normalise

Mode = Literal["text", "metadata", "replace"]

HANDLE_FIELD = "samkv"
"""Metadata field with the handle that a prompt may hold in place of the text."""
TEXT_FIELD = "samkv_text"
"""Metadata field with the text of a document whose `page_content` is a handle."""


class SamKVDocumentTransformer(WithEngine, BaseDocumentTransformer):
    """Caches the text of every document, for any vector store but `SamKVChroma`.

    Place it after the text splitter. Documents stay as they are, and those without text have no
    cache. A second call computes nothing.

    Args:
        llm, engine: the component that caches, one of the two.
        show_progress: whether to show a progress bar, on standard error.

    Instantiate:
        ```python
        from langchain_samkv import ChatSamKV, SamKVDocumentTransformer

        model = ChatSamKV(model="builtin")
        transformer = SamKVDocumentTransformer(llm=model)
        ```

    Use:
        ```python
        from langchain_core.documents import Document

        documents = [Document("[Tobias Trulman] Tobias Trulman was born in Flevport.")]
        documents = transformer.transform_documents(documents)  # then into any vector store
        ```

    Async:
        ```python
        documents = await transformer.atransform_documents(documents)
        ```
    """

    show_progress: bool = Field(default=False, description="Whether to show a progress bar.")

    # The base class takes any keyword there is.
    def transform_documents(self, documents: Sequence[Document]) -> Sequence[Document]:  # type: ignore[override]
        """Cache the documents' texts; returns the documents.

        Raises:
            InvalidOption: the content of a document is not a string.
            InvalidChunk: a text is longer than the context window; split it first.
            StoreError: the store cannot be written.
        """
        texts = [_content(document) for document in documents]
        self._engine.engine.cache_chunks(
            [text for text in texts if normalise(text)], progress=self.show_progress
        )
        return list(documents)

    atransform_documents = twin(transform_documents)


class SamKVDocumentCompressor(WithEngine, BaseDocumentCompressor):
    """Announces retrieved documents to the engine, and decides how prompts hold them.

    Place it last after retrieval, as ``base_compressor`` of a `ContextualCompressionRetriever`, at
    the end of a `DocumentCompressorPipeline`, or in a chain: ``retriever |
    compressor.compress_documents | format_docs``. The engine reads the caches while the prompt is
    built, and counts a document without a cache as a miss in the report.

    No document is dropped or changed in place. The modes:

    - ``text``: documents stay as they are. `ChatSamKV` and `SamKV` find their texts in prompts.
      Suits nearly all chains.
    - ``metadata``: copies with the handle in ``metadata["samkv"]``, and the text unchanged. A chain
      takes the handles by `format_docs` with ``handles=True``, or by a document prompt
      ``PromptTemplate.from_template("{samkv}")``. For documents of less than 24 characters, which
      are not found by their text, and for templates that change texts.
    - ``replace``: copies whose ``page_content`` is the handle; the text is in
      ``metadata["samkv_text"]``. For chains that always use ``page_content``. Sources then show
      handles.

    A document without a cache keeps its text in all modes. Each retrieval makes a new handle. It is
    valid for an hour, in the engine that made it. Other models see it as noise, and traces and
    memories store it: use handles where you control the chain, and do not show them to users.

    Args:
        llm, engine: whose caches to use, one of the two.
        mode: ``text``, ``metadata`` or ``replace``.
        on_miss: for a document without a cache: ``text`` (leave it as text), ``compute`` (cache it
            now) or ``error`` (raise ChunkNotCached).

    Instantiate:
        ```python
        from langchain_samkv import ChatSamKV, SamKVDocumentCompressor, format_docs

        model = ChatSamKV(model="builtin")
        compressor = SamKVDocumentCompressor(llm=model, on_miss="compute")
        ```

    Use:
        ```python
        from langchain_core.documents import Document

        found = [Document("[Tobias Trulman] Tobias Trulman was born in Flevport.")]
        context = format_docs(compressor.compress_documents(found))
        ```

    Async:
        ```python
        found = await compressor.acompress_documents(found, "Where was Tobias Trulman born?")
        ```
    """

    mode: Mode = Field(default="text", description="How prompts hold the documents.")
    on_miss: OnMiss = Field(default="text", description="What to do for a text without a cache.")

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Announce the documents; returns as many, in the same order.

        query, callbacks: LangChain passes them to every compressor; ignored.

        Raises:
            ChunkNotCached: a text has no cache and ``on_miss`` is ``error``.
            InvalidChunk: a text is longer than the context window, and ``on_miss`` is not ``text``.
            InvalidOption: the content of a document is not a string.
        """
        engine = self._engine.engine
        texts = [self._text(document) for document in documents]
        places = [place for place, text in enumerate(texts) if normalise(text)]
        engine.announce(
            [texts[place] for place in places],
            self.on_miss,
            names=[f"document {documents[place].id!r}" for place in places],
            remedy="index it again with SamKVChroma or SamKVDocumentTransformer",
        )
        if self.mode == "text":
            return list(documents)
        return [self._shown(*pair) for pair in zip(documents, texts, strict=True)]

    acompress_documents = twin(compress_documents)

    def _text(self, document: Document) -> str:
        """The text of a document, also if its handle has replaced it."""
        text, content = document.metadata.get(TEXT_FIELD), _content(document)
        return text if isinstance(text, str) and is_handle(content) else content

    def _shown(self, document: Document, text: str) -> Document:
        shown = (normalise(text) and self._engine.engine.issue_handle(text)) or text
        if self.mode == "metadata":
            return _with(document, **{HANDLE_FIELD: shown})
        if shown == document.page_content:
            return document
        copy = _with(document, **{TEXT_FIELD: text})
        copy.page_content = shown
        return copy


def format_docs(documents: Sequence[Document], *, handles: bool = False) -> str:
    """The documents as one text, for a prompt: ``retriever | format_docs``.

    handles: whether to use ``metadata["samkv"]``, if present, in place of the text, as
        `SamKVDocumentCompressor` with ``mode="metadata"`` writes it; in a chain,
        ``partial(format_docs, handles=True)``.

    Raises InvalidOption if the content of a document is not a string.
    """
    shown = []
    for document in documents:
        text = _content(document)
        shown.append(str(document.metadata.get(HANDLE_FIELD, text)) if handles else text)
    return "\n\n".join(shown)


def _content(document: Document) -> str:
    """The text of a document, which LangChain checks when it is made, but not later."""
    text: object = document.page_content
    if not isinstance(text, str):
        raise InvalidOption(
            f"page_content of document {document.id!r} (metadata {document.metadata}) is "
            f"{text!r:.40}; it must be a string"
        )
    return text


def _with(document: Document, **fields: str) -> Document:
    """A copy with these metadata fields; vector stores return the documents that they keep."""
    return document.model_copy(update={"metadata": {**document.metadata, **fields}})
