"""The measurements of ``samkv tune``: settings against full prefill, on a user's own questions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from tqdm.auto import tqdm

from samkv_integrations.chroma.link import ChromaLink
from samkv_integrations.engine import Engine
from samkv_integrations.errors import EmptyInput, Given, InvalidOption
from samkv_integrations.lab.evaluation import Paired, Question, is_right
from samkv_integrations.methods import Method, get_method
from samkv_integrations.methods.base import with_option
from samkv_integrations.methods.eviction import get_eviction
from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.serving.stream import Answer

FULL = "recompute"
"""The method with which every setting is compared: full prefill."""

Clock = Callable[[], float]

NOISE = 1.1
"""Times in one step of this factor count as equal: medians differ so much from run to run."""

WORTH = 0.95
"""A setting must need less than this share of full prefill's time to first token."""

LEAST_QUESTIONS = 5
"""Fewest questions: three for the choice, and two held out."""

MOST_QUESTIONS = 400
"""Most questions for which chunks are retrieved."""

CHOICE_SHARE = 0.6
"""Share of the time for the choice; the check on held-out questions has the rest."""

LEAST_ASKED = 8
"""Fewest questions before a setting may be dropped."""

MOST_ASKED = 48
"""Most questions for the choice."""

LEAST_CHECKED = 16
"""Fewest held-out questions for a recommended setting, if there are as many."""

MOST_TRIED = 3
"""Most settings that are checked on held-out questions: of many, one would pass by chance."""

LEAST_RIGHT = 0.1
"""Full prefill must exceed this share of right answers; with fewer there is little to lose."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of an engine or a command that are measured together.

    method: a name. set: options of the method, each ``NAME=VALUE``. eviction: a name; None for the
    method's own. store_bits: bits of the caches with which the setting is measured.
    """

    method: str
    set: tuple[str, ...] = ()
    eviction: str | None = None
    store_bits: int

    @property
    def label(self) -> str:
        """A short name, such as ``auto, first=48, quest``."""
        options = (option.partition(".")[2] for option in self.set)
        return ", ".join(filter(None, (self.method, *options, self.eviction)))

    @property
    def with_options(self) -> Method:
        """The method with its options."""
        method = get_method(self.method)
        for option in self.set:
            method = with_option(method, option)
        return method


_CANDIDATES: Sequence[Mapping[str, Any]] = (
    {"method": "reuse"},
    {"method": "reuse", "eviction": "quest"},
    {"method": "epic"},
    # `auto` goes by the model's size, and has full prefill where that is faster
    {"method": "auto", "eviction": "quest"},
    {"method": "auto"},
    {"method": "samkv-guided"},
    {"method": "auto", "set": ("recompute.first=48",)},
)


def candidates(store_bits: int, n_parameters: int) -> dict[str, Setting]:
    """The settings to try, by label, roughly cheapest first.

    ``samkv-guided`` is left out for models that run it as ``auto``. store_bits: bits of the caches.
    n_parameters: of the model.
    """
    made = [Setting(store_bits=store_bits, **words) for words in _CANDIDATES]
    of_auto = get_method("auto").for_model(n_parameters).way
    if of_auto == "samkv-guided":
        made = [each for each in made if each.method != of_auto]
    return {each.label: each for each in made}


def runs(model: Runtime, setting: Setting) -> bool:
    """Whether a model's runtime runs the method and the eviction of a setting."""
    try:
        model.check(setting.with_options, get_eviction(setting.eviction))
    except InvalidOption:
        return False
    return True


# -- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Questions with their documents; numbers of questions that are too long or lack a cache."""

    questions: Sequence[Question]
    too_long: int
    uncached: int


