"""The seam: what runs a model, as the rest of the engine sees it.

The engine decides which tokens of a prompt are computed, and which entries come from caches or from
memory (`PromptPass`). A runtime runs the model: it makes the caches of chunks, computes a prompt's
pass, and decodes. Tensors, logits and KV entries are its own: the engine passes them on and never
looks inside. tests/support/table_runtime.py is a complete runtime of some hundred lines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from samkv_integrations.errors import CacheMiss, Given, InvalidOption
from samkv_integrations.methods import Method, names_by_tokens
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.option import DEFAULT_STORE_BITS
from samkv_integrations.options import Sampling
from samkv_integrations.prompt.layout import Layout
from samkv_integrations.prompt.text import ModelText
from samkv_integrations.store.base import ChunkReader, IngestStore, StoredChunk
from samkv_integrations.store.chunk import (
    BlockScheme,
    CacheShape,
    ChunkCache,
    ChunkRef,
    Fingerprint,
)

Logits = Any
"""The scores of the next token, as a runtime has them. Only its own `Sampler` reads them."""


class ChunkLost(Exception):
    """A chunk cache failed while it was read."""

    def __init__(self, chunk: StoredChunk, miss: CacheMiss) -> None:
        super().__init__(str(miss))
        self.chunk, self.miss = chunk, miss


class EntriesLost(Exception):
    """Kept entries that a prompt was to go on from were freed for another answer meanwhile."""


# -- a prompt's pass ------------------------------------------------------------------------------


class FirstEntries(Protocol):
    """KV entries of a sequence's first tokens, as kept sequences hold them.

    They are freed with the last reference to them, which any thread may drop.
    """

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that they take."""
        ...

    def most_within(self, n_tokens: int) -> int:
        """The longest beginning, of at most ``n_tokens``, that a prompt can go on from."""
        ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """The cached prefix of a prompt.

    entries: of a kept sequence; None without one. n_tokens: length of the cached prefix.
    again: (n,) positions in it that are recomputed, for this answer only; ascending.
    n_exact: first tokens whose entries equal full prefill's after the pass, computed ones included.
    """

    entries: FirstEntries | None
    n_tokens: int
    again: NDArray[np.int64]
    n_exact: int


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The caches of a prompt's chunks, and access to others.

    fingerprint: of all. opened: the caches of the chunks, in the order of the layout. reader: opens
    others. keys: returns the first n keys of the store, for methods that need statistics of more
    chunks than the prompt has.
    """

    fingerprint: Fingerprint
    opened: Sequence[StoredChunk]
    reader: ChunkReader
    keys: Callable[[int], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class PromptPass:
    """The pass over a prompt: what is computed, loaded and taken from memory.

    layout: of all tokens, and of the chunks after the cached prefix. caches: of these chunks.
    method: chooses the tokens of chunks to recompute. eviction: chooses the entries that the
        answer's later tokens attend to; None for all.
    held: the cached prefix.
    capacity: tokens that the answer may add. of_chunks: (T,) bool, tokens of chunks, cached or not.
    keeps: whether all entries of the sequence stay in memory for later prompts. n_copied: if not,
        the number of first tokens whose entries are copied for them.
    """

    layout: Layout
    caches: Caches
    method: Method
    eviction: Eviction | None
    held: Held
    capacity: int
    of_chunks: NDArray[np.bool_]
    keeps: bool
    n_copied: int


class Observer:
    """Is told of the stages of a prompt pass, and of the pauses between its parts."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A block that is a stage of the answer: ``load``, ``probe``, ``select``, ``blend``."""
        return nullcontext()

    def pause(self) -> None:
        """Called between two parts of the pass. It may run other passes, and may raise."""


