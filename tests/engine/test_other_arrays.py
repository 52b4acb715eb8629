"""Files with a valid MAC, whose arrays are not those that the runtime reads, are counted misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.store import chunk_file
from samkv_integrations.store.chunk import ArrayKind, CacheArray, ChunkCache
from tests.support.laws import CHUNKS
from tests.support.models import tiny_model
from tests.support.table_runtime import TableRuntime

PROMPT = "Read:\n\n" + "\n\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"


def wider(cache: ChunkCache) -> ChunkCache:
    *shape, n_bytes = cache.entries.shape
    return replace(cache, entries=np.zeros((*shape, n_bytes + 4), np.uint8))


def without_ranges(cache: ChunkCache) -> ChunkCache:
    left = {name: array for name, array in cache.on_demand.items() if name != "key_range"}
    return replace(cache, on_demand=left)


def with_one_range(cache: ChunkCache) -> ChunkCache:
    """Tensors would take one range for all heads and channels, which is a wrong answer."""
    kind = ArrayKind("F16", (cache.shape.entries[0], 1, 1, 1, 1))
    data = np.full(kind.shape, 3, np.float16).view(np.uint8).reshape(-1)
    ranges = {"key_range": CacheArray(kind=kind, data=data)}
    return replace(cache, on_demand={**cache.on_demand, **ranges})


@pytest.mark.parametrize(
    ("runtime", "changed"),
    [("table", wider), ("llama", wider), ("llama", without_ranges), ("llama", with_one_range)],
)
def test_it_is_a_miss(
    tmp_path: Path, runtime: str, changed: Callable[[ChunkCache], ChunkCache]
) -> None:
    model = TableRuntime() if runtime == "table" else tiny_model(runtime)
    store = ChunkStore(tmp_path / "kv")
    engine = Engine(model, store, block_size=8, prefix="bos", prefix_bytes=0)
    engine.cache_chunks(CHUNKS)
    key = engine.key_of(CHUNKS[1])
    with store.open(key, engine.fingerprint) as stored:
        sound = stored.chunk()
    file = store.file(key, engine.fingerprint.digest)
    written = chunk_file.encode(changed(sound), "", store.secret)
    file.write_bytes(b"".join(bytes(part) for part in written))
    answer = engine.generate(PROMPT, CHUNKS, method="reuse", on_miss="text", max_new_tokens=8)
    assert answer.report.chunk_misses == {"corrupt": 1}
    engine.cache_chunks([CHUNKS[1]])  # heals it
    assert engine.generate(PROMPT, CHUNKS, method="reuse").report.reused == len(CHUNKS)
