"""The engine caches chunks once, and answers prompts from their caches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

from samkv_integrations.chunks.caching import Chunks
from samkv_integrations.chunks.prefix import prefix_ids
from samkv_integrations.chunks.recent import RecentKeys
from samkv_integrations.errors import ChunkNotCached, Given, InvalidOption
from samkv_integrations.methods import Method, get_method
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import Eviction, get_eviction
from samkv_integrations.option import (
    OnMiss,
    bytes_of,
    check_options,
    complete,
    declared,
)
from samkv_integrations.options import (
    DEFAULT_METHOD,
    AnswerOptions,
    AnswerSettings,
    EngineOptions,
    LlamaCppOptions,
)
from samkv_integrations.plan.kept_costs import keep_costs, kept_costs
from samkv_integrations.plan.kept_sequences import KeptSequences
from samkv_integrations.plan.request import HowToAnswer, Request, Times
from samkv_integrations.prompt.quoting import RenderedPrompt
from samkv_integrations.prompt.rag_template import check_texts
from samkv_integrations.prompt.reader import Prompt, PromptReader
from samkv_integrations.prompt.resolve import CacheSource, Resolved
from samkv_integrations.runtimes import load_runtime
from samkv_integrations.runtimes.base import FirstEntries, Runtime
from samkv_integrations.serving.alone import force
from samkv_integrations.serving.grammar import JsonConstraint, SchemaReader
from samkv_integrations.serving.listeners import Audience, Listener, collect_answer, log_answer
from samkv_integrations.serving.scheduler import Scheduler
from samkv_integrations.serving.stream import Answer, AnswerStream, off_loop
from samkv_integrations.serving.tracing import trace_answer
from samkv_integrations.store.chunk import BlockScheme, Fingerprint, normalise
from samkv_integrations.store.indexed import IndexedStore
from samkv_integrations.store.memory import MemoryStore

KEPT_SHARE = 8
"""By default, kept sequences take one part in so many of the memory available at the start."""


class PretrainedOptions(LlamaCppOptions, EngineOptions, total=False):
    """Options of `Engine.from_pretrained`: those of an engine, and those of llama.cpp."""


class Engine:
    """Answers from chunk caches.

    Args:
        model: what runs the model, such as a `Model` of transformers.
        store: where chunk caches are kept; None for this process's memory.
        scheduler: runs the model, and may be shared by engines of the same model; None for a new
            one.
        options: see `EngineOptions`.

    listeners: functions that are called at the end of each answer, see `Listener`; append your own.

    Threads and tasks may share an engine. Their answers are decoded together, see `Scheduler`.
    """

    def __init__(
        self,
        model: Runtime,
        store: IndexedStore | None = None,
        *,
        scheduler: Scheduler | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if not isinstance(model, Runtime):
            raise InvalidOption(
                Given("model", model),
                "; it must be a Model: Engine.from_pretrained takes a name or a folder, and "
                "Model(model, tokenizer, name) what transformers has loaded",
            )
        if isinstance(store, str | os.PathLike):
            raise InvalidOption(
                Given("store", store), f"; it must be a store, such as ChunkStore({str(store)!r})"
            )
        given = complete(EngineOptions, options, "option of an engine")
        self.model = model
        self.store: IndexedStore = MemoryStore() if store is None else store
        method, bits = given["method"], given["store_bits"]
        self.method: Method = get_method(DEFAULT_METHOD if method is None else method)
        self.store_bits: int = model.default_store_bits if bits is None else bits
        self.eviction: str | Eviction | None = given["eviction"]
        model.check(self.method, get_eviction(self.eviction))
        self.prefix = prefix_ids(model, given["prefix"], given["prefix_text"])
        self.prefix_bytes, self.hot_bytes = given["prefix_bytes"], given["hot_bytes"]
        self.sequences = KeptSequences[FirstEntries](
            kept_budget(model, self.prefix_bytes),
            lambda entries, n_tokens: entries.most_within(n_tokens),
        )
        self._announced = RecentKeys()
        self.scheduler = Scheduler.of(model, scheduler)
        self.listeners: list[Listener] = [log_answer, collect_answer, trace_answer]
        size = given["block_size"]
        scheme = None if size == "auto" else BlockScheme(size=size)
        self.chunks = Chunks(
            model, self.store, prefix=self.prefix, scheme=scheme, store_bits=self.store_bits,
            hot_bytes=self.hot_bytes, run=self.scheduler.run, on_change=self.sequences.clear,
        )  # fmt: skip
        self._schemas = SchemaReader()
        self._reader = PromptReader(model, self.store, self.chunks.outage)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        store: IndexedStore | None = None,
        *,
        runtime: str | None = None,
        device: str = "auto",
        dtype: Any = "auto",  # noqa: ANN401  # torch's are allowed too
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        n_threads: int | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> Engine:
        """An engine for the model ``name``: a hub id, a folder or a GGUF file.

        runtime: what runs it, a name out of `RUNTIMES`; None for ``llama_cpp`` if it is a GGUF file
            and llama.cpp is installed, else ``transformers``.
        n_threads: threads of a pass. device: with llama.cpp ``auto`` or ``cpu``.
        device, dtype, model_kwargs, tokenizer_kwargs: see `load_model`.
        options: see the class, and for llama.cpp `LlamaCppOptions`.

        Raises MissingExtra if the runtime is not installed, InvalidOption for an option of another
        runtime, and what `load_model` raises.
        """
        given: Any = options
        of_engine = {name: given[name] for name in given if name not in declared(LlamaCppOptions)}
        of_runtime = {name: given[name] for name in given if name not in of_engine}
        check_options(EngineOptions, of_engine)  # before the model is loaded, which takes time
        model = load_runtime(
            name, runtime, device=device, dtype=dtype, n_threads=n_threads,
            model_kwargs=model_kwargs, tokenizer_kwargs=tokenizer_kwargs, **of_runtime,
        )  # fmt: skip
        return cls(model, store, **of_engine)

    # -- chunks -----------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """Identity of the caches that this engine writes and accepts, for the current weights."""
        return self.chunks.follow_model()

    def refresh(self) -> bool:
        """Look for changes of the model that `Runtime.generation` misses; True if there are any."""
        before = self.chunks.fingerprint
        self.model.refresh()
        return self.fingerprint != before

    def key_of(self, text: str) -> str:
        """The key of the chunk cache of ``text``, whether or not it exists."""
        return self.chunks.refer([text])[0].key

    def issue_handle(self, text: str) -> str | None:
        """A new handle, which stands for ``text`` in a prompt; None if the text has no cache.

        It is valid for this engine only, for an hour. A prompt with the handle reads the text, so
        issue handles only to callers who may read it.
        """
        (ref,) = self.chunks.look_up(self.chunks.refer([text]), "exists")
        return self._reader.handles.issue(ref.text) if ref.state == "cached" else None

    def is_cached(self, text: str) -> bool:
        """Whether an intact cache of ``text`` is stored; the whole cache is read and verified.

        Raises InvalidChunk if ``text`` is empty, or longer than the context window.
        """
        (ref,) = self.chunks.look_up(self.chunks.refer([text], must_fit=True))
        return ref.state == "cached"

    def cache_chunks(self, texts: Sequence[str], *, progress: bool = False) -> list[str]:
        """Compute and store the caches of chunks, several a pass; returns their keys in order.

        An intact cache is left alone, a damaged one is computed again.

        Raises:
            InvalidChunk: a text is empty, or longer than the context window.
            StoreError: the store cannot be written; caches stored before stay.
        """
        return [ref.key for ref in self.chunks.cache(texts, progress=progress)]

    def announce(
        self,
        texts: Sequence[str],
        on_miss: OnMiss = "text",
        *,
        names: Sequence[str] = (),
        remedy: str = "ingest it again",
    ) -> None:
        """Prepare for chunks that a retriever has found, and that a prompt will contain.

        Prompts are searched for them first, even if they are not stored, and their caches are read
        ahead. `found_in` tells which of them a prompt contains.

        on_miss: what to do now for a chunk without a cache: ``compute`` and store it, ``text``
            (nothing: the prompt computes its text) or ``error``. If the store cannot be written,
            the chunk stays a miss: a full disk must not fail a request.
        names, remedy: for the error: what the chunks are called, and how to cache them again.

        Raises:
            ChunkNotCached: a chunk has no usable cache, and ``on_miss`` is ``error``.
            InvalidChunk: a text is longer than the context window, and ``on_miss`` is not ``text``.
        """
        check_options(AnswerOptions, {"on_miss": on_miss})
        began, chunks = time.perf_counter(), self.chunks
        since = chunks.deletions()
        found = chunks.refer(texts, must_fit=on_miss != "text")
        if on_miss == "compute" and self.model.refuses_chunks is None:
            with chunks.outage.survived():
                found = chunks.look_up(chunks.agree(found), "opens")
                chunks.compute([ref for ref in found if ref.state == "missed"], since=since)
            missed = {ref.key for ref in found if ref.state == "missed"}
            if made := [key for key in missed if self.store.contains(key, chunks.fingerprint)]:
                self._announced.add(made, (time.perf_counter() - began) / len(made))
        elif on_miss == "error":
            for place, ref in enumerate(chunks.look_up(found, "opens")):
                if ref.state == "missed":
                    named = f"{names[place]} (chunk {ref.key})" if names else f"chunk {ref.key}"
                    raise ChunkNotCached.of(f"{named}, which begins {ref.text[:40]!r},", remedy)
        self.store.begin_to_fetch([ref.key for ref in found], chunks.fingerprint)
        chunks.reader.warm(found, chunks.fingerprint)
        self._reader.expect(found)

    def expect(self, texts: Sequence[str]) -> None:
        """Search prompts for these chunks first, even if they are not stored.

        Chunks in the store are found anyway. A chunk without a usable cache counts as a miss; the
        answer's ``on_miss`` says what happens then.
        """
        self._reader.expect(self.chunks.refer(texts))

    def forget(self, texts: Sequence[str]) -> int:
        """Delete the caches and texts of these chunks, for every model; returns how many chunks.

        Records in a vector store stay, and would be cached again. Raises StoreError on failure.
        """
        try:
            return self.chunks.forget(texts)
        finally:
            self._reader.forget(texts)
            self.sequences.clear()

    def delete(self, keys: Collection[str], *, is_final: bool = True) -> int:
        """Delete chunk caches by key, from memory too; returns how many existed.

        is_final: False if the same texts may be added again at once, as indexers do. Then their
            caches wait in memory for a minute, 256 MB at most; no prompt finds them there.

        Raises StoreError if one cannot be deleted, InvalidOption if ``keys`` are not strings.
        """
        keys = check_texts("keys", keys)
        try:
            return self.chunks.delete(sorted(keys), is_final=is_final)
        finally:
            self._reader.forget(keys=set(keys))
            self.sequences.clear()

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt as one string. Raises InvalidOption if the chat template refuses it."""
        return self._reader.render(prompt)

    def found_in(self, prompt: Prompt) -> list[str]:
        """The texts of the chunks in a prompt, in order and each once; handles included."""
        found: dict[str, None] = {}
        for chunk in self._reader.read(prompt, None, self.chunks.fingerprint)[1]:
            text = chunk.text
            if text is None and chunk.key:
                with self.chunks.outage.survived():
                    text = self.store.text(chunk.key)
            if text is None:
                text = self.model.detokenize(chunk.token_ids)
            found[normalise(text)] = None
        return list(found)

    def count_tokens(self, prompt: Prompt, *, most: int | None = None) -> int:
        """Tokens of a prompt, or of a part of one. A handle counts as its chunk's.

        most: raises PromptTooLong if there are more; None for no limit.
        """
        return self._reader.count_tokens(prompt, self.chunks.fingerprint, most=most)

    # -- answers ----------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, chunks: Sequence[str] | None = None, **options: Unpack[AnswerOptions]
    ) -> Answer:
        """The answer to ``prompt``.

        prompt: see `Prompt`.
        chunks: texts of chunks that it contains, besides handles; None to find all that the store
            holds or `expect` named. The prompt is tokenised as transformers would. Runs of at least
            16 token ids that are a chunk's are taken from its cache; all others are computed.
        options: see `AnswerOptions`.

        Raises:
            PromptTooLong: prompt and answer exceed the context window.
            HandleError: something cut a handle in two.
            ChunkNotCached: a chunk has no usable cache and on_miss is ``error``.
            TimedOut: the answer was not complete after ``timeout`` seconds.
            Overloaded: more answers wait than the scheduler's limits allow.
            InvalidOption, UnknownOption: an argument is wrong.
            MissingExtra: an option needs an extra that is not installed.
        """
        stream = self.stream(prompt, chunks, **options)
        return Answer.of("".join(stream), stream)

    async def agenerate(
        self, prompt: Prompt, chunks: Sequence[str] | None = None, **options: Unpack[AnswerOptions]
    ) -> Answer:
        """Like `generate`, for asynchronous code; occupies no thread while it waits."""
        async with await self.astream(prompt, chunks, **options) as stream:
            return Answer.of("".join([piece async for piece in stream]), stream)

    def stream(
        self, prompt: Prompt, chunks: Sequence[str] | None = None, **options: Unpack[AnswerOptions]
    ) -> AnswerStream:
        """Like `generate`, but returns an iterator over pieces of text.

        The first token is computed before this returns, so errors in the arguments raise here.
        """
        return self._ask(prompt, chunks, options).start()

    async def astream(
        self, prompt: Prompt, chunks: Sequence[str] | None = None, **options: Unpack[AnswerOptions]
    ) -> AnswerStream:
        """Like `stream`, for asynchronous code: read it with ``async for``."""
        owner = str(options.get("owner", ""))  # checked in `_ask`
        return await (await off_loop(self._ask, prompt, chunks, options, owner=owner)).astart()

    def _ask(
        self, prompt: Prompt, chunks: Sequence[str] | None, options: AnswerOptions
    ) -> AnswerStream:
        """Read the prompt and decide on its settings, in the caller's thread."""
        began, settings = time.perf_counter(), AnswerSettings.of(**options)
        audience = Audience(
            self.listeners, model=self.model.name, settings=settings, began=began,
            is_chat=not isinstance(prompt, str | RenderedPrompt),
        )  # fmt: skip
        resolved = None
        try:
            resolved = self._read(prompt, chunks, settings)
            owner = options.get("owner", "")
            request = self.request(resolved, settings, began=began, owner=owner)
            request.look_up()  # here, so that the model's thread need not wait for files
            request.times.announce_s = self._take_announced(resolved)
            request.times.read = time.perf_counter()
            return AnswerStream(self.scheduler, request, audience)
        except BaseException as error:
            if resolved is not None:
                resolved.close()
            audience.tell(error=error)
            raise

    def _take_announced(self, resolved: Resolved) -> float:
        """Seconds that `announce` took for chunks of the prompt; each counts once."""
        announced: dict[str, float] = {}
        for chunk in resolved.chunks:
            if (seconds := self._announced.take(chunk.key)) is not None:
                announced[chunk.key] = seconds
            chunk.computed_now |= chunk.key in announced
        return sum(announced.values())

    def logits(
        self,
        prompt: Prompt,
        chunks: Sequence[str] | None = None,
        *,
        follow: Sequence[int] = (),
        method: str | Method | None = None,
        eviction: str | Eviction | None = None,
    ) -> Any:  # noqa: ANN401  # an array of the runtime's kind
        """Logits of the answer's first token, and after each token of ``follow``.

        Returns (1 + len(follow), vocabulary) float32 on the CPU: a tensor of torch with
        transformers. The other arguments and the errors are those of `generate`. Chunks without a
        cache are computed as text.
        """
        n_known = self.model.n_vocabulary
        if unknown := [t for t in follow if type(t) is not int or not 0 <= t < n_known]:
            raise InvalidOption(
                f"follow holds {unknown[0]!r}; each item must be a token id of "
                f"{self.model.name!r}, 0 to {n_known - 1}"
            )
        settings = AnswerSettings.of(method=method, eviction=eviction, on_miss="text")

        def compute(pause: Callable[[], None]) -> Any:  # noqa: ANN401
            request = self.request(resolved, settings, capacity=max(1, len(follow)))
            return force(request, follow)[0]

        with self.resolve(prompt, chunks) as resolved:
            return self.scheduler.run(compute)

    def resolve(self, prompt: Prompt, chunks: Sequence[str] | None = None) -> Resolved:
        """The tokens of a prompt, and the open caches of its chunks; a context manager.

        Arguments and errors are those of `generate`. Nothing is computed: a missed chunk is text.
        """
        resolved = self._read(prompt, chunks, AnswerSettings.of(on_miss="text"))
        try:
            resolved.open(behind=0)
        except BaseException:
            resolved.close()
            raise
        return resolved

    def _read(
        self, prompt: Prompt, chunks: Sequence[str] | None, settings: AnswerSettings
    ) -> Resolved:
        """The tokens of a prompt and its chunks, whose caches are not opened yet."""
        generation = self.model.generation()
        made_by, since = self.chunks.follow_model(), self.chunks.deletions()
        self.sequences.follow(since)
        window = settings.window_within(self.model.context_window)
        token_ids, found = self._reader.read(prompt, chunks, made_by, window=window)
        if not token_ids:
            raise InvalidOption("the prompt is empty; it must hold at least one token")
        return Resolved(
            token_ids=token_ids, chunks=found, on_miss=settings.on_miss, since=since,
            generation=generation,
            source=CacheSource(
                store=self.store, reader=self.chunks.reader, fingerprint=made_by,
                outage=self.chunks.outage,
            ),
        )  # fmt: skip

    def request(
        self, resolved: Resolved, settings: AnswerSettings, *, capacity: int | None = None,
        began: float | None = None, owner: str = "",
    ) -> Request:  # fmt: skip
        """The request that `first_token` answers.

        capacity: most tokens of the answer; None for the limit of the settings. began: when the
        caller asked, for its timeout (`time.perf_counter`); None for now. owner: who asks.
        """
        times = Times(began=time.perf_counter() if began is None else began)
        method, mask = (settings.method or self.method).for_model(self.model.n_parameters), None
        given = self.eviction if settings.eviction is None else settings.eviction
        rule, end_ids = get_eviction(given), self.model.end_ids(settings.stop_ids)
        if settings.json_schema is not None:
            until = None if settings.timeout is None else times.began + settings.timeout
            mask = JsonConstraint(
                self.model, settings.json_schema, end_ids, self._schemas, owner, until
            )
        how = HowToAnswer(
            method=method,
            # full prefill does not use the method's own rule
            eviction=method.eviction if given is None else rule, whole_eviction=rule,
            costs=self.costs if method.else_way else None, settings=settings,
            capacity=settings.sampling.max_new_tokens if capacity is None else capacity,
            end_ids=end_ids, mask=mask,
        )  # fmt: skip
        return Request(
            chunks=self.chunks, resolved=resolved, how=how, times=times, sequences=self.sequences,
            owner=owner,
        )  # fmt: skip

    # -- what passes cost -------------------------------------------------------------------

    @cached_property
    def costs(self) -> CostModel:
        """The cost of passes on this machine: as `calibrate` measured, else as assumed."""
        return kept_costs(self.model, self.store)

    def calibrate(self) -> CostModel:
        """Measure the cost of passes on this machine, and keep it beside the caches.

        Takes some seconds. Raises StoreError if the store cannot be written.
        """
        self.costs = self.scheduler.run(lambda _: self.model.measure_costs(self.fingerprint))
        keep_costs(self.model, self.store, self.costs)
        return self.costs


def kept_budget(model: Runtime, prefix_bytes: int | str | None) -> int:
    """Bytes of kept sequences that the engine's option ``prefix_bytes`` allows.

    By default all that a runtime with room for so many entries has: it drops them when it needs
    the room.
    """
    if prefix_bytes is None:
        return model.kv_room or model.free_bytes() // KEPT_SHARE
    return 0 if prefix_bytes in (0, "0") else bytes_of("prefix_bytes", prefix_bytes)
