"""A run of tuning: settings on some questions, and the best of them on held-out ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any, Literal

from tqdm.auto import tqdm

from samkv_integrations import figures
from samkv_integrations.engine.decode import Greedy, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings, TunedSetting
from samkv_integrations.engine.report import Report
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.measures import f1, interval, kl, same_top1, wilson
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.eviction import NO_EVICTION
from samkv_integrations.methods import METHODS, Method

FULL = "recompute"
"""Full prefill, which every setting is compared with."""

Clock = Callable[[], float]

By = Literal["exact", "f1"]
"""What counts as agreement: the same answer, or the tokens that both have."""

NOISE = 1.1
"""Times within this factor are taken for equal: medians of pairs differ so much from run to run."""

WORTH = 0.95
"""First token, of full prefill's, that a setting must stay below to be worth its approximation."""

LEAST_QUESTIONS = 5
"""Of which three are for the choice and two are held out."""

CHOICE_SHARE = 0.6
"""Share of the time that the choice may take; the rest is for the check."""

LEAST_ASKED = 8
"""Questions before a setting is dropped."""

MOST_ASKED = 48
"""Questions for the choice: more change it little."""

LEAST_CHECKED = 16
"""Held-out questions without which nothing is recommended, where there are so many."""

NARROW = 0.1
"""Width of the check's interval that is enough."""

MOST_TRIED = 3
"""Settings that are tried on held-out questions: of many, one would pass by luck."""

_CANDIDATES: Sequence[Mapping[str, Any]] = (
    {"method": "reuse"},
    {"method": "reuse", "eviction": "quest", "eviction_budget": 0.1},
    {"method": "epic"},
    # `auto` in place of samkv-guided: the same setting, with full prefill where that is faster
    {"method": "auto", "eviction": "quest", "eviction_budget": 0.1},
    {"method": "auto"},
    {"method": "auto", "set": ("recompute.first=48", "recompute.matched=192")},
)


def candidates(model: str, store_bits: int) -> dict[str, TunedSetting]:
    """Label -> setting that is tried, roughly cheapest first. store_bits: of the caches."""
    made = [TunedSetting(model=model, store_bits=store_bits, **words) for words in _CANDIDATES]
    return {as_label(setting): setting for setting in made}


