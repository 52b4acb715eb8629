"""What an ingest is cut into, and what a worker does of it, without Ray."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.cache.chunk import ChunkCache
from samkv_integrations.cluster.attempts import Attempts
from samkv_integrations.cluster.ingest import cache_on_ray
from samkv_integrations.cluster.plan import Plan
from samkv_integrations.cluster.pool import WorkerPool
from samkv_integrations.cluster.work import Batch, BatchDone, batch_in, done_in, to_row
from samkv_integrations.cluster.worker import (
    MAX_ATTEMPTS,
    PROBE,
    CacheWorker,
    WorkerSettings,
    cache_batch,
    open_engine,
)
from samkv_integrations.engine import chunks as chunks_module
from samkv_integrations.engine.prefill import prefill
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.frameworks.engine_args import ModelSource, engine_of
from tests.support.documents import texts_of_many_lengths
from tests.support.models import tiny_model
from tests.support.stores import chunk_files, twin_folders

TEXTS = texts_of_many_lengths(40)


def engine_in(folder: Path) -> Engine:
    return Engine(tiny_model(), ChunkStore(folder), block_size=8)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of chunks of every pass."""
    found: list[int] = []

    def noted(model: Any, batch: Sequence[Any], *rest: Any) -> list[ChunkCache]:
        found.append(len(batch))
        return prefill(model, batch, *rest)

    monkeypatch.setattr(chunks_module, "prefill", noted)
    return found


# -- the plan -----------------------------------------------------------------------------------


def test_batches_are_the_passes_of_one_process(tmp_path: Path, prefilled: list[int]) -> None:
    first, second = twin_folders(tmp_path, "a", "b")
    engine_in(first).cache_chunks(TEXTS)
    passes, prefilled[:] = [*prefilled], []
    engine = engine_in(second)
    plan = Plan.of(engine, TEXTS, 256)
    assert not prefilled and len(passes) > 3
    for batch in reversed(plan.batches):
        assert cache_batch(engine, batch) == (len(batch.texts), {})
    assert sorted(prefilled) == sorted(passes)
    assert chunk_files(second) == chunk_files(first)


def test_a_plan_by_pages_has_each_chunk_once(tmp_path: Path) -> None:
    engine = engine_in(tmp_path / "kv")
    engine.cache_chunks(TEXTS[:3])
    texts = [*TEXTS[:10], "", TEXTS[0], *TEXTS[5:15], "far too long " * 500]
    plan = Plan.of(engine, texts, 8)
    assert [*plan.failed] == [10, len(texts) - 1]
    assert "holds no text" in plan.failed[10]
    assert "longer than the" in plan.failed[len(texts) - 1]
    assert [len(page) for page in plan.pages] == [8, 8, 7]
    planned = [text for batch in plan.batches for text in batch.texts]
    assert sorted(planned) == sorted(TEXTS[:15]) and plan.n_chunks == 15
    verified = [text for b in plan.batches if not b.is_missed for text in b.texts]
    assert sorted(verified) == sorted(TEXTS[:3])
    assert {ref.text for ref in plan.missed} == {*TEXTS[3:15]}
    for batch in plan.batches:
        assert {*batch.texts} <= {texts[place] for place in plan.pages[batch.page]}
    assert [batch.number for batch in plan.batches] == [*range(len(plan.batches))]


def test_the_block_size_is_settled_by_all_texts(tmp_path: Path) -> None:
    engine = Engine(tiny_model(), ChunkStore(tmp_path / "kv"))
    long = "x" * 500
    Plan.of(engine, ["short", long, long + "y"], 256)
    assert engine.fingerprint.block_size == 8 * 2
    assert Engine(tiny_model(), ChunkStore(tmp_path / "kv")).cache_chunks(["short"])
    assert {found.block_size for found in engine.store.fingerprints()} == {16}


