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
    by their bytes.

    n_files, n_bytes: of all documents.
    """

    def __init__(self, n_files: int, n_bytes: int, *, is_shown: bool) -> None:
        self._n_files, self._n_bytes = n_files, n_bytes
        self._n_tokens = self._n_missed = 0
        self._bar = tqdm(
            total=0, desc=f"0/{n_files} files", unit=" tokens", unit_scale=True,
            disable=None if is_shown else True,  # None: unless it is a terminal
        )  # fmt: skip
        self.update = self._bar.update

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
        self._n_tokens += sum(len(ref.token_ids) for ref in chunks)
        self._n_missed += sum(missed.values())
        n_left = (self._n_bytes - page.n_bytes) * self._n_tokens // max(1, page.n_bytes)
        self._bar.total = self._n_missed + n_left

    def end(self, page: ChunkPage) -> None:
        """Count the documents that are done with a page."""
        self._bar.set_description(f"{page.n_files}/{self._n_files} files")
