"""One answer while it is computed, and the pieces of text that its reader gets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from samkv_integrations.plan.kept_sequences import KeptSequence
from samkv_integrations.plan.request import Request
from samkv_integrations.prompt.text import TextStream
from samkv_integrations.report import Report, Stage
from samkv_integrations.runtimes.base import (
    FirstEntries,
    Logits,
    Observer,
    RowCosts,
    Sampler,
    TokenSequence,
)
from samkv_integrations.serving.draft import PromptLookup
from samkv_integrations.serving.first_token import first_token

FinishReason = Literal["stop", "length"]


_log = logging.getLogger(__name__)


class Abandoned(Exception):
    """Raised inside a pass to end it, after the answer's reader has left."""


class NothingCame(Exception):
    """No piece came within the time that a reader waits."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of final text, empty in the first and the last one, and the report so far.

    finish_reason: how the answer ended; None while it goes on.
    """

    text: str
    report: Report
    finish_reason: FinishReason | None = None


class Pieces:
    """A queue from the model's thread to the single reader of an answer, a thread or a task.

    `put` never blocks. Reading waits at most ``timeout`` seconds, then raises NothingCame; it
    raises an error that was put.
    """

    def __init__(self) -> None:
        # the last item is always the future of the next one
        self._items: deque[Future[Piece | BaseException]] = deque([Future()])

    def __len__(self) -> int:
        return len(self._items) - 1

    def put(self, item: Piece | BaseException) -> None:
        """Add a piece or an error, and wake the reader."""
        coming = self._items[-1]
        self._items.append(Future())
        coming.set_result(item)

    def next(self, timeout: float | None = None) -> Piece:
        """The next piece."""
        try:
            item = self._items[0].result(timeout)
        except TimeoutError:
            raise NothingCame from None
        self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    async def anext(self, timeout: float | None = None) -> Piece:
        """Like `next`, for a task; occupies no thread while it waits."""
        coming = self._items[0]
        if not coming.done():
            # shielded: cancelling the task must not cancel the piece
            try:
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(coming)), timeout)
            except TimeoutError:
                raise NothingCame from None
        return self.next()


class _PassObserver(Observer):
    """Records the stages of an answer's prompt pass, and ends it if the reader has left."""

    def __init__(self, answer: RunningAnswer, pause: Callable[[], None]) -> None:
        self._answer, self._pause = answer, pause

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._answer.request.stage(name)

    def pause(self) -> None:
        if self._answer.is_abandoned:
            raise Abandoned
        self._pause()


