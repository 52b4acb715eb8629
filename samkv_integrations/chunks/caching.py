"""From the text of a chunk to its cache: identify it, look it up, compute it, store it.

A cache belongs to a fingerprint: model, tokenizer, prefix, block size and bits. The fingerprint
follows changes of the model, and all processes that share a store agree on its block size.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from samkv_integrations.chunks.chunk import BlockScheme, ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.errors import (
    CacheMiss,
    FingerprintMismatch,
    Given,
    InvalidChunk,
    InvalidOption,
    StoreError,
)
from samkv_integrations.option import bytes_of
from samkv_integrations.prompt.rag_template import bodies_of
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.runtimes.transformers.entries.attention_stats import (
    MIN_CHUNKS,
    PUBLISHED_STABLE_LAYERS,
    stable_layers,
)
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.runtimes.transformers.model.loading import available_bytes
from samkv_integrations.runtimes.transformers.model.model import Model
from samkv_integrations.runtimes.transformers.passes.prefill import (
    Before,
    PrefilledChunks,
    batches,
    entries_before,
    prefill,
)
from samkv_integrations.store.base import MemoryChunk, Outage, Store, StoredChunk
from samkv_integrations.store.chunk_file import FileLayout
from samkv_integrations.store.disk import ChunkStore
from samkv_integrations.store.windows import MIN_RUN

Depth = Literal["exists", "opens", "whole"]
"""How thoroughly a cache is checked: its file exists; it can be opened, which verifies its header;
all of it is read and verified."""

_log = logging.getLogger(__name__)

_WRITERS = 4
"""Threads that write chunk caches; each mostly waits for the disk."""

MAX_RECENT = 2**16
"""Keys that `RecentKeys` remembers, about 10 MB: more than one ingest adds at once."""


class RecentKeys:
    """The latest `MAX_RECENT` keys of chunks, and the seconds that each took. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str], seconds: float = 0.0) -> None:
        """Remember keys of what took ``seconds`` each."""
        with self._lock:
            for key in keys:
                self._seconds[key] = seconds
                self._seconds.move_to_end(key)
            while len(self._seconds) > MAX_RECENT:
                self._seconds.popitem(last=False)

    def take(self, key: str) -> float | None:
        """Remove a key and return its seconds; None if it is unknown."""
        with self._lock:
            return self._seconds.pop(key, None)


RELEASED_S, RELEASED_BYTES = 60.0, 2**28
"""Longest time, and most bytes, that `ReleasedCaches` holds."""


