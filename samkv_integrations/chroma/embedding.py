"""Embeddings that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from samkv_integrations.errors import MissingExtra


class HashingEmbedding:
    """Lexical embeddings, computed offline without a model: hashed words and pairs of words.

    Texts are near when they share words. Good enough for tests, demonstrations and questions that
    name what they ask about; paraphrases need a learned embedding.
    """

    def __init__(self) -> None:
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ImportError as error:
            raise MissingExtra.of("scikit-learn", "chroma") from error
        self._vectorizer = HashingVectorizer(n_features=1024, ngram_range=(1, 2))

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector of length 1 for each text; zeros for a text without words."""
        if not texts:
            return []
        vectors: list[list[float]] = self._vectorizer.transform(texts).toarray().tolist()
        return vectors
