"""Taking a folder for a store whose caches are shared: its secret has to be the remote tier's."""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from samkv_integrations.cache.chunk import SECRET_BYTES
from samkv_integrations.cache.files import Writer
from samkv_integrations.cache.marker import Claimed, claim, secret_of
from samkv_integrations.cache.objects import Objects
from samkv_integrations.cache.remote import RemoteTier
from samkv_integrations.errors import CacheMiss, InvalidOption


def claim_with_remote(
    folder: Path, writer: Writer, given: bytes | None, objects: Objects | None
) -> Claimed:
    """What a folder is, see `marker.claim`.

    Nothing is written into a new folder if its remote tier is another store's, so that the right
    secret is taken at the next try.

    given: the secret, if not that of the environment or of the folder.
    objects: of the remote tier; None for a folder of one machine.

    Raises StoreError and InvalidOption as `ChunkStore` does.
    """
    secret = secret_of(given)
    if objects is not None:
        _require_outside(objects, folder)
        if not (folder / "store.json").exists():
            _require_right_secret(objects, folder / "secret", secret)
    return claim(folder, writer, secret, is_bound=given is not None or objects is not None)


def _require_outside(objects: Objects, folder: Path) -> None:
    """Raises InvalidOption if place and folder lie in each other: the folder has the secret."""
    place = objects.local_folder
    if place is None:
        return
    place, own = place.resolve(), folder.resolve()
    if place.is_relative_to(own):
        raise InvalidOption(
            f"remote={objects.url!r} is in {folder}, the folder of the store itself; name a place "
            "outside, which other machines reach"
        )
    if own.is_relative_to(place):
        raise InvalidOption(
            f"{folder}, the folder of the store, is in remote={objects.url!r}: other machines "
            "would read its secret there; name a folder of this machine outside"
        )


def _require_right_secret(objects: Objects, copied: Path, given: bytes | None) -> None:
    """Raises StoreError if a remote tier that answers is not of a new folder's secret."""
    secret = given or secrets.token_bytes(SECRET_BYTES)
    with suppress(FileNotFoundError):  # it may have been copied from another machine
        secret = copied.read_bytes()
    if len(secret) == SECRET_BYTES:  # else it is damaged, as `claim` says
        with suppress(CacheMiss):
            RemoteTier(objects, secret, namespace="").require_same_secret()
