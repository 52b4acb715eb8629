"""API keys: whose requests are answered, and what each may read."""

from __future__ import annotations

import hashlib
import hmac
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from samkv_integrations.errors import InvalidOption

LEAST_LENGTH = 16
"""Characters of the shortest key: fewer could be tried out."""

_FORM = "give each line as KEY, KEY NAMESPACE, or KEY NAMESPACE COLLECTION..."


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Whoever holds a key. namespace: of its chunk caches. collections: what it may ask."""

    namespace: str = ""
    collections: tuple[str, ...] = ()


class ApiKeys:
    """The keys that a server knows, as SHA-256 digests; none of them lets everybody in.

    Args:
        text: a key a line, see `_FORM`; quoted as in a shell, ``#`` begins a comment.
        everybody: whose the requests are without keys, and those of keys that name no namespace.

    Raises InvalidOption for a line that is none, a short key, or one that stands there twice. No
    message holds a key.
    """

    def __init__(self, text: str, everybody: Tenant) -> None:
        self._everybody = everybody
        self._tenants: dict[bytes, Tenant] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise InvalidOption(f"API keys, line {number}: {error}; {_FORM}") from error
            if words:
                self._add(number, *words)

    def _add(self, number: int, key: str, *rest: str) -> None:
        if len(key) < LEAST_LENGTH or not (key.isascii() and key.isprintable()):
            raise InvalidOption(
                f"API keys, line {number}: a key has at least {LEAST_LENGTH} characters, all of "
                f"them visible ASCII, and this one has {len(key)}; {_FORM}"
            )
        digest = _digest(key)
        if digest in self._tenants:
            raise InvalidOption(f"API keys, line {number}: the key stands there twice; keep one")
        is_bound = bool(rest)
        self._tenants[digest] = (
            Tenant(namespace=rest[0], collections=rest[1:]) if is_bound else self._everybody
        )

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> Iterable[Tenant]:
        """Everybody whose requests are answered."""
        return set(self._tenants.values()) or {self._everybody}

    def tenant_of(self, authorization: str | None) -> Tenant | None:
        """Whose a request with this header is; None if nobody's.

        The time that it takes says nothing about the keys.
        """
        if not self._tenants:
            return self._everybody
        scheme, _, key = (authorization or "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
