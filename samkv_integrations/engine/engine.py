"""The engine: cache chunks once, answer prompts from their caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from tqdm.auto import tqdm

from samkv_integrations.cache.attention_stats import (
    MIN_CHUNKS,
    PUBLISHED_STABLE_LAYERS,
    stable_layers,
)
from samkv_integrations.cache.base import Store, StoredChunk
from samkv_integrations.cache.blocks import BlockScheme
from samkv_integrations.cache.chunk import normalise
from samkv_integrations.cache.fingerprint import Fingerprint
from samkv_integrations.cache.memory import MemoryChunk, MemoryStore
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, EntryFormat, check_store_bits
from samkv_integrations.engine.costs import CostModel, measure
from samkv_integrations.engine.costs import name_of as costs_name
from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.first_token import (
    Request,
    check_length,
    first_token,
    held_prefix,
    is_whole,
    two_passes_s,
)
from samkv_integrations.engine.prefill import NewChunk, batches, prefill
from samkv_integrations.engine.prefix_cache import PrefixCache
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import AnswerStream, TextStream
from samkv_integrations.errors import CacheMiss, InvalidChunk, InvalidOption, StoreError
from samkv_integrations.eviction import Eviction, get_eviction
from samkv_integrations.methods import Method, get_method
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from samkv_integrations.model.sampling import Sampler, Sampling
from samkv_integrations.prompt.finder import KnownTexts
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.resolve import OnMiss, Resolved, Resolver
from samkv_integrations.prompt.split import ChunkText, Piece, PlainText, handle_of, split_prompt
from samkv_integrations.prompt.text import bodies_of

Prefix = Literal["bos", "none"]


Prompt = str | Sequence[dict[str, str]]


_WRITERS = 4
"""Threads that write chunk caches: most of the time each waits for its disk."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer and what it cost."""

    text: str
    report: Report


