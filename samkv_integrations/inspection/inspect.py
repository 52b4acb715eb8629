"""Answers a prompt twice, by a method and by full prefill, and watches both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samkv_integrations.engine.blend import State, Watch
from samkv_integrations.engine.decode import TextStream, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import Request
from samkv_integrations.eviction import Eviction
from samkv_integrations.inspection.inspection import Inspection
from samkv_integrations.methods import Method
from samkv_integrations.model.model import Model
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.prompt.resolve import Resolved

FULL_PREFILL = "recompute"


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """One answer, and what was seen of it."""

    text: str
    report: Report
    watch: Watch


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
    truth = replace(settings, method=AnswerSettings.of(method=FULL_PREFILL).method, eviction="none")
    with engine.resolve(prompt, chunks) as resolved:
        ours = _watched(engine, resolved, settings)
        segments = _Segments.of(engine.model, resolved)
    with engine.resolve(prompt, chunks) as resolved:
        full = _watched(engine, resolved, truth)
    called = [
        (names or {}).get(text, f"chunk {number}") for number, text in enumerate(segments.texts, 1)
    ]
    return Inspection(
        title=title,
        pieces=segments.pieces,
        chunk_of=segments.chunk_of,
        names=tuple(called),
        texts=segments.texts,
        states=_states(ours.watch, segments),
        attention=ours.watch.attention,
        full_attention=full.watch.attention,
        scores=_scores(ours.watch),
        answer=ours.text,
        full_answer=full.text,
        report=ours.report,
        full_report=full.report,
    )


def _watched(engine: Engine, resolved: Resolved, settings: AnswerSettings) -> _Watched:
    watch, most = Watch(), settings.sampling.max_new_tokens
    request = replace(engine.request(resolved, settings, most), watch=watch, prefixes=None)

    def answer() -> _Watched:
        return _answer(engine.model, request, settings, watch)

    return engine.scheduler.run(answer)


def _answer(model: Model, request: Request, settings: AnswerSettings, watch: Watch) -> _Watched:
    begun = first_token(request)
    found = decode_greedily(model, begun, settings.sampling.max_new_tokens)
    report = replace(
        begun.report, completion_tokens=len(found.tokens), decode_kv_bytes=begun.cache.kv_bytes
    )
    return _Watched(text=found.text, report=report, watch=watch)


def _states(watch: Watch, segments: _Segments) -> Tensor:
    """(L, T) a `State` each."""
    states = watch.states
    is_missed = torch.tensor(segments.missed)[segments.chunk_of] & (segments.chunk_of >= 0)
    states[:, is_missed] = State.MISSED
    return states


def _scores(watch: Watch) -> Tensor | None:
    """(T,) of the tokens of chunks with a cache, nan for all others."""
    scores, layout = watch.token_scores, watch.layout
    if scores is None:
        return None
    spread = torch.full((layout.n_tokens,), torch.nan)
    spread[layout.context_positions] = scores
    return spread


@dataclass(frozen=True, kw_only=True)
class _Segments:
    """A prompt by its tokens. missed: of each chunk, whether it has no cache."""

    pieces: tuple[str, ...]
    chunk_of: Tensor
    texts: tuple[str, ...]
    missed: tuple[bool, ...]

    @classmethod
    def of(cls, model: Model, resolved: Resolved) -> _Segments:
        pieces = list(_pieces(model, resolved.token_ids))
        chunk_of = torch.full((len(pieces),), -1)
        texts: list[str] = []
        for number, chunk in enumerate(resolved.chunks):
            for run in chunk.runs:
                chunk_of[run.span.start : run.span.stop] = number
            texts.append(chunk.text or model.detokenize(chunk.token_ids))
        missed = [chunk.stored is None for chunk in resolved.chunks]
        return cls(
            pieces=tuple(pieces), chunk_of=chunk_of, texts=tuple(texts),
            missed=tuple(missed) or (False,),
        )  # fmt: skip


def _pieces(model: Model, ids: Sequence[int]) -> Iterator[str]:
    """The text that each token adds; a special token has its name."""
    text = TextStream(model)
    special = {*model.tokenizer.all_special_ids}
    for at, token in enumerate(ids):
        if token in special:
            yield str(model.tokenizer.convert_ids_to_tokens(token))
        else:
            yield text.push(token) + (text.flush() if at == len(ids) - 1 else "")
