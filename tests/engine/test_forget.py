"""Forgetting a text: nothing of it is left on disk, in the finder, or among kept prefixes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.serving.answers import RunningAnswer
from tests.support.costs import ONE_PASS
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.records import COMPLETION_TEMPLATE, RECORDS, TEXTS, builtin


def engine_of(folder: Path, *, namespace: str = "", bits: int = 4, model: Model | None = None):
    store = ChunkStore(folder, namespace=namespace)
    return Engine(model or tiny_model(), store, block_size=8, store_bits=bits)


def files(folder: Path, *texts: str) -> list[Path]:
    """Files that hold one of the texts as plain text, and all files of caches."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and (path.suffix == ".safetensors" or any(t.encode() in path.read_bytes() for t in texts))
    ]


def test_all_of_a_text_goes_by_every_model_and_bits(tmp_path: Path) -> None:
    other = Model(hf_model("llama", 1), byte_tokenizer(bos=True), "another")
    engines = [
        engine_of(tmp_path),
        engine_of(tmp_path, bits=16),
        engine_of(tmp_path, model=other),
        engine_of(tmp_path, model=builtin()),
    ]
    for engine in engines:
        engine.cache_chunks(TEXTS[:2])
    assert engines[0].forget([f"\n{TEXTS[0]} "]) == 4
    assert not any(engine.is_cached(TEXTS[0]) for engine in engines)
    assert all(engine.is_cached(TEXTS[1]) for engine in engines)
    assert engines[0].forget(TEXTS[:2]) == 4
    assert files(tmp_path, *TEXTS) == []
    assert engines[0].forget(TEXTS) == 0


@pytest.mark.parametrize("how", ["announced", "lost"])
def test_a_question_that_waits_does_not_bring_it_back(tmp_path: Path, how: str) -> None:
    engine = engine_of(tmp_path)
    engine.cache_chunks(TEXTS[1:2] if how == "announced" else TEXTS[:2])
    if how == "announced":
        engine.expect(TEXTS[:1])
    else:
        engine.store.file(engine.key_of(TEXTS[0]), engine.fingerprint.digest).unlink()  # type: ignore[attr-defined]
    question = f"Read: {TEXTS[0]} When?"
    is_free, has_read = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(engine.scheduler.run, is_free.wait)
        submit = engine.scheduler.submit

        def noticed(answer: RunningAnswer) -> None:
            submit(answer)
            has_read.set()

        engine.scheduler.submit = noticed  # type: ignore[method-assign]
        asked = pool.submit(engine.generate, question, method="reuse", max_new_tokens=1)
        assert has_read.wait(60)
        engine.forget(TEXTS[:1])
        is_free.set()
        assert asked.result(60).report.computed_now == 1
    assert not engine.is_cached(TEXTS[0]) and engine.is_cached(TEXTS[1])
    assert TEXTS[0] not in engine_of(tmp_path).found_in(f"Read: {TEXTS[0][4:]}")
    engine.expect(TEXTS[:1])
    engine.generate(question, method="reuse", max_new_tokens=1)
    assert engine.is_cached(TEXTS[0])


def test_a_cache_with_a_damaged_text_is_known_by_its_tokens(tmp_path: Path) -> None:
    for engine in (engine_of(tmp_path), engine_of(tmp_path, bits=16)):
        engine.cache_chunks(TEXTS[:1])
    for file in tmp_path.glob("*/*/*.txt"):
        file.write_text(TEXTS[0][:30])
    assert engine_of(tmp_path).forget(TEXTS[:1]) == 2
    assert files(tmp_path, TEXTS[0][:30]) == []


def test_nothing_is_held_in_memory(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, model=builtin())
    # full prefill, which leaves the document in memory
    engine.costs = ONE_PASS
    engine.cache_chunks(TEXTS[:2])
    engine.expect([TEXTS[2]])
    prompt = COMPLETION_TEMPLATE.format(
        context_str="\n\n".join(TEXTS[:3]), query_str=RECORDS[0].question
    )
    assert engine.found_in(prompt) == TEXTS[:3]
    handle = engine.issue_handle(TEXTS[0])
    assert handle is not None and engine.found_in(handle) == TEXTS[:1]
    asked = [f"{TEXTS[0]}\n\n{question}" for question in ("Q?", "Why?", "Who?")]
    ran = [engine.generate(a, TEXTS[:1], max_new_tokens=1).report.ran for a in asked[:2]]
    assert ran == ["recompute", "prefix"]
    assert engine.forget([TEXTS[0], TEXTS[2]]) == 1
    assert engine.found_in(prompt) == [TEXTS[1]]
    assert engine.found_in(handle) == []
    assert engine.generate(asked[2], TEXTS[:1], max_new_tokens=1).report.ran == "recompute"
    engine.cache_chunks(TEXTS[:1])  # and nothing stops it from being cached again
    assert engine.found_in(prompt) == TEXTS[:2]


def test_another_text_of_the_same_tokens_is_no_damage(tmp_path: Path) -> None:
    """A tokenizer may normalise; then two texts share a cache, and one of them stands beside it."""
    engine = engine_of(tmp_path)
    engine.cache_chunks(["Tobias lives in Flevport, by the river."])
    tokenize = engine.model.tokenize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine.model, "tokenize", lambda text, *, special: tokenize(
                text.replace("  ", " "), special=special
            )
        )  # fmt: skip
        assert engine.is_cached("Tobias lives in  Flevport, by the river.")


OLD = (
    "Lease of Mill Street 9.\nThe tenant is Lena Harman, who keeps a workshop by the old bridge. "
    "The monthly rent is 2,850 euros, and it is paid on the third day of every month."
)
NEW = OLD.replace("2,850", "3,975")


@pytest.mark.parametrize("deleted_by", ["the same engine", "another process"])
def test_a_deleted_text_is_not_computed_again_for_one_that_is_nearly_it(
    tmp_path: Path, deleted_by: str
) -> None:
    """A retriever announced the old version of a document, which then was replaced."""
    engine, other = (engine_of(tmp_path, model=builtin()) for _ in range(2))
    (old,) = engine.cache_chunks([OLD])
    engine.announce([OLD], "compute")
    (engine if deleted_by == "the same engine" else other).delete([old])
    engine.cache_chunks([NEW])
    prompt = f"{NEW}\n\nQuestion: What is the rent?"
    report = engine.generate(prompt, method="reuse", max_new_tokens=1).report
    assert report.computed_now == 0
    assert not any(b"2,850" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert report.reused == (deleted_by == "the same engine")
