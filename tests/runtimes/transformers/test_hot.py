"""Hot chunks: the same answers without reading a file, and never of what was deleted."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.errors import InvalidOption, OutOfMemory
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.option import STORE_BITS
from samkv_integrations.runtimes.transformers import runtime
from samkv_integrations.runtimes.transformers.entries.hot import HotChunk
from samkv_integrations.runtimes.transformers.passes import working_cache
from samkv_integrations.runtimes.transformers.passes.blend import Blend
from samkv_integrations.runtimes.transformers.passes.decode import Decoder
from samkv_integrations.runtimes.transformers.passes.working_cache import DenseCache
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.runtimes.transformers.sampling import TransformersSampler
from samkv_integrations.serving import scheduler
from samkv_integrations.store import chunk_file
from samkv_integrations.store.chunk_file import ChunkFile
from tests.laws.test_device import DEVICE, OnThisThread
from tests.support.asking import announce
from tests.support.covering import covering
from tests.support.laws import CHUNKS, FOLLOW, PROMPT
from tests.support.models import byte_tokenizer, hf_model, tiny_model
from tests.support.pretend_device import OnDevice, pretend_device
from tests.support.processes import wait_until

TWICE = f"{PROMPT}\n\nAgain: {CHUNKS[0]} and > {CHUNKS[3][:30]}\n> {CHUNKS[3][30:]}"
"""With a chunk that stands in it twice, and a chunk in two runs."""
ROOM = 2**24


def engine_on(folder: Path, *, hot_bytes: int | None = ROOM, **options: Any) -> Engine:
    options = {"block_size": 8, "prefix_bytes": 0, "method": "reuse"} | options
    store = ChunkStore(folder, namespace=options.pop("namespace", ""))
    return Engine(options.pop("model", tiny_model()), store, hot_bytes=hot_bytes, **options)


@pytest.fixture
def hot(tmp_path: Path) -> Engine:
    """An engine whose chunks are hot."""
    engine = engine_on(tmp_path / "kv")
    engine.cache_chunks(CHUNKS)
    assert reused(engine) == len(CHUNKS) and engine.chunks.reader.n_bytes > 0
    return engine


def reused(engine: Engine) -> int:
    return engine.generate(PROMPT, CHUNKS, max_new_tokens=1, on_miss="text").report.reused


@cache
def other_process() -> ProcessPoolExecutor:
    """No fork, which would inherit the locks that other threads hold."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def delete(folder: Path, keys: Sequence[str]) -> int:
    return ChunkStore(folder).delete(*keys)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the regions whose MAC was computed."""
    seen: list[int] = []
    mac = chunk_file.mac

    def counted(key: bytes, position: int, data: bytes | memoryview) -> bytes:
        seen.append(position)
        return mac(key, position, data)

    monkeypatch.setattr(chunk_file, "mac", counted)
    return seen


@pytest.mark.parametrize(
    ("method", "rule", "bits"),
    covering(
        [name for name in METHODS if name != "auto"], ["none", *EVICTIONS], list(STORE_BITS)
    ),
)  # fmt: skip
def test_a_second_question_reads_nothing_and_has_the_same_answer(
    tmp_path: Path, checked: list[int], method: str, rule: str, bits: int
) -> None:
    cold, hot = (engine_on(tmp_path, hot_bytes=n, store_bits=bits) for n in (0, ROOM))
    cold.cache_chunks(CHUNKS)
    asked = {"follow": FOLLOW, "method": method, "eviction": rule}
    expected = cold.logits(TWICE, CHUNKS, **asked)
    first = hot.logits(TWICE, CHUNKS, **asked)
    some = hot.logits(CHUNKS[1], CHUNKS[1:2], method="reuse")  # now at least one is hot
    mixed = hot.logits(TWICE, CHUNKS, **asked)
    hot.logits(TWICE, CHUNKS, method="reuse")  # which reads every chunk whole
    checked.clear()
    all_hot = hot.logits(TWICE, CHUNKS, **asked)
    assert checked == []
    assert hot.generate(TWICE, CHUNKS, method=method, max_new_tokens=1).report.bytes_read == 0
    assert all(torch.equal(found, expected) for found in (first, mixed, all_hot))
    assert torch.equal(some, cold.logits(CHUNKS[1], CHUNKS[1:2], method="reuse"))


def test_a_question_reads_nothing_of_what_was_announced(
    tmp_path: Path, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for what is still being read; what is not intact is the question's to find."""
    cold, warm = (engine_on(tmp_path, hot_bytes=n) for n in (0, ROOM))
    cold.cache_chunks(CHUNKS)
    read = ChunkFile.read_layers
    monkeypatch.setattr(ChunkFile, "read_layers", lambda *args: (time.sleep(0.1), read(*args)))
    expected = cold.logits(TWICE, CHUNKS, method="epic", follow=FOLLOW)
    for engine in (cold, warm):
        announce(engine, [*CHUNKS, "a chunk that nobody has cached"])
        report = engine.generate(TWICE, CHUNKS, method="epic", max_new_tokens=1).report
        assert report.reused >= len(CHUNKS) and (report.bytes_read == 0) == (engine is warm)
    checked.clear()
    assert torch.equal(warm.logits(TWICE, CHUNKS, method="epic", follow=FOLLOW), expected)
    assert checked == []
    file = cold.store.file(cold.key_of(CHUNKS[0]), cold.fingerprint.digest)  # type: ignore[attr-defined]
    file.write_bytes(file.read_bytes()[:-9])
    again = engine_on(tmp_path)
    announce(again, CHUNKS)
    report = again.generate(PROMPT, CHUNKS, max_new_tokens=1, on_miss="text").report
    assert report.chunk_misses == {"corrupt": 1} and report.bytes_read == 0


