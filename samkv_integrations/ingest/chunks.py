"""Reads documents into chunks, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samkv_integrations.chroma.records import PAGE_SIZE
from samkv_integrations.errors import InvalidOption, MissingExtra
from samkv_integrations.ingest.documents import UTF_8
from samkv_integrations.ingest.finding import Skipped
from samkv_integrations.ingest.reader import DocumentReader, ReadLimits
from samkv_integrations.ingest.splitting import split
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.store.chunk import normalise


@dataclass(frozen=True, kw_only=True)
class ChunkPage:
    """Chunks of documents, as ids, texts and metadata of records.

    An id is ``PATH#NUMBER``, the same in every ingest. n_files, n_bytes: documents, and bytes of
    documents, whose chunks stand in this page and those before it.
    """

    ids: list[str]
    texts: list[str]
    rows: list[dict[str, Any]]
    n_files: int
    n_bytes: int


class ChunkReader:
    """Reads documents, splits them, and tells what was read.

    Args:
        files: real paths.
        model: counts the tokens of chunks.
        chunk_size: most tokens of a chunk. overlap: see `split`.
        encoding: see `read_document`.

    n_chunks: document -> its number of chunks, of those that were read so far. skipped: documents
    that cannot be read, or hold no text. encodings: number of files in each encoding other than
    UTF-8. n_bytes: of all documents.
    """

    def __init__(
        self, files: Sequence[Path], model: Runtime, chunk_size: int, *, overlap: int = 0,
        limits: ReadLimits | None = None, encoding: str | None = None,
    ) -> None:  # fmt: skip
        self.files, self._model = files, model
        self._chunk_size, self._overlap = chunk_size, overlap
        self._limits, self._encoding = limits or ReadLimits(), encoding
        self.n_chunks = dict[str, int]()
        self.skipped = list[Skipped]()
        self.encodings = Counter[str]()
        self._sizes = [_size(file) for file in files]
        self.n_bytes = sum(self._sizes)

    def pages(self) -> Generator[ChunkPage]:
        """The chunks in pages of `PAGE_SIZE`, each as soon as its documents are read.

        A document that cannot be read is skipped, so that the others are ingested.

        Raises InvalidOption if no document can be read, MissingExtra if the splitter is needed and
        not installed.
        """
        held: list[_Chunk] = []
        n_bytes = 0
        with DocumentReader.opened(self._limits, self._encoding) as reader:
            for n_before, (file, size) in enumerate(zip(self.files, self._sizes, strict=True)):
                held += (own := self._chunks_of(file, reader))
                while len(held) >= PAGE_SIZE:  # what is left then is of this document
                    page, held = held[:PAGE_SIZE], held[PAGE_SIZE:]
                    n_own = len(own) - len(held)
                    yield _page(page, n_before + (not held), n_bytes + size * n_own // len(own))
                n_bytes += size
        if held:
            yield _page(held, len(self.files), n_bytes)
        if not self.n_chunks:
            first, n_files = self.skipped[0], len(self.files)
            raise InvalidOption(
                f"none of {n_files} document{'s' * (n_files > 1)} can be read; {first.path}: "
                f"{first.why}"
            )

    def all(self) -> ChunkPage:
        """All chunks as one page. Raises as `pages` does."""
        pages = list(self.pages())
        return ChunkPage(
            ids=[id_ for page in pages for id_ in page.ids],
            texts=[text for page in pages for text in page.texts],
            rows=[row for page in pages for row in page.rows],
            n_files=len(self.files),
            n_bytes=self.n_bytes,
        )

    def _chunks_of(self, file: Path, reader: DocumentReader) -> list[_Chunk]:
        """The chunks of a document; none if it is skipped, or without text."""
        try:
            document = reader.read(file)
        except (InvalidOption, MissingExtra) as error:
            said = str(error)
            why = f"it {said.removeprefix(f'{file} ')}" if said.startswith(str(file)) else said
            self.skipped.append(Skipped(path=file, why=why, is_failure=True))
            return []
        source = str(file)
        parts = [
            (number, part)
            for number, page in enumerate(document.pages, start=1)
            for part in split(
                normalise(page), file.suffix, self._model, self._chunk_size, self._overlap
            )
        ]
        if document.encoding != UTF_8:
            self.encodings[document.encoding] += 1
        if not parts:
            self.skipped.append(Skipped(path=file, why="it holds no text"))
        self.n_chunks[source] = len(parts)
        title = {"title": document.title} if document.title else {}
        return [
            (
                f"{source}#{number}", part,
                {"source": source, **({"page": page} if len(document.pages) > 1 else {}), **title},
            )
            for number, (page, part) in enumerate(parts)
        ]  # fmt: skip


_Chunk = tuple[str, str, dict[str, Any]]
"""Id, text and metadata of a record."""


def _page(chunks: Sequence[_Chunk], n_files: int, n_bytes: int) -> ChunkPage:
    ids, texts, rows = map(list, zip(*chunks, strict=True))
    return ChunkPage(ids=ids, texts=texts, rows=rows, n_files=n_files, n_bytes=n_bytes)


def _size(file: Path) -> int:
    with suppress(OSError):  # it is told when it is read
        return file.stat().st_size
    return 0
