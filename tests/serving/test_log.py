"""What is logged: one line an answer, under one logger, and no text of anybody."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import ChunkNotCached, SamkvError
from tests.support.chunk_files import flip
from tests.support.handles import TYPED, issued
from tests.support.models import tiny_model
from tests.support.served import chunk_file

LOGGER = "samkv_integrations"
MARK = "zugzwang"
TEXTS = [f"The mill of {MARK} number {at} was built in 1871 by two brothers." for at in range(3)]
QUESTION = f"\n\nWho built {MARK}?"
PROMPT = "\n\n".join(TEXTS) + QUESTION


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path / "kv"), method="reuse", block_size=8)
    engine.cache_chunks(TEXTS)
    return engine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in log.records]
    return [line for line in found if line.startswith("answered: ")]


def test_one_line_an_answer(engine: Engine, log: pytest.LogCaptureFixture) -> None:
    chunk_file(engine, TEXTS[1]).unlink()
    report = engine.generate(PROMPT, TEXTS, max_new_tokens=3).report
    assert lines(log) == [f"answered: {report.line}"]
    for part in ("model=tiny-llama", "method=reuse", f"prompt_tokens={report.prompt_tokens}"):
        assert f" {part} " in lines(log)[0]
    counts = (
        "prefix_tokens=0 stays=True found=3 reused=2 prefix_chunks=0 computed_now=1 misses=absent:1"
    )
    assert f"completion_tokens=3 {counts} " in lines(log)[0]
    assert lines(log)[0].endswith(f" bytes_read={report.bytes_read}")
    assert log.records[-1].samkv == report  # type: ignore[attr-defined]
    engine.generate(PROMPT, TEXTS, max_new_tokens=1)
    assert "misses=none" in lines(log)[1]


def test_no_text_is_logged(
    engine: Engine, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = issued(engine, TEXTS[0])
    chat = [{"role": "user", "content": PROMPT}]
    for method in ("reuse", "recompute", "auto", "samkv-fusion"):
        engine.generate(PROMPT, method=method, max_new_tokens=2)
    engine.generate(chat, max_new_tokens=2)
    engine.generate(f"{handle} {TYPED} {MARK}?", max_new_tokens=2)  # one that nobody issued
    chunk_file(engine, TEXTS[0]).write_bytes(b"damaged")
    flip(chunk_file(engine, TEXTS[1]))
    engine.generate(PROMPT, max_new_tokens=2)
    engine.announce(TEXTS, "compute")
    engine.generate(PROMPT.upper(), max_new_tokens=2)  # no announced chunk is in it
    for wrong in (
        lambda: engine.generate(f"{TEXTS[0]} {MARK}", [MARK * 2]),
        lambda: engine.generate(
            f"{TEXTS[0]} and a new {MARK}", [f"and a new {MARK}"], on_miss="error"
        ),
        lambda: engine.generate(MARK, max_new_tokens=10**6),
        lambda: engine.cache_chunks([f"{MARK} " * 2000]),
    ):
        with pytest.raises(SamkvError):
            wrong()
    with pytest.raises(ChunkNotCached):
        engine.announce([f"A new chunk about {MARK}"], "error")
    file = chunk_file(engine, TEXTS[2])
    assert isinstance(engine.store, ChunkStore)
    engine.store.path.rename(engine.store.path.with_name("moved"))  # it fails
    engine.generate(PROMPT, max_new_tokens=2)
    assert not file.exists()
    said = [record for record in log.records if record.name.startswith(LOGGER)]
    assert {record.levelno for record in said} == {logging.INFO, logging.WARNING}
    assert sum(record.levelno == logging.WARNING for record in said) == 2
    for record in log.records:
        everything = f"{record.getMessage()} {record.__dict__}"
        assert MARK not in everything.lower(), record.name
        assert handle not in everything and TYPED not in everything