def test_an_announcement_evicts_none_of_its_own_chunks(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    engine.cache_chunks(CHUNKS)
    engine.generate(CHUNKS[0], CHUNKS[:1], max_new_tokens=1)
    small = engine_on(tmp_path, hot_bytes=engine.chunks.reader.n_bytes * 3 // 2)  # for one chunk

    def read(text: str) -> int:
        return small.generate(text, [text], max_new_tokens=1).report.bytes_read

    announce(small, CHUNKS)
    assert read(CHUNKS[0]) == 0
    announce(small, [CHUNKS[0], *CHUNKS[2:]])
    assert read(CHUNKS[0]) == 0 and small.chunks.reader.n_bytes <= small.chunks.reader.max_bytes


def delete_here(engine: Engine) -> None:
    engine.delete(map(engine.key_of, CHUNKS))


def delete_elsewhere(engine: Engine) -> None:
    keys = [engine.key_of(text) for text in CHUNKS]
    folder = engine.store.path  # type: ignore[attr-defined]
    assert other_process().submit(delete, folder, keys).result(300) == len(keys)


def evict(engine: Engine) -> None:
    engine.store.set_budget(1)  # type: ignore[attr-defined]


def remove_store(engine: Engine) -> None:
    shutil.rmtree(engine.store.path)  # type: ignore[attr-defined]


GONE = [
    delete_here, delete_elsewhere, lambda engine: engine.forget(CHUNKS), evict, remove_store
]  # fmt: skip


@pytest.mark.parametrize("remove", GONE)
def test_what_the_store_has_not_any_more_is_not_used(
    hot: Engine, remove: Callable[[Engine], object]
) -> None:
    remove(hot)
    if remove in (delete_here, GONE[2]):
        assert hot.chunks.reader.n_bytes == 0  # before the next question
    assert reused(hot) == 0
    assert hot.chunks.reader.n_bytes == 0


def test_memory_of_what_others_deleted_is_freed_by_any_question(hot: Engine) -> None:
    delete_elsewhere(hot)
    hot.generate("Hello", max_new_tokens=1)
    assert hot.chunks.reader.n_bytes == 0


def no_thread_starts(*_: object) -> Future[None]:
    raise RuntimeError("can't start new thread")


def threads_are_busy(*_: object) -> Future[None]:
    return Future()


@pytest.mark.parametrize("submit", [no_thread_starts, threads_are_busy])
def test_a_question_waits_for_no_thread_that_has_not_begun(
    submit: Callable[..., Future[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tmp_path / "kv")
    engine.cache_chunks(CHUNKS)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", submit)
        engine.announce(CHUNKS)
    assert reused(engine) == len(CHUNKS)


def test_a_deletion_while_a_question_reads_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other, chunk = engine_on(tmp_path), engine_on(tmp_path), ChunkFile.chunk
    engine.cache_chunks(CHUNKS)

    def late(file: ChunkFile, entries: NDArray[np.uint8]) -> object:
        other.forget(CHUNKS)
        engine.chunks.reader.sweep()
        return chunk(file, entries)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkFile, "chunk", late)
        assert reused(engine) == len(CHUNKS)  # it had opened them before
    assert engine.chunks.reader.n_bytes == 0 and reused(engine) == 0


def test_questions_and_deletions_by_two_processes_at_once(tmp_path: Path) -> None:
    engine, ends = engine_on(tmp_path), threading.Event()
    told: list[tuple[float, float, int]] = []

    def ask() -> None:
        while not ends.is_set():
            began, n_reused = time.monotonic(), reused(engine)
            told.append((began, time.monotonic(), n_reused))

    def wait() -> float:
        n_told = len(told)
        while len(told) < n_told + 6:
            time.sleep(0.005)
        return time.monotonic()

    asking = [threading.Thread(target=ask) for _ in range(3)]
    gone: list[tuple[float, float]] = []
    engine.cache_chunks(CHUNKS)
    for thread in asking:
        thread.start()
    try:
        for _ in range(6):
            wait()
            delete_elsewhere(engine)
            gone.append((time.monotonic(), wait()))
            engine.cache_chunks(CHUNKS)
    finally:
        ends.set()
        for thread in asking:
            thread.join()
    assert any(n for *_, n in told)
    between = [n for began, ended, n in told if any(a <= began and ended <= b for a, b in gone)]
    assert len(between) >= 6 and not any(between)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_file_that_is_written_into_is_checked_again(hot: Engine, keeps_time: bool) -> None:
    store = hot.store
    file = store.file(hot.key_of(CHUNKS[0]), hot.fingerprint.digest)  # type: ignore[attr-defined]
    before, data = file.stat(), bytearray(file.read_bytes())
    data[-100] ^= 1
    time.sleep(0.01)  # a tick of the file system's clock
    file.write_bytes(data)
    if keeps_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    report = hot.generate(PROMPT, CHUNKS, max_new_tokens=1, on_miss="text").report
    assert report.chunk_misses == {"corrupt": 1} and not file.exists()


def test_another_model_or_namespace_has_chunks_of_its_own(hot: Engine, tmp_path: Path) -> None:
    hf = hf_model("llama")
    engine = engine_on(tmp_path / "kv", model=Model(hf, byte_tokenizer(bos=True), "tiny"))
    other = engine_on(tmp_path / "kv", namespace="other", model=engine.model)
    assert reused(engine) == len(CHUNKS) and engine.chunks.reader.n_bytes > 0
    assert reused(other) == 0 and other.chunks.reader.n_bytes == 0
    with torch.no_grad():
        hf.model.layers[0].self_attn.k_proj.weight[3, 5] += 9
    assert reused(engine) == 0 and engine.chunks.reader.n_bytes == 0


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    engine.cache_chunks(CHUNKS)
    n_bytes = []
    for text in CHUNKS[:2]:
        engine.generate(text, [text], max_new_tokens=1)
        n_bytes.append(engine.chunks.reader.n_bytes)
    small = engine_on(tmp_path, hot_bytes=n_bytes[1] + n_bytes[0] // 2)

    def read(text: str) -> int:
        return small.generate(text, [text], max_new_tokens=1).report.bytes_read

    for text in (CHUNKS[0], CHUNKS[3], CHUNKS[0], CHUNKS[1]):
        read(text)
        assert small.chunks.reader.n_bytes <= small.chunks.reader.max_bytes
    assert read(CHUNKS[0]) == 0 and read(CHUNKS[3]) > 0
    small.chunks.reader.clear()
    assert read(CHUNKS[0]) > 0


@pytest.mark.parametrize("hot_bytes", [-1, 1.5, "1 apple", True])
def test_what_is_no_size_is_refused(tmp_path: Path, hot_bytes: Any) -> None:
    with pytest.raises(InvalidOption, match=f"^hot_bytes={hot_bytes!r}; it must be a number of"):
        engine_on(tmp_path, hot_bytes=hot_bytes)


def test_a_size_may_have_a_unit(tmp_path: Path) -> None:
    engine = Engine(tiny_model(), ChunkStore(tmp_path), hot_bytes="2MB")
    assert engine.chunks.reader.max_bytes == 2_000_000


def test_more_than_the_device_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidOption, match=rf"^hot_bytes={2**60}; it must be at most [0-9]+, the"):
        engine_on(tmp_path, hot_bytes=2**60)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000, 8000))
    with (
        pretend_device(),
        pytest.raises(InvalidOption, match="=8001; it must be at most 8000, .*cuda:0"),
    ):
        on_device(tmp_path, hot_bytes=8001)
    with pretend_device():
        assert on_device(tmp_path, hot_bytes=None).chunks.reader.max_bytes == 600


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine without hot chunks that has cached all; devices have a GB of memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    engine = engine_on(tmp_path, hot_bytes=0)
    engine.cache_chunks(CHUNKS)
    return engine


def on_device(folder: Path, **options: Any) -> Engine:
    model = Model(hf_model("llama").to(DEVICE), byte_tokenizer(bos=True), "tiny")
    return engine_on(folder, model=model, scheduler=OnThisThread(model), **options)


@pytest.mark.parametrize("method", ["reuse", "epic", "samkv-guided", "samkv-fusion"])
def test_chunks_that_are_used_again_are_on_the_device(
    tmp_path: Path, method: str, on_cpu: Engine
) -> None:
    """The host waits no more often for them; what does not fit stays in the host's memory."""
    asked = {"follow": FOLLOW[:2], "method": method}
    expected = on_cpu.logits(TWICE, CHUNKS, **asked)
    n_waits, size = {}, on_cpu.store.stats().bytes
    with pretend_device() as device:
        for share in (0, 100, 0.8):  # of what all chunks take
            room = int(share * size)
            engine = on_device(tmp_path, hot_bytes=room)
            for _ in range(3):
                engine.logits(TWICE, CHUNKS, method="reuse")
            before = device.waits.total()
            found = engine.logits(TWICE, CHUNKS, **asked)
            n_waits[share] = device.waits.total() - before
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
            if room:
                with engine.resolve(TWICE, CHUNKS) as resolved:
                    assert all(isinstance(each, HotChunk) for each in resolved.opened)
                    assert all(isinstance(each.hot.entries, OnDevice) for each in resolved.opened)  # type: ignore[attr-defined]
                held = engine.chunks.reader.n_bytes
                assert share == 100 or room < held <= 2 * room  # on both
    assert n_waits[100] <= n_waits[0]


def test_chunks_are_copied_to_the_device_beside_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: Engine
) -> None:
    """All copies are told before the pass, layer by layer behind the key ranges, numbered from 1.

    Each layer waits for its own, whichever question told them, and whatever became of it.
    """
    gap = f"{CHUNKS[0]} and > {CHUNKS[3][:30]}\n> {CHUNKS[3][40:]}"
    chunks = {PROMPT: CHUNKS, gap: [CHUNKS[0], CHUNKS[3]], CHUNKS[0]: CHUNKS[:1]}
    expected = {prompt: on_cpu.logits(prompt, some) for prompt, some in chunks.items()}
    layer = Model.layer
    n_layers, n_chunks = on_cpu.model.n_layers, len(CHUNKS)
    copies = [f"copy {at + 1}" for at in range(n_chunks * (1 + n_layers))]
    layers = [f"layer {at}" for at in range(n_layers)]
    waits = [f"wait {n_chunks * (2 + at)}" for at in range(n_layers)]
    waiting = [each for both in zip(layers, waits, strict=True) for each in both]

    def logged(model: Model, index: int, *args: Any, **options: Any) -> Tensor:
        device.log.append(f"layer {index}")
        return layer(model, index, *args, **options)

    def asked(engine: Engine, prompt: str = PROMPT) -> list[str]:
        """What streams are told of a question, whose logits are right."""
        device.log.clear()
        found = engine.logits(prompt, chunks[prompt])
        torch.testing.assert_close(found, expected[prompt], rtol=1e-4, atol=1e-3)
        return device.log[:]

    def kinds(log: list[str]) -> list[str]:
        return [each.split()[0] for each in log]

    with pretend_device() as device:
        monkeypatch.setattr(Model, "layer", logged)
        engine, in_runs, other = (on_device(tmp_path, hot_bytes=ROOM) for _ in range(3))
        assert asked(engine) == layers  # from disk
        assert asked(engine) == copies + waiting
        assert asked(engine) == layers

        asked(other)
        device.log.clear()
        with other.resolve(PROMPT, CHUNKS):
            assert kinds(device.log) == kinds(copies)
        assert kinds(asked(other)) == kinds(waiting)

        asked(in_runs, gap)  # of which a part is gathered before the first layer
        n_copies = 2 * (1 + n_layers)
        log = kinds(asked(in_runs, gap))
        assert log[: n_copies + 2] == ["copy"] * n_copies + ["wait", "layer"]

        room = on_cpu.store.file(on_cpu.key_of(CHUNKS[0]), on_cpu.fingerprint.digest).stat().st_size  # type: ignore[attr-defined]
        for_one = on_device(tmp_path, hot_bytes=room)
        for text in (CHUNKS[0], CHUNKS[3]):  # the first one goes back before anything waits for it
            for_one.logits(text, [text])
            for_one.resolve(text, [text]).close()
        asked(for_one, CHUNKS[0])


