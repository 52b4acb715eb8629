"""Chunk caches in a folder that many processes share."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samkv_integrations.cache.base import StoredChunk, _expect
from samkv_integrations.cache.chunk import SECRET_BYTES, ChunkCache, chunk_key, normalise
from samkv_integrations.cache.chunk_file import ChunkFile
from samkv_integrations.cache.chunk_head import read_head
from samkv_integrations.cache.file_format import encode
from samkv_integrations.cache.fingerprint import (
    FORMAT_VERSION,
    Fingerprint,
    _require,
    _without_block_size,
    digest_of,
)
from samkv_integrations.cache.named_ids import token_ids_in
from samkv_integrations.cache.stats import StoreStats, _stats
from samkv_integrations.errors import CacheMiss, StoreError

# Longer than the coarsest clock of a file system ticks: within a tick two changes look like one.
_CLOCK_TICK_NS = 2_000_000_000
# What an older cache shares with one that would be made now, if it is of the same model and text.
_MODEL_FIELDS = ("weights", "tokenizer", "dtype", "rope", "prefix")
_HEX_NAME = re.compile("[0-9a-f]{32}")
_TEXT_NAME = re.compile(r"([0-9a-f]{32})\.txt(\..*\.tmp)?")
_OWN_NAME = re.compile(r"(store\.json|secret)(\..*\.tmp)?")


class ChunkStore:
    """Chunk caches in a folder, which any number of processes may read and write at once.

    Files (docs/format.md): ``<fingerprint>/<key[:2]>/<key>.safetensors`` and, written before it,
    the chunk's text in ``<key>.txt``. All are readable by their owner only. Nothing but the
    store's secret is kept in memory, so what another process did is seen at once.

    A folder of an older format version is opened too. Its chunks are misses ("format"), which are
    computed again by the next ingest; nothing of it is deleted. The first `put` makes it a folder
    of this version, which older releases refuse.
    """

    def __init__(self, path: str | os.PathLike[str], *, namespace: str = "") -> None:
        """Opens the store in folder ``path``, which is made if it is absent or empty.

        Raises `StoreError` if it is something else, of a newer format version, or not usable.
        """
        self.path = Path(path)
        self._namespace = namespace
        try:
            self._is_older = self._claim_folder() < FORMAT_VERSION
            self._secret = self._read_secret()
        except OSError as error:
            raise _cannot("open a store in", self.path, error) from error

    @property
    def namespace(self) -> str:
        return self._namespace

    def _claim_folder(self) -> int:
        """The format version of the folder, which is this release's if it had none."""
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is not a folder; next step: name a new or empty folder")
        self.path.mkdir(parents=True, exist_ok=True)
        marker = self.path / "store.json"
        if not marker.exists():
            strangers = [n for n in sorted(os.listdir(self.path)) if not _OWN_NAME.fullmatch(n)]
            # Another process may have made the store meanwhile: the marker is its first file.
            if strangers and not marker.exists():
                raise StoreError(
                    f"{self.path} is not a store: it has no store.json and holds {strangers[0]!r}; "
                    "next step: name a new or empty folder"
                )
            self._write_marker()
        try:
            version = json.loads(marker.read_bytes())["format_version"]
            if not isinstance(version, int):
                raise TypeError(version)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StoreError(f"{marker} is broken; next step: ingest into a new folder") from error
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{self.path} has format version {version}, this release uses {FORMAT_VERSION}; "
                "next step: ingest again into a new folder, or use the release that made this one"
            )
        return version

    def _write_marker(self) -> None:
        marker = {"format_version": FORMAT_VERSION}
        _write(self.path / "store.json", [json.dumps(marker).encode()])

    def _read_secret(self) -> bytes:
        file = self.path / "secret"
        if not file.exists():
            try:
                _write(file, [secrets.token_bytes(SECRET_BYTES)], exclusive=True)
            except FileExistsError:
                pass  # Another process was faster: its secret is the store's.
        secret = file.read_bytes()
        if len(secret) != SECRET_BYTES:
            raise StoreError(
                f"{file} has {len(secret)} bytes instead of {SECRET_BYTES}; "
                "next step: restore it from a copy, or ingest into a new folder"
            )
        return secret

    def _file(self, key: str, digest: str) -> Path:
        return self.path / digest / key[:2] / f"{key}.safetensors"

    def _digests(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path) if _HEX_NAME.fullmatch(name))
        except OSError as error:
            raise _cannot("read", self.path, error) from error

    def _files(self, digest: str) -> Iterator[Path]:
        for file in (self.path / digest).glob("??/*.safetensors"):
            if _HEX_NAME.fullmatch(file.stem) and file.stem.startswith(file.parent.name):
                yield file

    def _fields(self, digest: str) -> dict[str, Any]:
        """The fields of a fingerprint of this release or an older one, empty if unknown."""
        try:
            fields = json.loads((self.path / digest / "fingerprint.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        is_known = isinstance(fields, dict) and "model" in fields and digest_of(fields) == digest
        return fields if is_known else {}

    def _older_version(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> int | None:
        """The older format version in which there is a cache of the same tokens and model."""
        with suppress(StoreError):
            for digest in self._digests():
                fields = self._fields(digest)
                version = fields.get("format_version", FORMAT_VERSION)
                if version < FORMAT_VERSION and all(
                    fields.get(name) == getattr(fingerprint, name) for name in _MODEL_FIELDS
                ):
                    key = chunk_key(self._secret, self._namespace, digest, token_ids)
                    if self._file(key, digest).is_file():
                        return int(version)
        return None

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        return chunk_key(self._secret, self._namespace, fingerprint.digest, token_ids)

    def put(self, chunk: ChunkCache) -> None:
        assert _HEX_NAME.fullmatch(chunk.key), chunk.key
        digest = chunk.fingerprint.digest
        file = self._file(chunk.key, digest)
        try:
            if self._is_older:
                self._write_marker()
                self._is_older = False
            # One by one: the store's own folder is not made again if someone removed it.
            file.parents[1].mkdir(exist_ok=True)
            file.parent.mkdir(exist_ok=True)
            if not self._fields(digest):
                fields = json.dumps(asdict(chunk.fingerprint), indent=2)
                _write(file.parents[1] / "fingerprint.json", [fields.encode()])
            _write(file.with_suffix(".txt"), [chunk.text.encode(errors="surrogatepass")])
            _write(file, encode(chunk, self._namespace, self._secret))
        except OSError as error:
            raise _cannot("write", file, error) from error

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        if not _HEX_NAME.fullmatch(key):
            raise CacheMiss("absent", repr(key))
        try:
            found = ChunkFile(
                self._file(key, fingerprint.digest), key, fingerprint,
                namespace=self._namespace, secret=self._secret,
            )  # fmt: skip
        except CacheMiss as miss:
            if miss.reason != "absent" or token_ids is None:
                raise
            if (version := self._older_version(fingerprint, token_ids)) is None:
                raise
            raise CacheMiss(
                "format",
                f"{self.path} holds this chunk in format version {version} only, this release uses "
                f"{FORMAT_VERSION}; next step: ingest again",
            ) from miss
        return _expect(found, token_ids)

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        file = self._file(key, fingerprint.digest)
        return bool(_HEX_NAME.fullmatch(key)) and os.path.isfile(file)

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        if not self.contains(key, fingerprint):
            return None
        try:
            modified_at = self._file(key, fingerprint.digest).stat().st_mtime
        except OSError:  # deleted by another process meanwhile
            return None
        return max(0.0, time.time() - modified_at)

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        if self.contains(key, fingerprint):
            now = time.time()
            with suppress(OSError):
                os.utime(self._file(key, fingerprint.digest), (now, now))

    def text(self, key: str) -> str | None:
        for digest in self._digests() if _HEX_NAME.fullmatch(key) else ():
            try:
                data = self._file(key, digest).with_suffix(".txt").read_bytes()
                return data.decode(errors="surrogatepass")
            except (OSError, UnicodeDecodeError):
                continue
        return None

    def prefetch(self, key: str, fingerprint: Fingerprint) -> None:
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with suppress(OSError), self._file(key, fingerprint.digest).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # 0: to its end

    def delete(self, key: str) -> bool:
        found = False
        for digest in self._digests() if _HEX_NAME.fullmatch(key) else ():
            file = self._file(key, digest)
            for path in (file, file.with_suffix(".txt")):
                try:
                    path.unlink()
                    found = True
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise _cannot("delete", path, error) from error
        return found

    def forget(
        self,
        is_wanted: Callable[[str], bool],
        token_ids: Sequence[Sequence[int]] = (),
    ) -> int:
        n_removed = 0
        for digest in self._digests():
            named = {chunk_key(self._secret, self._namespace, digest, ids) for ids in token_ids}
            found = {key for key in named if any(self._parts(key, digest))}
            for file, key in self._texts(digest):
                if (
                    key not in found
                    and is_wanted(_body_in(file))
                    and self._may_be_ours(key, digest)
                ):
                    found.add(key)
            for part in (part for key in sorted(found) for part in self._parts(key, digest)):
                try:
                    part.unlink(missing_ok=True)
                except OSError as error:
                    raise _cannot("delete", part, error) from error
            n_removed += len(found)
        return n_removed

    def _texts(self, digest: str) -> Iterator[tuple[Path, str]]:
        """The files that hold texts, temporary ones too, and the keys of their chunks."""
        for file in (self.path / digest).glob("??/*.txt*"):
            if name := _TEXT_NAME.fullmatch(file.name):
                yield file, name[1]

    def _parts(self, key: str, digest: str) -> list[Path]:
        """All files of a chunk, temporary ones too; the text, which names the others, last."""
        file = self._file(key, digest)
        parts = file.parent.glob(f"{key}.*")
        return sorted(parts, key=lambda part: (part == file.with_suffix(".txt"), part.name))

    def _may_be_ours(self, key: str, digest: str) -> bool:
        """Whether no sound cache says that the chunk is of another namespace."""
        file = self._file(key, digest)
        with suppress(CacheMiss):
            return read_head(file, self._secret).namespace == self._namespace
        try:
            ids = token_ids_in(file)
        except OSError as error:
            raise _cannot("read", file, error) from error
        return ids is None or chunk_key(self._secret, self._namespace, digest, ids) == key

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        digests = [fingerprint.digest] if fingerprint else self._digests()
        return sorted({file.stem for digest in digests for file in self._files(digest)})

    def stamp(self, fingerprint: Fingerprint) -> Hashable | None:
        """The times at which folders changed; too young ones may yet change unnoticed."""
        root = self.path / fingerprint.digest
        try:
            folders = [entry for entry in os.scandir(root) if entry.is_dir()]
            times = {entry.name: entry.stat().st_mtime_ns for entry in folders}
        except OSError:
            return None
        is_certain = time.time_ns() - max(times.values(), default=0) > _CLOCK_TICK_NS
        return tuple(sorted(times.items())) if is_certain else None

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        file = self.path / f"block-size-{_without_block_size(fingerprint)}.json"
        try:
            if not file.exists():  # a store that cannot be written may have one
                with suppress(FileExistsError):
                    _write(file, [json.dumps(size).encode()], exclusive=True)
            agreed: int = json.loads(file.read_bytes())
            if type(agreed) is not int or agreed < 1:
                raise ValueError(f"{agreed!r} is no block size")
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{file} cannot be used ({error}); next step: delete it") from error
        return agreed

    def note(self, name: str) -> str | None:
        try:
            # what is damaged is there, and must not look like a note that is not
            return (self.path / f"{name}.json").read_text("utf-8", errors="replace")
        except OSError:
            return None

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        file = self.path / f"{name}.json"
        try:
            _write(file, [text.encode()], exclusive=not replace)
        except FileExistsError:
            return False
        except OSError as error:
            raise _cannot("write", file, error) from error
        return True

    def fingerprints(self) -> list[Fingerprint]:
        """Those of which there is a chunk.

        Left out: folders of an older format version, or with a broken fingerprint.json.
        """
        known = map(self._fields, (n for n in self._digests() if any(self._files(n))))
        return [Fingerprint(**fields) for fields in known if _is_current(fields)]

    def stats(self) -> StoreStats:
        """Counts every chunk file; ``rows`` leaves out those with a broken fingerprint.json."""
        sizes: dict[str, list[int]] = {digest: [] for digest in self._digests()}
        for digest, found in sizes.items():
            for file in self._files(digest):
                with suppress(FileNotFoundError):  # deleted by another process since it was listed
                    found.append(file.stat().st_size)
        return _stats({digest: self._fields(digest) for digest in sizes}, sizes)

    def require(self, fingerprint: Fingerprint) -> None:
        _require(fingerprint, self.fingerprints(), str(self.path))


def _write(path: Path, pieces: Iterable[bytes | memoryview], *, exclusive: bool = False) -> None:
    """Writes a file that others see whole or not at all, and that survives a power cut.

    With ``exclusive`` an existing file stays as it is, and FileExistsError is raised.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        (os.link if exclusive else os.replace)(temporary, path)
    finally:
        with suppress(FileNotFoundError):  # the usual case: it has been renamed
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _body_in(file: Path) -> str:
    """The body in a file of text; empty if it cannot be read, or was deleted meanwhile."""
    try:
        return normalise(file.read_bytes().decode(errors="surrogatepass"))
    except (OSError, UnicodeDecodeError):
        return ""


def _cannot(action: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot {action} {path}: {error.strerror or error}; "
        "next step: make room or allow access there, or use a store in another folder"
    )


def _is_current(fields: Mapping[str, object]) -> bool:
    return fields.get("format_version") == FORMAT_VERSION