def test_texts_travel_whatever_they_hold() -> None:
    batch = Batch(number=3, page=0, texts=("a\ud800b", "\x00\x00"), is_missed=True)
    assert batch_in(to_row(batch)) == batch
    done = BatchDone(number=3, worker="w", began_at=0.0, ended_at=1.0, failed={1: "why"})
    assert done_in(to_row(done)) == done


# -- a batch ------------------------------------------------------------------------------------


def test_a_batch_that_was_cut_off_is_computed_as_a_whole(
    tmp_path: Path, prefilled: list[int]
) -> None:
    """Or what is left of it would be computed in another pass, and have other bytes."""
    first, second = twin_folders(tmp_path, "a", "b")
    engine = engine_in(first)
    batch = max(Plan.of(engine, TEXTS, 256).batches, key=lambda b: len(b.texts))
    cache_batch(engine, batch)
    whole = chunk_files(first)
    cut_off = engine_in(second)
    cache_batch(cut_off, batch)
    for name in sorted(whole)[::2]:
        (second / name).unlink()
    prefilled.clear()
    assert cache_batch(cut_off, batch, attempt=2) == (len(batch.texts), {})
    assert prefilled == [len(batch.texts)]
    assert chunk_files(second) == whole


def test_a_batch_that_is_there_is_not_computed(tmp_path: Path, prefilled: list[int]) -> None:
    engine = engine_in(tmp_path / "kv")
    batch = Plan.of(engine, TEXTS, 256).batches[0]
    cache_batch(engine, batch)
    prefilled.clear()
    assert cache_batch(engine, batch, attempt=2)[1] == {}
    assert cache_batch(engine, replace(batch, is_missed=False)) == (0, {})
    assert prefilled == []


def test_a_damaged_cache_is_computed_again(tmp_path: Path, prefilled: list[int]) -> None:
    engine = engine_in(tmp_path / "kv")
    engine.cache_chunks(TEXTS)
    damaged = sorted((tmp_path / "kv").rglob("*.safetensors"))[0]
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    prefilled.clear()
    (batch,) = Plan.of(engine, TEXTS, 256).batches
    assert cache_batch(engine, batch) == (1, {})
    assert prefilled == [1] and all(map(engine.is_cached, TEXTS))


def test_a_chunk_that_fails_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_in(tmp_path / "kv")
    batch = max(Plan.of(engine, TEXTS, 256).batches, key=lambda b: len(b.texts))
    wrong = batch.texts[1]

    def failing(model: Any, chunks: Sequence[Any], *rest: Any) -> list[ChunkCache]:
        if any(chunk.text == wrong for chunk in chunks):
            raise RuntimeError("out of\nmemory")
        return prefill(model, chunks, *rest)

    monkeypatch.setattr(chunks_module, "prefill", failing)
    n_computed, failed = cache_batch(engine, batch)
    assert n_computed == len(batch.texts) - 1 > 0
    assert failed == {1: "RuntimeError: out of memory"}
    assert [text for text in batch.texts if not engine.is_cached(text)] == [wrong]


def test_a_store_that_fails_is_not_tried_chunk_by_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefilled: list[int]
) -> None:
    engine = engine_in(tmp_path / "kv")
    batch = max(Plan.of(engine, TEXTS, 256).batches, key=lambda b: len(b.texts))

    def full(self: ChunkStore, chunk: ChunkCache) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(ChunkStore, "put", full)
    n_computed, failed = cache_batch(engine, batch)
    assert (n_computed, len(prefilled)) == (0, 1)
    assert failed == dict.fromkeys(range(len(batch.texts)), "the disk is full")


def test_a_batch_that_ends_its_workers_is_given_up(tmp_path: Path, prefilled: list[int]) -> None:
    engine = engine_in(tmp_path / "kv")
    batch = max(Plan.of(engine, TEXTS, 256).batches, key=lambda b: len(b.texts))
    engine.cache_chunks(batch.texts[:2])
    prefilled.clear()
    assert cache_batch(engine, batch, MAX_ATTEMPTS + 1)[1].keys() == {*range(2, len(batch.texts))}
    assert prefilled == []
    assert cache_batch(engine, batch, MAX_ATTEMPTS)[1] == {}
    assert prefilled == [1] * (len(batch.texts) - 2)  # one by one


