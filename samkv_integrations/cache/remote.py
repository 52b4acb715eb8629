"""Chunk files as objects in a place that many machines reach: S3, or whatever fsspec knows.

Objects are whole, written once and named by what they hold, so machines never disagree about one.
The secret that their names and MACs are made with stays on the machines.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as fields_of
from hashlib import blake2b
from typing import Any

from samkv_integrations.cache.checked_file import BAD_JSON
from samkv_integrations.cache.chunk import FORMAT_VERSION, Fingerprint
from samkv_integrations.cache.marker import check_of
from samkv_integrations.cache.objects import ObjectInfo, Objects
from samkv_integrations.errors import CacheMiss, SamkvError, StoreError

HEAD_BYTES = 1 << 17
"""Bytes of a chunk file that hold what its index is told, unless its text is very long."""

KNOWN_S = 10.0
"""Seconds for which a listing is believed that was made to look ahead."""

FINGERPRINTS_S = 30.0
"""Seconds for which fingerprints are remembered."""

_LISTED = 32
"""Objects that are looked for one by one; more are listed."""

_MARKER = "store.json"
_MAX_AGREED = 1 << 16
# What the fields of a fingerprint may raise if a stranger made them up.
_STRANGE = (*BAD_JSON, AssertionError, RuntimeError, MemoryError, ArithmeticError, SamkvError)
_DIGEST = re.compile("[0-9a-f]{32}")
_CHUNK = re.compile(r"[0-9a-f]{2}/([0-9a-f]{32})\.safetensors")

Place = tuple[str, str]
"""Digest of the fingerprint, and key, of a chunk."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What there is of a namespace's chunks: those with a file, and those found damaged."""

    chunks: Mapping[Place, ObjectInfo]
    damaged: frozenset[Place]

    def __contains__(self, place: Place) -> bool:
        """Whether a chunk was put, and not deleted since."""
        return place in self.chunks or place in self.damaged


