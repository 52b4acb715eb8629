"""Ingest on Ray: two workers on this machine, one of which is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import connect_collection, open_collection
from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.chroma.records import KEY_FIELD
from samkv_integrations.cluster import ingest as ingest_module
from samkv_integrations.cluster.ingest import add_on_ray, cache_on_ray
from samkv_integrations.cluster.workers import WorkerPool
from samkv_integrations.errors import ClusterError, InvalidOption
from samkv_integrations.llm.engine_args import ModelSource, engine_of
from tests.cli.running import rows_of, run
from tests.support.documents import texts_of_many_lengths
from tests.support.ray_workers import WatchedWorker, computed_by
from tests.support.stores import chunk_files, twin_folders

pytestmark = pytest.mark.usefixtures("cluster")

TEXTS = texts_of_many_lengths(60)
TWO = WorkerPool(n_workers=2)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers write down what they compute, and can be killed."""
    monkeypatch.setattr(ingest_module, "CacheWorker", WatchedWorker)


def source_of(model: str, folder: Path) -> ModelSource:
    return ModelSource(model_name=model, kv_dir=folder)


def one_process(model: str, folder: Path, texts: list[str]) -> dict[str, bytes]:
    """The files of an ingest by this process."""
    engine = engine_of(source_of(model, folder))
    engine.cache_chunks(texts)
    return chunk_files(folder)


@pytest.mark.slow  # two clusters, whose workers take their time to import torch
def test_two_workers_make_the_files_of_one_process(tmp_path: Path, tiny: str) -> None:
    alone, shared = twin_folders(tmp_path, "alone", "shared")
    expected = one_process(tiny, alone, TEXTS)
    source = source_of(tiny, shared)
    told: list[tuple[range, Mapping[int, str]]] = []
    texts = [*TEXTS, TEXTS[3], " ", "far too long " * 500]
    done = cache_on_ray(
        engine_of(source), source, texts, TWO, on_page=lambda *page: told.append(page)
    )
    assert chunk_files(shared) == expected
    assert (done.n_records, done.n_cached, done.n_hit) == (len(TEXTS) + 1, len(TEXTS), 1)
    assert done.n_evicted == 0
    assert done.bytes_on_disk == sum(map(len, expected.values()))
    assert [*done.failed] == [61, 62] and "longer than the 1797" in done.failed[62]
    assert told == [(range(len(texts)), done.failed)]
    # what another process has cached is found in prompts of this one
    engine = engine_of(source)
    text = max(TEXTS, key=len)  # of a few words all: a short one may be hidden by parts of others
    assert engine.found_in(f"Read this: {text}") == [text]


@pytest.mark.slow  # a worker that is killed is begun anew, and takes its time to import torch
@pytest.mark.usefixtures("watched")
def test_a_worker_that_is_killed_loses_nothing_and_repeats_its_batch(
    tmp_path: Path, tiny: str
) -> None:
    alone, shared = twin_folders(tmp_path, "alone", "shared")
    expected = one_process(tiny, alone, TEXTS)
    (shared.parent / "kill").touch()
    source = source_of(tiny, shared)
    engine = engine_of(source)
    done = cache_on_ray(engine, source, TEXTS, TWO)
    assert not (shared.parent / "kill").exists()  # it was killed
    assert chunk_files(shared) == expected
    assert (done.n_cached, done.failed) == (len(TEXTS), {})
    times = computed_by(shared.parent)
    assert {*times} == {engine.key_of(text) for text in TEXTS}
    twice = {key: by for key, by in times.items() if len(by) > 1}
    of_the_killed = {by[0] for by in twice.values()}
    assert len(of_the_killed) == 1 and all(len(by) == 2 for by in twice.values())


