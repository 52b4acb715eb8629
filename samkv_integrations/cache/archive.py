"""Chunk caches as one file, for another machine with the same model.

An archive is an uncompressed tar file: a description, a secret made for it alone, and chunk files
that were written under that secret. So nobody learns a store's own secret from it, and a chunk file
is known from a damaged one. Archives come from outside: of a member only the type, the name and the
size are believed, and only if they are what an export writes.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.checked_file import BAD_JSON
from samkv_integrations.cache.chunk import (
    FORMAT_VERSION,
    SECRET_BYTES,
    ChunkCache,
    Fingerprint,
    _require,
    _without_block_size,
    chunk_key,
)
from samkv_integrations.cache.chunk_file import ChunkFile
from samkv_integrations.cache.chunk_head import read_head
from samkv_integrations.cache.file_format import encode
from samkv_integrations.cache.files import cannot, write_file
from samkv_integrations.errors import (
    CacheMiss,
    EmptyInput,
    InvalidOption,
    SamkvError,
    StoreError,
)

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

ARCHIVE_VERSION = 1
_DESCRIPTION, _SECRET = "archive.json", "secret"
_CHUNK = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{32}\.safetensors")
_MAX_DESCRIPTION_BYTES = 1 << 20
_COPIED_BYTES = 1 << 20
# What the fields of a fingerprint may raise if a stranger made them up.
_STRANGE = (*BAD_JSON, AssertionError, RuntimeError, MemoryError, SamkvError)


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What `export_caches` wrote.

    n_left_out: damaged caches, and those that went meanwhile. bytes_written: of the archive.
    """

    n_chunks: int
    n_left_out: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """What `import_caches` took out of an archive.

    n_chunks: caches that are new here. n_known: those that were here before, and stayed. n_other:
    those of other models than was asked for. n_damaged: those that are not as they were exported.
    bytes_read: of the archive.
    """

    n_chunks: int
    n_known: int
    n_other: int
    n_damaged: int
    bytes_read: int


def export_caches(
    store: Store,
    path: str | os.PathLike[str],
    keys: Collection[str] | None = None,
    *,
    progress: Progress | None = None,
) -> ExportResult:
    """Write caches of a store's namespace into a new file, each verified, with its text.

    Whoever has the file can read the texts.

    keys: which, such as those that the records of a collection name; None for all.
    progress: called with the chunks that are done, and of how many.

    Raises:
        EmptyInput: there is none of them.
        InvalidOption: ``path`` exists.
        StoreError: it cannot be written.
    """
    file = Path(path)
    if os.path.lexists(file):
        raise InvalidOption(f"{file} exists; name a new file, or delete it first")
    places = [
        (key, made_by)
        for made_by in store.fingerprints()
        for key in store.keys(made_by)
        if keys is None or key in keys
    ]
    if not places:
        asked = "" if keys is None else f", of the {len(keys)} that were asked for,"
        raise EmptyInput(
            f"there is no chunk cache{asked} in namespace {store.namespace!r}; ingest first"
        )
    done: Counter[str] = Counter()
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_file(file, _exported(store, places, done, progress), temporary)
    except OSError as error:
        raise cannot("write", file, error) from error
    return ExportResult(
        n_chunks=done["chunks"], n_left_out=done["left_out"], bytes_written=file.stat().st_size
    )


def _exported(
    store: Store,
    places: list[tuple[str, Fingerprint]],
    done: Counter[str],
    progress: Progress | None,
) -> Iterator[bytes]:
    """The bytes of an archive, a member at a time; counts ``chunks`` and those ``left_out``."""
    made_by = {each.digest: asdict(each) for _, each in places}
    description = {
        "samkv_archive": ARCHIVE_VERSION,
        "format_version": FORMAT_VERSION,
        "fingerprints": list(made_by.values()),
    }
    secret = secrets.token_bytes(SECRET_BYTES)
    yield from _member(_DESCRIPTION, json.dumps(description).encode())
    yield from _member(_SECRET, secret)
    for number, (key, fingerprint) in enumerate(places, 1):
        try:
            with store.open(key, fingerprint) as opened:
                chunk = _renamed(opened.chunk(), secret)
        except CacheMiss:
            done["left_out"] += 1
        else:
            name = f"{fingerprint.digest}/{chunk.key[:2]}/{chunk.key}.safetensors"
            yield from _member(name, b"".join(encode(chunk, "", secret)))
            done["chunks"] += 1
        if progress is not None:
            progress(number, len(places))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _renamed(chunk: ChunkCache, secret: bytes) -> ChunkCache:
    """A chunk under the key that it has in an archive, where there is one namespace."""
    key = chunk_key(secret, "", chunk.fingerprint.digest, chunk.token_ids.tolist())
    return replace(chunk, key=key)


