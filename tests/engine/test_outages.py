"""Prompts are answered whatever becomes of the store under a running engine, and of descriptors."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import StoreError
from samkv_integrations.option import OnMiss
from samkv_integrations.prompt.resolve import MAX_OPEN
from tests.support.chunk_files import flip
from tests.support.handles import issued
from tests.support.models import tiny_model
from tests.support.served import PROMPT, TEXTS, engine_on

NEW = "a chunk that nobody has cached before the store failed"
ASKED = f"{NEW}\n\n{PROMPT}"
NOBODY = 65534
ROOT = Path(__file__).parents[2]


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    folder.rename(folder.with_name("moved"))
    yield
    folder.with_name("moved").rename(folder)


@contextmanager
def replaced_by_a_file(folder: Path) -> Iterator[None]:
    with removed(folder):
        folder.write_text("a file")
        yield
        folder.unlink()


@contextmanager
def emptied(folder: Path) -> Iterator[None]:
    with removed(folder):
        folder.mkdir(mode=0o700)
        yield
        shutil.rmtree(folder)


@contextmanager
def another(folder: Path) -> Iterator[None]:
    with removed(folder):
        ChunkStore(folder)
        yield
        shutil.rmtree(folder)


@contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    mode, is_root = folder.stat().st_mode, os.geteuid() == 0
    folder.chmod(0)
    if is_root:  # nothing is forbidden to it
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(mode)


@contextmanager
def refusing(number: int) -> Iterator[None]:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refuse)  # where it shows at the latest
        yield


def full(folder: Path) -> AbstractContextManager[None]:
    return refusing(errno.ENOSPC)


def read_only(folder: Path) -> AbstractContextManager[None]:
    return refusing(errno.EROFS)


FAILURES = [removed, replaced_by_a_file, emptied, forbidden, full, read_only]
Failure = Callable[[Path], AbstractContextManager[None]]


def folder_of(engine: Engine) -> Path:
    assert isinstance(engine.store, ChunkStore)
    return engine.store.path


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = engine_on(tmp_path)
    engine.generate(PROMPT, max_new_tokens=1)  # it runs
    return engine


@pytest.mark.parametrize("on_miss", ["compute", "text"])
@pytest.mark.parametrize("fails", [*FAILURES, another])
def test_a_prompt_is_answered(
    engine: Engine, fails: Failure, on_miss: OnMiss, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the store was empty where it cannot be read, and one warning says so."""
    options: dict[str, Any] = {"method": "reuse", "max_new_tokens": 6, "on_miss": on_miss}
    is_readable = fails in (full, read_only)
    fresh = Engine(engine.model, block_size=8)
    fresh.cache_chunks(TEXTS if is_readable else [])
    expected = fresh.generate(ASKED, [NEW, *TEXTS], **options)
    with fails(folder_of(engine)), caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = engine.generate(ASKED, [NEW, *TEXTS], **options)
            assert answer.text == expected.text
            assert answer.report.found == 4
            assert sum(answer.report.chunk_misses.values()) == (1 if is_readable else 4)
    told = [record for record in caplog.records if record.name.endswith("store.base")]
    said = [record.getMessage() for record in told]
    assert len(said) == (0 if is_readable and on_miss == "text" else min(1, len(said)))
    if on_miss == "compute":
        assert len(said) == 1 and "the store fails (" in said[0] and "\n" not in said[0]
    report = engine.generate(PROMPT, method="reuse", max_new_tokens=1).report
    assert (report.reused, report.chunk_misses) == (3, {})  # it has recovered


