"""What a server does for a request, whatever route it came by: answer, and count."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.options import AnswerOptions
from samkv_integrations.engine.stream import Answer, AnswerStream, off_loop
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.server.answers import EventWriter
from samkv_integrations.server.failures import Failure
from samkv_integrations.server.keys import Tenant
from samkv_integrations.server.metrics import Metrics
from samkv_integrations.server.tenancy import Tenancy

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Service:
    """Answers, for all routes.

    model_name: what clients call the model. most_tokens: of an answer whose client names no number.
    timeout_s: seconds that an answer may take, waiting included; None for no limit. logs_prompts:
    whether prompts go to the log, at INFO; nothing of them does otherwise. since: when it began.
    """

    tenancy: Tenancy
    metrics: Metrics
    model_name: str
    most_tokens: int
    timeout_s: float | None
    logs_prompts: bool = False
    since: int = field(default_factory=lambda: int(time.time()))

    def require_model(self, name: str) -> None:
        """Raises Failure if the model has another name."""
        if name != self.model_name:
            raise Failure(
                status=404, code="model_not_found", param="model",
                message=f"there is no model {name[:80]!r} here; known: {self.model_name!r}",
            )  # fmt: skip

    async def engine(self, tenant: Tenant) -> Engine:
        """The engine of a tenant. Raises StoreError if its folder cannot be used."""
        return await off_loop(self.tenancy.engine, tenant)

    async def begin(
        self,
        engine: Engine,
        prompt: Prompt,
        most_tokens: int | None,
        options: AnswerOptions,
        chunks: Sequence[str] | None = None,
    ) -> AnswerStream:
        """An answer whose first token is there. Arguments and errors: as of `Engine.stream`."""
        if self.logs_prompts:
            _log.info("prompt: %r", prompt)
        if most_tokens is None:
            room = engine.model.context_window - await off_loop(engine.count_tokens, prompt)
            most_tokens = max(1, min(self.most_tokens, room))
        given = options | {"max_new_tokens": most_tokens, "timeout": self.timeout_s}
        return await engine.astream(prompt, chunks, **given)

    async def whole(
        self,
        engine: Engine,
        prompt: Prompt,
        most_tokens: int | None,
        options: AnswerOptions,
        chunks: Sequence[str] | None = None,
    ) -> Answer:
        """A whole answer. Arguments and errors: as of `Engine.generate`."""
        stream = await self.begin(engine, prompt, most_tokens, options, chunks)
        try:
            async with stream:
                return Answer.of("".join([piece async for piece in stream]), stream)
        finally:
            self.metrics.count_answer(stream.report)

    async def events(
        self, stream: AnswerStream, writer: EventWriter, *, include_usage: bool
    ) -> AsyncIterator[str]:
        """The data of the events of an answer, which ends with them."""
        try:
            async with stream:
                async for data in writer.events(stream, include_usage=include_usage):
                    yield data
        finally:
            self.metrics.count_answer(stream.report)
