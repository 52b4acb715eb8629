"""How far methods are from full prefill on real paragraphs: the same tokens forced on each."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from samkv_integrations.bench.truth_files import TruthFiles
from samkv_integrations.bench.variants import TRUTH, Variant
from samkv_integrations.cache.quantise import DEFAULT_STORE_BITS, check_store_bits
from samkv_integrations.engine.decode import ForcedTokens, force
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import AnswerSettings
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
    found = of_part(load([str(QUESTIONS)], prompt="rag"), part)
    return [with_fewer(question, n_documents) for question in found]


def of_part(found: Sequence[Question], part: Part) -> list[Question]:
    """The questions of a half. Raises UnknownOption for an unknown one."""
    if part not in get_args(Part):
        raise UnknownOption.among("part", part, get_args(Part))
    return [question for question in found if part in ("all", part_of(question.id))]


def with_fewer(question: Question, n_documents: int) -> Question:
    """``question`` over ``n_documents`` at most, in order; supporting ones are dropped last.

    Raises InvalidOption if ``n_documents`` is not positive.
    """
    if n_documents < 1:
        raise InvalidOption(f"documents={n_documents}; it must be at least 1")
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
        likeliest token that does not end it. most: questions to ask, None for all. store_bits: of
        variants that name none. floor: measure full prefill in the other dtype too, see
        `measure_floor`.

    Raises InvalidOption for a value that cannot be measured.
    """

    questions: Sequence[Question]
    variants: Mapping[str, Variant]
    tokens: int = 32
    past_end: bool = False
    chat: bool = False
    most: int | None = None
    store_bits: int = DEFAULT_STORE_BITS
    floor: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("questions", self.most)):
            if value is not None and value < 1:
                raise InvalidOption(f"{name}={value}; it must be at least 1")
        for bits in self._all_bits():
            check_store_bits(bits)
        if TRUTH not in self.variants:
            raise InvalidOption(f"figures are distances from {TRUTH!r}; it must be a variant")

    def _all_bits(self) -> list[int]:
        return [self.bits_of(label) for label in self.variants]

    def bits_of(self, label: str) -> int:
        """Bits of the caches that a variant is given, whether or not it reads them."""
        bits = self.variants[label].store_bits
        return self.store_bits if bits is None else bits

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
            "floor": other_dtype(model) if self.floor else None,
        }

    def expected(self, model: Model, question: Question) -> list[int]:
        """Token ids of a question's first reference answer after its prompt; none if unknown."""
        if not question.answers:
            return []
        answer = question.answers[0]
        return model.tokenize(answer if self.chat else f" {answer}", special=False)


@dataclass(kw_only=True)
class Result:
    """Rows of the ``asked`` questions. too_long: how many were left out because of their length."""

    asked: Sequence[Question] = ()
    rows: list[Row] = field(default_factory=list)
    too_long: int = 0


def other_dtype(model: Model) -> str:
    """The dtype that the floor of a model is measured in: float32, or bfloat16 for such a one."""
    return "bfloat16" if model.dtype_name == "float32" else "float32"


def floor_label(dtype: str) -> str:
    """The label of full prefill in another dtype."""
    return f"{TRUTH}, {dtype}"


def run(
    config: FidelityConfig, model: Model, journal: Journal, truths: TruthFiles | None = None
) -> Result:
    """Measure every row that the journal does not hold. Progress goes to standard error.

    truths: where full prefill's logits are kept for `measure_floor`, of questions that lack it.

    Raises EmptyInput if no question is left.
    """
    result = Result()
    result.asked = list(islice(_fitting(config, model, result), config.most))
    if not result.asked:
        raise EmptyInput(
            f"no question is left: all {len(config.questions)} are too long for the context window "
            f"of {model.name!r}; allow fewer documents"
        )
    caches = {
        bits: QuestionCaches(model, result.asked, _in_bits(config, bits), store_bits=bits)
        for bits in dict.fromkeys(config.bits_of(label) for label in config.variants)
    }
    floor = floor_label(other_dtype(model))
    held = sum((q.id, label) in journal.rows for q in result.asked for label in config.variants)
    total = len(result.asked) * len(config.variants)
    with tqdm(total=total, initial=held, desc="measuring", unit="row") as bar:
        for question in result.asked:
            missing = [
                label for label in config.variants if (question.id, label) not in journal.rows
            ]
            wanted = (
                truths
                if truths and (question.id, floor) not in journal.rows
                and not truths.has(question.id) else None
            )  # fmt: skip
            if missing or wanted:
                for row in _rows(config, caches, question, missing, wanted):
                    journal.add(row)
                    bar.update()
    result.rows = [journal.rows[q.id, label] for q in result.asked for label in config.variants]
    return result


