"""What retrievers find, told to an engine by LlamaIndex's instrumentation."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from llama_index.llms.samkv.transform import body_of
from samkv_integrations.engine.engine import Engine


def expect_retrieved(engine: Engine) -> None:
    """From now on ``engine`` expects the texts that any retriever of this process finds."""
    dispatcher = get_dispatcher()
    listening = (each for each in dispatcher.event_handlers if isinstance(each, _Retrievals))
    handler = next(listening, None)
    if handler is None:
        handler = _Retrievals()
        dispatcher.add_event_handler(handler)
    handler.engines.add(engine)


class _Retrievals(BaseEventHandler):
    """One for all engines, which it does not keep alive."""

    _engines: WeakSet[Engine] = PrivateAttr(default_factory=WeakSet)

    @property
    def engines(self) -> WeakSet[Engine]:
        return self._engines

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised dispatchers."""
        return "SamKVRetrievals"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:  # noqa: ANN401
        if isinstance(event, RetrievalEndEvent):
            bodies = [body_of(found.node) for found in event.nodes]
            for engine in list(self._engines):
                engine.expect(bodies)
