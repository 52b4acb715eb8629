"""Intervals of a share, exact enough for few questions and for shares near 1."""

from __future__ import annotations

import math

Z95 = 1.959964


def wilson(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share that was seen among ``n``; (0, 1) of none.

    Where all of 20 questions agree, a bootstrap resamples nothing but agreement and says [1, 1];
    this says [.84, 1].
    """
    if not n:
        return 0.0, 1.0
    squared = z * z / n
    middle = (share + squared / 2) / (1 + squared)
    half = z / (1 + squared) * math.sqrt(share * (1 - share) / n + squared / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)