def test_what_two_questions_bring_at_once_is_copied_once(tmp_path: Path, on_cpu: Engine) -> None:
    with pretend_device() as device:
        engine = on_device(tmp_path, hot_bytes=ROOM)
        engine.logits(PROMPT, CHUNKS)
        hot, key = engine.chunks.reader, on_cpu.key_of(CHUNKS[0])
        one, other = (hot.open(key, on_cpu.fingerprint) for _ in range(2))
        hot.bring([one])
        device.log.clear()
        hot.bring([other])
        assert isinstance(one, HotChunk) and isinstance(other, HotChunk)
        assert not device.log and other.hot is one.hot and one.hot.copied


def test_parts_of_a_chunk_on_the_host_are_gathered_after_it_was_copied_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: Engine
) -> None:
    """A chunk stays on the host if the device has no memory for it."""
    prompt, chunks = f"> {CHUNKS[3][:30]}\n> {CHUNKS[3][40:]}", [CHUNKS[3]]
    expected = on_cpu.logits(prompt, chunks)
    empty_like, waited_for = torch.empty_like, list[torch.device]()

    def without_memory(tensor: Tensor, **given: Any) -> Tensor:
        if "device" in given:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return empty_like(tensor, **given)

    with pretend_device():
        engine = on_device(tmp_path, hot_bytes=ROOM)
        engine.logits(prompt, chunks)
        monkeypatch.setattr(torch, "empty_like", without_memory)
        monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
        found = engine.logits(prompt, chunks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert waited_for == [DEVICE]


def test_a_cache_that_the_host_has_no_memory_for_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: Engine
) -> None:
    """The question that another cache makes room for goes on."""
    room = on_cpu.store.file(on_cpu.key_of(CHUNKS[0]), on_cpu.fingerprint.digest).stat().st_size  # type: ignore[attr-defined]

    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no pinned memory")

    with pretend_device():
        engine = on_device(tmp_path, hot_bytes=room)
        hot = engine.chunks.reader
        for text in (CHUNKS[0], CHUNKS[3]):
            engine.logits(text, [text])
            if text == CHUNKS[0]:
                engine.resolve(text, [text]).close()  # which is on the device now
        monkeypatch.setattr(hot, "_empty", no_memory)
        with engine.resolve(CHUNKS[3], [CHUNKS[3]]) as resolved:
            (chunk,) = resolved.opened
            assert isinstance(chunk, HotChunk) and chunk.hot.entries.device == DEVICE
        assert 0 < hot.n_bytes <= room


