"""From the text of a chunk to its cache: identify it, look it up, compute it, store it.

A cache belongs to a fingerprint: model, tokenizer, prefix, block size and bits. The fingerprint
follows changes of the model, and all processes that share a store agree on its block size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, TypeVar

from tqdm.auto import tqdm

from samkv_integrations.chunks.recent import RecentKeys, ReleasedCaches
from samkv_integrations.errors import (
    CacheMiss,
    FingerprintMismatch,
    InvalidChunk,
    StoreError,
    UnsupportedModel,
)
from samkv_integrations.prompt.rag_template import bodies_of
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.runtimes.base import Made, Runtime
from samkv_integrations.store.base import IngestStore, Outage, StoredChunk, of_shape
from samkv_integrations.store.chunk import BlockScheme, ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.store.chunk_file import FileLayout
from samkv_integrations.store.indexed import require
from samkv_integrations.store.memory import MemoryChunk
from samkv_integrations.store.windows import MIN_RUN

Depth = Literal["exists", "opens", "whole"]
"""How thoroughly a cache is checked: its file exists; it can be opened, which verifies its header;
all of it is read and verified."""

_log = logging.getLogger(__name__)

_DECIDING = 256
"""Chunks whose lengths decide about the block size of a new store; a page of records."""

_WRITERS = 4
"""Threads that write chunk caches; each mostly waits for the disk."""


def progress_bar(chunks: Iterable[ChunkRef], *, is_shown: bool) -> tqdm:
    """A bar on standard error that counts the tokens of the ``missed`` chunks, each chunk once.

    It shows tokens a second and the time left. There is none if no chunk is missed.
    """
    lengths = {ref.key: len(ref.token_ids) for ref in chunks if ref.state == "missed"}
    return tqdm(
        total=sum(lengths.values()), desc="caching chunks", unit=" tokens", unit_scale=True,
        disable=not (is_shown and lengths),
    )  # fmt: skip


_Result = TypeVar("_Result")

Pause = Callable[[], None]
"""Lets other answers go on between two parts of a pass, see `Observer.pause`."""


class Run(Protocol):
    """Runs ``work`` in the model's thread, as `Scheduler.run` does."""

    def __call__(self, work: Callable[[Pause], _Result], *, owner: str = "") -> _Result: ...


