"""What a request and an ingest make of caches that are missing, damaged, full or foreign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.errors import (
    CacheMiss,
    ChunkNotCached,
    InvalidChunk,
    InvalidOption,
    StoreError,
)
from samkv_integrations.option import OnMiss
from samkv_integrations.store.chunk import CacheArray, ChunkCache, ChunkRef
from samkv_integrations.store.memory import MemoryChunk
from samkv_integrations.store.upkeep import verify
from tests.support.chunk_files import flip
from tests.support.covering import covering
from tests.support.handles import issued
from tests.support.models import tiny_model
from tests.support.served import PROMPT, TEXTS, chunk_file, engine_on
from tests.support.tested_runtime import ON_LLAMA_CPP, model_class


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(tmp_path)


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_first(path: Path) -> None:
    flip(path, 0)


def flip_header(path: Path) -> None:
    flip(path, 40)


def flip_entries(path: Path) -> None:
    """Every byte of the file's last 60 %: entries of anchors and of the middle alike."""
    content = bytearray(path.read_bytes())
    for at in range(len(content) * 2 // 5, len(content)):
        content[at] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "method", "by_handle"),
    covering(
        [delete, truncate, flip_first, flip_header, flip_entries],
        ["reuse", "samkv-fusion", "samkv-guided"],
        [False, True],
        times=2,
    ),
)
def test_a_damaged_cache_is_a_counted_miss(engine: Engine, damage, method, by_handle) -> None:  # noqa: ANN001
    """Its chunk is computed from its text, exactly as if it had never been cached."""
    fresh = Engine(engine.model, block_size=8)
    fresh.cache_chunks([TEXTS[0], TEXTS[2]])
    whole = replace(METHODS[method], name=method)
    options = {"method": whole, "max_new_tokens": 6, "on_miss": "text"}
    expected = fresh.generate(PROMPT, TEXTS, **options)
    prompt = PROMPT.replace(TEXTS[1], issued(engine, TEXTS[1])) if by_handle else PROMPT
    damage(chunk_file(engine, TEXTS[1]))
    chunks = [t for t in TEXTS if t in prompt]
    answer = engine.generate(prompt, chunks, **options)
    assert answer.text == expected.text
    assert sum(answer.report.chunk_misses.values()) == 1
    reason = "absent" if damage is delete else "corrupt"
    assert answer.report.chunk_misses == {reason: 1}
    assert answer.report.reused == 2


FALSE = {
    "an id": "texts SET ids = CAST(substr(ids, 1, 80) || x'07000000' || substr(ids, 85) AS BLOB)",
    "fewer ids": "texts SET ids = CAST(substr(ids, 1, 100) AS BLOB)",
    "other ids": "texts SET ids = (SELECT ids FROM texts AS o WHERE o.id = 1) WHERE id = 2",
}
"""What makes an index false, each of its rows being such as a sound index may hold."""


@pytest.mark.parametrize("change", [*FALSE, "another's key"])
def test_a_false_index_does_no_harm_to_sound_files(
    engine: Engine, tmp_path: Path, change: str
) -> None:
    """The files are the truth: who finds that the index says otherwise has it made anew."""
    files = {file: file.stat().st_ino for file in tmp_path.rglob("*.safetensors")}
    with engine.store.index.transaction(writes=True) as connection:
        keys = [key for (key,) in connection.execute("SELECT key FROM chunks ORDER BY id LIMIT 2")]
        if change == "another's key":
            connection.execute("UPDATE chunks SET key = '' WHERE id = 1")
            connection.execute("UPDATE chunks SET key = ? WHERE id = 2", keys[:1])
            connection.execute("UPDATE chunks SET key = ? WHERE id = 1", keys[1:])
        else:
            connection.execute(f"UPDATE {FALSE[change]}")
    options: dict[str, Any] = {"method": "reuse", "max_new_tokens": 1}
    if change == "other ids":  # so that nothing is found in a prompt that could be compared
        with pytest.raises(StoreError, match="made anew .*other tokens .*than its file"):
            verify(engine.store)
    else:
        report = engine.generate(PROMPT, **options, on_miss="text").report
        assert report.chunk_misses.keys() == {"tokens"}
    report = engine_on(tmp_path).generate(PROMPT, **options, on_miss="error").report
    assert (report.found, report.reused) == (3, 3)
    assert {file: file.stat().st_ino for file in tmp_path.rglob("*.safetensors")} == files


