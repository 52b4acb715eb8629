"""A cluster on loopback: a worker and the S3 server are killed, one after the other.

Every process is a real one, begun by the commands that users type: an S3 server, a Chroma server,
``samkv ingest --ray`` and ``samkv serve``. Run it with ``--log-cli-level=INFO`` for figures.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.chroma.client import KEY_FIELD, connect_collection
from samkv_integrations.prompt.rag_template import rag_prompt
from tests.support.bucket import Bucket
from tests.support.chroma_server import HOST, chroma_server
from tests.support.companies import companies
from tests.support.load import Load, Served
from tests.support.processes import (
    end,
    kill_in_the_middle,
    rows_from,
    serving,
    started,
    wait_until,
)
from tests.support.records import builtin

pytestmark = pytest.mark.slow  # it begins a cluster of Ray and a dozen processes: minutes

_log = logging.getLogger(__name__)

RECORDS = companies(500)
ASKED = RECORDS[:40]
TOP_K = 3
NAME = "companies"
REMOTE = "s3://caches/kv"
# In 8 bits and float32 a chunk that is computed once more has the numbers that its cache has,
# whatever it is computed together with, but for last bits that decide no token.
BITS = 8
OF_MODEL = ("--model", "builtin", "--dtype", "float32", "--store-bits", str(BITS))
LOCAL_BYTES = 5_000_000
"""Room for half of the chunks that the questions need: others are fetched, or missed."""

N_EACH = 40
"""Answers of each phase, at least."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What runs beside the commands. folder: for the folders of two machines."""

    bucket: Bucket
    chroma_port: int
    folder: Path

    @property
    def shared(self) -> tuple[str, ...]:
        """Options with which a command finds records and caches."""
        return ("--chroma", f"http://{HOST}:{self.chroma_port}", "--remote", REMOTE)

    @property
    def ingesting(self) -> Path:
        return self.folder / "ingesting"

    @property
    def serving(self) -> Path:
        return self.folder / "serving"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    (tmp_path / "servers").mkdir()
    with (
        Bucket(tmp_path / "servers/s3") as bucket,
        chroma_server(tmp_path / "servers/chroma") as port,
    ):
        for name, value in {**bucket.environment, "SAMKV_STORE_SECRET": "5a" * 32}.items():
            monkeypatch.setenv(name, value)
        yield World(bucket=bucket, chroma_port=port, folder=tmp_path)


class Alone:
    """One engine in one process, on the caches that the ingest has made."""

    def __init__(self, folder: Path) -> None:
        self._engine = Engine(builtin(), ChunkStore(folder / "kv"), method="reuse", store_bits=BITS)

    def answer(self, question: str, texts: Sequence[str]) -> str:
        """With the caches of all chunks."""
        found = self._engine.generate(rag_prompt(question, texts), texts, max_new_tokens=8)
        assert (found.report.reused, found.report.chunk_misses) == (len(texts), {})
        return found.text

    def answers(
        self, question: str, texts: Sequence[str], *, n_as_text: int, has_exact: bool
    ) -> set[str]:
        """With all choices of so many chunks that are computed as text.

        has_exact: and with the first chunk or more as in full prefill, like what an earlier answer
        left in memory.
        """
        texts, found = tuple(dict.fromkeys(texts)), set()
        for n_exact in range(1, len(texts) + 1) if has_exact else (0,):
            for as_text in combinations(texts[n_exact:], n_as_text):
                cached = [text for text in texts[n_exact:] if text not in as_text]
                engine = Engine(builtin(), MemoryStore(), method="reuse", store_bits=BITS)
                engine.cache_chunks(cached)
                answer = engine.generate(
                    rag_prompt(question, texts), texts, max_new_tokens=8, on_miss="text"
                )
                assert answer.report.reused == len(cached)
                found.add(answer.text)
        return found


def ingest(world: World) -> dict[str, Any]:
    """By two workers, one of which is killed in the middle of a batch; what the command says."""
    documents = world.folder / "documents"
    documents.mkdir()
    for number, record in enumerate(RECORDS):
        (documents / f"{number:03}.txt").write_text(record.text)
    process = started(
        "ingest", str(documents), "--collection", NAME, "--dir", str(world.ingesting),
        *world.shared, *OF_MODEL, "--ray", "--workers", "2", "--json",
    )  # fmt: skip
    try:
        wait_until(lambda: world.bucket.n_chunks() >= 50, "50 chunks are cached")
        kill_in_the_middle(process.pid)
        (row,) = rows_from(process)
    finally:
        end(process)
    return row


