"""The one way from the text of a chunk to its cache: refer, look up, prepare, compute.

Caches belong to a fingerprint, which is agreed on with the store and true to the model.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, TypeVar

import torch
from tqdm.auto import tqdm

from samkv_integrations.cache.attention_stats import (
    MIN_CHUNKS,
    PUBLISHED_STABLE_LAYERS,
    stable_layers,
)
from samkv_integrations.cache.base import Outage, Store, StoredChunk
from samkv_integrations.cache.chunk import BlockScheme, ChunkCache, ChunkRef, Fingerprint
from samkv_integrations.cache.file_format import FileLayout, text_bytes
from samkv_integrations.cache.memory import MemoryChunk
from samkv_integrations.cache.quantise import EntryFormat
from samkv_integrations.engine.prefill import batches, entries_before, prefill
from samkv_integrations.errors import (
    CacheMiss,
    FingerprintMismatch,
    InvalidChunk,
    StoreError,
)
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.resolve import Resolved
from samkv_integrations.prompt.text import bodies_of

Depth = Literal["exists", "opens", "whole"]
"""How closely a cache is looked at: its file is there; it can be opened, which verifies whose it
is; all of it is read and verified."""

_log = logging.getLogger(__name__)

_WRITERS = 4
"""Threads that write chunk caches: most of the time each waits for its disk."""

MAX_RECENT = 2**16
"""Some 10 MB, and more chunks than one ingest adds at once."""

_Made = TypeVar("_Made")


class Run(Protocol):
    """`Scheduler.run`: runs work in the model's thread."""

    def __call__(self, work: Callable[[], _Made]) -> _Made: ...


