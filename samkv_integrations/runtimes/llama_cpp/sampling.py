"""How the next token is chosen from logits in NumPy arrays, as transformers would choose it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.options import Sampling
from samkv_integrations.runtimes.base import TokenMask


class NumpySampler:
    """Chooses the tokens of one answer, one after the other, and remembers them.

    The rules are applied in this order: mask, repetition penalty, temperature, top_k, top_p, min_p.

    mask: rules tokens out before all other rules, because top_k might keep forbidden tokens only.
    """

    def __init__(
        self, prompt_ids: Sequence[int], sampling: Sampling, mask: TokenMask | None = None
    ) -> None:
        self._sampling, self._mask = sampling, mask
        self._penalty = sampling.repetition_penalty or 1.0
        self._prompt = np.array(prompt_ids, np.int64)
        self._answer = list[int]()
        drawn = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
        self._generator = np.random.default_rng(drawn)

    def next(self, logits: NDArray[np.float32]) -> int:
        """The token chosen from ``logits`` (vocabulary,), which stay unchanged."""
        token = self.next_if_sure(logits, 0.0)
        assert token is not None
        return token

    def next_if_sure(self, logits: NDArray[np.float32], tolerance: float) -> int | None:
        """See `Sampler.next_if_sure`."""
        scores = self._allowed(logits)
        if self._sampling.is_greedy:
            token = int(scores.argmax())
            if tolerance and not scores[token] - _second(scores, token) > tolerance:
                return None
        elif tolerance:
            return None
        else:
            ids, probabilities = likely(scores, self._sampling)
            ends = np.cumsum(probabilities)
            drawn = np.searchsorted(ends, self._generator.random() * ends[-1])
            token = int(ids[drawn])
        self._answer.append(token)
        return token

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits after the mask and the repetition penalty."""
        scores = logits
        if self._mask is not None:
            allowed = self._mask.allowed(len(scores), self._answer)
            scores = np.where(allowed, scores, np.float32(-np.inf))
        if self._penalty != 1:
            seen = np.concatenate((self._prompt, np.array(self._answer, np.int64)))
            of_seen = scores[seen]
            scores = scores.copy()
            scores[seen] = np.where(of_seen < 0, of_seen * self._penalty, of_seen / self._penalty)
        return scores


def likely(
    scores: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, and their probabilities.

    Numbers are rounded to float32 where transformers rounds them, so that the same tokens are kept.
    """
    ids = np.flatnonzero(scores > -np.inf)
    scores = scores[ids] / sampling.temperature
    if 0 < sampling.top_k < len(ids):
        least = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        ids, scores = ids[scores >= least], scores[scores >= least]
    if sampling.top_p < 1:
        rest = 1 - sampling.top_p
        probabilities = _softmax(scores)
        # together these have less than the rest: most of a vocabulary, which need not be sorted
        is_rare = probabilities < rest / len(ids) / 2
        of_rare = probabilities[is_rare].sum(dtype=np.float64)
        ids, scores, probabilities = ids[~is_rare], scores[~is_rare], probabilities[~is_rare]
        ascending = np.argsort(scores, kind="stable")
        together = of_rare + np.cumsum(probabilities[ascending], dtype=np.float64)
        n_left_out = int(np.count_nonzero(together[:-1].astype(np.float32) <= rest))
        kept = ascending[n_left_out:]
        ids, scores = ids[kept], scores[kept]
    if sampling.min_p > 0:
        probabilities = _softmax(scores)
        is_kept = probabilities >= sampling.min_p * probabilities.max()
        ids, scores = ids[is_kept], scores[is_kept]
    return ids, _softmax(scores.astype(np.float64))


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    weights: NDArray[Any] = np.exp(scores - scores.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def _second(scores: NDArray[np.float32], first: int) -> np.float32:
    """The largest score beside that at ``first``; two maxima take less time than a sort."""
    before = scores[:first].max(initial=-np.inf)
    return max(before, scores[first + 1 :].max(initial=-np.inf))
