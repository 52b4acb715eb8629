"""Embeddings that need no model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from samkv_integrations.errors import MissingExtra

N_FEATURES = 1024

_WORDS = re.compile(r"\b\w\w+\b")


class HashingEmbedding:
    """Lexical embeddings, computed offline without a model: hashed words and pairs of words.

    Texts are near when they share words. Good enough for tests, demonstrations and questions that
    name what they ask about; paraphrases need a learned embedding. The vectors are those of
    scikit-learn's HashingVectorizer, whose import takes a second.
    """

    def __init__(self) -> None:
        try:
            from mmh3 import hash as murmur
        except ImportError as error:
            raise MissingExtra.of("mmh3", "chroma") from error
        self._hash = murmur

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        words = _WORDS.findall(text.lower())
        vector = [0.0] * N_FEATURES
        for feature, count in Counter([*words, *map(" ".join, pairwise(words))]).items():
            hashed = self._hash(feature, 0, True)  # of either sign, so that collisions cancel out
            vector[abs(hashed) % N_FEATURES] += count if hashed >= 0 else -count
        length = math.sqrt(sum(number * number for number in vector))
        return [number / length for number in vector] if length else vector
