"""The remote tier: chunk files in a bucket or folder that several machines share.

The folder of a store is the local tier. An object is written whole, and its name follows from its
content, so machines never disagree about it. The store's secret never leaves a machine.
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
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samkv_integrations.errors import CacheMiss, Given, InvalidOption, SamkvError, StoreError
from samkv_integrations.store.base import Outage
from samkv_integrations.store.chunk import FORMAT_VERSION
from samkv_integrations.store.chunk_file import ChunkFile, open_regular
from samkv_integrations.store.folder import (
    HEX_NAME,
    ChunkFolder,
    check_of,
    chunk_path,
    folder_named,
    marker_fields,
)
from samkv_integrations.store.index import EVICTED, LOST, PRESENT, Entry, Place
from samkv_integrations.store.objects import ObjectInfo, Objects

ASKED_S = 10.0
"""Seconds that a question waits for a chunk of the remote tier."""

REFRESH_S = 60.0
"""Seconds after which chunks that other machines put or deleted are looked for again."""

HEAD_BYTES = 1 << 18
"""Bytes read of a chunk file to index it: header, token ids and text, unless the text is long."""

MOST_HEAD_BYTES = 1 << 25
"""Bytes read if the text is long; a file with more before its entries is not indexed."""

SLICE = 64
"""New chunks whose heads are read at a time; between them a question's fetches may run."""

_MARKER = "store.json"
_log = logging.getLogger(__name__)
_FAILS = (
    "caches cannot be shared with the remote tier (%s); those that cannot be fetched are computed, "
    "and those that cannot be sent stay here until 'samkv store push'. This is said once"
)


def objects_outside(url: str, options: Mapping[str, object], folder: Path) -> Objects:
    """The objects of a remote tier.

    Raises InvalidOption if the place lies in the store's folder or the folder in the place: the
    folder holds the secret.
    """
    objects = Objects(url, options)
    if objects.is_local:
        place, own = folder_named("remote", objects.root).resolve(), folder.resolve()
        if place.is_relative_to(own) or own.is_relative_to(place):
            raise InvalidOption(
                Given("remote", url),
                f"; it must lie outside the store's folder {folder}, and must not contain it: "
                "other machines would read the store's secret; name another place",
            )
    return objects


@contextmanager
def _answering(what: str = "") -> Iterator[None]:
    """A block that needs the remote tier: a `CacheMiss` in it becomes a StoreError."""
    try:
        yield
    except CacheMiss as miss:
        why = f"{what} ({miss})" if what else str(miss)
        raise StoreError(f"{why}; next step: try again when the remote tier answers") from miss


