"""Which Chroma database the chunk caches of a store and namespace belong to.

`ChromaLink.sync` deletes caches that no record of its database references. If two databases kept
caches in one folder and namespace, each would delete those of the other. So the store has a note
that names the database which came first, and another one is refused.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.store import Store
from samkv_integrations.errors import InvalidOption, StoreError

_MAX_COLLECTIONS = 1000


class Ownership:
    """The claim of one collection's database on the caches of a store's namespace.

    A database is recognised by the ids of its collections, which are unique. So it may be moved,
    copied with its caches, or reached at another address. If none of these collections is left, it
    is recognised by its place.

    Args:
        place: where the database is; "" for one in memory. That one writes no note, because it
            ends with its process.
        is_local: whether ``place`` is a folder of this machine.
        collection: id of the collection.
        collections: returns the ids of all collections of the database.
    """

    def __init__(
        self,
        store: Store,
        place: str,
        collection: str,
        collections: Callable[[], Collection[str]],
        *,
        is_local: bool,
    ) -> None:
        self._store = store
        # machines that share caches share the note as well
        self._shared = store.shared if isinstance(store, ChunkStore) else None
        if is_local and self._shared is not None:
            place += f" on {socket.gethostname()}"  # machines have folders of the same name
        self._place, self._collection, self._collections = place, collection, collections
        name = hashlib.blake2b(store.namespace.encode(), digest_size=8).hexdigest()
        self._note = f"chroma-owner-{name}"
        self._where, self._file = "memory", self._note
        if self._shared is not None:
            self._where, self._file = self._shared.url, self._shared.note_url(self._note)
        elif isinstance(store, ChunkStore):
            self._where, self._file = str(store.path), str(store.path / f"{self._note}.json")

    def claim(self) -> None:
        """Check that the caches belong to this database, and write that into the note.

        Raises:
            InvalidOption: the caches belong to another database.
            StoreError: the note is damaged, or cannot be written.
        """
        owner = self._read()
        if owner is None and self._place:
            if self._put([self._collection], replace=False):
                return
            owner = self._read()  # another process has written it meanwhile
            if owner is None:
                raise self._damaged()
        if owner is None:
            return
        place, known = owner
        if place != self._place and {*known}.isdisjoint(self._collections()):
            raise self._refusal(place)
        if self._place and (place != self._place or self._collection not in known):
            self._put([*known, self._collection], replace=True)

    def try_claim(self) -> None:
        """Like `claim`, but a note that cannot be written is no error: a store may be read-only."""
        with suppress(_NotWritten):
            self.claim()

    def _read(self) -> tuple[str, list[str]] | None:
        """Place and collections of the owner; None if there is no note."""
        try:
            text = (self._shared or self._store).note(self._note)
        except StoreError as error:  # a remote tier that does not answer
            raise _NotWritten(str(error)) from error
        if text is None:
            return None
        try:
            fields = json.loads(text)
            place, known = fields["database"], fields["collections"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._damaged() from error
        is_list = isinstance(known, list) and all(isinstance(id_, str) for id_ in known)
        if not (place and isinstance(place, str) and is_list):
            raise self._damaged()
        return place, known

    def _put(self, collections: list[str], *, replace: bool) -> bool:
        ids = list(dict.fromkeys(collections))[-_MAX_COLLECTIONS:]
        text = json.dumps({"database": self._place, "collections": ids}, indent=2)
        try:
            return (self._shared or self._store).put_note(self._note, text, replace=replace)
        except StoreError as error:
            raise _NotWritten(str(error)) from error

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{self._file}, which names the database of the chunk caches, cannot be read, so no "
            "cache is deleted; next step: delete it, and open that database before any other"
        )

    def _refusal(self, owner: str) -> InvalidOption:
        ways = "give each database a folder of caches (kv_dir) or a namespace of its own"
        if self._shared is not None:
            ways = (
                "have all machines keep their records in one Chroma server (--chroma "
                "http://HOST:PORT of the commands, connect_collection), or give each database a "
                "remote tier or a namespace of its own"
            )
        return InvalidOption(
            f"the chunk caches in {self._where} (namespace {self._store.namespace!r}) belong to "
            f"the Chroma database {owner}, and would be deleted, because "
            f"{self._place or 'the database in memory'} has no records of them; {ways}; if that "
            f"database is gone for good, delete {self._file}"
        )


class _NotWritten(StoreError):
    """The note could not be read or written."""
