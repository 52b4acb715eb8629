"""Stores of one secret, in which the same chunk has the same key and the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

from samkv_integrations import ChunkStore
from samkv_integrations.store.index import Entry


def twin_folders(folder: Path, *names: str) -> list[Path]:
    """Folders of empty stores, each in a folder of its own under ``folder``."""
    made = folder / "first"
    ChunkStore(made)
    found = []
    for name in names:
        found.append(folder / name / "kv")
        found[-1].mkdir(parents=True, mode=0o700)
        for name_of_file in ("secret", "store.json"):
            shutil.copy(made / name_of_file, found[-1])
    return found


def chunk_files(store: Path) -> dict[str, bytes]:
    """The chunk files of a store, by their path in it."""
    files = [file for file in store.rglob("*.safetensors") if file.is_file()]
    return {str(file.relative_to(store)): file.read_bytes() for file in files}


class Files:
    """Stands for the files of a store whose index is tested."""

    def __init__(self, *entries: Entry) -> None:
        self.made_of = list(entries)
        self.there = {one.key for one in entries}
        self.removed: list[str] = []

    def entries(self) -> list[Entry]:
        return self.made_of

    def is_gone(self, digest: str, key: str) -> bool:
        return key not in self.there

    def remove(self, digest: str, key: str) -> None:
        self.there.discard(key)
        self.removed.append(key)
