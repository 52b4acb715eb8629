"""The remote tier: chunk files in a place that many machines reach, S3 or whatever fsspec knows.

Objects are whole, written once and named by what they hold, so machines never disagree about one.
The folder of a store is the local tier. The secret that names and MACs are made with stays on the
machines.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samkv_integrations.cache.base import Outage
from samkv_integrations.cache.chunk import FORMAT_VERSION, Fingerprint
from samkv_integrations.cache.file_format import BAD_JSON, ChunkFile, open_regular
from samkv_integrations.cache.files import MAX_SMALL_BYTES, folder_named
from samkv_integrations.cache.folder import ChunkFolder, check_of
from samkv_integrations.cache.index import EVICTED, LOST, PRESENT, Entry, Place
from samkv_integrations.cache.objects import ObjectInfo, Objects
from samkv_integrations.errors import CacheMiss, InvalidOption, SamkvError, StoreError

ASKED_S = 10.0
"""Seconds after which a question waits no longer for a chunk."""

REFRESH_S = 60.0
"""Seconds after which the remote tier is asked again which texts there are."""

FINGERPRINTS_S = 30.0
"""Seconds for which fingerprints are remembered."""

KNOWN_S = 10.0
"""Seconds for which a listing is believed that was made to look ahead."""

HEAD_BYTES = 1 << 18
"""Bytes of a chunk file that hold what the index is told, unless its text is very long."""

MOST_HEAD_BYTES = 1 << 25
"""Bytes of a chunk file that hold it even then; no more is read of what was only listed."""

SLICE = 64
"""New chunks that are looked at in one go, so that a question's do not wait behind all of them."""

_LISTED = 32
"""Objects that are looked for one by one; more are listed."""

_MARKER = "store.json"
_MAX_AGREED = 1 << 16
_NAME = re.compile("[0-9a-f]{32}")
_CHUNK = re.compile(r"[0-9a-f]{2}/([0-9a-f]{32})\.safetensors")
_log = logging.getLogger(__name__)
_FAILS = (
    "caches cannot be shared with the remote tier (%s); what it cannot give is computed, and what "
    "it cannot take stays here until 'samkv store push'. This is said once"
)


def objects_outside(url: str, options: Mapping[str, object], folder: Path) -> Objects:
    """The objects of a remote tier.

    Raises InvalidOption if place and folder of the store lie in each other: the folder has the
    secret.
    """
    objects = Objects(url, options)
    if objects.is_local:
        place, own = folder_named("remote", objects.root).resolve(), folder.resolve()
        if place.is_relative_to(own):
            raise InvalidOption(
                f"remote={url!r} is in {folder}, the folder of the store itself; name a place "
                "outside, which other machines reach"
            )
        if own.is_relative_to(place):
            raise InvalidOption(
                f"{folder}, the folder of the store, is in remote={url!r}: other machines would "
                "read its secret there; name a folder of this machine outside"
            )
    return objects


@contextmanager
def _answering(what: str = "") -> Iterator[None]:
    """What cannot go on without the remote tier: a `CacheMiss` is a StoreError."""
    try:
        yield
    except CacheMiss as miss:
        why = f"{what} ({miss})" if what else str(miss)
        raise StoreError(f"{why}; next step: try again when the remote tier answers") from miss


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """What `SharedTier.refresh` found. n_new: chunks of other machines whose texts are known now.

    n_deleted: chunks that other machines deleted, and this one has deleted too.
    chunks: those of the remote tier.
    """

    n_new: int
    n_deleted: int
    chunks: Mapping[Place, ObjectInfo] = field(repr=False, compare=False)


