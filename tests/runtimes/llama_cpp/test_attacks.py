"""Damaged, foreign and half-written caches and models: answered from the text, nothing aborts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import StoreError
from samkv_integrations.runtimes.llama_cpp.loading import load_model
from samkv_integrations.runtimes.llama_cpp.runtime import LlamaCppModel
from samkv_integrations.store.upkeep import verify
from tests.contracts.runtime_contract import PROMPT, TEXTS
from tests.support.chunk_files import flip
from tests.support.gguf_files import model_for_gguf, write_gguf
from tests.support.llama_cpp import tiny, with_llama_cpp
from tests.support.processes import PATIENCE_S, wait_until

pytestmark = with_llama_cpp

MOST = 6
"""Tokens of an answer."""


@cache
def model() -> LlamaCppModel:
    return tiny("llama", n_ctx=2048)


def engine_on(folder: Path, namespace: str = "", of: LlamaCppModel | None = None) -> Engine:
    store = ChunkStore(folder, namespace=namespace)
    return Engine(of or model(), store, method="reuse", prefix_bytes=0)


def answer(engine: Engine) -> tuple[str, int, dict[str, int]]:
    """The text, the number of chunks reused, and the misses by reason."""
    found = engine.generate(PROMPT, TEXTS, on_miss="text", max_new_tokens=MOST)
    return found.text, found.report.reused, dict(found.report.chunk_misses)


@cache
def expected(n_cached: int) -> str:
    """The answer if the last chunks are cached and the others are not, without a store on disk."""
    engine = Engine(model(), method="reuse", prefix_bytes=0)
    engine.cache_chunks(TEXTS[len(TEXTS) - n_cached :])
    text, reused, _ = answer(engine)
    assert text and reused == n_cached
    return text


def file_of(engine: Engine, text: str = TEXTS[0]) -> Path:
    assert isinstance(engine.store, ChunkStore)
    return next(engine.store.path.rglob(f"{engine.key_of(text)}.safetensors"))


N_PLACES = 50
"""Places of a file where a bit is changed. The text and the MACs of what is not read do no harm."""


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_changed_byte_is_a_miss_wherever_it_is(bits: int, tmp_path: Path) -> None:
    made = Engine(model(), ChunkStore(tmp_path), method="reuse", prefix_bytes=0, store_bits=bits)
    made.cache_chunks(TEXTS)
    file = file_of(made)
    sound = file.read_bytes()
    whole = answer(made)
    end = 8 + int.from_bytes(sound[:8], "little")
    parts = json.loads(sound[8:end])
    read = [slice(0, end), *(
        slice(end + start, end + stop) for name in ("token_ids", "key_range", "entries")
        for start, stop in [parts[name]["data_offsets"]]
    )]  # fmt: skip
    memory = Engine(model(), method="reuse", prefix_bytes=0, store_bits=bits)
    memory.cache_chunks(TEXTS[1:])
    without = answer(memory)[0], len(TEXTS) - 1, {"corrupt": 1}
    for place in [*range(0, len(sound), len(sound) // N_PLACES), end - 1, end, len(sound) - 1]:
        flip(file, place)
        again = Engine(
            model(), ChunkStore(tmp_path), method="reuse", prefix_bytes=0, store_bits=bits
        )
        found = answer(again)
        if any(part.start <= place < part.stop for part in read) or found != whole:
            assert found == without, place
            assert not file.exists()  # no prompt is slowed by it again
        file.write_bytes(sound)
        again.cache_chunks(TEXTS[:1])


def test_the_cache_of_another_model_file_is_not_used(tmp_path: Path) -> None:
    paths = []
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        paths.append(write_gguf(tmp_path / f"{seed}/a.gguf", model_for_gguf("llama", seed)))
    one, other = (load_model(str(path), n_threads=1, n_ctx=1024) for path in paths)
    one.name = other.name = "a.gguf"
    engine_on(tmp_path / "kv", of=one).cache_chunks(TEXTS)
    text, reused, misses = answer(engine_on(tmp_path / "kv", of=other))
    assert (reused, misses) == (0, {"absent": len(TEXTS)})
    alone = Engine(other, method="reuse", prefix_bytes=0)
    assert text == answer(alone)[0]


def test_the_cache_of_another_namespace_is_not_used(tmp_path: Path) -> None:
    theirs, mine = (engine_on(tmp_path, namespace) for namespace in ("theirs", "mine"))
    theirs.cache_chunks(TEXTS)
    assert answer(mine) == (expected(0), 0, {"absent": len(TEXTS)})


def test_a_cache_put_in_the_place_of_another_is_not_used(tmp_path: Path) -> None:
    """A file of another chunk, and one of another namespace: both are sound at their own place."""
    theirs, mine = (engine_on(tmp_path, namespace) for namespace in ("theirs", "mine"))
    theirs.cache_chunks(TEXTS)
    mine.cache_chunks(TEXTS)
    for foreign in (file_of(mine, TEXTS[1]), file_of(theirs)):
        file = file_of(mine)
        sound = file.read_bytes()
        file.write_bytes(foreign.read_bytes())
        again = engine_on(tmp_path, "mine")
        text, reused, misses = answer(again)
        assert (text, reused) == (expected(2), 2)
        assert misses in ({"corrupt": 1}, {"fingerprint": 1})
        file.write_bytes(sound)
        again.cache_chunks(TEXTS[:1])


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tmp_path)
    engine.cache_chunks(TEXTS[1:])

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)  # where it shows at the latest
        with pytest.raises(StoreError, match="No space left"):
            engine.cache_chunks(TEXTS[:1])
        assert answer(engine) == (expected(2), 2, {"absent": 1})
    engine.cache_chunks(TEXTS[:1])
    assert answer(engine) == (expected(3), 3, {})


WRITES = """
import itertools, sys
from samkv_integrations import ChunkStore, Engine

