"""The doctor: is a model computed exactly, and what suits it?

It runs on any supported model, in seconds on a small one. The checks of exactness come first, and
one that fails is a defect. What follows them is advice, which never fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine.advice import answers_advice, bits_advice, speed_advice
from samkv_integrations.engine.check import Check
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.exactness import CHUNKS, EXACTNESS_CHECKS
from samkv_integrations.model.model import Model


def examine(model: Model, store: ChunkStore | None = None) -> Iterator[Check]:
    """All checks of ``model``, each as soon as it is done.

    store: where the measured cost of passes is kept; nothing else is written to disk.

    Raises StoreError if the store cannot be written.
    """
    # What is exact must not be rounded by the store.
    engine = Engine(model, method="recompute", prefix="bos", store_bits=16)
    engine.cache_chunks(CHUNKS)
    with torch.inference_mode():
        for check in EXACTNESS_CHECKS:
            yield check(engine)
    advised = yield from bits_advice(model)
    measured = Engine(model, store, store_bits=advised)
    yield speed_advice(measured)
    yield answers_advice(model, advised, measured.costs)
