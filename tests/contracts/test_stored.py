"""A folder of caches that was written in November 2026 is read today."""

from __future__ import annotations

import shutil
from pathlib import Path

from samkv_integrations import ChunkStore, Engine

STORED = Path(__file__).with_name("stored")
TEXT = (
    "Lena Harman\nLena Harman is a glazier. She lives in Zenoburg, where her workshop stands by "
    "the old bridge, and her lamp is green."
)


def test_a_stored_chunk_answers(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(STORED, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)  # git keeps no modes
    engine = Engine.from_pretrained("builtin", ChunkStore(folder), dtype="float32")
    assert engine.is_cached(TEXT)
    prompt = f"{TEXT}\n\nQuestion: What colour is the lamp of Lena Harman?\nAnswer:"
    report = engine.generate(prompt, method="reuse", max_new_tokens=2).report
    assert (report.found, report.reused, report.chunk_misses) == (1, 1, {})
