"""Workers on Ray that end in the middle of their work, and tell what they computed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samkv_integrations.frameworks.engine_args import ModelSource
from samkv_integrations.ingest.cluster import CacheWorker
from samkv_integrations.runtimes.transformers import Model
from samkv_integrations.store.disk import ChunkStore

PUTS = 2
"""Files that a worker which is killed has written of its batch by then."""


class WatchedWorker(CacheWorker):
    """Writes down what it computes, in a folder beside the store.

    The first worker to find the file ``kill`` there is killed in the middle of a batch, when some
    of its files are written. A batch with the text of the file ``deadly`` kills every worker.
    """

    def __init__(self, source: ModelSource, probe_key: str) -> None:
        super().__init__(source, probe_key)
        assert source.kv_dir is not None
        self._folder = Path(source.kv_dir).parent
        deadly = self._folder / "deadly"
        self._deadly = deadly.read_text() if deadly.is_file() else None
        Model.prefill = self._watched(Model.prefill)
        ChunkStore.put = self._killed_at(ChunkStore.put)

    def _watched(self, prefill: Any) -> Any:
        def watched(model: Model, chunks: Any, *rest: Any) -> Any:
            if any(chunk.text == self._deadly for chunk in chunks):
                end_self()
            with (self._folder / "computed").open("a") as log:
                log.write("".join(f"{os.getpid()} {chunk.key}\n" for chunk in chunks))
            return prefill(model, chunks, *rest)

        return watched

    def _killed_at(self, put: Any) -> Any:
        n_put = 0

        def counted(store: ChunkStore, chunk: Any) -> None:
            nonlocal n_put
            put(store, chunk)
            n_put += 1
            if n_put >= PUTS:
                try:
                    (self._folder / "kill").unlink()
                except FileNotFoundError:
                    return
                end_self()

        return counted


def end_self() -> None:
    """What an operating system does that wants the memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def computed_by(folder: Path) -> Mapping[str, list[str]]:
    """Key of a chunk -> the processes that computed it, in order."""
    found: dict[str, list[str]] = {}
    for line in (folder / "computed").read_text().splitlines():
        process, key = line.split()
        found.setdefault(key, []).append(process)
    return found
