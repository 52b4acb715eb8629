"""Ingest on Ray: two workers on this machine, one of which is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from samkv_integrations.errors import ClusterError, InvalidOption
from samkv_integrations.frameworks.engine_args import ModelSource, engine_of
from samkv_integrations.ingest import cluster as ingest_module
from samkv_integrations.ingest.cluster import WorkerPool, cache_on_ray
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
    assert (done.n_records, done.n_cached, done.n_hit) == (len(TEXTS) + 1, len(TEXTS), 0)
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


@pytest.mark.slow  # begins a cluster
def test_workers_that_fit_nowhere_are_not_waited_for(tmp_path: Path, tiny: str) -> None:
    source = ModelSource(model_name=tiny, kv_dir=tmp_path / "kv", dtype="float32")
    for pool in (WorkerPool(n_cpus=3), WorkerPool(n_workers=3), WorkerPool(n_gpus=1.0)):
        with pytest.raises(InvalidOption, match="give fewer or smaller ones"):
            cache_on_ray(engine_of(source), source, TEXTS[:2], pool)
