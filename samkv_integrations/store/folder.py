"""The folder of a store: marker, secret, chunk files, and whether the index agrees with them.

Its files are private to their owner, and written atomically.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import iglob
from pathlib import Path
from typing import Any

from samkv_integrations.errors import CacheMiss, InvalidOption, StoreError
from samkv_integrations.store.chunk import FORMAT_VERSION, SECRET_BYTES
from samkv_integrations.store.chunk_file import BAD_JSON, ChunkFile, open_regular
from samkv_integrations.store.index import PRESENT, Entry, Index, Place

TEMPORARY = ".tmp"
LEFT_S = 3600.0
"""Age in seconds from which a temporary file counts as left by a killed process."""

MAX_SMALL_BYTES = 1 << 20


SECRET_VARIABLE = "SAMKV_STORE_SECRET"
"""Environment variable with the secret of the stores that a process makes, 64 hex digits."""

_DIGIT = "[0-9a-f]"
HEX_NAME = re.compile(f"{_DIGIT}{{32}}")
"""Keys and digests, as they are in the names of files."""

# Names that a folder may contain before it has a marker.
_OWN_NAME = re.compile(
    rf"(store\.json|secret)(\..*{re.escape(TEMPORARY)})?|index\.lock|samkv\.toml"
)


def folder_named(what: str, path: object) -> Path:
    """``path`` as a Path. what: the option's name. Raises InvalidOption if it is not valid."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        is_path = b"\0" not in os.fsencode(found)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise InvalidOption(f"{what}={path!r:.60}; it must be the path of a folder, without NUL")
    return found


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can use; one may exist already."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def cannot(action: str, path: Path, error: OSError) -> StoreError:
    """The error for an action that the operating system refuses."""
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}; "
        "next step: make room or allow access there, or use a store in another folder"
    )


@contextmanager
def written(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o600) -> Iterator[Path]:
    """A complete temporary file beside ``path``, which the block moves there. It is durable."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        with suppress(FileNotFoundError):  # as usual: it has been renamed
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically; replaces an earlier one."""
    with written(path, [data]) as temporary:
        os.replace(temporary, path)


def write_new(path: Path, data: bytes) -> bool:
    """Write a small file unless it exists; returns whether it was written."""
    with suppress(FileExistsError), written(path, [data]) as temporary:
        os.link(temporary, path)
        return True
    return False


def read_small(path: Path) -> bytes:
    """The bytes of a marker, a secret or a note; links are followed.

    Raises OSError, also if it is not a regular file, or larger than `MAX_SMALL_BYTES`.
    """
    with open_regular(path, follows_links=True) as file:
        if os.fstat(file.fileno()).st_size > MAX_SMALL_BYTES:
            raise OSError(errno.EFBIG, f"{path.name} is larger than 1 MiB")
        return file.read(MAX_SMALL_BYTES)


def remove(path: Path) -> int:
    """Delete a file, or what is in its place; returns its bytes, 0 if it does not exist.

    Raises StoreError if the operating system refuses, as for a folder.
    """
    try:
        n_bytes = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise cannot("delete", path, error) from error
    return n_bytes


# -- the store -----------------------------------------------------------------------------------


def open_folder(folder: Path, given: bytes | None, *, is_bound: bool) -> bytes:
    """Check that a folder is a store, or make a store of a new or empty one; returns its secret.

    given: the secret of a new store; None for the environment's, else a random one.
    is_bound: whether an existing store must have that secret, too.

    Raises StoreError if the folder is not a store, is writable by others, is damaged, or has
    another format version or secret; InvalidOption if the given secret is not valid; OSError.
    """
    is_bound = is_bound or given is not None
    given = _checked_secret(given)
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; next step: name a new or empty folder")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
    if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(f"{folder} is writable by other users; next step: chmod go-w {folder}")
    marker, file = folder / "store.json", folder / "secret"
    if not marker.exists():
        _make_store(folder, given)
    said = marker_fields(read_small(marker), folder, "restore it from a copy")
    secret = read_small(file) if file.exists() else b""
    if len(secret) != SECRET_BYTES or check_of(secret) != said["secret_check"]:
        state = "damaged" if file.exists() else "missing"
        raise StoreError(
            f"{file} is {state}, and nothing in {folder} can be read without it; next step: "
            "restore it from a copy, or ingest into a new folder"
        )
    if is_bound and given not in (None, secret):
        raise StoreError(
            f"{folder} is a store with another secret than the given one; next step: name a new "
            f"folder, or give the secret in {file}"
        )
    return secret