file, folder, *texts = sys.argv[1:]
engine = Engine.from_pretrained(file, ChunkStore(folder), n_threads=1, n_ctx=2048)
engine.cache_chunks(texts)
for number in itertools.count():
    engine.cache_chunks([f"Text {number} of many: {texts[0]}"])
"""


def running(script: str, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], text=True, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_process_killed_while_it_writes_loses_nothing(tmp_path: Path) -> None:
    gguf, folder = write_gguf(tmp_path / "a.gguf", model_for_gguf("llama")), tmp_path / "kv"
    n_files: Callable[[], int] = lambda: len([*folder.rglob("*.safetensors")])  # noqa: E731
    for _ in range(2):
        before = n_files()
        process = running(WRITES, str(gguf), str(folder), *TEXTS)
        try:
            wait_until(lambda most=before + 20: n_files() > most, "files are written")
        finally:
            process.kill()
        said = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == -9, said
    next_one = load_model(str(gguf), n_threads=1, n_ctx=2048)
    engine = engine_on(folder, of=next_one)
    assert answer(engine) == (expected(3), 3, {})
    store = engine.store
    assert isinstance(store, ChunkStore)
    checked = verify(store)
    assert checked.n_chunks > 40 and not checked.damaged
    engine.cache_chunks(["One more."])
    assert engine.is_cached("One more.")


CUTS = """
import os, sys
from samkv_integrations.errors import ModelNotFound
from samkv_integrations.runtimes.llama_cpp.library.binding import load_binding
from samkv_integrations.runtimes.llama_cpp.loading import load_model

load_binding()  # once for all
for file in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            load_model(file, n_threads=1, n_ctx=256)
        except ModelNotFound as error:
            os._exit(0 if "llama.cpp cannot load" in str(error) else 3)
        finally:
            os._exit(4)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (file, status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_model_that_was_cut_anywhere_ends_no_process(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf", model_for_gguf("llama")).read_bytes()
    n = len(data)
    places = (0, 3, 4, 12, 20, 100, n // 100, n // 20, n // 3, n // 2, n * 9 // 10, n - 64)
    files = [tmp_path / f"{place}.gguf" for place in places]
    for place, file in zip(places, files, strict=True):
        file.write_bytes(data[:place])
    process = running(CUTS, *map(str, files))
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, said
