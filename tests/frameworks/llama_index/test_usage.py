"""Where LlamaIndex looks for what a call has cost: cached tokens, the report, and totals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.response_synthesizers import Refine
from llama_index.core.tools import FunctionTool

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine, Report, collect_reports
from tests.support.tools import dictated, tool_model

RECORD = "[Denbury] Denbury is a town on the river Tume, an hour from Flevport."
PROMPT = f"{RECORD}\n\nWhich river is Denbury on?"
CALL = '<tool_call>\n{"name": "find_record", "arguments": {"town": "Denbury"}}\n</tool_call>'


def find_record(town: str) -> str:
    """Finds the record of a town."""
    return RECORD if town == "Denbury" else "none"


class Ends(BaseEventHandler):
    """Raw responses of the calls that have ended."""

    raw: list[Any] = []

    def handle(self, event: Any, **rest: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.raw.append(event.response.raw)  # type: ignore[union-attr]


@pytest.fixture
def ends() -> Iterator[Ends]:
    handler, root = Ends(), get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tool_model(), method="reuse")
    engine.cache_chunks([RECORD])
    return engine


@pytest.fixture
def llm(engine: Engine) -> SamKVLLM:
    return SamKVLLM(engine=engine, max_new_tokens=200)


def check(raw: Any, report: Report) -> None:
    assert raw["samkv"] == report.to_dict() == json.loads(json.dumps(raw["samkv"]))
    usage = raw["usage"]
    assert usage["prompt_tokens"] == report.prompt_tokens > report.cached_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": report.cached_tokens}
    assert report.cached_tokens >= len(RECORD)  # a token a letter


async def test_an_agent_has_a_total_of_its_calls(llm: SamKVLLM, ends: Ends) -> None:
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(find_record)], llm=llm)
    with dictated(CALL, "On the Tume."), collect_reports() as reports:
        running = agent.run(PROMPT)
        outputs = [event async for event in running.stream_events()]
        assert str(await running) == "On the Tume."
    told = [event.raw for event in outputs if isinstance(event, AgentOutput)]
    assert len(reports) == len(ends.raw) == len(told) == 2
    for raw, of_agent, report in zip(ends.raw, told, reports, strict=True):
        check(raw, report)
        assert of_agent["samkv"] == report.to_dict()
    assert reports.total.cached_tokens == sum(report.cached_tokens for report in reports)


def test_llama_index_counts_the_tokens_that_the_total_has(engine: Engine) -> None:
    counter = TokenCountingHandler()
    llm = SamKVLLM(engine=engine, max_new_tokens=20, callback_manager=CallbackManager([counter]))
    refine = Refine(llm=llm, callback_manager=llm.callback_manager)
    with collect_reports() as reports:
        refine.get_response("Which river?", [RECORD, RECORD.replace("Denbury", "Flevport")])
    total = reports.total
    assert total.answers == 2 and total.found == 2
    assert counter.prompt_llm_token_count == total.prompt_tokens
    assert counter.completion_llm_token_count == total.completion_tokens
