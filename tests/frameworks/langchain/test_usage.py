"""Where LangChain looks for what a call has cost: cached tokens, the report, and totals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessage
from langchain_core.outputs import LLMResult
from langchain_core.tools import tool

from langchain_samkv import ChatSamKV, SamKV
from samkv_integrations import Engine, Report, collect_reports
from tests.support import tools
from tests.support.tools import CALL, QUESTION, RECORD, Town, dictated, tool_model

PROMPT = f"{RECORD}\n\n{QUESTION}"
OBJECT = '{"name": "Denbury"}'
find_record = tool(tools.find_record)


class Ends(BaseCallbackHandler):
    """What callbacks are told at the end of a call."""

    def __init__(self) -> None:
        self.results: list[LLMResult] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(tool_model(), method="reuse", prefix_bytes=0)
    engine.cache_chunks([RECORD])
    return engine


@pytest.fixture(scope="module")
def chat(engine: Engine) -> ChatSamKV:
    return ChatSamKV(engine=engine, max_tokens=200)


@pytest.fixture(scope="module")
def llm(engine: Engine) -> SamKV:
    return SamKV(engine=engine, max_tokens=200)


def sum_of(chunks: list[Any]) -> Any:
    first, *others = chunks
    for other in others:
        first += other
    return first


async def gathered(pieces: Any) -> Any:
    return sum_of([piece async for piece in pieces])


def structured(chat: ChatSamKV, method: Any) -> Any:
    return chat.with_structured_output(Town, method=method, include_raw=True)


CALLS: dict[str, tuple[str, Callable[[ChatSamKV, Any], Any]]] = {
    "invoke": ("On the Tume.", lambda chat, how: chat.invoke(PROMPT, how)),
    "stream": ("On the Tume.", lambda chat, how: sum_of(list(chat.stream(PROMPT, how)))),
    "batch": ("On the Tume.", lambda chat, how: chat.batch([PROMPT], how)[0]),
    "a tool": (CALL, lambda chat, how: chat.bind_tools([find_record]).invoke(PROMPT, how)),
    "a tool, streamed": (
        CALL, lambda chat, how: sum_of(list(chat.bind_tools([find_record]).stream(PROMPT, how)))
    ),
    "an object": (
        OBJECT, lambda chat, how: structured(chat, "json_schema").invoke(PROMPT, how)["raw"]
    ),
    "an object by a tool": (
        CALL.replace("find_record", "Town"),
        lambda chat, how: structured(chat, "function_calling").invoke(PROMPT, how)["raw"],
    ),
}  # fmt: skip
AWAITED: dict[str, Callable[[ChatSamKV, Any], Any]] = {
    "ainvoke": lambda chat, how: chat.ainvoke(PROMPT, how),
    "astream": lambda chat, how: gathered(chat.astream(PROMPT, how)),
    "abatch": lambda chat, how: chat.abatch([PROMPT], how),
}


def check(message: AIMessage, report: Report, ends: Ends) -> None:
    """The message and the callbacks say what the report does."""
    usage = message.usage_metadata
    assert usage is not None and report.found == report.reused == 1
    assert usage["input_tokens"] == report.prompt_tokens
    assert usage["output_tokens"] == report.completion_tokens
    assert usage["input_token_details"] == {"cache_read": report.cached_tokens}
    assert report.prompt_tokens > report.cached_tokens >= len(RECORD)  # a token a letter
    assert message.response_metadata["samkv"] == report.to_dict()
    (result,) = ends.results
    info = result.generations[0][0].generation_info
    assert info is not None
    assert info["samkv"] == report.to_dict()
    assert json.loads(json.dumps(info["samkv"])) == report.to_dict()
    assert info["finish_reason"] == message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("way", CALLS)
def test_cached_tokens_and_the_report_of_a_call(chat: ChatSamKV, way: str) -> None:
    ends, (answer, call) = Ends(), CALLS[way]
    with dictated(answer), collect_reports() as reports:
        message = call(chat, {"callbacks": [ends]})
    check(message, reports[0], ends)


@pytest.mark.parametrize("way", AWAITED)
async def test_cached_tokens_and_the_report_of_an_awaited_call(chat: ChatSamKV, way: str) -> None:
    ends = Ends()
    with dictated("On the Tume."), collect_reports() as reports:
        found = await AWAITED[way](chat, {"callbacks": [ends]})
    check(found[0] if isinstance(found, list) else found, reports[0], ends)


@pytest.mark.parametrize("streams", [False, True])
def test_the_report_of_a_plain_completion(llm: SamKV, streams: bool) -> None:
    ends = Ends()
    with dictated("On the Tume."), collect_reports() as reports:
        if streams:
            list(llm.stream(PROMPT, {"callbacks": [ends]}))
        else:
            llm.invoke(PROMPT, {"callbacks": [ends]})
    (result,) = ends.results
    info = result.generations[0][0].generation_info
    assert info is not None and info["samkv"] == reports[0].to_dict()
    if not streams:  # LangChain keeps no llm_output of a stream
        assert result.llm_output is not None
        details = result.llm_output["token_usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": reports[0].cached_tokens} != {"cached_tokens": 0}


def test_an_agent_has_a_total_of_its_calls(chat: ChatSamKV) -> None:
    """LangChain's own of the tokens, and ours of everything else, are of the same calls."""
    agent = create_agent(chat, [find_record])
    with (
        dictated(CALL, "On the Tume."),
        get_usage_metadata_callback() as usage,
        collect_reports() as reports,
    ):
        state = agent.invoke({"messages": [("human", PROMPT)]})
    assert state["messages"][-1].text == "On the Tume."
    asked, answered = reports
    (summed,) = usage.usage_metadata.values()
    total = reports.total
    assert total.answers == 2 and (asked.reused, answered.reused) == (1, 2)
    assert summed["input_tokens"] == total.prompt_tokens
    assert summed["output_tokens"] == total.completion_tokens
    assert summed["input_token_details"] == {"cache_read": total.cached_tokens}
    assert total.cached_tokens == asked.cached_tokens + answered.cached_tokens