def marker_fields(data: bytes, place: object, remedy: str) -> dict[str, Any]:
    """The fields of the marker ``store.json`` of a folder or remote tier.

    Raises StoreError if it is damaged, or of another format version. remedy: of damage.
    """
    try:
        said = json.loads(data)
        if (version := said["format_version"]) == FORMAT_VERSION:
            return {**said, "secret_check": str(said["secret_check"])}
    except BAD_JSON as error:
        raise StoreError(
            f"{place}/store.json is damaged; next step: {remedy}, or use another place"
        ) from error
    raise StoreError(
        f"{place} has format version {version!r}, this release uses {FORMAT_VERSION}; "
        "next step: use another place, or the release that filled this one"
    )


def _make_store(folder: Path, given: bytes | None) -> None:
    """Write secret and marker, unless another process does at the same time. Raises StoreError."""
    marker, file = folder / "store.json", folder / "secret"
    others = [name for name in sorted(os.listdir(folder)) if not _OWN_NAME.fullmatch(name)]
    if marker.exists():  # another process has just made the store: the others are its files
        return
    if others:
        raise StoreError(
            f"{folder} is not a store: it has no store.json and holds {others[0]!r}; "
            "next step: name a new or empty folder"
        )
    if not file.exists():
        write_new(file, given or secrets.token_bytes(SECRET_BYTES))
    fields = {"format_version": FORMAT_VERSION, "secret_check": check_of(read_small(file))}
    write_new(marker, json.dumps(fields).encode())


def _checked_secret(given: bytes | None) -> bytes | None:
    """The given secret, else the environment's. Raises InvalidOption if it is not valid."""
    if given is None and (said := os.environ.get(SECRET_VARIABLE)):
        try:
            given = bytes.fromhex(said)
        except ValueError:
            given = b""
    if given is not None and (not isinstance(given, bytes) or len(given) != SECRET_BYTES):
        raise InvalidOption(  # without the value, which is confidential
            f"the secret of a store must be {SECRET_BYTES} bytes, in {SECRET_VARIABLE} "
            f"{2 * SECRET_BYTES} hex digits; make one with 'openssl rand -hex {SECRET_BYTES}', or "
            "take that of the store that other machines share"
        )
    return given


def check_of(secret: bytes) -> str:
    """A hash that tells whether a secret is the right one, without disclosing it."""
    return hashlib.blake2b(key=secret, digest_size=16, person=b"samkv check").hexdigest()


def chunk_path(key: str, digest: str) -> str:
    """Path of a chunk's file in a folder or remote tier. Raises CacheMiss for an invalid name."""
    if not (HEX_NAME.fullmatch(key) and HEX_NAME.fullmatch(digest)):
        raise CacheMiss("absent", repr(key))
    return f"{digest}/{key[:2]}/{key}.safetensors"


