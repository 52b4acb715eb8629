"""The bar of an ingest."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

from samkv_integrations.ingest.chunks import ChunkPage
from samkv_integrations.store.chunk import ChunkRef


class IngestBar:
    """One bar for all documents, on a terminal: documents done, tokens a second, time left.

    It counts the tokens that are computed. Those of documents that are not read yet are estimated
    by their bytes, and within a page the documents that are done by its tokens.

    n_files, n_bytes: of all documents.
    """

    def __init__(self, n_files: int, n_bytes: int, *, is_shown: bool) -> None:
        self._n_files, self._n_bytes = n_files, n_bytes
        self._n_tokens = self._n_missed = 0
        self._n_written = self._n_missed_before = 0
        self._n_done = self._n_of_page = 0  # documents
        self._bar = tqdm(
            total=0, desc=f"0/{n_files} files", unit=" tokens", unit_scale=True,
            disable=None if is_shown else True,  # None: unless it is a terminal
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self._bar.close()

    def begin(self, page: ChunkPage, chunks: Sequence[ChunkRef]) -> None:
        """Count the tokens of a page, of which the missed chunks are computed now."""
        missed = {ref.key: len(ref.token_ids) for ref in chunks if ref.state == "missed"}
        self._n_of_page = page.n_files - self._n_done
        self._n_written, self._n_missed_before = 0, self._n_missed
        self._n_tokens += sum(len(ref.token_ids) for ref in chunks)
        self._n_missed += sum(missed.values())
        n_left = (self._n_bytes - page.n_bytes) * self._n_tokens // max(1, page.n_bytes)
        self._bar.total = self._n_missed + n_left

    def update(self, n_tokens: int) -> None:
        """Count tokens of the page whose caches are stored."""
        self._n_written += n_tokens
        of_page = max(1, self._n_missed - self._n_missed_before)
        self._describe(self._n_done + self._n_of_page * self._n_written // of_page)
        self._bar.update(n_tokens)

    def end(self, page: ChunkPage) -> None:
        """Count the documents that are done with a page."""
        self._n_done = page.n_files
        self._describe(self._n_done, refresh=True)

    def _describe(self, n_done: int, *, refresh: bool = False) -> None:
        self._bar.set_description(f"{n_done}/{self._n_files} files", refresh=refresh)
