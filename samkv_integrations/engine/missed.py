"""A prompt's missed chunks, computed as chunks before the prompt is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from samkv_integrations.engine.full_prefill import is_whole, two_passes_s
from samkv_integrations.engine.held import held_of
from samkv_integrations.engine.request import Request, check_length
from samkv_integrations.prompt.layout import Layout


def with_missed(request: Request) -> Request:
    """The request with its missed chunks computed as chunks, which are kept, if it asks for that.

    ``auto`` leaves them to full prefill where that is faster, and ``recompute`` always. What the
    store cannot take, or no cache can hold, does not fail the request.

    Raises PromptTooLong: prompt and answer exceed the context window.
    """
    texts, chunks = request.resolved.missed_texts, request.chunks
    if chunks is None or not texts or not request.method.recompute.uses_caches:
        return request
    layout = check_length(request)
    missed = [len(ids) for ids in texts]  # all of a chunk is computed, whatever the prompt holds
    if not _is_worth_computing(request, layout, missed):
        return request
    request.resolved.add_computed(chunks.compute_for(texts))
    return replace(request, fingerprint=chunks.fingerprint)


def _is_worth_computing(request: Request, layout: Layout, missed: Sequence[int]) -> bool:
    """Whether chunks of ``missed`` tokens and two passes take no longer than full prefill.

    Either goes on from what is held of the prompt.

    A method that does not go by time always computes them.
    """
    method, costs = request.method, request.costs
    if not method.whole_if_faster or costs is None:
        return True
    held = held_of(request, layout)
    if is_whole(method, costs, layout, missed, held=held):
        return False
    chunks_s = costs.chunks_s(missed, len(request.prefix))
    both = chunks_s + two_passes_s(method, costs, layout, missed, held=held)
    return both <= costs.full_prefill_s(layout.n_tokens, held.n_whole)
