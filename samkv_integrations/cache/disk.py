"""Chunk caches in a folder that many processes share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from samkv_integrations.cache import older
from samkv_integrations.cache.base import StoredChunk, _expect
from samkv_integrations.cache.budget import check_budget
from samkv_integrations.cache.checked_file import open_regular
from samkv_integrations.cache.chunk import (
    FORMAT_VERSION,
    ChunkCache,
    Fingerprint,
    _require,
    _without_block_size,
    check_namespace,
    chunk_key,
    normalise,
)
from samkv_integrations.cache.chunk_file import ChunkFile
from samkv_integrations.cache.chunk_folder import ChunkFolder
from samkv_integrations.cache.file_format import FileLayout, encode
from samkv_integrations.cache.files import (
    Writer,
    cannot,
    claim_folder,
    dead_writers,
    make_folder,
    remove,
    write_file,
)
from samkv_integrations.cache.index import IndexedChunks
from samkv_integrations.cache.marker import write_marker, write_small
from samkv_integrations.cache.objects import Objects
from samkv_integrations.cache.recovery import reconcile, recover
from samkv_integrations.cache.remote import RemoteTier
from samkv_integrations.cache.remote_claim import claim_with_remote
from samkv_integrations.cache.shared import SharedTier, require_unshared
from samkv_integrations.cache.stats import StoreStats, _stats
from samkv_integrations.cache.tables import EVICTED, Entry
from samkv_integrations.cache.windows import ChunkIndex
from samkv_integrations.errors import CacheMiss, StoreError


class ChunkStore:
    """Chunk caches in a folder, which any number of processes may read and write at once.

    docs/format.md says which files there are. What any process did is seen at once by all. A cache
    is read from its file alone; an index beside the files, which is made anew if it is lost, knows
    bytes, recency and texts.

    A folder of an older format version is opened too. Its chunks are misses ("format"), which are
    computed again by the next ingest; `gc` deletes them. The first `put` makes it a folder of this
    version, which older releases refuse.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "",
        max_bytes: int | None = None,
        quota: Mapping[str, int] | None = None,
        remote: str | None = None,
        remote_options: Mapping[str, object] | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Opens the store in folder ``path``, which is made if it is absent or empty.

        namespace: whose chunks these are; those of others are not seen.
        max_bytes, quota: see `set_budget`; None for the budget that the store has.
        remote: where machines share their caches, such as ``s3://bucket/prefix`` (a URL of
            fsspec's); the folder is its local tier. While it does not answer, it is misses ("io").
        remote_options: of fsspec's file system, such as ``{"endpoint_url": ...}``.
        secret: what keys and MACs are made with, 32 bytes, the same on all machines that share;
            None for that of the variable SAMKV_STORE_SECRET (64 hex digits), else the folder's.

        Raises:
            StoreError: the folder is something else, of a newer format version, damaged, writable
                for others than its owner, not usable, or of another secret, as may ``remote`` be.
            InvalidOption: a budget, the namespace, the secret or the URL is not what it has to be.
            MissingExtra: what ``remote`` needs is not installed.
        """
        self.path = Path(path)
        self._namespace = check_namespace(namespace)
        objects = None if remote is None else Objects(remote, remote_options or {})
        try:
            claim_folder(self.path)
            self.writer = Writer(self.path)
            claimed = claim_with_remote(self.path, self.writer, secret, objects)
            self.secret, self._is_older = claimed.secret, claimed.version < FORMAT_VERSION
        except OSError as error:
            raise cannot("open a store in", self.path, error) from error
        self.files = ChunkFolder(self.path, self.secret)
        self.index, self.file = self.files.index, self.files.file
        with suppress(StoreError):  # the folder may be one that can only be read
            recover(self.files)
        if max_bytes is not None or quota:
            _, known = self.index.budget.read()
            self.set_budget(max_bytes, {**known, **(quota or {})})
        self.shared: SharedTier | None = None
        if objects is not None:
            tier = RemoteTier(objects, self.secret, self._namespace)
            self.shared = SharedTier(self.files, tier, self.writer, self._namespace, self._reserve)
            self.shared.begin_to_share()

    @property
    def namespace(self) -> str:
        return self._namespace

    # -- small files ---------------------------------------------------------------------------

    def note(self, name: str) -> str | None:
        with suppress(OSError):
            # what is damaged is there, and must not look like a note that is not
            return (self.path / f"{name}.json").read_text("utf-8", errors="replace")
        return None

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        file = self.path / f"{name}.json"
        try:
            self.files.require_own()
            return write_small(file, text.encode(), self.writer, replace=replace)
        except OSError as error:
            raise cannot("write", file, error) from error

    # -- files of chunks ------------------------------------------------------------------------

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        return chunk_key(self.secret, self._namespace, fingerprint.digest, token_ids)

    def put(self, chunk: ChunkCache) -> None:
        fingerprint = chunk.fingerprint
        file = self.file(chunk.key, fingerprint.digest)
        layout = FileLayout.of(chunk, self._namespace)
        entry = Entry(
            digest=fingerprint.digest,
            key=chunk.key,
            namespace=self._namespace,
            text=chunk.text,
            token_ids=chunk.token_ids.tolist(),
            n_bytes=layout.file_size(chunk.key),
            fields=asdict(fingerprint),
            used_at=time.time(),
        )
        try:
            self.files.require_own()
            if self._is_older:
                write_marker(self.path, self.writer, self.secret, replace=True)
                self._is_older = False
            # One by one: the store's own folder is not made again if someone removed it.
            make_folder(file.parents[1])
            make_folder(file.parent)
            data: Iterable[bytes | memoryview] = encode(chunk, self._namespace, self.secret)
            if self.shared is not None:  # first: a retry finds what is here, and would not send it
                data = [b"".join(data)]
                self.shared.share(entry, bytes(data[0]))
            if file.is_dir() and not file.is_symlink():
                self.quarantine(chunk.key, fingerprint)
            temporary = self.writer.temporary(file)
            self._reserve(entry, temporary.name)
            try:
                write_file(file, data, temporary)
            except BaseException:
                with suppress(StoreError):
                    self.index.budget.release(temporary.name)
                raise
            try:
                self.index.keep(entry, temporary.name, is_gone=self.files.is_gone)
            except BaseException:  # a file that no budget counts must not stay
                remove(file)
                with suppress(StoreError):
                    self.index.budget.release(temporary.name)
                raise
        except OSError as error:
            raise cannot("write", file, error) from error

    def _reserve(self, entry: Entry, temporary: str) -> None:
        reserve = partial(
            self.index.budget.reserve, entry, temporary, self.files.evict, self.files.drop
        )
        try:
            reserve()
        except StoreError:
            if not dead_writers(self.path):
                raise
            recover(self.files)  # what they were writing counts until then
            reserve()

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        try:
            found = self._opened(key, fingerprint)
        except CacheMiss as miss:
            if miss.reason != "absent" or token_ids is None:
                raise
            version = older.version_with(
                self.path, self.secret, self._namespace, fingerprint, token_ids
            )
            if version is None:
                raise
            raise CacheMiss(
                "format",
                f"{self.path} holds this chunk in format version {version} only, this release uses "
                f"{FORMAT_VERSION}; next step: ingest again",
            ) from miss
        return _expect(found, token_ids)

    def _opened(self, key: str, fingerprint: Fingerprint) -> ChunkFile:
        file = self.file(key, fingerprint.digest)
        try:
            return ChunkFile(file, key, fingerprint, namespace=self._namespace, secret=self.secret)
        except CacheMiss as miss:
            if miss.reason != "absent" or self.shared is None:
                raise
        self.shared.fetch(key, fingerprint)
        return ChunkFile(file, key, fingerprint, namespace=self._namespace, secret=self.secret)

    def contains(self, key: str, fingerprint: Fingerprint) -> bool:
        return self._is_here(key, fingerprint) or self.is_elsewhere(key, fingerprint)

    def _is_here(self, key: str, fingerprint: Fingerprint) -> bool:
        with suppress(CacheMiss):
            return os.path.isfile(self.file(key, fingerprint.digest))
        return False

    def is_elsewhere(self, key: str, fingerprint: Fingerprint) -> bool:
        if self.shared is None or self._is_here(key, fingerprint):
            return False
        return self.shared.remote.has(fingerprint.digest, key)

    def look_ahead(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        if self.shared is not None:
            self.shared.remote.look_ahead(fingerprint.digest, keys)

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        if self.shared is not None:
            for key in keys:
                if not self._is_here(key, fingerprint):
                    self.shared.begin(key, fingerprint)

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        ages = []
        with suppress(CacheMiss, OSError):
            ages.append(self.file(key, fingerprint.digest).stat().st_mtime)
        if self.shared and (there := self.shared.remote.info(fingerprint.digest, key)):
            ages.append(there.modified_at)
        return max(0.0, time.time() - max(ages)) if ages else None

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        now = time.time()
        with suppress(CacheMiss, OSError, StoreError):
            os.utime(self.file(key, fingerprint.digest), (now, now))
            self.index.use(self._namespace, fingerprint.digest, [key])

    def prefetch(self, key: str, fingerprint: Fingerprint) -> None:
        self.begin_to_fetch([key], fingerprint)
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with suppress(CacheMiss, OSError):
            with open_regular(self.file(key, fingerprint.digest)) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # 0: to its end

    # -- files that go --------------------------------------------------------------------------

    def check_delete(self, *keys: str) -> None:
        try:
            self.files.require_own()
        except OSError as error:
            raise cannot("delete in", self.path, error) from error
        if self.shared is None:
            require_unshared(self.index, self._namespace, keys)
        else:
            self.shared.remote.check_answers()

    def delete(self, *keys: str) -> int:
        self.check_delete(*keys)
        # There before here, so that nothing is said to be gone that is not.
        gone = self.shared.delete(keys) if self.shared else set()
        found = self.index.begin_to_delete(self._namespace, keys)
        n_older = older.delete(self.path, keys)
        self.files.remove(found)
        return len(gone | ({key for _, key in found} & {*keys})) + n_older

    def forget(
        self,
        is_wanted: Callable[[str], bool],
        token_ids: Sequence[Sequence[int]] = (),
    ) -> int:
        reconcile(self.files)  # what a killed writer left is a text too
        if self.shared is not None:
            self.shared.refresh()
        texts = self.index.texts(self._namespace)
        found = {(digest, key) for digest, key, body in texts if is_wanted(normalise(body))}
        shared = [made_by.digest for made_by in self.shared.fingerprints()] if self.shared else []
        for digest in {*self.files.digests(), *shared}:
            for ids in token_ids:
                key = chunk_key(self.secret, self._namespace, digest, ids)
                if self.index.state(digest, key) is not None or os.path.lexists(
                    self.file(key, digest)
                ):
                    found.add((digest, key))
        keys = sorted({key for _, key in found})
        self.check_delete(*keys)
        if self.shared is not None:
            self.shared.delete(keys)
        self.index.begin_to_delete(self._namespace, keys)
        self.files.remove(sorted(found))
        self.files.empty_quarantine(lambda name: True)  # damaged files cannot say what they hold
        n_older = older.forget(self.path, self.secret, self._namespace, is_wanted, token_ids)
        return len(found) + n_older

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        with suppress(CacheMiss, OSError, StoreError):
            self.files.set_aside(self.file(key, fingerprint.digest), self._namespace)

    # -- what the index knows ---------------------------------------------------------------------

    def set_budget(
        self, max_bytes: int | None = None, quota: Mapping[str, int] | None = None
    ) -> None:
        """Limit what the chunk files take, for all processes and until it is set again.

        What is used least goes first; a cache that is being read stays. What goes is a counted
        miss, and is computed again when it is asked for.

        max_bytes: of all caches together; None for no limit.
        quota: of single namespaces, by name.

        Raises InvalidOption if one is no number of bytes, StoreError if it cannot be written down.
        """
        check_budget(max_bytes, quota or {})
        _, known = self.index.budget.read()
        self.index.budget.write(max_bytes, {**dict.fromkeys(known), **(quota or {})})
        self.index.budget.make_room(self.files.evict, self.files.drop)

    def text(self, key: str) -> str | None:
        return self.index.text(self._namespace, key)

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        if self.shared is not None:
            self.shared.refresh_soon()
        return IndexedChunks(self.index, self._namespace, fingerprint.digest)

    def record(
        self, fingerprint: Fingerprint, *, used: Sequence[str] = (), missed: Sequence[str] = ()
    ) -> None:
        digest = fingerprint.digest
        with suppress(StoreError, CacheMiss):
            self.index.record(self._namespace, digest, used, missed)
            if missed:
                self.index.lose([(digest, key) for key in missed], self.files.is_gone)

    def is_evicted(self, key: str, fingerprint: Fingerprint) -> bool:
        return self.index.state(fingerprint.digest, key) == EVICTED

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        return self.index.keys(self._namespace, fingerprint.digest if fingerprint else None)

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        if self.shared is not None:
            self.shared.refresh()
        return self.index.known(self._namespace, fingerprint.digest if fingerprint else None)

    def same_texts(self, *keys: str) -> set[str]:
        return self.index.same_texts(self._namespace, keys)

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        name = f"block-size {_without_block_size(fingerprint)} {self._namespace}"
        if self.shared is not None:
            size = self.shared.agree(name, size)
        return self.index.agree(name, size)

    def fingerprints(self) -> list[Fingerprint]:
        found = {d: Fingerprint(**f) for d, f in self.index.fingerprints(self._namespace).items()}
        if self.shared is not None:
            found |= {made_by.digest: made_by for made_by in self.shared.fingerprints()}
        return [found[digest] for digest in sorted(found)]

    def elsewhere(self) -> str | None:
        totals = self.index.totals(None)
        if any(namespace == self._namespace for namespace, *_ in totals):
            return None
        if totals:
            names = sorted({repr(namespace) for namespace, *_ in totals})
            return f"namespace {' and '.join(names[:3])} of {self.path} (give namespace=)"
        with suppress(OSError):
            for marker in sorted(self.path.resolve().parent.glob("*/store.json")):
                if marker.parent != self.path.resolve() and any(marker.parent.glob("*/*/*.safe*")):
                    return f"the folder {marker.parent} (give kv_dir=, or the store's path)"
        return None

    def stats(self, *, everyone: bool = False) -> StoreStats:
        """What the store holds; everyone: of all namespaces, not only of this one."""
        space = None if everyone else self._namespace
        return _stats(
            self.index.fingerprints(None), self.index.totals(space), self.index.counts(space),
            older=older.totals(self.path), max_bytes=self.index.budget.read()[0],
        )  # fmt: skip

    def require(self, fingerprint: Fingerprint) -> None:
        _require(fingerprint, self.fingerprints(), str(self.path))
