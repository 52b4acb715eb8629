"""One answer that llama.cpp decodes."""

from __future__ import annotations

from samkv_integrations.runtimes.llama_cpp.cells import Cells, Entries, Reservation


class LlamaSequence:
    """A `TokenSequence` in the cells of a context.

    Args:
        cells: of the context.
        entries: of its tokens; the sequence is their user.
        room: cells that are reserved for the tokens that it may add.
        keeps: whether the entries may stay for later prompts.
        source: the kept sequence that has the entries which were recomputed for this answer only.
        again: ranges of their positions.
    """

    def __init__(
        self, cells: Cells, entries: Entries, *, room: Reservation, keeps: bool,
        source: Entries | None, again: list[range],
    ) -> None:  # fmt: skip
        self._cells, self._keeps, self._room = cells, keeps, room
        self.own = entries
        self.prompt_bytes = entries.n_bytes
        self._source, self._again = source, again
        if source is not None:
            source.n_users += 1
        self._is_closed = False

    @property
    def n_tokens(self) -> int:
        return self.own.n_tokens

    @property
    def kv_bytes(self) -> int:
        return self.own.n_bytes

    @property
    def entries(self) -> Entries | None:
        return self.own if self._keeps else None

    @property
    def can_rewind(self) -> bool:
        return self.own.can_crop

    def grow(self, n_tokens: int) -> None:
        """Count the cells of the next tokens."""
        self._room.take(self.own, n_tokens)

    def rewind(self, n_tokens: int) -> None:
        with self._cells.lock:
            self._cells.cut(self.own, self.own.n_tokens - n_tokens)
            self._room.add(n_tokens)

    def put_back(self) -> None:
        with self._cells.lock:
            if self._source is not None:
                for span in self._again:
                    self._cells.replace(self._source, self.own, span.start, span.stop)
                self._let_go_of_source()

    def _let_go_of_source(self) -> None:
        if self._source is not None:
            self._source.n_users -= 1
            self._source = None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with self._cells.lock:
            self._room.close()
            self._let_go_of_source()
            self.own.n_users -= 1
            if not self._keeps:
                self._cells.drop(self.own)