class RecentChunks:
    """What is known of chunks by key, until it is asked for: the latest `MAX_RECENT`.

    Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str], seconds: float = 0.0) -> None:
        """Remember chunks, each of which took ``seconds``."""
        with self._lock:
            for key in keys:
                self._seconds[key] = seconds
                self._seconds.move_to_end(key)
            while len(self._seconds) > MAX_RECENT:
                self._seconds.popitem(last=False)

    def take(self, key: str) -> float | None:
        """The seconds that a chunk took, which is forgotten then; None if it is not known."""
        with self._lock:
            return self._seconds.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._seconds.clear()


class Chunks:
    """The chunks of one model in one store. Safe to use from many threads.

    Args:
        prefix: token ids that chunks are prefilled after.
        scheme: the blocks of chunks; None for those of what the store holds for this model, else by
            the lengths of the first chunks that are computed.
        store_bits: bits of the numbers in chunk caches.
        run: runs the model.
        on_change: called when the model is seen to have changed.

    has_own_scheme: whether ``scheme`` was given. outage: told when the store fails a prompt.

    Raises InvalidOption if the model cannot be kept in so many bits.
    """

    def __init__(
        self,
        model: Model,
        store: Store,
        *,
        prefix: tuple[int, ...],
        scheme: BlockScheme | None,
        store_bits: int,
        run: Run,
        on_change: Callable[[], None],
    ) -> None:
        EntryFormat(
            bits=store_bits, n_kv_heads=model.n_kv_heads, head_dim=model.head_dim, dtype=model.dtype
        )  # raises
        self.model, self.prefix = model, prefix
        self._store, self._store_bits, self._scheme = store, store_bits, scheme
        self._run, self._on_change = run, on_change
        self.has_own_scheme = scheme is not None
        self.outage = Outage()
        self._lock = threading.RLock()
        self._generation = model.identity.generation
        self._agreed: Fingerprint | None = None
        self._stable_layers: tuple[int, ...] | None = None
        self._prepared = RecentChunks()
        self._has_looked = False
        # held to keep what a question has computed; see `forgetting`
        self._keeping = threading.Lock()
        self._n_forgetting, self._forgot_at = 0, -math.inf

    # -- identity ---------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """Identity of the caches that are made and accepted.

        Its block size is a guess until there is a chunk: whoever is about to compute the first one
        agrees on it with all processes that share the store.
        """
        with self._lock:
            if self._agreed is None:
                guess = self._guess(self._scheme or BlockScheme())
                size = guess.block_size if self._scheme else self._stored_block_size(guess)
                if size is None:
                    return guess
                self._agreed = replace(guess, block_size=size)
            return self._agreed

    def _guess(self, scheme: BlockScheme) -> Fingerprint:
        model = self.model
        return Fingerprint(
            model=model.name, weights=model.identity.weights, config=model.identity.config,
            tokenizer=model.tokenizer_digest, dtype=model.dtype_name, rope=model.identity.rope,
            n_layers=model.n_layers, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
            head_dim=model.head_dim, prefix=",".join(map(str, self.prefix)),
            block_size=scheme.size, n_init=scheme.n_init, n_local=scheme.n_local,
            store_bits=self._store_bits,
        )  # fmt: skip

    def _stored_block_size(self, guess: Fingerprint) -> int | None:
        """That of the caches which the store holds for this model."""
        with self.outage.survived():
            for found in self._store.fingerprints():
                if replace(guess, block_size=found.block_size).digest == found.digest:
                    return found.block_size
        return None

    def follow_model(self) -> Fingerprint:
        """`fingerprint`, another one if the model has changed: once a request.

        Raises UnsupportedModel as `Identity.look` does.
        """
        generation = self.model.identity.look()
        with self._lock:
            has_changed = generation != self._generation
            if has_changed:
                self._generation, self._agreed, self._stable_layers = generation, None, None
        if has_changed:
            self._on_change()
        return self.fingerprint

    def _while_computing(self) -> tuple[Fingerprint, Callable[[], bool]]:
        """The fingerprint, and whether the model is still the same, to ask after a pass."""
        with self._lock:
            generation = self._generation
            return self.fingerprint, lambda: self.model.identity.look() == generation

    # -- from texts to caches ---------------------------------------------------------------

    def refer(self, texts: Sequence[str], *, must_fit: bool = False) -> list[ChunkRef]:
        """Each text as a chunk, whatever it is and whether or not there is a cache: ``missed``.

        must_fit: one that can have no cache is an error, and is not tokenised if its length tells.

        Raises:
            InvalidChunk: a text is empty, or longer than the context window.
            UnsupportedModel: the model has changed so that caches no longer fit it.
        """
        self.follow_model()
        bodies = bodies_of(texts)
        for body in bodies if must_fit else ():
            if (least := len(body) // self.model.longest_token) > self._room:
                raise self._too_long(f"at least {least}", body)
        ids = [tuple(self.model.tokenize(body, special=False)) for body in bodies]
        found = self._named(bodies, ids)
        if must_fit:
            self.require_fit(found)
        return found

    def _named(self, bodies: Sequence[str], ids: Sequence[tuple[int, ...]]) -> list[ChunkRef]:
        fingerprint = self.fingerprint
        return [
            ChunkRef(key=self._store.key(fingerprint, of_one), text=body, token_ids=of_one)
            for body, of_one in zip(bodies, ids, strict=True)
        ]

    def fits(self, ref: ChunkRef) -> bool:
        """Whether there can be a cache of it: it holds text, and no more than the window."""
        return 0 < len(ref.token_ids) <= self._room

    @property
    def _room(self) -> int:
        return self.model.context_window - len(self.prefix)

    def require_fit(self, chunks: Sequence[ChunkRef]) -> None:
        """Raises InvalidChunk if one is empty, or longer than the context window."""
        for ref in chunks:
            if not ref.token_ids:
                raise InvalidChunk(f"chunk {ref.text!r} holds no text; leave empty chunks out")
            if not self.fits(ref):
                raise self._too_long(str(len(ref.token_ids)), ref.text)

    def _too_long(self, n_tokens: str, body: str) -> InvalidChunk:
        return InvalidChunk(
            f"a chunk of {n_tokens} tokens is longer than the {self._room} that the context window "
            f"of {self.model.name!r} leaves; split it (it begins {body[:40]!r})"
        )

    def agree(self, chunks: list[ChunkRef]) -> list[ChunkRef]:
        """The chunks, once the block size is settled: for good, by the lengths of the first ones.

        Whoever is about to compute chunks asks, as keys depend on the block size.

        Raises StoreError if the store does not say, nor take, a block size.
        """
        if not chunks:
            return chunks
        lengths = sorted(len(ref.token_ids) for ref in chunks)
        with self._lock:
            guess = self.fingerprint
            if self._agreed is None:
                # Another process may be filling the same empty store: the first one decides.
                size = BlockScheme.auto(lengths[len(lengths) // 2]).size
                size = self._store.agree_block_size(guess, size)
                self._agreed = replace(guess, block_size=size)
        # Always: another thread or process may have settled it since these were named.
        return self._named([ref.text for ref in chunks], [ref.token_ids for ref in chunks])

    def look_up(self, chunks: Sequence[ChunkRef], depth: Depth = "whole") -> list[ChunkRef]:
        """The chunks, ``cached`` or ``missed``; nothing is computed."""
        if depth == "opens":
            self._store.begin_to_fetch([ref.key for ref in chunks], self.fingerprint)
        return [
            replace(ref, state="cached" if self._is_there(ref, depth) else "missed")
            for ref in chunks
        ]

    def _is_there(self, ref: ChunkRef, depth: Depth) -> bool:
        if depth == "exists":
            return self._store.contains(ref.key, self.fingerprint)
        if depth == "whole" and self._store.is_elsewhere(ref.key, self.fingerprint):
            return True  # `open` will verify it
        try:
            with self._store.open(ref.key, self.fingerprint, ref.token_ids) as chunk:
                if depth == "whole":
                    chunk.verify()
        except CacheMiss as miss:
            if miss.is_damage:
                self._store.quarantine(ref.key, self.fingerprint)
            return False
        return True

    def take_prepared(self, ref: ChunkRef) -> bool:
        """Whether this process has prepared the chunk, and nobody has asked since.

        Who indexes what a step before has cached need not read and verify all of it again.
        """
        return self._prepared.take(ref.key) is not None

    def cache(self, texts: Sequence[str], *, progress: bool = False) -> list[ChunkRef]:
        """See `Engine.cache_chunks`: the chunks, ``missed`` being those that were computed."""
        found = self.look_up(self.agree(self.refer(texts, must_fit=True)))
        self.compute(found, progress=progress)
        self._prepared.add(ref.key for ref in found)
        return found

    def compute(
        self,
        chunks: Sequence[ChunkRef],
        *,
        progress: bool = False,
        on_written: Callable[[], object] = lambda: None,
        began: float = math.inf,
    ) -> None:
        """Compute the chunks that are ``missed``, several a pass, and keep them.

        progress: whether to show a bar of them. on_written: called after each that is kept.
        began: when the question began that they are for, see `compute_for`.

        Those that are cached are young again: who prepares a chunk is about to need it. One whose
        file has gone meanwhile is computed too.

        Raises:
            InvalidChunk: a chunk cannot be cached.
            StoreError: the store cannot be written; what was kept before stays.
        """
        missed = {
            ref.key: ref
            for ref in chunks
            if ref.state == "missed" or not self._store.contains(ref.key, self.fingerprint)
        }
        for key in {ref.key for ref in chunks} - missed.keys():
            self._store.touch(key, self.fingerprint)
        fingerprint, is_same_model = self._while_computing()
        with (
            tqdm(total=len(missed), desc="caching chunks", disable=not progress) as bar,
            ThreadPoolExecutor(_WRITERS) as writers,
        ):
            written: Iterator[None] = iter(())
            try:
                if missed:
                    before = self._run(partial(entries_before, self.model, self.prefix))
                for batch in batches(list(missed.values())):
                    caches = self._run(partial(prefill, self.model, batch, fingerprint, before))
                    if not is_same_model():
                        raise StoreError(
                            "the model changed while chunks were being cached, and what it was "
                            "computing is not kept; cache them again once it stays as it is"
                        )
                    for _ in written:  # of the batch before, while this one was computed
                        bar.update()
                        on_written()
                    written = writers.map(partial(self._keep, began), caches)
                for _ in written:
                    bar.update()
                    on_written()
            except BaseException:  # who interrupts does not want to wait for a whole batch
                writers.shutdown(cancel_futures=True)
                raise
            finally:
                # Chunks vote, and were fewer if somebody asked meanwhile.
                self._stable_layers = None

    def compute_for(
        self, texts: Mapping[tuple[int, ...], str], *, began: float
    ) -> dict[tuple[int, ...], StoredChunk]:
        """Caches of a prompt's missed chunks by their token ids, opened from memory.

        They are kept if the store takes them, and nothing was forgotten since the question began
        (`time.perf_counter`): it may have been one of them. A chunk that no cache can hold is left
        out, and so is one whose text, which is the store's index's, has other tokens. Nothing is
        computed in a store that cannot settle its block size. For the model's thread.
        """
        chunks: list[ChunkRef] = []
        true = {ids: text for ids, text in texts.items()
                if tuple(self.model.tokenize(text, special=False)) == ids}  # fmt: skip
        with self.outage.survived():
            chunks = self.agree(self._named(list(true.values()), list(true)))
        fingerprint, is_same_model = self._while_computing()
        made: dict[tuple[int, ...], StoredChunk] = {}
        before = entries_before(self.model, self.prefix) if chunks else ()
        pending = batches(chunks)
        while pending:
            batch = pending.pop(0)
            try:
                caches = prefill(self.model, batch, fingerprint, before)
            except InvalidChunk:  # one of them: the others are none the worse for it
                pending = [*([chunk] for chunk in batch if len(batch) > 1), *pending]
                continue
            is_kept = is_same_model()
            for chunk, cache in zip(batch, caches, strict=True):
                made[chunk.token_ids] = MemoryChunk(cache, fingerprint)
                if is_kept:
                    with self.outage.survived():
                        self._keep(began, cache)
        self._stable_layers = None
        return made

    def compute_behind(
        self, chunk: ChunkRef, head: tuple[int, ...], check: Callable[[], None]
    ) -> ChunkCache | None:
        """The cache of a chunk as it stands behind the token ids ``head``, see `Beginnings`.

        None if it is there, or the model has changed. In the model's thread. check: is called
        before every layer, and ends the pass by raising.
        """
        fingerprint, is_same_model = self._while_computing()
        made_by = self._store.behind(fingerprint, head)
        key = self._store.key(made_by, chunk.token_ids)
        if self._store.contains(key, made_by):
            return None
        with self.model.interruptible(check):
            before = entries_before(self.model, head)
            (cache,) = prefill(self.model, [replace(chunk, key=key)], made_by, before)
        return cache if is_same_model() else None

    def keep_behind(self, cache: ChunkCache, since: int) -> None:
        """Keep what `compute_behind` made, if there is room and nothing was deleted.

        since: what `Index.deletions` said when the prompt was read. A failure is not reported: the
        next question tries again.
        """
        with suppress(StoreError, CacheMiss):
            self._store.put(cache, unless_deleted_since=since)

    def _keep(self, began: float, cache: ChunkCache) -> None:
        """Store a cache, unless something was forgotten since a question began; inf for none."""
        if began == math.inf:
            self._store.put(cache)
            return
        with self._keeping:
            if not self._n_forgetting and began > self._forgot_at:
                self._store.put(cache)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """While chunks are deleted: a question that began before must not bring them back."""
        with self._keeping:
            self._n_forgetting += 1
        try:
            yield
        finally:
            with self._keeping:
                self._n_forgetting -= 1
                self._forgot_at = time.perf_counter()

    def record(self, resolved: Resolved) -> None:
        """Tell the store which caches a prompt used and missed."""
        used: dict[str, None] = {}  # keys of the caches that were there before, each once
        beginning: StoredChunk | None = None
        for chunk in resolved.chunks:
            if chunk.is_exact:
                beginning = chunk.stored
            if chunk.stored is not None and not chunk.computed_now:
                used[chunk.key] = None
        self._store.record(
            self.follow_model(), used=list(used), missed=resolved.missed, beginning=beginning
        )
        if not used and not self._has_looked:
            self._has_looked = True
            self.warn_if_none_fits()

    def warn_if_none_fits(self) -> None:
        """Log it if there are caches in or beside the store and none that fits this engine."""
        with self.outage.survived():
            try:
                self._store.require(self.fingerprint)
            except FingerprintMismatch as error:
                _log.warning("no cache is used: %s. This is said once", error)
                self._has_looked = True
                return
            if (where := self._store.elsewhere()) is not None:
                _log.warning(
                    "no cache is used: there is none in namespace %r, but there are some in %s. "
                    "This is said once",
                    self._store.namespace, where,
                )  # fmt: skip
                self._has_looked = True

    def forget(self, texts: Sequence[str]) -> int:
        """Delete caches and texts of these chunks, whichever model they are of; how many.

        See `Store.forget`, which knows chunks by their text, and those of this model by their
        tokens too, should the text be damaged.
        """
        found = [ref for ref in self.refer(texts) if ref.text]
        bodies = {ref.text for ref in found}
        self._prepared.clear()
        return self._store.forget(bodies.__contains__, [ref.token_ids for ref in found])

    def n_bytes(self, chunks: Sequence[ChunkRef]) -> int:
        """What the files of these chunks take, each key once, whether or not they are there."""
        made_by, namespace = self.fingerprint, self._store.namespace
        named = {ref.key: ref for ref in chunks}
        return sum(
            FileLayout(
                fingerprint=made_by, n_tokens=len(ref.token_ids), namespace=namespace,
                n_text=len(text_bytes(ref.text)),
            ).file_size(key)
            for key, ref in named.items()
        )  # fmt: skip

    # -- statistics -------------------------------------------------------------------------

    @property
    def stable_layers(self) -> tuple[int, ...]:
        """The layers N* (paper: Appendix A.2): published for this shape, or from stored chunks."""
        model, config = self.model, self.model.config
        shape = (config.model_type, model.n_layers, config.hidden_size, model.n_kv_heads)
        if shape in PUBLISHED_STABLE_LAYERS:
            return PUBLISHED_STABLE_LAYERS[shape]
        if self._stable_layers is None:
            self._stable_layers = stable_layers(model.n_layers, self._votes())
        return self._stable_layers

    def _votes(self) -> torch.Tensor | None:
        """(n, L) bool: stable layers of the first chunks by key, whatever the order of ingest."""
        keys: list[str] = []
        with self.outage.survived():
            keys = self._store.keys(self.fingerprint)[: 2 * MIN_CHUNKS]
        if len(keys) < MIN_CHUNKS:
            return None
        votes = []
        for key in keys:
            with suppress(CacheMiss), self._store.open(key, self.fingerprint) as chunk:
                votes.append(chunk.statistics().stable)
        return torch.stack(votes) if votes else None
