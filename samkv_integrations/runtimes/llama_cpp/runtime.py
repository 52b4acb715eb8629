"""The llama.cpp runtime: a GGUF file that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss, UnsupportedModel
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.options import Sampling
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.runtimes.base import (
    MOST_ROWS,
    Begun,
    ChunkLost,
    EntriesLost,
    Logits,
    Observer,
    PromptPass,
    RowCosts,
    Runtime,
    Sampler,
    TokenMask,
    TokenSequence,
)
from samkv_integrations.runtimes.llama_cpp import costs
from samkv_integrations.runtimes.llama_cpp.cells import Cells, Entries, Reservation
from samkv_integrations.runtimes.llama_cpp.entries import EntryCodec
from samkv_integrations.runtimes.llama_cpp.library.context import (
    MOST_OUTPUTS,
    N_UBATCH,
    LlamaContext,
)
from samkv_integrations.runtimes.llama_cpp.library.proof import Proven, prove
from samkv_integrations.runtimes.llama_cpp.sampling import NumpySampler
from samkv_integrations.runtimes.llama_cpp.sequence import LlamaSequence
from samkv_integrations.runtimes.llama_cpp.text import LlamaText
from samkv_integrations.store.base import StoredChunk
from samkv_integrations.store.chunk import (
    ArrayKind,
    BlockScheme,
    CacheArray,
    CacheShape,
    ChunkCache,
    ChunkRef,
    Fingerprint,
)

_Found = TypeVar("_Found")

COMPUTED, HELD, CACHED = 0, 1, 2
"""Where the entries of a token come from."""

PART_ON_CPU = 128
"""Tokens between two pauses on a CPU. 512 at once take hardly less, and others wait longer.