def store(command: str, *arguments: str) -> dict[str, Any]:
    """The one row of a ``samkv store``."""
    (row,) = rows_from(started("store", command, *arguments, "--json"))
    return row


def check_ingested(world: World) -> None:
    """Records and sound caches of all documents, and the same files in the bucket."""
    collection = connect_collection(HOST, world.chroma_port, NAME, create=False)
    held = collection.get(include=["documents", "metadatas"])
    assert set(held["documents"] or []) == {record.text for record in RECORDS}
    assert len(held["ids"]) == len(RECORDS)
    keys = {str(row[KEY_FIELD]) for row in held["metadatas"] or []}
    found = store("verify", "--dir", str(world.ingesting))
    assert (found["n_chunks"], found["damaged"]) == (len(RECORDS), [])
    kept = {file.stem: file.read_bytes() for file in world.ingesting.rglob("*.safetensors")}
    assert kept.keys() == keys and len(keys) == len(RECORDS)
    assert world.bucket.chunks() == kept


def kill_the_bucket(world: World) -> Load:
    """The S3 server, while clients ask; what they were told."""
    ChunkStore(world.serving / "kv", max_bytes=LOCAL_BYTES)
    with serving(
        "--collection", NAME, "--dir", str(world.serving), *world.shared, *OF_MODEL,
        "--method", "reuse", "--grace", "5", "--prefix-bytes", "0",  # chunks are read each time
    ) as address:  # fmt: skip
        questions = [record.question for record in ASKED]
        with Load(address, questions, n_clients=4, top_k=TOP_K) as load:
            load.enter("whole", lambda: None, N_EACH)
            load.enter(
                "S3 killed", world.bucket.kill, N_EACH,
                lambda: _missed(load.of("S3 killed"))["io"] > 0,
            )  # fmt: skip
            n_before = world.bucket.n_fetched()
            load.enter(
                "S3 back", world.bucket.start, N_EACH,
                lambda: (
                    world.bucket.n_fetched() > n_before
                    and not _missed(load.of("S3 back")[-N_EACH:])
                ),
            )  # fmt: skip
        return load


def _missed(served: Sequence[Served]) -> Counter[str]:
    return sum((one.misses for one in served), Counter[str]())


def wrong(world: World, served: Sequence[Served]) -> list[Served]:
    """Answers that one engine in one process gives in no case like theirs.

    Chunks that were missed are computed as chunks, so the answer is the one with all caches. Of an
    answer for which some were computed as text it is not known which ones, only how many.
    """
    alone = Alone(world.folder / "ingesting")
    with_all: dict[tuple[int, tuple[str, ...]], str] = {}
    found = []
    for one in served:
        question, asked = ASKED[one.place].question, (one.place, one.sources)
        if one.n_as_text or one.samkv["exact_tokens"]:
            is_right = one.text in alone.answers(
                question, one.sources, n_as_text=one.n_as_text,
                has_exact=one.samkv["exact_tokens"] > 0,
            )  # fmt: skip
        else:
            if asked not in with_all:
                with_all[asked] = alone.answer(question, one.sources)
            is_right = one.text == with_all[asked]
        if not is_right:
            found.append(one)
    return found


def test_no_answer_is_lost_or_wrong_whatever_is_killed(world: World) -> None:
    began = time.monotonic()
    row = ingest(world)
    assert (row["n_records"], row["failed"]) == (len(RECORDS), [])
    assert row["n_cached"] == len(RECORDS)
    check_ingested(world)
    ingested = time.monotonic()
    fetched_before = world.bucket.n_fetched()
    load = kill_the_bucket(world)
    assert not load.failed
    not_right = wrong(world, load.served)
    _log.info(
        "%d documents in %.0f s; %d served, %d wrong, %d failed, %d asked "
        "again, %d fetched, %.0f s in all",
        len(RECORDS), ingested - began, len(load.served), len(not_right),
        len(load.failed), load.retried.total(), world.bucket.n_fetched() - fetched_before,
        time.monotonic() - began,
    )  # fmt: skip
    assert not_right == []
    assert not load.retried
    assert not _missed(load.of("whole"))
    # "absent": the folder holds half of the caches, so one request may evict what another is about
    # to open.
    assert "io" in (missed := {*_missed(load.served)}) and missed <= {"io", "absent"}
    found = store("verify", "--dir", str(world.serving))
    assert found["n_chunks"] > 0 and found["damaged"] == []
