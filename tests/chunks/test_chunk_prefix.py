"""Caches of two prefixes are apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import tiny_model

TEXTS = ["The mill stands by the river, and its wheel is green.", "A baker lives next to it."]
PROMPT = f"Read: {TEXTS[0]} And: {TEXTS[1]} Where?"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("llama")


def test_caches_of_two_prefixes_are_apart(model: Model, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "kv")
    engines = [
        Engine(model, store, method="reuse", prefix=prefix)
        for prefix in ("documents", "bos", "none")
    ]
    assert len({engine.fingerprint.digest for engine in engines}) == 3
    assert Engine(model, store).fingerprint == engines[0].fingerprint
    engines[0].cache_chunks(TEXTS)
    reused = [engine.generate(PROMPT, max_new_tokens=1).report.reused for engine in engines]
    assert reused == [2, 0, 0]


def test_another_policy_is_named(model: Model) -> None:
    with pytest.raises(InvalidOption, match="prefix='magic'; allowed: auto, documents, bos, none"):
        Engine(model, prefix="magic")  # type: ignore[arg-type]
