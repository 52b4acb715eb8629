"""One question: settings against full prefill, on the same prompt and without labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samkv_integrations.engine.decode import Greedy, decode_greedily
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.first_token import first_token
from samkv_integrations.engine.options import AnswerSettings
from samkv_integrations.engine.report import Report
from samkv_integrations.evaluation.measures import f1, kl, same_top1
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.methods import METHODS, Method

FULL = "recompute"
"""Full prefill, which every setting is compared with."""

Clock = Callable[[], float]


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
