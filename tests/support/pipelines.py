"""What tests of pipelines share, whatever the framework: questions, and what came of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.datasets import Question, load
from samkv_integrations import AnswerStream, Engine
from samkv_integrations.chroma.embedding import HashingEmbedding
from samkv_integrations.lab.evaluation import f1_words
from tests.support.handles import HANDLE
from tests.support.tested_runtime import ON_LLAMA_CPP

TOP_K = 4
TURNS = 3
"""Questions a chat."""

_PIECE_OF_HANDLE = "samkv:"


def title_of(body: str) -> str:
    """What a document of the questions is about."""
    return body.split("\n")[0][1:-1]


def questions(number: int) -> list[Question]:
    return _questions()[:number]


@cache
def _questions() -> list[Question]:
    """Held-out questions whose documents can share an index: no name is part of another.

    Single facts only, and only where the document asked about is among the `TOP_K` that the
    offline embedding finds nearest among all: what a model makes up when it is not given the fact
    says nothing about a pipeline.
    """
    apart: list[Question] = []
    taken: list[str] = []
    for question in load(kinds=["single-hop"]):
        titles = [title_of(body) for body in question.documents]
        if not any(a in b or b in a for a in titles for b in taken):
            apart.append(question)
            taken += titles
    bodies = [body for question in apart for body in question.documents]
    embedding = HashingEmbedding()
    asked = np.array(embedding.embed([question.question for question in apart]))
    nearest = np.argsort(-asked @ np.array(embedding.embed(bodies)).T)[:, :TOP_K]
    return [
        question
        for question, places in zip(apart, nearest, strict=True)
        if any(title_of(bodies[place]) in question.question for place in places)
    ]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the engine: its prompt, and its chunks with and without a usable cache.

    prompt: all the text of it.
    """

    prompt: str
    hits: int
    misses: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One answer.

    retrieved: bodies of the chunks that the pipeline answers from. shown: what a user or a
    program may see besides the answer: sources, memory.
    """

    answer: str
    retrieved: tuple[str, ...]
    shown: tuple[str, ...]


Ask = Callable[[str], Asked]


@contextmanager
def recorded() -> Iterator[list[Callable[[], Call]]]:
    """Calls of all engines; each is to be called when its answer is complete."""
    calls: list[Callable[[], Call]] = []
    stream, astream = Engine.stream, Engine.astream

    def spied(self: Engine, prompt: Any, *rest: Any, **options: Any) -> AnswerStream:
        answer = stream(self, prompt, *rest, **options)
        record(prompt, answer)
        return answer

    async def aspied(self: Engine, prompt: Any, *rest: Any, **options: Any) -> AnswerStream:
        answer = await astream(self, prompt, *rest, **options)
        record(prompt, answer)
        return answer

    def record(prompt: Any, answer: AnswerStream) -> None:
        turns = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]

        def call() -> Call:
            report = answer.report
            misses = sum(report.chunk_misses.values())
            return Call(
                prompt="\n".join(turns),
                hits=report.found - misses,
                misses=misses,
            )

        calls.append(call)

    with mock.patch.multiple(Engine, stream=spied, astream=aspied):
        yield calls


def bodies_in(prompt: str, bodies: Sequence[str]) -> int:
    """Chunks in a prompt, as handles or as whole texts; a text within a longer one is not one."""
    longest_first = sorted(set(bodies), key=len, reverse=True)
    return len(re.findall("|".join([*map(re.escape, longest_first), HANDLE.pattern]), prompt))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One answer, the chunks that went into its prompts, and handles that could be seen.

    prompts: those of its calls.
    given: counted without the reports. A chunk that was retrieved, but stands in no prompt (because
    something cut it), is given too: it should have been there.
    """

    answer: str
    given: int
    hits: int
    misses: int
    handles: int
    prompts: tuple[str, ...]


def outcome(ask: Ask, question: str) -> Outcome:
    with recorded() as made:
        asked = ask(question)
        calls = [call() for call in made]
    found = sum(bodies_in(call.prompt, asked.retrieved) for call in calls)
    return Outcome(
        answer=asked.answer.strip(),
        given=max(found, len(asked.retrieved)) if calls else 0,
        hits=sum(call.hits for call in calls),
        misses=sum(call.misses for call in calls),
        handles=sum(text.count(_PIECE_OF_HANDLE) for text in (asked.answer, *asked.shown)),
        prompts=tuple(call.prompt for call in calls),
    )


def holds(answer: str, expected: Sequence[str]) -> bool:
    """Whether the words of an expected answer follow each other in ``answer``."""
    words = f" {' '.join(f1_words(answer))} "
    return any(f" {' '.join(f1_words(text))} " in words for text in expected)


def assert_answers_from_caches(
    asked: Sequence[Question], ask: Ask, in_full: Ask, *, shows_handles: bool = False
) -> list[Outcome]:
    """The answers of full prefill, a hit for every chunk that went into a prompt, and no handle.

    ask, in_full: the same pipeline with the default method, and with full prefill.
    shows_handles: whether those who see sources see handles, as the pipeline was told to.
    """
    outcomes = []
    for question in asked:
        found, full = (outcome(each, question.question) for each in (ask, in_full))
        if not ON_LLAMA_CPP:  # whose tokens are not quite those that the model has learnt
            assert found.answer == full.answer
        assert found.hits == found.given and not found.misses
        assert bool(found.handles) == shows_handles
        outcomes.append(found)
    return outcomes
