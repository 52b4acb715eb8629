"""LangChain's indexing API: what it adds, skips and deletes is cached, kept and released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index

from langchain_samkv import SamKVChroma
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import InvalidChunk
from tests.support.chroma_link import assert_in_step, records
from tests.support.langchain_store import Letters
from tests.support.records import TEXTS, builtin
from tests.support.tested_runtime import model_class

Cleanup = Literal["incremental", "full", "scoped_full"] | None


class Indexer:
    """Documents of a few sources, and how `index` was called; `read` counts chunks computed."""

    def __init__(self, store: SamKVChroma, cleanup: Cleanup, is_async: bool) -> None:
        self.store = store
        self.read = 0
        self._manager = InMemoryRecordManager(namespace="town")
        self._manager.create_schema()
        self._options: dict[str, Any] = {
            "cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256", "batch_size": 2,
        }  # fmt: skip
        self._is_async = is_async

    def __call__(self, *given: tuple[str, str], **options: Any) -> tuple[int, ...]:
        """(source, text), ...; returns how many were added, updated, skipped and deleted."""
        docs = [Document(page_content=text, metadata={"source": name}) for name, text in given]
        options = self._options | options
        if self._is_async:
            done = asyncio.run(aindex(docs, self._manager, self.store, **options))
        else:
            done = index(docs, self._manager, self.store, **options)
        return tuple(done[f"num_{what}"] for what in ("added", "updated", "skipped", "deleted"))


@pytest.fixture
def indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Indexer]:
    def make(cleanup: Cleanup, is_async: bool = False) -> Indexer:
        engine = Engine(builtin(), ChunkStore(tmp_path / "kv"))
        store = SamKVChroma("town", Letters(), str(tmp_path / "chroma"), engine=engine)
        made = Indexer(store, cleanup, is_async)
        prefill = model_class().prefill

        def counted(model: Any, batch: Any, *rest: Any) -> Any:
            made.read += len(batch)
            return prefill(model, batch, *rest)

        monkeypatch.setattr(model_class(), "prefill", counted)
        return made

    return make


A, B, C, D = TEXTS[:4]


@pytest.mark.parametrize(
    ("cleanup", "is_async"),
    [(None, False), ("incremental", True), ("full", False), ("scoped_full", True)],
)
def test_every_cleanup(indexer: Callable[..., Indexer], cleanup: Cleanup, is_async: bool) -> None:
    run = indexer(cleanup, is_async)
    first = [("1", A), ("1", B), ("2", C), ("3", B)]  # B stands in two sources
    assert run(*first) == (4, 0, 0, 0)
    assert_in_step(run.store, A, B, C, B)
    assert run.read == 3

    assert run(*first) == (0, 0, 4, 0)
    assert run.read == 3

    # source 1 lost B and got D, source 2 was not loaded, source 3 still has B
    added, _, skipped, deleted = run(("1", A), ("1", D), ("3", B))
    assert (added, skipped) == (1, 2)
    assert run.read == 4
    left = {None: [A, B, C, B, D], "full": [A, D, B]}.get(cleanup, [A, C, B, D])
    assert deleted == 5 - len(left)
    assert_in_step(run.store, *left)

    # the last record of B goes, and with it the cache, wherever anything is deleted
    run(("1", A), ("1", D), ("3", A))
    left = {None: [A, B, C, B, D, A], "full": [A, D, A]}.get(cleanup, [A, C, D, A])
    assert_in_step(run.store, *left)
    assert run.read == 4
    assert run.store.kv_link.sync(grace_s=0).n_pruned == 0


def test_forced_updates_compute_nothing(indexer: Callable[..., Indexer]) -> None:
    run = indexer("full")
    run(("1", A), ("1", B))
    assert run(("1", A), ("1", B), force_update=True) == (0, 2, 0, 0)
    assert run.read == 2
    assert_in_step(run.store, A, B)


def test_a_document_that_cannot_be_cached_is_not_recorded(
    indexer: Callable[..., Indexer],
) -> None:
    run = indexer("incremental")
    with pytest.raises(InvalidChunk, match="split it"):
        run(("1", A), ("2", "word " * 5000))
    assert not records(run.store)
    assert run(("1", A)) == (1, 0, 0, 0)
    assert_in_step(run.store, A)


def test_unchanged_texts_are_not_computed_again(indexer: Callable[..., Indexer]) -> None:
    """With a batch smaller than a source, LangChain deletes texts and adds them again."""
    run = indexer("incremental")
    texts = [("1", text) for text in TEXTS]
    run(*texts)
    assert run.read == len(TEXTS)
    changed = [("1", A + " More."), *texts[1:]]
    run(*changed)
    assert_in_step(run.store, *(text for _, text in changed))
    assert run.read == len(TEXTS) + 1


@pytest.mark.parametrize("end", ["forget", "final", "sync", "time"])
def test_what_was_deleted_is_found_by_nothing_but_the_same_text(
    indexer: Callable[..., Indexer], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "time":
        monkeypatch.setattr("samkv_integrations.chunks.recent.RELEASED_S", 0.0)
    run = indexer(None)
    ids = run.store.add_texts([A, B])
    engine = run.store.kv_link.engine
    run.store.delete(ids[:1])
    report = engine.generate(f"{A}\n\nQ?", [A], max_new_tokens=1, on_miss="text").report
    assert (report.reused, report.found) == (0, 1)
    assert run.read == 2
    if end == "forget":
        engine.forget([B])
    elif end == "final":
        engine.delete([engine.key_of(B)])
    elif end == "sync":
        run.store.kv_link.sync(grace_s=0)
    else:
        for thread in threading.enumerate():  # the minute is over
            if isinstance(thread, threading.Timer) and thread.interval == 0:
                thread.join()
    run.store.add_texts([A])
    assert run.read == 3