def _member(name: str, data: bytes) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    yield info.tobuf(tarfile.USTAR_FORMAT)
    yield data
    yield bytes(-len(data) % tarfile.BLOCKSIZE)


def import_caches(
    store: Store,
    path: str | os.PathLike[str],
    *,
    fingerprint: Fingerprint | None = None,
    progress: Progress | None = None,
) -> ImportResult:
    """Take the caches of an archive into a store, under its own secret, keys and namespace.

    Each is verified as a whole: it is what was exported. Whether that is what the model would have
    computed nobody can tell, so import what you trust. A cache that is here already stays.

    fingerprint: of the model that is going to ask; None for the caches of whatever model.
    progress: called with the bytes that are read, and of how many.

    Raises:
        InvalidOption: ``path`` is no archive, or is cut off; what stood before that was imported.
        FingerprintMismatch: it holds nothing of ``fingerprint``.
        StoreError: the store cannot be written, has no room, or holds caches of the same model with
            another block size.
    """
    file = Path(path)
    try:
        opened = open(file, "rb", opener=_open_at_once)
    except OSError as error:
        raise InvalidOption(
            f"{file} cannot be read: {error.strerror or error}; name a file that "
            "'samkv store export' wrote"
        ) from error
    with opened:
        try:
            return _imported(store, _Archive(file, opened), fingerprint, progress)
        except OSError as error:
            raise cannot("import caches from", file, error) from error


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep us waiting