class ReleasedCaches:
    """Caches whose records were deleted within the last minute, in memory. Thread-safe.

    Indexers delete the chunks of a source and add most of them again (LangChain's ``index`` with a
    batch that is smaller than a source). Only a text that is added again finds its cache here, no
    prompt does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: dict[str, ChunkCache] = {}
        self._timer: threading.Timer | None = None
        self.n_cleared = 0

    def add(self, cache: ChunkCache, n_cleared: int) -> bool:
        """Hold a cache for a minute at most, if there is room; returns whether there was.

        n_cleared: how often all were dropped, before the cache was read. Else it is not held.
        """
        with self._lock:
            if n_cleared != self.n_cleared:
                return False
            held = [*self._caches.values(), cache]
            if sum(each.entries.nbytes + each.key_range.nbytes for each in held) > RELEASED_BYTES:
                return False
            self._caches[cache.key] = cache
            if self._timer is None:
                self._timer = threading.Timer(RELEASED_S, self.clear)
                self._timer.daemon = True
                self._timer.start()
            return True

    def take(self, key: str, made_by: Fingerprint) -> ChunkCache | None:
        """Remove a cache and return it; None if there is none of this fingerprint."""
        with self._lock:
            cache = self._caches.pop(key, None)
        return cache if cache is not None and cache.fingerprint == made_by else None

    def clear(self) -> None:
        """Drop all caches."""
        with self._lock:
            self._caches, timer, self._timer = {}, self._timer, None
            self.n_cleared += 1
        if timer is not None:
            timer.cancel()


def hot_budget(model: Model, hot_bytes: int | str | None) -> int:
    """The bytes of memory that an engine's option ``hot_bytes`` stands for.

    Raises InvalidOption for no size, and for more than the device has.
    """
    most = available_bytes() or sys.maxsize
    default = 0
    if model.device.type == "cuda":
        free, most = torch.cuda.mem_get_info(model.device)
        default = free // 10
    if hot_bytes is None:
        return default
    n_bytes = 0 if hot_bytes in (0, "0") else bytes_of("hot_bytes", hot_bytes)
    if n_bytes > most:
        raise InvalidOption(
            Given("hot_bytes", hot_bytes),
            f", and {model.device} has {most} bytes; give less, or None for the default",
        )
    return n_bytes


KEPT_SHARE = 8
"""Kept sequences take so small a share of the memory that is available when an engine is made."""


def prefix_budget(model: Model, prefix_bytes: int | str | None) -> int:
    """The bytes of memory that an engine's option ``prefix_bytes`` stands for.

    Raises InvalidOption for no size.
    """
    if prefix_bytes is not None:
        try:
            return 0 if prefix_bytes in (0, "0") else bytes_of("prefix_bytes", prefix_bytes)
        except InvalidOption as error:
            raise InvalidOption(*error.args, "; 0 keeps nothing") from None
    if model.device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(model.device)[0] // KEPT_SHARE
    return (available_bytes() or 2**31) // KEPT_SHARE


def progress_bar(chunks: Iterable[ChunkRef], *, is_shown: bool) -> tqdm:
    """A bar on standard error that counts the tokens of the ``missed`` chunks, each chunk once.

    It shows tokens a second and the time left. There is none if no chunk is missed.
    """
    lengths = {ref.key: len(ref.token_ids) for ref in chunks if ref.state == "missed"}
    return tqdm(
        total=sum(lengths.values()), desc="caching chunks", unit=" tokens", unit_scale=True,
        disable=not (is_shown and lengths),
    )  # fmt: skip


class Chunks:
    """The chunks of one model in one store. Thread-safe.

    Args:
        prefix: ids of the tokens that precede a chunk while its KV entries are computed.
        scheme: the blocks of chunks. None takes the block size of the caches that the store holds
            for this model, else one that suits the lengths of the first chunks.
        store_bits: bits of each number in a chunk cache.
        hot_bytes: see `hot_budget`.
        run: `Scheduler.run`, which runs a function in the model's thread.
        on_change: called when the model has changed.

    hot: verified caches in memory. outage: logs failures of the store that a prompt survives.

    Raises InvalidOption if the model's entries cannot be stored in ``store_bits`` bits.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        *,
        prefix: tuple[int, ...],
        scheme: BlockScheme | None,
        store_bits: int,
        hot_bytes: int | str | None,
        run: Callable[[Callable[[], Any]], Any],
        on_change: Callable[[], None],
    ) -> None:
        EntryFormat(
            bits=store_bits, n_kv_heads=model.n_kv_heads, head_dim=model.head_dim, dtype=model.dtype
        )  # raises
        self.model, self.prefix = model, prefix
        self.store, self._store_bits, self._scheme = store, store_bits, scheme
        max_bytes = hot_budget(model, hot_bytes) if isinstance(store, ChunkStore) else 0
        self.hot = HotChunks(store, max_bytes, model.layer_devices)
        self._run, self._on_change = run, on_change
        self.outage = Outage()
        self._lock = threading.RLock()
        self._generation = model.identity.generation
        self._agreed: Fingerprint | None = None
        self._stable_layers: tuple[int, ...] | None = None
        self._prepared = RecentKeys()
        self._released = ReleasedCaches()
        self._of_prefix: tuple[str, Before] | None = None
        self._has_looked = self._has_warned_of_short = False

    # -- identity ---------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """Identity of the caches that are written and accepted.

        Until there is a chunk its block size is a guess: `agree` settles it.
        """
        with self._lock:
            if self._agreed is not None:
                return self._agreed
            model, scheme = self.model, self._scheme or BlockScheme()
            guess = Fingerprint(
                model=model.name, weights=model.identity.weights, config=model.identity.config,
                tokenizer=model.tokenizer_digest, dtype=model.dtype_name, rope=model.identity.rope,
                n_layers=model.n_layers, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
                head_dim=model.head_dim, prefix=",".join(map(str, self.prefix)),
                block_size=scheme.size, n_init=scheme.n_init, n_local=scheme.n_local,
                store_bits=self._store_bits,
            )  # fmt: skip
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

        Raises UnsupportedModel as `Identity.look` does.
        """
        generation = self.model.identity.look()
        with self._lock:
            has_changed = generation != self._generation
            if has_changed:
                self._generation, self._agreed, self._stable_layers = generation, None, None
        if has_changed:
            self.hot.clear()
            self._on_change()
        return self.fingerprint

    def while_computing(self) -> tuple[Fingerprint, Callable[[], bool]]:
        """The fingerprint, and a function that tells whether the model is still the same."""
        with self._lock:
            generation = self._generation
            return self.fingerprint, lambda: self.model.identity.look() == generation

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
        """Tokens of the longest chunk."""
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
                    "no prompt will use the cache of a chunk of %d tokens, as fewer than %d are "
                    "computed with the prompt; make longer chunks. This is said once",
                    len(ref.token_ids), MIN_RUN,
                )  # fmt: skip

    def _too_long(self, n_tokens: str, body: str) -> InvalidChunk:
        return InvalidChunk(
            f"a chunk of {n_tokens} tokens is longer than the {self.room} that the context window "
            f"of {self.model.name!r} leaves; split it (it begins {body[:40]!r})"
        )

    def agree(self, chunks: list[ChunkRef]) -> list[ChunkRef]:
        """Settle the block size; returns the chunks with their keys, which depend on it.

        Call it before computing chunks. The lengths of the first chunks decide, for good.

        Raises StoreError if the store can neither tell nor record the block size.
        """
        if not chunks:
            return chunks
        lengths = sorted(len(ref.token_ids) for ref in chunks)
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
        if depth == "whole" and self.store.is_elsewhere(ref.key, self.fingerprint):
            return True  # in the remote tier: verified when it is opened
        try:
            with self.store.open(ref.key, self.fingerprint, ref.token_ids) as chunk:
                if depth == "whole":
                    chunk.verify()
        except CacheMiss as miss:
            if miss.is_damage:
                self.store.quarantine(ref.key, self.fingerprint)
            return False
        return True

    def take_prepared(self, ref: ChunkRef) -> bool:
        """Whether `cache` has just verified or written this chunk; asked once for each.

        It saves an indexing step from reading and verifying the cache again.
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
    ) -> None:
        """Compute the ``missed`` chunks, several a pass, and store their caches.

        One that was released within the last minute is stored again instead, unless ``since``.

        on_written: called with a chunk's number of tokens, after its cache is stored.
        since: store none if something was deleted since, see `deletions`; None to store all.

        The ``cached`` ones count as just used; one whose file is gone is computed, too.

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

        def keep(caches: PrefilledChunks, at: int) -> int:
            return self.keep(since, caches[at])

        with ThreadPoolExecutor(_WRITERS) as writers:
            written: Iterator[int] = iter(())
            try:
                for key, ref in list(missed.items()) if since is None else ():
                    if (cache := self._released.take(key, fingerprint)) is not None:
                        on_written(self.keep(None, replace(cache, text=ref.text)))
                        del missed[key]
                pending = list(missed.values())
                for _, caches in self._passes(pending, fingerprint, is_same_model, failures):
                    if not is_same_model():
                        raise StoreError(
                            "the model changed while chunks were being cached, and what it was "
                            "computing is not kept; cache them again once it stays as it is"
                        )
                    for n_tokens in written:  # of the batch before, while this one was computed
                        on_written(n_tokens)
                    written = writers.map(partial(keep, caches), range(len(caches)))
                for n_tokens in written:
                    on_written(n_tokens)
            except BaseException:  # an interruption does not wait for a whole batch
                writers.shutdown(cancel_futures=True)
                raise
            finally:
                self._stable_layers = None  # more chunks vote now
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise InvalidChunk(failures[0] + more)

    def _passes(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint,
        is_same_model: Callable[[], bool], failures: list[str],
    ) -> Iterator[tuple[list[ChunkRef], PrefilledChunks]]:  # fmt: skip
        """Compute chunks in the model's thread, several a pass; each pass is yielded.

        Where one chunk of several cannot be cached, each is tried by itself. failures: gets errors.
        """
        if not chunks:
            return
        before = self._run(partial(self._entries_before, fingerprint, is_same_model))
        pending = batches(chunks, self.model.device)
        while pending:
            batch = pending.pop(0)
            try:
                caches = self._run(partial(prefill, self.model, batch, fingerprint, before))
            except InvalidChunk as error:
                if len(batch) == 1:
                    failures.append(f"the chunk {batch[0].text[:60]!r}: {error}")
                else:
                    pending = [*([chunk] for chunk in batch), *pending]
                continue
            yield batch, caches

    def _entries_before(
        self, fingerprint: Fingerprint, is_same_model: Callable[[], bool]
    ) -> Before:
        """Entries of the prefix, computed once a model, in the model's thread."""
        if self._of_prefix is None or self._of_prefix[0] != fingerprint.digest:
            entries = entries_before(self.model, self.prefix)
            if not is_same_model():  # then nothing of them is kept
                return entries
            self._of_prefix = fingerprint.digest, entries
        return self._of_prefix[1]

    def compute_for(
        self, texts: Mapping[tuple[int, ...], str], since: int
    ) -> dict[tuple[int, ...], StoredChunk]:
        """Compute a prompt's missed chunks; returns their caches by token ids, held in memory.

        texts: of the chunks by their token ids. since: see `deletions`.

        The caches are stored, too, if the store can be written and nothing was deleted since the
        question was asked. A chunk is left out if no cache can hold it, or if its text has other
        tokens, as that of a damaged index may. Nothing is computed if the store cannot settle its
        block size. To be called in the model's thread.
        """
        chunks: list[ChunkRef] = []
        true = {ids: text for ids, text in texts.items()
                if tuple(self.model.tokenize(text, special=False)) == ids}  # fmt: skip
        with self.outage.survived():
            chunks = self.agree(self._named(list(true.values()), list(true)))
        fingerprint, is_same_model = self.while_computing()
        made: dict[tuple[int, ...], StoredChunk] = {}
        for batch, caches in self._passes(chunks, fingerprint, is_same_model, []):
            is_kept = is_same_model()
            for chunk, cache in zip(batch, caches, strict=True):
                made[chunk.token_ids] = MemoryChunk(cache, fingerprint)
                if is_kept:
                    with self.outage.survived():
                        self.keep(since, cache)
        self._stable_layers = None
        return made

    def deletions(self) -> int:
        """How often something was deleted from the store so far, by any process.

        A question reads it before it begins, and gives it as ``since`` when it stores a cache: it
        must not bring back a chunk that was deleted meanwhile. Without an answer from the store it
        is -1, and nothing is stored. Memory of what others have deleted is freed, too.
        """
        with suppress(StoreError):
            found = self.store.index.deletions(self.store.namespace)
            self.hot.follow(found)
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
        self.store.record(self.follow_model(), used=list(used), missed=resolved.missed)
        if not used and not self._has_looked:
            self._has_looked = True
            self.warn_if_none_fits()

    def warn_if_none_fits(self) -> None:
        """Warn once if there are caches in the store, but none for this engine."""
        with self.outage.survived():
            try:
                self.store.require(self.fingerprint)
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
            is_here = keeps and self.store.contains(key, self.fingerprint)
            if is_here and not self.store.is_elsewhere(key, self.fingerprint):
                with suppress(CacheMiss), self.store.open(key, self.fingerprint) as stored:
                    keeps = self._released.add(stored.chunk(), n_cleared)
        try:
            return self.store.delete(*keys)
        finally:
            self.hot.sweep()
            if is_final:
                self._released.clear()

    def forget(self, texts: Sequence[str]) -> int:
        """Delete caches and texts of these chunks, for every model; returns how many chunks.

        `Store.forget` finds chunks by their text, and those of this model by their tokens as well,
        in case the stored text is damaged.
        """
        found = [ref for ref in self.refer(texts) if ref.text]
        bodies = {ref.text for ref in found}
        self._prepared = RecentKeys()
        try:
            return self.store.forget(bodies.__contains__, [ref.token_ids for ref in found])
        finally:
            self.hot.sweep()
            self._released.clear()

    def n_bytes(self, chunks: Sequence[ChunkRef]) -> int:
        """Bytes that the files of these chunks take, whether or not they exist; each key once."""
        made_by, namespace = self.fingerprint, self.store.namespace
        named = {ref.key: ref for ref in chunks}
        return sum(
            FileLayout.of(made_by, len(ref.token_ids), namespace, ref.text).file_size(key)
            for key, ref in named.items()
        )

    # -- statistics -------------------------------------------------------------------------

    @property
    def stable_layers(self) -> tuple[int, ...]:
        """The layers N* (paper: Appendix A.2): published for this shape, or from stored chunks.

        Of stored chunks the first ones by key vote, so the order of ingest does not matter.
        """
        model, config = self.model, self.model.config
        shape = (config.model_type, model.n_layers, config.hidden_size, model.n_kv_heads)
        if shape in PUBLISHED_STABLE_LAYERS:
            return PUBLISHED_STABLE_LAYERS[shape]
        if self._stable_layers is None:
            keys: list[str] = []
            with self.outage.survived():
                keys = self.store.keys(self.fingerprint)[: 2 * MIN_CHUNKS]
            votes = []  # (L,) bool each
            for key in keys if len(keys) >= MIN_CHUNKS else ():
                with suppress(CacheMiss), self.store.open(key, self.fingerprint) as chunk:
                    votes.append(chunk.statistics().stable)
            self._stable_layers = stable_layers(
                model.n_layers, torch.stack(votes) if votes else None
            )
        return self._stable_layers