class ChunkFolder:
    """The chunk files of a store, of all namespaces, and their index."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path, self.secret = path, secret
        self.index = Index(path, self, secret)

    def require_own(self) -> None:
        """Raises StoreError if the folder was deleted, emptied, or made anew by another process."""
        try:
            found = read_small(self.path / "secret")
            is_own = found == self.secret and (self.path / "store.json").exists()
        except FileNotFoundError:
            is_own = False
        except OSError as error:
            raise cannot("read", self.path, error) from error
        if not is_own:
            raise StoreError(
                f"{self.path} is no longer the store that was opened: its files were deleted or "
                "replaced; next step: open it anew, in a new engine or process"
            )

    def file(self, key: str, digest: str) -> Path:
        """Path of a chunk's file, whether or not it exists. Raises CacheMiss for an invalid key."""
        return self.path / chunk_path(key, digest)

    def files(self) -> Iterator[Path]:
        """All chunk files, temporary ones included."""
        for name in iglob(f"{32 * _DIGIT}/{2 * _DIGIT}/{32 * _DIGIT}*", root_dir=self.path):
            file = self.path / name
            if file.name[:2] == file.parent.name:
                yield file

    def put(
        self, key: str, digest: str, pieces: Iterable[bytes | memoryview],
        entry_of: Callable[[Path], Entry], unless_deleted_since: int | None = None,
    ) -> None:  # fmt: skip
        """Write a chunk's file, and index it; raises as `Index.keep`.

        entry_of: makes the index entry from the complete file, before it is moved to its place.
        """
        file = self.file(key, digest)
        try:
            self.require_own()
            # One at a time, so that a removed folder of the store is not made again.
            make_folder(file.parents[1])
            make_folder(file.parent)
            with written(file, pieces) as temporary:
                with self.index.keep(entry_of(temporary), unless_deleted_since):
                    os.replace(temporary, file)
        except OSError as error:
            raise cannot("write", file, error) from error

    def delete(self, namespace: str, keys: Sequence[str]) -> set[str]:
        """Like `Index.delete`, but also deletes files that killed writers left unindexed."""
        gone = self.index.delete(namespace, keys)
        named = (f"{32 * _DIGIT}/{k[:2]}/{k}.safetensors" for k in keys if HEX_NAME.fullmatch(k))
        left = any(any(iglob(name, root_dir=self.path)) for name in named)
        if keys and (left or self._has_unindexed()):
            reconcile(self)
            gone |= self.index.delete(namespace, keys)
        return gone

    def _has_unindexed(self) -> bool:
        """Whether a killed writer left files of a fingerprint that is not indexed."""
        known = {made_by.digest for made_by in self.index.fingerprints()}
        return any(HEX_NAME.fullmatch(n) and n not in known for n in os.listdir(self.path))

    # -- for the index, see `Caches` --------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        self.require_own()
        for file in self.files():
            if file.suffix != TEMPORARY:
                with suppress(CacheMiss):  # `verify` deals with damaged files
                    yield self.entry(file)

    def entry(self, file: Path) -> Entry:
        """The index entry of a file. Raises CacheMiss."""
        with ChunkFile(file, secret=self.secret) as chunk:
            if self.file(chunk.key, chunk.layout.fingerprint.digest) != file:
                raise CacheMiss("fingerprint", f"{file}: holds chunk {chunk.key}")
            return Entry.of_file(chunk)

    def is_gone(self, digest: str, key: str) -> bool:
        try:
            return not os.path.lexists(self.file(key, digest))
        except CacheMiss:  # an invalid key
            return True

    def remove(self, digest: str, key: str) -> None:
        with suppress(CacheMiss):
            remove(self.file(key, digest))


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """How files and index differed.

    n_unfinished: temporary files of killed writers, now deleted.
    n_adopted: chunk files that were not indexed, and are now.
    n_lost: indexed chunks without a file.
    n_damaged: damaged chunk files that were not indexed, now deleted.
    bytes_freed: bytes of the deleted files.
    """

    n_unfinished: int = 0
    n_adopted: int = 0
    n_lost: int = 0
    n_damaged: int = 0
    bytes_freed: int = 0


def reconcile(store: ChunkFolder) -> Recovered:
    """Make the index agree with the files. Others may use the store meanwhile.

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
                store.index.adopt(store.entry(files[place]))
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
