"""The folder of a store as the local tier of a place that many machines share."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from tempfile import TemporaryDirectory

from samkv_integrations.cache import tables
from samkv_integrations.cache.checked_file import BAD_JSON
from samkv_integrations.cache.chunk import Fingerprint, digest_of
from samkv_integrations.cache.chunk_file import ChunkFile
from samkv_integrations.cache.chunk_folder import ChunkFolder
from samkv_integrations.cache.chunk_head import read_head
from samkv_integrations.cache.files import Writer, make_folder, remove, write_file
from samkv_integrations.cache.index import Index
from samkv_integrations.cache.objects import ObjectInfo
from samkv_integrations.cache.outage import Outage
from samkv_integrations.cache.remote import HEAD_BYTES, Listing, Place, RemoteTier
from samkv_integrations.cache.tables import EVICTED, Entry
from samkv_integrations.errors import CacheMiss, SamkvError, StoreError

_log = logging.getLogger(__name__)

ASKED_S = 10.0
"""Seconds after which a question waits no longer for a chunk."""

REFRESH_S = 60.0
"""Seconds after which the remote tier is asked again which texts there are."""

SLICE = 64
"""New chunks that are looked at in one go, so that a question's do not wait behind all of them."""

_FAILS = (
    "caches cannot be shared with the remote tier (%s); what it cannot give is computed, and what "
    "it cannot take stays here until 'samkv store push'. This is said once"
)


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """What `SharedTier.refresh` found. n_new: chunks of other machines whose texts are known now.

    n_deleted: chunks that other machines deleted, and this one has deleted too.
    chunks: those of the remote tier.
    """

    n_new: int
    n_deleted: int
    chunks: Mapping[Place, ObjectInfo] = field(repr=False, compare=False)


def require_unshared(index: Index, namespace: str, keys: Collection[str]) -> None:
    """Raises StoreError if one of these chunks is known to be in a remote tier."""
    found = index.database.read(lambda c: tables.shared(c, namespace))
    there = {key for _, key in found}.intersection(keys)
    if there:
        raise StoreError(
            f"{len(there)} of these chunk caches are in a remote tier too, where other machines "
            "would still find them; next step: open the store with remote=, or give --remote"
        )


@contextmanager
def _answering() -> Iterator[None]:
    """What cannot go on without the remote tier: a `CacheMiss` is a StoreError."""
    try:
        yield
    except CacheMiss as miss:
        raise StoreError(f"{miss}; next step: try again when the remote tier answers") from miss


