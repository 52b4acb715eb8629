"""Prompt lookup: drafts of the next tokens, copied from where the last ones occurred before.

A RAG answer often repeats its documents (A. Saxena, Prompt Lookup Decoding, 2023). One pass of the
model checks a draft, and only tokens that agree are taken, so that the answer stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

_NGRAMS = (4, 3, 2)
_PRIOR = {4: 0.7, 3: 0.5, 2: 0.3}
"""Length of an n-gram -> the assumed probability that the token after it is the same again."""

_MEMORY = 0.125  # weight of the latest token in the estimate of that probability


class PromptLookup:
    """Drafts the next tokens of one answer.

    The longest of the last n-grams that occurred before, in the prompt or the answer, is looked up,
    and what followed its latest occurrence is the draft. Its length is the one for which a pass
    is expected to give most tokens a second, by how often drafts have been right so far.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence ends
        self._right = dict(_PRIOR)
        for token in prompt_ids:
            self._add(token)
        self._found = self._find()

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        if self._found is not None:
            size, at = self._found
            self._right[size] += _MEMORY * ((self._ids[at] == token) - self._right[size])
        self._add(token)
        self._found = self._find()

    @property
    def has_any(self) -> bool:
        """Whether there is anything to draft."""
        return self._found is not None

    def draft(self, costs: Sequence[float], most: int) -> list[int]:
        """At most ``most`` tokens; none where checking them would take longer than they save.

        costs: of a pass over 1, 2, ... tokens, see `RowCosts`.
        """
        if self._found is None:
            return []
        size, at = self._found
        right, expected, best, best_gain = self._right[size], 1.0, 0, 1.0
        for n_drafted in range(1, min(most, len(costs) - 1) + 1):
            expected += right**n_drafted
            if (gain := expected / costs[n_drafted]) > best_gain:
                best, best_gain = n_drafted, gain
        return self._ids[at : at + best]

    def _find(self) -> tuple[int, int] | None:
        """The length of the longest n-gram that occurred before, and the index after it."""
        for size in _NGRAMS:
            if (at := self._after.get(tuple(self._ids[-size:]))) is not None:
                return size, at
        return None

    def _add(self, token: int) -> None:
        ids, at = self._ids, len(self._ids)
        for size in _NGRAMS:
            if at >= size:
                self._after[tuple(ids[at - size : at])] = at
        ids.append(token)