class Full:
    """A device that runs out of memory in the first passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_times: int) -> None:
        run = Blend.run
        self.left = n_times

        def failing(blend: Blend, *args: Any) -> Tensor:
            if self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return run(blend, *args)

        monkeypatch.setattr(Blend, "run", failing)


def test_a_device_without_memory_frees_the_chunks_and_tries_again(
    hot: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine_on(tmp_path / "kv", model=hot.model, scheduler=hot.scheduler)
    assert reused(other) == len(CHUNKS)
    expected = hot.generate(PROMPT, CHUNKS, max_new_tokens=4).text
    goes_on = other.stream(PROMPT, CHUNKS, max_new_tokens=40)
    Full(monkeypatch, 1)
    assert hot.generate(PROMPT, CHUNKS, max_new_tokens=4).text == expected
    assert hot.chunks.reader.n_bytes == other.chunks.reader.n_bytes == 0
    Full(monkeypatch, 2)
    with pytest.raises(OutOfMemory, match="^cpu has no memory left for this answer; retrieve few"):
        hot.generate(PROMPT, CHUNKS, max_new_tokens=4)
    assert "".join(goes_on).startswith(expected)
    assert hot.generate(PROMPT, CHUNKS, max_new_tokens=4).text == expected


def test_a_device_without_memory_for_chunks_frees_memory_and_tries_again(
    hot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's missed chunk is computed before the prompt."""
    prefill, left = runtime.prefill, [1]

    def full(*args: Any) -> Any:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return prefill(*args)

    new = "a chunk that nobody cached, about the ferry. "
    monkeypatch.setattr(runtime, "prefill", full)
    asked = [*CHUNKS, new]
    report = hot.generate(f"{PROMPT} {new} Q?", asked, on_miss="compute", max_new_tokens=1).report
    assert not left and report.computed_now == 1 and hot.chunks.reader.n_bytes == 0
    left.append(1)
    with pytest.raises(OutOfMemory):
        hot.cache_chunks([f"{new} And the inn."])


