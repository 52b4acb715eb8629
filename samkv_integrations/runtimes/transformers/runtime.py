"""The transformers runtime: a loaded model that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, cast
from weakref import WeakSet

import torch

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.methods import Method
from samkv_integrations.methods.costs import CostModel
from samkv_integrations.methods.eviction import Eviction
from samkv_integrations.option import bytes_of
from samkv_integrations.options import Sampling
from samkv_integrations.runtimes.base import (
    Begun,
    Logits,
    Observer,
    PromptPass,
    RowCosts,
    Runtime,
    Sampler,
    TokenMask,
    TokenSequence,
)
from samkv_integrations.runtimes.memory import available_bytes
from samkv_integrations.runtimes.transformers import costs, row_costs
from samkv_integrations.runtimes.transformers.entries.cache_arrays import (
    cache_shape,
    entry_format_of,
)
from samkv_integrations.runtimes.transformers.entries.hot import HotChunks
from samkv_integrations.runtimes.transformers.entries.quantise import EntryFormat
from samkv_integrations.runtimes.transformers.model.model import LayeredModel
from samkv_integrations.runtimes.transformers.out_of_memory import told_of_memory
from samkv_integrations.runtimes.transformers.passes.decode import Decoder, decode
from samkv_integrations.runtimes.transformers.passes.prefill import (
    Before,
    PrefilledChunks,
    batches,
    entries_before,
    prefill,
)
from samkv_integrations.runtimes.transformers.passes.prompt import run_prompt
from samkv_integrations.runtimes.transformers.sampling import TransformersSampler
from samkv_integrations.store.base import IngestStore
from samkv_integrations.store.chunk import BlockScheme, CacheShape, ChunkRef, Fingerprint


class Model(LayeredModel, Runtime):
    """A transformers model as a `Runtime`. For its arguments see `LayeredModel`."""

    # the key is the digest of the fingerprint and the model's generation; the value, prefix entries
    _before: tuple[tuple[str, int], Before] | None = None

    @cached_property
    def _readers(self) -> WeakSet[HotChunks]:
        return WeakSet()

    @property
    def device_name(self) -> str:
        return str(self.device)

    # -- identity -----------------------------------------------------------------------------

    def generation(self) -> int:
        return self.identity.look()

    def refresh(self) -> None:
        self.identity.refresh()

    def fingerprint(
        self, prefix: Sequence[int], scheme: BlockScheme, store_bits: int
    ) -> Fingerprint:
        EntryFormat(
            bits=store_bits, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim, dtype=self.dtype
        )  # raises
        return Fingerprint(
            model=self.name, weights=self.identity.weights, config=self.identity.config,
            tokenizer=self.tokenizer_digest, dtype=self.dtype_name, rope=self.identity.rope,
            n_layers=self.n_layers, n_heads=self.n_heads, n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim, prefix=",".join(map(str, prefix)), block_size=scheme.size,
            n_init=scheme.n_init, n_local=scheme.n_local, store_bits=store_bits,
        )  # fmt: skip

    # -- chunks -------------------------------------------------------------------------------

    def batches(self, chunks: Sequence[ChunkRef]) -> list[list[ChunkRef]]:
        return batches(chunks, self.device)

    def prefill(
        self, chunks: Sequence[ChunkRef], fingerprint: Fingerprint, prefix: Sequence[int],
        pause: Callable[[], None],
    ) -> PrefilledChunks:  # fmt: skip
        with told_of_memory(self.device):
            before, key = self._before, (fingerprint.digest, self.generation())
            if before is None or before[0] != key:
                before = key, entries_before(self, prefix, pause)
                if self.generation() == key[1]:  # else the model has changed
                    self._before = before
            return prefill(self, chunks, fingerprint, before[1], pause)

    def cache_shape(self, fingerprint: Fingerprint, n_tokens: int) -> CacheShape:
        return cache_shape(fingerprint, n_tokens)

    def reader(self, store: IngestStore, hot_bytes: int | str | None) -> HotChunks:
        """Raises InvalidOption unless ``hot_bytes`` is a size, of at most the device's memory."""
        n_bytes = self.hot_budget(hot_bytes) if store.path is not None else 0
        reader = HotChunks(store, n_bytes, self.layer_devices)
        self._readers.add(reader)
        return reader

    def hot_budget(self, hot_bytes: int | str | None) -> int:
        most = available_bytes()
        default = 0
        if self.device.type == "cuda":
            free, most = torch.cuda.mem_get_info(self.device)
            default = free // 10
        if hot_bytes is None:
            return default
        n_bytes = 0 if hot_bytes in (0, "0") else bytes_of("hot_bytes", hot_bytes)
        if most is not None and n_bytes > most:
            raise InvalidOption(
                Given("hot_bytes", hot_bytes),
                f"; it must be at most {most}, the bytes of {self.device}; give less, or None for "
                "the default",
            )
        return n_bytes

    def free(self) -> None:
        """Free the hot chunks of all engines of this model."""
        for reader in [*self._readers]:
            reader.clear()

    # -- answers ------------------------------------------------------------------------------

    def check(self, method: Method, eviction: Eviction | None) -> None:
        if method.attend is not None and not self.scores_plainly:
            raise InvalidOption(
                f"method {method.name!r} has an attention of its own, and {self.name!r} bounds "
                "attention scores or has sinks; choose another method, such as 'auto'"
            )

    def begin(self, work: PromptPass, observer: Observer) -> Begun:
        with told_of_memory(self.device):
            return run_prompt(self, work, observer)

    def decode(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        with told_of_memory(self.device):
            return decode(cast("Sequence[Decoder]", sequences), tokens)

    def sampler(
        self, prompt_ids: Sequence[int], sampling: Sampling, mask: TokenMask | None
    ) -> Sampler:
        return TransformersSampler(self, prompt_ids, sampling, mask)

    def mask_vocabulary(self, end_ids: frozenset[int]) -> Any:  # noqa: ANN401
        import llguidance.hf  # takes a second; only answers with a schema need it

        found = self._mask_vocabularies.get(end_ids)
        if found is None:
            found = llguidance.hf.from_tokenizer(
                self.tokenizer, n_vocab=self.n_vocabulary, eos_token=sorted(end_ids)
            )
            self._mask_vocabularies[end_ids] = found
        return found

    @cached_property
    def _mask_vocabularies(self) -> dict[frozenset[int], Any]:
        return {}

    def row_costs(self) -> RowCosts:
        return self._row_costs

    @cached_property
    def _row_costs(self) -> RowCosts:
        return row_costs.row_costs(self)

    # -- the machine --------------------------------------------------------------------------

    def free_bytes(self) -> int:
        if self.device.type == "cuda" and torch.cuda.is_available():
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_bytes() or 2**31

    def stacked(self, logits: Sequence[Logits]) -> torch.Tensor:
        return torch.stack([*logits]).float().cpu()

    def thread(self) -> AbstractContextManager[None]:
        return torch.inference_mode()

    def n_threads(self) -> int:
        return torch.get_num_threads()

    def use_threads(self, n_threads: int) -> None:
        if torch.get_num_threads() != n_threads:  # each thread has its own
            torch.set_num_threads(n_threads)

    @property
    def costs_name(self) -> str:
        return costs.name_of(self)

    def assumed_costs(self) -> CostModel:
        return costs.assumed_costs(self)

    def measure_costs(self, fingerprint: Fingerprint) -> CostModel:
        return costs.measure(self, entry_format_of(fingerprint))
