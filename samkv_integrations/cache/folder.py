"""The folder of a store: what makes it one, and the chunk files in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path

from samkv_integrations.cache.chunk import FORMAT_VERSION, SECRET_BYTES
from samkv_integrations.cache.file_format import BAD_JSON, ChunkFile
from samkv_integrations.cache.files import (
    LEFT_S,
    TEMPORARY,
    cannot,
    make_folder,
    read_small,
    remove,
    write_file,
    write_new,
)
from samkv_integrations.cache.index import PRESENT, Entry, Index, Place
from samkv_integrations.errors import CacheMiss, InvalidOption, StoreError

SECRET_VARIABLE = "SAMKV_STORE_SECRET"
"""Environment variable with the secret of all stores that a process opens, 64 hex digits."""

_DIGIT = "[0-9a-f]"
_HEX_NAME = re.compile(f"{_DIGIT}{{32}}")
# What a folder may hold that is being made a store.
_OWN_NAME = re.compile(
    rf"(store\.json|secret)(\..*{re.escape(TEMPORARY)})?|index\.lock|samkv\.toml"
)


def open_folder(folder: Path, given: bytes | None, *, is_bound: bool) -> bytes:
    """Make a folder a store if it is empty, or see that it is one; its secret.

    given: the secret of a new store; None for that of the environment, else a random one.
    is_bound: whether the secret has to be that of a store that is there, too.

    Raises StoreError if it is something else, writable by others, damaged, of another format
    version or of another secret; InvalidOption if the given secret is none; OSError.
    """
    is_bound = is_bound or given is not None
    given = _secret_of(given)
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; next step: name a new or empty folder")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(f"{folder} is writable by other users; next step: chmod go-w {folder}")
    marker, file = folder / "store.json", folder / "secret"
    if not marker.exists():
        strangers = [name for name in sorted(os.listdir(folder)) if not _OWN_NAME.fullmatch(name)]
        # Another process may have made the store meanwhile: the marker is before all but these.
        if strangers and not marker.exists():
            raise StoreError(
                f"{folder} is not a store: it has no store.json and holds {strangers[0]!r}; "
                "next step: name a new or empty folder"
            )
        if not file.exists():
            write_new(file, given or secrets.token_bytes(SECRET_BYTES))
        fields = {"format_version": FORMAT_VERSION, "secret_check": check_of(read_small(file))}
        write_new(marker, json.dumps(fields).encode())
    try:
        said = json.loads(read_small(marker))
        version = said["format_version"]
        check = said["secret_check"] if version == FORMAT_VERSION else ""
    except BAD_JSON as error:
        raise StoreError(
            f"{marker} is damaged; next step: restore it from a copy, or ingest into a new folder"
        ) from error
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has format version {version!r}, this release uses {FORMAT_VERSION}; "
            "next step: ingest into a new folder, or use the release that made this one"
        )
    with suppress(FileNotFoundError):
        secret = read_small(file)
        if len(secret) == SECRET_BYTES and check_of(secret) == check:
            if is_bound and given not in (None, secret):
                raise StoreError(
                    f"{folder} is a store of another secret than the one that is given; next "
                    f"step: name a new folder, or give the secret that is in {file}"
                )
            return secret
    raise StoreError(
        f"{file} is damaged, and nothing in {folder} can be read without it; next step: "
        "restore it from a copy, or ingest into a new folder"
    )


def _secret_of(given: bytes | None) -> bytes | None:
    if given is None and (said := os.environ.get(SECRET_VARIABLE)):
        try:
            given = bytes.fromhex(said)
        except ValueError:
            given = b""
    if given is not None and (not isinstance(given, bytes) or len(given) != SECRET_BYTES):
        raise InvalidOption(  # not what it is
            f"the secret of a store is {SECRET_BYTES} bytes, in {SECRET_VARIABLE} "
            f"{2 * SECRET_BYTES} hex digits; make one with 'openssl rand -hex {SECRET_BYTES}', or "
            "take that of the store that other machines share"
        )
    return given


def check_of(secret: bytes) -> str:
    """Says whether a secret is the right one, and nothing of it."""
    return hashlib.blake2b(key=secret, digest_size=16, person=b"samkv check").hexdigest()


class ChunkFolder:
    """The chunk files in the folder of a store, of all namespaces, and their index."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path, self.secret = path, secret
        self.index = Index(path, self, secret)

    def require_own(self) -> None:
        """See that the folder is still the store that was opened, before something is written.

        Raises StoreError if it was emptied, or made anew by another process. A folder that is gone
        altogether is left to whatever is tried next.
        """
        try:
            found = read_small(self.path / "secret")
            is_own = found == self.secret and (self.path / "store.json").exists()
        except FileNotFoundError:
            is_own = not self.path.exists()
        except OSError as error:
            raise cannot("read", self.path, error) from error
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

    def holds(self, key: str) -> bool:
        """Whether there is a chunk's file of any fingerprint."""
        files = f"{32 * _DIGIT}/{key[:2]}/{key}.safetensors"
        return bool(_HEX_NAME.fullmatch(key)) and any(iglob(files, root_dir=self.path))

    def files(self) -> Iterator[Path]:
        """The chunk files, and temporary ones."""
        for name in iglob(f"{32 * _DIGIT}/{2 * _DIGIT}/{32 * _DIGIT}*", root_dir=self.path):
            file = self.path / name
            if file.name[:2] == file.parent.name:
                yield file

    def put(
        self, key: str, digest: str, pieces: Iterable[bytes | memoryview],
        entry_of: Callable[[Path], Entry],
    ) -> None:  # fmt: skip
        """Write a chunk's file, and take note of it.

        entry_of: what the index is told of the file, which is whole and not in its place yet.

        Raises StoreError if it cannot be written, or there is no room.
        """
        file = self.file(key, digest)

        def place(temporary: Path) -> None:
            def move() -> None:
                if file.is_dir() and not file.is_symlink():
                    remove(file)
                os.replace(temporary, file)

            self.index.keep(entry_of(temporary), move)

        try:
            self.require_own()
            # One by one: the store's own folder is not made again if someone removed it.
            make_folder(file.parents[1])
            make_folder(file.parent)
            write_file(file, pieces, place)
        except OSError as error:
            raise cannot("write", file, error) from error

    # -- for the index ----------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        self.require_own()
        for file in self.files():
            if file.suffix != TEMPORARY:
                with suppress(CacheMiss):  # a damaged file is left to `verify`
                    yield self.entry(file)

    def entry(self, file: Path) -> Entry:
        """What the index is told of a file. Raises CacheMiss."""
        with ChunkFile(file, secret=self.secret) as chunk:
            if self.file(chunk.key, chunk.layout.fingerprint.digest) != file:
                raise CacheMiss("tokens", f"{file}: holds chunk {chunk.key}")
            return Entry.of_file(chunk)

    def is_gone(self, digest: str, key: str) -> bool:
        try:
            return not os.path.lexists(self.file(key, digest))
        except CacheMiss:  # what is no key has no cache
            return True

    def remove(self, digest: str, key: str) -> None:
        with suppress(CacheMiss):
            remove(self.file(key, digest))

    def remove_all(self, digest: str) -> None:
        if _HEX_NAME.fullmatch(digest):
            remove(self.path / digest)

    def has_strangers(self) -> bool:
        """Whether there are files of fingerprints that the index does not know.

        A writer that is killed leaves a file that the index was not told of.
        """
        known = {made_by.digest for made_by in self.index.fingerprints(are_present=False)}
        return any(_HEX_NAME.fullmatch(n) and n not in known for n in os.listdir(self.path))


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Where index and files disagreed.

    n_unfinished: temporary files that were deleted, as their writers must have been killed.
    n_adopted: chunk files that the index did not know. n_lost: chunks whose file had gone.
    n_damaged: chunk files that the index did not know, and which were deleted as damaged.
    """

    n_unfinished: int = 0
    n_adopted: int = 0
    n_lost: int = 0
    n_damaged: int = 0
    bytes_freed: int = 0


def reconcile(store: ChunkFolder) -> Recovered:
    """Bring the index into line with the files, looking at every name; others may go on working.

    Raises StoreError if the folder or its index cannot be used.
    """
    n_unfinished = n_adopted = n_damaged = bytes_freed = 0
    try:
        store.require_own()
        store.index.clear_up()
        files: dict[Place, Path] = {}
        for file in [*store.path.glob(f"*{TEMPORARY}"), *store.files()]:
            if file.suffix == TEMPORARY:
                with suppress(FileNotFoundError):
                    if file.lstat().st_mtime < time.time() - LEFT_S:
                        bytes_freed += remove(file)
                        n_unfinished += 1
            elif file.suffix == ".safetensors":
                files[file.parents[1].name, file.stem] = file
        known = {(digest, key) for digest, key, _ in store.index.places(None, PRESENT)}
        gone = [place for place in known - files.keys() if store.is_gone(*place)]
        store.index.lose(gone)
        for place in sorted(files.keys() - known):
            try:
                store.index.keep(store.entry(files[place]))
                n_adopted += 1
            except CacheMiss as miss:
                if miss.is_damage or miss.reason == "format":
                    bytes_freed += remove(files[place])
                    n_damaged += 1
    except OSError as error:
        raise cannot("look through", store.path, error) from error
    return Recovered(
        n_unfinished=n_unfinished, n_adopted=n_adopted, n_lost=len(gone), n_damaged=n_damaged,
        bytes_freed=bytes_freed,
    )  # fmt: skip
