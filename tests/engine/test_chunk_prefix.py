"""Caches of two prefixes are apart, and what is left of learned prefixes is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.errors import InvalidOption
from samkv_integrations.model.model import Model
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


@pytest.mark.parametrize("prefix", ["learned", "mine.safetensors", Path("mine")])
def test_a_learned_prefix_was_removed(model: Model, prefix: object) -> None:
    with pytest.raises(InvalidOption, match="were removed; give prefix='documents', and ingest"):
        Engine(model, prefix=prefix)  # type: ignore[arg-type]


def test_another_policy_is_named(model: Model) -> None:
    with pytest.raises(InvalidOption, match="prefix='magic'; allowed: auto, documents, bos, none"):
        Engine(model, prefix="magic")  # type: ignore[arg-type]


def test_caches_made_after_a_learned_prefix_are_misses(
    model: Model,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ChunkStore(tmp_path / "kv")
    put = store.put

    def put_as_learned(cache: ChunkCache, **options: Any) -> Any:
        learned = replace(cache.fingerprint, prefix="1;learned:5d41402abc4b2a76b9719d91")
        return put(replace(cache, fingerprint=learned), **options)

    monkeypatch.setattr(store, "put", put_as_learned)
    Engine(model, store).cache_chunks(TEXTS)
    (tmp_path / "kv" / "samkv-prefix.safetensors").touch()
    engine = Engine(model, ChunkStore(tmp_path / "kv"))
    assert engine.generate(PROMPT, max_new_tokens=1, on_miss="text").report.reused == 0
    assert "chunks stand after another prefix there" in caplog.text
    assert "next step: ingest again" in caplog.text
