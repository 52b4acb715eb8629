"""The files of a store's chunks: where they are, how they go, and the index that knows of them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from samkv_integrations.cache import older
from samkv_integrations.cache.chunk import digest_of
from samkv_integrations.cache.chunk_head import read_head
from samkv_integrations.cache.files import (
    TEMPORARY,
    cannot,
    make_folder,
    remove,
    unlink_unless_read,
)
from samkv_integrations.cache.index import Index
from samkv_integrations.cache.tables import Entry
from samkv_integrations.errors import CacheMiss, StoreError

_HEX_NAME = re.compile("[0-9a-f]{32}")
_IN_QUARANTINE = re.compile("[0-9a-f]{32}(\\.[0-9a-f]+)?")


class ChunkFolder:
    """The chunk files in the folder of a store, of all namespaces.

    Args:
        path: of the store's folder.
        secret: of the store.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self.secret = secret
        self.index = Index(path, self._entries, secret)

    def require_own(self) -> None:
        """See that the folder is still the store that was opened, before something is written.

        Who empties it takes the secret away; what was written then, nobody could ever open. A store
        that another process has made there since takes nothing of ours for sound.

        Raises StoreError if it is not, OSError if nobody can tell. A folder that is gone altogether
        is left to whatever is tried next.
        """
        try:
            found = (self.path / "secret").read_bytes()
            is_own = found == self.secret and (self.path / "store.json").exists()
        except FileNotFoundError:
            is_own = not self.path.exists()
        if not is_own:
            raise StoreError(
                f"{self.path} is not the store any more that was opened: its files were deleted or "
                "replaced; next step: open it anew, in a new engine or process"
            )

    def file(self, key: str, digest: str) -> Path:
        """Where the cache of a chunk is, or would be. Raises CacheMiss for what is no key."""
        if not (_HEX_NAME.fullmatch(key) and _HEX_NAME.fullmatch(digest)):
            raise CacheMiss("absent", repr(key))
        return self.path / digest / key[:2] / f"{key}.safetensors"

    def digests(self) -> list[str]:
        """Names of the folders of fingerprints of this format version."""
        try:
            names = sorted(name for name in os.listdir(self.path) if _HEX_NAME.fullmatch(name))
        except OSError as error:
            raise cannot("read", self.path, error) from error
        return [name for name in names if not older.is_older(self.path / name)]

    def files(self, digest: str) -> Iterator[Path]:
        """The chunk files of a fingerprint, and temporary ones."""
        for folder in _entries_of(self.path / digest):
            if len(folder.name) == 2:
                for entry in _entries_of(folder.path):
                    if _HEX_NAME.fullmatch(entry.name[:32]) and entry.name[:2] == folder.name:
                        yield Path(entry.path)

    def _entries(self) -> Iterator[Entry]:
        """What the index is made of; a damaged file is left to `verify`."""
        self.require_own()
        for digest in self.digests():
            for file in self.files(digest):
                if file.suffix != TEMPORARY:
                    with suppress(CacheMiss):
                        yield self.entry(file)

    def entry(self, file: Path) -> Entry:
        """What the index is told of a file. Raises CacheMiss."""
        head = read_head(file, self.secret)
        if self.file(head.key, digest_of(head.fields)) != file:
            raise CacheMiss("tokens", f"{file}: holds chunk {head.key}")
        return Entry(
            digest=file.parents[1].name,
            key=head.key,
            namespace=head.namespace,
            text=head.text,
            token_ids=head.token_ids,
            n_bytes=head.n_bytes,
            fields=head.fields,
            used_at=file.stat().st_mtime,
        )

    def is_gone(self, digest: str, key: str) -> bool:
        """Whether there is no file of a chunk."""
        return not os.path.lexists(self.file(key, digest))

    def remove(self, places: Sequence[tuple[str, str]]) -> None:
        """Delete the files of chunks whose texts have gone already."""
        for digest, key in places:
            remove(self.file(key, digest))
        keys = {key for _, key in places}
        self.empty_quarantine(lambda name: name[:32] in keys)
        self.index.end_deleting(places, self.is_gone)

    def set_aside(self, file: Path, namespace: str) -> None:
        """Move a damaged file to the quarantine, whatever it is. Raises OSError, StoreError."""
        folder, key = self.path / "quarantine", file.name[:32]
        make_folder(folder)
        name = f"{key}.{secrets.token_hex(4)}"
        n_bytes = file.lstat().st_size
        file.rename(folder / name)
        self.index.quarantined(namespace, file.parents[1].name, key, name, n_bytes)

    def empty_quarantine(self, is_wanted: Callable[[str], bool]) -> tuple[int, int]:
        """Delete damaged files; how many there were, and the bytes that they took."""
        folder = self.path / "quarantine"
        names = [entry.name for entry in _entries_of(folder) if is_wanted(entry.name)]
        n_bytes = sum(remove(folder / name) for name in names)
        if names:
            self.index.leave_quarantine(names)
        return len(names), n_bytes

    def evict(self, digest: str, key: str) -> bool:
        """Delete a cache for want of room, unless it is being read; whether it is gone."""
        try:
            return unlink_unless_read(self.file(key, digest))
        except CacheMiss:
            return True

    def drop(self, name: str) -> None:
        """Delete a file of the quarantine for want of room."""
        if _IN_QUARANTINE.fullmatch(name):
            remove(self.path / "quarantine" / name)


def _entries_of(folder: Path | str) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if there is none."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
