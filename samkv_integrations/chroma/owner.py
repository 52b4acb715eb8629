"""Whose the chunk caches of a store are: of one Chroma database, for each namespace.

What no record of a database references is pruned. A second database that kept its caches in the
same folder and namespace would lose all of them, so the store has a note of the first one.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from samkv_integrations.cache.base import Store
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.errors import InvalidOption, StoreError

DATABASE_FILE = "chroma.sqlite3"
"""What makes a folder that of a Chroma database."""

_MAX_COLLECTIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a Chroma database is.

    folder: of a local one, resolved; "" for a server's.
    server: host and port of another; "" for a local one. In memory it is neither.
    part: tenant and database: one folder or server may hold several, each with its own records.
    """

    folder: str = ""
    server: str = ""
    part: str = ""

    @property
    def is_lasting(self) -> bool:
        return bool(self.folder or self.server)

    @property
    def exists(self) -> bool:
        """Whether it is a local one that is still there."""
        try:
            return bool(self.folder) and (Path(self.folder) / DATABASE_FILE).is_file()
        except OSError:  # it may not be looked at, such as another user's
            return True

    def is_same(self, other: Location) -> bool:
        """Whether both are one place; a folder may have several names, such as of a mount."""
        if self == other or self.part != other.part or not (self.exists and other.exists):
            return self == other
        mine, theirs = (Path(one.folder) / DATABASE_FILE for one in (self, other))
        try:
            return mine.samefile(theirs)
        except OSError:
            return False

    def __str__(self) -> str:
        place = self.folder or self.server or "the database in memory"
        return f"{place} ({self.part})" if self.part else place


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """What the note says: where the database is, and ids of collections that it has had.

    caches: the folder of the store when it was written, resolved; "" in memory.
    """

    location: Location
    caches: str
    collections: tuple[str, ...]

    def to_json(self) -> str:
        place = self.location
        fields = {"folder": place.folder, "server": place.server, "part": place.part}
        rest = {"caches": self.caches, "collections": self.collections}
        return json.dumps({**fields, **rest}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> _Owner:
        """Raises ValueError, LookupError or TypeError if it is no such note."""
        fields = json.loads(text)
        names, caches = fields.pop("collections"), fields.pop("caches")
        values = [caches, *fields.values(), *names]
        if not (isinstance(names, list) and all(isinstance(value, str) for value in values)):
            raise TypeError(text)
        location = Location(**fields)
        if not location.is_lasting or any("\0" in value for value in values):  # no path has one
            raise ValueError(text)
        return cls(location=location, caches=caches, collections=tuple(names))


def _on_this_machine(location: Location) -> Location:
    """A place that other machines are told of: folders of the same name are on all of them."""
    if not location.folder:
        return location
    return replace(location, part=f"{location.part} on {socket.gethostname()}".strip())


class Ownership:
    """The claim of one collection's database on the caches of a store's namespace.

    Args:
        mine: where the collection's database is.
        collection: the id of the collection.
        collections: gives the ids of all collections of the database.
    """

    def __init__(
        self,
        store: Store,
        mine: Location,
        collection: str,
        collections: Callable[[], Collection[str]],
    ) -> None:
        self._store = store
        # a store that machines share has its note where they share it
        self._shared = store.shared if isinstance(store, ChunkStore) else None
        self._mine = mine if self._shared is None else _on_this_machine(mine)
        self._collection = collection
        self._collections = collections
        name = hashlib.blake2b(store.namespace.encode(), digest_size=8).hexdigest()
        self._note = f"chroma-owner-{name}"
        self._caches = str(store.path.resolve()) if isinstance(store, ChunkStore) else ""
        if self._shared is not None:
            self._caches = self._shared.url

    def claim(self) -> None:
        """Make sure that the caches are this database's, and take note of it.

        They are if nobody has claimed them; if the note names its place; if it has one of the
        collections that the note names, so that it is the same one, moved or reached by another
        way; or if the owner was in a folder of this machine and is gone. Of caches that were copied
        the owner has the original. A database in memory takes no note: it ends with its process,
        and the next one finds the caches again.

        Raises:
            InvalidOption: they are another database's.
            StoreError: the note is damaged, or cannot be written.
        """
        owner = self._read()
        if owner is not None and self._is_copied(owner):
            if self._mine.is_lasting:
                self._put(self._as_mine(()), replace=True)
            return
        if owner is None and self._mine.is_lasting:
            if self._put(self._as_mine(()), replace=False):
                return
            owner = self._read()  # another process was faster
            if owner is None:
                raise self._damaged()
        if owner is None or self._is_noted(owner):
            return
        if not self._is_mine(owner):
            raise self._refusal(owner)
        is_known = owner.location.is_same(self._mine) or self._has_one_of(owner)
        self._put(self._as_mine(owner.collections if is_known else ()), replace=True)

    def try_claim(self) -> None:
        """Like `claim`, for who only wants to use the caches: a store may be read-only."""
        with suppress(_NotWritten):
            self.claim()

    def _is_noted(self, owner: _Owner) -> bool:
        is_up_to_date = owner.location == self._mine and owner.caches == self._caches
        return is_up_to_date and self._collection in owner.collections

    def _is_mine(self, owner: _Owner) -> bool:
        theirs, mine = owner.location, self._mine
        if theirs.is_same(mine):
            return True
        if not mine.is_lasting or (theirs.exists and mine.folder):
            return False
        is_gone = self._shared is None and bool(theirs.folder and not theirs.exists)
        return self._has_one_of(owner) or is_gone

    def _is_copied(self, owner: _Owner) -> bool:
        """Whether the note speaks of another folder of caches, which is there too."""
        original = Path(owner.caches) / "store.json"
        try:
            return self._caches not in ("", owner.caches) and not original.samefile(
                Path(self._caches) / "store.json"
            )
        except OSError:  # it is gone: these caches were moved
            return False

    def _has_one_of(self, owner: _Owner) -> bool:
        return not {*owner.collections}.isdisjoint(self._collections())

    def _as_mine(self, collections: tuple[str, ...]) -> _Owner:
        known = dict.fromkeys((*collections, self._collection))
        return _Owner(
            location=self._mine,
            caches=self._caches,
            collections=tuple(known)[-_MAX_COLLECTIONS:],
        )

    # -- the note ---------------------------------------------------------------------------

    def _read(self) -> _Owner | None:
        try:
            text = (self._shared or self._store).note(self._note)
        except StoreError as error:  # a remote tier that does not answer
            raise _NotWritten(str(error)) from error
        if text is None:
            return None
        try:
            return _Owner.from_json(text)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged() from error

    def _put(self, owner: _Owner, *, replace: bool) -> bool:
        try:
            return (self._shared or self._store).put_note(
                self._note, owner.to_json(), replace=replace
            )
        except StoreError as error:
            raise _NotWritten(str(error)) from error

    @property
    def _file(self) -> str:
        store = self._store
        if self._shared is not None:
            return self._shared.note_url(self._note)
        return str(store.path / f"{self._note}.json") if isinstance(store, ChunkStore) else ""

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{self._file or self._note}, which says whose the chunk caches are, cannot be read, "
            "so none of them is deleted; next step: delete it, and open the database that the "
            "caches are of before any other"
        )

    def _refusal(self, owner: _Owner) -> InvalidOption:
        store = self._store
        where = str(store.path) if isinstance(store, ChunkStore) else "this store"
        ways = "give each database a folder of caches (kv_dir) or a namespace of its own"
        if self._shared is not None:
            where = self._shared.url
            ways = (
                "have all machines keep their records in one Chroma server (--chroma "
                "http://HOST:PORT of the commands, connect_collection), or give each database a "
                "remote tier or a namespace of its own"
            )
        gone = f"; if that database is gone for good, delete {self._file}" if self._file else ""
        return InvalidOption(
            f"the chunk caches in {where} (namespace {store.namespace!r}) are those of the Chroma "
            f"database {owner.location}, and would be deleted for want of a record in "
            f"{self._mine}; {ways}{gone}"
        )


class _NotWritten(StoreError):
    """The note could not be written."""