def as_label(setting: TunedSetting) -> str:
    """A setting in few words: ``auto, hits=3.0, quest@0.1``."""
    words = [setting.method, *(option.partition(".")[2] for option in setting.set)]
    if setting.eviction != NO_EVICTION:
        budget = "" if setting.eviction_budget is None else f"@{setting.eviction_budget:g}"
        words.append(f"{setting.eviction}{budget}")
    return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An answer against full prefill's to the same prompt.

    exact: 1 for the same text. f1: of the tokens of both. first_kl, first_top1: of the first token.
    ttft_ratio: first token over full prefill's. bytes_read: of caches. kv_ratio: working cache over
    full prefill's.
    """

    exact: float
    f1: float
    first_kl: float
    first_top1: float
    ttft_ratio: float
    bytes_read: float
    kv_ratio: float


class Measurer:
    """Answers a question by full prefill and by other methods. The caches are only read.

    Args:
        engine: on the collection's caches, without a prefix cache.
        methods: label -> what answers.
        max_new_tokens: of an answer. chat: whether prompts go through the chat template.
        clock: tells seconds.
    """

    def __init__(
        self,
        engine: Engine,
        methods: Mapping[str, Method],
        *,
        max_new_tokens: int,
        chat: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._engine, self._chat, self._clock = engine, chat, clock
        self._max_new_tokens = max_new_tokens
        self._methods = {FULL: METHODS[FULL], **methods}
        self._warm: set[str] = set()

    def compare(self, question: Question, labels: Sequence[str]) -> list[Compared]:
        """The answer of each of ``labels`` against full prefill's, which is computed with them."""
        for label in {FULL, *labels} - self._warm:  # the first pass of each is slower than others
            self.answer(question, label, 1)
            self._warm.add(label)
        full, _, full_ttft_s = self.answer(question, FULL, self._max_new_tokens)
        found = []
        for label in labels:
            answer, report, ttft_s = self.answer(question, label, self._max_new_tokens)
            first, mine = full.logits[:1], answer.logits[:1]
            both_empty = not answer.shown and not full.shown
            found.append(
                Compared(
                    exact=float(full.text == answer.text),
                    # tokens of the model: the same measure in languages without spaces
                    f1=1.0 if both_empty else f1(answer.shown, full.shown),
                    first_kl=float(kl(first, mine)[0]),
                    first_top1=float(same_top1(first, mine)[0]),
                    ttft_ratio=ttft_s / full_ttft_s,
                    bytes_read=report.bytes_read,
                    kv_ratio=report.kv_bytes / report.full_kv_bytes,
                )
            )
        return found

    def answer(
        self, question: Question, label: str, most_tokens: int
    ) -> tuple[Greedy, Report, float]:
        """A greedy answer as by `Engine.generate`, its report, and seconds to its first token.

        The report has no times. Nothing is stored: a chunk without a cache is text.

        Raises PromptTooLong as `Engine.generate` does.
        """
        began = self._clock()
        engine = self._engine
        settings = AnswerSettings.of(method=self._methods[label], on_miss="text")

        def compute() -> tuple[Greedy, Report, float]:
            begun = first_token(engine.request(resolved, settings, most_tokens))
            begun.logits.cpu()  # waits for the device
            ttft_s = self._clock() - began
            return decode_greedily(engine.model, begun, most_tokens), begun.report, ttft_s

        with engine.resolve(question.prompt(chat=self._chat), question.documents) as resolved:
            return engine.scheduler.run(compute)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is asked of a run. Raises InvalidOption for what cannot be.

    agree: least agreement with full prefill, by ``by``. minutes: that measuring may take; the
    question that is under way then is still answered.
    """

    agree: float = 0.95
    by: By = "exact"
    minutes: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.agree <= 1:
            raise InvalidOption(
                f"agree={self.agree:g}; it must be above 0 and at most 1, as in 0.95"
            )
        if self.by not in ("exact", "f1"):
            raise InvalidOption(f"by={self.by!r}; allowed: exact, f1")
        if not self.minutes > 0:
            raise InvalidOption(f"minutes={self.minutes:g}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Standing(Compared):
    """A setting over the questions that it was asked: means, but the median of ``ttft_ratio``.

    agreement: share of questions with full prefill's answer, or mean F1 with it; low, high: its
        95 % interval. f1_interval, first_kl_interval: 95 % bootstrap intervals.
    """

    label: str
    n: int
    agreement: float
    low: float
    high: float
    f1_interval: tuple[float, float]
    first_kl_interval: tuple[float, float]

    @classmethod
    def of(cls, label: str, answers: Sequence[Compared], by: By = "exact") -> Standing:
        """The standing after these answers, at least one."""
        values = {name: [vars(one)[name] for one in answers] for name in vars(answers[0])}
        means = {name: mean(each) for name, each in values.items()}
        low, high = wilson(means[by], len(answers))
        return cls(
            **means | {"ttft_ratio": median(values["ttft_ratio"])},
            label=label, n=len(answers), agreement=means[by], low=low, high=high,
            f1_interval=interval(values["f1"]), first_kl_interval=interval(values["first_kl"]),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found.

    standings: of all settings, on the questions of the choice. out: labels of those that cannot
    reach the target any more, or are slower than full prefill. checked: those that were tried on
    held-out questions, in that order. chosen: the last of them if it is enough there, None for full
    prefill; why: in words, then. seconds: that it took.
    """

    standings: Sequence[Standing]
    out: Set[str]
    checked: Sequence[Standing]
    chosen: Standing | None
    why: str
    seconds: float


Compare = Callable[[Question, Sequence[str]], Sequence[Compared]]
"""Answers a question by each of the labels; `Measurer.compare`."""


