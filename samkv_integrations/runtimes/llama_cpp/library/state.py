"""The state of a sequence as llama.cpp writes it: taken apart to rows, and put together again.

The layout of a state has no version and changes between builds. So chunk caches keep rows of K and
V, and a state is made for the build that is loaded, in the layout of a state that this build wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.runtimes.llama_cpp.library.binding import F16

Rows = NDArray[np.uint8]


class CannotSplit(Exception):
    """The state of a sequence is not laid out as rows of K and V, which this module reads."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """How this build lays out the state of a sequence, found in a state that it has written.

    head: the bytes before the number of cells. middle: those between the cells and the rows.
    n_layers: layers with entries. k_row, v_row: bytes of a token's keys and values at a layer.
    """

    head: bytes
    middle: bytes
    n_layers: int
    k_row: int
    v_row: int

    @classmethod
    def of(cls, state: Rows, n_cells: int) -> StateLayout:
        """From the state of a sequence with ``n_cells`` tokens.

        A state has a magic number, the sequence, the number of streams (1) and of cells; for each
        cell position, number of sequences (1) and sequence; whether values are transposed (0), and
        the number of layers; in newer builds the sizes of two rotations; then for each layer the
        type of the keys (F16), the bytes of a row, and the rows; then the same for the values.

        Raises CannotSplit if ``state`` is anything else.
        """
        words = state[: len(state) // 4 * 4].view("<u4")
        n_cell_words = 3
        if len(words) < 8 + n_cell_words * n_cells or words[2] != 1 or words[3] != n_cells:
            raise CannotSplit("the beginning of a state is another one")
        at = 16 + 4 * n_cell_words * n_cells
        for n_more in (0, 2):
            middle = bytes(state[at : at + 8 + 4 * n_more])
            is_transposed, n_layers = np.frombuffer(middle[:8], "<u4").tolist()
            rest, rows = state[at + len(middle) :], []
            if is_transposed or not 0 < n_layers <= 10_000:
                raise CannotSplit("values are stored transposed, or there are no layers")
            for _ in range(2 * n_layers):
                kind, size = _kind_and_size(rest)
                if kind != F16 or size % 2 or len(rest) < 12 + n_cells * size:
                    break
                rows.append(size)
                rest = rest[12 + n_cells * size :]
            k_rows, v_rows = set(rows[:n_layers]), set(rows[n_layers:])
            if len(rows) == 2 * n_layers and not len(rest) and len(k_rows) == len(v_rows) == 1:
                return cls(
                    head=bytes(state[:12]), middle=middle, n_layers=n_layers, k_row=k_rows.pop(),
                    v_row=v_rows.pop(),
                )  # fmt: skip
        raise CannotSplit("its rows are not F16, or differ between the layers")

    def split(self, state: Rows, n_cells: int) -> tuple[Rows, Rows]:
        """Keys and values, (L, n_cells, k_row) and (L, n_cells, v_row), of a state's cells."""
        at = 16 + 12 * n_cells + len(self.middle)
        sides = []
        for row in (self.k_row, self.v_row):
            n_bytes = self.n_layers * (12 + n_cells * row)
            of_layers = state[at : at + n_bytes].reshape(self.n_layers, -1)[:, 12:]
            sides.append(of_layers.reshape(self.n_layers, n_cells, row))
            at += n_bytes
        if at != len(state):
            raise CannotSplit("a state has another length than its cells")
        return sides[0], sides[1]

    def n_bytes(self, n_cells: int) -> int:
        """Bytes of a state of so many cells."""
        of_layers = self.n_layers * (24 + n_cells * (self.k_row + self.v_row))
        return 16 + 12 * n_cells + len(self.middle) + of_layers

    def joined(self, positions: NDArray[np.int64]) -> tuple[Rows, Rows, Rows]:
        """A state of cells at ``positions``, and views of its keys and values to be filled."""
        n_cells = len(positions)
        state: Rows = np.zeros(self.n_bytes(n_cells), np.uint8)
        state[:12] = np.frombuffer(self.head, np.uint8)
        state[12:16] = np.array([n_cells], "<u4").view(np.uint8)
        cells = np.zeros((n_cells, 3), "<i4")
        cells[:, 0], cells[:, 1] = positions, 1
        at = 16 + cells.nbytes
        state[16:at] = cells.reshape(-1).view(np.uint8)
        state[at : at + len(self.middle)] = np.frombuffer(self.middle, np.uint8)
        at += len(self.middle)
        sides = []
        for row in (self.k_row, self.v_row):
            n_bytes = self.n_layers * (12 + n_cells * row)
            of_layers = state[at : at + n_bytes].reshape(self.n_layers, -1)
            of_layers[:, :4] = np.array([F16], "<i4").view(np.uint8)
            of_layers[:, 4:12] = np.array([row], "<u8").view(np.uint8)
            sides.append(of_layers[:, 12:].reshape(self.n_layers, n_cells, row))
            at += n_bytes
        return state, sides[0], sides[1]


def _kind_and_size(rest: Rows) -> tuple[int, int]:
    if len(rest) < 12:
        return -1, 0
    return int(rest[:4].view("<i4")[0]), int(np.frombuffer(bytes(rest[4:12]), "<u8")[0])