class _Archive:
    """The members of an archive, one after the other. Raises InvalidOption for what is none."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise self.wrong("it is no regular file")
        self.size = found.st_size
        self.position = 0

    def wrong(self, what: str) -> InvalidOption:
        return InvalidOption(
            f"{self.path} is no archive of chunk caches, or is damaged: {what}; name a file that "
            "'samkv store export' wrote"
        )

    def members(self) -> Iterator[tuple[str, int]]:
        """Name and size of each; what of it is not copied is left out."""
        while True:
            self._file.seek(self.position)
            header = self._file.read(tarfile.BLOCKSIZE)
            if header == bytes(tarfile.BLOCKSIZE):
                return
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            except (tarfile.HeaderError, ValueError) as error:
                raise self.wrong(f"no member at byte {self.position}") from error
            start = self.position + tarfile.BLOCKSIZE
            if info.type != tarfile.REGTYPE or not 0 <= info.size <= self.size - start:
                raise self.wrong(f"no file, or no whole one, at byte {self.position}")
            self._file.seek(start)
            yield info.name, info.size
            self.position = start + info.size + -info.size % tarfile.BLOCKSIZE

    def copy(self, n_bytes: int, out: BinaryIO) -> None:
        """Copy the member that was come to last."""
        while n_bytes:
            data = self._file.read(min(n_bytes, _COPIED_BYTES))
            if not data:
                raise self.wrong("it has become shorter")
            out.write(data)
            n_bytes -= len(data)

    def small(self, members: Iterator[tuple[str, int]], name: str, most: int) -> bytes:
        """The next member, which must be called so and hold no more bytes."""
        found, size = next(members, ("nothing", 0))
        if found != name or size > most:
            raise self.wrong(f"it has {found!r} where {name!r} belongs")
        out = io.BytesIO()
        self.copy(size, out)
        return out.getvalue()


def _imported(
    store: Store, archive: _Archive, wanted: Fingerprint | None, progress: Progress | None
) -> ImportResult:
    members = archive.members()
    described = _described(archive, archive.small(members, _DESCRIPTION, _MAX_DESCRIPTION_BYTES))
    if wanted is not None:
        alike = [replace(wanted, block_size=each.block_size) for each in described]
        if not {each.digest for each in alike} & {each.digest for each in described}:
            _require(wanted, described, str(archive.path))
    secret = archive.small(members, _SECRET, SECRET_BYTES)
    if len(secret) != SECRET_BYTES:
        raise archive.wrong(f"its secret has {len(secret)} bytes")
    done: Counter[str] = Counter()
    checked: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="samkv-import-") as folder:
        for name, size in members:
            if not _CHUNK.fullmatch(name):
                raise archive.wrong(f"it holds {name[:80]!r}")
            copy = Path(folder) / "chunk"  # no name of an archive becomes the name of a file
            with open(copy, "wb") as out:
                archive.copy(size, out)
            chunk = _verified(copy, secret)
            if chunk is None:
                done["damaged"] += 1
            elif wanted and _without_block_size(wanted) != _without_block_size(chunk.fingerprint):
                done["other"] += 1
            else:
                done[_taken(store, chunk, checked)] += 1
            if progress is not None:
                progress(archive.position, archive.size)
    if progress is not None:
        progress(archive.size, archive.size)
    return ImportResult(
        n_chunks=done["new"], n_known=done["known"], n_other=done["other"],
        n_damaged=done["damaged"], bytes_read=archive.size,
    )  # fmt: skip


def _described(archive: _Archive, text: bytes) -> list[Fingerprint]:
    """The fingerprints of an archive."""
    try:
        fields = json.loads(text)
        version, written_in = fields["samkv_archive"], fields["format_version"]
        if (version, written_in) == (ARCHIVE_VERSION, FORMAT_VERSION):
            return [_fingerprint(each) for each in fields["fingerprints"]]
        is_newer = version > ARCHIVE_VERSION or written_in > FORMAT_VERSION
    except BAD_JSON as error:
        raise archive.wrong("its description cannot be read") from error
    raise InvalidOption(
        f"{archive.path} is of format version {written_in!r}, this release uses {FORMAT_VERSION}; "
        f"next step: {'import it with a newer release' if is_newer else 'export it again'}"
    )


def _fingerprint(fields: Mapping[str, object]) -> Fingerprint:
    """A fingerprint of fields that anybody may have made up; raises one of `BAD_JSON`."""
    if not all(isinstance(value, int | str) for value in fields.values()):
        raise TypeError(fields)
    made_by = Fingerprint(**fields)  # type: ignore[arg-type]
    if made_by.format_version != FORMAT_VERSION:
        raise ValueError(made_by)
    return made_by


def _verified(file: Path, secret: bytes) -> ChunkCache | None:
    """The chunk of a file of an archive, all of it; None if it is not as it was exported."""
    try:
        head = read_head(file, secret)
        made_by = _fingerprint(head.fields)
        with ChunkFile(file, head.key, made_by, namespace="", secret=secret) as opened:
            return opened.chunk()
    except CacheMiss as miss:
        if miss.reason == "io":
            raise StoreError(f"{miss}; next step: make room, or set TMPDIR") from miss
        return None
    except _STRANGE:
        return None


def _taken(store: Store, chunk: ChunkCache, checked: set[str]) -> str:
    """Keep a chunk under the store's own key, unless it is ``known``.

    checked: digests of the fingerprints that fit what the store holds.
    """
    made_by = chunk.fingerprint
    if made_by.digest not in checked:
        _check_block_size(store, made_by)
        checked.add(made_by.digest)
    key = store.key(made_by, chunk.token_ids.tolist())
    if store.contains(key, made_by):
        return "known"
    store.put(replace(chunk, key=key))
    return "new"


def _check_block_size(store: Store, made_by: Fingerprint) -> None:
    """Raises StoreError if caches of one model would have two block sizes: one is never found."""
    sizes = {
        held.block_size
        for held in store.fingerprints()
        if _without_block_size(held) == _without_block_size(made_by)
    } or {store.agree_block_size(made_by, made_by.block_size)}
    if made_by.block_size not in sizes:
        raise StoreError(
            f"the archive has caches of {made_by.model!r} with block size {made_by.block_size}, "
            f"and those here have {min(sizes)}; next step: import into a new folder, or ingest "
            "the documents here"
        )