1,024 tokens took 4.44 CPU seconds in parts of 128 and of 512 (SmolLM2), 9.56 and 9.41 (Qwen 0.5B).
"""

MOST_OF_BATCH = 16
"""Most chunks that are computed at once: each is a sequence."""


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """Cached entries in a sequence of their own. positions: of its tokens, ascending."""

    entries: Entries
    positions: NDArray[np.int64]


class LlamaCppModel(LlamaText, Runtime):
    """A GGUF file as a `Runtime`.

    Args:
        context: the loaded model.
        name: what reports call it.
        digest: of the file.
        n_threads: threads that passes use.
    """

    default_store_bits = 8

    _before: tuple[tuple[int, ...], Entries] | None = None  # the prefix of chunks, computed

    def __init__(self, context: LlamaContext, name: str, digest: str, n_threads: int) -> None:
        super().__init__(context.binding, context.model)
        self.name, self._digest, self._n_threads = name, digest, n_threads
        self.context = context
        self.n_layers = context.n_layers
        context.use_threads(n_threads)
        proven = prove(context)
        self._proven = proven if isinstance(proven, Proven) else None
        self._refusal = proven if isinstance(proven, str) else None
        self.token_kv_bytes = 4 * context.n_layers * context.n_kv_heads * context.head_dim
        if self._proven is not None:
            layout = self._proven.layout
            self.token_kv_bytes = layout.n_layers * (layout.k_row + layout.v_row)
        self.cells = Cells(context, self.token_kv_bytes, can_crop=context.can_crop)

    @property
    def device_name(self) -> str:
        return self.context.device_name

    @property
    def n_parameters(self) -> int:
        return self.context.n_parameters

    @property
    def build(self) -> str:
        """The build of llama.cpp that runs it."""
        return self.context.binding.build

    @property
    def dtype_name(self) -> str:
        return "float16"

    @property
    def context_window(self) -> int:
        return min(self.context.n_trained, self.context.n_cells)

    @property
    def wider_window(self) -> str:
        most = self.context.n_trained
        if self.context.n_cells >= most:
            return ""
        return f", or load it with a larger n_ctx than {self.context.n_cells} (up to {most})"

    # -- identity -----------------------------------------------------------------------------

    def generation(self) -> int:
        return 0  # llama.cpp reads the file once

    def fingerprint(
        self, prefix: Sequence[int], scheme: BlockScheme, store_bits: int
    ) -> Fingerprint:
        context = self.context
        EntryCodec(bits=store_bits, n_heads=1, k_dim=2, v_dim=2)  # raises
        return Fingerprint(
            model=self.name, weights=self._digest, config="llama.cpp", tokenizer=self._digest,
            dtype=self.dtype_name, rope=context.rope_range(),
            n_layers=self.n_layers, n_heads=context.n_heads, n_kv_heads=context.n_kv_heads,
            head_dim=context.head_dim,
            prefix=",".join(map(str, prefix)), block_size=scheme.size, n_init=scheme.n_init,
            n_local=scheme.n_local, store_bits=store_bits,
        )  # fmt: skip

    # -- chunks -------------------------------------------------------------------------------

    @property
    def refuses_chunks(self) -> str | None:
        return self._refusal

    @property
    def _of_chunks(self) -> Proven:
        if self._proven is None:
            raise UnsupportedModel(self._refusal)
        return self._proven

    def _codec(self, fingerprint: Fingerprint) -> EntryCodec:
        layout, n_heads = self._of_chunks.layout, fingerprint.n_kv_heads
        return EntryCodec(
            bits=fingerprint.store_bits, n_heads=n_heads, k_dim=layout.k_row // 2 // n_heads,
            v_dim=layout.v_row // 2 // n_heads, halves=self.context.binding.halves,
        )  # fmt: skip

    def cache_shape(self, fingerprint: Fingerprint, n_tokens: int) -> CacheShape:
        codec, n_layers = self._codec(fingerprint), self._of_chunks.layout.n_layers
        ranges = ArrayKind(dtype="F16", shape=(n_layers, *codec.range_shape(n_tokens)))
        return CacheShape(
            at_opening={}, on_demand={"key_range": ranges},
            entries=(n_layers, n_tokens, codec.n_bytes),
        )  # fmt: skip

    def batches(self, chunks: Sequence[ChunkRef]) -> list[list[ChunkRef]]:
        """Chunks that llama.cpp computes at once: of at most `N_UBATCH` tokens, or a single one."""
        found, n_tokens = list[list[ChunkRef]](), N_UBATCH + 1
        for chunk in chunks:
            if n_tokens + len(chunk.token_ids) > N_UBATCH or len(found[-1]) == MOST_OF_BATCH:
                found.append([])
                n_tokens = 0
            found[-1].append(chunk)
            n_tokens += len(chunk.token_ids)
        return found

    def prefill(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, prefix: Sequence[int],
        pause: Callable[[], None],
    ) -> Sequence[ChunkCache]:  # fmt: skip
        with self.context.lock, ExitStack() as stack:
            before = self._prefix_entries(tuple(prefix), pause)
            stack.enter_context(self.cells.used(before))
            room = self.cells.reserve(sum(len(chunk.token_ids) for chunk in chunks))
            stack.callback(room.close)
            n_before, tokens, sequences = before.n_tokens, list[int](), list[Entries]()
            positions, owners = list[int](), list[int]()
            for chunk in chunks:
                entries = self.cells.new()
                stack.callback(self.cells.drop, entries)
                sequences.append(entries)
                if n_before:
                    self.cells.share(before, entries, 0, n_before)
                n_tokens = len(chunk.token_ids)
                room.take(entries, n_tokens)
                tokens += chunk.token_ids
                positions += range(n_before, n_before + n_tokens)
                owners += [entries.id] * n_tokens
            self._decode_parts(tokens, positions, owners, pause)
            return [
                self._made(chunk, entries, n_before, fingerprint)
                for chunk, entries in zip(chunks, sequences, strict=True)
            ]

    def _prefix_entries(self, prefix: tuple[int, ...], pause: Callable[[], None]) -> Entries:
        """The entries of the tokens before every chunk, computed once."""
        if self._before is None or self._before[0] != prefix or self._before[1].is_lost:
            entries = self.cells.new()
            if prefix:
                self.cells.reserve(len(prefix)).take(entries, len(prefix))
                self._decode_parts(prefix, range(len(prefix)), [entries.id] * len(prefix), pause)
            entries.n_users -= 1
            self._before = prefix, entries
        return self._before[1]

    def _made(
        self, chunk: ChunkRef, entries: Entries, n_before: int, fingerprint: Fingerprint
    ) -> ChunkCache:
        """The cache of a chunk, whose entries follow those of the prefix."""
        proven, n_tokens = self._of_chunks, len(chunk.token_ids)
        if n_before:
            self.context.remove(entries.id, 0, n_before)
        keys, values = proven.layout.split(self.context.state(entries.id), n_tokens)
        at = np.arange(n_before, n_before + n_tokens)
        coded, key_range = self._codec(fingerprint).encode(keys, values, proven.rotation, at)
        ranges = ArrayKind(dtype="F16", shape=key_range.shape)
        return ChunkCache(
            key=chunk.key, fingerprint=fingerprint, text=chunk.text,
            token_ids=np.array(chunk.token_ids, np.int32), at_opening={},
            on_demand={
                "key_range": CacheArray(kind=ranges, data=key_range.reshape(-1).view(np.uint8))
            },
            entries=coded,
        )  # fmt: skip

    def free(self) -> None:
        """Nothing: kept sequences make room by themselves."""

    # -- answers ------------------------------------------------------------------------------

    def begin(self, work: PromptPass, observer: Observer) -> Begun:
        """Assemble the prompt in a new sequence, see `_assemble`."""
        origin = _origin_of_tokens(work)
        is_cached = origin == CACHED
        source = cast("Entries | None", work.held.entries)
        with self.context.lock, self.cells.used(source), ExitStack() as if_it_fails:
            if source is not None and source.is_lost:  # to an answer of another scheduler
                raise EntriesLost
            room = self.cells.reserve(int((origin != HELD).sum()) + work.capacity)
            if_it_fails.callback(room.close)
            entries = self.cells.new()
            if_it_fails.callback(self.cells.drop, entries)
            with ExitStack() as afterwards:
                staged = None
                if is_cached.any():
                    with observer.stage("load"):
                        staged = self._stage(work, np.flatnonzero(is_cached), room)
                    afterwards.callback(self.cells.drop, staged.entries)
                with observer.stage("blend"):
                    logits = self._assemble(
                        work.layout, origin, entries, source, staged, room, observer
                    )
            copied = None
            if work.n_copied:
                copied = self.cells.new()
                self.cells.share(entries, copied, 0, work.n_copied)
                copied.n_users -= 1
            again = _spans(work.held.again)
            sequence = LlamaSequence(
                self.cells, entries, room=room, keeps=work.keeps,
                source=source if again else None, again=again,
            )  # fmt: skip
            if_it_fails.pop_all()
        computed = ~is_cached[work.layout.context_positions]
        return Begun(
            sequence=sequence, logits=logits, copied=copied,
            computed=computed.astype(np.float64), is_read=~computed,
            n_attended=float(work.of_chunks.sum()),
        )  # fmt: skip

    def _stage(self, work: PromptPass, positions: NDArray[np.int64], room: Reservation) -> _Staged:
        """Put the cached entries of a prompt into a sequence of their own, at their positions."""
        state, keys, values = self._of_chunks.layout.joined(positions)
        for index, stored in enumerate(work.caches.opened):
            self._load_chunk(work, index, stored, positions, keys, values)
        entries = self.cells.new()
        try:
            self.context.load(entries.id, state)
            room.take(entries, len(positions))
        except BaseException:
            self.cells.drop(entries)
            raise
        return _Staged(entries=entries, positions=positions)

    def _load_chunk(
        self, work: PromptPass, index: int, stored: StoredChunk, positions: NDArray[np.int64],
        keys: NDArray[np.uint8], values: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Fill the rows of one chunk's tokens that stand at ``positions``, ascending."""
        layout, codec = work.layout, self._codec(work.caches.fingerprint)
        tokens = np.arange(layout.token_range[index].start, layout.token_range[index].stop)
        tokens = tokens[np.isin(layout.context_positions[tokens], positions)]
        if not len(tokens):
            return
        shape = (self._of_chunks.layout.n_layers, stored.n_tokens, codec.n_bytes)
        entries = np.empty(shape, np.uint8)
        try:
            stored.read_layers(0, [*entries])
            ranges = stored.array("key_range")
        except CacheMiss as miss:
            raise ChunkLost(stored, miss) from miss
        at = layout.context_positions[tokens]
        rows = np.searchsorted(positions, at)
        own = slice(int(rows[0]), int(rows[-1]) + 1)  # a chunk's rows are neighbours
        codec.decode(
            entries, ranges.data.view(np.float16).reshape(ranges.kind.shape),
            self._of_chunks.rotation, layout.offset_in_chunk[tokens],
            layout.prefilled_positions[tokens], at, keys[:, own], values[:, own],
        )  # fmt: skip

    def _assemble(
        self, layout: Layout, origin: NDArray[np.int8], entries: Entries, source: Entries | None,
        staged: _Staged | None, room: Reservation, observer: Observer,
    ) -> Logits:  # fmt: skip
        """Grow a sequence to the whole prompt; returns the logits of its last token.

        llama.cpp computes tokens only at the end of a sequence. So cached entries are attached up
        to the next token to compute, and each run of such tokens is decoded where it stands.
        """
        edges = np.flatnonzero(np.diff(origin)) + 1
        logits = None
        for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(origin)], strict=True):
            if origin[start] == HELD:
                assert source is not None
                self.cells.share(source, entries, start, stop)
            elif origin[start] == CACHED:
                assert staged is not None
                self.cells.share_staged(staged.entries, staged.positions, entries, start, stop)
            else:
                room.take(entries, stop - start)
                if start:
                    observer.pause()
                logits = self._decode_parts(
                    layout.token_ids[start:stop].tolist(), range(start, stop),
                    [entries.id] * (stop - start), observer.pause,
                    wants_logits=stop == len(origin),
                )  # fmt: skip
        assert logits is not None
        return logits

    def _decode_parts(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int],
        pause: Callable[[], None], *, wants_logits: bool = False,
    ) -> NDArray[np.float32] | None:  # fmt: skip
        """Decode tokens in parts, with a pause between; the last one's logits."""
        logits, size = None, N_UBATCH if self.context.is_on_card else PART_ON_CPU
        size = min(size, self.context.most_tokens)
        for start in range(0, len(tokens), size):
            if start:
                pause()
            part = slice(start, start + size)
            n_tokens = len(tokens[part])
            is_last = wants_logits and start + n_tokens == len(tokens)
            logits = self.context.decode(
                tokens[part], positions[part], sequences[part], [n_tokens - 1] if is_last else ()
            )
        return logits[0] if wants_logits and logits is not None else None

    def decode(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[Sequence[int]]
    ) -> Sequence[NDArray[np.float32]]:
        found = list[NDArray[np.float32]]()
        with self.context.lock:
            batch = list(zip(cast("Sequence[LlamaSequence]", sequences), tokens, strict=True))
            while batch:
                n_part, n_tokens = 0, 0
                for _, of_one in batch:
                    if n_part and n_tokens + len(of_one) > MOST_OUTPUTS:
                        break
                    n_part, n_tokens = n_part + 1, n_tokens + len(of_one)
                found += self._step(batch[:n_part])
                batch = batch[n_part:]
        return found

    def _step(
        self, batch: Sequence[tuple[LlamaSequence, Sequence[int]]]
    ) -> list[NDArray[np.float32]]:
        """One call of llama_decode for several answers."""
        ids, positions, owners = list[int](), list[int](), list[int]()
        grown = list[tuple[LlamaSequence, int]]()
        try:
            for sequence, tokens in batch:
                ids += tokens
                positions += range(sequence.n_tokens, sequence.n_tokens + len(tokens))
                owners += [sequence.own.id] * len(tokens)
                sequence.grow(len(tokens))
                grown.append((sequence, len(tokens)))
            logits = self.context.decode(ids, positions, owners, range(len(ids)))
        except BaseException:
            for sequence, n_tokens in grown:
                sequence.rewind(n_tokens)
            raise
        ends = np.cumsum([len(tokens) for _, tokens in batch])
        return np.split(logits, ends[:-1])

    def sampler(
        self, prompt_ids: Sequence[int], sampling: Sampling, mask: TokenMask | None
    ) -> Sampler:
        return NumpySampler(prompt_ids, sampling, mask)

    # -- the machine --------------------------------------------------------------------------

    def row_costs(self) -> RowCosts:
        return self._row_costs

    @cached_property
    def _row_costs(self) -> RowCosts:
        if not self.context.can_crop:
            return RowCosts()
        return self._tried(lambda number: costs.row_costs(self.context, number), MOST_ROWS)

    def _tried(self, trial: Callable[[int], _Found], n_cells: int) -> _Found:
        """The result of a trial in a sequence that is free for it."""
        with self.context.lock:
            entries = self.cells.new()
            try:
                with closing(self.cells.reserve(n_cells)):
                    return trial(entries.id)
            finally:
                self.cells.drop(entries)

    def free_bytes(self) -> int:
        return self.context.n_cells * self.token_kv_bytes

    @property
    def kv_room(self) -> int | None:
        """An eighth of the cells is left for chunks that are computed meanwhile."""
        return self.context.n_cells * 7 // 8 * self.token_kv_bytes

    @property
    def most_running(self) -> int | None:
        """Half of the sequences. Others are for chunks and kept conversations, while in use."""
        return self.context.most_sequences // 2

    def stacked(self, logits: Sequence[Logits]) -> Any:  # noqa: ANN401
        return np.stack(logits)

    def n_threads(self) -> int:
        return self._n_threads

    def use_threads(self, n_threads: int) -> None:
        self.context.use_threads(n_threads)

    @property
    def costs_name(self) -> str:
        return f"costs-{self._digest}-llama-cpp-{self.device_name}-{self._n_threads}-threads"

    def assumed_costs(self) -> CostModel:
        return costs.assumed(self.context, self.n_layers)

    def measure_costs(self, fingerprint: Fingerprint) -> CostModel:
        return self._tried(
            lambda number: costs.measured(self.context, number, self.n_layers),
            min(N_UBATCH, self.context.n_cells // 2),
        )


def _origin_of_tokens(work: PromptPass) -> NDArray[np.int8]:
    """(T,) where the entries of each token of a prompt come from."""
    layout, held = work.layout, work.held
    origin = np.full(layout.n_tokens, COMPUTED, np.int8)
    origin[layout.context_positions[~work.method.recompute.choose(layout)]] = CACHED
    origin[layout.uncached] = COMPUTED
    origin[: held.n_tokens] = HELD
    origin[held.again] = COMPUTED
    return origin


def _spans(positions: NDArray[np.int64]) -> list[range]:
    """The runs of consecutive numbers, ascending."""
    if not len(positions):
        return []
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = np.split(positions, edges)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]
