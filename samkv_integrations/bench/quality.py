"""How well methods answer: the same questions over the same chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tqdm.auto import tqdm

from samkv_integrations.bench import intervals, scoring
from samkv_integrations.bench.data import Question
from samkv_integrations.bench.journal import Journal
from samkv_integrations.bench.question_caches import QuestionCaches, prompt_tokens
from samkv_integrations.bench.run_settings import common_settings
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.figures import Row
from samkv_integrations.model.model import Model


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What to measure. Two runs of equal configurations on equal machines give equal answers.

    variants: label -> what answers. most: questions to ask, None for all. max_tokens: a longer
        prompt is left out, as is one that exceeds the model's window together with its answer.
    answerable: questions that full prefill does not answer exactly are left out; it must be a
        variant then. block_size: tokens a block; None for what suits the questions' chunks.

    Raises InvalidOption for a value that cannot be measured.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    chat: bool = False
    most: int | None = None
    max_tokens: int | None = None
    answerable: bool = False
    block_size: int | None = None
    store_bits: int = DEFAULT_STORE_BITS

    def __post_init__(self) -> None:
        counts = {"questions": self.most, "max_tokens": self.max_tokens}
        for name, value in {**counts, "block_size": self.block_size}.items():
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        check_store_bits(self.store_bits)
        if self.answerable and TRUTH not in self.variants:
            raise InvalidOption(f"answerable questions need {TRUTH!r} among the methods")

    def require_extras(self) -> None:
        """Raise MissingExtra if a package that the scores take is not installed."""
        intervals.require_extras()
        for language in {question.language for question in self.questions}:
            scoring.require_extras(language)

    def settings(self, model: Model) -> dict[str, Any]:
        """Everything that the rows of a run depend on, as JSON-able values."""
        return {
            **common_settings(model, self.questions, self.variants),
            "data_sets": sorted({q.dataset for q in self.questions}),
            "prompts": sorted(
                {"rag" if q.context is None else "longbench" for q in self.questions}
            ),
            "chat": self.chat,
            "questions": self.most,
            "max_tokens": self.max_tokens,
            "answerable": self.answerable,
            "block_size": self.block_size,
            "store_bits": self.store_bits,
        }


@dataclass(kw_only=True)
class Result:
    """Rows of the questions that count, and the numbers of those that do not.

    too_long: left out because of their length. not_answered: not answered by full prefill.
    """

    rows: list[Row] = field(default_factory=list)
    too_long: int = 0
    not_answered: int = 0


def run(config: QualityConfig, model: Model, journal: Journal) -> Result:
    """Answer every question that the journal does not hold. Progress goes to standard error.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    # how many of the fitting ones full prefill answers is only known once they are asked
    n_fitting = None if config.answerable else config.most
    fitting = list(islice(_fitting(config, model, result), n_fitting))
    if fitting:
        most = min(config.most or len(fitting), len(fitting))
        total = most * len(config.variants)
        with tqdm(total=total, initial=len(journal.rows), desc="asking", unit="answer") as bar:
            _ask_all(config, _Asker(config, model, journal, fitting, bar), most, result, bar)
    if not result.rows:
        raise EmptyInput(
            f"no question is left: {result.too_long} of {len(config.questions)} are too long, "
            f"{result.not_answered} are not answered by full prefill"
        )
    return result


def _ask_all(
    config: QualityConfig, asker: _Asker, most: int, result: Result, bar: tqdm[Any]
) -> None:
    n_asked = 0
    for question in asker.questions:
        if n_asked == most:
            break
        if config.answerable:
            (truth,) = asker.answer(question, [TRUTH])
            if not truth["exact_match"]:
                result.not_answered += 1
                bar.total += 1
                continue
        result.rows += asker.answer(question, list(config.variants))
        n_asked += 1


def _fitting(config: QualityConfig, model: Model, result: Result) -> Iterator[Question]:
    for question in config.questions:
        n_tokens = prompt_tokens(model, question, chat=config.chat)
        room = model.context_window - question.max_new_tokens
        if n_tokens > min(room, config.max_tokens or room):
            result.too_long += 1
        else:
            yield question


class _Asker:
    """Answers questions, each over its own chunks."""

    def __init__(
        self,
        config: QualityConfig,
        model: Model,
        journal: Journal,
        questions: Sequence[Question],
        bar: tqdm[Any],
    ) -> None:
        self.questions = questions
        self._config, self._journal, self._bar = config, journal, bar
        self._caches = QuestionCaches(
            model, questions, config.variants, config.block_size, config.store_bits
        )
        self._is_warm = False

    def answer(self, question: Question, labels: Sequence[str]) -> list[Row]:
        """A row for each label, from the journal or new."""
        missing = [name for name in labels if (question.id, name) not in self._journal.rows]
        if missing:
            with self._caches.engine(question) as engine:
                if not self._is_warm:  # a process's first pass through anything is slower
                    for label in self._config.variants:
                        self._ask(engine, question, label, 1)
                    self._is_warm = True
                for label in missing:
                    self._bar.set_postfix_str(label, refresh=False)
                    self._journal.add(self._ask(engine, question, label, question.max_new_tokens))
                    self._bar.update()
        return [self._journal.rows[question.id, label] for label in labels]

    def _ask(self, engine: Engine, question: Question, label: str, n_tokens: int) -> Row:
        variant = self._config.variants[label]
        answer = engine.generate(
            question.prompt(chat=self._config.chat),
            question.documents,
            method=variant.method,
            eviction=variant.eviction or "none",
            max_new_tokens=n_tokens,
        )
        text = answer.text.strip()
        return {
            "label": label,
            "id": question.id,
            "dataset": question.dataset,
            "kind": question.kind,
            "documents": len(question.documents),
            "question": question.question,
            "answer": text,
            "expected": list(question.answers),
            **scoring.scores(text, question.answers, question.language),
            **answer.report.to_dict(),
        }
