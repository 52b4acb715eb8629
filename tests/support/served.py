"""An engine on a tiny model with three chunks in a folder, and a prompt that holds them."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from samkv_integrations import ChunkStore, Engine
from tests.support.models import tiny_model

RNG = random.Random(5)
TEXTS = ["".join(RNG.choices("abcdefgh ijkl\n", k=n)).strip() for n in (80, 47, 120)]
PROMPT = "Read.\n\n" + "\n\n".join(TEXTS) + "\n\nQ: what?\nA:"


@cache
def _filled() -> TemporaryDirectory[str]:
    """A store that holds the chunks, to be copied: far sooner done than computing them again."""
    made = TemporaryDirectory()
    _engine(Path(made.name)).cache_chunks(TEXTS)
    return made


def _engine(folder: Path, prefix_bytes: int = 0) -> Engine:
    """Its method is one that always answers from caches; the default is in test_auto."""
    store = ChunkStore(folder / "kv")
    return Engine(
        tiny_model("llama"), store, method="samkv-guided", block_size=8, prefix_bytes=prefix_bytes
    )


def engine_on(folder: Path, *, prefix_bytes: int = 0) -> Engine:
    """An engine whose answers know nothing of each other, unless it has room to keep them."""
    if not (folder / "kv").exists():
        shutil.copytree(Path(_filled().name) / "kv", folder / "kv")
    engine = _engine(folder, prefix_bytes)
    engine.cache_chunks(TEXTS)
    return engine


def chunk_file(engine: Engine, text: str) -> Path:
    key = engine.key_of(text)
    assert isinstance(engine.store, ChunkStore)
    return next(engine.store.path.rglob(f"{key}.safetensors"))
