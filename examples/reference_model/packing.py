"""Prompts to tensors: a context once, then its questions side by side.

A batch is one line of tokens without padding: a context, all of its questions with their answers,
the next context. Each question sees its context and itself only, and its positions go on after
the context, so that it is computed as if it were alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from reference_model.network import HIDDEN, Rows
from reference_model.prompts import Prompt
from reference_model.scenes import Mention

ROWS = 256  # query rows that are attended together
SHARE = 0.25  # of the tokens outside of answers are predicted too


@dataclass(frozen=True, kw_only=True)
class Hint:
    """A token whose hidden state is to know an entity.

    token: place in the context, or in the question.
    target: first piece of the entity's name.
    """

    token: int
    target: int


@dataclass(frozen=True, kw_only=True)
class EncodedQuestion:
    """A question and its answer; ``ids`` from ``answer`` on are the answer's.

    source: token of the context at which the answer stands.
    """

    kind: str
    k: int
    ids: list[int]
    answer: int
    bridge: Hint | None
    subject: Hint | None
    source: int | None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A prompt in tokens."""

    context: list[int]
    mentions: list[Hint]
    questions: list[EncodedQuestion]

    @property
    def size(self) -> int:
        """Tokens of the context, the questions and the answers."""
        return len(self.context) + sum(len(question.ids) for question in self.questions)

    @property
    def longest(self) -> int:
        """Positions that the context and its longest question take."""
        return len(self.context) + max(len(question.ids) for question in self.questions)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places in the batch and the token that each is to predict, both of shape (count,)."""

    places: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Pointers:
    """The questions of a prompt, and where in its context their answers stand.

    start, stop: tokens of the context.
    asking: the token before each answer, shape (questions,).
    sources: token of each answer, counted from ``start``, shape (questions,).
    """

    start: int
    stop: int
    asking: Tensor
    sources: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of one step.

    tokens, positions: shape (length,).
    rows: who may attend to whom, of every prompt.
    answers, others, mentions, bridges, subjects: what is predicted.
    question_of: index into ``questions`` of every place of ``answers``.
    questions: kind and k.
    """

    tokens: Tensor
    positions: Tensor
    rows: list[list[Rows]]
    answers: Places
    others: Places
    mentions: Places
    bridges: Places
    subjects: Places
    pointers: list[Pointers]
    question_of: Tensor
    questions: list[tuple[str, int]]


def encode(tokenizer: Tokenizer, prompt: Prompt) -> Encoded:
    """Tokenise a prompt; a question's text and its answer never share a token."""
    bridges = [asked.bridge for asked in prompt.questions if asked.bridge]
    named = [*prompt.mentions, *bridges]
    names = sorted(
        {mention.name for mention in named} | {asked.subject for asked in prompt.questions} - {""}
    )
    texts = [prompt.context]
    for asked in prompt.questions:
        texts += [asked.text, asked.answer]
    encodings = tokenizer.encode_batch(
        texts + [" " + name for name in names], add_special_tokens=False
    )
    first = {name: found.ids[0] for name, found in zip(names, encodings[len(texts) :], strict=True)}

    def hint(mention: Mention, encoding: Encoding) -> Hint:
        return Hint(token=_token(encoding, mention), target=first[mention.name])

    sources = {(value.name, value.fact): _token(encodings[0], value) for value in prompt.values}
    questions = []
    for number, asked in enumerate(prompt.questions):
        text, answer = encodings[1 + 2 * number], encodings[2 + 2 * number]
        questions.append(
            EncodedQuestion(
                kind=asked.kind,
                k=asked.k,
                ids=text.ids + answer.ids,
                answer=len(text.ids),
                bridge=hint(asked.bridge, text) if asked.bridge else None,
                subject=(
                    Hint(token=len(text.ids) - 1, target=first[asked.subject])
                    if asked.subject
                    else None
                ),
                source=sources.get((asked.subject, asked.fact)),
            )
        )
    return Encoded(
        context=encodings[0].ids,
        mentions=[hint(mention, encodings[0]) for mention in prompt.mentions],
        questions=questions,
    )


def _token(encoding: Encoding, place: Mention) -> int:
    token = encoding.char_to_token(place.end - 1)
    if token is None:
        raise ValueError(f"no token ends at {place}")
    return int(token)


