"""Inspect one answer: every token of its prompt, layer by layer, beside full prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from samkv_integrations.engine.blend import State, Watch
from samkv_integrations.engine.decode import TextStream, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report
from samkv_integrations.eviction import Eviction
from samkv_integrations.inspection.inspection import InspectedChunk, Inspection
from samkv_integrations.methods import Method
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.prompt.resolve import Resolved

__all__ = ["InspectedChunk", "Inspection", "inspect"]


def inspect(
    engine: Engine,
    prompt: Prompt,
    chunks: Sequence[str] | None = None,
    *,
    method: str | Method | None = None,
    eviction: str | Eviction | None = None,
    max_new_tokens: int = 64,
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> Inspection:
    """What becomes of every token of ``prompt``, and what full prefill makes of the same prompt.

    Both answers are greedy. Nothing is stored: a chunk without a cache is computed with the prompt,
    as with ``on_miss="text"``, and nothing is taken from prompts with the same beginning.

    prompt, chunks: see `Engine.generate`. method, eviction: None for the engine's.
    max_new_tokens: most tokens of either answer.
    title: what to call it, such as the question.
    names: text of a chunk -> what to call it; one without a name is called by its place.

    Raises what `Engine.generate` raises.
    """
    settings = AnswerSettings.of(
        method=method, eviction=eviction, on_miss="text", max_new_tokens=max_new_tokens
    )
    with engine.resolve(prompt, chunks) as resolved:
        answer, report, watch = _watched(engine, resolved, settings)
        pieces = _pieces(engine.model, resolved.token_ids)
        chunk_of = torch.full((len(pieces),), -1)
        is_missed = torch.zeros(len(pieces), dtype=torch.bool)
        for number, chunk in enumerate(resolved.chunks):
            for run in chunk.runs:
                chunk_of[run.span.start : run.span.stop] = number
                is_missed[run.span.start : run.span.stop] = chunk.stored is None
        texts = [
            chunk.text or engine.model.detokenize(chunk.token_ids) for chunk in resolved.chunks
        ]
    with engine.resolve(prompt, chunks) as resolved:
        full = AnswerSettings.of(method="recompute").method
        truth = replace(settings, method=full, eviction="none")
        full_answer, full_report, full_watch = _watched(engine, resolved, truth)
    states = watch.states
    states[:, is_missed] = State.MISSED
    called, scores = names or {}, None
    if watch.token_scores is not None:
        scores = torch.full((watch.layout.n_tokens,), torch.nan)
        scores[watch.layout.context_positions] = watch.token_scores
    return Inspection(
        title=title, pieces=tuple(pieces), chunk_of=chunk_of, texts=tuple(texts), states=states,
        names=tuple(called.get(text, f"chunk {number}") for number, text in enumerate(texts, 1)),
        attention=watch.attention, full_attention=full_watch.attention, scores=scores,
        answer=answer, full_answer=full_answer, report=report, full_report=full_report,
    )  # fmt: skip


def _watched(engine: Engine, resolved: Resolved, settings: AnswerSettings) -> tuple[Any, ...]:
    """One answer, its report, and what was seen of it."""
    watch, most = Watch(), settings.sampling.max_new_tokens
    request = replace(engine.request(resolved, settings, most), watch=watch, prefixes=None)

    def answer() -> tuple[str, Report]:
        begun = first_token(request)
        found = decode_greedily(engine.model, begun, most)
        return found.text, replace(
            begun.report, completion_tokens=len(found.tokens), decode_kv_bytes=begun.cache.kv_bytes
        )

    return *engine.scheduler.run(answer), watch


def _pieces(model: Model, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a special token has its name."""
    text, special = TextStream(model), {*model.tokenizer.all_special_ids}
    pieces = [
        str(model.tokenizer.convert_ids_to_tokens(token)) if token in special else text.push(token)
        for token in ids
    ]
    if ids and ids[-1] not in special:
        pieces[-1] += text.flush()
    return pieces
