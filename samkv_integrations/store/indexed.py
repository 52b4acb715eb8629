"""A store of chunk caches with an index: the methods that do not depend on where caches are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from samkv_integrations.errors import FingerprintMismatch, Given, InvalidOption, StoreError
from samkv_integrations.option import bytes_of
from samkv_integrations.store.base import IngestStore, Notes
from samkv_integrations.store.chunk import (
    Fingerprint,
    check_keys,
    check_namespace,
    chunk_key,
    normalise,
)
from samkv_integrations.store.index import EVICTED, Index, IndexedChunks
from samkv_integrations.store.windows import ChunkIndex


@dataclass(frozen=True, kw_only=True)
class FingerprintStats:
    """The caches of one fingerprint in one namespace, in figures.

    bytes: of chunk files.
    hits, misses: chunks of prompts that had a cache, and that had none.
    evicted: caches that made room for others. corrupt: caches that were found damaged.
    """

    model: str
    dtype: str
    store_bits: int
    block_size: int
    prefix: str
    format_version: int
    chunks: int
    bytes: int
    namespace: str = ""
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    corrupt: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the chunks of prompts that had a cache; None before the first prompt."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """The caches of a store, in figures: in total, and by fingerprint and namespace.

    max_bytes: the budget of all namespaces together; None for no limit.
    """

    n_chunks: int
    bytes: int
    rows: tuple[FingerprintStats, ...]
    max_bytes: int | None = None


class IndexedStore(IngestStore):
    """A store with an index.

    A subclass keeps the caches: it has `put`, `open` and the notes. This class adds methods to
    `IngestStore` for commands, and for links between records and caches.
    """

    namespace: str = ""

    def __init__(self, namespace: str, secret: bytes, index: Index, where: str) -> None:
        self.namespace = check_namespace(namespace)
        self.secret, self.index, self.where = secret, index, where

    def key(self, fingerprint: Fingerprint, token_ids: Sequence[int]) -> str:
        return chunk_key(self.secret, self.namespace, fingerprint.digest, token_ids)

    # -- single caches --------------------------------------------------------------------------

    def contains(self, key: str, fingerprint: Fingerprint, *, here: bool = False) -> bool:
        with suppress(StoreError):
            return self.index.has(fingerprint.digest, key)
        return False

    def begin_to_fetch(self, keys: Collection[str], fingerprint: Fingerprint) -> None: ...

    def age_s(self, key: str, fingerprint: Fingerprint) -> float | None:
        """Seconds since a cache was put, touched or used; None if the chunk is unknown."""
        state, used_at = self.index.state(fingerprint.digest, key)
        return None if state is None else max(0.0, time.time() - used_at)

    def touch(self, key: str, fingerprint: Fingerprint) -> None:
        with suppress(StoreError):
            self.index.touch(fingerprint.digest, key)

    def record(
        self, fingerprint: Fingerprint, *, used: Sequence[str] = (), missed: Sequence[str] = ()
    ) -> None:
        with suppress(StoreError):
            self.index.record(self.namespace, fingerprint.digest, used, missed)

    def quarantine(self, key: str, fingerprint: Fingerprint) -> None:
        with suppress(StoreError):
            self.index.lose([(fingerprint.digest, key)], are_damaged=True)

    def is_evicted(self, key: str, fingerprint: Fingerprint) -> bool:
        """Whether a cache was put, and evicted since."""
        return self.index.state(fingerprint.digest, key)[0] == EVICTED

    def free_bytes(self) -> int | None:
        """Bytes that caches may still take without evicting others; None without a budget."""
        return self.index.free_bytes(self.namespace)

    # -- deletion -------------------------------------------------------------------------------

    def deletions(self) -> int:
        return self.index.deletions(self.namespace)

    def check_delete(self, *keys: str) -> None:
        """Raises StoreError if `delete` would, as far as that is known in advance."""

    def delete(self, *keys: str) -> int:
        check_keys(keys)
        return len(self.index.delete(self.namespace, keys))

    def forget(
        self, is_wanted: Callable[[str], bool], token_ids: Sequence[Sequence[int]] = ()
    ) -> int:
        texts = self.index.texts(self.namespace)
        named = {
            chunk_key(self.secret, self.namespace, digest, ids)
            for digest in {digest for digest, *_ in texts}
            for ids in token_ids
        }
        keys = {
            key for _, key, body in texts if key in named or (body and is_wanted(normalise(body)))
        }
        self.delete(*sorted(keys))
        return len(keys)

    # -- the chunks that there are --------------------------------------------------------------

    def keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        return self.index.keys(self.namespace, fingerprint, are_present=True)

    def known_keys(self, fingerprint: Fingerprint | None = None) -> list[str]:
        """Sorted keys of the chunks whose text is known, with or without a cache."""
        return self.index.keys(self.namespace, fingerprint)

    def same_texts(self, *keys: str) -> set[str]:
        """These keys, and those of chunks of any fingerprint with the same body as one of them."""
        return self.index.same_texts(self.namespace, keys)

    def text(self, key: str) -> str | None:
        return next((text for *_, text in self.index.texts(self.namespace, key)), None)

    def chunk_index(self, fingerprint: Fingerprint) -> ChunkIndex:
        return IndexedChunks(self.index, self.namespace, fingerprint.digest)

    def fingerprints(self) -> list[Fingerprint]:
        return self.index.fingerprints(self.namespace)

    def elsewhere(self) -> str | None:
        names = sorted({namespace for namespace, *_ in self.index.totals(None)})
        if self.namespace or not names or "" in names:
            return None  # a named namespace that is empty is a new one
        named = " and ".join(map(repr, names[:3]))
        return f"namespace {named} of {self.where} (give namespace=)"

    def stats(self, *, everyone: bool = False) -> StoreStats:
        """The store in figures. everyone: whether for all namespaces, and not only this one."""
        made_by = {each.digest: each for each in self.index.fingerprints()}
        sums: dict[FingerprintStats, Counter[str]] = {}
        for namespace, digest, *figures in self.index.totals(None if everyone else self.namespace):
            if (known := made_by.get(digest)) is not None:
                row = FingerprintStats(
                    model=known.model, dtype=known.dtype, store_bits=known.store_bits,
                    block_size=known.block_size, prefix=known.prefix,
                    format_version=known.format_version, namespace=namespace, chunks=0, bytes=0,
                )  # fmt: skip
                names = ("chunks", "bytes", "hits", "misses", "evicted", "corrupt")
                sums.setdefault(row, Counter()).update(dict(zip(names, figures, strict=True)))
        rows = tuple(replace(row, **dict[str, Any](figures)) for row, figures in sums.items())
        return StoreStats(
            n_chunks=sum(row.chunks for row in rows), bytes=sum(row.bytes for row in rows),
            rows=rows, max_bytes=self.index.budget()[0],
        )  # fmt: skip

    def reconcile(self) -> None:
        """Make the index agree with the caches that there are, such as those of killed writers."""

    # -- settings and notes ---------------------------------------------------------------------

    def set_budget(
        self, max_bytes: int | str | None = None, quota: Mapping[str, int | str] | None = None
    ) -> None:
        """Limit the bytes of caches, for all processes and until it is set again.

        The least recently used caches are evicted, and computed again when a prompt needs them.

        max_bytes: of all namespaces together, a number or a size such as ``"20GB"``; None for no
            limit.
        quota: of single namespaces, by name.

        Raises InvalidOption if one is not a size, StoreError if it cannot be stored.
        """
        limit = None if max_bytes is None else bytes_of("max_bytes", max_bytes)
        self.index.set_budget(limit, quotas_of(quota))

    def agree_block_size(self, fingerprint: Fingerprint, size: int) -> int:
        # the name must not depend on the block size
        name = f"block-size {replace(fingerprint, block_size=1).digest} {self.namespace}"
        self.index.set(name, size, replace=False)
        return int(self.index.setting(name))

    @property
    def remote_url(self) -> str | None:
        """The URL of the remote tier, if there is one."""
        return None

    @property
    def notes(self) -> Notes:
        """The notes that are common to all machines that share the caches."""
        return self


def quotas_of(quota: object) -> dict[str, int]:
    """Bytes by namespace, without limits of None. Raises InvalidOption unless it is a mapping."""
    if quota is not None and not isinstance(quota, Mapping):
        raise InvalidOption(Given("quota", quota), "; it must be a mapping of namespaces to bytes")
    return {
        check_namespace(name): bytes_of(name, size)
        for name, size in (quota or {}).items()
        if size is not None
    }


def require(store: IngestStore, fingerprint: Fingerprint) -> None:
    """Raises `FingerprintMismatch` if a store has chunks, and none of this fingerprint."""
    known = store.fingerprints()
    if known and fingerprint.digest not in {each.digest for each in known}:
        raise _mismatch(fingerprint, known, store.where)


def _mismatch(wanted: Fingerprint, known: Sequence[Fingerprint], where: str) -> FingerprintMismatch:
    """Names the fields in which the most similar fingerprint differs, and the next step."""
    mine = asdict(wanted)

    def differing(other: Fingerprint) -> dict[str, Any]:
        fields = asdict(other).items()
        return {name: value for name, value in fields if name != "model" and value != mine[name]}

    closest = min(known, key=lambda other: len(differing(other)))
    there = differing(closest)
    if "weights" in there:  # another model: other differences follow from it
        there = {name: there[name] for name in ("weights", "dtype") if name in there}
    fields = ", ".join(
        "its chunks were computed after another prefix"
        if name == "prefix"
        else f"{name} is {mine[name]!r:.40} here and {value!r:.40} there"
        for name, value in there.items()
    )
    is_other = wanted.runtime != closest.runtime
    options: list[object] = [
        Given(name, there[name])
        for name in ("dtype", "store_bits")
        if name in there and not (is_other and name == "dtype")
    ]
    if is_other:
        options.append(Given("runtime", closest.runtime))
    if "weights" in there and closest.model != wanted.model:
        options.insert(0, f"the model {closest.model!r} (--model of a command)")
    elif "prefix" in there:
        options.append("the prefix= and prefix_text= of the engine that filled it")
    instead = [part for option in options for part in (" and ", option)][1:]
    return FingerprintMismatch(
        f"{where} holds no cache of the loaded model {wanted.model!r}; the closest cache is of "
        f"{closest.model!r}: {fields}; next step: ingest again",
        *([", or give ", *instead] if instead else ()),
    )
