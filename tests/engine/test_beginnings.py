"""Exact beginnings: what full prefill would have for a prompt's first chunk is reused, and no more.

Entries of 16 bits are exact up to float32's rounding of a rotation and its inverse (1e-6 of keys of
size 1, a few layers deep), so 2e-4 of logits of size 1 is far above rounding and far below what a
chunk cached after another prefix changes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.right_answers import kl
from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.upkeep import push, verify
from samkv_integrations.model.quoting import RenderedPrompt
from tests.cli.running import ran
from tests.support.beginnings import CHUNKS, HEAD, QUESTION, opened, prompt_of
from tests.support.covering import covering
from tests.support.models import tiny_model

pytestmark = pytest.mark.beginnings

EXACT = {"rtol": 0, "atol": 2e-4}


def with_beginning(folder: Path, chunks: list[str] = CHUNKS, **options: object) -> Engine:
    """An engine that has seen the head before, was asked, and has had its idle time."""
    engine = opened(folder, **options)
    engine.cache_chunks(chunks)
    engine.generate(prompt_of(chunks), max_new_tokens=1)
    engine.make_beginnings()
    assert engine.generate(prompt_of(chunks), max_new_tokens=1).report.exact_tokens == 0
    engine.make_beginnings()
    return engine


def beginnings(folder: Path) -> list[Fingerprint]:
    found = ChunkStore(folder).index.fingerprints()
    return [made_by for made_by in found if made_by.is_of_beginning]


@pytest.mark.parametrize(
    ("family", "method"),
    covering(
        ["llama", "qwen2", "gemma2"],
        [name for name in METHODS if name not in ("recompute", "auto", "ape")],
    ),
)
def test_one_chunk_behind_its_head_is_full_prefill(
    tmp_path: Path, family: str, method: str
) -> None:
    engine = with_beginning(tmp_path / "kv", CHUNKS[:1], model=tiny_model(family))
    asked = replace(METHODS[method], eviction=None)
    full = engine.logits(prompt_of(CHUNKS[:1]), method="recompute")
    found = engine.logits(prompt_of(CHUNKS[:1]), method=asked)
    if method == "reuse" or METHODS[method].select.needs == frozenset():
        torch.testing.assert_close(found, full, **EXACT)
    else:  # it keeps a part of the chunk
        assert found.isfinite().all()


def test_the_second_question_recomputes_less_after_a_restart_too(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv")
    first = opened(tmp_path / "none", exact_beginnings=False)
    first.cache_chunks(CHUNKS)
    before = first.generate(prompt_of(CHUNKS), max_new_tokens=1).report
    for asked in (engine, opened(tmp_path / "kv")):
        report = asked.generate(prompt_of(CHUNKS), max_new_tokens=1).report
        assert report.exact_tokens > 0 and report.reused == 2
        assert report.recompute_ratio <= 0.6 * before.recompute_ratio
        assert report.cached_tokens > before.cached_tokens


def test_another_head_is_another_beginning(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv")
    other = prompt_of(CHUNKS, head="You are a helpful assistant.\n\n")
    for _ in range(2):  # a head that is new is not worth one yet
        assert engine.generate(other, max_new_tokens=1).report.exact_tokens == 0
        engine.make_beginnings()
    assert engine.generate(other, max_new_tokens=1).report.exact_tokens > 0
    assert engine.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens > 0
    assert len(beginnings(tmp_path / "kv")) == 2
    # the second chunk stands behind another chunk, and has none
    turned = engine.generate(prompt_of(CHUNKS[::-1]), max_new_tokens=1)
    assert turned.report.exact_tokens == 0


def test_heads_that_never_come_again_do_not_fill_the_store(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv", CHUNKS[:1])
    for day in range(12):
        head = f"Today is day {day} of the year.\n\n"
        engine.generate(prompt_of(CHUNKS[:1], head=head), max_new_tokens=1)
        engine.make_beginnings()
        engine.generate(prompt_of(CHUNKS[:1]), max_new_tokens=1)  # which is used again and again
    assert len(beginnings(tmp_path / "kv")) == 1
    assert engine.generate(prompt_of(CHUNKS[:1]), max_new_tokens=1).report.exact_tokens > 0


def test_a_chunk_that_the_prompt_cuts_is_exact_as_far_as_it_goes(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv", CHUNKS[:1])
    cut = HEAD + CHUNKS[0][:70] + QUESTION
    full = engine.logits(cut, CHUNKS[:1], method="recompute")
    torch.testing.assert_close(engine.logits(cut, CHUNKS[:1], method="reuse"), full, **EXACT)


def test_off_nothing_is_made_or_read(tmp_path: Path) -> None:
    with_beginning(tmp_path / "kv")
    engine = opened(tmp_path / "kv", exact_beginnings=False)
    assert engine.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens == 0
    other = prompt_of(CHUNKS, head="Other.\n\n")
    for _ in range(2):
        engine.generate(other, max_new_tokens=1)
        engine.make_beginnings()
    assert len(beginnings(tmp_path / "kv")) == 1


def test_memory_of_chunks_computed_with_the_prompt_serves_a_blended_answer(tmp_path: Path) -> None:
    engine = opened(tmp_path / "kv", exact_beginnings=False)
    engine.cache_chunks(CHUNKS[1:])
    full = engine.logits(prompt_of(CHUNKS), method="recompute")
    # the first chunk has no cache: it is computed with the prompt, and left in memory
    engine.generate(prompt_of(CHUNKS), CHUNKS[1:], max_new_tokens=1, on_miss="text")
    engine.cache_chunks(CHUNKS[:1])
    report = engine.generate(prompt_of(CHUNKS), method="reuse", max_new_tokens=1).report
    assert (report.ran, report.reused, report.prefix_chunks) == ("reuse", 1, 1)
    n_of_first = len(engine.model.tokenize(CHUNKS[0], special=False))
    assert report.exact_tokens >= n_of_first - 2
    assert report.prefix_tokens > report.exact_tokens
    assert report.recompute_ratio < 0.05
    held = engine.logits(prompt_of(CHUNKS), method="reuse")
    engine.prefixes.clear()
    without = engine.logits(prompt_of(CHUNKS), method="reuse")
    assert float(kl(full, held)[0]) < float(kl(full, without)[0])
    engine.forget(CHUNKS[:1])
    assert (
        engine.generate(prompt_of(CHUNKS), CHUNKS[1:], max_new_tokens=1).report.prefix_tokens < 20
    )


def test_a_deletion_takes_all_beginnings_along(tmp_path: Path) -> None:
    for number, delete in enumerate((
        lambda engine: engine.forget(CHUNKS[:1]),
        lambda engine: engine.forget(CHUNKS[1:]),  # any may hold it in its head
        lambda engine: engine.delete([engine.key_of(CHUNKS[0])]),
        lambda engine: ChunkStore(engine.store.path).forget(lambda body: body == CHUNKS[0]),
        lambda engine: ChunkStore(engine.store.path).delete_beginnings(),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        engine = with_beginning(folder)
        (made_by,) = beginnings(folder)
        assert delete(engine)
        assert beginnings(folder) == [] and not (folder / made_by.digest).exists()
        if number < 4:
            continue
        assert engine.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens == 0


def test_no_beginning_is_made_of_a_chunk_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    engine = opened(tmp_path / "kv")
    engine.cache_chunks(CHUNKS)
    engine.generate(prompt_of(CHUNKS), max_new_tokens=1)
    hold, go = threading.Event(), threading.Event()

    def busy() -> None:
        hold.set()
        go.wait(60)

    thread = threading.Thread(target=engine.scheduler.run, args=(busy,))
    stream = engine.stream(prompt_of(CHUNKS), max_new_tokens=1)
    thread.start()
    hold.wait(60)
    list(stream)
    ChunkStore(tmp_path / "kv").delete(engine.key_of(CHUNKS[1]))  # as another process would
    go.set()
    thread.join()
    engine.make_beginnings()
    assert beginnings(tmp_path / "kv") == []


def test_no_tenant_gets_the_beginning_of_another(tmp_path: Path) -> None:
    with_beginning(tmp_path / "kv", namespace="a")
    other = opened(tmp_path / "kv", namespace="b")
    other.cache_chunks(CHUNKS)
    assert other.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens == 0
    other.make_beginnings()
    other.forget(CHUNKS[:1])
    mine = opened(tmp_path / "kv", namespace="a")  # deletions of one tenant are not the other's
    assert mine.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens > 0


def test_another_model_finds_none(tmp_path: Path) -> None:
    with_beginning(tmp_path / "kv")
    other = opened(tmp_path / "kv", model=tiny_model("llama", seed=5))
    other.cache_chunks(CHUNKS)
    full = other.logits(prompt_of(CHUNKS[:1]), method="recompute")
    assert other.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens == 0
    other.make_beginnings()
    other.generate(prompt_of(CHUNKS), max_new_tokens=1)
    other.make_beginnings()
    found = other.logits(prompt_of(CHUNKS[:1]), method="reuse")
    torch.testing.assert_close(found, full, **EXACT)


def test_a_full_store_makes_none_and_evicts_nothing(tmp_path: Path) -> None:
    engine = opened(tmp_path / "kv")
    engine.cache_chunks(CHUNKS)
    engine.store.set_budget(engine.store.stats().bytes + 10)  # type: ignore[attr-defined]
    for _ in range(2):
        engine.generate(prompt_of(CHUNKS), max_new_tokens=1)
    engine.make_beginnings()
    assert beginnings(tmp_path / "kv") == []
    assert len(engine.store.keys()) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "absent"])
def test_a_damaged_beginning_is_the_ordinary_cache_and_made_again(
    tmp_path: Path, damage: str
) -> None:
    engine = with_beginning(tmp_path / "kv")
    plain = opened(tmp_path / "kv", exact_beginnings=False)
    expected = plain.logits(prompt_of(CHUNKS), method="reuse")
    (made_by,) = beginnings(tmp_path / "kv")
    (file,) = (tmp_path / "kv" / made_by.digest).rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-100])
    torch.testing.assert_close(engine.logits(prompt_of(CHUNKS), method="reuse"), expected, **EXACT)
    engine.generate(prompt_of(CHUNKS), max_new_tokens=1)
    engine.make_beginnings()
    assert engine.generate(prompt_of(CHUNKS), max_new_tokens=1).report.exact_tokens > 0


def killed_while_one_is_written(folder: Path, when: str) -> None:
    """What a process does that is killed before or after the file has its name."""
    rename = os.replace

    def dies(source: Path, target: Path) -> None:
        if when == "after":
            rename(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    engine = opened(folder)
    engine.cache_chunks(CHUNKS)
    for _ in range(2):
        engine.generate(prompt_of(CHUNKS), max_new_tokens=1)
    os.replace = dies  # type: ignore[assignment]
    engine.make_beginnings()


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_one_is_written(tmp_path: Path, when: str) -> None:
    folder = tmp_path / "kv"
    # no fork, which would inherit the locks that other threads hold
    killed = multiprocessing.get_context("spawn").Process(
        target=killed_while_one_is_written, args=(folder, when)
    )
    killed.start()
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL
    engine = opened(folder)
    assert engine.is_cached(CHUNKS[0]) and engine.is_cached(CHUNKS[1])
    if when == "after":  # the file is whole; the index does not know it
        full = engine.logits(prompt_of(CHUNKS[:1]), method="recompute")
        found = engine.logits(prompt_of(CHUNKS[:1]), method="reuse")
        torch.testing.assert_close(found, full, **EXACT)
    engine.forget(CHUNKS[:1])
    left = [file for file in folder.rglob("*.safetensors")]
    assert len(left) == 1  # that of the other chunk: what was half known has gone, too
    assert not verify(ChunkStore(folder)).damaged


def test_an_answer_never_waits_for_it(tmp_path: Path) -> None:
    engine = opened(tmp_path / "kv")
    engine.cache_chunks(CHUNKS)
    began, tries = threading.Event(), list[str]()

    def work(check: object) -> None:
        tries.append("begun")
        began.set()
        while len(tries) == 1:  # as a pass that takes for ever would
            check()  # type: ignore[operator]
        tries.append("done")

    engine.scheduler.run_when_idle(work)
    assert began.wait(60)
    assert engine.generate(prompt_of(CHUNKS), max_new_tokens=2).text is not None
    engine.make_beginnings()
    assert tries == ["begun", "begun", "done"]


def test_what_fails_in_idle_time_fails_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(tmp_path / "kv")

    def work(check: object) -> None:
        raise RuntimeError("a disk that is on fire")

    engine.scheduler.run_when_idle(work)
    engine.make_beginnings()
    assert "a disk that is on fire" in caplog.text
    assert engine.generate("Hello?", max_new_tokens=1).text is not None


def test_the_store_says_what_its_beginnings_take(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv")
    stats = engine.store.stats()
    assert stats.n_chunks == 2 and sum(row.bytes for row in stats.rows) == stats.bytes
    (row,) = [row for row in stats.rows if row.prefix == "behind heads of prompts"]
    assert row.chunks == 1 and row.bytes > 0
    assert len(engine.store.keys()) == 2 and len(engine.store.fingerprints()) == 1


def test_the_command_shows_and_removes_them(tmp_path: Path) -> None:
    with_beginning(tmp_path / "kv")
    folder = ("--dir", str(tmp_path))
    assert " head " in ran("store", "stats", *folder)
    assert "1 exact beginning deleted" in ran("store", "forget", "--beginnings", *folder)
    assert beginnings(tmp_path / "kv") == []
    assert "2 chunks," in ran("store", "stats", *folder)


def test_none_goes_to_a_remote_tier(tmp_path: Path) -> None:
    engine = with_beginning(tmp_path / "kv")
    store = ChunkStore(tmp_path / "kv", remote=f"file://{tmp_path / 'remote'}")
    assert push(store).n_chunks == 2
    assert len(list((tmp_path / "remote").rglob("*.safetensors"))) == 2
    assert engine.store.delete_beginnings() == 1


def test_what_a_blended_pass_leaves_in_memory_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full prefill takes it, so no attention that rounds its scores may have made it."""
    model, held = tiny_model("llama", torch.bfloat16), []
    prompt = prompt_of(CHUNKS, head="You answer questions of sailors about the harbour. " * 3)
    for rounds in (False, True):
        monkeypatch.setattr(
            "samkv_integrations.model.attention.products_are_faster", lambda rounds=rounds: rounds
        )
        store = ChunkStore(tmp_path / str(rounds))
        engine = Engine(model, store, method="reuse", exact_beginnings=False)
        engine.cache_chunks(CHUNKS)
        assert engine.generate(prompt, max_new_tokens=1).report.reused == 2
        ids = torch.tensor(model.tokenize_prompt(RenderedPrompt(prompt)))
        held.append(engine.prefixes.find(engine.fingerprint.computed_by, ids))
    for plain, other in zip(held[0].keys, held[1].keys, strict=True):
        torch.testing.assert_close(plain, other, rtol=0.0, atol=0.0)
