"""Chunk caches in a folder that many processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from samkv_integrations.errors import CacheMiss, StoreError
from samkv_integrations.option import bytes_of
from samkv_integrations.store.base import Notes, StoredChunk
from samkv_integrations.store.chunk import ChunkCache, Fingerprint, check_keys, check_namespace
from samkv_integrations.store.chunk_file import ChunkFile, encode
from samkv_integrations.store.folder import (
    ChunkFolder,
    cannot,
    folder_named,
    open_folder,
    read_small,
    reconcile,
    write_file,
    write_new,
)  # fmt: skip
from samkv_integrations.store.index import Entry
from samkv_integrations.store.indexed import IndexedStore, quotas_of
from samkv_integrations.store.tier import SharedTier, objects_outside
from samkv_integrations.store.windows import ChunkIndex


class ChunkStore(IndexedStore):
    """Chunk caches in a folder. Any number of processes may read and write it at the same time.

    docs/format.md describes the files. A cache is read from its file alone. The index beside the
    files is rebuilt if it is lost.
    """

    path: Path

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "",
        max_bytes: int | str | None = None,
        quota: Mapping[str, int | str] | None = None,
        remote: str | None = None,
        remote_options: Mapping[str, object] | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Opens the store in folder ``path``, which is made if it is absent or empty.

        namespace: owner of the chunks. Chunks of other namespaces are not seen.
        max_bytes, quota: see `set_budget`; None to leave the store's budget as it is.
        remote: where machines share their caches, a URL of fsspec such as ``s3://bucket/prefix``;
            the folder is the local tier. While the remote tier does not answer, its chunks are
            misses ("io").
        remote_options: of fsspec's file system, such as ``{"endpoint_url": ...}``.
        secret: key of all hashes and MACs, 32 bytes, the same on all machines that share. None for
            the environment variable SAMKV_STORE_SECRET (64 hex digits), else the folder's own.

        Raises:
            StoreError: the folder is not a store, is damaged, is writable by other users, has
                another format version or another secret, or cannot be used; or the remote tier has
                another secret.
            InvalidOption: the path, a budget, the namespace, the secret or the URL is not valid.
            MissingExtra: a package that ``remote`` needs is not installed.
        """
        self.path = folder_named("path", path)
        check_namespace(namespace)
        quotas = quotas_of(quota)
        limit = None if max_bytes is None else bytes_of("max_bytes", max_bytes)
        objects = (
            None if remote is None else objects_outside(remote, remote_options or {}, self.path)
        )
        try:
            secret = open_folder(self.path, secret, is_bound=objects is not None)
        except OSError as error:
            raise cannot("open a store in", self.path, error) from error
        self.files = ChunkFolder(self.path, secret)
        self.file = self.files.file
        super().__init__(namespace, secret, self.files.index, str(self.path))
        with suppress(StoreError):  # a damaged index is made anew by the next call
            self.index.budget()
        if limit is not None or quotas:
            most, others = self.index.budget()
            self.index.set_budget(most if limit is None else limit, {**others, **quotas})
        self.shared: SharedTier | None = None
        if objects is not None:
            self.shared = SharedTier(self.files, objects, namespace)

    # -- single caches --------------------------------------------------------------------------

    def put(self, chunk: ChunkCache, *, unless_deleted_since: int | None = None) -> None:
        entry = Entry.of(chunk, self.namespace)
        data = encode(chunk, self.namespace, self.secret)
        self.files.put(entry.key, entry.digest, data, lambda file: entry, unless_deleted_since)
        if self.shared is not None:
            self.shared.share((entry.digest, entry.key))

    def open(
        self, key: str, fingerprint: Fingerprint, token_ids: Sequence[int] | None = None
    ) -> StoredChunk:
        digest = fingerprint.digest
        if self.shared is not None and self.files.is_gone(digest, key):
            self.shared.fetch((digest, key))
        opened = ChunkFile(
            self.file(key, digest), key, fingerprint, namespace=self.namespace, secret=self.secret
        )
        if token_ids is not None and opened.token_ids.tolist() != list(token_ids):
            with opened, suppress(StoreError):
                self.index.compare(opened)
            raise CacheMiss("tokens", f"chunk {key} holds {opened.n_tokens} other tokens")
        return opened

    def contains(self, key: str, fingerprint: Fingerprint, *, here: bool = False) -> bool:
        if super().contains(key, fingerprint):
            return True
        digest, shared = fingerprint.digest, None if here else self.shared
        return shared is not None and self.files.is_gone(digest, key) and shared.has((digest, key))

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None:
        if self.shared is not None:
            for key in keys:
                if self.files.is_gone(fingerprint.digest, key):
                    self.shared.begin((fingerprint.digest, key))

    # -- deletion -------------------------------------------------------------------------------

    def check_delete(self, *keys: str) -> None:
        self.files.require_own()
        if self.shared is not None:
            self.shared.check_answers("nothing is deleted while the remote tier does not answer")
        elif there := {key for _, key in self.index.shared(self.namespace)}.intersection(keys):
            raise StoreError(
                f"{len(there)} of these chunk caches are in a remote tier too, where other "
                "machines would still find them; next step: open the store with remote=, or give "
                "--remote"
            )

    def delete(self, *keys: str) -> int:
        check_keys(keys)
        self.check_delete(*keys)
        gone = self.files.delete(self.namespace, keys)
        if self.shared is not None:
            gone |= self.shared.delete(keys)
            # caches that a question fetched or put before they were deleted there
            while again := self.files.delete(self.namespace, keys):
                gone |= again | self.shared.delete(keys)
        return len(gone)

    def forget(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]] = ()
    ) -> int:
        reconcile(self.files)  # indexes files that killed writers left
        if self.shared is not None:
            self.shared.refresh()
        return super().forget(is_wanted, token_ids)

    # -- what there is --------------------------------------------------------------------------

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        if self.shared is not None:
            self.shared.refresh_soon()
        return super().chunk_index(fingerprint)

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        if self.shared is not None:
            self.shared.refresh()
        return super().known_keys(fingerprint)

    def fingerprints(self) -> list[Fingerprint]:
        if self.shared is not None:
            self.shared.learn_models()
        return super().fingerprints()

    def reconcile(self) -> None:
        reconcile(self.files)

    # -- notes ----------------------------------------------------------------------------------

    @property
    def remote_url(self) -> str | None:
        return None if self.shared is None else self.shared.where

    @property
    def notes(self) -> Notes:
        return self if self.shared is None else self.shared

    def note_place(self, name: str) -> str:
        return str(self.path / f"{name}.json")

    def note(self, name: str) -> str | None:
        with suppress(OSError):
            # A damaged note is returned damaged: it must not look like an absent one.
            return read_small(self.path / f"{name}.json").decode(errors="replace")
        return None

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        file = self.path / f"{name}.json"
        self.files.require_own()
        try:
            if not replace:
                return write_new(file, text.encode())
            write_file(file, text.encode())
        except OSError as error:
            raise cannot("write", file, error) from error
        return True
