"""Estimates of what a pass costs, to decide whether full prefill is faster.

With a small model a pass over few tokens is mostly overhead, and cached entries have to be read, so
full prefill may be faster than reuse. A runtime has the figures of its models, measured or assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samkv_integrations.methods.base import Method
from samkv_integrations.prompt.layout import Layout

MARGIN = 0.95
"""Caches are used if their pass is estimated below this share of full prefill."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one layer of a pass, as a sum of parts.

    layer_s: constant. token_s: for each computed token. pair_s: for each pair of a computed token
    and one that it attends to. entry_s: for each cached context token, de-quantising included.
    read_s: for reading and verifying it in all layers, divided by their number.
    run_s: for each further run of computed tokens, where a runtime computes them one by one.
    """

    layer_s: float
    token_s: float
    pair_s: float
    entry_s: float
    read_s: float
    run_s: float = 0.0

    def full_prefill_s(self, n_tokens: int, n_held: int = 0) -> float:
        """A layer of full prefill over ``n_tokens``, of which ``n_held`` are in memory."""
        n_rest = n_tokens - n_held
        return self._pass_s(n_rest, n_rest * (n_held + n_tokens + 1) / 2)

    def blended_s(
        self, method: Method, layout: Layout, missed: Sequence[int] = (), n_held: int = 0
    ) -> float:
        """A layer of a pass over the caches of ``layout``.

        missed: tokens of each chunk that would be computed and then count as cached. n_held: first
        tokens that are in memory.
        """
        n_context, n_chunks = layout.n_context + sum(missed), layout.n_chunks + len(missed)
        ratio = method.recompute.most_ratio(n_context, n_chunks)
        n_again = layout.n_tokens - n_held - n_context + ratio * n_context
        entries_s = n_context * (self.entry_s + self.read_s)
        runs_s = 0.0
        if self.run_s:
            is_computed = layout.uncached.copy()
            is_computed[layout.context_positions] |= method.recompute.choose(layout)
            n_runs = int((is_computed[1:] > is_computed[:-1]).sum())
            runs_s = self.run_s * (n_runs + len(missed))
        return self._pass_s(n_again, n_again * layout.n_tokens) + entries_s + runs_s

    def chunks_s(self, lengths: Sequence[int], n_prefix: int) -> float:
        """A layer of computing and storing chunks of these lengths.

        n_prefix: tokens of their prefix, which count once for each chunk: an upper bound.
        """
        with_prefix = [n_prefix + length for length in lengths]
        pairs = sum(length * (length + 1) / 2 for length in with_prefix)
        return self._pass_s(sum(with_prefix), pairs) + 2 * self.entry_s * sum(lengths)

    def _pass_s(self, n_tokens: float, n_pairs: float) -> float:
        return self.layer_s + n_tokens * self.token_s + n_pairs * self.pair_s


def is_whole(method: Method, costs: CostModel | None, layout: Layout, n_held: int = 0) -> bool:
    """Whether a method computes all tokens after the cached prefix, as full prefill does.

    costs: None if the method does not compare. layout: of the prompt, with the chunks after the
    cached prefix, its first ``n_held`` tokens.
    """
    if not layout.n_context:
        return True
    if costs is None:
        return False
    full_s = costs.full_prefill_s(layout.n_tokens, n_held)
    return costs.blended_s(method, layout, n_held=n_held) > MARGIN * full_s