def test_attempts_are_counted_until_one_ends() -> None:
    attempts = Attempts()
    assert [attempts.begin(number) for number in (4, 5, 4)] == [1, 1, 2]
    attempts.end(4)
    assert attempts.begin(4) == 2  # a task with another batch was cut off
    assert attempts.n_retried() == 1


# -- a worker -----------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, tiny: str) -> WorkerSettings:
    source = ModelSource(model_name=tiny, kv_dir=tmp_path / "kv", block_size=8)
    engine = engine_of(source)
    return WorkerSettings(
        source=source,
        digest=engine.fingerprint.digest,
        probe_key=engine.key_of(PROBE),
        n_threads=1,
    )


def test_a_worker_opens_the_store_of_the_ingest(settings: WorkerSettings) -> None:
    assert open_engine(settings).key_of(PROBE) == settings.probe_key


def test_a_worker_of_another_machine_shares_what_it_computes(
    settings: WorkerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ChunkStore(settings.source.kv_dir or "").secret
    remote = f"file://{tmp_path}/shared"
    own = replace(settings.source, kv_remote=remote, kv_dir=tmp_path / "own")
    monkeypatch.setenv("SAMKV_STORE_SECRET", secret.hex())
    batch = Batch(number=0, page=0, texts=tuple(TEXTS[:2]), is_missed=True)
    assert cache_batch(open_engine(replace(settings, source=own)), batch) == (2, {})
    driver = engine_of(replace(settings.source, kv_remote=remote))
    assert [driver.is_cached(text) for text in TEXTS[:3]] == [True, True, False]
    monkeypatch.setenv("SAMKV_STORE_SECRET", bytes(32).hex())
    strange = replace(own, kv_dir=tmp_path / "strange", kv_remote=f"file://{tmp_path}/other")
    with pytest.raises(InvalidOption, match="SAMKV_STORE_SECRET"):
        open_engine(replace(settings, source=strange))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_dir": "elsewhere"}, "is another store here"),
        ({"kv_dir": "absent"}, "does not exist here"),
        ({"store_bits": 8}, "is not the one that the ingest began with"),
        ({"model_name": "/no/such/model"}, "does not exist"),
    ],
)
def test_a_worker_refuses_another_store_or_model(
    settings: WorkerSettings, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    ChunkStore(tmp_path / "elsewhere")
    if "kv_dir" in changed:
        changed = {"kv_dir": tmp_path / changed["kv_dir"]}
    other = replace(settings, source=replace(settings.source, **changed))
    row = CacheWorker(other, attempts=None)(
        to_row(Batch(number=0, page=0, texts=tuple(TEXTS[:2]), is_missed=True))
    )
    done = done_in(row)
    assert message in done.refusal and done.n_computed == 0
    assert not chunk_files(tmp_path) and not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("changed", "pool", "message"),
    [
        ({"kv_dir": None}, {}, "kv_dir is needed"),
        ({"model": object()}, {}, "workers load their own"),
        ({"device_map": "cuda"}, {}, "without a GPU"),
    ],
)
def test_what_cannot_be_sent_is_said_before_anything_begins(
    tmp_path: Path, changed: dict[str, Any], pool: dict[str, Any], message: str
) -> None:
    source = replace(ModelSource(model_name="tiny", kv_dir=tmp_path / "kv"), **changed)
    with pytest.raises(InvalidOption, match=message):
        cache_on_ray(engine_in(tmp_path / "kv"), source, TEXTS, WorkerPool(**pool))


@pytest.mark.parametrize(
    "wrong", [{"n_workers": 0}, {"n_cpus": 0}, {"n_gpus": -1.0}, {"address": "ray://a:1"}]
)
def test_a_pool_has_something(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        WorkerPool(**wrong)


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