def with_documents(
    link: ChromaLink, asked: Sequence[Question], *, top_k: int, max_new_tokens: int, chat: bool
) -> Retrieved:
    """Retrieve the ``top_k`` nearest chunks for each question, for at most `MOST_QUESTIONS`.

    A question that has documents keeps them.

    Raises EmptyInput if fewer than `LEAST_QUESTIONS` can be asked, else as `nearest` does.
    """
    found: list[Question] = []
    engine, too_long, uncached = link.engine, 0, 0
    for question in asked[:MOST_QUESTIONS]:
        documents = question.documents or tuple(
            one.text for one in link.search(question.question, top_k)
        )
        ready = replace(question, documents=documents)
        chunks = engine.chunks.refer(documents)
        n_tokens = len(ready.prompt_ids(engine.model, chat=chat)) + max_new_tokens
        if n_tokens > engine.model.context_window:
            too_long += 1
        elif any(ref.state != "cached" for ref in engine.chunks.look_up(chunks, "exists")):
            uncached += 1
        else:
            found.append(ready)
    if len(found) < LEAST_QUESTIONS:
        raise EmptyInput(
            f"of {len(asked)} questions {len(found)} can be asked, and {LEAST_QUESTIONS} are "
            f"needed; {too_long} are too long for the context window, {uncached} have chunks "
            "without a cache; give more questions, retrieve fewer chunks with --top-k, or run "
            "'samkv store sync' (and before it 'samkv store budget', if caches were evicted)"
        )
    return Retrieved(questions=found, too_long=too_long, uncached=uncached)