def test_a_token_that_the_device_has_no_memory_to_choose_ends_its_answer(
    hot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TransformersSampler, "_next", full)
    with pytest.raises(OutOfMemory, match="^cpu has no memory left for this answer"):
        hot.generate(PROMPT, CHUNKS, max_new_tokens=4)


@pytest.mark.parametrize("rule", ["none", "quest"])
def test_a_step_without_memory_is_taken_back_and_tried_once_more(
    hot: Engine, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """It fails after lower layers have added their entries. Drafts would change the lengths."""
    asked = {"max_new_tokens": 12, "eviction": rule, "draft": 0}
    expected = hot.generate(PROMPT, CHUNKS, **asked)
    layer, left = Model.layer, [1]

    def full(model: Model, index: int, *args: Any, **options: Any) -> Tensor:
        hidden = layer(model, index, *args, **options)
        if index == 2 and hidden.shape[1] == 1 and left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden

    monkeypatch.setattr(Model, "layer", full)
    found = hot.generate(PROMPT, CHUNKS, **asked)
    assert found.text == expected.text
    assert found.report.decode_kv_bytes == expected.report.decode_kv_bytes, "no entry twice"
    assert not left and hot.chunks.reader.n_bytes == 0


def test_a_step_without_memory_for_a_larger_cache_is_tried_once_more(
    hot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of a layer have their new room, and the values have none."""
    most = 128 - hot.count_tokens(PROMPT) % 128
    asked = {"max_new_tokens": most + 8, "draft": 0, "eviction": "none"}
    expected = hot.generate(PROMPT, CHUNKS, **asked).text
    room_for, calls = working_cache.room_for, []

    def full(n_entries: int, like: Tensor) -> Tensor:
        calls.append(n_entries)
        if len(calls) == 4:  # of the second layer that moves
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return room_for(n_entries, like)

    with hot.stream(PROMPT, CHUNKS, **asked) as stream:
        text = next(stream)
        monkeypatch.setattr(working_cache, "room_for", full)
        assert text + "".join(stream) == expected
    assert len(calls) > 4


def test_an_answer_that_has_no_memory_fails_alone(
    hot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers of one batch; the device holds no more entries of the longer one."""
    asked = {"max_new_tokens": 30, "draft": 0, "eviction": "none"}
    short, go_on, sizes = CHUNKS[0], threading.Event(), list[int]()
    expected = hot.generate(short, CHUNKS[:1], **asked).text
    attend, step = DenseCache.attend, runtime.decode
    most = hot.count_tokens(PROMPT) + 9

    def full(cache: DenseCache, layer: int, *args: Any) -> Tensor:
        if layer == 2 and cache.lengths[layer] == most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attend(cache, layer, *args)

    def counted(decoders: Sequence[Decoder], tokens: Any) -> tuple[Tensor, ...]:
        sizes.append(len(decoders))
        return step(decoders, tokens)

    monkeypatch.setattr(DenseCache, "attend", full)
    monkeypatch.setattr(runtime, "decode", counted)
    monkeypatch.setattr(scheduler, "LEAST_PART_S", math.inf)  # no step before both have begun
    with ThreadPoolExecutor(3) as pool:
        pool.submit(hot.scheduler.run, lambda _: go_on.wait(60))
        goes_on = pool.submit(hot.generate, short, CHUNKS[:1], **asked)
        wait_until(lambda: hot.scheduler.load.waiting == 1, "it waits first")
        fails = pool.submit(hot.generate, PROMPT, CHUNKS, **asked)
        wait_until(lambda: hot.scheduler.load.waiting == 2, "both wait")
        go_on.set()
        assert goes_on.result(60).text == expected
        with pytest.raises(OutOfMemory, match="^cpu has no memory left for this answer"):
            fails.result(60)
    at = sizes.index(2)
    assert sizes[at:].count(2) == 10 and sizes[at + 10 : at + 12] == [1, 1]


def test_what_a_rule_evicted_in_a_step_is_not_tried_again(
    hot: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Tensor:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runtime, "decode", full)
    with pytest.raises(OutOfMemory):
        hot.generate(PROMPT, CHUNKS, max_new_tokens=4, eviction="h2o")
    assert hot.chunks.reader.n_bytes == 0
    assert hot.generate(PROMPT, CHUNKS, max_new_tokens=4, eviction="h2o").text
