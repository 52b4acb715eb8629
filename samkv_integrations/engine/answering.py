"""One answer on its way: what the model's thread makes of it, and hands over piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from samkv_integrations.engine.decode import Decoder
from samkv_integrations.engine.outbox import Outbox
from samkv_integrations.engine.report import Report, Stage
from samkv_integrations.engine.text_stream import TextStream
from samkv_integrations.engine.tracing import Trace
from samkv_integrations.model.sampling import Sampler

AHEAD = 32
"""Pieces that an answer may be ahead of its reader. Then it stands aside for others."""

FinishReason = Literal["stop", "length"]


class Abandoned(Exception):
    """Nobody reads the answer any more; ends its first pass."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The first token is there. report: the figures so far. stages: what came before it."""

    report: Report
    stages: Sequence[Stage]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that is decided, empty at the end of an answer, and what the answer is up to then.

    n_tokens: tokens so far. decode_s: seconds of the steps of all but the first. kv_bytes: working
    cache. finish_reason: how the answer ended; None while it goes on.
    """

    text: str
    n_tokens: int
    decode_s: float
    kv_bytes: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the first pass of an answer leaves: its first token, and what the others go on with."""

    token: int
    sampler: Sampler
    decoder: Decoder
    report: Report
    stages: Sequence[Stage]


class Answering:
    """One answer, from a prompt that waits to its last token.

    The model's thread calls `begin` and `take`, and `fail` if they raise; anybody may `abandon`.

    Args:
        begin: the first pass; takes a function that raises `Abandoned` if there is no need for it.
        release: frees what the prompt holds if there is no first pass.
        kv_bytes: the most that its working cache can take.
        end_ids: tokens that end it. max_new_tokens: most tokens. text: what they are written to.
        trace: what its reader tells of it.

    outbox: for whoever reads it. is_complete: whether all of it is in there.
    """

    def __init__(
        self,
        begin: Callable[[Callable[[], None]], Start],
        release: Callable[[], None],
        *,
        kv_bytes: int,
        end_ids: frozenset[int],
        max_new_tokens: int,
        text: TextStream,
        trace: Trace,
    ) -> None:
        self._first_pass, self._release = begin, release
        self._end_ids, self._max_new_tokens, self._text = end_ids, max_new_tokens, text
        self.kv_bytes, self.trace = kv_bytes, trace
        self.outbox: Outbox[Begun | Piece | BaseException] = Outbox()
        self.is_complete = False
        self.is_abandoned = False
        self._start: Start | None = None
        self._token = 0
        self._n_tokens = 0
        self._decode_s = 0.0

    # -- for readers ------------------------------------------------------------------------

    def abandon(self) -> None:
        """Compute no more of it. Takes no lock: a finaliser may call it anywhere."""
        self.is_abandoned = True

    # -- for the model's thread -------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to compute."""
        return self.is_complete or self.is_abandoned

    @property
    def is_ahead(self) -> bool:
        """Whether its reader is to catch up first."""
        return len(self.outbox) >= AHEAD

    def begin(self) -> None:
        """Compute the first token."""
        self._start = start = self._first_pass(self._check)
        self.outbox.put(Begun(report=start.report, stages=start.stages))
        self._go_on(start.token)

    def _check(self) -> None:
        if self.is_abandoned:
            raise Abandoned

    def release(self) -> None:
        """Free what it holds; nothing of it is computed any more."""
        if self._start is None:
            self._release()
        self._start = None

    @property
    def next_step(self) -> tuple[Decoder, int]:
        """What goes through the model next."""
        assert self._start is not None
        return self._start.decoder, self._token

    def take(self, logits: Tensor, seconds: float) -> None:
        """Take what a step of ``seconds`` made of `next_step`: (vocabulary,)."""
        assert self._start is not None
        self._decode_s += seconds
        self._go_on(self._start.sampler.next(logits))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the answer is read, after all that is there."""
        self.is_complete = True
        if self._start is not None:
            self._put("")  # how far it came
        self.outbox.put(error)

    def _go_on(self, token: int) -> None:
        self._token = token
        if token in self._end_ids:
            self._end("stop")
            return
        self._n_tokens += 1
        if text := self._text.push(token):
            self._put(text)
        if self._text.stopped:
            self._end("stop")
        elif self._n_tokens == self._max_new_tokens:
            self._end("length")

    def _end(self, reason: FinishReason) -> None:
        if tail := self._text.flush():
            self._put(tail)
        self.is_complete = True
        self._put("", reason)

    def _put(self, text: str, finish_reason: FinishReason | None = None) -> None:
        assert self._start is not None
        self.outbox.put(
            Piece(
                text=text,
                n_tokens=self._n_tokens,
                decode_s=self._decode_s,
                kv_bytes=self._start.decoder.cache.kv_bytes,
                finish_reason=finish_reason,
            )
        )