class SharedTier:
    """A remote tier for the folder of a store, for many threads and processes.

    What waits for it raises `CacheMiss`: "absent", or "io" if it does not answer, at once while
    that is known. A place that does not answer yet is no error.

    Raises StoreError if the place is another store's.
    """

    def __init__(self, files: ChunkFolder, objects: Objects, namespace: str) -> None:
        self.url, self.objects = objects.url, objects
        self._files, self._index, self._namespace = files, files.index, namespace
        self._space = blake2b(
            namespace.encode(), key=files.secret, digest_size=16, person=b"samkv space"
        ).hexdigest()
        self._is_checked = False
        self._lock = threading.Lock()
        self._coming: dict[Place, Future[None]] = {}
        self._known: dict[str, tuple[float, set[str]]] = {}  # keys by digest, and until when
        self._fingerprints: tuple[float, list[Fingerprint]] = (0.0, [])
        self._refreshes_at = 0.0
        self._outage = Outage(_FAILS)
        try:
            self._read_marker()
        except CacheMiss as miss:
            self.tell(miss)
        else:
            self.refresh_soon()

    def tell(self, error: SamkvError) -> None:
        """Log that the remote tier fails: a warning the first time, at DEBUG from then on."""
        self._outage.tell(error)

    # -- the marker -----------------------------------------------------------------------------

    def _read_marker(self, *, patiently: bool = False, begins: bool = False) -> None:
        """See that the place is there, and of this secret and format: before it is changed.

        A place without a marker is new, and gets one, unless this machine has used it before: then
        it may be the empty folder in place of a share that is not mounted. begins: gets one anyway.

        What was in another place, or in this one before it was begun anew, was not deleted by
        anybody: this machine forgets that it was there, and `push` puts it again.

        Raises CacheMiss ("io") if it does not answer, StoreError if it is another store's.
        """
        setting = f"remote tier of {self._namespace}"
        known, _, url = str(self._index.setting(setting) or "").partition(" ")
        mine = {"format_version": FORMAT_VERSION, "secret_check": check_of(self._files.secret)}
        try:
            found = self._read(_MARKER, patiently=patiently)
        except FileNotFoundError as error:
            if url == self.url and not begins:
                why = (
                    f"{_MARKER} is gone; mount the share, or, if it was emptied, begin it anew "
                    "with 'samkv store push'"
                )
                self.objects.give_up(why)
                raise CacheMiss("io", f"{self.url}: {why}") from error
            text = json.dumps({**mine, "identity": secrets.token_hex(8)})
            with suppress(FileExistsError):  # another machine was faster
                self.objects.write(_MARKER, text.encode(), is_new=True)
            found = self._read(_MARKER)
        if found.get("secret_check") != mine["secret_check"]:
            raise StoreError(
                f"{self.url} holds chunk caches that were written under another secret; next step: "
                "give this machine the secret of the store that filled it, and a new folder "
                "(docs/remote.md), or name another place"
            )
        if (version := found.get("format_version")) != FORMAT_VERSION:
            raise StoreError(
                f"{self.url} has format version {version!r}, this release uses {FORMAT_VERSION}; "
                "next step: name another place, or use the release that filled it"
            )
        identity = str(found.get("identity", ""))
        if (known, url) != (identity, self.url):
            with suppress(StoreError):  # a folder that can only be read
                if known != identity:
                    self._index.unshare(self._namespace)
                self._index.set(setting, f"{identity} {self.url}")
            if known not in ("", identity):
                _log.warning("%s is new; 'samkv store push' puts what is here", self.url)
        self._is_checked = True

    def _check(self) -> None:
        if not self._is_checked:
            self._read_marker()

    def check_answers(self) -> None:
        """Raises StoreError if the place does not answer, or is one that is not mounted."""
        with _answering("nothing is deleted while the remote tier does not answer"):
            self._read_marker(patiently=True)

    # -- chunks ---------------------------------------------------------------------------------

    def _path(self, digest: str, key: str) -> str:
        """Where a chunk's object is, or would be. Raises CacheMiss for what is no key."""
        if not (_NAME.fullmatch(digest) and _NAME.fullmatch(key)):
            raise CacheMiss("absent", repr(key))
        return f"{self._space}/{digest}/{key[:2]}/{key}.safetensors"

    def look_ahead(self, digest: str, keys: Collection[str]) -> None:
        """Many chunks are going to be looked for: list them, once for all. Best effort."""
        self._known.pop(digest, None)
        if len(keys) > _LISTED:
            with suppress(CacheMiss, StoreError):
                self._check()
                listed = self._list(digest, patiently=False)
                found = {key for (_, key), info in listed.items() if info.n_bytes}
                self._known[digest] = (time.monotonic() + KNOWN_S, found)

    def has(self, digest: str, key: str) -> bool:
        """Whether a chunk is there; False if nobody can tell."""
        until, known = self._known.get(digest, (0.0, set()))
        if time.monotonic() < until:
            return key in known
        return self.info(digest, key) is not None

    def info(self, digest: str, key: str) -> ObjectInfo | None:
        """What is known of a chunk's object, None if there is none or nobody can tell."""
        with suppress(CacheMiss, StoreError, FileNotFoundError):
            self._check()
            found = self.objects.info(self._path(digest, key))
            return found if found.n_bytes else None
        return None

    def _get(
        self, digest: str, key: str, *, n_bytes: int | None = None, patiently: bool = False
    ) -> bytes:
        """A chunk's file, or its first ``n_bytes``. Raises CacheMiss."""
        self._check()
        with suppress(FileNotFoundError):
            path = self._path(digest, key)
            if data := self.objects.read(path, n_bytes=n_bytes, patiently=patiently):
                return data
        self._known.clear()
        raise CacheMiss("absent", f"{self.url}: {key}")

    def begin(self, key: str, digest: str) -> Future[None]:
        """Begin to fetch a chunk, unless that has begun already."""
        place = (digest, key)
        with self._lock:
            found = self._coming.get(place)
            if found is None:
                found = self._coming[place] = self.objects.pool.submit(self._fetch, place)
                found.add_done_callback(lambda _: self._coming.pop(place, None))
            return found

    def fetch(self, key: str, digest: str) -> None:
        """Bring a chunk into the folder, all of it verified.

        Raises CacheMiss: "absent", "corrupt" (which is emptied, to be put again), or "io" if it
        takes longer than a question waits, or the folder has no room for it.
        """
        is_gone = self.objects.is_gone
        try:
            self.begin(key, digest).result(0 if is_gone else ASKED_S)
        except TooLate as error:
            if is_gone:  # who does not wait learns nothing of it: it is to be asked again in time
                raise self.objects.gone() from error
            why = f"takes longer than {ASKED_S:.0f} s"
            self.objects.give_up(why)  # the next chunk does not wait as long again
            raise CacheMiss("io", f"{self.url} {why}") from error
        except (StoreError, OSError) as error:
            raise CacheMiss("io", str(error)) from error

    def _fetch(self, place: Place) -> None:
        if self._files.is_gone(*place):  # else it came since it was missed
            self.bring(place)

    def bring(self, place: Place, *, patiently: bool = False) -> int:
        """Bring a chunk of the remote tier into the folder; its bytes.

        Raises CacheMiss or StoreError.
        """
        digest, key = place

        def verified(file: Path, *, is_whole: bool = True) -> Entry:
            try:
                with self._opened(file, key) as chunk:
                    if (found := chunk.layout.fingerprint.digest) != digest:
                        raise CacheMiss("fingerprint", f"{self.url}: {found}")
                    if is_whole:
                        chunk.verify()
                    return Entry.of_file(chunk)
            except CacheMiss as miss:
                if miss.is_damage:
                    self.discard(digest, key)
                raise

        n_bytes = None
        if self.objects.is_local:  # a file of any size: no more is read than its header says
            self._check()
            n_bytes, path = 0, self._path(digest, key)
            with suppress(FileNotFoundError):
                if self.objects.info(path, patiently=patiently).n_bytes:
                    n_bytes = verified(Path(self.objects.root, path), is_whole=False).n_bytes
        data = self._get(digest, key, n_bytes=n_bytes, patiently=patiently)
        self._files.put(key, digest, [data], verified)
        self.mark([place])
        try:
            self.objects.info(self._path(digest, key), patiently=patiently)
        except FileNotFoundError as error:
            # Whoever deleted it meanwhile may have been here too early for the file.
            self._read_marker(patiently=patiently)  # raises if the share was unmounted instead
            self._index.delete(self._namespace, [key])
            raise CacheMiss("absent", f"{self.url}: {key}") from error
        except CacheMiss as miss:  # `refresh` deletes it if it has gone
            self.tell(miss)
        return len(data)

    def _opened(self, file: Path, key: str) -> ChunkFile:
        return ChunkFile(file, key, namespace=self._namespace, secret=self._files.secret)

    def discard(self, digest: str, key: str) -> None:
        """Empty a damaged object, so that a sound one is put in its place. Best effort.

        It is not deleted: other machines delete what they have of a chunk that was.
        """
        path = self._path(digest, key)
        with suppress(CacheMiss, FileNotFoundError):  # it was deleted meanwhile
            self.objects.info(path)
            self.objects.write(path, b"")
        self._known.clear()

    def share(self, entry: Entry, data: bytes) -> bool:
        """Put a chunk into the remote tier; whether it is there. Else it stays, for `push`."""
        try:
            self._read_marker()
            self.objects.write(self._path(entry.digest, entry.key), data)
        except (CacheMiss, StoreError) as error:
            self.tell(error)
            return False
        if entry.digest in self._known:
            self._known[entry.digest][1].add(entry.key)
        return True

    def send(self, place: Place) -> int:
        """Put a chunk of the folder into the remote tier; its bytes, 0 if it has gone.

        Raises CacheMiss, OSError or StoreError.
        """
        file = self._files.file(place[1], place[0])
        try:
            with open_regular(file) as opened:
                data = opened.readall()
            self._files.entry(file)  # raises
        except FileNotFoundError:  # evicted meanwhile
            return 0
        self.objects.write(self._path(*place), data, patiently=True)
        self.mark([place])
        return len(data)

    def mark(self, places: Collection[Place]) -> None:
        """Take note that chunks are in the remote tier."""
        with suppress(StoreError):  # one that is not marked is put again by `push`
            self._index.mark_shared(self._namespace, places)

    def delete(self, keys: Collection[str]) -> set[str]:
        """Delete chunks of whatever fingerprint; the keys of those that there were.

        Raises StoreError if it cannot be done for all: what is left is deleted by the next try.
        """
        with _answering("not all can be deleted from the remote tier"):
            self._read_marker(patiently=True)
            named = [key for key in keys if _NAME.fullmatch(key)]
            paths = [(k, self._path(d, k)) for d in self._digests(patiently=True) for k in named]
            gone = self.objects.pool.map(
                lambda one: one[0] if self.objects.remove(one[1]) else "", paths
            )
            self._fingerprints = (0.0, [])
            self._known.clear()
            return {*gone} - {""}

    def listed(self) -> dict[Place, ObjectInfo]:
        """All chunks; those that were found damaged have no bytes.

        Raises StoreError if the remote tier does not answer.
        """
        found: dict[Place, ObjectInfo] = {}
        with _answering():
            for digest in self._digests(patiently=True):
                found |= self._list(digest, patiently=True)
        return found

    def _list(self, digest: str, *, patiently: bool) -> dict[Place, ObjectInfo]:
        listed = self.objects.listed(f"{self._space}/{digest}", patiently=patiently)
        named = ((_CHUNK.fullmatch(name), info) for name, info in listed.items())
        return {(digest, name[1]): info for name, info in named if name}

    def _digests(self, *, patiently: bool = False) -> list[str]:
        names = self.objects.names(self._space, patiently=patiently)
        return [name for name in names if _NAME.fullmatch(name)]

    # -- what all machines have -------------------------------------------------------------------

    def refresh_soon(self) -> None:
        """`refresh` in a thread of its own, unless that was done a moment ago."""

        def quietly() -> None:
            try:
                self.refresh()
            except SamkvError as error:
                self.tell(error)

        with self._lock:
            if time.monotonic() < self._refreshes_at:
                return
            self._refreshes_at = time.monotonic() + REFRESH_S
        threading.Thread(target=quietly, name="samkv-refresh", daemon=True).start()

    def refresh(self) -> Refreshed:
        """Learn the texts of chunks that other machines have put, and delete what they deleted.

        Raises StoreError if the remote tier does not answer.
        """
        with _answering():
            self._read_marker(patiently=True)
        before = self._index.shared(self._namespace)
        listed = self.listed()  # after: what this machine has put since is no stranger
        gone = sorted({key for digest, key in before if (digest, key) not in listed})
        if gone:  # a share that was unmounted since is listed as an empty one
            with _answering():
                self._read_marker(patiently=True)
        self._index.delete(self._namespace, gone)
        chunks = {place: info for place, info in listed.items() if info.n_bytes}
        places = self._index.places(self._namespace, PRESENT, EVICTED, LOST)
        known = {(digest, key) for digest, key, _ in places}
        self.mark(chunks.keys() & known)
        new = sorted(chunks.keys() - known)
        n_new = 0
        for begin in range(0, len(new), SLICE):
            heads = self.objects.pool.map(
                lambda place: self._head(place, chunks[place].n_bytes), new[begin : begin + SLICE]
            )
            read = [entry for entry in heads if entry]
            self._index.learn(read)
            n_new += len(read)
        return Refreshed(n_new=n_new, n_deleted=len(gone), chunks=chunks)

    def _head(self, place: Place, size: int) -> Entry | None:
        """What the index is told of a remote chunk; None if it is damaged or has gone."""
        for n_bytes in (HEAD_BYTES, min(size, MOST_HEAD_BYTES)):
            with suppress(CacheMiss, OSError), TemporaryDirectory("samkv") as folder:
                file = Path(folder) / "head"
                file.write_bytes(self._get(*place, n_bytes=n_bytes))
                os.truncate(file, size)  # what was not read is a hole
                with self._opened(file, place[1]) as chunk:
                    if chunk.layout.fingerprint.digest == place[0]:
                        return Entry.of_file(chunk)
        return None

    def fingerprints(self) -> list[Fingerprint]:
        """Of which there are chunks; none if the remote tier does not answer."""
        until, found = self._fingerprints
        if time.monotonic() < until:
            return found
        found = []
        try:
            self._check()
            known = {each.digest: each for each in self._index.fingerprints(are_present=False)}
            for digest in self._digests():
                for place, info in self._list(digest, patiently=False).items():
                    if digest not in known and (entry := self._head(place, info.n_bytes)):
                        known[digest] = Fingerprint(**entry.fields)
                    if digest in known:
                        found.append(known[digest])
                        break
        except (CacheMiss, StoreError) as error:
            self.tell(error)
        else:
            self._fingerprints = (time.monotonic() + FINGERPRINTS_S, found)
        return found

    def agree(self, name: str, value: int) -> int:
        """The value of a setting: that of which machine was first. Raises StoreError."""
        name = blake2b(name.encode(), digest_size=16).hexdigest()
        if (text := self.note(name)) is None:
            self.put_note(name, json.dumps({"value": value}), replace=False)
            text = self.note(name)
        try:
            found = json.loads(text or "")["value"]
        except BAD_JSON:
            found = None
        if type(found) is not int or not 0 < found <= _MAX_AGREED:
            raise self._damaged(self._note(name))
        return found

    def note(self, name: str) -> str | None:
        """See `Store.note`; one of all machines. Raises StoreError if the remote does not say."""
        with _answering():
            self._check()
            with suppress(FileNotFoundError):
                return self._read_small(self._note(name)).decode(errors="replace")
            return None

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """See `Store.put_note`. Raises StoreError."""
        with _answering():
            self._read_marker()
            try:
                self.objects.write(self._note(name), text.encode(), is_new=not replace)
            except FileExistsError:
                return False
            return True

    def note_url(self, name: str) -> str:
        """Where a note is."""
        return f"{self.url.rstrip('/')}/{self._note(name)}"

    def _note(self, name: str) -> str:
        return f"{self._space}/notes/{name}.json"

    def _read(self, path: str, *, patiently: bool = False) -> dict[str, Any]:
        text = self._read_small(path, patiently=patiently)
        try:
            return {**json.loads(text)}
        except BAD_JSON as error:
            raise self._damaged(path) from error

    def _read_small(self, path: str, *, patiently: bool = False) -> bytes:
        # S3 knows no part of an empty object
        n_bytes = MAX_SMALL_BYTES if self.objects.is_local else None
        return self.objects.read(path, n_bytes=n_bytes, patiently=patiently)

    def _damaged(self, path: str) -> StoreError:
        return StoreError(
            f"{self.url}/{path} is damaged; next step: delete it, or name another place"
        )

    def begin_anew(self) -> None:
        """Give the place a marker if it was emptied. Raises StoreError."""
        with _answering():
            self._read_marker(patiently=True, begins=True)
