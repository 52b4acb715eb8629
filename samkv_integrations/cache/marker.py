"""The two files that make a folder a store: its format version, and its secret."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from samkv_integrations.cache.chunk import FORMAT_VERSION, SECRET_BYTES
from samkv_integrations.cache.files import TEMPORARY, Writer, write_file
from samkv_integrations.errors import InvalidOption, StoreError

_OWN_NAME = re.compile(
    rf"(store\.json|secret)(\..*{re.escape(TEMPORARY)})?|writers|index\.lock|samkv\.toml"
)
_CHECKED_SINCE = 4


SECRET_VARIABLE = "SAMKV_STORE_SECRET"
"""Environment variable with the secret of all stores that a process opens, 64 hex digits."""


def secret_of(given: bytes | None) -> bytes | None:
    """The secret that was given, or is in the environment. Raises InvalidOption if it is none."""
    if given is None and (said := os.environ.get(SECRET_VARIABLE)):
        try:
            given = bytes.fromhex(said)
        except ValueError:
            given = b""
    if given is not None and (not isinstance(given, bytes) or len(given) != SECRET_BYTES):
        raise InvalidOption(  # not what it is
            f"the secret of a store is {SECRET_BYTES} bytes, in {SECRET_VARIABLE} "
            f"{2 * SECRET_BYTES} hex digits; make one with 'openssl rand -hex {SECRET_BYTES}', or "
            "take that of the store that other machines share"
        )
    return given


class Claimed(NamedTuple):
    """The format version and the secret of a folder."""

    version: int
    secret: bytes


def claim(
    folder: Path, writer: Writer, given: bytes | None = None, is_bound: bool = False
) -> Claimed:
    """What a folder is, which is made a store if it is empty.

    given: the secret of a new store; None for a random one.
    is_bound: whether it has to be the secret of a store that is there, too.

    Raises StoreError if it is something else, damaged, of a newer format version, or of another
    secret.
    """
    marker, file = folder / "store.json", folder / "secret"
    if not marker.exists():
        strangers = [n for n in sorted(os.listdir(folder)) if not _OWN_NAME.fullmatch(n)]
        # Another process may have made the store meanwhile: the marker is before all but these.
        if strangers and not marker.exists():
            raise StoreError(
                f"{folder} is not a store: it has no store.json and holds {strangers[0]!r}; "
                "next step: name a new or empty folder"
            )
        if not file.exists():
            own = given or secrets.token_bytes(SECRET_BYTES)
            write_small(file, own, writer, replace=False)
        write_marker(folder, writer, file.read_bytes(), replace=False)
    version, check = _read_marker(marker)
    try:
        secret = file.read_bytes()
    except FileNotFoundError:
        secret = b""
    if len(secret) != SECRET_BYTES or check not in (None, check_of(secret)):
        raise StoreError(
            f"{file} is damaged, and nothing in {folder} can be read without it; next step: "
            f"restore it from a copy, or ingest into a new folder"
        )
    if is_bound and given not in (None, secret):
        raise StoreError(
            f"{folder} is a store of another secret than the one that is given; next step: name a "
            f"new folder, or give the secret that is in {file}"
        )
    return Claimed(version, secret)


def write_marker(folder: Path, writer: Writer, secret: bytes, *, replace: bool) -> None:
    """Make a folder one of this format version."""
    fields = {"format_version": FORMAT_VERSION, "secret_check": check_of(secret)}
    write_small(folder / "store.json", json.dumps(fields).encode(), writer, replace=replace)


def write_small(file: Path, data: bytes, writer: Writer, *, replace: bool) -> bool:
    """Write a file at once; whether it was written, as another process may have been faster."""
    try:
        write_file(file, [data], writer.temporary(file), exclusive=not replace)
    except FileExistsError:
        return False
    return True


def _read_marker(marker: Path) -> tuple[int, str | None]:
    try:
        fields = json.loads(marker.read_bytes())
        version, check = fields["format_version"], fields.get("secret_check")
        if type(version) is not int or not isinstance(check, str | None):
            raise TypeError(fields)
        if _CHECKED_SINCE <= version <= FORMAT_VERSION and check is None:
            raise LookupError("secret_check")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{marker} is damaged; next step: restore it from a copy, or ingest into a new folder"
        ) from error
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{marker.parent} has format version {version}, this release uses {FORMAT_VERSION}; "
            "next step: ingest again into a new folder, or use the release that made this one"
        )
    return version, check


def check_of(secret: bytes) -> str:
    """Says whether a secret is the right one, and nothing of it."""
    return hashlib.blake2b(key=secret, digest_size=16, person=b"samkv check").hexdigest()
