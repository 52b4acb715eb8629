"""Which Chroma database the chunk caches of a store and namespace belong to.

`ChromaLink.sync` deletes caches that no record of its database references. If two databases kept
caches in one folder and namespace, each would delete those of the other. So the store has a note
that names the database which came first, and another one is refused.
"""

from __future__ import annotations

import hashlib
import json
import socket

from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.cache.store import Store
from samkv_integrations.chroma.records import Records
from samkv_integrations.errors import InvalidOption, StoreError


class Ownership:
    """The claim of a collection's database on the caches of a store's namespace.

    A database is recognised by the ids of its collections, so it may be moved or copied, or else by
    its place. A database in memory writes no note, because it ends with its process.
    """

    def __init__(self, store: Store, records: Records) -> None:
        self._namespace, self._records, self._place = store.namespace, records, records.place
        name = hashlib.blake2b(store.namespace.encode(), digest_size=8).hexdigest()
        self._note = f"chroma-owner-{name}"
        shared = store.shared if isinstance(store, ChunkStore) else None
        self._notes = shared or store  # machines that share caches share the note as well
        self._is_shared, self._where, self._file = shared is not None, "memory", self._note
        if shared is not None:
            self._where, self._file = shared.url, shared.note_url(self._note)
            if records.folder is not None:  # machines have folders of the same name
                self._place += f" on {socket.gethostname()}"
        elif isinstance(store, ChunkStore):
            self._where, self._file = str(store.path), str(store.path / f"{self._note}.json")

    def claim(self) -> None:
        """Check that the caches belong to this database, and write that into the note.

        Raises InvalidOption if they do not, StoreError if the note is damaged or not written.
        """
        mine = str(self._records.collection.id)
        owner = self._read()
        if owner is None and self._place:
            self._put([mine], replace=False)
            owner = self._read()  # of another process, if it was faster
        if owner is None:
            return
        place, known = owner
        if place != self._place:
            here = {str(model.id) for model in self._records.models()}
            if here.isdisjoint(known):
                raise self._refusal(place)
        if self._place and (place != self._place or mine not in known):
            self._put([*dict.fromkeys([*known, mine])], replace=True)

    def try_claim(self) -> None:
        """Like `claim`, but a note that cannot be written is no error: a store may be read-only."""
        try:
            self.claim()
        except _Damaged:
            raise
        except StoreError:  # read-only, or a remote tier that does not answer
            pass

    def _read(self) -> tuple[str, list[str]] | None:
        """Place and collections of the owner; None if there is no note."""
        if (text := self._notes.note(self._note)) is None:
            return None
        try:
            fields = json.loads(text)
            return str(fields["database"]), [str(id_) for id_ in fields["collections"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _Damaged(
                f"{self._file}, which names the database of the chunk caches, cannot be read, so "
                "no cache is deleted; next step: delete it, and open that database before any other"
            ) from error

    def _put(self, collections: list[str], *, replace: bool) -> None:
        text = json.dumps({"database": self._place, "collections": collections}, indent=2)
        self._notes.put_note(self._note, text, replace=replace)

    def _refusal(self, owner: str) -> InvalidOption:
        ways = "give each database a folder of caches (kv_dir, --dir) or a namespace of its own"
        if self._is_shared:
            ways = (
                "keep the records of all machines in one Chroma server (--chroma http://HOST:PORT "
                "of the commands, connect_collection), or give each database a remote tier or a "
                "namespace of its own"
            )
        return InvalidOption(
            f"the chunk caches in {self._where} (namespace {self._namespace!r}) belong to the "
            f"Chroma database {owner}, and would be deleted, because "
            f"{self._place or 'the database in memory'} has no records of them; {ways}; if that "
            f"database is gone for good, delete {self._file}"
        )


class _Damaged(StoreError):
    """The note is there and cannot be understood."""
