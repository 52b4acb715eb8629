"""What a worker does of an ingest, and what is refused before one begins, without a cluster."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.frameworks.engine_args import ModelSource, engine_of
from samkv_integrations.ingest.cluster import (
    PROBE,
    CacheWorker,
    WorkerPool,
    add_on_ray,
    cache_on_ray,
)
from samkv_integrations.runtimes.base import Made
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store.chunk import ChunkCache
from tests.support.documents import texts_of_many_lengths
from tests.support.gguf_files import model_for_gguf, write_gguf
from tests.support.llama_cpp import with_llama_cpp
from tests.support.models import tiny_model
from tests.support.stores import chunk_files

TEXTS = texts_of_many_lengths(40)


def engine_in(folder: Path) -> Engine:
    return Engine(tiny_model(), ChunkStore(folder), block_size=8)


@pytest.fixture
def source(tmp_path: Path, tiny: str) -> ModelSource:
    return ModelSource(model_name=tiny, kv_dir=tmp_path / "kv", block_size=8)


@pytest.fixture
def engine(source: ModelSource) -> Engine:
    return engine_of(source)


def failed(worker: CacheWorker, texts: Sequence[str]) -> dict[int, str]:
    """Cache a batch; place -> why a chunk has no cache."""
    found: dict[int, str] = pickle.loads(worker({"texts": pickle.dumps(texts)})["failed"])
    return found


def test_a_batch_is_computed_as_a_whole_whatever_is_there(
    source: ModelSource, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what a killed worker left would be computed in another pass, and have other bytes."""
    passes, prefill = list[int](), Model.prefill

    def noted(model: Any, batch: Sequence[Any], *rest: Any) -> Made:
        passes.append(len(batch))
        return prefill(model, batch, *rest)

    worker = CacheWorker(source, engine.key_of(PROBE))
    texts = ["one of two that are as long", "two of two that are as long"]
    engine.cache_chunks(texts[:1])
    monkeypatch.setattr(Model, "prefill", noted)
    assert failed(worker, texts) == {}
    assert passes == [2] and all(map(engine.is_cached, texts))


def test_texts_travel_whatever_they_hold(source: ModelSource, engine: Engine) -> None:
    texts = ["\x00 and more than that", "a line\u2028and another"]
    assert failed(CacheWorker(source, engine.key_of(PROBE)), texts) == {}
    assert all(map(engine.is_cached, texts))


def test_a_chunk_that_fails_fails_alone(
    source: ModelSource, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Model.prefill

    def failing(model: Any, chunks: Sequence[Any], *rest: Any) -> Made:
        if any(chunk.text == TEXTS[1] for chunk in chunks):
            raise RuntimeError("out of\nmemory")
        return prefill(model, chunks, *rest)

    worker = CacheWorker(source, engine.key_of(PROBE))
    monkeypatch.setattr(Model, "prefill", failing)
    assert failed(worker, TEXTS[:3]) == {1: "RuntimeError: out of memory"}
    assert [engine.is_cached(text) for text in TEXTS[:3]] == [True, False, True]


def test_a_store_that_fails_is_the_reason(
    source: ModelSource, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ChunkStore, chunk: ChunkCache) -> None:
        raise StoreError("the disk is full")

    worker = CacheWorker(source, engine.key_of(PROBE))
    monkeypatch.setattr(ChunkStore, "put", full)
    assert {*failed(worker, TEXTS[:2]).values()} == {"StoreError: the disk is full"}


def test_a_worker_of_another_machine_shares_what_it_computes(
    source: ModelSource, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ChunkStore(source.kv_dir or "").secret
    remote = f"file://{tmp_path}/shared"
    own = source.model_copy(update={"kv_remote": remote, "kv_dir": tmp_path / "own"})
    monkeypatch.setenv("SAMKV_STORE_SECRET", secret.hex())
    assert failed(CacheWorker(own, engine.key_of(PROBE)), TEXTS[:2]) == {}
    driver = engine_of(source.model_copy(update={"kv_remote": remote}))
    assert [driver.is_cached(text) for text in TEXTS[:3]] == [True, True, False]
    monkeypatch.setenv("SAMKV_STORE_SECRET", bytes(32).hex())
    other = {"kv_dir": tmp_path / "strange", "kv_remote": f"file://{tmp_path}/other"}
    strange = own.model_copy(update=other)
    with pytest.raises(InvalidOption, match="SAMKV_STORE_SECRET"):
        CacheWorker(strange, engine.key_of(PROBE))


@with_llama_cpp
def test_workers_run_a_gguf_file_on_llama_cpp(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model_for_gguf("llama"))
    source = ModelSource(
        model_name=str(file), kv_dir=tmp_path / "kv", runtime="llama_cpp", n_threads=1,
        device_map="cpu", n_ctx=1024,
    )  # fmt: skip
    engine = engine_of(source)
    assert failed(CacheWorker(source, engine.key_of(PROBE)), TEXTS) == {}
    assert all(map(engine.is_cached, TEXTS))
    other = source.model_copy(update={"runtime": "transformers", "n_ctx": None})
    with pytest.raises(InvalidOption, match="is not the one that the ingest began with"):
        CacheWorker(other, engine.key_of(PROBE))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_dir": "elsewhere"}, "is not the one that the ingest began with"),
        ({"kv_dir": "absent"}, "does not exist on"),
        ({"store_bits": 8}, "is not the one that the ingest began with"),
    ],
)
def test_a_worker_refuses_another_store_or_model(
    source: ModelSource, engine: Engine, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    ChunkStore(tmp_path / "elsewhere")
    if "kv_dir" in changed:
        changed = {"kv_dir": tmp_path / changed["kv_dir"]}
    with pytest.raises(InvalidOption, match=message):
        CacheWorker(source.model_copy(update=changed), engine.key_of(PROBE))
    assert not chunk_files(tmp_path) and not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("changed", "pool", "message"),
    [
        ({"kv_dir": None}, {}, "kv_dir is missing"),
        ({"model": object()}, {}, "workers load their own"),
        ({"device_map": "cuda"}, {}, "have no GPU"),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_begins(
    tmp_path: Path, changed: dict[str, Any], pool: dict[str, Any], message: str
) -> None:
    source = ModelSource(model_name="tiny", kv_dir=tmp_path / "kv").model_copy(update=changed)
    with pytest.raises(InvalidOption, match=message):
        cache_on_ray(engine_in(tmp_path / "kv"), source, TEXTS, WorkerPool(**pool))


def test_a_cluster_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    source = ModelSource(model_name="tiny", kv_dir=tmp_path / "kv")
    with socket.socket() as held:  # bound, and not listening
        held.bind(("127.0.0.1", 0))
        pool = WorkerPool(address=f"127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(InvalidOption, match="there is no Ray cluster at '127.0.0.1:"):
            cache_on_ray(engine_in(tmp_path / "kv"), source, TEXTS[:2], pool)


def test_a_wrong_record_is_said_before_anything_is_computed(
    source: ModelSource, engine: Engine, tmp_path: Path
) -> None:
    link = ChromaLink(open_collection(tmp_path / "chroma", "town", create=True), engine)
    with pytest.raises(InvalidOption, match="occurs twice"):
        add_on_ray(link, source, ["a", "a"], TEXTS[:2], [[1.0], [1.0]], pool=WorkerPool())
    assert chunk_files(tmp_path / "kv") == {}