class RunningAnswer:
    """One answer, from a waiting request to its last token.

    The model's thread calls `begin`, `draft` and `advance`, and `fail` if one of them raises.

    owner: who asks. n_computed: estimated number of tokens that the prompt pass computes.
    pieces: for the reader; the first one is empty and comes with the first token.
    is_complete: whether the last piece has been put. is_abandoned: set by a reader that has left.
    sequence: for the tokens after the first; None before it and at the end. token: the next input
    of the model.
    """

    _report: Report  # of the first token
    _kept: KeptSequence[FirstEntries] | None = None  # the prompt, in memory
    _sampler: Sampler
    _lookup: PromptLookup | None = None  # None if nothing is drafted
    _costs = RowCosts()

    def __init__(self, request: Request) -> None:
        self.request, self.owner = request, request.owner
        n_prompt = len(request.resolved.token_ids)
        cached = [one.n_tokens for one in request.resolved.chunks if one.stored is not None]
        share = request.how.method.recompute.most_ratio(sum(cached), len(cached))
        self.n_computed = max(1, n_prompt - request.n_held - int((1 - share) * sum(cached)))
        self.kv_bytes = (n_prompt + request.how.capacity) * request.model.token_kv_bytes  # at most
        self.pieces = Pieces()
        self.is_complete = self.is_abandoned = False
        self.sequence: TokenSequence | None = None
        self.token = self._n_tokens = self._n_steps = 0
        self._tokens: list[int] = []
        self._is_unsure = False  # the last step checked a draft, and no token was certain
        self._decode_s = 0.0
        self._text = TextStream(request.model, request.how.settings.stop)

    def begin(self, pause: Callable[[], None]) -> None:
        """Compute the first token. Raises Abandoned if the reader leaves meanwhile.

        pause: called between two parts of the pass, see `Observer.pause`.
        """
        request, began = self.request, time.perf_counter()
        request.stages += (
            Stage(name="read", began=request.times.began, ended=request.times.read),
            Stage(name="wait", began=request.times.read, ended=began),
        )
        prompt_ids = request.resolved.token_ids
        with request.resolved:
            first = first_token(request, _PassObserver(self, pause))
            self.sequence, self._kept, self._report = first.sequence, first.kept, first.report
            self._sampler = request.model.sampler(
                prompt_ids, request.how.settings.sampling, request.how.mask
            )
            token = self._sampler.next(first.logits)
        self._report = replace(
            self._report, wait_s=began - request.times.read, announce_s=request.times.announce_s,
            ttft_s=time.perf_counter() - request.times.began,
        )  # fmt: skip
        if request.how.settings.draft and first.sequence.can_rewind:
            self._lookup = PromptLookup(prompt_ids)
        self._put("")
        self._take(token)

    def draft(self, most: int) -> list[int]:
        """Tokens that may follow `token`, at most ``most``, to be checked by the next step."""
        if self._lookup is None or self._is_unsure or not self._lookup.has_any:
            return []
        settings = self.request.how.settings
        most = min(most, settings.draft, self.request.how.capacity - self._n_tokens - 1)
        self._costs = self.request.model.row_costs()
        if self._costs.tolerance and not settings.sampling.is_greedy:
            return []  # sampling near a threshold would depend on rounding
        return self._lookup.draft(self._costs.relative, most)

    def advance(self, drafted: Sequence[int], logits: Sequence[Logits], seconds: float) -> None:
        """Add the tokens that a step gave, up to the first one that was not drafted.

        logits: after `token` and after each of the drafted tokens. Each token is chosen as if the
        step had been its own, so neither a greedy nor a sampled answer depends on drafts.
        """
        assert self.sequence is not None
        self._decode_s += seconds
        self._n_steps += 1
        chosen = list[int]()
        tolerance = self._costs.tolerance if drafted else 0.0
        for of_token, expected in zip(logits, [*drafted, None], strict=True):
            token = self._sampler.next_if_sure(of_token, tolerance)
            if token is not None:
                chosen.append(token)
            if token is None or token != expected or token in self.request.how.end_ids:
                break
        self._is_unsure = not chosen
        if n_wrong := len(logits) - len(chosen):
            self.sequence.rewind(n_wrong)
        for token in chosen:
            self._take(token)
            if self.is_complete:
                break

    def _take(self, token: int) -> None:
        """Add the next token."""
        self.token = token
        self._tokens.append(token)
        if self._lookup is not None:
            self._lookup.add(token)
        text = ""
        reason: FinishReason | None = None
        if token in self.request.how.end_ids:
            reason = "stop"
        else:
            self._n_tokens += 1
            text = self._text.push(token)
            if self._text.stopped:
                reason = "stop"
            elif self._n_tokens == self.request.how.capacity:
                reason = "length"
        if reason is not None:
            text += self._text.flush()
        if text:
            self._put(text)
        if reason is not None:
            self.is_complete = True
            self._keep()  # before the reader sees the end, as it may ask again at once
            self._put("", reason)

    def _keep(self) -> None:
        """Keep the entries of the prompt and of the answer's computed tokens for later prompts."""
        if self._kept is None or self.sequence is None:
            return
        request, prompt = self.request, self._kept
        self.sequence.put_back()
        n_prompt = len(prompt.token_ids)
        n_decoded = self.sequence.n_tokens - n_prompt
        token_ids = np.append(prompt.token_ids, np.array(self._tokens[:n_decoded], np.int64))
        is_exact = prompt.n_exact == n_prompt and request.model.decodes_exactly
        kept = replace(
            prompt, token_ids=token_ids,
            from_cache=np.append(prompt.from_cache, np.zeros(n_decoded, np.bool_)),
            n_exact=len(token_ids) if is_exact else prompt.n_exact, n_bytes=prompt.entries.n_bytes,
        )  # fmt: skip
        self._report = replace(self._report, stays=request.keep(kept))
        self._kept = None

    def fail(self, error: BaseException) -> None:
        """Pass ``error`` to the reader, after the pieces that are already put."""
        self.is_complete = True
        self._drop_kept()
        if self.sequence is not None:
            with suppress(Exception):  # a sequence that fails may not tell its size
                self._put("")  # the figures so far
        self.pieces.put(error)

    def _drop_kept(self) -> None:
        if self._kept is not None:  # its tensors have grown with the answer
            self.request.drop(self._kept)
            self._kept = None

    def release(self) -> None:
        """End the answer and free its entries; those of an abandoned answer are kept first."""
        try:
            self._keep()
        except Exception:  # it would save a later prompt time
            _log.warning("an abandoned answer is not kept in memory", exc_info=True)
            self._drop_kept()
        sequence, self.sequence = self.sequence, None
        try:
            if sequence is None:
                self.request.resolved.close()
            else:
                sequence.close()
        except Exception:  # nobody reads the answer any more
            _log.exception("an answer's memory could not be freed")

    def _put(self, text: str, finish_reason: FinishReason | None = None) -> None:
        assert self.sequence is not None
        n_later = self._n_tokens - 1
        report = replace(
            self._report, completion_tokens=self._n_tokens, decode_kv_bytes=self.sequence.kv_bytes,
            decode_tokens_per_s=n_later / self._decode_s if self._decode_s else 0.0,
            tokens_per_step=(len(self._tokens) - 1) / self._n_steps if self._n_steps else 0.0,
        )  # fmt: skip
        self.pieces.put(Piece(text=text, report=report, finish_reason=finish_reason))
