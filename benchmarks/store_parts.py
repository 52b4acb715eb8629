"""What the harnesses of stores share: tiny chunks, processes that may be killed, what is left over.

A chunk follows from the number of its document, so that whoever reads one knows what it must hold.
The text of each begins with a marker that occurs nowhere else: what a store still has of a deleted
document is found by reading the bytes of its folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from benchmarks.commands import markdown_table as table
from benchmarks.models import random_model
from benchmarks.run_settings import machine
from samkv_integrations import ChunkStore
from samkv_integrations.cli.formatting import to_json
from samkv_integrations.errors import CacheMiss
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    BlockMeans,
    ChunkStatistics,
    cache_of,
    cache_shape,
    entry_format_of,
)
from samkv_integrations.runtimes.transformers.runtime import Model
from samkv_integrations.store import upkeep
from samkv_integrations.store.chunk import ChunkCache, ChunkRef, Fingerprint

HANG_S = 60.0
"""A process that takes longer than this for what takes milliseconds hangs."""

_MARKER = re.compile(rb"mark[g-v]{16}")
_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")  # no keys, nor digests
_CHUNK_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors")
_OTHER_NAMES = re.compile(r"store\.json|secret|index-[0-9a-f-]+\.sqlite(-journal)?|index\.lock")
_TEMPORARY_S = 3600


class Violation(Exception):
    """The store did what it must never do."""


# -- documents and their chunks ---------------------------------------------------------------


def fingerprint(weights: str = "w0") -> Fingerprint:
    """Of a model that needs a few bytes a token."""
    shape = {"n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8}
    sizes = {"block_size": 4, "n_init": 1, "n_local": 2, "store_bits": 4}
    named = {"model": "tiny", "weights": weights, "dtype": "float32"}
    known: dict[str, Any] = {**shape, **sizes, **named}
    others = {f.name: "" for f in fields(Fingerprint) if f.name != "format_version"}
    return Fingerprint(**{**others, **known})


TINY = fingerprint()


def marker(number: int) -> str:
    """20 characters that begin the text of a document, and occur in no other."""
    digest = blake2b(str(number).encode(), digest_size=8).hexdigest()
    return f"mark{digest.translate(_LETTERS)}"


def text_of(number: int) -> str:
    """The text of a document; lengths differ."""
    return f"{marker(number)} begins document {number}, {'and so on, ' * (number % 7)}to the end."


def ids_of(number: int) -> list[int]:
    """The token ids of a document: its bytes."""
    return list(text_of(number).encode())


def key_of(store: ChunkStore, number: int, made_by: Fingerprint = TINY) -> str:
    """The key that the chunk of a document has in a store."""
    return store.key(made_by, ids_of(number))


def chunk_of(
    store: ChunkStore, number: int, version: int = 0, made_by: Fingerprint = TINY
) -> ChunkCache:
    """The chunk of a document. version: chunks of several have the same key and other content."""
    chunk = random_chunk(
        store, text_of(number), ids_of(number), made_by, seed=number * 256 + version
    )
    chunk.entries[0, 0, 0] = version
    return chunk


def random_chunk(
    store: ChunkStore, text: str, ids: Sequence[int], made_by: Fingerprint, *, seed: int
) -> ChunkCache:
    """A chunk of the right shapes whose content follows from the seed."""
    n_tokens, form = len(ids), entry_format_of(made_by)
    blocks = made_by.scheme.of(n_tokens)
    n_layers, n_groups, dim = made_by.n_layers, made_by.n_kv_heads, made_by.head_dim
    n_middle = len(blocks.middle_blocks)
    random = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) + 0.5

    middle = torch.full((n_layers,), blocks.middle_blocks.start if n_middle else -1)
    return cache_of(
        ChunkRef(key=store.key(made_by, ids), text=text, token_ids=tuple(ids)),
        made_by,
        entries=codes(n_layers, n_tokens, form.n_bytes),
        key_range=numbers(n_layers, *form.range_shape(n_tokens)).half(),
        local_query=numbers(n_layers, made_by.n_heads, dim),
        statistics=ChunkStatistics(
            block_max=middle.int(),
            block_min=middle.int(),
            outliers=torch.zeros(n_layers, n_tokens, dtype=torch.bool),
            stable=torch.zeros(n_layers, dtype=torch.bool),
        ),
        block_means=BlockMeans(
            codes=codes(n_layers, n_middle, n_groups, dim).view(torch.int8),
            scale=numbers(n_layers, n_middle, n_groups).half(),
        ),
    )


def version_in(store: ChunkStore, number: int, made_by: Fingerprint = TINY) -> int | None:
    """The version of a document's chunk that the store holds, None if it holds none.

    Raises Violation unless all of it is as it was put.
    """
    key = key_of(store, number, made_by)
    try:
        with store.open(key, made_by, ids_of(number)) as opened:
            opened.verify()
            entries = np.empty(cache_shape(made_by, opened.n_tokens).entries, np.uint8)
            opened.read_layers(0, list(entries))
            version = int(entries[0, 0, 0])
            expected = chunk_of(store, number, version, made_by)
            is_same = [np.array_equal(entries, expected.entries)]
            is_same += [
                np.array_equal(opened.array(name).data, array.data)
                for name, array in expected.on_demand.items()
            ]
    except CacheMiss as miss:
        if miss.reason != "absent":
            raise Violation(f"document {number} is not whole: {miss}") from miss
        return None
    if not all(is_same):
        raise Violation(f"document {number}: wrong content, {is_same}")
    return version


def tiny_model(seed: int = 0) -> Model:
    """A model of random weights that answers within milliseconds; the reference tokenizer."""
    shape = {
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 100_000,
    }  # fmt: skip
    return random_model(shape, name="tiny", dtype="float32", device="cpu", seed=seed)


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def open_descriptors() -> int:
    """Files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