@pytest.mark.slow  # a worker that ends is begun anew, and takes its time to import torch
@pytest.mark.usefixtures("watched")
def test_a_text_that_kills_workers_ends_the_ingest_which_goes_on_later(
    tmp_path: Path, tiny: str
) -> None:
    (folder,) = twin_folders(tmp_path, "shared")
    (folder.parent / "deadly").write_text(TEXTS[5])
    source = source_of(tiny, folder)
    engine = engine_of(source)
    with pytest.raises(ClusterError, match="give each more memory"):
        cache_on_ray(engine, source, TEXTS, TWO)
    missing = [text for text in TEXTS if not engine.is_cached(text)]
    assert TEXTS[5] in missing
    (folder.parent / "deadly").unlink()
    done = cache_on_ray(engine, source, TEXTS, TWO)
    assert (done.n_cached, done.failed) == (len(missing), {})


@pytest.mark.slow  # begins a cluster, whose workers take their time to import torch
def test_records_go_to_a_chroma_server(
    tmp_path: Path, tiny: str, chroma_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "PAGE_SIZE", 16)
    source = source_of(tiny, tmp_path / "kv")
    engine = engine_of(source)
    collection = connect_collection("127.0.0.1", chroma_port, "on-ray", create=True)
    link = ChromaLink(collection, engine)
    texts = [*TEXTS[:20], "", *TEXTS[20:40]]
    ids = [f"id {place}" for place in range(len(texts))]
    vectors = [[float(place), 1.0] for place in range(len(texts))]
    rows = [{"place": place} for place in range(len(texts))]
    done = add_on_ray(link, source, ids, texts, vectors, rows, pool=WorkerPool(n_workers=1))
    assert done.n_records == 40 and [*done.failed] == [20]
    held = collection.get(include=["documents", "metadatas"])
    assert held["ids"] == [id_ for id_ in ids if id_ != "id 20"]
    for text, row in zip(held["documents"] or [], held["metadatas"] or [], strict=True):
        assert row[KEY_FIELD] == engine.key_of(text) and texts[int(row["place"])] == text
    assert link.sync(grace_s=0.0).n_cached == 0


def test_a_wrong_record_is_said_before_anything_is_computed(tmp_path: Path, tiny: str) -> None:
    source = source_of(tiny, tmp_path / "kv")
    link = ChromaLink(open_collection(tmp_path / "chroma", "town", create=True), engine_of(source))
    with pytest.raises(InvalidOption, match="occurs twice"):
        add_on_ray(link, source, ["a", "a"], TEXTS[:2], [[1.0], [1.0]], pool=TWO)
    assert chunk_files(tmp_path / "kv") == {}


@pytest.mark.slow  # begins a cluster, whose workers take their time to import torch
def test_workers_that_see_another_model_do_nothing(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tiny, tmp_path / "kv")
    engine = engine_of(source)
    other = ModelSource(model_name="builtin", kv_dir=tmp_path / "kv")
    with pytest.raises(ClusterError, match="'builtin' or the store .* is not the one"):
        cache_on_ray(engine, other, TEXTS[:2], WorkerPool(n_workers=1))
    assert chunk_files(tmp_path / "kv") == {}


def test_workers_that_fit_nowhere_are_not_waited_for(tmp_path: Path, tiny: str) -> None:
    source = source_of(tiny, tmp_path / "kv")
    for pool in (WorkerPool(n_cpus=3), WorkerPool(n_workers=3), WorkerPool(n_gpus=1.0)):
        with pytest.raises(InvalidOption, match="give fewer or smaller ones"):
            cache_on_ray(engine_of(source), source, TEXTS[:2], pool)


@pytest.mark.slow  # begins a cluster, whose workers take their time to import torch
def test_the_command(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS[:20]):
        (tmp_path / f"docs/{number}.txt").write_text(text)
    assert rows_of("ingest", "docs/7.txt", "--model", tiny)[0]["n_cached"] == 1
    result = run("ingest", "docs", "--model", tiny, "--ray", "--workers", "1")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "20 chunks" in shown and f"19 prefilled by {tiny}, 1 already cached" in shown
    collection = open_collection(tmp_path / ".samkv/chroma", "documents", create=False)
    assert collection.count() == 20
    (row,) = rows_of("ingest", "docs", "--model", tiny)
    assert (row["n_cached"], row["n_hit"]) == (0, 20)
