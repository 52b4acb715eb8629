"""The prompts that a load consists of: questions over documents, or random words."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.load import Prompt
from samkv_integrations.bench.shapes import Words
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.text import rag_prompt

QUESTION_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class WordsShape:
    """The shape of prompts of random words.

    warm_share: of the chunks of a prompt, how many are cached beforehand; no prompt before it had
    the others.
    """

    n_chunks: int = 8
    chunk_tokens: int = 512
    warm_share: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("chunks", self.n_chunks), ("chunk_tokens", self.chunk_tokens)):
            if value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        if not 0 <= self.warm_share <= 1:
            raise InvalidOption(f"warm_share={self.warm_share:g}; it must be between 0 and 1")

    @property
    def n_warm(self) -> int:
        """Chunks of a prompt that are cached beforehand."""
        return round(self.warm_share * self.n_chunks)

    @property
    def n_tokens(self) -> int:
        """Tokens of a prompt, with room for its opening, template and question."""
        return self.n_chunks * (self.chunk_tokens + 8) + 256


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a run, the same for each label but for chunks that nobody may have cached.

    cached: the chunks that are cached beforehand. by_label: one list of the same length each.
    """

    cached: tuple[str, ...]
    by_label: dict[str, list[Prompt]]


def of_questions(
    questions: Sequence[Question], labels: Iterable[str], n_prompts: int, *, chat: bool
) -> Prompts:
    """The questions in their order, and from the first one on again if there are too few."""
    asked = [questions[n % len(questions)] for n in range(n_prompts)]
    cached = dict.fromkeys(document for question in asked for document in question.documents)
    prompts = [question.prompt(chat=chat) for question in asked]
    opening = _Opening()
    return Prompts(
        cached=tuple(cached),
        by_label={label: [opening.of(prompt) for prompt in prompts] for label in labels},
    )


def of_words(
    words: Words, shape: WordsShape, labels: Sequence[str], n_prompts: int, *, chat: bool, seed: int
) -> Prompts:
    """Random words; the warm chunks of each prompt are drawn from twice as many."""
    rng = random.Random(seed)
    pool = [words.text(shape.chunk_tokens) for _ in range(2 * shape.n_warm)]
    by_label: dict[str, list[Prompt]] = {label: [] for label in labels}
    opening = _Opening()
    for _ in range(n_prompts):
        warm, order = rng.sample(pool, shape.n_warm), rng.sample(range(shape.n_chunks),
                                                                 shape.n_chunks)  # fmt: skip
        question = words.text(QUESTION_TOKENS) + "?"
        for label in labels:
            n_fresh = shape.n_chunks - shape.n_warm
            documents = warm + [words.text(shape.chunk_tokens) for _ in range(n_fresh)]
            prompt = rag_prompt(question, [documents[at] for at in order], chat=chat)
            by_label[label].append(opening.of(prompt))
    return Prompts(cached=tuple(pool), by_label=by_label)


class _Opening:
    """Begins every prompt with a number of its own.

    A server that holds KV of an earlier prompt with the same beginning would else answer the
    method that asks second, or the next run, from that.
    """

    def __init__(self) -> None:
        self._run = secrets.randbelow(10**6)
        self._numbers = count(1)

    def of(self, prompt: Prompt) -> Prompt:
        line = f"Request {self._run:06d}-{next(self._numbers):06d}.\n\n"
        if isinstance(prompt, str):
            return line + prompt
        first, *others = prompt
        return [{**first, "content": line + first["content"]}, *others]
