"""One question: candidates against full prefill, on the same prompt and without labels."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.divergence import kl, log_likelihood, same_top1
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.engine.costs import keep_costs
from samkv_integrations.engine.engine import Engine
from samkv_integrations.figures import Row
from samkv_integrations.methods import METHODS
from samkv_integrations.tuning.candidates import FULL, Candidate
from samkv_integrations.tuning.timed_answer import Clock, TimedAnswer, timed_answer


class Measurer:
    """Answers a question by full prefill and by candidates.

    The engine's own caches are read where they have a candidate's bits, and are never changed. For
    other bits a question's chunks are cached in a temporary folder beside them, on the same disk,
    as long as the question is asked.

    Args:
        engine: on the collection's caches, with the default prefix. Nothing of one prompt is held
            for the next one.
        max_new_tokens: of an answer. chat: whether prompts go through the chat template.
        clock: tells seconds.
    """

    def __init__(
        self,
        engine: Engine,
        candidates: Sequence[Candidate],
        *,
        max_new_tokens: int,
        chat: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._engine, self._chat, self._clock = engine, chat, clock
        self._max_new_tokens = max_new_tokens
        self._candidates = {candidate.label: candidate for candidate in candidates}
        self._engines: dict[int, Engine] = {}
        self._warm: set[str] = set()
        self._open = ExitStack()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def rows(self, question: Question, labels: Sequence[str]) -> Iterator[Row]:
        """A row for full prefill, then one for each of ``labels``.

        ``spent_s`` is what a row took in all; ``ttft_s`` of a candidate has that of full prefill
        on the same prompt, in the same moment, beside it.
        """
        began = self._clock()
        if FULL not in self._warm:  # the first pass of a process is slower than all others
            self._warm.add(FULL)
            self._answer(self._engine, question, FULL, 1)
        full = self._answer(self._engine, question, FULL)
        own = log_likelihood(full.logits, full.tokens)
        yield {
            **_common(question, FULL, full),
            "answer_loglik": own,
            "spent_s": self._clock() - began,
        }
        likelihoods = {full.tokens: own}
        with ExitStack() as cached:
            for label in labels:
                began = self._clock()
                answer = self._compared_answer(cached, question, label)
                if answer.tokens not in likelihoods:
                    likelihoods[answer.tokens] = self._likelihood(question, answer.tokens)
                yield {
                    **_common(question, label, answer),
                    **_compared(full, answer),
                    "answer_loglik": likelihoods[answer.tokens],
                    "full_answer_loglik": own,
                    "spent_s": self._clock() - began,
                }

    def _compared_answer(self, cached: ExitStack, question: Question, label: str) -> TimedAnswer:
        """A candidate's answer. cached: undoes what was cached for the question."""
        candidate, engine = self._candidates[label], self._engine
        if not candidate.in_store:
            engine = self._engine_of(candidate.setting.store_bits)
            before = engine.store.known_keys()
            keys = set(engine.cache_chunks(question.documents)) - set(before)
            if keys:
                cached.callback(engine.store.delete, *sorted(keys))
        if label not in self._warm:
            self._warm.add(label)
            self._answer(engine, question, label, 1)
        return self._answer(engine, question, label)

    def _answer(
        self, engine: Engine, question: Question, label: str, most: int | None = None
    ) -> TimedAnswer:
        method = METHODS[FULL] if label == FULL else self._candidates[label].method
        return timed_answer(
            engine, question.prompt(chat=self._chat), question.documents, method,
            most or self._max_new_tokens, self._clock,
        )  # fmt: skip

    def _likelihood(self, question: Question, tokens: Sequence[int]) -> float:
        """Mean log-likelihood of tokens under full prefill."""
        logits = self._engine.logits(
            question.prompt(chat=self._chat), question.documents, follow=tokens[:-1], method=FULL
        )
        return log_likelihood(logits, tokens)

    def _engine_of(self, bits: int) -> Engine:
        if bits not in self._engines:
            own = self._engine
            beside = own.store.path.parent if isinstance(own.store, ChunkStore) else None
            folder = self._open.enter_context(TemporaryDirectory(prefix=".tune-", dir=beside))
            store = ChunkStore(Path(folder) / "kv")
            keep_costs(own.model, store, own.costs)
            self._engines[bits] = Engine(
                own.model, store, store_bits=bits, block_size=own.fingerprint.block_size,
                prefix_bytes=0, scheduler=own.scheduler,
            )  # fmt: skip
        return self._engines[bits]


def _common(question: Question, label: str, answer: TimedAnswer) -> dict[str, Any]:
    report = answer.report
    return {
        "label": label,
        "id": question.id,
        "question": question.question,
        "answer": answer.text,
        "tokens": len(answer.tokens),
        "prompt_tokens": report.prompt_tokens,
        "ran": report.ran,
        "ttft_s": answer.ttft_s,
        "bytes_read": report.bytes_read,
        "kv_bytes": report.kv_bytes,
        "full_kv_bytes": report.full_kv_bytes,
    }


def _compared(full: TimedAnswer, other: TimedAnswer) -> Mapping[str, float]:
    """The distance of an answer from full prefill's."""
    first, mine = full.logits[:1], other.logits[:1]
    return {
        "exact": float(full.text == other.text),
        "f1": token_f1(other.shown, full.shown),
        "first_kl": float(kl(first, mine)[0]),
        "first_top1": float(same_top1(first, mine)[0]),
        "full_ttft_s": full.ttft_s,
    }


def token_f1(mine: Sequence[int], theirs: Sequence[int]) -> float:
    """F1 over tokens of the model, their order ignored: the same in languages without spaces.

    1 for two empty answers.
    """
    if not mine and not theirs:
        return 1.0
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0
