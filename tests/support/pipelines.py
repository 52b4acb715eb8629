"""What tables of pipelines share, whatever the framework: questions, counting, rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.datasets import Question, load
from samkv_integrations import AnswerStream, Engine
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.evaluation import f1_words
from samkv_integrations.model import Model, load_model
from tests.support.handles import HANDLE

TOP_K = 4
TURNS = 3
"""Questions a chat."""
N_QUESTIONS = 50
BAR = 0.9
"""Share of questions that must be answered as full prefill answers them."""

_PIECE_OF_HANDLE = "samkv:"

ASPECTS = ("same", "hits", "handles")
"""What every pipeline must reach: the same answers as full prefill on a `BAR` of the questions; a
hit for every chunk that went into a prompt; no handle where a user or a program looks."""


@cache
def model() -> Model:
    """The built-in model, loaded once, in float32 on the CPU: the same on every machine.

    It is so small that a second thread only costs time.
    """
    torch.set_num_threads(1)
    return load_model("builtin", device="cpu", dtype="float32")


def title_of(body: str) -> str:
    """What a document of the questions is about."""
    return body.split("\n")[0][1:-1]


def questions(number: int = N_QUESTIONS) -> list[Question]:
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
    served = [
        question
        for question, places in zip(apart, nearest, strict=True)
        if any(title_of(bodies[place]) in question.question for place in places)
    ]
    if len(served) < number:
        raise ValueError(f"{number} questions; there are {len(served)} that fit together")
    return served[:number]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the engine: its prompt, and its chunks with and without a usable cache.

    asked: the prompt as the engine was given it, a string or messages. prompt: all its text.
    """

    asked: Any
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
                asked=prompt,
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

    asked, prompts: the prompts of its calls, see `Call`.
    given: counted without the reports. A chunk that was retrieved, but stands in no prompt (because
    something cut it), is given too: it should have been there.
    """

    answer: str
    given: int
    hits: int
    misses: int
    handles: int
    asked: tuple[Any, ...]
    prompts: tuple[str, ...]


def outcome(ask: Ask, question: str) -> Outcome:
    """Ask and count."""
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
        asked=tuple(call.asked for call in calls),
        prompts=tuple(call.prompt for call in calls),
    )


class Answering:
    """Questions, and what was made or answered for them; each thing once."""

    def __init__(self, asked: Sequence[Question]) -> None:
        self.questions = tuple(asked)
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time for this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def answers(self, name: str, ask: Callable[[], Ask]) -> list[Outcome]:
        """What the pipeline of this name answers to all questions."""

        def ask_all() -> list[Outcome]:
            pipeline = ask()
            return [outcome(pipeline, question.question) for question in self.questions]

        found: list[Outcome] = self.once(name, ask_all)
        return found


def shared_words(question: str, text: str) -> float:
    """The share of the question's words that a text holds: what the rerankers here go by."""
    wanted = set(f1_words(question))
    return len(wanted & set(f1_words(text))) / len(wanted)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one pipeline.

    same: answers that equal full prefill's. right: those that hold an expected answer. given:
    chunks that went into prompts; hits, misses: those with and without a usable cache, by the
    reports. handles: seen in answers, sources and memories.
    """

    pipeline: str
    way: str
    questions: int
    same: int
    right: int
    given: int
    hits: int
    misses: int
    handles: int

    def passes(self, aspect: str) -> bool:
        """Whether the row reaches the bar in one of `ASPECTS`."""
        if aspect == "same":
            return self.same >= math.floor(BAR * self.questions)
        if aspect == "hits":
            return self.hits == self.given and not self.misses
        return not self.handles


def holds(answer: str, expected: Sequence[str]) -> bool:
    """Whether the words of an expected answer follow each other in ``answer``."""
    words = f" {' '.join(f1_words(answer))} "
    return any(f" {' '.join(f1_words(text))} " in words for text in expected)


def compared(
    pipeline: str,
    way: str,
    asked: Sequence[Question],
    found: Sequence[Outcome],
    full: Sequence[Outcome],
) -> Row:
    """A row, of what a pipeline answers from caches and with full prefill."""
    return Row(
        pipeline=pipeline,
        way=way,
        questions=len(found),
        same=sum(a.answer == b.answer for a, b in zip(found, full, strict=True)),
        right=sum(
            holds(one.answer, question.answers) for one, question in zip(found, asked, strict=True)
        ),
        given=sum(one.given for one in found),
        hits=sum(one.hits for one in found),
        misses=sum(one.misses for one in found),
        handles=sum(one.handles for one in found),
    )