class RemoteTier:
    """The chunk files of one namespace, in a place of fsspec's. For many threads and processes.

    Whatever is raised while a question waits is a `CacheMiss`: "absent", or "io" if the place does
    not answer, at once while that is known. Most methods raise StoreError if the place is another
    store's, see `claim`.

    Args:
        objects: of the place.
        secret: of the store; the place takes no other one.
        namespace: whose chunks these are.
    """

    def __init__(self, objects: Objects, secret: bytes, namespace: str) -> None:
        self.url, self.objects = objects.url, objects
        self._check = check_of(secret)
        self._space = blake2b(
            namespace.encode(), key=secret, digest_size=16, person=b"samkv space"
        ).hexdigest()
        self.is_known = False  # whether this machine has used the place before
        self.identity = ""  # what the place was named when it was new, once it is claimed
        self._is_claimed = False
        self._lock = threading.RLock()
        self._known: dict[str, tuple[float, set[str]]] = {}  # keys by digest, and until when
        self._fingerprints: tuple[float, dict[str, Fingerprint]] = (0.0, {})

    def claim(self, *, patiently: bool = False) -> None:
        """See that the objects are of this secret and format, and write that down in a new place.

        patiently: ask although the place did not answer a moment ago.

        Raises StoreError if they are not, CacheMiss ("io") if the place does not answer.
        """
        if self._is_claimed:
            return
        self._require_mounted(patiently=patiently)
        mine = {
            "format_version": FORMAT_VERSION, "secret_check": self._check,
            "identity": secrets.token_hex(8),
        }  # fmt: skip
        found = self._agree(_MARKER, mine, patiently=patiently)
        self._require_same_secret(found)
        if (version := found.get("format_version")) != FORMAT_VERSION:
            raise StoreError(
                f"{self.url} has format version {version!r}, this release uses {FORMAT_VERSION}; "
                "next step: name another place, or use the release that filled it"
            )
        self.identity = str(found.get("identity", ""))
        self._is_claimed = self.is_known = True

    def _require_same_secret(self, found: Mapping[str, Any]) -> None:
        if found.get("secret_check") != self._check:
            raise StoreError(
                f"{self.url} holds chunk caches that were written under another secret; next step: "
                "give this machine the secret of the store that filled it (docs/remote.md), or "
                "name another place"
            )

    def require_same_secret(self) -> None:
        """See that the objects, if there are any, are of this secret; nothing is written.

        Raises like `claim`.
        """
        with suppress(FileNotFoundError):  # a new place
            self._require_same_secret(self._read(_MARKER))

    def reclaim(self) -> None:
        """`claim` again, patiently: the place may have been emptied since. Raises as it does."""
        self._is_claimed = False
        self.claim(patiently=True)

    def begin_anew(self) -> None:
        """`claim` of a place that was emptied on purpose. Raises as it does."""
        self.is_known = False
        self.reclaim()

    def _require_mounted(self, *, patiently: bool) -> None:
        """Raises CacheMiss ("io") for the empty folder that stands where a share is not mounted.

        It would take all that is written. A bucket that is empty was emptied.
        """
        if self.is_known and self.objects.local_folder is not None:
            try:
                self.objects.info(_MARKER, patiently=patiently)
            except FileNotFoundError as error:
                why = (
                    f"{_MARKER} is gone; mount the share, or, if it was emptied, begin it anew "
                    "with 'samkv store push'"
                )
                self.objects.give_up(why)
                raise CacheMiss("io", f"{self.url}: {why}") from error

    # -- chunks ---------------------------------------------------------------------------------

    def _path(self, digest: str, key: str) -> str:
        return f"{self._space}/{digest}/{key[:2]}/{key}.safetensors"

    def look_ahead(self, digest: str, keys: Collection[str]) -> None:
        """Many chunks are going to be looked for: list them, once for all. Best effort."""
        with self._lock:
            self._known.pop(digest, None)
        if len(keys) > _LISTED:
            with suppress(CacheMiss, StoreError):
                self.claim()
                listed = self._list(digest, patiently=False)
                found = {key for (_, key), info in listed.items() if info.n_bytes}
                with self._lock:
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
            self.claim()
            found = self.objects.info(self._path(digest, key))
            return found if found.n_bytes else None
        return None

    def get(
        self, digest: str, key: str, *, n_bytes: int | None = None, patiently: bool = False
    ) -> bytes:
        """A chunk's file, or its first ``n_bytes``. Raises CacheMiss."""
        self.claim()
        path = self._path(digest, key)
        with suppress(FileNotFoundError):
            if data := self.objects.read(path, n_bytes=n_bytes, patiently=patiently):
                return data
        self._forget([key])
        raise CacheMiss("absent", f"{self.url}: {key}")

    def put(
        self, digest: str, key: str, fields: Mapping[str, Any], data: bytes, *, patiently: bool
    ) -> None:
        """Keep a chunk's file. fields: of its fingerprint. Raises CacheMiss ("io")."""
        self.claim()
        self._require_mounted(patiently=patiently)
        if digest not in self.fingerprints():
            self._agree(f"{self._space}/{digest}/fingerprint.json", dict(fields))
            self._fingerprints = (0.0, {})
        self.objects.write(self._path(digest, key), data, patiently=patiently)
        with self._lock:
            if digest in self._known:
                self._known[digest][1].add(key)

    def delete(self, keys: Collection[str]) -> set[str]:
        """Delete chunks of whatever fingerprint; the keys of those that there were.

        Raises StoreError if it cannot be done for all: what is left is deleted by the next try.
        """
        try:
            self.claim(patiently=True)
            digests = self._digests(patiently=True)
            paths = [(key, self._path(digest, key)) for digest in digests for key in keys]
            gone = self.objects.pool.map(
                lambda one: one[0] if self.objects.remove(one[1]) else "", paths
            )
            self._fingerprints = (0.0, {})
            return {*gone} - {""}
        except CacheMiss as miss:
            raise StoreError(
                f"not all can be deleted from the remote tier ({miss}); next step: try again when "
                "it answers"
            ) from miss
        finally:
            self._forget(keys)

    def check_answers(self) -> None:
        """Raises StoreError if the place does not answer, or is one that is not mounted."""
        try:
            self.reclaim()
        except CacheMiss as miss:
            raise StoreError(
                f"nothing is deleted while the remote tier does not answer ({miss}); next step: "
                "try again when it does"
            ) from miss

    def discard(self, digest: str, key: str) -> None:
        """Empty a damaged object, so that a sound one is put in its place. Best effort.

        It is not deleted: other machines delete what they have of a chunk that was.
        """
        path = self._path(digest, key)
        with suppress(CacheMiss, FileNotFoundError):  # it was deleted meanwhile
            self.objects.info(path)
            self.objects.write(path, b"")
        self._forget([key])

    def _forget(self, keys: Collection[str]) -> None:
        with self._lock:
            for _, known in self._known.values():
                known.difference_update(keys)

    def listed(self) -> Listing:
        """All chunks. Raises CacheMiss ("io")."""
        self.claim(patiently=True)
        found: dict[Place, ObjectInfo] = {}
        for digest in self._digests(patiently=True):
            found |= self._list(digest, patiently=True)
        damaged = frozenset(place for place, info in found.items() if not info.n_bytes)
        return Listing(
            chunks={place: info for place, info in found.items() if place not in damaged},
            damaged=damaged,
        )

    def _list(self, digest: str, *, patiently: bool) -> dict[Place, ObjectInfo]:
        listed = self.objects.listed(f"{self._space}/{digest}", patiently=patiently)
        named = ((_CHUNK.fullmatch(name), info) for name, info in listed.items())
        return {(digest, name[1]): info for name, info in named if name}

    def _digests(self, *, patiently: bool) -> list[str]:
        names = self.objects.names(self._space, patiently=patiently)
        return [name for name in names if _DIGEST.fullmatch(name)]

    # -- what machines agree on -----------------------------------------------------------------

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Fingerprints by digest, of which there may be a chunk. Raises CacheMiss ("io")."""
        until, found = self._fingerprints
        if time.monotonic() < until:
            return found
        self.claim()
        found = {}
        for digest in self._digests(patiently=False):
            folder = f"{self._space}/{digest}"
            with suppress(FileNotFoundError):  # its chunks have not come yet
                made_by = _fingerprint(self._read(f"{folder}/fingerprint.json"), digest)
                if made_by and self.objects.names(folder) != ["fingerprint.json"]:
                    found[digest] = made_by
        self._fingerprints = (time.monotonic() + FINGERPRINTS_S, found)
        return found

    def agree(self, name: str, value: int) -> int:
        """The value of a setting: that of which machine was first. Raises CacheMiss ("io")."""
        self.claim()
        named = blake2b(name.encode(), digest_size=16).hexdigest()
        path = f"{self._space}/notes/{named}.json"
        found = self._agree(path, {"value": value}).get("value")
        if not isinstance(found, int) or not 0 < found <= _MAX_AGREED:
            raise self._damaged(path)
        return found

    def note(self, name: str) -> str | None:
        """A note that `put_note` left. Raises CacheMiss ("io")."""
        self.claim()
        try:
            return self.objects.read(self._note(name)).decode(errors="replace")
        except FileNotFoundError:
            return None

    def put_note(self, name: str, text: str, *, replace: bool) -> bool:
        """Keep a note; whether it was kept, as there may be one. Raises CacheMiss ("io")."""
        self.claim()
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

    def _agree(self, path: str, mine: dict[str, Any], *, patiently: bool = False) -> dict[str, Any]:
        """What an object says that is written once, by whichever machine was first."""
        try:
            return self._read(path, patiently=patiently)
        except FileNotFoundError:
            with suppress(FileExistsError):
                self.objects.write(path, json.dumps(mine).encode(), is_new=True)
            return self._read(path)

    def _read(self, path: str, *, patiently: bool = False) -> dict[str, Any]:
        text = self.objects.read(path, patiently=patiently)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damaged(path) from error
        if not isinstance(found, dict):
            raise self._damaged(path)
        return found

    def _damaged(self, path: str) -> StoreError:
        return StoreError(
            f"{self.url}/{path} is damaged; next step: delete it, or name another place"
        )


def _fingerprint(fields: Mapping[str, Any], digest: str) -> Fingerprint | None:
    """The fingerprint of these fields, if it is a sound one and the one that ``digest`` names."""
    try:
        made_by = Fingerprint(**fields)
        is_typed = all(
            type(getattr(made_by, f.name)).__name__ == f.type for f in fields_of(made_by)
        )
        is_sound = made_by.scheme.of(1).n_blocks > 0 and made_by.entry_format.n_bytes > 0
        return made_by if is_typed and is_sound and made_by.digest == digest else None
    except _STRANGE:  # of a later release, or made up
        return None
