"""Sequences in memory over many conversations: the budget, tenants, deletions by any process."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.report import Report
from samkv_integrations.store.memory import MemoryStore
from tests.support.models import tiny_model
from tests.support.served import TEXTS

DOCUMENTS = "\n\n".join(TEXTS)


def opening(name: object) -> str:
    """The first turn of a conversation that shares nothing with others, not even its beginning."""
    return f"{name}: read.\n\n{DOCUMENTS}\n\nQ: what?\nA:"


def turn(engine: Engine, said: str, *, new_tokens: int = 4) -> tuple[str, Report]:
    answer = engine.generate(said, TEXTS, max_new_tokens=new_tokens, on_miss="text")
    return f"{said}{answer.text}\nQ: and then?\nA:", answer.report


@pytest.mark.slow
def test_a_thousand_conversations_in_room_for_twenty() -> None:
    """Bytes stay within the budget, memory flat, and no answer is another one."""
    model, rng = tiny_model("llama"), random.Random(7)
    plain = Engine(model, method="recompute", prefix_bytes=0)
    probe = Engine(model, method="recompute", prefix_bytes=2**30)
    turn(probe, turn(probe, opening("probe"))[0])
    budget = 20 * probe.sequences.n_bytes
    engine = Engine(model, method="recompute", prefix_bytes=budget)
    going: dict[int, str] = {}
    n_held, resident = [], []
    for number in range(1000):
        going[number] = opening(number)
        for each in rng.sample(sorted(going), k=min(len(going), 3)):
            going[each], report = turn(engine, going[each])
            n_held.append(report.prefix_tokens)
            assert engine.sequences.n_bytes <= budget
        if len(going) > 30:
            ended = rng.choice(sorted(going))
            said = going.pop(ended)
            if number % 25 == 0:
                assert turn(engine, said)[0] == turn(plain, said)[0]
        if number in (200, 999):
            resident.append(psutil.Process().memory_info().rss)
    assert sum(n > 100 for n in n_held) > 500, "conversations were found"
    assert sum(n == 0 for n in n_held[3:]) > 500, "and made room for others"
    assert resident[1] < 1.1 * resident[0]


def test_tenants_share_nothing() -> None:
    """The same conversation with the same model and the same scheduler."""
    mine, theirs = (
        Engine(tiny_model("llama"), MemoryStore(namespace=name), method="recompute")
        for name in ("mine", "theirs")
    )
    for number in range(3):
        said = opening("any")
        for _ in range(number + 1):
            said, report = turn(mine, said)
        assert turn(theirs, said)[1].prefix_tokens == 0
        theirs.sequences.clear()
    assert report.prefix_tokens > 0


DELETING = """
import sys
from samkv_integrations import ChunkStore
store = ChunkStore(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    store.delete(line.strip())
    print("deleted", flush=True)
"""


@pytest.fixture
def another_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Deletes a chunk of the store for each key that it reads."""
    command = [sys.executable, "-c", DELETING, str(tmp_path / "kv")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["this process", "another process"])
def test_no_entry_is_used_that_was_made_before_a_deletion(
    tmp_path: Path, another_process: subprocess.Popen[str], by: str
) -> None:
    """A text is deleted in turn 3, two hundred times, while others ask; turn 4 begins anew."""
    engine = Engine(
        tiny_model("llama"), ChunkStore(tmp_path / "kv"), method="reuse", block_size=8,
        prefix_bytes=2**26,
    )  # fmt: skip
    engine.cache_chunks(TEXTS)
    over, key = Event(), engine.key_of(TEXTS[0])

    def ask_on(name: str) -> int:
        n_asked, said = 0, opening(name)
        while not over.is_set():
            said, _ = turn(engine, said if len(said) < 1000 else opening(name))
            n_asked += 1
        return n_asked

    def delete() -> None:
        if by == "this process":
            engine.delete([key])
            return
        assert another_process.stdin is not None and another_process.stdout is not None
        another_process.stdin.write(f"{key}\n")
        another_process.stdin.flush()
        assert another_process.stdout.readline() == "deleted\n"

    with ThreadPoolExecutor(2) as threads:
        load = [threads.submit(ask_on, name) for name in ("one", "two")]
        try:
            n_went_on = 0
            for number in range(200):
                said, _ = turn(engine, opening(f"it {number}"))
                said, second = turn(engine, said)
                n_went_on += second.prefix_tokens > 100
                if number % 2:  # after the answer of turn 3, and before it ends
                    said, _ = turn(engine, said)
                    delete()
                else:
                    with engine.stream(said, TEXTS, max_new_tokens=8, on_miss="text") as third:
                        next(third, "")
                        delete()
                        text = "".join(third)
                    said = f"{said}{text}\nQ: and then?\nA:"
                assert turn(engine, said)[1].prefix_tokens == 0, number
                engine.cache_chunks(TEXTS[:1])
        finally:
            over.set()
        assert n_went_on == 200
        assert all(each.result() > 50 for each in load)