class Chunks:
    """The chunks of one model in one store. Thread-safe.

    Args:
        prefix: ids of the tokens that precede a chunk while its KV entries are computed.
        scheme: the blocks of chunks. None takes the block size of the caches that the store holds
            for this model, else one that suits the lengths of the first chunks.
        store_bits: bits of each number in a chunk cache.
        hot_bytes: memory for caches, see `Runtime.reader`.
        run: `Scheduler.run`.
        on_change: called when the model has changed.

    reader: opens caches for answers. outage: logs failures of the store that a prompt survives.

    Raises InvalidOption if the model's entries cannot be stored in ``store_bits`` bits.
    """

    def __init__(
        self,
        model: Runtime,
        store: IngestStore,
        *,
        prefix: tuple[int, ...],
        scheme: BlockScheme | None,
        store_bits: int,
        hot_bytes: int | str | None,
        run: Run,
        on_change: Callable[[], None],
    ) -> None:
        model.fingerprint(prefix, scheme or BlockScheme(), store_bits)  # raises
        self.model, self.prefix = model, prefix
        self.store, self._store_bits, self._scheme = store, store_bits, scheme
        self.reader = model.reader(store, hot_bytes)
        self._run, self._on_change = run, on_change
        self.outage = Outage()
        self._lock = threading.RLock()
        self._generation = model.generation()
        self._agreed: Fingerprint | None = None
        self._prepared = RecentKeys()
        self._released = ReleasedCaches()
        self._has_looked = self._has_warned_of_short = False

    # -- identity ---------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """Identity of the caches that are written and accepted.

        Until the first chunk, its block size may be a guess, which `agree` settles.
        """
        with self._lock:
            if self._agreed is not None:
                return self._agreed
            scheme = self._scheme or BlockScheme()
            guess = self.model.fingerprint(self.prefix, scheme, self._store_bits)
            if self._scheme is not None:
                self._agreed = guess
                return guess
            with self.outage.survived():  # the caches that the store holds for this model
                for found in self.store.fingerprints():
                    if replace(guess, block_size=found.block_size).digest == found.digest:
                        self._agreed = replace(guess, block_size=found.block_size)
            return self._agreed or guess

    def follow_model(self) -> Fingerprint:
        """Check once a request whether the model has changed; returns the current `fingerprint`.

        Raises UnsupportedModel as `Runtime.generation` does.
        """
        generation = self.model.generation()
        with self._lock:
            has_changed = generation != self._generation
            if has_changed:
                self._generation, self._agreed = generation, None
        if has_changed:
            self.reader.clear()
            self._on_change()
        return self.fingerprint

    def while_computing(self) -> tuple[Fingerprint, Callable[[], bool]]:
        """The fingerprint, and a function that tells whether the model is still the same."""
        with self._lock:
            generation = self._generation
            return self.fingerprint, lambda: self.model.generation() == generation

    # -- from texts to caches ---------------------------------------------------------------

    def refer(self, texts: Sequence[str], *, must_fit: bool = False) -> list[ChunkRef]:
        """Identify each text as a chunk. Nothing is looked up: each is ``missed``.

        must_fit: raise for a text that no cache can hold, if possible before it is tokenised.

        Raises:
            InvalidChunk: a text is empty, or longer than the context window.
            UnsupportedModel: the model has changed so that caches no longer fit it.
        """
        self.follow_model()
        bodies = bodies_of(texts)
        for body in bodies if must_fit else ():
            if (least := len(body) // self.model.longest_token) > self.room:
                raise self._too_long(f"at least {least}", body)
        ids = [tuple(self.model.tokenize(body, special=False)) for body in bodies]
        found = self._named(bodies, ids)
        if must_fit:
            self.require_fit(found)
        return found

    def _named(self, bodies: Sequence[str], ids: Sequence[tuple[int, ...]]) -> list[ChunkRef]:
        fingerprint = self.fingerprint
        return [
            ChunkRef(key=self.store.key(fingerprint, of_one), text=body, token_ids=of_one)
            for body, of_one in zip(bodies, ids, strict=True)
        ]

    def fits(self, ref: ChunkRef) -> bool:
        """Whether a cache can hold it: it is not empty, and it fits into the context window."""
        return 0 < len(ref.token_ids) <= self.room

    @property
    def room(self) -> int:
        """Most tokens of a chunk."""
        return self.model.context_window - len(self.prefix)

    def require_fit(self, chunks: Sequence[ChunkRef]) -> None:
        """Raises InvalidChunk if one is empty, or longer than the context window.

        Warns once of one that is too short to be found in a prompt.
        """
        for ref in chunks:
            if not ref.token_ids:
                raise InvalidChunk(f"chunk {ref.text!r} holds no text; leave empty chunks out")
            if not self.fits(ref):
                raise self._too_long(str(len(ref.token_ids)), ref.text)
            if len(ref.token_ids) < MIN_RUN and not self._has_warned_of_short:
                self._has_warned_of_short = True
                _log.warning(
                    "no prompt will use the cache of a chunk of %d tokens, because a prompt takes "
                    "at least %d from a cache; make longer chunks. This is said once",
                    len(ref.token_ids), MIN_RUN,
                )  # fmt: skip

    def _too_long(self, n_tokens: str, body: str) -> InvalidChunk:
        return InvalidChunk(
            f"a chunk of {n_tokens} tokens is longer than the {self.room} that the context window "
            f"of {self.model.name!r} leaves; split it (it begins {body[:40]!r})"
        )

    def agree(self, chunks: list[ChunkRef]) -> list[ChunkRef]:
        """Settle the block size; returns the chunks with their keys, which depend on it.

        Call it before computing chunks. The lengths of the first chunks decide, for good: of
        `_DECIDING` at most, so that chunks that come page by page have the size of all at once.

        Raises StoreError if the store can neither tell nor record the block size.
        """
        if not chunks:
            return chunks
        if (why := self.model.refuses_chunks) is not None:
            raise UnsupportedModel(why)
        lengths = sorted(len(ref.token_ids) for ref in chunks[:_DECIDING])
        with self._lock:
            guess = self.fingerprint
            if self._agreed is None:
                # several processes may fill an empty store: the first one decides
                size = BlockScheme.auto(lengths[len(lengths) // 2]).size
                size = self.store.agree_block_size(guess, size)
                self._agreed = replace(guess, block_size=size)
        # always, as another thread or process may have settled it since the keys were made
        return self._named([ref.text for ref in chunks], [ref.token_ids for ref in chunks])

    def look_up(self, chunks: Sequence[ChunkRef], depth: Depth = "whole") -> list[ChunkRef]:
        """Each chunk as ``cached`` or ``missed``. Nothing is computed."""
        if depth == "opens":
            self.store.begin_to_fetch([ref.key for ref in chunks], self.fingerprint)
        return [
            replace(ref, state="cached" if self._is_there(ref, depth) else "missed")
            for ref in chunks
        ]

    def _is_there(self, ref: ChunkRef, depth: Depth) -> bool:
        if depth == "exists":
            return self.store.contains(ref.key, self.fingerprint)
        if depth == "whole" and not self.store.contains(ref.key, self.fingerprint, here=True):
            if self.store.contains(ref.key, self.fingerprint):
                return True  # in the remote tier: verified when it is opened
        try:
            opened = self.store.open(ref.key, self.fingerprint, ref.token_ids)
            with of_shape(opened, self.model.cache_shape) as chunk:
                if depth == "whole":
                    chunk.verify()
        except CacheMiss as miss:
            if miss.is_damage:
                self.store.quarantine(ref.key, self.fingerprint)
            return False
        return True

    def take_prepared(self, ref: ChunkRef) -> bool:
        """Whether `cache` has just verified or written this chunk; True once for each.

        An indexing step that asks need not read and verify the cache again.
        """
        return self._prepared.take(ref.key) is not None

    def cache(self, texts: Sequence[str], *, progress: bool = False) -> list[ChunkRef]:
        """As `Engine.cache_chunks`; returns the chunks, of which the ``missed`` were computed."""
        found = self.look_up(self.agree(self.refer(texts, must_fit=True)))
        with progress_bar(found, is_shown=progress) as bar:
            self.compute(found, on_written=bar.update)
        self._prepared.add(ref.key for ref in found)
        return found

    def compute(
        self,
        chunks: Sequence[ChunkRef],
        *,
        on_written: Callable[[int], object] = lambda n_tokens: None,
        since: int | None = None,
        owner: str = "",
    ) -> None:
        """Compute the ``missed`` chunks, several a pass, and store their caches.

        A chunk that was released within the last minute is not computed: its cache is stored again,
        unless ``since`` is given.

        on_written: called with a chunk's number of tokens, after its cache is stored.
        since: store none if something was deleted since, see `deletions`; None to store all.
        owner: who asks, see `Scheduler`.

        The ``cached`` chunks count as just used. If the file of one is gone, it is computed, too.

        Raises:
            InvalidChunk: a chunk cannot be cached; the others are.
            StoreError: the store cannot be written; caches stored before stay.
        """
        missed = {
            ref.key: ref
            for ref in chunks
            if ref.state == "missed" or not self.store.contains(ref.key, self.fingerprint)
        }
        for key in {ref.key for ref in chunks} - missed.keys():
            self.store.touch(key, self.fingerprint)
        fingerprint, is_same_model = self.while_computing()
        failures: list[str] = []

        def keep(caches: Made, at: int) -> int:
            return self.keep(since, caches[at])

        with ThreadPoolExecutor(_WRITERS) as writers:
            written: Iterator[int] = iter(())
            try:
                for key, ref in list(missed.items()) if since is None else ():
                    if (cache := self._released.take(key, fingerprint)) is not None:
                        on_written(self.keep(None, replace(cache, text=ref.text)))
                        del missed[key]
                pending = list(missed.values())
                run = partial(self._run, owner=owner)
                for _, caches in self._passes(pending, fingerprint, run, failures):
                    if not is_same_model():
                        raise StoreError(
                            "the model changed while chunks were being cached, so the last batch "
                            "was not stored; cache the chunks again once the model stays the same"
                        )
                    for n_tokens in written:  # of the previous batch
                        on_written(n_tokens)
                    written = writers.map(partial(keep, caches), range(len(caches)))
                for n_tokens in written:
                    on_written(n_tokens)
            except BaseException:  # an interruption does not wait for a whole batch
                writers.shutdown(cancel_futures=True)
                raise
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise InvalidChunk(failures[0] + more)

    def _passes(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, run: Run, failures: list[str]
    ) -> Iterator[tuple[list[ChunkRef], Made]]:
        """Compute chunks in the model's thread, several a pass; each pass is yielded.

        Where one chunk of several cannot be cached, each is tried by itself. failures: gets errors.
        """
        pending = self.model.batches(chunks) if chunks else []
        while pending:
            batch = pending.pop(0)
            prefill = partial(self.model.prefill, batch, fingerprint, self.prefix)
            try:
                caches = run(prefill)
            except InvalidChunk as error:
                if len(batch) == 1:
                    failures.append(f"the chunk {batch[0].text[:60]!r}: {error}")
                else:
                    pending = [*([chunk] for chunk in batch), *pending]
                continue
            yield batch, caches

    def compute_for(
        self, texts: Mapping[tuple[int, ...], str], since: int, pause: Pause
    ) -> dict[tuple[int, ...], StoredChunk]:
        """Compute a prompt's missed chunks; returns their caches by token ids, in memory.

        texts: of the chunks by their token ids. since: see `deletions`.

        The caches are stored, too, if the store can be written and nothing was deleted since the
        question was asked. A chunk is left out if no cache can hold it, or if its text has other
        tokens, as that of a damaged index may. Nothing is computed if the store cannot settle its
        block size. To be called in the model's thread; ``pause`` lets other answers go on.
        """

        def here(work: Callable[[Pause], _Result], *, owner: str = "") -> _Result:
            return work(pause)

        chunks: list[ChunkRef] = []
        true = {ids: text for ids, text in texts.items()
                if tuple(self.model.tokenize(text, special=False)) == ids}  # fmt: skip
        with self.outage.survived():
            chunks = self.agree(self._named(list(true.values()), list(true)))
        fingerprint, is_same_model = self.while_computing()
        made: dict[tuple[int, ...], StoredChunk] = {}
        for batch, caches in self._passes(chunks, fingerprint, here, []):
            is_kept = is_same_model()
            for at, chunk in enumerate(batch):
                cache = caches[at]
                made[chunk.token_ids] = MemoryChunk(cache, fingerprint)
                if is_kept:
                    with self.outage.survived():
                        self.keep(since, cache)
        return made

    def deletions(self) -> int:
        """See `IngestStore.deletions`; -1 if the store does not answer. Frees deleted hot chunks.

        A question reads it before it begins, and gives it as ``since`` when it stores a cache, so
        that a chunk that was deleted meanwhile does not come back. With -1 no cache is stored.
        """
        with suppress(StoreError):
            found = self.store.deletions()
            self.reader.follow(found)
            return found
        return -1

    def keep(self, since: int | None, cache: ChunkCache) -> int:
        """Store a cache, unless something was deleted since; returns the chunk's tokens."""
        if since is None:
            self.store.put(cache)
        else:
            with suppress(CacheMiss):
                self.store.put(cache, unless_deleted_since=since)
        return len(cache.token_ids)

    def record(self, resolved: Resolved) -> None:
        """Tell the store which caches a prompt used, and which it missed."""
        used: dict[str, None] = {}  # keys of the caches that existed before, each once
        for chunk in resolved.chunks:
            if chunk.stored is not None and not chunk.computed_now:
                used[chunk.key] = None
        self.store.record(self.follow_model(), used=list(used), missed=resolved.misses.keys)
        if not used and not self._has_looked:
            self._has_looked = True
            self.warn_if_none_fits()

    def warn_if_none_fits(self) -> None:
        """Warn once if there are caches in the store, but none for this engine."""
        with self.outage.survived():
            try:
                require(self.store, self.fingerprint)
            except FingerprintMismatch as error:
                _log.warning("no cache is used: %s. This is said once", error)
                self._has_looked = True
                return
            if (where := self.store.elsewhere()) is not None:
                _log.warning(
                    "no cache is used: there is none in namespace %r, but there are some in %s. "
                    "This is said once",
                    self.store.namespace, where,
                )  # fmt: skip
                self._has_looked = True

    def delete(self, keys: Sequence[str], *, is_final: bool) -> int:
        """Delete chunks by key; returns how many existed.

        is_final: whether `compute` must not find their caches again, see `ReleasedCaches`.
        """
        n_cleared, keeps = self._released.n_cleared, not is_final
        for key in keys:
            if keeps and self.store.contains(key, self.fingerprint, here=True):
                with suppress(CacheMiss), self.store.open(key, self.fingerprint) as stored:
                    keeps = self._released.add(stored.chunk(), n_cleared)
        try:
            return self.store.delete(*keys)
        finally:
            self.reader.sweep()
            if is_final:
                self._released.clear()

    def forget(self, texts: Sequence[str]) -> int:
        """Delete caches and texts of these chunks, for every model; returns how many chunks.

        `IngestStore.forget` finds chunks by their text. It also finds those of this model by their
        tokens, because a stored text may be damaged.
        """
        found = [ref for ref in self.refer(texts) if ref.text]
        bodies = {ref.text for ref in found}
        self._prepared = RecentKeys()
        try:
            return self.store.forget(bodies.__contains__, [ref.token_ids for ref in found])
        finally:
            self.reader.sweep()
            self._released.clear()

    def n_bytes(self, chunks: Sequence[ChunkRef]) -> int:
        """Bytes that the files of these chunks take, whether or not they exist; each key once."""
        made_by, namespace, n_bytes = self.fingerprint, self.store.namespace, 0
        for key, ref in {ref.key: ref for ref in chunks}.items():
            n_tokens = len(ref.token_ids)
            shape = self.model.cache_shape(made_by, n_tokens)
            layout = FileLayout.of(made_by, n_tokens, namespace, ref.text, shape)
            n_bytes += layout.file_size(key)
        return n_bytes

    def first_keys(self, n_keys: int) -> list[str]:
        """The first keys of the caches in the store; none if it cannot tell."""
        with self.outage.survived():
            return self.store.keys(self.fingerprint)[:n_keys]
        return []

    @property
    def rounds(self) -> bool:
        """Whether stored entries are rounded, and so differ from computed ones."""
        return self._store_bits < 16
