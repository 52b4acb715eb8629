"""A few cases in place of a product of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*parameters: Sequence[Any], times: int = 1) -> list[tuple[Any, ...]]:
    """Cases in which every value of the longest parameter stands ``times`` times.

    Beside it stand values of the others that have stood together with the fewest so far, so that
    all of them appear, and as many pairs as so few cases can have.
    """
    places = [range(len(values)) for values in parameters]
    longest = max(range(len(places)), key=lambda place: len(places[place]))
    values: Counter[tuple[int, int]] = Counter()
    pairs: Counter[tuple[tuple[int, int], ...]] = Counter()

    def how_new(case: tuple[int, ...]) -> tuple[int, int, int]:
        chosen = list(enumerate(case))
        return (
            sum(values[one] == 0 for one in chosen),
            sum(pairs[two] == 0 for two in combinations(chosen, 2)),
            -sum(values[one] for one in chosen),
        )

    cases = []
    for value in [*places[longest]] * times:
        others = [[value] if n == longest else places[n] for n in range(len(places))]
        best = max(product(*others), key=how_new)
        values.update(enumerate(best))
        pairs.update(combinations(enumerate(best), 2))
        cases.append(tuple(of[at] for of, at in zip(parameters, best, strict=True)))
    return cases
