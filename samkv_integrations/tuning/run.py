"""A run of ``samkv tune``: all settings on some questions, the best ones on held-out questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

from tqdm.auto import tqdm

from samkv_integrations import formatting
from samkv_integrations.engine.decode import Greedy, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.request import AnswerSettings
from samkv_integrations.engine.tuned import TunedSetting
from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.judge import Paired, is_right
from samkv_integrations.evaluation.measures import exact_match, kl
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.eviction import NO_EVICTION
from samkv_integrations.methods import METHODS, Method

FULL = "recompute"
"""The method that every setting is compared with: full prefill."""

Clock = Callable[[], float]

GOLD = "gold answers"
AGREEMENT = "agreement with full prefill only, where a setting can only lose"
"""What answers are judged by: the questions' own gold answers, or else full prefill's answers."""

NOISE = 1.1
"""Times within this factor count as equal, because medians differ so much from run to run."""

WORTH = 0.95
"""A setting must need less than this share of full prefill's time to first token."""

LEAST_QUESTIONS = 5
"""Three of them are for the choice, and two are held out."""

CHOICE_SHARE = 0.6
"""Share of the time for the choice. The rest is for the check on held-out questions."""

LEAST_ASKED = 8
"""Questions that a setting is asked before it may be dropped."""

MOST_ASKED = 48
"""Most questions for the choice."""

LEAST_CHECKED = 16
"""Held-out questions that a recommended setting must have been asked, if there are so many."""

MOST_TRIED = 3
"""Settings that are tried on held-out questions. Of many, one would pass by chance."""

LEAST_RIGHT = 0.1
"""Full prefill must exceed this share of right answers. With fewer there is little to lose."""

_CANDIDATES: Sequence[Mapping[str, Any]] = (
    {"method": "reuse"},
    {"method": "reuse", "eviction": "quest", "eviction_budget": 0.1},
    # `auto` is `epic`, with full prefill where that is faster
    {"method": "auto", "eviction": "quest", "eviction_budget": 0.1},
    {"method": "auto"},
    {"method": "samkv-guided"},
    {"method": "auto", "set": ("recompute.first=48",)},
)


def candidates(model: str, store_bits: int) -> dict[str, TunedSetting]:
    """The settings to try, by label, roughly cheapest first. store_bits: of the caches."""
    made = [TunedSetting(model=model, store_bits=store_bits, **words) for words in _CANDIDATES]
    return {as_label(setting): setting for setting in made}


def as_label(setting: TunedSetting) -> str:
    """A short name of a setting, such as ``auto, first=48, quest@0.1``."""
    words = [setting.method, *(option.partition(".")[2] for option in setting.set)]
    if setting.eviction != NO_EVICTION:
        budget = "" if setting.eviction_budget is None else f"@{setting.eviction_budget:g}"
        words.append(f"{setting.eviction}{budget}")
    return ", ".join(words)


