"""How a model rotates keys by their positions, measured on the model itself.

A token that is alone in its sequence attends to itself only, so that its hidden states do not
depend on its position, at any layer. Its key at position p is the key at position 0, rotated by p.
The angles follow from the keys of one token at the positions 0, 1, 2, 4 and so on. That holds
whatever scales the frequencies (linear, Llama 3, YaRN), and needs no weight of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.runtimes.llama_cpp.library.binding import NORM

MOST_ERROR = 4e-3
"""Largest difference of a rotated key from the model's own, of the largest number in it.

Rounding to F16 twice makes 1e-3.
"""


class CannotRotate(Exception):
    """The keys of the model do not depend on positions as rotations do."""


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Rotates keys.

    kind: `NORM` or `NEOX`, which numbers of a head form a pair. n_rotated: numbers of a head that
    rotate. frequencies: (n_rotated / 2,) radians of each pair per position.
    """

    kind: int
    n_rotated: int
    frequencies: NDArray[np.float64]

    def pairs(self, keys: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Views of the two numbers of each pair: keys (..., D) -> twice (..., n_rotated / 2)."""
        rotated = keys[..., : self.n_rotated]
        if self.kind == NORM:
            return rotated[..., ::2], rotated[..., 1::2]
        half = self.n_rotated // 2
        return rotated[..., :half], rotated[..., half:]

    def rotate(self, keys: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Rotate keys (L, T, G, D) in place, forward by ``positions`` (T,), which may be < 0."""
        angles = positions[:, None] * self.frequencies
        cos, sin = (
            side.astype(np.float32)[:, None] for side in (np.cos(angles), np.sin(angles))
        )  # (T, 1, pairs)
        first, second = self.pairs(keys)
        turned = first * cos - second * sin
        second *= cos
        second += first * sin
        first[...] = turned

    @classmethod
    def measured(
        cls, kind: int, n_rotated: int, keys: NDArray[np.float32], positions: NDArray[np.int64]
    ) -> Rotation:
        """From keys of one token.

        keys: (L, P, G, D) at P positions. positions: (P,) 0, 1, 2, 4, and so on.

        Raises CannotRotate if the keys are not explained by rotations that all layers share.
        """
        rotation = cls(
            kind=kind, n_rotated=n_rotated, frequencies=np.zeros(n_rotated // 2, np.float64)
        )
        first, second = rotation.pairs(keys)
        turns = first.astype(np.complex128) + 1j * second  # (L, P, G, pairs)
        between = (turns[:, :1].conj() * turns).sum((0, 2))  # (P, pairs)
        frequencies = np.zeros(n_rotated // 2)
        for position, found in zip(positions[1:].tolist(), between[1:], strict=True):
            expected = np.exp(1j * frequencies * position)
            frequencies += np.angle(found * expected.conj()) / position
        rotation = cls(kind=kind, n_rotated=n_rotated, frequencies=frequencies)
        turned = np.repeat(keys[:, :1], len(positions), axis=1)
        rotation.rotate(turned, positions)
        error = float(np.abs(turned - keys).max() / max(np.abs(keys).max(), 1e-9))
        if not error <= MOST_ERROR:
            raise CannotRotate(
                f"keys differ from rotated ones by {error:.3f} of the largest number"
            )
        return rotation
