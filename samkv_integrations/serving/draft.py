"""Prompt lookup: drafts of the next tokens, copied from where the last ones occurred before.

A RAG answer often repeats its documents (A. Saxena, Prompt Lookup Decoding, 2023). One pass of the
model checks a draft, and what agrees is kept, so that the answer stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from samkv_integrations.runtimes.transformers.model.model import Model

MOST_ROWS = 8
"""Most tokens of one pass of decoding, where some are drafted."""

_NGRAMS = (4, 3, 2)
_PRIOR = {4: 0.7, 3: 0.5, 2: 0.3}
"""Length of an n-gram -> the assumed probability that the token after it is the same again."""

_MEMORY = 0.125  # weight of the latest token in the estimate of that probability


_TIMED = (1, 2, 4, MOST_ROWS)  # the costs between are interpolated
_COMPARED = 2**15  # logits: a rounding that differs shows in one of thousands


@dataclass(frozen=True)
class RowCosts:
    """What a pass over several tokens costs, and whether it computes what one over each does.

    relative: time of a pass over 1, 2, ... tokens, over that of one. One number where nothing may
        be drafted.
    tolerance: two logits that differ by no more may change places if tokens are computed together;
        0 where each token gets the same bits.
    """

    relative: tuple[float, ...]
    tolerance: float

    @classmethod
    def of(cls, model: Model) -> RowCosts:
        """Those of a model, measured once with its first layer and output matrix, in some .2 s.

        16-bit products on CPUs and packed weights give a token the same bits whatever else is in
        the pass. Float32 products differ in the last bits. Where 16-bit ones differ, nothing is
        drafted: equal logits are frequent there, and would change places.
        """
        if (known := _measured.get(model)) is not None:
            return known
        rotation = model.rotation(torch.arange(MOST_ROWS))
        n_known = model.config.vocab_size

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            return query.contiguous()

        def run(tokens: Tensor, first: int, end: int) -> tuple[Tensor, float]:
            """Logits of some of the tokens, and seconds of a pass through all layers."""
            rows = slice(first, end)
            cos, sin = (side[rows] for side in rotation.of(0))
            embedded = model.embed(tokens[None, rows])
            with model.decoding(end - first):
                began = time.perf_counter()
                hidden = model.layer(0, embedded, cos, sin, attend)
                after = time.perf_counter()
                logits = model.logits(hidden[0])
                ended = time.perf_counter()
            return logits, model.n_layers * (after - began) + ended - after

        is_same, n_rows = True, MOST_ROWS // 2
        for trial in range(1 + _COMPARED // (n_rows * n_known)):
            tokens = (torch.arange(MOST_ROWS) + trial * MOST_ROWS) % n_known
            alone = torch.cat([run(tokens, row, row + 1)[0] for row in range(n_rows)])
            if not torch.equal(alone, run(tokens, 0, n_rows)[0]):
                is_same = False
                break
        seconds = [min(run(tokens, 0, n)[1] for _ in range(3)) for n in _TIMED]
        costs: list[float] = np.interp(range(1, MOST_ROWS + 1), _TIMED, seconds).tolist()
        found = cls(tuple(cost / max(costs[0], 1e-9) for cost in costs), 0.0 if is_same else 0.01)
        if not is_same and model.dtype != torch.float32:
            found = cls((1.0,), 0.0)
        _measured[model] = found
        return found


_measured = WeakKeyDictionary[Model, RowCosts]()


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
        """The length of the longest n-gram that occurred before, and the place after it."""
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