# -- processes --------------------------------------------------------------------------------


def start(call: Callable[[], None], errors: Path) -> int:
    """A forked process that runs ``call`` and ends; what it raises is written to ``errors``.

    Forked, because importing torch takes seconds and a kill shall cost milliseconds. So nothing
    here may have begun a thread before.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 0
    try:
        _end_with_parent()
        call()
    except BaseException:  # also what ends a process, which here is a mistake
        code = 1
        with errors.open("a", encoding="utf-8") as file:
            file.write(f"--- process {os.getpid()}\n{traceback.format_exc()}\n")
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    """This process is killed when the one that started it ends, however it does."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def die() -> NoReturn:
    """Kills this process, as the machine would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def kill(pid: int) -> int | None:
    """Kills a process; returns its own exit code if it had ended before, None if it was killed."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def finish(pid: int, timeout_s: float = HANG_S) -> int:
    """Waits for a process; returns its exit code, or minus the signal that it died by.

    Raises Violation if it hangs.
    """
    limit = time.monotonic() + timeout_s
    pause_s = 0.0002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            kill(pid)
            raise Violation(f"a process hangs: not done after {timeout_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


def in_fresh_process(call: Callable[[], Any], folder: Path, timeout_s: float = HANG_S) -> Any:
    """What ``call`` returns in a forked process, as JSON; raises Violation if it raises."""
    result, errors = folder / "result.json", folder / "errors.txt"
    result.unlink(missing_ok=True)
    errors.unlink(missing_ok=True)

    def write() -> None:
        result.write_text(json.dumps(call()))

    code = finish(start(write, errors), timeout_s)
    if code or not result.exists():
        why = errors.read_text("utf-8") if errors.exists() else f"it ended with {code}"
        raise Violation(why)
    return json.loads(result.read_text("utf-8"))


# -- what a folder holds ----------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, int]:
    """Path in the folder -> size, of all files. They may come and go meanwhile."""
    found = {}
    for root, _, file_names in os.walk(folder):
        for file in (Path(root, name) for name in file_names):
            with suppress(FileNotFoundError):
                found[str(file.relative_to(folder))] = file.lstat().st_size
    return found


def markers_in(folder: Path) -> set[str]:
    """Markers of texts anywhere in the bytes of the folder's files, as text or as token ids.

    Temporary files are left out: what was being written by a process that was killed.
    """
    found: set[bytes] = set()
    for name in (name for name in files_in(folder) if not name.endswith(".tmp")):
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:  # of a process that has just ended
            continue
        for part in (data, *(data[start::4] for start in range(4))):
            found.update(_MARKER.findall(part))
    return {one.decode() for one in found}


def strangers_in(folder: Path, notes: Collection[str] = ()) -> list[str]:
    """Files that a store has no use for once nobody writes and what was left was collected.

    notes: names of the notes that may be there.
    """
    strangers = []
    for name in files_in(folder):
        is_note = name.endswith(".json") and name != "store.json"
        if is_note:
            is_known = name[: -len(".json")] in notes
        elif name.endswith(".tmp"):  # of a process that was killed; `gc` deletes it in an hour
            is_known = (folder / name).stat().st_mtime > time.time() - _TEMPORARY_S
        else:
            is_known = bool(_OTHER_NAMES.fullmatch(name) or _CHUNK_NAME.fullmatch(name))
        if not is_known:
            strangers.append(name)
    return strangers


def chunk_files(folder: Path) -> dict[str, int]:
    """Key -> size of its file; the sum if there are several, of several fingerprints."""
    sizes: dict[str, int] = {}
    for name, size in files_in(folder).items():
        if _CHUNK_NAME.fullmatch(name):
            sizes[Path(name).stem] = sizes.get(Path(name).stem, 0) + size
    return sizes


# -- results ----------------------------------------------------------------------------------


def check_collected(
    folder: Path, stores: Sequence[ChunkStore], notes: Collection[str] = ()
) -> dict[str, int]:
    """The chunk files that there are after `gc`.

    stores: all namespaces of the folder. notes: names of the notes that may be there.

    Raises Violation if there is a file that no chunk needs, or the index does not say what the
    files say.
    """
    upkeep.gc(stores[0])
    if strangers := strangers_in(folder, notes):
        raise Violation(f"left over: {names(strangers)}")
    held = chunk_files(folder)
    known = {key for store in stores for key in store.keys()}
    if known != held.keys():
        raise Violation(f"files {names(held.keys() - known)}, index {names(known - held.keys())}")
    stats, n_files = stores[0].stats(everyone=True), len(list(folder.glob("*/??/*.safetensors")))
    if (stats.n_chunks, stats.bytes) != (n_files, sum(held.values())):
        raise Violation(f"{stats}, but {n_files} files of {sum(held.values())} bytes")
    return held


def report(
    command: str, rows: Sequence[Mapping[str, Any]], json_file: Path | None, left: int = 1
) -> None:
    """Rows as a table on standard output, and as JSON where it was asked for."""
    if json_file:
        text = to_json(command, None, rows, {"hardware": machine()})
        json_file.write_text(f"{text}\n", encoding="utf-8")
    cells = [[str(value) for value in row.values()] for row in rows]
    sys.stdout.write(f"{table(tuple(rows[0]), cells, left=left)}\n")


def single_thread() -> None:
    """Before anything is computed: processes are forked, and threads are not."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)


def names(values: Iterable[object]) -> str:
    """A short list for a message."""
    listed = sorted(map(str, values))
    return f"{len(listed)}: {', '.join(listed[:5])}{' ...' if len(listed) > 5 else ''}"