def pack(
    prompts: Sequence[Encoded],
    rng: random.Random,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    rows: int = ROWS,
    share: float = SHARE,
) -> Batch:
    """Lay prompts behind each other.

    Args:
        prompts: at least one, each with a question.
        rng: chooses the tokens outside of answers that are predicted.
        dtype: of the masks.
        device: of the tensors.
        rows: query rows that are attended together, at most.
        share: of the tokens outside of answers to predict.
    """
    tokens: list[int] = []
    positions: list[int] = []
    parts: list[list[Rows]] = []
    answers: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    mentions: list[tuple[int, int]] = []
    bridges: list[tuple[int, int]] = []
    subjects: list[tuple[int, int]] = []
    pointers: list[Pointers] = []
    question_of: list[int] = []
    questions: list[tuple[str, int]] = []
    chosen = np.random.default_rng(rng.getrandbits(64)).random(sum(p.size for p in prompts)) < share

    for prompt in prompts:
        start, length = len(tokens), len(prompt.context)
        tokens += prompt.context
        positions += range(length)
        others += [(start + at, prompt.context[at + 1]) for at in range(length - 1)]
        mentions += [(start + hint.token, hint.target) for hint in prompt.mentions]
        asking: list[tuple[int, int]] = []
        begins: list[int] = []  # for each question token, where its question begins
        for question in prompt.questions:
            at = len(tokens)
            begins += [at - start - length] * len(question.ids)
            tokens += question.ids
            positions += range(length, length + len(question.ids))
            for offset, following in enumerate(question.ids[1:]):
                (others if offset + 1 < question.answer else answers).append(
                    (at + offset, following)
                )
            question_of += [len(questions)] * (len(question.ids) - question.answer)
            if question.bridge:
                bridges.append((at + question.bridge.token, question.bridge.target))
            if question.subject:
                subjects.append((at + question.subject.token, question.subject.target))
            if question.source is not None:
                asking.append((at + question.answer - 1, question.source))
            questions.append((question.kind, question.k))
        if asking:
            table = torch.tensor(asking, device=device)
            pointers.append(
                Pointers(start=start, stop=start + length, asking=table[:, 0], sources=table[:, 1])
            )
        parts.append(_rows(length, np.array(begins), rows, dtype, device))

    def places(found: list[tuple[int, int]]) -> Places:
        table = torch.tensor(found, dtype=torch.int64, device=device).reshape(-1, 2)
        return Places(places=table[:, 0], targets=table[:, 1])

    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        rows=parts,
        answers=places(answers),
        others=places([(place, target) for place, target in others if chosen[place]]),
        mentions=places(mentions),
        bridges=places(bridges),
        subjects=places(subjects),
        pointers=pointers,
        question_of=torch.tensor(question_of, device=device),
        questions=questions,
    )


def _rows(
    length: int, begins: np.ndarray, rows: int, dtype: torch.dtype, device: str
) -> list[Rows]:
    """Context rows with the keys up to themselves; question rows with the context and their own."""
    found = []

    def add(first: int, last: int, keys: tuple[tuple[int, int], ...], seen: np.ndarray) -> None:
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(HIDDEN)))
        found.append(Rows(start=first, stop=last, keys=keys, mask=mask.to(device, dtype)))

    for first, last in _cuts(length, rows):
        seen = np.arange(first, last)[:, None] >= np.arange(last)
        add(first, last, ((0, last),), seen)
    for first, last in _cuts(len(begins), rows):
        least = int(begins[first])
        keys = np.arange(least, last)
        own = (keys >= begins[first:last, None]) & (keys <= np.arange(first, last)[:, None])
        seen = np.concatenate([np.ones((last - first, length), bool), own], 1)
        ranges = ((0, length), (length + least, length + last))
        # The first questions follow the context at once: one range does for them.
        add(length + first, length + last, ranges if least else ((0, length + last),), seen)
    return found


def _cuts(length: int, rows: int) -> list[tuple[int, int]]:
    """Ranges of nearly the same size, none longer than ``rows``."""
    count = -(-length // rows)
    edges = [length * number // count for number in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
