"""Chunks behind one head, and engines over a folder of their caches."""

from __future__ import annotations

from pathlib import Path

from samkv_integrations import ChunkStore, Engine
from tests.support.models import tiny_model

CHUNKS = [
    "The mill of Orvik was built in 1871 by two brothers from the north, who sold it in 1902.",
    "Tessel bridge carries the road to the harbour; it is painted green and closed in winter.",
]
HEAD, QUESTION = "System: answer from the documents.\n\n", "\n\nQuestion: who built the mill?"


def prompt_of(chunks: list[str], head: str = HEAD) -> str:
    return head + "\n\n".join(chunks) + QUESTION


def opened(folder: Path, **options: object) -> Engine:
    namespace = str(options.pop("namespace", ""))
    model = options.pop("model", tiny_model("llama"))
    given = {"store_bits": 16, "method": "epic", "block_size": 8, **options}
    return Engine(model, ChunkStore(folder, namespace=namespace), **given)  # type: ignore[arg-type]