class SharedTier:
    """What the folder of a store and a remote tier do for each other.

    Args:
        files: of the store. writer: this process. namespace: of the store.
        reserve: makes room for a file in the folder. Raises StoreError.
    """

    def __init__(
        self,
        files: ChunkFolder,
        remote: RemoteTier,
        writer: Writer,
        namespace: str,
        reserve: Callable[[Entry, str], None],
    ) -> None:
        self.remote = remote
        self._files, self._index, self._writer = files, files.index, writer
        self._namespace, self._reserve = namespace, reserve
        self._lock = threading.Lock()
        self._coming: dict[Place, Future[None]] = {}
        self._refreshes_at = 0.0
        self._outage = Outage(_FAILS)

    def begin_to_share(self) -> None:
        """See whose the remote tier is, and begin to learn what there is.

        Raises StoreError if it is another store's. That it does not answer is no error.
        """
        with suppress(StoreError):  # an index that cannot be read says so elsewhere
            known = self._index.database.read(lambda c: tables.value(c, self._named("place")))
            self.remote.is_known = known == self.remote.url
        try:
            self.remote.claim()
        except CacheMiss as miss:
            self.tell(miss)
        else:
            with suppress(StoreError):  # a folder that can only be read
                self._follow_place()
            self.refresh_soon()

    def begin_anew(self) -> None:
        """Begin the remote tier anew if it was emptied. Raises StoreError."""
        with _answering():
            self.remote.begin_anew()
        self._follow_place()

    def _named(self, setting: str) -> str:
        return f"{setting} of the remote tier of {self._namespace}"

    # -- chunks that are read -------------------------------------------------------------------

    def begin(self, key: str, fingerprint: Fingerprint) -> Future[None]:
        """Begin to fetch a chunk, unless that has begun already."""
        place = (fingerprint.digest, key)
        with self._lock:
            found = self._coming.get(place)
            if found is None:
                fetch = partial(self._fetch, key, fingerprint)
                found = self._coming[place] = self.remote.objects.pool.submit(fetch)
                found.add_done_callback(lambda _: self._coming.pop(place, None))
            return found

    def fetch(self, key: str, fingerprint: Fingerprint) -> None:
        """Bring a chunk into the folder, all of it verified.

        Raises CacheMiss: "absent", "corrupt" (which is emptied, to be put again), or "io" if it
        takes longer than a question waits, or the folder has no room for it.
        """
        objects = self.remote.objects
        is_gone = objects.is_gone
        try:
            self.begin(key, fingerprint).result(0 if is_gone else ASKED_S)
        except TooLate as error:
            if is_gone:  # who does not wait learns nothing of it: it is to be asked again in time
                raise objects.gone() from error
            why = f"takes longer than {ASKED_S:.0f} s"
            objects.give_up(why)  # the next chunk does not wait as long again
            raise CacheMiss("io", f"{self.remote.url} {why}") from error
        except (StoreError, OSError) as error:
            raise CacheMiss("io", str(error)) from error

    def _fetch(self, key: str, fingerprint: Fingerprint) -> None:
        if not self._files.file(key, fingerprint.digest).is_file():  # it came since it was missed
            self._keep(key, fingerprint, self.remote.get(fingerprint.digest, key))

    def _keep(self, key: str, fingerprint: Fingerprint, data: bytes) -> None:
        """Write a fetched file into the folder, if it is sound."""
        file = self._files.file(key, fingerprint.digest)
        make_folder(file.parents[1])
        make_folder(file.parent)
        # Not beside its place: nothing counts it yet, and this is where `recover` looks for it.
        at_first = self._files.path / file.name
        arrived = self._writer.temporary(at_first)
        try:
            write_file(arrived, [data], self._writer.temporary(at_first))
            try:
                with ChunkFile(
                    arrived, key, fingerprint, namespace=self._namespace, secret=self._files.secret
                ) as chunk:
                    chunk.verify()
                    entry = self._entry(chunk, len(data))
            except CacheMiss as miss:
                if miss.is_damage:
                    self.remote.discard(fingerprint.digest, key)
                raise
            self._reserve(entry, arrived.name)
            try:
                arrived.rename(file)
                self._index.keep(entry, arrived.name, is_gone=self._files.is_gone)
            except BaseException:
                with suppress(StoreError):
                    self._index.budget.release(arrived.name)
                raise
        finally:
            remove(arrived)
        self._mark([(fingerprint.digest, key)])

    def _entry(self, chunk: ChunkFile, n_bytes: int) -> Entry:
        made_by = chunk.fingerprint
        return Entry(
            digest=made_by.digest, key=chunk.key, namespace=self._namespace, text=chunk.text(),
            token_ids=chunk.token_ids.tolist(), n_bytes=n_bytes, fields=asdict(made_by),
            used_at=time.time(),
        )  # fmt: skip

    # -- chunks that are written ----------------------------------------------------------------

    def share(self, entry: Entry, data: bytes) -> None:
        """Put a chunk into the remote tier. If that fails it stays here, for `push`."""
        try:
            self.remote.put(entry.digest, entry.key, entry.fields, data, patiently=False)
        except (CacheMiss, StoreError) as error:
            self.tell(error)
        else:
            self._mark([(entry.digest, entry.key)])

    def tell(self, error: SamkvError) -> None:
        """Log that the remote tier fails: a warning the first time, at DEBUG from then on."""
        self._outage.tell(error)

    def delete(self, keys: Collection[str]) -> set[str]:
        """Delete chunks for all machines; the keys of those that there were. Raises StoreError."""
        gone = self.remote.delete(keys)
        self._index.database.write(lambda c: tables.unmark_shared(c, self._namespace, keys))
        return gone

    def _mark(self, places: Collection[Place]) -> None:
        with suppress(StoreError):  # one that is not marked is put again by `push`
            self._index.database.write(lambda c: tables.mark_shared(c, self._namespace, places))

    # -- what all machines have -----------------------------------------------------------------

    def fingerprints(self) -> list[Fingerprint]:
        """Of the remote tier; none if it does not answer."""
        try:
            return list(self.remote.fingerprints().values())
        except (CacheMiss, StoreError) as error:
            self.tell(error)
            return []

    def agree(self, name: str, value: int) -> int:
        """The value of a setting on all machines. Raises StoreError if the remote does not say."""
        with _answering():
            return self.remote.agree(name, value)

    def note(self, name: str) -> str | None:
        """See `Store.note`; one of all machines. Raises StoreError if the remote does not say."""
        with _answering():
            return self.remote.note(name)

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """See `Store.put_note`. Raises StoreError."""
        with _answering():
            return self.remote.put_note(name, text, replace=replace)

    def refresh_soon(self) -> None:
        """`refresh` in a thread of its own, unless that was done a moment ago."""
        with self._lock:
            if time.monotonic() < self._refreshes_at:
                return
            self._refreshes_at = time.monotonic() + REFRESH_S
        threading.Thread(target=self._refresh_quietly, name="samkv-refresh", daemon=True).start()

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except SamkvError as error:
            self.tell(error)

    def refresh(self) -> Refreshed:
        """Learn the texts of chunks that other machines have put, and delete what they deleted.

        Raises StoreError if the remote tier does not answer.
        """
        with _answering():
            self.remote.reclaim()
        self._follow_place()
        before = self._index.database.read(lambda c: tables.shared(c, self._namespace))
        listed = self.listed()  # after: what this machine has put since is no stranger
        gone = sorted({key for digest, key in before if (digest, key) not in listed})
        if gone:
            found = self._index.begin_to_delete(self._namespace, gone)
            self._files.remove(found)
            self._index.database.write(lambda c: tables.unmark_shared(c, self._namespace, gone))
        chunks = listed.chunks
        digests = {digest for digest, _ in chunks}
        known = {(d, key) for d in digests for key in self._index.known(self._namespace, d)}
        self._mark(chunks.keys() & known)
        new = [(place, chunks[place]) for place in sorted(chunks.keys() - known)]
        slices = (new[begin : begin + SLICE] for begin in range(0, len(new), SLICE))
        n_new = sum(map(self._learn, slices))
        return Refreshed(n_new=n_new, n_deleted=len(gone), chunks=chunks)

    def _follow_place(self) -> None:
        """What was in another remote tier, or in this one before it was emptied, was not deleted.

        It is unknown again whether it is there, and `push` puts it. For a place that is claimed.
        """
        name, identity = self._named("identity"), self.remote.identity

        def work(connection: Connection) -> bool:
            before = tables.value(connection, name)
            tables.set_value(connection, name, identity)
            tables.set_value(connection, self._named("place"), self.remote.url)
            if is_other := before not in (None, identity):
                tables.unmark_shared(connection, self._namespace)
            return is_other

        if self._index.database.write(work):
            _log.warning("%s is a new one; 'samkv store push' puts what is here", self.remote.url)

    def _learn(self, new: Sequence[tuple[Place, ObjectInfo]]) -> int:
        """Take note of chunks that are not here; how many could be read."""
        read = [entry for entry in self.remote.objects.pool.map(self._head, new) if entry]

        def work(connection: Connection) -> None:
            for entry in read:
                if self._files.is_gone(entry.digest, entry.key):
                    tables.keep(connection, entry, self._index.windows_of, state=EVICTED)

        self._index.database.write(work)
        self._mark([(entry.digest, entry.key) for entry in read])
        return len(read)

    def _head(self, found: tuple[Place, ObjectInfo]) -> Entry | None:
        """What the index is told of a remote chunk; None if it is damaged or has gone."""
        (digest, key), there = found
        for n_bytes in (HEAD_BYTES, there.n_bytes):
            with suppress(CacheMiss, OSError, *BAD_JSON), TemporaryDirectory("samkv") as folder:
                file = Path(folder) / key
                file.write_bytes(self.remote.get(digest, key, n_bytes=n_bytes, patiently=True))
                os.truncate(file, there.n_bytes)  # what was not read is a hole
                head = read_head(file, self._files.secret)
                if (digest_of(head.fields), head.key, head.namespace) == (
                    digest, key, self._namespace,
                ):  # fmt: skip
                    return Entry(
                        digest=digest, key=key, namespace=head.namespace, text=head.text,
                        token_ids=head.token_ids,
                        n_bytes=0, fields=head.fields, used_at=there.modified_at,
                    )  # fmt: skip
        return None

    # -- chunks that are copied, whether or not a question needs them ------------------------------

    def listed(self) -> Listing:
        """The chunks of the remote tier. Raises StoreError if it does not answer."""
        with _answering():
            return self.remote.listed()

    def lacks(self, place: Place) -> bool:
        """Whether the folder has no file of a chunk."""
        return self._files.is_gone(*place)

    def send(self, place: Place) -> int:
        """Put a chunk of the folder into the remote tier; its bytes, 0 if it has gone.

        Raises CacheMiss, OSError or StoreError.
        """
        file = self._files.file(place[1], place[0])
        try:
            data, entry = file.read_bytes(), self._files.entry(file)
        except FileNotFoundError:  # evicted meanwhile
            return 0
        self.remote.put(*place, entry.fields, data, patiently=True)
        self._mark([place])
        return len(data)

    def bring(self, place: Place) -> int:
        """Bring a chunk of the remote tier into the folder; its bytes.

        Raises CacheMiss, OSError or StoreError.
        """
        made_by = self.remote.fingerprints().get(place[0])
        if made_by is None:
            raise CacheMiss("fingerprint", f"{self.remote.url}: {place[0]}")
        data = self.remote.get(*place, patiently=True)
        self._keep(place[1], made_by, data)
        return len(data)
