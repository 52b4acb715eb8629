"""A runtime without a model: each token is looked up in a table, by all entries before it.

Tokens are bytes. The entry of a token is its id, so that an answer is right only if every entry of
its prompt is: those computed, those read from caches, and those taken from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss
from samkv_integrations.options import Sampling
from samkv_integrations.prompt.quoting import SpecialTokens
from samkv_integrations.runtimes.base import (
    Begun,
    ChunkLost,
    Logits,
    Observer,
    PromptPass,
    Runtime,
    RuntimeKind,
    Sampler,
    TokenMask,
)
from samkv_integrations.store.chunk import (
    BlockScheme,
    CacheShape,
    ChunkCache,
    ChunkRef,
    Fingerprint,
)

BOS, END = 256, 257


@dataclass
class Special:
    """A special token."""

    lstrip: bool = False
    rstrip: bool = False


@dataclass(eq=False)
class TableSequence:
    """The entries of one answer, which are token ids."""

    ids: list[int]
    prompt_bytes: int
    entries: TableSequence | None = None
    can_rewind: bool = True
    again: Mapping[int, int] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def kv_bytes(self) -> int:
        return 4 * len(self.ids)

    n_bytes = kv_bytes

    def rewind(self, n_tokens: int) -> None:
        del self.ids[len(self.ids) - n_tokens :]

    def close(self) -> None:
        """Nothing to do."""

    def most_within(self, n_tokens: int) -> int:
        return n_tokens

    def put_back(self) -> None:
        for position, before in self.again.items():
            self.ids[position] = before


class Greedy:
    """Takes the likeliest token that is allowed."""

    def __init__(self, mask: TokenMask | None) -> None:
        self._mask, self._taken = mask, list[int]()

    def next(self, logits: Logits) -> int:
        if self._mask is not None:
            allowed = self._mask.allowed(len(logits), self._taken)
            logits = np.where(allowed, logits, -np.inf)
        self._taken.append(int(np.argmax(logits)))
        return self._taken[-1]

    def next_if_sure(self, logits: Logits, tolerance: float) -> int | None:
        return self.next(logits)


class TableRuntime(Runtime):
    """Answers with words of a table; each depends on the sum of all entries before it."""

    name, n_layers, token_kv_bytes, context_window = "table", 1, 4, 4096
    n_vocabulary, longest_token, bos_id, eos_ids = 258, 1, BOS, frozenset({END})
    special_tokens = SpecialTokens({"<|end|>": Special()})
    chat_template = "role: content"

    def __init__(self) -> None:
        self.n_computed = 0

    # -- text ---------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        if special and "<|end|>" in text:
            before, _, after = text.partition("<|end|>")
            return [*before.encode(), END, *self.tokenize(after, special=True)]
        return list(text.encode())

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode()]
        return self.tokenize(text, special=False), spans

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < BOS).decode(errors="replace")

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        opens: bool = True,
    ) -> str:  # fmt: skip
        turns = [f"{each['role']}: {each['content']}<|end|>\n" for each in messages]
        return "".join(turns) + ("assistant: " if opens else "")

    # -- chunks -------------------------------------------------------------------------------

    def generation(self) -> int:
        return 0

    def fingerprint(
        self, prefix: Sequence[int], scheme: BlockScheme, store_bits: int
    ) -> Fingerprint:
        return Fingerprint(
            model=self.name, weights="table", config="", tokenizer="bytes", dtype="float32",
            rope="", n_layers=1, n_heads=1, n_kv_heads=1, head_dim=1,
            prefix=",".join(map(str, prefix)), block_size=scheme.size, n_init=scheme.n_init,
            n_local=scheme.n_local, store_bits=store_bits,
        )  # fmt: skip

    def cache_shape(self, fingerprint: Fingerprint, n_tokens: int) -> CacheShape:
        return CacheShape(at_opening={}, on_demand={}, entries=(1, n_tokens, 4))

    def prefill(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, prefix: Sequence[int],
        pause: Callable[[], None],
    ) -> Sequence[ChunkCache]:  # fmt: skip
        made = []
        for chunk in chunks:
            ids = np.array(chunk.token_ids, np.int32)
            made.append(
                ChunkCache(
                    key=chunk.key, fingerprint=fingerprint, text=chunk.text, token_ids=ids,
                    at_opening={}, on_demand={}, entries=ids.view(np.uint8).reshape(1, -1, 4),
                )
            )  # fmt: skip
        return made

    # -- answers ------------------------------------------------------------------------------

    def begin(self, work: PromptPass, observer: Observer) -> Begun:
        layout, held, computed = work.layout, work.held, work.method.recompute.choose(work.layout)
        entries = np.full(layout.n_tokens, -1, np.int64)
        if held.entries is not None:
            assert isinstance(held.entries, TableSequence)
            entries[: held.n_tokens] = held.entries.ids[: held.n_tokens]
        with observer.stage("load"):
            for index, stored in enumerate(work.caches.opened):
                at = layout.token_range[index]
                rows = np.empty((stored.n_tokens, 4), np.uint8)
                try:
                    stored.read_layers(0, [rows])
                except CacheMiss as miss:
                    raise ChunkLost(stored, miss) from miss
                ids = rows.view(np.int32)[:, 0]
                entries[layout.context_positions[at.start : at.stop]] = ids[
                    layout.offset_in_chunk[at.start : at.stop]
                ]
        is_computed = layout.uncached.copy()
        is_computed[layout.context_positions[computed]] = True
        is_computed[: held.n_tokens] = False
        is_computed[held.again] = True
        entries[is_computed] = layout.token_ids[is_computed]
        assert (entries >= 0).all()
        self.n_computed += int(is_computed.sum())
        sequence = TableSequence(entries.tolist(), 4 * layout.n_tokens)
        sequence.entries = sequence if work.keeps else None
        copied = None
        if work.n_copied:
            copied = TableSequence(entries[: work.n_copied].tolist(), 0)
        computed |= layout.uncached[layout.context_positions]
        return Begun(
            sequence=sequence, logits=self._logits(sequence), copied=copied,
            computed=computed.astype(np.float64), is_read=~computed,
            n_attended=float(work.of_chunks.sum()),
        )  # fmt: skip

    def _logits(self, sequence: TableSequence) -> NDArray[np.float64]:
        """Small letters by the entries so far, and the end behind a dozen of them."""
        weights = np.arange(1, len(sequence.ids) + 1) * np.array(sequence.ids)
        scores = np.zeros(self.n_vocabulary)
        scores[ord("a") + int(weights.sum()) % 26] = 1.0
        if len(sequence.ids) - sequence.prompt_bytes // 4 >= 12:
            scores[END] = 2.0
        return scores

    def decode(
        self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[Logits]]:
        found = []
        for sequence, following in zip(sequences, tokens, strict=True):
            found.append(list[Logits]())
            for token in following:
                sequence.ids.append(token)
                found[-1].append(self._logits(sequence))
        return found

    def sampler(
        self, prompt_ids: Sequence[int], sampling: Sampling, mask: TokenMask | None
    ) -> Sampler:
        return Greedy(mask)


TABLE = RuntimeKind(name="table", load=lambda name, **options: TableRuntime())
