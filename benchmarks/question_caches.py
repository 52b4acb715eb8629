"""The caches of one question's chunks, apart from all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from benchmarks.datasets import Question
from benchmarks.variants import Variant
from samkv_integrations.cache.attention_stats import MIN_CHUNKS
from samkv_integrations.cache.chunk import BlockScheme
from samkv_integrations.cache.memory import MemoryStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS
from samkv_integrations.engine.engine import Engine
from samkv_integrations.model.model import Model


class QuestionCaches:
    """Chunk caches of one question at a time, so that no answer depends on earlier questions.

    A resumed run would differ otherwise: in bfloat16 a chunk's cache depends a little on the chunks
    that it was prefilled with, and the stable layers depend on all chunks of the store. So the
    store holds a question's own chunks and, if a method needs stable layers, the first
    `MIN_CHUNKS` chunks of all questions; nothing else.
    """

    def __init__(
        self,
        model: Model,
        questions: Sequence[Question],
        variants: Mapping[str, Variant],
        block_size: int | None = None,
        store_bits: int = DEFAULT_STORE_BITS,
        prefix: str = "documents",
    ) -> None:
        self._model, self._store_bits, self._prefix = model, store_bits, prefix
        self._store = MemoryStore()
        chunks = list(dict.fromkeys(chunk for q in questions for chunk in q.documents))
        lengths = sorted(len(model.tokenize(c, special=False)) for c in chunks[:MIN_CHUNKS])
        self._block_size = block_size or BlockScheme.auto(lengths[len(lengths) // 2]).size
        self._calibration = (
            chunks[:MIN_CHUNKS]
            if any("statistics" in v.method.needs for v in variants.values())
            else []
        )

    @contextmanager
    def engine(self, question: Question) -> Iterator[Engine]:
        """An engine that holds the chunks of ``question``."""
        engine = Engine(
            self._model, self._store, block_size=self._block_size, store_bits=self._store_bits,
            prefix=self._prefix, prefix_bytes=0,
        )  # fmt: skip
        shared = engine.cache_chunks(self._calibration)
        own = engine.cache_chunks(question.documents)
        yield engine
        self._store.delete(*(set(own) - set(shared)))