def _in_bits(config: FidelityConfig, bits: int) -> dict[str, Variant]:
    return {label: v for label, v in config.variants.items() if config.bits_of(label) == bits}


def measure_floor(
    config: FidelityConfig, model: Model, journal: Journal, truths: TruthFiles, result: Result
) -> None:
    """Add to ``result`` how far full prefill is from itself in another dtype, after full prefill.

    model: the one of `run` in that dtype, which may be loaded after the other is gone. Its logits
    are compared along the same tokens, which ``truths`` holds. Differences below are none of
    methods.
    """
    label = floor_label(model.dtype_name)
    caches = QuestionCaches(
        model, result.asked, {TRUTH: config.variants[TRUTH]}, store_bits=config.store_bits
    )
    missing = [q for q in result.asked if (q.id, label) not in journal.rows]
    for question in tqdm(missing, desc=label, unit="row"):
        own, truth = truths.read(question.id)
        with caches.engine(question) as engine:
            other = _forced(config, engine, question, TRUTH, own, truth.expected)
        journal.add(_row(config, model, question, TRUTH, own, truth, other) | {"label": label})
        truths.discard(question.id)
    truths.close()
    rows: list[Row] = []
    for row in result.rows:
        rows.append(row)
        if row["label"] == TRUTH:
            rows.append(journal.rows[row["id"], label])
    result.rows = rows


def _fitting(config: FidelityConfig, model: Model, result: Result) -> Iterator[Question]:
    for question in config.questions:
        n_forced = max(config.tokens, len(config.expected(model, question)))
        if len(prompt_ids(model, question, chat=config.chat)) + n_forced > model.context_window:
            result.too_long += 1
        else:
            yield question


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What one variant says of a question, and the share of its context that it computed."""

    forced: Forced
    recompute_ratio: float


def _rows(
    config: FidelityConfig,
    caches: Mapping[int, QuestionCaches],
    question: Question,
    labels: Sequence[str],
    truths: TruthFiles | None,
) -> Iterator[Row]:
    """A row for each label. truths: where full prefill's logits are to be kept."""
    full: _Measured | None = None
    own: list[int] = []
    for bits, of_question in caches.items():
        wanted = [label for label in labels if config.bits_of(label) == bits]
        if not wanted and (full or not truths):
            continue
        with of_question.engine(question) as engine:
            model = engine.model
            if full is None:
                own = _own_answer(config, model, question)
                expected = tuple(config.expected(model, question))
                full = _forced(config, engine, question, TRUTH, own, expected)
                if truths:
                    truths.keep(question.id, own, full.forced)
            truth = full.forced
            for label in wanted:
                other = (
                    full if label == TRUTH
                    else _forced(config, engine, question, label, own, truth.expected)
                )  # fmt: skip
                yield _row(config, model, question, label, own, truth, other)


def _own_answer(config: FidelityConfig, model: Model, question: Question) -> list[int]:
    return greedy(
        model,
        prompt_ids(model, question, chat=config.chat),
        config.tokens,
        end_ids=() if config.past_end else model.eos_ids,
        never=model.eos_ids if config.past_end else (),
    )


def _row(
    config: FidelityConfig, model: Model, question: Question, label: str, own: Sequence[int],
    truth: Forced, other: _Measured,
) -> dict[str, Any]:  # fmt: skip
    variant = config.variants[label]
    return {
        "label": label,
        "id": question.id,
        "kind": question.dataset,
        "method": variant.method.name,
        "eviction": variant.eviction.name if variant.eviction else None,
        "store_bits": config.bits_of(label) if variant.method.recompute.uses_caches else None,
        "tokens": len(own),
        "answer": model.detokenize(own).strip(),
        "recompute_ratio": other.recompute_ratio,
        **measure(truth, other.forced),
    }


def _forced(
    config: FidelityConfig,
    engine: Engine,
    question: Question,
    label: str,
    own: Sequence[int],
    expected: tuple[int, ...],
) -> _Measured:
    """Logits of one variant. The last forced token is not fed: no logits after it are compared."""
    variant, prompt = config.variants[label], question.prompt(chat=config.chat)
    settings = AnswerSettings.of(
        method=variant.method, eviction=variant.eviction or "none", on_miss="text"
    )

    def along(tokens: Sequence[int]) -> ForcedTokens:
        with engine.resolve(prompt, question.documents) as resolved:
            request = engine.request(resolved, settings, len(tokens))
            return engine.scheduler.run(partial(force, request, tokens[:-1]))

    answered = along(own)
    return _Measured(
        forced=Forced(
            own=answered.logits,
            reference=along(expected).logits if expected else None,
            expected=expected,
        ),
        recompute_ratio=answered.report.recompute_ratio,
    )


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