# -- one question ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An answer compared with full prefill's answer to the same prompt.

    right, full: whether the answer is right, and whether full prefill's is.
    ttft_ratio, kv_ratio: time to first token and bytes of the working cache, over full prefill's.
    """

    right: bool
    full: bool
    ttft_ratio: float
    kv_ratio: float


class Measurer:
    """Answers questions by full prefill and by other methods. The store is only read.

    engine: an engine without kept sequences. settings: label -> setting. chat: whether prompts go
    through the chat template.
    """

    def __init__(
        self, engine: Engine, settings: Mapping[str, Setting], *, max_new_tokens: int, chat: bool
    ) -> None:
        self._engine, self._chat, self._max_new_tokens = engine, chat, max_new_tokens
        full = Setting(method=FULL, store_bits=engine.store_bits)
        self._settings = {FULL: full, **settings}
        self._methods = {label: each.with_options for label, each in self._settings.items()}
        self._warm: set[str] = set()

    def compare(self, question: Question, labels: Sequence[str]) -> list[Compared]:
        """Answer a question by full prefill and by each of ``labels``, and compare the answers."""
        for label in {FULL, *labels} - self._warm:  # the first pass of a method is slower
            self._answer(question, label, 1)
            self._warm.add(label)
        full = self._answer(question, FULL, self._max_new_tokens)
        found = []
        for label in labels:
            answer = self._answer(question, label, self._max_new_tokens)
            report = answer.report
            found.append(
                Compared(
                    right=is_right(answer.text, question.answers),
                    full=is_right(full.text, question.answers),
                    ttft_ratio=report.ttft_s / full.report.ttft_s,
                    kv_ratio=report.kv_bytes / report.full_kv_bytes,
                )
            )
        return found

    def _answer(self, question: Question, label: str, max_new_tokens: int) -> Answer:
        return self._engine.generate(
            question.prompt(chat=self._chat), question.documents, method=self._methods[label],
            eviction=self._settings[label].eviction, on_miss="text", max_new_tokens=max_new_tokens,
        )  # fmt: skip


# -- all questions --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standing(Paired):
    """A setting compared with full prefill, over the questions that it was asked.

    ``ttft_ratio`` is a median, ``kv_ratio`` a mean.
    """

    label: str
    ttft_ratio: float
    kv_ratio: float

    @classmethod
    def over(cls, label: str, answers: Sequence[Compared]) -> Standing:
        """The standing after these answers, at least one."""
        paired = Paired.of([one.right for one in answers], [one.full for one in answers])
        return cls(
            label=label, **vars(paired),
            ttft_ratio=median(one.ttft_ratio for one in answers),
            kv_ratio=mean(one.kv_ratio for one in answers),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """The standings of all settings on the choice, and of the best on held-out questions.

    chosen: the fastest of these that is good enough; None for full prefill. why: the reason for
    full prefill.
    """

    standings: Sequence[Standing]
    held_out: Sequence[Standing]
    chosen: Standing | None
    why: str


Compare = Callable[[Question, Sequence[str]], Sequence[Compared]]
"""See `Measurer.compare`."""


class Run:
    """A comparison of settings. Progress goes to standard error.

    lose: percentage points by which right answers may be below full prefill's. minutes: most
    minutes; a question that has begun is still answered. clock: returns seconds. Raises
    InvalidOption for a value out of range.
    """

    def __init__(
        self,
        compare: Compare,
        *,
        lose: float = 3.0,
        minutes: float = 10.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        if not 0 <= lose < 100:
            raise InvalidOption(
                Given("lose", lose), "; it must be a number of points from 0 to below 100, as in 3"
            )
        if not minutes > 0:
            raise InvalidOption(Given("minutes", minutes), "; it must be above 0")
        self._compare, self._lose, self._minutes, self._clock = compare, lose, minutes, clock
        self._least = -lose / 100

    def tune(self, labels: Sequence[str], questions: Sequence[Question]) -> Result:
        """Compare all settings on three of five questions, then the best ones on the others.

        If the time ends before enough questions of either part are answered, no setting is chosen.
        """
        choice = [one for place, one in enumerate(questions) if place % 5 < 3][:MOST_ASKED]
        held_out = [one for place, one in enumerate(questions) if place % 5 >= 3]
        time_s, began = 60 * self._minutes, self._clock()
        standings = self._standings(labels, choice, began + CHOICE_SHARE * time_s)
        checked, last, needed = list[Standing](), standings, min(LEAST_ASKED, len(choice))
        is_cut = self._is_cut(standings, needed)
        able = [each for each in standings if not self._is_out(each) and self._can_judge(each)]
        best = sorted(able, key=self._rank)[:MOST_TRIED]
        tried = [] if is_cut else [each.label for each in best]
        if tried:
            needed = min(LEAST_CHECKED, len(held_out))
            if self._clock() < began + time_s:
                checked = self._standings(tried, held_out, began + time_s)
            last, is_cut = checked, not checked or self._is_cut(checked, needed)
        # not the best on the choice: a few questions there may be chance, and time is not
        enough = [one for one in checked if one.questions >= needed and self.is_enough(one)]
        chosen = min(enough, key=self._rank, default=None)
        longest = max(last, key=lambda each: each.questions, default=None)
        if chosen is not None:
            why = ""
        elif is_cut or longest is None:
            why = (
                f"the time was over after {longest.questions if longest else 0} of the {needed} "
                f"questions that are needed to {'check' if tried else 'choose'} a setting; give "
                "more --minutes"
            )
        elif not self._can_judge(longest):
            why = (
                f"full prefill itself answers {longest.full} of {longest.questions} questions "
                "right, too few to judge settings by; ask what the model can answer"
            )
        else:
            why = f"no faster setting comes within {self._lose:g} points of its right answers"
        return Result(standings=standings, held_out=checked, chosen=chosen, why=why)

    def is_enough(self, each: Standing) -> bool:
        """Whether a setting is faster, and loses no more points than allowed."""
        is_faster = each.ttft_ratio < WORTH
        return is_faster and each.difference >= self._least and self._can_judge(each)

    def _can_judge(self, each: Standing) -> bool:
        """Whether full prefill has enough right answers for a loss to show."""
        return each.full > each.questions * max(LEAST_RIGHT, -self._least)

    def _is_out(self, each: Standing) -> bool:
        """Whether a setting certainly loses too many points, or is not faster."""
        return each.high < self._least or each.ttft_ratio > WORTH * NOISE

    def _is_cut(self, standings: Sequence[Standing], needed: int) -> bool:
        """Whether a setting that is not out was asked fewer questions than are needed."""
        return any(each.questions < needed and not self._is_out(each) for each in standings)

    def _standings(
        self, labels: Sequence[str], questions: Sequence[Question], ends: float
    ) -> list[Standing]:
        """Ask each setting of ``labels`` the questions, until it is out.

        A later question begins only if it should end before ``ends``, a time of the clock.
        """
        answers: dict[str, list[Compared]] = {label: [] for label in labels}
        left, longest = list(labels), 0.0
        for asked, question in enumerate(tqdm(questions, desc="asking"), start=1):
            began = self._clock()
            if not left or (longest and began + longest > ends):
                break
            for label, one in zip(left, self._compare(question, left), strict=True):
                answers[label].append(one)
            longest = max(longest, self._clock() - began)
            if asked >= LEAST_ASKED:
                left = [
                    each for each in left if not self._is_out(Standing.over(each, answers[each]))
                ]
        return [Standing.over(label, answers[label]) for label in labels]

    def _rank(self, each: Standing) -> tuple[float, ...]:
        """Sort key: settings that are good enough, fastest first; then the others, by lost points.

        A setting that is not good enough on a few questions may be on more. Among settings whose
        times are in one step of `NOISE` the order is by right answers, then by working cache.
        """
        step = math.floor(math.log(max(each.ttft_ratio, 1e-6), NOISE))
        return max(0.0, self._least - each.difference), step, -each.difference, each.kv_ratio
