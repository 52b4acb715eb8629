"""Texts of many lengths, for stores that several processes fill."""

from __future__ import annotations

import random

WORDS = ("the record", "was", "kept", "in Flevport", "by the river", "since", "a quiet", "town")


def texts_of_many_lengths(n_texts: int) -> list[str]:
    """Different ones: of some lengths there are several, which are computed in one pass."""
    draw = random.Random(0)
    return [
        f"Page {number}: " + " ".join(draw.choices(WORDS, k=8 + number % 7 * 4))
        for number in range(n_texts)
    ]
