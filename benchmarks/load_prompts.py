"""The prompts that a load consists of: questions over documents, or random words."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks import models
from benchmarks.datasets import SHORT, Question, load
from benchmarks.load import Prompt, Prompts
from benchmarks.models import Words
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.rag_template import rag_prompt

QUESTION_TOKENS = 12
BUILTIN = "builtin"


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


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """name: of the model, for people. served: what ``samkv serve --model`` takes."""

    name: str
    served: str
    prompts: Prompts


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is asked what, as options name it; None for what was not given.

    url: of a running server, whose model and place of computing are its own. model: as for ``samkv
    serve``; a running server's name for it. shape, layers: random weights, which are asked random
    words unless ``questions`` are given. questions: a name of `SETS` or a JSON Lines file.
    n_chunks, chunk_tokens, warm_share: of `WordsShape`.

    Raises UnknownOption or InvalidOption for what does not exist, or does not go together.
    """

    url: str | None = None
    model: str | None = None
    shape: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    questions: str | None = None
    n_chunks: int | None = None
    chunk_tokens: int | None = None
    warm_share: float | None = None
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        elsewhere = {
            "shape": self.shape, "layers": self.layers,
            "dtype": self.dtype if self.dtype != "auto" else None,
            "device": self.device if self.device != "auto" else None,
        }  # fmt: skip
        if self.url is not None:
            self._refuse(elsewhere, f"url={self.url!r} is a server that runs already")
        if self.shape is None:
            self._refuse({"layers": self.layers}, "no shape is given")
        elif self.model is not None:
            raise InvalidOption(f"model={self.model!r} and shape={self.shape!r}; give one of them")
        else:
            models.check(self.shape, self.layers, self.dtype)
        if self.words is None:
            self._refuse(
                {
                    "chunks": self.n_chunks, "chunk_tokens": self.chunk_tokens,
                    "warm_share": self.warm_share,
                },
                "questions have their own documents; random words come with a shape, and without "
                "questions",
            )  # fmt: skip

    def _refuse(self, given: Mapping[str, object], why: str) -> None:
        for name, value in given.items():
            if value is not None:
                raise InvalidOption(f"{name}={value}, but {why}; leave it out")

    @property
    def name(self) -> str:
        """Of the model, as far as it is known before a server names it."""
        return self.model or self.shape or ("unknown" if self.url else BUILTIN)

    @property
    def words(self) -> WordsShape | None:
        """The shape of prompts of random words; None if questions are asked."""
        if self.shape is None or self.questions is not None:
            return None
        given = {
            "n_chunks": self.n_chunks, "chunk_tokens": self.chunk_tokens,
            "warm_share": self.warm_share,
        }  # fmt: skip
        return WordsShape(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    def prepare(
        self, labels: Sequence[str], n_prompts: int, max_tokens: int, folder: Path
    ) -> Prepared:
        """Make the prompts, ``n_prompts`` a label, and write the model to ``folder`` if it is new.

        max_tokens: of an answer, which the context window must hold beside a prompt.
        """
        if self.shape is None:
            prompts = self._of_questions(labels, n_prompts)
            return Prepared(name=self.name, served=self.name, prompts=prompts)
        words = self.words
        model = models.build(
            self.shape, layers=self.layers, dtype=self.dtype, device=self.device, seed=self.seed,
            window=max_tokens + (words.n_tokens if words else 0),
        )  # fmt: skip
        served = BUILTIN
        if self.shape != BUILTIN:
            model, served = models.save(model, folder), str(folder)
        if words is None:
            prompts = self._of_questions(labels, n_prompts)
        else:
            prompts = of_words(
                models.Words(model, self.seed), words, labels, n_prompts, chat=self.chat,
                seed=self.seed,
            )  # fmt: skip
        return Prepared(name=model.name, served=served, prompts=prompts)

    def _of_questions(self, labels: Sequence[str], n_prompts: int) -> Prompts:
        found = load(self.questions or SHORT)
        return of_questions(found, labels, n_prompts, chat=self.chat)