class SharedTier:
    """The remote tier of a store's folder and namespace. Safe to use from many threads.

    Methods raise `CacheMiss` ("absent", or "io" if the place does not answer) unless they say
    otherwise. A place that does not answer can be opened. Raises StoreError if the place belongs to
    a store with another secret or format.
    """

    def __init__(self, files: ChunkFolder, objects: Objects, namespace: str) -> None:
        self.where, self.objects = objects.url, objects
        self._files, self._index, self._namespace = files, files.index, namespace
        self._space = blake2b(
            namespace.encode(), key=files.secret, digest_size=16, person=b"samkv space"
        ).hexdigest()
        self._chunk = re.compile(
            rf"{self._space}/([0-9a-f]{{32}})/[0-9a-f]{{2}}/([0-9a-f]{{32}})\.safetensors"
        )
        self._is_checked = False
        self._lock = threading.Lock()
        self._fetches: dict[Place, Future[int]] = {}
        self._refreshes_at = self._models_at = 0.0
        self.outage = Outage(_FAILS)
        try:
            self._read_marker()
        except CacheMiss as miss:
            self.outage.tell(miss)
        else:
            self.refresh_soon()

    # -- the marker -----------------------------------------------------------------------------

    def _read_marker(self, *, begins: bool = False) -> None:
        """Check that the place is there, and has this store's secret and format.

        A place without a marker is new, and gets one. If this machine has used the place before,
        it may be an empty folder where a share should be mounted: the place then counts as not
        answering, unless ``begins``. Each marker has a random identity. If it has changed, the
        place was emptied or replaced, and missing chunks were not deleted: `push` sends them again.

        Raises CacheMiss ("io"), or StoreError if the place belongs to another store.
        """
        setting = f"remote tier of {self._namespace}"
        known, _, url = str(self._index.setting(setting) or "").partition(" ")
        mine = {"format_version": FORMAT_VERSION, "secret_check": check_of(self._files.secret)}
        try:
            found = self._marker()
        except FileNotFoundError as error:
            if url == self.where and not begins:
                why = (
                    f"{_MARKER} is gone; mount the share, or, if it was emptied, begin it anew "
                    "with 'samkv store push'"
                )
                self.objects.give_up(why)
                raise CacheMiss("io", f"{self.where}: {why}") from error
            text = json.dumps({**mine, "identity": secrets.token_hex(8)})
            with suppress(FileExistsError):  # another machine was faster
                self.objects.write(_MARKER, text.encode(), is_new=True)
            found = self._marker()
        if found["secret_check"] != mine["secret_check"]:
            raise StoreError(
                f"{self.where} holds chunk caches that were written under another secret; next "
                "step: give this machine the secret of the store that filled it, and a new folder "
                "(docs/remote.md), or name another place"
            )
        identity = str(found.get("identity", ""))
        if (known, url) != (identity, self.where):
            with suppress(StoreError):  # a read-only folder
                if known != identity:
                    self._index.unshare(self._namespace)
                self._index.set(setting, f"{identity} {self.where}")
            if known not in ("", identity):
                _log.warning("%s is new; 'samkv store push' sends what is here", self.where)
        self._is_checked = True

    def _marker(self) -> dict[str, Any]:
        """Raises FileNotFoundError, and StoreError as `marker_fields` does."""
        return marker_fields(self.objects.read(_MARKER), self.where, "delete it")

    def _check(self) -> None:
        if not self._is_checked:
            self._read_marker()

    def check_answers(self, what: str = "", *, begins: bool = False) -> None:
        """Ask the place now; raises StoreError if it does not answer.

        what: the beginning of the error. begins: whether the place may have been emptied.
        """
        self.objects.ask_again()
        with _answering(what):
            self._read_marker(begins=begins)

    # -- single chunks --------------------------------------------------------------------------

    def _path(self, place: Place) -> str:
        """Path of a chunk's object. Raises CacheMiss for an invalid key."""
        digest, key = place
        return f"{self._space}/{chunk_path(key, digest)}"

    def has(self, place: Place) -> bool:
        """Whether a chunk is in the remote tier, or was when this machine last looked."""
        self.refresh_soon()
        with suppress(CacheMiss, StoreError):
            if self._index.is_shared(*place):
                return True
            self._check()
            return self.objects.exists(self._path(place))
        return False

    def begin(self, place: Place) -> Future[int]:
        """Begin to fetch a chunk, unless that has begun already."""
        with self._lock:
            found = self._fetches.get(place)
            if found is None:
                found = self._fetches[place] = self.objects.pool.submit(self.bring, place)
                found.add_done_callback(lambda _: self._fetches.pop(place, None))
            return found

    def fetch(self, place: Place) -> None:
        """`bring` a chunk for a question, which waits `ASKED_S`. Raises CacheMiss only."""
        if self.objects.is_gone:
            raise self.objects.gone()
        try:
            self.begin(place).result(ASKED_S)
        except TooLate as error:
            why = f"takes longer than {ASKED_S:.0f} s"
            self.objects.give_up(why)  # the next chunk does not wait as long again
            raise CacheMiss("io", f"{self.where} {why}") from error
        except (StoreError, OSError) as error:
            raise CacheMiss("io", str(error)) from error

    def bring(self, place: Place) -> int:
        """Fetch a chunk into the folder, verified; returns its bytes, 0 if it is there already.

        Raises CacheMiss or StoreError. A damaged object stays until the chunk is put again.
        """
        digest, key = place
        if not self._files.is_gone(digest, key):  # another request has just fetched it
            return 0
        since = self._index.deletions(self._namespace)  # a deletion meanwhile wins

        def verified(file: Path) -> Entry:
            with self._opened(file, key) as chunk:
                chunk.verify()
                return Entry.of_file(chunk)

        data = self._get(place)
        self._files.put(key, digest, [data], verified, since)
        self._mark([place])
        return len(data)

    def _get(self, place: Place, n_bytes: int | None = None) -> bytes:
        """A chunk's file, or its first ``n_bytes``."""
        self._check()
        try:
            return self.objects.read(self._path(place), n_bytes)
        except FileNotFoundError as error:
            raise CacheMiss("absent", f"{self.where}: {place[1]}") from error

    def _opened(self, file: Path, key: str) -> ChunkFile:
        return ChunkFile(file, key, namespace=self._namespace, secret=self._files.secret)

    def share(self, place: Place) -> None:
        """Send a chunk that was just put into the folder. If that fails, `push` sends it later."""
        try:
            self._read_marker()
            self.send(place)
        except (CacheMiss, StoreError, OSError) as error:
            self.outage.tell(error)

    def send(self, place: Place) -> int:
        """Send a chunk of the folder; returns its bytes, 0 if it is gone. Also raises OSError."""
        file = self._files.file(place[1], place[0])
        try:
            with open_regular(file) as opened:
                data = opened.readall()
            self._files.entry(file)  # raises if it is damaged
        except FileNotFoundError:  # evicted meanwhile
            return 0
        self.objects.write(self._path(place), data)
        # A deletion deletes a chunk here first, then there. If it did both before the chunk was
        # sent, the index no longer has the chunk.
        if not self._mark([place]):
            self.objects.remove(self._path(place))
        return len(data)

    def _mark(self, places: Collection[Place]) -> bool:
        """Note in the index that chunks are in the remote tier; returns whether it knows one."""
        with suppress(StoreError):  # `push` sends unmarked chunks again
            return self._index.mark_shared(self._namespace, places)
        return True

    def delete(self, keys: Collection[str]) -> set[str]:
        """Delete chunks of every fingerprint; returns the keys that existed. Raises StoreError."""
        self.check_answers()
        with _answering("not all can be deleted from the remote tier"):
            places = [(d, k) for d in self._digests() for k in keys if HEX_NAME.fullmatch(k)]
            gone = self.objects.pool.map(self.objects.remove, map(self._path, places))
            return {key for (_, key), was_there in zip(places, gone, strict=True) if was_there}

    # -- all chunks -----------------------------------------------------------------------------

    def listed(self) -> dict[Place, ObjectInfo]:
        """All chunks. Raises StoreError if the place does not answer."""
        with _answering():
            return self._list(self._space)

    def _list(self, folder: str) -> dict[Place, ObjectInfo]:
        found = self.objects.listed(folder)
        named = ((self._chunk.fullmatch(name), info) for name, info in found.items())
        return {(name[1], name[2]): info for name, info in named if name}

    def _digests(self) -> list[str]:
        return [name for name in self.objects.names(self._space) if HEX_NAME.fullmatch(name)]

    def refresh_soon(self) -> None:
        """`refresh` in a background thread, at most every `REFRESH_S`."""

        def quietly() -> None:
            try:
                if not self.objects.is_gone:
                    self.refresh()
            except SamkvError as error:
                self.outage.tell(error)

        with self._lock:
            if time.monotonic() < self._refreshes_at:
                return
            self._refreshes_at = time.monotonic() + REFRESH_S
        threading.Thread(target=quietly, name="samkv-refresh", daemon=True).start()

    def refresh(self) -> dict[Place, ObjectInfo]:
        """Index the chunks that other machines have put, and delete those that they deleted.

        Returns all chunks of the remote tier. Raises StoreError if it does not answer.
        """
        self.check_answers()
        before = self._index.shared(self._namespace)
        listed = self.listed()  # after `before`: chunks that are put meanwhile are not deleted
        with _answering():  # one by one: a list may lack folders that cannot be read
            missing = before - listed.keys()
            gone = [place for place in missing if not self.objects.exists(self._path(place))]
        if gone:
            self.check_answers()  # a share that was unmounted meanwhile is listed as empty
            self._files.delete(self._namespace, sorted({key for _, key in gone}))
        places = self._index.places(self._namespace, PRESENT, EVICTED, LOST)
        known = {(digest, key) for digest, key, _ in places}
        self._mark(listed.keys() & known)
        new = sorted(listed.keys() - known)
        for begin in range(0, len(new), SLICE):
            self._learn(new[begin : begin + SLICE], listed)
        return listed

    def learn_models(self) -> None:
        """Index a chunk of each fingerprint that has none here, at most every `REFRESH_S`."""
        if time.monotonic() < self._models_at:
            return
        try:
            self._check()
            found = self._index.fingerprints(self._namespace)
            for digest in set(self._digests()) - {made_by.digest for made_by in found}:
                listed = self._list(f"{self._space}/{digest}")
                self._learn(list(listed)[:1], listed)
            self._models_at = time.monotonic() + REFRESH_S
        except (CacheMiss, StoreError) as error:
            self.outage.tell(error)

    def _learn(self, places: Collection[Place], listed: Mapping[Place, ObjectInfo]) -> None:
        """Index chunks of the remote tier, without their entries."""
        heads = self.objects.pool.map(lambda place: self._head(place, listed[place]), places)
        self._index.learn([entry for entry in heads if entry])

    def _head(self, place: Place, info: ObjectInfo) -> Entry | None:
        """The index entry of a remote chunk, from its first bytes; None if it is damaged."""
        for n_bytes in (HEAD_BYTES, MOST_HEAD_BYTES):
            with suppress(CacheMiss, OSError), TemporaryDirectory("samkv") as folder:
                file = Path(folder) / "head"
                file.write_bytes(self._get(place, n_bytes))
                os.truncate(file, info.n_bytes)  # the rest is a hole: only the head is read
                with self._opened(file, place[1]) as chunk:
                    return replace(Entry.of_file(chunk), used_at=info.modified_at)
        return None

    # -- notes ----------------------------------------------------------------------------------

    def note(self, name: str) -> str | None:
        """See `Notes.note`; shared by all machines. Raises StoreError if the place is gone."""
        with _answering(), suppress(FileNotFoundError):
            self._check()
            return self.objects.read(self._note(name)).decode(errors="replace")
        return None

    def put_note(self, name: str, text: str, *, replace: bool = True) -> bool:
        """See `Notes.put_note`. Raises StoreError."""
        with _answering():
            self._read_marker()
            try:
                self.objects.write(self._note(name), text.encode(), is_new=not replace)
            except FileExistsError:
                return False
        return True

    def note_place(self, name: str) -> str:
        """The URL of a note."""
        return f"{self.where.rstrip('/')}/{self._note(name)}"

    def _note(self, name: str) -> str:
        return f"{self._space}/notes/{name}.json"
