"""Processes over one store folder, killed at random instants, and what can be seen afterwards.

    python -m benchmarks.store_kills --kills 300
    python -m benchmarks.store_kills --kills 60 --sync-kills 20 --seed 7

Writers put, replace, delete and forget chunks, readers read them, one process collects garbage, all
over one folder; `sync` runs over an embedded Chroma database beside it. Each is killed by SIGKILL
and another takes its place. At the end of a round all are killed, and a new process checks: what
was acknowledged is there and whole, what was deleted and acknowledged is not, and after `gc` the
folder holds nothing that no chunk needs: no temporary file, no byte of a text without a cache, and
the index says what the files say. Every other store has a budget of a few chunks.

The seed decides what is done to which document; the instants are the machine's. A round that fails
leaves its folder, and prints its seed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from benchmarks.store_parts import (
    TINY,
    Violation,
    check_collected,
    chunk_of,
    ids_of,
    in_fresh_process,
    key_of,
    kill,
    marker,
    markers_in,
    names,
    report,
    single_thread,
    start,
    text_of,
    version_in,
)
from samkv_integrations import ChunkStore, Engine, MemoryStore
from samkv_integrations.store import upkeep

WRITERS = 2
NAMESPACES = ("", "tenant")
"""Of the writers, one each."""
SHARED = range(900_000_000, 900_000_006)
"""Documents that every writer puts and deletes."""
ROUNDS_A_STORE = 4
KILLS_A_ROUND = 12
LIVE = 12
"""Documents that a writer keeps at a time."""
BUDGET = 40_000
"""Bytes, some ten chunks, of every other store."""


# -- what a writer says that it does ----------------------------------------------------------


class Journal:
    """What a writer is about to do and has done, a line each; it survives the writer."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, *words: object) -> None:
        """One line, in one system call."""
        os.write(self._fd, f"{' '.join(map(str, words))}\n".encode())


@dataclass
class Document:
    """What a journal says of a document: what it may be.

    allowed: versions, or None for none. versions: all that were ever begun.
    is_gone: it was deleted, and will never be put again.
    """

    allowed: set[int | None]
    versions: set[int]
    is_gone: bool = False


def documents_in(file: Path) -> dict[int, Document]:
    """The documents of a writer, by its journal."""
    found: dict[int, Document] = {}
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        done, what, *numbers = line.split()
        version = int(numbers.pop()) if what == "put" else None
        for number in map(int, numbers):
            one = found.setdefault(number, Document(allowed={None}, versions=set()))
            if version is not None:
                one.versions.add(version)
            if done == "did":
                one.allowed = {version}
                one.is_gone = version is None
            else:
                one.allowed |= {version}
    return found


# -- processes --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """Where a round takes place. budget: of its store; None for none."""

    folder: Path
    seed: int
    budget: int | None = None

    @property
    def kv(self) -> Path:
        return self.folder / "kv"

    @property
    def errors(self) -> Path:
        return self.folder / "errors.txt"

    def journal(self, slot: int) -> Path:
        return self.folder / f"journal-{slot}"

    def store(self, slot: int = 0) -> ChunkStore:
        """The store as the process in a slot opens it."""
        options = {} if self.budget is None else {"max_bytes": self.budget}
        return ChunkStore(self.kv, namespace=NAMESPACES[slot % len(NAMESPACES)], **options)


