"""Listeners: functions that are called once for each answer, at its end.

The log and `collect_reports` listen here, OpenTelemetry in `tracing`, a server's Prometheus metrics
in `server.service`. `Engine.listeners` holds those of an engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samkv_integrations.report import Report, Reports, Stage

if TYPE_CHECKING:
    from samkv_integrations.options import AnswerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AnswerEnded:
    """An answer has ended: it is complete, it has failed, or its reader has closed it.

    model: its name. is_chat: whether the prompt was messages. settings: the options of the answer.
    began, ended: when it was asked for, and when it ended (`time.perf_counter`). report: the
    figures up to its end; None before the first token. stages: of the prompt, in order; they do not
    overlap. finish_reason: ``stop`` or ``length`` of a complete answer, else None. error: what its
    reader gets, or got; None without one.
    """

    model: str
    is_chat: bool
    settings: AnswerSettings
    began: float
    ended: float
    report: Report | None
    stages: Sequence[Stage]
    finish_reason: str | None
    error: BaseException | None


Listener = Callable[[AnswerEnded], None]
"""A function, called at the end of each answer, in the thread that ends it and in the context
(contextvars) of the caller. It should be quick. Its errors are logged and affect no answer."""


class Audience:
    """The listeners of one answer, with its model, its settings and the time of the call."""

    def __init__(
        self, listeners: Iterable[Listener], *, model: str, is_chat: bool,
        settings: AnswerSettings, began: float,
    ) -> None:  # fmt: skip
        self._listeners, self._context = tuple(listeners), copy_context()
        self._model, self._is_chat, self._settings = model, is_chat, settings
        self._began = began

    def tell(
        self,
        report: Report | None = None,
        *,
        stages: Sequence[Stage] = (),
        finish_reason: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Call the listeners, in their order."""
        ended = AnswerEnded(
            model=self._model, is_chat=self._is_chat, settings=self._settings, began=self._began,
            ended=time.perf_counter(), report=report, stages=stages, finish_reason=finish_reason,
            error=error,
        )  # fmt: skip
        for listener in self._listeners:
            try:
                self._context.run(listener, ended)
            except Exception:
                _log.exception("listener %r failed; the answer is not affected", listener)


def log_answer(ended: AnswerEnded) -> None:
    """Log a line of figures at INFO. Its record has the report as the attribute ``samkv``."""
    if ended.report is not None:
        _log.info("answered: %s", ended.report.line, extra={"samkv": ended.report})


_COLLECTING: ContextVar[tuple[Reports, ...]] = ContextVar("samkv_reports", default=())
"""The `collect_reports` blocks around the caller. No answer depends on them."""


def collect_answer(ended: AnswerEnded) -> None:
    """Add the report to the `collect_reports` blocks in which the answer was asked for."""
    if ended.report is not None:
        for reports in _COLLECTING.get():
            reports.append(ended.report)


@contextmanager
def collect_reports() -> Iterator[Reports]:
    """Collects the report of every answer that begins in the block, of any engine.

        with collect_reports() as reports:
            response = query_engine.query("Who?")
        cost = reports.total  # .found, .reused, .ttft_s, ...

    An answer reports when it ends or is closed, to each of nested blocks. Read streamed answers
    inside the block. Tasks and threads of LangChain and LlamaIndex are covered; run a
    thread of your own with ``contextvars.copy_context().run``.
    """
    reports = Reports()
    _COLLECTING.set((*_COLLECTING.get(), reports))
    try:
        yield reports
    finally:
        # not with the token of `set`: an asynchronous generator may leave in another context
        _COLLECTING.set(tuple(each for each in _COLLECTING.get() if each is not reports))
