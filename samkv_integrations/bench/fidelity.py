"""How far methods are from full prefill on real paragraphs: the same tokens forced on each."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, get_args

import torch
from tqdm.auto import tqdm

from samkv_integrations.bench import intervals
from samkv_integrations.bench.data import ASSETS, Question, load
from samkv_integrations.bench.divergence import Forced, measure
from samkv_integrations.bench.journal import Journal
from samkv_integrations.bench.question_caches import QuestionCaches, prompt_ids
from samkv_integrations.bench.run_settings import common_settings
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption, UnknownOption
from samkv_integrations.figures import Row
from samkv_integrations.model.model import Model

Part = Literal["choose", "report", "all"]

QUESTIONS = ASSETS / "fidelity" / "questions.jsonl"


def part_of(question_id: str) -> Part:
    """The half that a question belongs to, the same for ever.

    Settings are chosen on one half, and figures are reported on the other.
    """
    is_odd = hashlib.sha256(question_id.encode()).digest()[0] >> 4 & 1
    return "report" if is_odd else "choose"


def questions(part: Part = "report", n_documents: int = 10) -> list[Question]:
    """The questions of a half that come with the package, data sets taking turns.

    n_documents: most documents a question, see `with_fewer`.
    """
    if part not in get_args(Part):
        raise UnknownOption.among("part", part, get_args(Part))
    if n_documents < 1:
        raise InvalidOption(f"documents={n_documents}; it must be at least 1")
    found = load([str(QUESTIONS)], prompt="rag")
    return [with_fewer(q, n_documents) for q in found if part in ("all", part_of(q.id))]


def with_fewer(question: Question, n_documents: int) -> Question:
    """``question`` over ``n_documents`` at most, in order; supporting ones are dropped last."""
    places = dict.fromkeys([*question.supporting, *range(len(question.documents))])
    kept = sorted(islice(places, n_documents))
    return replace(
        question,
        documents=tuple(question.documents[place] for place in kept),
        supporting=tuple(kept.index(place) for place in question.supporting if place in kept),
    )


@dataclass(frozen=True, kw_only=True)
class FidelityConfig:
    """What to measure. Two runs of equal configurations on equal machines give equal figures.

    variants: label -> what is measured; full prefill is among them. tokens: most tokens of full
        prefill's answer that are forced on all. past_end: go on where that answer ends, with the
        likeliest token that does not end it. most: questions to ask, None for all.

    Raises InvalidOption for a value that cannot be measured.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    tokens: int = 32
    past_end: bool = False
    chat: bool = False
    most: int | None = None
    store_bits: int = DEFAULT_STORE_BITS

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("questions", self.most)):
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        check_store_bits(self.store_bits)
        if TRUTH not in self.variants:
            raise InvalidOption(f"figures are distances from {TRUTH!r}; it must be a variant")

    def require_extras(self) -> None:
        """Raise MissingExtra if a package that the intervals take is not installed."""
        intervals.require_extras()

    def settings(self, model: Model) -> dict[str, Any]:
        """Everything that the rows of a run depend on, as JSON-able values."""
        return {
            **common_settings(model, self.questions, self.variants),
            "tokens": self.tokens,
            "past_end": self.past_end,
            "chat": self.chat,
            "questions": self.most,
            "store_bits": self.store_bits,
        }

    def expected(self, model: Model, question: Question) -> list[int]:
        """Token ids of a question's first reference answer, as they follow its prompt."""
        answer = question.answers[0]
        return model.tokenize(answer if self.chat else f" {answer}", special=False)


@dataclass(kw_only=True)
class Result:
    """Rows of the questions that were asked. too_long: left out because of their length."""

    rows: list[Row] = field(default_factory=list)
    too_long: int = 0


def run(config: FidelityConfig, model: Model, journal: Journal) -> Result:
    """Measure every row that the journal does not hold. Progress goes to standard error.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    fitting = list(islice(_fitting(config, model, result), config.most))
    if not fitting:
        raise EmptyInput(
            f"no question is left: all {len(config.questions)} are too long for the context window "
            f"of {model.name!r}; allow fewer documents"
        )
    caches = QuestionCaches(model, fitting, config.variants, store_bits=config.store_bits)
    total = len(fitting) * len(config.variants)
    with tqdm(total=total, initial=len(journal.rows), desc="measuring", unit="row") as bar:
        for question in fitting:
            missing = [
                label for label in config.variants if (question.id, label) not in journal.rows
            ]
            if missing:
                with caches.engine(question) as engine:
                    for row in _rows(config, engine, question, missing):
                        journal.add(row)
                        bar.update()
            result.rows += [journal.rows[question.id, label] for label in config.variants]
    return result


def _fitting(config: FidelityConfig, model: Model, result: Result) -> Iterator[Question]:
    for question in config.questions:
        forced = max(config.tokens, len(config.expected(model, question)))
        if len(prompt_ids(model, question, chat=config.chat)) + forced > model.context_window:
            result.too_long += 1
        else:
            yield question


def _rows(
    config: FidelityConfig, engine: Engine, question: Question, labels: Sequence[str]
) -> Iterator[Row]:
    """A row for each label."""
    model = engine.model
    expected = tuple(config.expected(model, question))
    end_ids = model.eos_ids
    own = greedy(
        model,
        prompt_ids(model, question, chat=config.chat),
        config.tokens,
        end_ids=() if config.past_end else end_ids,
        never=end_ids if config.past_end else (),
    )
    full = _forced(config, engine, question, TRUTH, own, expected)
    for label in labels:
        variant = config.variants[label]
        other = full if label == TRUTH else _forced(config, engine, question, label, own, expected)
        yield {
            "label": label,
            "id": question.id,
            "kind": question.dataset,
            "method": variant.method.name,
            "eviction": variant.eviction.name if variant.eviction else None,
            "tokens": len(own),
            "answer": model.detokenize(own).strip(),
            **measure(full, other),
        }


def _forced(
    config: FidelityConfig,
    engine: Engine,
    question: Question,
    label: str,
    own: Sequence[int],
    expected: tuple[int, ...],
) -> Forced:
    """Logits of one variant. The last forced token is not fed: no logits after it are compared."""
    variant, prompt = config.variants[label], question.prompt(chat=config.chat)
    along = [
        engine.logits(
            prompt,
            question.documents,
            follow=tokens[:-1],
            method=variant.method,
            eviction=variant.eviction or "none",
        )
        for tokens in (own, expected)
    ]
    return Forced(own=along[0], reference=along[1], expected=expected)


def greedy(
    model: Model,
    ids: Sequence[int],
    n_tokens: int,
    *,
    end_ids: Collection[int] = (),
    never: Collection[int] = (),
) -> list[int]:
    """The likeliest tokens after ``ids``, by transformers' own forward pass.

    At most ``n_tokens``, the last of which may be one of ``end_ids``; none of ``never``.
    """
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
            logits = output.logits[0, -1]
            logits[list(never)] = -torch.inf
        past = output.past_key_values
        fed = [int(logits.argmax())]
        found += fed
    return found