def write(world: World, slot: int, life: int) -> None:
    """Puts, replaces, deletes and forgets documents of its own, and some of everybody's."""
    dice = random.Random(f"{world.seed} {slot} {life}")
    known = documents_in(world.journal(slot))
    sure = [number for number, one in known.items() if one.allowed <= one.versions and one.allowed]
    fresh = itertools.count(slot * 1_000_000 + len(known) + 1)
    journal, store = Journal(world.journal(slot)), world.store(slot)

    def put(number: int, version: int) -> None:
        journal.say("will", "put", number, version)
        store.put(chunk_of(store, number, version))
        journal.say("did", "put", number, version)

    def remove(numbers: Sequence[int], way: str) -> None:
        journal.say("will", "remove", *numbers)
        if way == "forget":
            texts = {text_of(number) for number in numbers}
            store.forget(texts.__contains__, [ids_of(number) for number in numbers])
        else:
            store.delete(*(key_of(store, number) for number in numbers))
        journal.say("did", "remove", *numbers)

    for step in itertools.count():
        chance = dice.random()
        if chance < 0.1:
            number = dice.choice(SHARED)
            if chance < 0.06:
                store.put(chunk_of(store, number, dice.randrange(3)))
            else:
                store.delete(key_of(store, number))
        elif chance < 0.15:
            store.put_note(f"note-{slot}", f"{step}")
            store.agree_block_size(TINY, 4)
        elif chance < 0.3 and sure:
            put(dice.choice(sure), 1 + step % 200)
        elif len(sure) > LIVE or (chance < 0.45 and sure):
            dice.shuffle(sure)
            last = 3 if chance < 0.36 else 1
            gone, sure = sure[:last], sure[last:]
            remove(gone, "forget" if dice.random() < 0.3 else "delete")
        else:
            number = next(fresh)
            put(number, 0)
            sure.append(number)


def read(world: World, slot: int, life: int) -> None:
    """Reads what writers say that they have put, and does not find what they have deleted."""
    dice = random.Random(f"{world.seed} {slot} {life}")
    stores = [world.store(slot) for slot in range(len(NAMESPACES))]
    for step in itertools.count():
        writer = dice.randrange(WRITERS)
        store, journal = stores[writer % len(stores)], world.journal(writer)
        known = documents_in(journal)
        for number in [*dice.sample(sorted(known), min(8, len(known))), dice.choice(SHARED)]:
            version = version_in(store, number)
            if version is None:
                continue
            if number in known and known[number].is_gone:
                raise Violation(f"document {number} was deleted, and read")
            if number in known and version not in documents_in(journal)[number].versions:
                raise Violation(f"document {number} has version {version}, which nobody put")
            store.record(TINY, used=[key_of(store, number)])
        if step % 5 == 0:
            store.stats()
            store.keys(TINY)
            for key in store.keys(TINY)[:5]:
                store.text(key)


def collect(world: World, slot: int, life: int) -> None:
    """Garbage, again and again, while others write."""
    store = world.store(slot)
    for number in itertools.count():
        upkeep.gc(store)
        if number % 4 == 0:
            upkeep.verify(store)


ROLES: Sequence[Callable[[World, int, int], None]] = [write] * WRITERS + [read, collect]


class Crew:
    """A process for each role, which is replaced when it is killed."""

    def __init__(self, world: World, roles: Sequence[Callable[[World, int, int], None]]) -> None:
        self._world, self._roles = world, roles
        self._lives = itertools.count()
        self._pids = [self._start(slot) for slot in range(len(roles))]
        self.kills: Counter[str] = Counter()

    def _start(self, slot: int) -> int:
        role = partial(self._roles[slot], self._world, slot, next(self._lives))
        return start(role, self._world.errors)

    def kill(self, slot: int, *, replace: bool) -> None:
        """Kills the process in a slot. Raises Violation if it had ended by itself."""
        role = self._roles[slot]
        if kill(self._pids[slot]) is not None:
            self._pids[slot] = 0
            raise Violation(f"{role.__name__}: {self._world.errors.read_text('utf-8')}")
        self.kills[role.__name__] += 1
        self._pids[slot] = self._start(slot) if replace else 0

    def end(self) -> None:
        """Kills all, at once. Raises Violation if one had ended by itself."""
        ended: list[Violation] = []
        for slot, pid in enumerate(self._pids):
            try:
                if pid:
                    self.kill(slot, replace=False)
            except Violation as violation:
                ended.append(violation)
        if ended:
            raise ended[0]


# -- what must hold ---------------------------------------------------------------------------


def check(world: World) -> int:
    """Raises Violation unless the folder is as it must be after everybody was killed.

    Returns the number of chunks.
    """
    present: set[str] = set()
    for slot in range(WRITERS):
        store = world.store(slot)
        for number, one in documents_in(world.journal(slot)).items():
            version, key = version_in(store, number), key_of(store, number)
            if version is None:  # as a prompt does: its file may have gone before the index knew
                store.record(TINY, missed=[key])
            is_evicted = world.budget is not None and store.is_evicted(key, TINY)
            allowed = one.allowed | ({None} if is_evicted and not one.is_gone else set())
            if version not in allowed:
                raise Violation(f"document {number} has version {version}, not one of {allowed}")
            # Known by its text is what was evicted, and with a budget what was about to be deleted.
            is_kept = world.budget is not None and one.allowed != {None}
            if version is not None or is_evicted or is_kept:
                present.add(marker(number))
    for slot, number in itertools.product(range(len(NAMESPACES)), SHARED):
        version_in(world.store(slot), number)
        present.add(marker(number))
    return check_nothing_left(world, present)


