"""The fingerprint of an engine's chunks: agreed on with its store, and true to its model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from samkv_integrations.cache.base import Outage, Store
from samkv_integrations.cache.chunk import BlockScheme, Fingerprint
from samkv_integrations.cache.quantise import EntryFormat
from samkv_integrations.model.model import Model


class AgreedFingerprint:
    """Identity of the caches of one model in one store. Safe to use from many threads.

    Args:
        prefix: token ids that chunks are prefilled after.
        scheme: the blocks of chunks; None for those of what the store holds for this model, else
            by the lengths of the first chunks that are computed.
        store_bits: bits of the numbers in chunk caches.
        outage: told if the store cannot say what it holds.
        on_change: called when the model is seen to have changed.

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
        outage: Outage,
        on_change: Callable[[], None],
    ) -> None:
        EntryFormat(
            bits=store_bits, n_kv_heads=model.n_kv_heads, head_dim=model.head_dim, dtype=model.dtype
        )  # raises
        self._model = model
        self._store = store
        self._prefix = prefix
        self._scheme = scheme
        self._store_bits = store_bits
        self._outage = outage
        self._on_change = on_change
        self._lock = threading.RLock()
        self._generation = model.identity.generation
        self._agreed: Fingerprint | None = None

    @property
    def value(self) -> Fingerprint:
        """Identity of the caches that are made and accepted.

        Its block size is a guess until there is a chunk: whoever is about to compute the first one
        agrees on it with all processes that share the store.
        """
        with self._lock:
            if self._agreed is None:
                guess = self._of(self._scheme or BlockScheme())
                size = guess.block_size if self._scheme else self._stored_block_size(guess)
                if size is None:
                    return guess
                self._agreed = replace(guess, block_size=size)
            return self._agreed

    def _stored_block_size(self, guess: Fingerprint) -> int | None:
        """That of the caches which the store holds for this model."""
        with self._outage.survived():
            for found in self._store.fingerprints():
                if replace(guess, block_size=found.block_size).digest == found.digest:
                    return found.block_size
        return None

    def settle(self, length: int) -> None:
        """Agree on a block size for chunks of ``length`` tokens, for good.

        Raises StoreError if the store does not say, nor take, one.
        """
        with self._lock:
            guess = self.value
            if self._agreed is None:
                # Another process may be filling the same empty store: the first one decides.
                size = self._store.agree_block_size(guess, BlockScheme.auto(length).size)
                self._agreed = replace(guess, block_size=size)

    def follow_model(self) -> None:
        """Take another fingerprint if the model has changed: once for every request.

        Raises UnsupportedModel as `Identity.look` does.
        """
        generation = self._model.identity.look()
        with self._lock:
            if generation == self._generation:
                return
            self._generation, self._agreed = generation, None
        self._on_change()

    def while_computing(self) -> tuple[Fingerprint, Callable[[], bool]]:
        """The fingerprint, and whether the model is still the same, to ask after a pass."""
        with self._lock:
            generation = self._generation
            return self.value, lambda: self._model.identity.look() == generation

    def _of(self, scheme: BlockScheme) -> Fingerprint:
        model = self._model
        return Fingerprint(
            model=model.name,
            weights=model.identity.weights,
            config=model.identity.config,
            tokenizer=model.tokenizer_digest,
            dtype=model.dtype_name,
            rope=model.identity.rope,
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.head_dim,
            prefix=",".join(map(str, self._prefix)),
            block_size=scheme.size,
            n_init=scheme.n_init,
            n_local=scheme.n_local,
            store_bits=self._store_bits,
        )