def test_on_miss(engine: Engine) -> None:
    new = "a chunk that nobody cached"
    prompt = f"{new}\n\nQ?"
    for _ in range(2):  # nothing is kept
        report = engine.generate(prompt, [new], max_new_tokens=1, on_miss="text").report
        assert (report.found, report.chunk_misses) == (1, {"absent": 1})
        assert (report.reused, report.computed_now) == (0, 0)
    with pytest.raises(ChunkNotCached, match="on_miss='text'"):
        engine.generate(prompt, [new], max_new_tokens=1, on_miss="error")
    report = engine.generate(prompt, [new], max_new_tokens=1).report
    assert (report.found, report.chunk_misses) == (1, {"absent": 1})
    assert (report.reused, report.computed_now) == (0, 1)
    report = engine.generate(prompt, [new], max_new_tokens=1).report
    assert (report.found, report.chunk_misses, report.computed_now) == (1, {}, 0)
    with pytest.raises(InvalidOption, match="allowed: text, compute, error"):
        engine.generate(prompt, [new], on_miss="guess")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["reuse", "samkv-guided", "samkv-fusion"])
def test_damage_that_shows_while_it_is_read_is_an_error_too(engine: Engine, method: str) -> None:
    file = chunk_file(engine, TEXTS[1])
    flip(file)
    with pytest.raises(ChunkNotCached, match=f"{engine.key_of(TEXTS[1])} has no usable cache"):
        engine.generate(PROMPT, TEXTS, method=method, on_miss="error")
    assert not file.exists()  # no prompt is slowed by it again


@pytest.mark.parametrize(
    ("damage", "method", "on_miss"),
    covering(
        [truncate, flip_header, flip_entries],
        ["reuse", "samkv-guided", "samkv-fusion"],
        ["text", "compute"],
        times=3,
    ),
)
def test_damage_is_healed_on_disk_by_the_question_that_finds_it(
    engine: Engine, damage: Callable[[Path], None], method: str, on_miss: OnMiss
) -> None:
    """Whether it shows as the file is opened or while it is read, and the answer is the same."""
    options: dict[str, Any] = {"method": method, "max_new_tokens": 6}
    expected = engine.generate(PROMPT, TEXTS, **options)
    file = chunk_file(engine, TEXTS[1])
    sound = file.read_bytes()
    damage(file)
    first = engine.generate(PROMPT, TEXTS, on_miss=on_miss, **options)
    assert first.report.chunk_misses == {"corrupt": 1}
    assert first.report.computed_now == (on_miss == "compute")
    assert file.exists() == (on_miss == "compute")
    second = engine.generate(PROMPT, TEXTS, **options)
    # a text says nothing about a cache that was taken away
    assert second.report.chunk_misses == ({"absent": 1} if on_miss == "text" else {})
    third = engine.generate(PROMPT, TEXTS, **options)
    assert (third.text, third.report.chunk_misses) == (expected.text, {})
    if not ON_LLAMA_CPP:  # which rounds otherwise if it computes other chunks at the same time
        assert file.read_bytes() == sound
    assert engine.is_cached(TEXTS[1])


@pytest.mark.parametrize("damage", [flip_header, flip_entries])
def test_an_announced_chunk_is_healed_before_or_by_its_prompt(
    engine: Engine, damage: Callable[[Path], None]
) -> None:
    file = chunk_file(engine, TEXTS[1])
    damage(file)
    engine.announce(TEXTS, "compute")
    report = engine.generate(PROMPT, method="reuse", max_new_tokens=1).report
    shows_on_opening = damage is flip_header
    assert report.chunk_misses == ({} if shows_on_opening else {"corrupt": 1})
    assert report.computed_now == 1
    assert engine.is_cached(TEXTS[1])