class Run:
    """One run over questions, which have their documents. Progress goes to standard error."""

    def __init__(
        self, config: TuneConfig, compare: Compare, clock: Clock = time.perf_counter
    ) -> None:
        self._config, self._compare, self._clock = config, compare, clock

    def tune(self, labels: Sequence[str], questions: Sequence[Question]) -> Result:
        """Ask all settings, then try the best on held-out questions: of every five the last two.

        Raises EmptyInput for fewer than LEAST_QUESTIONS questions.
        """
        if len(questions) < LEAST_QUESTIONS:
            raise EmptyInput(
                f"too few questions to choose by some and check by others ({len(questions)}); "
                f"give at least {LEAST_QUESTIONS} with --questions, or ingest more documents"
            )
        config, began = self._config, self._clock()
        choice = [q for place, q in enumerate(questions) if place % 5 < 3][:MOST_ASKED]
        held_out = [q for place, q in enumerate(questions) if place % 5 >= 3]
        least_asked = min(LEAST_ASKED, len(choice))
        least_checked = min(LEAST_CHECKED, len(held_out))
        ends = began + 60 * config.minutes

        def is_out(each: Standing) -> bool:
            too_slow = each.ttft_ratio > WORTH * NOISE
            return each.n >= least_asked and (each.high < config.agree or too_slow)

        def is_known(each: Standing) -> bool:
            is_narrow = each.high - each.low <= NARROW
            return each.n >= least_checked and (is_narrow or each.high < config.agree)

        def passed(each: Standing) -> bool:
            is_faster = each.ttft_ratio < WORTH
            return each.n >= least_checked and each.agreement >= config.agree and is_faster

        standings = self.standings(labels, choice, began + CHOICE_SHARE * (ends - began), is_out)
        able = [each for each in standings if not is_out(each) and each.ttft_ratio < WORTH]
        checked: list[Standing] = []
        for each in best_first(able, config.agree)[:MOST_TRIED]:
            if self._clock() >= ends:
                break
            checked += self.standings([each.label], held_out, ends, is_known)
            if passed(checked[-1]):
                break
        chosen = checked[-1] if checked and passed(checked[-1]) else None

        target, why = f"{100 * config.agree:g} % agreement", ""
        is_cut = any(each.n < least_asked for each in standings) or (able and not checked)
        if chosen is None and (is_cut or any(each.n < least_checked for each in checked)):
            why = f"the time was over before a setting could be shown to reach {target}"
        elif chosen is None and checked:
            reached = any(each.agreement >= config.agree for each in checked)
            end = "is not faster than full prefill" if reached else f"does not reach {target}"
            why = f"what came nearest {end} on held-out questions"
        elif chosen is None:
            reached = any(each.agreement >= config.agree for each in standings)
            why = f"no{' faster' if reached else ''} setting reaches {target}"
        return Result(
            standings=standings, out={each.label for each in standings if is_out(each)},
            checked=checked, chosen=chosen, why=why, seconds=self._clock() - began,
        )  # fmt: skip

    def standings(
        self,
        labels: Sequence[str],
        questions: Sequence[Question],
        ends: float | None = None,
        is_settled: Callable[[Standing], bool] = lambda each: False,
    ) -> list[Standing]:
        """Ask ``labels`` until they are settled, or the next question might end after ``ends``.

        One question is asked in any case. ends: None for all the minutes from now on.
        """
        ends = self._clock() + 60 * self._config.minutes if ends is None else ends
        answers: dict[str, list[Compared]] = {label: [] for label in labels}
        left, longest = list(labels), 0.0
        for question in tqdm(questions, desc=f"asking {len(left)} settings"):
            began = self._clock()
            if not left or (longest and began + longest > ends):
                break
            for label, one in zip(left, self._compare(question, left), strict=True):
                answers[label].append(one)
            longest = max(longest, self._clock() - began)
            left = [label for label in left if not is_settled(self._standing(label, answers))]
        return [self._standing(label, answers) for label in labels]

    def _standing(self, label: str, answers: Mapping[str, Sequence[Compared]]) -> Standing:
        return Standing.of(label, answers[label], self._config.by)


def best_first(standings: Sequence[Standing], target: float) -> list[Standing]:
    """Those at the target, the cheapest at the head; then those below it, the nearest at the head.

    What is below it on few questions may be at it on many. Of those whose times are equal within
    `NOISE`, the one that agrees most, then the smallest KL, then the smallest working cache.
    """
    left, ordered = list(standings), []
    while left:
        bound = min(each.ttft_ratio for each in left) * NOISE
        near = [each for each in left if each.ttft_ratio <= bound]
        best = min(near, key=lambda each: (-each.agreement, each.first_kl, each.kv_ratio))
        ordered.append(best)
        left.remove(best)
    return sorted(ordered, key=lambda each: max(0.0, target - each.agreement))


def recommended(
    result: Result, settings: Mapping[str, TunedSetting], config: TuneConfig, collection: str
) -> TunedSetting | None:
    """The entry of ``samkv.toml``, with what it was measured with; None for full prefill."""
    chosen = result.chosen
    if chosen is None:
        return None
    return replace(
        settings[chosen.label],
        measured={
            "collection": collection,
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "version": figures.version(),
            "target": config.agree,
            "agreed_by": config.by,
            "held_out_questions": chosen.n,
            "held_out_tries": len(result.checked),
            "agreement": round(chosen.agreement, 4),
            "agreement_low": round(chosen.low, 4),
            "agreement_high": round(chosen.high, 4),
            "first_token_of_full_prefill": round(chosen.ttft_ratio, 4),
        },
    )