def check_nothing_left(world: World, present: set[str]) -> int:
    """After `gc` there is nothing over. present: markers of texts that may be there."""
    notes = [f"note-{slot}" for slot in range(WRITERS)]
    notes += [Path(name).stem for name in os.listdir(world.kv) if name.startswith("chroma-owner")]
    stores = [world.store(slot) for slot in range(len(NAMESPACES))]
    held = check_collected(world.kv, stores, notes)
    if left := markers_in(world.kv) - present:
        raise Violation(f"texts without a cache: {names(left)}")
    if world.budget is not None and sum(held.values()) > world.budget:
        raise Violation(f"{sum(held.values())} bytes, with a budget of {world.budget}")
    return len(held)


# -- sync -------------------------------------------------------------------------------------


@cache
def _model():  # noqa: ANN202
    from samkv_integrations.runtimes.transformers import load_model

    return load_model("builtin", device="cpu", dtype="float32")


def _link(world: World):  # noqa: ANN202
    from samkv_integrations.chroma.client import open_collection
    from samkv_integrations.chroma.link import ChromaLink

    collection = open_collection(world.folder / "chroma", "town", create=True)
    return ChromaLink(collection, Engine(_model(), world.store(), block_size=8))


def sync(world: World, slot: int, life: int) -> None:
    """Adds and deletes records, also past the link, and syncs."""
    dice = random.Random(f"{world.seed} {slot} {life}")
    link = _link(world)
    (world.folder / f"ready-{life}").touch()
    for step in itertools.count():
        number = 800_000_000 + dice.randrange(1_000_000)
        one = {"ids": [str(number)], "embeddings": [[1.0, 0.0]]}
        held = [str(id_) for id_ in link.collection.get(include=[])["ids"]]
        chance = dice.random()
        if chance < 0.3:
            link.add(one["ids"], [text_of(number)], one["embeddings"])
        elif chance < 0.5:  # as another program does
            link.collection.add(**one, documents=[text_of(number)])
        elif chance < 0.65 and held:
            link.delete([dice.choice(held)])
        elif (chance < 0.75 and held) or len(held) > 8:
            link.collection.delete(ids=dice.sample(held, 1 + len(held) // 4))
        if step % 2:
            link.sync(grace_s=0)


def check_sync(world: World) -> int:
    """Raises Violation unless a `sync` brings caches and records into line."""
    link = _link(world)
    first = link.sync(grace_s=0)
    again = link.sync(grace_s=0)
    if again.n_cached or again.n_linked or again.n_pruned:
        raise Violation(f"a second sync has something to do: {again}, after {first}")
    found = link.collection.get(include=["documents"])
    texts = [str(text) for text in found["documents"] or ()]
    engine = link.engine
    wanted = {engine.key_of(text) for text in texts}
    if set(engine.store.keys(engine.fingerprint)) != wanted:
        raise Violation(f"{len(wanted)} texts, other caches")
    if missing := [text for text in texts if not engine.is_cached(text)]:
        raise Violation(f"no sound cache: {missing}")
    if texts:
        fresh = Engine(_model(), MemoryStore(), block_size=8)
        fresh.cache_chunks(texts[:3])
        prompt = "\n\n".join([*texts[:3], "What is the secret word?"])
        answers = [
            one.generate(prompt, texts[:3], max_new_tokens=8, method="reuse").text
            for one in (engine, fresh)
        ]
        if answers[0] != answers[1]:
            raise Violation(f"the answer {answers[0]!r} is not {answers[1]!r}")
    return check_nothing_left(world, {text[:20] for text in texts} | _markers_of_writers(world))


def _markers_of_writers(world: World) -> set[str]:
    known = documents_in(world.journal(0))
    return {marker(number) for number in [*known, *SHARED]}


# -- rounds -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of many kills. chunks: checked at the ends of rounds, all rounds together."""

    phase: str
    seed: int
    kills: int
    rounds: int
    chunks: int
    of_roles: str
    violations: int
    seconds: float


def worlds(base: Path, seed: int, phase: str) -> Iterator[World]:
    """A world for each round: several rounds in a store, every other store with a budget."""
    for number in itertools.count():
        store = number // ROUNDS_A_STORE
        folder = base / f"{phase}-{store}"
        folder.mkdir(exist_ok=True)
        has_budget = store % 2 and phase == "store"
        yield World(
            folder=folder, seed=seed * 10_000 + number, budget=BUDGET if has_budget else None
        )
        if number % ROUNDS_A_STORE == ROUNDS_A_STORE - 1:
            shutil.rmtree(folder)


def one_round(world: World, most: int) -> Counter[str]:
    """Kills up to ``most`` processes, one after the other, and the others at the end."""
    dice = random.Random(world.seed)
    crew = Crew(world, ROLES)
    try:
        for _ in range(max(0, most - len(ROLES))):
            time.sleep(dice.uniform(0, 0.06))
            crew.kill(dice.randrange(len(ROLES)), replace=True)
        time.sleep(dice.uniform(0, 0.06))
    finally:
        crew.end()
    return crew.kills


def one_round_of_sync(world: World, most: int) -> Counter[str]:
    """Kills ``sync`` some instants after it began to work, and a writer with it."""
    dice = random.Random(world.seed)
    crew = Crew(world, [write, sync])
    try:
        for life in range(1, 1 + max(1, most // 2)):
            limit = time.monotonic() + 60
            while not list(world.folder.glob("ready-*")):
                if time.monotonic() > limit:
                    raise Violation("sync does not begin")
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 0.5))
            for file in world.folder.glob("ready-*"):
                file.unlink()
            crew.kill(1, replace=life < most // 2)
    finally:
        crew.end()
    return crew.kills


PHASES = {"store": (one_round, check, KILLS_A_ROUND), "sync": (one_round_of_sync, check_sync, 8)}


def measure(phase: str, kills: int, seed: int, base: Path) -> tuple[Row, list[str]]:
    """One row, and what was violated."""
    work, after, most = PHASES[phase]
    began, done, n_chunks, violations = time.monotonic(), Counter[str](), 0, []
    n_rounds = 0
    for world in worlds(base, seed, phase):
        if done.total() >= kills or len(violations) > 5:
            break
        n_rounds += 1
        try:
            done += work(world, min(most, max(kills - done.total(), 4)))
            n_chunks += in_fresh_process(partial(after, world), world.folder)
        except Violation as violation:
            kept = Path(tempfile.mkdtemp(prefix="store-kills-"))
            shutil.copytree(world.folder, kept, dirs_exist_ok=True)
            shutil.rmtree(world.folder)
            world.folder.mkdir()
            violations.append(f"{phase}, seed {seed}, round {n_rounds} in {kept}: {violation}")
    row = Row(
        phase=phase, seed=seed, kills=done.total(), rounds=n_rounds, chunks=n_chunks,
        of_roles=", ".join(f"{role} {count}" for role, count in sorted(done.items())),
        violations=len(violations), seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    return row, violations


def main() -> None:
    """The table, on standard output; ends with 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_kills")
    parser.add_argument("--kills", type=int, default=300, help="of writers, readers and gc")
    parser.add_argument("--sync-kills", type=int, default=60, help="of sync, and of writers by it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="folder to work in, else a temporary one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    single_thread()
    if chosen.sync_kills:
        import chromadb  # noqa: F401  before processes are forked, as each would import it

        _model()
    rows, violations = [], []
    with tempfile.TemporaryDirectory(dir=chosen.dir) as base:
        for phase, kills in (("store", chosen.kills), ("sync", chosen.sync_kills)):
            if kills:
                row, found = measure(phase, kills, chosen.seed, Path(base))
                rows.append(asdict(row))
                violations += found
    sys.stderr.writelines(f"VIOLATED: {one}\n" for one in violations)
    report("store kills", rows, chosen.json)
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