def test_a_cache_that_cannot_be_made_whole_is_computed_from_its_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not again and again: its own chunk fails too."""

    def unsound(self: MemoryChunk, name: str) -> CacheArray:
        raise CacheMiss("corrupt", name)

    monkeypatch.setattr(MemoryChunk, "array", unsound)
    flip_header(chunk_file(engine, TEXTS[1]))
    report = engine.generate(PROMPT, TEXTS, method="reuse", max_new_tokens=1).report
    assert (report.found, report.chunk_misses) == (3, {"corrupt": 2})


@pytest.mark.parametrize("size", [1.5, "8", None, True])
def test_block_sizes_that_are_no_numbers_are_named(size: object) -> None:
    with pytest.raises(InvalidOption, match=f"block_size={size!r}; it must be a whole number"):
        Engine(tiny_model("llama"), block_size=size)  # type: ignore[arg-type]


def test_computing_what_is_missing_takes_nothing_from_another_namespace(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ours, theirs = (
        Engine(model, ChunkStore(tmp_path, namespace=name), block_size=8) for name in "ab"
    )
    keys = theirs.cache_chunks([TEXTS[0]])
    answer = ours.generate(f"{issued(theirs, TEXTS[0])} Q?", on_miss="compute", max_new_tokens=1)
    assert answer.report.context_tokens == 0
    assert ours.issue_handle(TEXTS[0]) is None
    assert (ours.store.keys(), theirs.store.keys()) == ([], keys)


def test_a_chunk_that_no_cache_can_hold_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tiny_model("llama"), method="reuse", block_size=8, prefix_bytes=0)
    prefill, bad = model_class().prefill, len(engine.model.tokenize(TEXTS[0], special=False))

    def refusing(model: Any, chunks: Sequence[ChunkRef], *rest: Any) -> Any:
        if any(len(chunk.token_ids) == bad for chunk in chunks):
            raise InvalidChunk("not finite")
        return prefill(model, chunks, *rest)

    monkeypatch.setattr(model_class(), "prefill", refusing)
    report = engine.generate(PROMPT, TEXTS, max_new_tokens=1).report
    assert report.computed_now == len(TEXTS) - 1
    again = engine.generate(PROMPT, TEXTS, max_new_tokens=1).report
    assert (again.reused, again.chunk_misses) == (len(TEXTS) - 1, {"absent": 1})

    other = Engine(engine.model, block_size=8)
    with pytest.raises(InvalidChunk, match="the chunk .*: not finite"):
        other.cache_chunks(TEXTS)
    assert len(other.store.keys()) == len(TEXTS) - 1


def test_engines_that_fill_an_empty_store_together_agree_on_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(chunk: ChunkCache) -> None:
        raise StoreError("no space left")

    first, second = (Engine(tiny_model("llama"), ChunkStore(tmp_path)) for _ in range(2))
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(first.store, "put", full)
        first.cache_chunks(["x" * 100])  # its block size is agreed on, and nothing stored yet
    assert second.store.keys() == []
    second.cache_chunks(["x" * 2000])
    first.cache_chunks(["y" * 100])
    assert first.fingerprint.digest == second.fingerprint.digest
    third = Engine(tiny_model("llama"), ChunkStore(tmp_path))
    assert len(third.store.keys(third.fingerprint)) == 2


def test_caches_of_another_fingerprint_are_never_used(engine: Engine, tmp_path: Path) -> None:
    other = Engine(
        tiny_model("llama", seed=1), ChunkStore(tmp_path / "kv"), block_size=8, prefix_bytes=0
    )
    assert other.fingerprint.digest != engine.fingerprint.digest
    report = other.generate(PROMPT, TEXTS, max_new_tokens=1, on_miss="text").report
    assert report.chunk_misses == {"absent": 3}
    mine, theirs = chunk_file(engine, TEXTS[0]), other.key_of(TEXTS[0])
    forged = tmp_path / "kv" / other.fingerprint.digest / theirs[:2] / f"{theirs}.safetensors"
    forged.parent.mkdir(parents=True)
    for on_miss in ("text", "compute"):
        forged.write_bytes(mine.read_bytes())
        report = other.generate(PROMPT, TEXTS, max_new_tokens=1, on_miss=on_miss).report
        assert report.chunk_misses == {"fingerprint": 1, "absent": 2}
        assert (report.found, report.reused) == (3, 0)