class TokenSequence(Protocol):
    """One answer that is decoded: the KV entries of its prompt and of its tokens so far.

    n_tokens: position of the next token; it counts all tokens, evicted ones included.
    prompt_bytes: bytes of the prompt's entries before any eviction. kv_bytes: of all entries now.
    entries: those that later prompts may go on from, which grow with the answer; None if none are.
    can_rewind: whether `rewind` can take tokens back.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def prompt_bytes(self) -> int: ...

    @property
    def entries(self) -> FirstEntries | None: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def can_rewind(self) -> bool: ...

    def rewind(self, n_tokens: int) -> None:
        """Take back the last ``n_tokens``."""

    def put_back(self) -> None:
        """After the last step: restore the entries that were recomputed for this answer only."""

    def close(self) -> None:
        """Free its entries, except those in `entries`; closing again does nothing."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The result of a prompt's pass.

    sequence: for the tokens after the first. logits: of the first token.
    copied: entries of the first `PromptPass.n_copied` tokens; None for none.
    computed: (Tctx,) float, the share of layers that computed each context token of the layout.
    is_read: (Tctx,) bool, tokens of blocks whose stored entries some layer reads.
    n_attended: of `PromptPass.of_chunks`, the tokens that the answer's next token attends to, mean
        over layers and key-value heads.
    """

    sequence: TokenSequence
    logits: Logits
    copied: FirstEntries | None
    computed: NDArray[np.float64]
    is_read: NDArray[np.bool_]
    n_attended: float


class Sampler(Protocol):
    """Chooses one token after another for one answer. Its methods may raise OutOfMemory."""

    def next(self, logits: Logits) -> int:
        """The token chosen from ``logits``."""
        ...

    def next_if_sure(self, logits: Logits, tolerance: float) -> int | None:
        """Like `next`; None, without a choice, if errors of the logits could change the token.

        tolerance: logits that differ by at most this may be in either order; 0 if all are exact.
        """
        ...


class TokenMask(Protocol):
    """Says which tokens may come next, such as those that continue the JSON of a schema."""

    def allowed(self, n_vocabulary: int, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """(n_vocabulary,) after the tokens of the answer so far."""
        ...


MOST_ROWS = 8
"""Most tokens of one decoding pass that checks drafts."""


@dataclass(frozen=True)
class RowCosts:
    """The time of a pass over several tokens, and the error of its logits.

    relative: time of a pass over 1, 2, ... tokens, divided by that over one. One number if no token
        may be drafted.
    tolerance: two logits that differ by at most this may change their order if tokens are computed
        together; 0 if each token gets the same bits.
    """

    relative: tuple[float, ...] = (1.0,)
    tolerance: float = 0.0


# -- the runtime ----------------------------------------------------------------------------------


class Made(Protocol):
    """Caches that were computed together; each may be assembled only on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int) -> ChunkCache: ...


