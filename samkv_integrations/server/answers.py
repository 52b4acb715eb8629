"""Answers in the forms of OpenAI's API: a body, or the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import Answer, AnswerStream

DONE = "[DONE]"
"""The data of the last event."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an endpoint writes answers.

    prefix: of their ids. whole, part: the ``object`` of a body, and of an event. body: the text's
    place in a choice of a body; event: likewise, of a piece of text, or of the first event.
    """

    prefix: str
    whole: str
    part: str
    body: Callable[[str], dict[str, Any]]
    event: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None


CHAT = Form(
    prefix="chatcmpl",
    whole="chat.completion",
    part="chat.completion.chunk",
    body=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    event=lambda text: {"delta": {"content": text} if text else {}},
    first={"delta": {"role": "assistant", "content": ""}},
)
TEXT = Form(
    prefix="cmpl",
    whole="text_completion",
    part="text_completion",
    body=lambda text: {"text": text},
    event=lambda text: {"text": text},
    first=None,
)


def usage_of(report: Report) -> dict[str, Any]:
    """Tokens of prompt and answer; chunks count at full length, and as cached if they were."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
    }


def figures_of(report: Report, model: str) -> dict[str, Any]:
    """The report, without the name of the model in this machine, such as a folder."""
    return report.to_dict() | {"model": model}


class EventWriter(Protocol):
    """Writes an answer as events."""

    def events(self, stream: AnswerStream, *, include_usage: bool) -> AsyncIterator[str]:
        """The data of the events of a stream. Raises what goes wrong in its midst."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Writes one answer. model: the name that the server has for it."""

    form: Form
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""
        choice = self._choice(self.form.body(answer.text), answer.finish_reason)
        return {
            **self._head(self.form.whole),
            "choices": [choice],
            "usage": usage_of(answer.report),
            "samkv": figures_of(answer.report, self.model),
        }

    async def events(self, stream: AnswerStream, *, include_usage: bool) -> AsyncIterator[str]:
        """The data of the events of a stream; what goes wrong in its midst is an event, too."""
        if self.form.first is not None:
            yield self._event([self._choice(self.form.first)])
        async for text in stream:
            yield self._event([self._choice(self.form.event(text))])
        end, report = self._choice(self.form.event(""), stream.finish_reason), stream.report
        last: dict[str, Any] = {"samkv": figures_of(report, self.model)}
        if include_usage:
            yield self._event([end])
            yield self._event([], usage=usage_of(report), **last)
        else:
            yield self._event([end], **last)
        yield DONE

    def _event(self, choices: list[dict[str, Any]], **more: object) -> str:
        return json.dumps({**self._head(self.form.part), "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{self.form.prefix}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    @staticmethod
    def _choice(text: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}
