"""What a runtime raises reaches those who wait, and whoever asks next gets an answer."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.errors import OutOfMemory
from samkv_integrations.methods.epic import EPIC, EpicRecompute
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.transformers.passes.working_cache import DenseCache
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.chunk_files import flip
from tests.support.laws import CHUNKS
from tests.support.models import tiny_model
from tests.support.table_runtime import TableRuntime, TableSequence

TEXT = "The harbour of Ostmere was built in 1874."
PROMPT = f"{TEXT} Question: when?\nAnswer:"
PATIENCE_S = 60


def outcome(call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises; fails if it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it hangs"
    return found[0]


def answers(engine: Engine) -> bool:
    """Whether a request is answered."""
    return isinstance(outcome(lambda: engine.generate(PROMPT, max_new_tokens=3).text), str)


class Endless(TableRuntime):
    """Its answers never end by themselves."""

    def _logits(self, sequence: TableSequence) -> Any:
        logits = super()._logits(sequence)
        logits[257] = 0.0
        return logits


def abandon_one(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=500)
    next(stream)
    stream.close()


def test_a_model_that_cannot_tell_its_generation_when_an_answer_is_kept() -> None:
    class Runtime(Endless):
        fails = False

        def generation(self) -> int:
            if self.fails and threading.current_thread().name == "samkv-model":
                self.fails = False
                raise RuntimeError("dictionary changed size during iteration")
            return 0

    runtime = Runtime()
    engine = Engine(runtime, MemoryStore())
    stream = engine.stream(PROMPT, max_new_tokens=500)
    next(stream)
    runtime.fails = True
    stream.close()
    assert answers(engine) and not runtime.fails


@pytest.mark.parametrize("method", ["put_back", "close"])
def test_a_sequence_that_fails_when_it_is_released(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real, calls = Engine(Endless(), MemoryStore()), getattr(TableSequence, method), [0]

    def failing(self: TableSequence) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("CUDA error")
        return real(self)

    monkeypatch.setattr(TableSequence, method, failing)
    abandon_one(engine)
    assert answers(engine) and calls[0] > 0


def test_a_runtime_that_gives_too_few_logits() -> None:
    class Runtime(TableRuntime):
        n_steps = 0

        def decode(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Any:
            self.n_steps += 1
            found = super().decode(sequences, tokens)
            return found[:-1] if self.n_steps == 1 else found

    engine = Engine(Runtime(), MemoryStore())
    assert isinstance(outcome(lambda: engine.generate(PROMPT, max_new_tokens=3)), Exception)
    assert answers(engine)


def test_a_runtime_that_fails_between_jobs() -> None:
    class Runtime(TableRuntime):
        n_turns = 0

        def use_threads(self, n_threads: int) -> None:
            self.n_turns += 1
            if self.n_turns == 2:
                raise RuntimeError("no threads")

    runtime = Runtime()
    engine = Engine(runtime, MemoryStore())
    outcome(lambda: engine.generate(PROMPT, max_new_tokens=3).text)
    assert answers(engine) and runtime.n_turns > 2


def test_an_answer_that_evicts_fails_although_another_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of a step that cannot be repeated is not forgotten for the answer before it."""
    engine = Engine(tiny_model("llama"), MemoryStore(), prefix_bytes=0, prefix="bos")
    prompt = "Read:\n\n" + "\n\n".join(CHUNKS) + "\n\nQuestion: why?\nAnswer:"
    rule = replace(EVICTIONS["streaming-llm"], budget_ratio=0.2)
    decode, attend, state = Model.decode, DenseCache.attend, ["waits"]

    def failing_attend(self: DenseCache, layer: int, *given: Any) -> torch.Tensor:
        if layer == 2 and state == ["two"] and not self.can_rewind:
            state[0] = "failed"
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attend(self, layer, *given)

    def counted(self: Model, sequences: Sequence[Any], tokens: Any) -> Any:
        if len(sequences) == 2 and state == ["waits"]:
            state[0] = "two"
        return decode(self, sequences, tokens)

    monkeypatch.setattr(DenseCache, "attend", failing_attend)
    monkeypatch.setattr(Model, "decode", counted)
    options: dict[str, Any] = {"method": "recompute", "max_new_tokens": 40}
    plain = engine.stream(prompt, eviction="none", **options)
    evicting = engine.stream(prompt, eviction=rule, **options)
    assert "".join(plain)
    if state != ["waits"]:  # else one had ended before the other began
        with pytest.raises(OutOfMemory):
            "".join(evicting)
        assert state == ["failed"]


@dataclass(frozen=True, kw_only=True)
class Broken(EpicRecompute):
    """A method whose estimate raises."""

    def most_ratio(self, n_context: int, n_chunks: int) -> float:
        raise ValueError("broken method")


def test_what_fails_before_an_answer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed, and listeners hear of it."""
    engine = Engine(TableRuntime(), ChunkStore(tmp_path / "kv"))
    engine.cache_chunks([TEXT])
    heard: list[Any] = []
    raised: list[Any] = []
    engine.listeners.append(heard.append)
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    with pytest.raises(ValueError, match="broken method"):
        engine.generate(f"{TEXT} Q?", method=replace(EPIC, name="broken", recompute=Broken()))
    gc.collect()
    assert [type(each.error) for each in heard] == [ValueError] and not raised
    files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert not [file for file in files if file.startswith(str(tmp_path)) and "safetensors" in file]


def test_a_damaged_layer_is_a_miss_on_any_runtime(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "kv")
    engine = Engine(TableRuntime(), store)
    (key,) = engine.cache_chunks([TEXT])
    flip(store.file(key, engine.fingerprint.digest))
    answer = engine.generate(f"{TEXT}\nQ?", method="reuse", on_miss="text")
    assert answer.report.chunk_misses == {"corrupt": 1}