class Runtime(ModelText):
    """Runs one model. All methods but those of text are called in the model's thread.

    n_layers: of the model. token_kv_bytes: bytes of one token's keys and values in all layers.
    """

    n_layers: int
    token_kv_bytes: int

    @property
    def n_parameters(self) -> int:
        """Numbers in the model's weights; 0, the default, if it is not known."""
        return 0

    @property
    def device_name(self) -> str:
        """The device, such as ``cpu`` or ``cuda:0``."""
        return "cpu"

    @property
    def dtype_name(self) -> str:
        """The dtype of its computations."""
        return "float32"

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Most tokens of prompt and answer together."""

    # -- identity -----------------------------------------------------------------------------

    @abstractmethod
    def generation(self) -> int:
        """A number that changes when the model does. Called once a question, in any thread.

        Raises UnsupportedModel if it has changed so that caches no longer fit it.
        """

    def refresh(self) -> None:
        """Look for changes that `generation` misses, however long it takes."""

    @abstractmethod
    def fingerprint(
        self, prefix: Sequence[int], scheme: BlockScheme, store_bits: int
    ) -> Fingerprint:
        """The identity of caches that this model makes and accepts.

        prefix: tokens that precede a chunk while its entries are computed.

        Raises InvalidOption if entries cannot be stored in so many bits.
        """

    # -- chunks -------------------------------------------------------------------------------

    default_store_bits: int = DEFAULT_STORE_BITS
    """Bits of a stored number if the engine's option ``store_bits`` is None."""

    @property
    def refuses_chunks(self) -> str | None:
        """Why no chunk can be cached with this model, and what works instead; None if chunks can.

        If it is not None, `check` refuses methods that use caches.
        """
        return None

    def batches(self, chunks: Sequence[ChunkRef]) -> list[list[ChunkRef]]:
        """Group chunks for one call of `prefill` each."""
        return [[chunk] for chunk in chunks]

    @abstractmethod
    def prefill(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, prefix: Sequence[int],
        pause: Callable[[], None],
    ) -> Made:  # fmt: skip
        """Compute the caches of chunks; each sees the prefix and itself, no other chunk.

        pause: see `Observer.pause`.

        Raises:
            InvalidChunk: the entries of one cannot be stored.
            OutOfMemory: the device has no memory for it.
        """

    @abstractmethod
    def cache_shape(self, fingerprint: Fingerprint, n_tokens: int) -> CacheShape:
        """The arrays in the cache of a chunk of so many tokens."""

    def reader(self, store: IngestStore, hot_bytes: int | str | None) -> ChunkReader:
        """The reader that opens a store's caches. hot_bytes: memory for hot chunks."""
        self.hot_budget(hot_bytes)  # raises
        return ChunkReader(store, self.cache_shape)

    def hot_budget(self, hot_bytes: int | str | None) -> int:
        """Bytes of hot chunks that the engine's option ``hot_bytes`` allows.

        Raises InvalidOption if it is not a size, exceeds the memory, or this runtime has none.
        """
        if hot_bytes not in (None, 0, "0"):
            raise InvalidOption(
                Given("hot_bytes", hot_bytes),
                f"; {type(self).__name__} reads chunk caches from their files, which the system "
                "keeps in memory; leave it out",
            )
        return 0

    def free(self) -> None:
        """Free what can be read or computed again, such as hot chunks."""

    # -- answers ------------------------------------------------------------------------------

    def check(self, method: Method, eviction: Eviction | None) -> None:
        """Raises InvalidOption for a method or an eviction that this runtime does not run."""
        if not method.is_by_tokens:
            raise InvalidOption(
                f"method {method.name!r} needs the transformers runtime, and {self.name!r} runs on "
                f"{type(self).__name__}; choose one of {', '.join(names_by_tokens())}"
            )
        if eviction is not None:
            raise InvalidOption(
                f"eviction {eviction.name!r} needs the transformers runtime, and {self.name!r} "
                f"runs on {type(self).__name__}; leave it out"
            )

    @abstractmethod
    def begin(self, work: PromptPass, observer: Observer) -> Begun:
        """Compute the pass of a prompt.

        Raises:
            ChunkLost: a cache cannot be read.
            EntriesLost: the entries of the cached prefix are gone.
            OutOfMemory: the device has no memory for it.
        """

    @abstractmethod
    def decode(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[Sequence[int]]
    ) -> Sequence[Any]:
        """One step. Returns, for each sequence, the logits after each of its next tokens, in order.

        Raises OutOfMemory; sequences that `can_rewind` are then unchanged.
        """

    @abstractmethod
    def sampler(
        self, prompt_ids: Sequence[int], sampling: Sampling, mask: TokenMask | None
    ) -> Sampler:
        """The sampler of one answer."""

    def mask_vocabulary(self, end_ids: frozenset[int]) -> Any:  # noqa: ANN401
        """The tokenizer as llguidance needs it, for answers that keep to a JSON schema."""
        raise InvalidOption(f"json_schema: {self.name!r} cannot follow a schema; leave it out")

    @property
    def decodes_exactly(self) -> bool:
        """Whether decoding computes the entries that a prefill would."""
        return True

    def row_costs(self) -> RowCosts:
        """What a pass over several tokens costs; by default no tokens are drafted."""
        return RowCosts()

    def free_bytes(self) -> int:
        """Bytes of free memory on the model's device."""
        return 2**31

    @property
    def kv_room(self) -> int | None:
        """Bytes of KV entries that running answers may need together; None where memory grows."""
        return None

    @property
    def most_running(self) -> int | None:
        """Most answers that can run at the same time; None for any number."""
        return None

    def stacked(self, logits: Sequence[Logits]) -> Any:  # noqa: ANN401
        """(n, vocabulary) float32 on the CPU, as an array of the runtime's kind."""
        return np.stack(logits)

    def thread(self) -> AbstractContextManager[None]:
        """The context in which the model's thread runs."""
        return nullcontext()

    def n_threads(self) -> int:
        """Threads that passes may use, as the calling thread has set them."""
        return 1

    def use_threads(self, n_threads: int) -> None:
        """Let passes of the calling thread use so many threads."""

    # -- costs --------------------------------------------------------------------------------

    @property
    def costs_name(self) -> str:
        """The name under which measured costs of this model on this device are kept."""
        return f"costs-{self.name}"

    def assumed_costs(self) -> CostModel:
        """Costs on a typical machine, for when nothing was measured."""
        return CostModel(layer_s=3e-4, token_s=1e-5, pair_s=1e-9, entry_s=1e-7, read_s=1e-8)

    def measure_costs(self, fingerprint: Fingerprint) -> CostModel:
        """Costs measured on this machine; takes some seconds."""
        return self.assumed_costs()


@dataclass(frozen=True, kw_only=True)
class RuntimeKind:
    """A runtime by its name, in a module that imports nothing heavy.

    load: makes a `Runtime` from a model's name and those options that were given.
    options: names of the options that it takes, see `load_runtime`.
    is_installed: whether the packages that it needs are there. It imports none of them.
    """

    name: str
    load: Callable[..., Runtime]
    options: Collection[str] = ()
    is_installed: Callable[[], bool] = lambda: True