@pytest.mark.parametrize("fails", FAILURES)
def test_nothing_that_prompts_need_raises(
    engine: Engine, fails: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    handle = issued(engine, TEXTS[0])
    with fails(folder_of(engine)), caplog.at_level(logging.WARNING):
        engine.expect([NEW])
        engine.announce([NEW, *TEXTS], "compute")
        engine.announce(TEXTS)
        assert engine.issue_handle(NEW) is None
        assert engine.count_tokens(ASKED) > 0
        assert NEW in engine.found_in(ASKED)
        report = engine.generate(f"{handle} {ASKED}", method="reuse", max_new_tokens=1).report
        assert report.found == 5
        with engine.resolve(ASKED) as resolved:
            assert len(resolved.chunks) == 4
        assert np.isfinite(np.asarray(engine.logits(ASKED))).all()
        assert engine.costs.full_prefill_s(100) > 0
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fails", [*FAILURES, another])
def test_an_ingest_says_so_in_one_line(engine: Engine, fails: Failure) -> None:
    with fails(folder_of(engine)), pytest.raises(StoreError, match="next step: ") as caught:
        engine.cache_chunks([NEW])
    assert "\n" not in str(caught.value)
    engine.cache_chunks([NEW])
    assert engine.is_cached(NEW)


def test_one_that_is_lost_is_lost_wherever_it_is_named(engine: Engine) -> None:
    (file,) = folder_of(engine).rglob(f"{engine.key_of(TEXTS[0])}.safetensors")
    flip(file)
    prompt = "\n\n".join([TEXTS[0], TEXTS[1], TEXTS[0], "Q?"])
    report = engine.generate(prompt, method="reuse", max_new_tokens=1).report
    assert (report.chunk_misses, report.computed_now, report.reused) == ({"corrupt": 2}, 2, 1)
    assert engine.is_cached(TEXTS[0])


def many_chunks() -> list[str]:
    rng = random.Random(1)  # of texts that are alike, one may be found as a part of another
    return ["".join(rng.choices("abcdefghij", k=45)) for _ in range(2 * MAX_OPEN)]


def test_a_prompt_holds_few_files(tmp_path: Path) -> None:
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path), method="reuse", block_size=8)
    texts = many_chunks()
    engine.cache_chunks(texts)
    files = {(at.st_dev, at.st_ino) for at in map(os.stat, tmp_path.rglob("*.safetensors"))}

    def n_held() -> int:
        found = 0
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # that of the listing
                at = os.fstat(int(name))
                found += (at.st_dev, at.st_ino) in files
        return found

    with engine.resolve("\n\n".join(texts)) as resolved:
        assert len(resolved.opened) == len(texts)
        assert n_held() == MAX_OPEN
    assert n_held() == 0


CHILD = f"from {__name__} import ask_with_few_descriptors as ask; ask(*__import__('sys').argv[1:])"


def ask_with_few_descriptors(folder: str, n_left: str) -> None:
    """Ask under a limit of 64, of which ``n_left`` are not in use; the reports, as JSON lines."""
    engine = Engine(
        tiny_model("llama"), ChunkStore(folder), method="reuse", block_size=8, prefix_bytes=0
    )
    prompt = "\n\n".join([*many_chunks(), NEW, "Q?"])
    engine.generate(prompt, max_new_tokens=2, temperature=1.0, on_miss="text")  # all is imported
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    while n_left:
        try:
            held.append(os.dup(0))
        except OSError:
            break
    for descriptor in held[: int(n_left or 0)]:
        os.close(descriptor)
    answers = [
        engine.generate(prompt, [*many_chunks(), NEW], max_new_tokens=2, on_miss=miss, **sampling)
        for miss in ("text", "compute")
        for sampling in ({}, {"temperature": 1.0})
    ]
    for answer in answers:
        sys.stdout.write(json.dumps([answer.text, answer.report.to_dict()]) + "\n")


@pytest.mark.slow  # a process; stores of which nothing can be opened are above
@pytest.mark.parametrize("n_left", ["", "3", "0"])
def test_a_process_that_has_too_many_files_open_answers(tmp_path: Path, n_left: str) -> None:
    engine = Engine(tiny_model("llama"), ChunkStore(tmp_path), method="reuse", block_size=8)
    texts = many_chunks()
    engine.cache_chunks(texts)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), n_left],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 4
    for _, report in answers:
        assert report["found"] == len(texts) + 1
        misses = report["chunk_misses"]
        if n_left == "0":  # nothing can be opened, and nothing is lost of the answer
            assert misses == {"io": len(texts), "absent": 1}
        elif not n_left:
            assert set(misses) <= {"absent"}, "a limit of 64 is enough for any prompt"
    fresh = Engine(engine.model, method="reuse", block_size=8)
    fresh.cache_chunks([] if n_left == "0" else texts)
    if n_left != "3":
        prompt = "\n\n".join([*texts, NEW, "Q?"])
        expected = fresh.generate(prompt, [*texts, NEW], max_new_tokens=2, on_miss="text").text
        assert answers[0][0] == expected
