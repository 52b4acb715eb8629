"""Damaged and forged chunk files: each is a miss or read as it was; never a crash or a hang."""

from __future__ import annotations

import faulthandler
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from samkv_integrations.cache.chunk import Fingerprint
from samkv_integrations.cache.files.chunk_file import ChunkFile
from samkv_integrations.errors import MISS_REASONS, CacheMiss
from tests.support.chunk_files import NAMESPACE, SECRET, open_file, read_all
from tests.support.mutations import CHUNK, CONTENTS, OBSTACLES, SOUND, clear

WATCHED_S = 120  # for a hundred files; a hang is told, with where it hangs
HEAD = (CHUNK.key, NAMESPACE, CHUNK.fingerprint, CHUNK.token_ids.tolist(), CHUNK.text)


def blocks_of(layer: int, blocks: list[int]) -> Callable[[ChunkFile], object]:
    def read(stored: ChunkFile) -> object:
        n_rows = int(CHUNK.blocks.lengths[blocks].sum())
        out = torch.empty(n_rows, CHUNK.entries.shape[-1], dtype=torch.uint8)
        stored.read_blocks(layer, blocks, out)
        return out

    return read


READS: dict[str, Callable[[ChunkFile], Any]] = {
    "token_ids": lambda stored: stored.token_ids,
    "statistics": lambda stored: stored.statistics(),
    "text": lambda stored: stored.text(),
    "local_query": lambda stored: stored.local_query(),
    "block_means": lambda stored: stored.block_means(),
    "key_range": lambda stored: stored.key_range(),
    "all": read_all,
    "some blocks": blocks_of(1, [1, 2, 4]),
    "one block": blocks_of(0, [3]),
    "chunk": lambda stored: stored.chunk(),
    "verify": lambda stored: stored.verify(),
}


def content(found: object) -> object:
    """Something that can be compared: tensors become dtype, shape and bytes."""
    if isinstance(found, torch.Tensor):
        data = found.contiguous().flatten().view(torch.uint8) if found.numel() else found
        return found.dtype, found.shape, data.tolist()
    if is_dataclass(found) and not isinstance(found, Fingerprint):
        return {each.name: content(getattr(found, each.name)) for each in fields(found)}
    return found


def read(path: Path, name: str) -> object:
    with open_file(path, CHUNK) as stored:
        return content(READS[name](stored))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "chunk.safetensors"


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, object]:
    """What each read of the sound file gives."""
    clear(path)
    path.write_bytes(SOUND)
    found = {name: read(path, name) for name in READS}
    assert found["chunk"] == content(CHUNK) and found["all"] == content(CHUNK.entries)
    return found


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Ends the process with a traceback if it hangs: a read that waits may not be interruptible."""
    faulthandler.dump_traceback_later(WATCHED_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def outcome(path: Path, expected: dict[str, object], rng: random.Random) -> str:
    """``sound``, or the reasons for which reads were refused. Fails on a wrong tensor."""
    reasons: set[str] = set()
    names = rng.sample(list(READS), len(READS))
    try:
        with open_file(path, CHUNK) as stored:
            for name in names:
                try:
                    found = content(READS[name](stored))
                except CacheMiss as miss:
                    reasons.add(miss.reason)
                else:
                    assert found == expected[name], name
    except CacheMiss as miss:
        reasons.add(miss.reason)
    try:
        with ChunkFile(path, secret=SECRET) as file:
            head = (
                file.key,
                file.layout.namespace,
                file.layout.fingerprint,
                file.token_ids.tolist(),
                file.text(),
            )
    except CacheMiss as miss:
        assert reasons, f"only who expects nothing is refused: {miss}"
        reasons.add(miss.reason)
    else:
        # A sound file of another chunk has a sound head.
        assert head == HEAD or reasons & {"fingerprint", "tokens"}
    assert reasons <= set(MISS_REASONS)
    return " ".join(sorted(reasons)) or "sound"


def fuzz(path: Path, expected: dict[str, object], n_files: int, seed: int) -> Counter[str]:
    """How many of ``n_files`` mutated files came to what; by mutation and outcome."""
    rng, counts = random.Random(seed), Counter[str]()
    for n in range(n_files):
        if n % 100 == 0:
            faulthandler.dump_traceback_later(WATCHED_S, exit=True, file=sys.__stderr__)
        clear(path)
        if rng.random() < 0.1:
            name = rng.choice(list(OBSTACLES))
            OBSTACLES[name].make(path)
        else:
            mutate = rng.choice(CONTENTS)
            name, data = mutate.__name__, mutate(rng)
            path.write_bytes(data)
        found = outcome(path, expected, rng)
        is_same = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**20
        if found == "sound":
            assert name == "unreadable" or (is_same and path.read_bytes() == SOUND), name
        counts[f"{name}: {found}"] += 1
    clear(path)
    return counts


@pytest.mark.parametrize("seed", range(2))
def test_a_few_hundred_mutated_files(path: Path, expected: dict[str, object], seed: int) -> None:
    counts = fuzz(path, expected, 300, seed)
    assert {name.split(":")[0] for name in counts} >= {mutate.__name__ for mutate in CONTENTS}


@pytest.mark.slow
def test_ten_thousand_mutated_files(path: Path, expected: dict[str, object]) -> None:
    counts = fuzz(path, expected, 10_000, 15)
    assert counts.total() == 10_000
    assert {name.split(":")[0] for name in counts} >= set(OBSTACLES)


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_no_file_is_a_miss(path: Path, expected: dict[str, object], name: str) -> None:
    """It is neither waited for nor followed."""
    clear(path)
    OBSTACLES[name].make(path)
    assert outcome(path, expected, random.Random(1)) in OBSTACLES[name].reasons
    clear(path)
