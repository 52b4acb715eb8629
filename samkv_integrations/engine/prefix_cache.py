"""The prefix cache: KV entries of prompts' first tokens, which later prompts reuse.

The entries of a prompt's first tokens depend on those tokens only, as attention is causal, unless a
chunk cache is used among them. They are held in memory, by one engine, so they cross no namespace
and do not outlive the process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from torch import Tensor

LEAST = 8
"""Fewer tokens are neither held nor reused: computing them is faster than finding them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """The rotated entries of a prompt's first tokens; a pass adds them layer by layer.

    made_by: what computed them, see `Fingerprint.computed_by`. token_ids: (P,).
    cleared: how often the prefix cache had been cleared when the pass began.
    keys, values: (P, G, D) of each layer; P may be larger.
    """

    made_by: str
    token_ids: Tensor
    cleared: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def n_bytes(self) -> int:
        return sum(side.nbytes for side in (*self.keys, *self.values))

    def take(self, keys: Tensor, values: Tensor) -> None:
        """Copy the first tokens' entries of the next layer, (S, G, D) each."""
        self.keys.append(keys[: self.n_tokens].clone())
        self.values.append(values[: self.n_tokens].clone())

    def first(self, n_tokens: int) -> Prefix:
        """The same, shortened to its first tokens."""
        assert n_tokens <= self.n_tokens
        return replace(self, token_ids=self.token_ids[:n_tokens])

    def of_layer(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values (n_tokens, G, D) of the first tokens at a layer."""
        assert n_tokens <= self.n_tokens
        return self.keys[layer][:n_tokens], self.values[layer][:n_tokens]

    def common(self, made_by: str, token_ids: Tensor) -> int:
        """How many first tokens it shares with a prompt (T,)."""
        if made_by != self.made_by:
            return 0
        length = min(len(token_ids), self.n_tokens)
        differs = (token_ids[:length] != self.token_ids[:length]).nonzero()
        return int(differs[0]) if len(differs) else length


class PrefixCache:
    """The prefixes of recent prompts; the least recently used makes room. Thread-safe.

    A prompt takes the longest prefix that it shares with any of them, which may be a part of one. A
    prefix that another one extends is dropped.

    max_bytes: of all together; 0 for none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: list[Prefix] = []  # the most recently used one last
        self._n_cleared = 0
        self._lock = threading.Lock()

    def find(self, made_by: str, token_ids: Tensor) -> Prefix | None:
        """The longest held prefix of a prompt (T,), at most all but its last token."""
        with self._lock:
            if not self._held:
                return None
            common, at = max(
                (held.common(made_by, token_ids[:-1]), at) for at, held in enumerate(self._held)
            )
            if common < LEAST:
                return None
            self._held.append(self._held.pop(at))
            return self._held[-1].first(common)

    def begin(
        self, made_by: str, token_ids: Tensor, n_held: int, token_bytes: int
    ) -> Prefix | None:
        """An empty prefix for a pass to fill and give to `keep`; None if there is nothing to hold.

        token_ids: (P,) the first tokens whose entries will be full prefill's; they are cut to what
        fits. n_held: how many of them come from here. token_bytes: of one token in all layers.
        """
        token_ids = token_ids[: self._max_bytes // token_bytes].clone()
        if len(token_ids) < n_held + LEAST:
            return None
        with self._lock:
            return Prefix(made_by=made_by, token_ids=token_ids, cleared=self._n_cleared)

    def keep(self, new: Prefix) -> None:
        """Store the prefix produced by a pass, unless `clear` was called since the pass began."""
        with self._lock:
            if new.cleared != self._n_cleared:
                return
            self._held = [
                held
                for held in self._held
                if held.common(new.made_by, new.token_ids) < held.n_tokens
            ]
            self._held.append(new)
            while sum(held.n_bytes for held in self._held) > self._max_bytes:
                self._held.pop(0)

    def clear(self) -> None:
        """Clear all prefixes, for example after a deletion or a change of the model."""
        with self._lock:
            self._held.clear()
            self._n_cleared += 1
