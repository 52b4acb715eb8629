"""An engine of one machine answers from what another one has put into a remote tier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.engine import Engine
from samkv_integrations.errors import CacheMiss
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.objects import Objects
from samkv_integrations.store.tier import HEAD_BYTES
from tests.support.models import tiny_model

SECRET = bytes(32)
TEXTS = [f"Document {n}: the harbour of town number {n} is closed at night." for n in range(12)]
PROMPT = "Read. " + "\n\n".join(TEXTS[:8]) + "\n\nWhich harbour is open?"
Machine = Callable[..., Engine]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Makes engines as of machines with folders of their own."""

    def make(name: str, **options: Any) -> Engine:
        remote = f"file://{tmp_path}/shared"
        store = ChunkStore(tmp_path / name, remote=remote, secret=SECRET)
        return Engine(tiny_model("llama"), store, prefix_bytes=0, method="reuse", **options)

    return make


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Keys of chunks that were read of the remote tier, and how many bytes."""
    seen: list[tuple[str, int]] = []
    read = Objects.read

    def counted(self: Objects, path: str, n_bytes: int | None = None) -> bytes:
        data = read(self, path, n_bytes)
        if path.endswith(".safetensors") and n_bytes != HEAD_BYTES:
            seen.append((path[-44:-12], len(data)))
        return data

    monkeypatch.setattr(Objects, "read", counted)
    return seen


def test_a_new_machine_fetches_what_a_question_needs_and_once(
    machine: Machine, fetched: list[tuple[str, int]]
) -> None:
    first = machine("first")
    first.cache_chunks(TEXTS)
    expected = first.generate(PROMPT, max_new_tokens=8)
    second = machine("second")
    # retrieved, as a connector announces it: the texts of other machines are not learned yet
    answer = second.generate(PROMPT, chunks=TEXTS[:8], max_new_tokens=8)
    keys = {first.key_of(text) for text in TEXTS[:8]}
    assert {key for key, _ in fetched} == keys
    assert len(fetched) == 8
    assert sum(n for _, n in fetched) == second.store.stats().bytes
    assert answer.report.reused == 8
    assert answer.text == expected.text
    fetched.clear()
    again = second.generate(PROMPT, chunks=TEXTS[:8], max_new_tokens=8)
    assert fetched == []
    assert (again.text, again.report.reused) == (expected.text, 8)


@pytest.mark.parametrize("announced", [True, False])
def test_chunks_of_a_prompt_come_together(
    announced: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits for the others: one after the other they would time out."""
    first, second = machine("first"), machine("second")
    first.cache_chunks(TEXTS[:8])
    assert isinstance(second.store, ChunkStore) and second.store.shared
    second.store.shared.refresh()
    barrier, read = threading.Barrier(8, timeout=8), Objects.read

    def together(self: Objects, path: str, n_bytes: int | None = None) -> bytes:
        if path.endswith(".safetensors") and n_bytes != HEAD_BYTES:
            barrier.wait()
        return read(self, path, n_bytes)

    monkeypatch.setattr(Objects, "read", together)
    if announced:
        second.announce(TEXTS[:8])
    assert second.generate(PROMPT, max_new_tokens=1).report.reused == 8


def test_without_the_remote_tier_answers_come_from_text(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine("first"), machine("second")
    first.cache_chunks(TEXTS)
    second.generate(TEXTS[0], chunks=TEXTS[:1], max_new_tokens=1)

    def fail(self: Objects, path: str, *_: Any) -> bytes:
        raise CacheMiss("io", "nobody answers")

    monkeypatch.setattr(Objects, "read", fail)
    monkeypatch.setattr(Objects, "exists", fail)
    whole = first.generate(PROMPT, max_new_tokens=8, method="recompute").text
    answer = second.generate(
        PROMPT, chunks=TEXTS[:8], max_new_tokens=8, method="recompute", on_miss="text"
    )
    assert answer.text == whole
    assert answer.report.chunk_misses == {"io": 7}
    computed = second.generate(PROMPT, chunks=TEXTS[:8], max_new_tokens=8, on_miss="compute")
    assert computed.text == first.generate(PROMPT, max_new_tokens=8).text