def judged(questions: Sequence[Question]) -> tuple[list[Question], str]:
    """The questions to ask, and what judges their answers: `GOLD` or `AGREEMENT`.

    These are the questions with gold answers, if all have them or at least `LEAST_QUESTIONS` do.
    Otherwise they are all questions, without their gold answers.
    """
    known = [one for one in questions if one.has_gold]
    if known and len(known) >= min(LEAST_QUESTIONS, len(questions)):
        return known, GOLD
    return [replace(one, answers=()) for one in questions], AGREEMENT


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An answer compared with full prefill's answer to the same prompt.

    right, full: whether the answer is right, and whether full prefill's is.
    first_kl: KL divergence of the first token from full prefill's, in nats.
    ttft_ratio, kv_ratio: time to first token and bytes of the working cache, over full prefill's.
    bytes_read: bytes read from chunk caches.
    """

    right: bool
    full: bool
    first_kl: float
    ttft_ratio: float
    bytes_read: float
    kv_ratio: float


class Measurer:
    """Answers questions by full prefill and by other methods. The store is only read.

    Args:
        engine: over the collection's caches, without a prefix cache.
        methods: label -> method.
        max_new_tokens: longest answer. chat: whether prompts go through the chat template.
        clock: gives the time in seconds.
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
        """Answer a question by full prefill and by each of ``labels``, and compare the answers.

        Without gold answers the right answer is full prefill's. Case, punctuation and articles do
        not count.
        """
        for label in {FULL, *labels} - self._warm:  # the first pass of a method is slower
            self.answer(question, label, 1)
            self._warm.add(label)
        full, _, full_ttft_s = self.answer(question, FULL, self._max_new_tokens)

        def right(text: str) -> bool:
            if question.answers:
                return is_right(text, question.answers)
            return exact_match(text, [full.text]) == 1

        found = []
        for label in labels:
            answer, report, ttft_s = self.answer(question, label, self._max_new_tokens)
            found.append(
                Compared(
                    right=right(answer.text),
                    full=right(full.text),
                    first_kl=float(kl(full.logits[:1], answer.logits[:1])[0]),
                    ttft_ratio=ttft_s / full_ttft_s,
                    bytes_read=report.bytes_read,
                    kv_ratio=report.kv_bytes / report.full_kv_bytes,
                )
            )
        return found

    def answer(
        self, question: Question, label: str, most_tokens: int
    ) -> tuple[Greedy, Report, float]:
        """The greedy answer of `Engine.generate`, its report, and the seconds to its first token.

        The report has no times. Nothing is stored: a chunk without a cache is computed as text.

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
    """What a setting must reach, and in which time.

    lose: percentage points by which the share of right answers may be below full prefill's.
    minutes: time for measuring. A question that has begun is still answered.

    Raises InvalidOption for values out of range.
    """

    lose: float = 3.0
    minutes: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.lose < 100:
            raise InvalidOption(
                f"lose={self.lose:g}; it must be a number of points from 0 to below 100, as in 3"
            )
        if not self.minutes > 0:
            raise InvalidOption(f"minutes={self.minutes:g}; it must be above 0")

    @property
    def least(self) -> float:
        """``lose`` as a difference of shares: -0.03 for 3 points."""
        return -self.lose / 100

    def is_enough(self, each: Paired) -> bool:
        """Whether a setting loses no more than ``lose`` points."""
        return each.difference >= self.least

    def can_judge(self, each: Paired) -> bool:
        """Whether full prefill has enough right answers for a loss to show."""
        return each.full > each.questions * max(LEAST_RIGHT, -self.least)


@dataclass(frozen=True, kw_only=True)
class Standing(Paired):
    """A setting compared with full prefill, over the questions that it was asked.

    ``ttft_ratio`` is a median; the other figures of `Compared` are means.
    """

    label: str
    first_kl: float
    ttft_ratio: float
    bytes_read: float
    kv_ratio: float

    @classmethod
    def over(cls, label: str, answers: Sequence[Compared]) -> Standing:
        """The standing after these answers, of which there is at least one."""
        values = {name: [vars(one)[name] for one in answers] for name in vars(answers[0])}
        mine, full = values.pop("right"), values.pop("full")
        means = {name: mean(each) for name, each in values.items()}
        means["ttft_ratio"] = median(values["ttft_ratio"])
        return cls(label=label, **vars(Paired.of(mine, full)), **means)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    standings: of all settings, on the questions of the choice.
    checked: of the best settings, on held-out questions, best first.
    chosen: the first of these that is enough; None for full prefill. why: then the reason.
    states: label -> ``chosen``; ``enough``, but a better one was chosen; ``refused`` on held-out
        questions; ``out``, if it loses too much or is slower than full prefill; else ``in``.
    seconds: duration of the run.
    """

    standings: Sequence[Standing]
    checked: Sequence[Standing]
    chosen: Standing | None
    why: str
    states: Mapping[str, str]
    seconds: float


Compare = Callable[[Question, Sequence[str]], Sequence[Compared]]
"""Answers a question by each of the labels, as `Measurer.compare` does."""