class Engine:
    """Answers from chunk caches.

    Args:
        model: the model, see `Model`.
        store: where chunk caches live; None keeps them in memory.
        method: a name out of `METHODS`, or a `Method`.
        eviction: which entries an answer's later tokens go on with: a name out of `EVICTIONS`, or
            an `Eviction`; None for the method's own, ``"none"`` for all.
        block_size: tokens a block; ``"auto"`` takes the size of what the store already holds for
            this model, else follows the length of the first chunks that are cached.
        prefix: what a chunk is prefilled after: ``"bos"`` (the beginning-of-sequence token, if the
            tokenizer has one) or ``"none"``.
        prefix_text: text that follows it, such as the system prompt that begins every request. The
            first chunk of a prompt that begins so is exact.
        store_bits: bits of the keys and values in chunk caches (4, 8, or 16 for the model's dtype).
        prefix_bytes: memory for the beginnings of prompts that ``auto`` computed in full, so that
            the next question about the same documents goes on from there; 0 for none.

    One engine may be used from many threads: a lock is held around each pass through the model,
    never while a caller consumes a stream.
    """

    def __init__(
        self,
        model: Model,
        store: Store | None = None,
        *,
        method: str | Method = "auto",
        eviction: str | Eviction | None = None,
        block_size: int | Literal["auto"] = "auto",
        prefix: Prefix = "bos",
        prefix_text: str = "",
        store_bits: int = DEFAULT_STORE_BITS,
        prefix_bytes: int = 2**28,
    ) -> None:
        if prefix not in ("bos", "none"):
            raise InvalidOption(f"prefix={prefix!r}; allowed: bos, none")
        self.model = model
        self.store: Store = MemoryStore() if store is None else store
        self.method = get_method(method)
        get_eviction(eviction)  # raises if it is unknown
        self.eviction = eviction
        bos = model.bos_id if prefix == "bos" else None
        text_ids = model.tokenize(prefix_text, special=True) if prefix_text else []
        self.prefix: tuple[int, ...] = (*(() if bos is None else (bos,)), *text_ids)
        self._lock = threading.RLock()
        EntryFormat(
            bits=store_bits, n_kv_heads=model.n_kv_heads, head_dim=model.head_dim, dtype=model.dtype
        )  # raises if the model cannot be kept in so many bits
        self.store_bits = store_bits
        self._calibrated: tuple[int, ...] | None = None
        self._costs: CostModel | None = None
        self.prefixes = PrefixCache(prefix_bytes)
        self._fingerprint: Fingerprint | None = None
        self._known = KnownTexts(self.store, lambda: self.fingerprint, self.key_of)
        if block_size != "auto":
            self._fingerprint = self._fingerprint_for(BlockScheme(size=block_size))

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        store: Store | None = None,
        *,
        method: str | Method = "auto",
        eviction: str | Eviction | None = None,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int | Literal["auto"] = "auto",
        prefix: Prefix = "bos",
        prefix_text: str = "",
        store_bits: int = DEFAULT_STORE_BITS,
        prefix_bytes: int = 2**28,
    ) -> Engine:
        """An engine on the model called ``name``: a hub id, a local folder, or ``"builtin"``."""
        check_store_bits(store_bits)  # loading takes its time
        return cls(
            load_model(name, device=device, dtype=dtype),
            store,
            method=method,
            eviction=eviction,
            block_size=block_size,
            prefix=prefix,
            prefix_text=prefix_text,
            store_bits=store_bits,
            prefix_bytes=prefix_bytes,
        )

    # -- identity ---------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """Identity of the caches that this engine makes and accepts."""
        if self._fingerprint is None:
            candidate = self._fingerprint_for(BlockScheme())
            known = [
                found
                for found in self.store.fingerprints()
                if replace(candidate, block_size=found.block_size).digest == found.digest
            ]
            if not known:
                return candidate
            self._fingerprint = replace(candidate, block_size=known[0].block_size)
        return self._fingerprint

    def _fingerprint_for(self, scheme: BlockScheme) -> Fingerprint:
        model = self.model
        return Fingerprint(
            model=model.name,
            weights=model.weights_digest,
            tokenizer=model.tokenizer_digest,
            dtype=model.dtype_name,
            rope=model.rope_digest,
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.head_dim,
            prefix=",".join(map(str, self.prefix)),
            block_size=scheme.size,
            n_init=scheme.n_init,
            n_local=scheme.n_local,
            store_bits=self.store_bits,
        )

    def key_of(self, text: str) -> str:
        """Key of the chunk cache that ``text`` has, or would have."""
        ids = self.model.tokenize(normalise(text), special=False)
        return self.store.key(self.fingerprint, ids)

    def handle_of(self, text: str) -> str | None:
        """The handle of ``text`` if its cache is stored, else None."""
        key = self.key_of(text)
        return handle_of(key) if self.store.contains(key, self.fingerprint) else None

    def expect(self, texts: Sequence[str]) -> None:
        """Find these chunks in prompts without handles too, as a retriever has just found them.

        Chunks in the store are found anyway. One without a usable cache is then a counted miss,
        and ``on_miss`` says what becomes of it.
        """
        self._known.expect([body for text in texts if (body := normalise(text))])

    def prefetch(self, texts: Sequence[str]) -> None:
        """Begin to read the caches of these chunks into the system's memory, without waiting."""
        for text in texts:
            ids = self.model.tokenize(normalise(text), special=False)
            self.store.prefetch(self.store.key(self.fingerprint, ids), self.fingerprint)

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text``, handles counted at the length of their chunks."""
        return self._resolver().count_tokens(text)

    # -- ingest -----------------------------------------------------------------------------

    def cache_chunk(self, text: str) -> str:
        """Cache one chunk and return its key. Nothing is computed if the store has it."""
        return self.cache_chunks([text])[0]

    def cache_chunks(self, texts: Sequence[str], *, progress: bool = False) -> list[str]:
        """Cache many chunks, several a pass; returns their keys in order.

        A cache that is stored and sound is left alone, a broken one is made anew.

        Raises:
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written; what was cached before stays.
        """
        bodies = bodies_of(texts)
        token_ids = [self._chunk_ids(body) for body in bodies]
        if self._fingerprint is None and token_ids:
            self._settle_block_size(token_ids)
        keys = [self.store.key(self.fingerprint, ids) for ids in token_ids]
        missing = {
            key: NewChunk(key=key, text=body, token_ids=ids)
            for key, body, ids in zip(keys, bodies, token_ids, strict=True)
            if not self._is_sound(key, ids)
        }
        for key in set(keys) - missing.keys():
            # Whoever caches a chunk again is about to need it: it must not be old enough to prune.
            self.store.touch(key, self.fingerprint)
        with (
            tqdm(total=len(missing), desc="caching chunks", disable=not progress) as bar,
            ThreadPoolExecutor(_WRITERS) as writers,
        ):
            written: Iterator[None] = iter(())
            try:
                for batch in batches(list(missing.values())):
                    with self._lock, torch.inference_mode():
                        caches = prefill(self.model, batch, self.fingerprint, self.prefix)
                    for _ in written:  # of the batch before, while this one was computed
                        bar.update()
                    written = writers.map(self.store.put, caches)
                for _ in written:
                    bar.update()
            except BaseException:  # who interrupts does not want to wait for a whole batch
                writers.shutdown(cancel_futures=True)
                raise
        if missing:
            self._calibrated = None
        return keys

    def cache_missing(self, texts: Sequence[str]) -> None:
        """Cache the chunks that have no usable cache, for a request that waits for them.

        Caches are opened and not read as a whole. What the store cannot take stays a miss: a full
        disk must not fail a request.

        Raises InvalidChunk like `cache_chunks`.
        """
        missing = [text for text in texts if not self._opens(normalise(text))]
        if missing:
            with suppress(StoreError):
                self.cache_chunks(missing)

    def _opens(self, body: str) -> bool:
        ids = self._chunk_ids(body)
        try:
            self.store.open(self.store.key(self.fingerprint, ids), self.fingerprint, ids).close()
        except CacheMiss:
            return False
        return True

    def is_cached(self, text: str) -> bool:
        """Whether a sound cache of ``text`` is stored; all of it is read and verified.

        Raises InvalidChunk if ``text`` can have none: it is empty, or longer than the context
        window.
        """
        ids = self._chunk_ids(normalise(text))
        return self._is_sound(self.store.key(self.fingerprint, ids), ids)

    def _chunk_ids(self, body: str) -> tuple[int, ...]:
        ids = tuple(self.model.tokenize(body, special=False))
        if not ids:
            raise InvalidChunk(f"chunk {body!r} holds no text; leave empty chunks out")
        room = self.model.context_window - len(self.prefix)
        if len(ids) > room:
            raise InvalidChunk(
                f"a chunk of {len(ids)} tokens is longer than the {room} that the context window "
                f"of {self.model.name!r} leaves; split it (it begins {body[:40]!r})"
            )
        return ids

    def _settle_block_size(self, token_ids: Sequence[tuple[int, ...]]) -> None:
        known = self.fingerprint
        if self._fingerprint is None:
            lengths = sorted(len(ids) for ids in token_ids)
            scheme = BlockScheme.auto(lengths[len(lengths) // 2])
            # Another process may be filling the same empty store: the first one decides.
            size = self.store.agree_block_size(known, scheme.size)
            self._fingerprint = replace(known, block_size=size)

    def _is_sound(self, key: str, ids: Sequence[int]) -> bool:
        try:
            with self.store.open(key, self.fingerprint, ids) as chunk:
                chunk.verify()
        except CacheMiss:
            return False
        return True

    # -- answers ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        chunks: Sequence[str] | None = None,
        *,
        method: str | Method | None = None,
        eviction: str | Eviction | None = None,
        max_new_tokens: int = 256,
        context_window: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        top_k: int = 0,
        repetition_penalty: float | None = None,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        on_miss: OnMiss = "compute",
    ) -> Answer:
        """The answer to ``prompt``.

        prompt: a string, or chat messages (``role``, ``content``) for the model's chat template.
        chunks: texts of chunks that occur in it, besides handles; None to find those of the store
            (and those that `expect` named), see `KnownTexts`.
        method, eviction: in place of the engine's for this answer; ``eviction="none"`` for none.
        context_window: tokens that prompt and answer may have together, if fewer than the model's.
        temperature, top_p, top_k, repetition_penalty, seed: see `Sampling`.
        stop, stop_ids: strings and token ids that end the answer and are no part of it.
        on_miss: what to do for a chunk without a usable cache: ``compute`` (as a chunk, and keep
            it; ``auto`` only where that does not take longer than full prefill, ``recompute``
            never), ``text`` (compute it with the rest of the prompt, keep nothing), ``error``. What
            turns out damaged only while it is read is computed as ``text`` by both of them.

        Raises:
            PromptTooLong: prompt and answer exceed the context window.
            HandleError: a handle is broken or unknown.
            ChunkNotCached: a chunk has no usable cache and on_miss is ``error``.
            InvalidOption, UnknownOption: an argument is wrong.
        """
        stream = self.stream(
            prompt,
            chunks,
            method=method,
            eviction=eviction,
            max_new_tokens=max_new_tokens,
            context_window=context_window,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            stop=stop,
            stop_ids=stop_ids,
            on_miss=on_miss,
        )
        text = "".join(stream)
        return Answer(text=text, report=stream.report)

    def stream(
        self,
        prompt: Prompt,
        chunks: Sequence[str] | None = None,
        *,
        method: str | Method | None = None,
        eviction: str | Eviction | None = None,
        max_new_tokens: int = 256,
        context_window: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        top_k: int = 0,
        repetition_penalty: float | None = None,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        on_miss: OnMiss = "compute",
    ) -> AnswerStream:
        """Like `generate`, but yields pieces of text as they are decided.

        The first token is computed before this returns, so mistakes raise here.
        """
        began = time.perf_counter()
        chosen = self.method if method is None else get_method(method)
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            repetition_penalty=repetition_penalty, seed=seed,
        )  # fmt: skip
        end_ids = self.model.end_ids(stop_ids)
        text = TextStream(self.model, stop)
        rendered = prompt if isinstance(prompt, str) else self.model.render_chat(prompt)
        with (
            self.resolve(
                rendered, chunks, on_miss="text" if on_miss == "compute" else on_miss
            ) as resolved,
            self._lock,
            torch.inference_mode(),
        ):
            request = self._request(resolved, chosen, eviction, max_new_tokens, context_window)
            begun = first_token(self._with_missed(request) if on_miss == "compute" else request)
            sampler = Sampler(self.model, begun.layout.token_ids.tolist(), sampling)
            first = sampler.next(begun.logits)
        report = replace(begun.report, ttft_s=time.perf_counter() - began)
        decoder = Decoder(self.model, begun.cache, begun.layout.n_tokens)

        def step(token: int) -> int:
            with self._lock, torch.inference_mode():
                return sampler.next(decoder.step(token))

        return AnswerStream(
            first, step, end_ids, sampling.max_new_tokens, text, report, begun.cache
        )

    def logits(
        self,
        prompt: Prompt,
        chunks: Sequence[str] | None = None,
        *,
        follow: Sequence[int] = (),
        method: str | Method | None = None,
        eviction: str | Eviction | None = None,
    ) -> torch.Tensor:
        """Logits of the answer's first token, and after each token of ``follow``.

        Returns (1 + len(follow), vocabulary) float32 on the CPU. Other arguments and errors are
        those of `generate`.
        """
        n_known = self.model.config.vocab_size
        if unknown := [token for token in follow if not 0 <= token < n_known]:
            raise InvalidOption(
                f"follow holds {unknown[0]}, which is no token; {self.model.name!r} has "
                f"{n_known}, counted from 0"
            )
        chosen = self.method if method is None else get_method(method)
        rendered = prompt if isinstance(prompt, str) else self.model.render_chat(prompt)
        with self.resolve(rendered, chunks) as resolved, self._lock, torch.inference_mode():
            request = self._request(resolved, chosen, eviction, max(1, len(follow)), None)
            begun = first_token(request)
            decoder = Decoder(self.model, begun.cache, begun.layout.n_tokens)
            rows = [begun.logits, *map(decoder.step, follow)]
            return torch.stack(rows).float().cpu()

    def _request(
        self,
        resolved: Resolved,
        method: Method,
        eviction: str | Eviction | None,
        capacity: int,
        context_window: int | None,
    ) -> Request:
        rule = self.eviction if eviction is None else eviction
        if context_window is not None and (type(context_window) is not int or context_window < 1):
            raise InvalidOption(
                f"context_window={context_window!r}; it must be a whole number of at least 1"
            )
        return Request(
            model=self.model,
            method=method,
            resolved=resolved,
            fingerprint=self.fingerprint,
            prefix=self.prefix,
            capacity=capacity,
            stable_layers=self._stable_layers() if "statistics" in method.needs else (),
            eviction=get_eviction(rule),
            own_eviction=rule is None,
            context_window=context_window,
            costs=self.costs if method.whole_if_faster else None,
            prefixes=self.prefixes,
        )

    def _with_missed(self, request: Request) -> Request:
        """The request with its missed chunks computed as chunks, which are kept.

        ``auto`` leaves them to full prefill where that is faster, and ``recompute`` always. What
        the store cannot take, or no cache can hold, does not fail the request.
        """
        texts = request.resolved.missed_texts
        if not texts or not request.method.recompute.uses_caches:
            return request
        layout = check_length(request)
        missed = [len(ids) for ids in texts]
        if held_prefix(request, layout, missed) is not None:
            return request
        if not self._is_worth_computing(request.method, layout, missed):
            return request
        if self._fingerprint is None:
            try:
                self._settle_block_size(list(texts))
            except StoreError:
                return request
        made = self._compute(
            [
                NewChunk(key=self.store.key(self.fingerprint, ids), text=text, token_ids=ids)
                for ids, text in texts.items()
            ]
        )
        request.resolved.add_computed(made)
        return replace(request, fingerprint=self.fingerprint)

    def _compute(
        self, chunks: Sequence[NewChunk]
    ) -> dict[tuple[int, ...], Callable[[], StoredChunk]]:
        """Caches of chunks by their token ids, each opened from memory; kept if possible."""
        made: dict[tuple[int, ...], Callable[[], StoredChunk]] = {}
        for batch in batches(chunks):
            try:
                caches = prefill(self.model, batch, self.fingerprint, self.prefix)
            except InvalidChunk:  # one of them: the others are none the worse for it
                for chunk in batch if len(batch) > 1 else ():
                    made |= self._compute([chunk])
                continue
            for chunk, cache in zip(batch, caches, strict=True):
                made[chunk.token_ids] = partial(MemoryChunk, cache, self.fingerprint)
                with suppress(StoreError):
                    self.store.put(cache)
        self._calibrated = None
        return made

    def _is_worth_computing(self, method: Method, layout: Layout, missed: Sequence[int]) -> bool:
        """Whether chunks of ``missed`` tokens and two passes take no longer than full prefill.

        A method that does not go by time always computes them.
        """
        if not method.whole_if_faster:
            return True
        costs = self.costs
        if is_whole(method, costs, layout, missed):
            return False
        both = costs.chunks_s(missed) + two_passes_s(method, costs, layout, missed)
        return both <= costs.full_prefill_s(layout.n_tokens)

    @property
    def costs(self) -> CostModel:
        """What passes cost here: as `calibrate` measured, else as assumed."""
        if self._costs is None:
            text = self.store.note(costs_name(self.model))
            measured = None if text is None else CostModel.from_json(text)
            self._costs = measured or CostModel.assumed(self.model)
        return self._costs

    def calibrate(self) -> CostModel:
        """Measure what passes cost on this machine, and keep it beside the caches; seconds.

        Raises StoreError if the store cannot be written.
        """
        with self._lock:
            self._costs = measure(self.model, self.fingerprint.entry_format)
        self.store.put_note(costs_name(self.model), self._costs.to_json())
        return self._costs

    def resolve(
        self, prompt: str, chunks: Sequence[str] | None = None, *, on_miss: OnMiss = "text"
    ) -> Resolved:
        """The segments of a prompt, and the open caches of its chunks; a context manager.

        Arguments and errors are those of `generate`.
        """
        known = self._known.find(prompt) if chunks is None else {}
        pieces = split_prompt(prompt, chunks or (), known, self._resolver().ends_a_key)
        if on_miss == "compute":
            self.cache_missing([body for piece in pieces if (body := self._body(piece))])
        # Only now: the first chunks of all settle the block size, and with it the fingerprint.
        return self._resolver().resolve(pieces, on_miss=on_miss)

    def _body(self, piece: Piece) -> str | None:
        """Text of a chunk in a prompt, if it is known and of this namespace."""
        if isinstance(piece, PlainText):
            return None
        if isinstance(piece, ChunkText):
            return piece.text
        text = self.store.text(piece.key)
        return text if text is not None and self.key_of(text) == piece.key else None

    def _resolver(self) -> Resolver:
        return Resolver(self.model, self.store, self.fingerprint)

    def _stable_layers(self) -> tuple[int, ...]:
        """The layers N* (paper: Appendix A.2): published for this shape, or from stored chunks."""
        config = self.model.config
        shape = (
            config.model_type,
            self.model.n_layers,
            config.hidden_size,
            self.model.n_kv_heads,
        )
        if shape in PUBLISHED_STABLE_LAYERS:
            return PUBLISHED_STABLE_LAYERS[shape]
        if self._calibrated is None:
            self._calibrated = stable_layers(self.model.n_layers, self._votes())
        return self._calibrated

    def _votes(self) -> torch.Tensor | None:
        """(n, L) bool: stable layers of the first chunks by key, whatever the order of ingest."""
        keys = self.store.keys(self.fingerprint)[: 2 * MIN_CHUNKS]
        if len(keys) < MIN_CHUNKS:
            return None
        votes = []
        for key in keys:
            try:
                with self.store.open(key, self.fingerprint) as chunk:
                    votes.append(chunk.statistics().stable)
            except CacheMiss:
                continue
        return torch.stack(votes) if votes else None
