"""Greedy answers by transformers' own forward pass, which no code of ours touches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from samkv_integrations.model.model import Model


def greedy(
    model: Model, ids: Sequence[int], n_tokens: int, *, end_ids: Collection[int] = ()
) -> list[int]:
    """At most ``n_tokens`` likeliest tokens after ``ids``; the last may be one of ``end_ids``."""
    found: list[int] = []
    fed, past = list(ids), None
    while len(found) < n_tokens and not (found and found[-1] in end_ids):
        with torch.inference_mode():
            output = model.hf(
                input_ids=torch.tensor([fed], device=model.device),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
        past = output.past_key_values
        fed = [int(output.logits[0, -1].argmax())]
        found += fed
    return found