class Run:
    """A run over questions that have their documents. Progress goes to standard error."""

    def __init__(
        self, config: TuneConfig, compare: Compare, clock: Clock = time.perf_counter
    ) -> None:
        self._config, self._compare, self._clock = config, compare, clock

    def tune(self, labels: Sequence[str], questions: Sequence[Question]) -> Result:
        """Compare all settings on some questions, then the best ones on held-out questions.

        Of every five questions, three are for the choice and two are held out.

        Raises EmptyInput for fewer than `LEAST_QUESTIONS` questions.
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
            is_slow = each.ttft_ratio > WORTH * NOISE
            return each.questions >= least_asked and (each.high < config.least or is_slow)

        def passed(each: Standing) -> bool:
            is_asked, is_faster = each.questions >= least_checked, each.ttft_ratio < WORTH
            return is_asked and is_faster and config.is_enough(each) and config.can_judge(each)

        standings = self.standings(labels, choice, began + CHOICE_SHARE * (ends - began), is_out)
        able = [
            each for each in standings
            if not is_out(each) and each.ttft_ratio < WORTH and config.can_judge(each)
        ]  # fmt: skip
        tried = [each.label for each in best_first(able, config)[:MOST_TRIED]]
        has_time = self._clock() < ends
        checked = self.standings(tried, held_out, ends, is_out) if tried and has_time else []
        chosen = next((each for each in checked if passed(each)), None)

        last, least = (checked, least_checked) if checked else (standings, least_asked)
        longest = max(last, key=lambda each: each.questions)
        is_cut = any(each.questions < least and not is_out(each) for each in last)
        within = f"within {config.lose:g} points of full prefill's right answers"
        if chosen is not None:
            why = ""
        elif is_cut or (tried and not checked):
            why = "the time was over before a setting could be shown to be enough"
        elif not config.can_judge(longest):
            why = (
                f"full prefill itself answers {longest.full} of {longest.questions} questions "
                "right, too few to judge settings by; ask what the model can answer"
            )
        else:
            is_slow = any(config.is_enough(each) for each in last)
            why = f"no setting {within} is faster" if is_slow else f"no setting comes {within}"
            why += " on held-out questions" if checked else ""
        states = {each.label: "out" if is_out(each) else "in" for each in standings}
        states |= {each.label: "enough" if passed(each) else "refused" for each in checked}
        states |= {chosen.label: "chosen"} if chosen else {}
        return Result(
            standings=standings, checked=checked, chosen=chosen, why=why, states=states,
            seconds=self._clock() - began,
        )  # fmt: skip

    def standings(
        self,
        labels: Sequence[str],
        questions: Sequence[Question],
        ends: float | None = None,
        is_settled: Callable[[Standing], bool] = lambda each: False,
    ) -> list[Standing]:
        """Ask questions of each of ``labels`` until it is settled or the time is over.

        No question begins if it might end after ``ends``, but at least one is asked. ends: a time
        of the clock; None for `TuneConfig.minutes` from now on.
        """
        ends = self._clock() + 60 * self._config.minutes if ends is None else ends
        answers: dict[str, list[Compared]] = {label: [] for label in labels}
        left, longest = list(labels), 0.0
        for question in tqdm(questions, desc=f"asking {formatting.count(len(left), 'setting')}"):
            began = self._clock()
            if not left or (longest and began + longest > ends):
                break
            for label, one in zip(left, self._compare(question, left), strict=True):
                answers[label].append(one)
            longest = max(longest, self._clock() - began)
            left = [each for each in left if not is_settled(Standing.over(each, answers[each]))]
        return [Standing.over(label, answers[label]) for label in labels]


def best_first(standings: Sequence[Standing], config: TuneConfig) -> list[Standing]:
    """Settings that are enough, fastest first; then the others, by the points that they miss.

    A setting that is not enough on a few questions may be enough on more. Among settings whose
    times are equal within `NOISE` the order is by right answers, then KL, then working cache.
    """
    left, ordered = list(standings), []
    while left:
        bound = min(each.ttft_ratio for each in left) * NOISE
        near = [each for each in left if each.ttft_ratio <= bound]
        best = min(near, key=lambda each: (-each.difference, each.first_kl, each.kv_ratio))
        ordered.append(best)
        left.remove(best)
    return sorted(ordered, key=lambda each: max(0.0, config.least - each.difference))


def recommended(
    result: Result,
    settings: Mapping[str, TunedSetting],
    config: TuneConfig,
    collection: str,
    judge: str,
) -> TunedSetting | None:
    """The entry of ``samkv.toml`` with its measured figures; None for full prefill.

    judge: `GOLD` or `AGREEMENT`. Differences in the entry are shares, not percentage points.
    """
    chosen = result.chosen
    if chosen is None:
        return None
    return replace(
        settings[chosen.label],
        measured={
            "collection": collection,
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "version": formatting.version(),
            "judged_by": judge,
            "lose": -config.least,
            "held_out_tries": len(result.checked),
            **{name: round(vars(chosen)[name], 4) for name in Paired.__dataclass_fields__},
            "first_token_of_full_prefill": round(chosen.ttft_ratio, 4),
        },
    )
