"""`bind_tools`: the prompt tells of the tools, and calls come out of the answer.

What is answered is dictated, because no model that is trained to call tools is at hand; what is
forced comes from random weights.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from langchain_samkv import ChatSamKV, SamKV
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from tests.support import tools
from tests.support.models import tiny_model
from tests.support.tools import CALL, QUESTION, RECORD, Town, dictated, tool_model

find_record = tool(tools.find_record)


@pytest.fixture(scope="module")
def chat() -> ChatSamKV:
    return ChatSamKV(
        engine=Engine(tool_model(), method="reuse"), max_tokens=200, temperature=1.0, seed=1
    )


@pytest.fixture
def bound(chat: ChatSamKV) -> Runnable[Any, AIMessage]:
    return chat.bind_tools([find_record, Town])


def test_a_call(bound: Runnable[Any, AIMessage]) -> None:
    with dictated(f"I look.\n{CALL}"):
        message = bound.invoke(QUESTION)
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("find_record", {"town": "Denbury"})
    assert message.text == "I look." and call["id"] and not message.invalid_tool_calls
    assert message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "find_record", "argu',
        '{"name": "find_river", "arguments": {"town": "Denbury"}}',
        '{"name": "find_record", "arguments": {"tow',
    ],
)
def test_a_broken_call(bound: Runnable[Any, AIMessage], broken: str) -> None:
    with dictated(broken, broken, "Sorry."):
        message = bound.invoke(QUESTION)
        streamed = sum_of(bound.stream(QUESTION))
        bound.invoke([HumanMessage(QUESTION), message, HumanMessage("What?")])
    for each in (message, streamed):
        assert not each.tool_calls
        (call,) = each.invalid_tool_calls
        assert (call["args"] or "").strip("[]") == broken


@pytest.mark.parametrize("answer", [f"I look.\n{CALL}{CALL}", "On the < Tume.", CALL])
async def test_streams_are_the_same_message(bound: Runnable[Any, AIMessage], answer: str) -> None:
    with dictated(answer, answer, answer):
        message = bound.invoke(QUESTION)
        chunks = list(bound.stream(QUESTION))
        awaited = [chunk async for chunk in bound.astream(QUESTION)]
    for each in (chunks, awaited):
        whole = sum_of(each)
        assert whole.text == message.text
        assert whole.usage_metadata == message.usage_metadata
        assert [c["args"] for c in whole.tool_calls] == [c["args"] for c in message.tool_calls]
        assert not any("tool_call" in chunk.text for chunk in each)


def sum_of(chunks: Any) -> AIMessageChunk:
    first, *others = chunks
    for other in others:
        first += other
    return first


def test_the_loop_of_an_agent(bound: Runnable[Any, AIMessage], chat: ChatSamKV) -> None:
    """And what the tool found is answered from its cache."""
    chat.engine.cache_chunks([RECORD])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([find_record]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    with dictated(CALL, "On the Tume."):
        messages = graph.compile().invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].text == RECORD and messages[3].text == "On the Tume."
    assert messages[3].response_metadata["samkv"]["reused"] == 1


class TestForced:
    @pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
    @pytest.mark.parametrize("choice", ["any", "Town"])
    def test_a_call_of_random_weights(self, form: str, choice: str) -> None:
        chat = ChatSamKV(engine=Engine(tool_model(form)), temperature=1.0, seed=2)
        bound = chat.bind_tools([Town], tool_choice=choice)
        for message in (bound.invoke(QUESTION), sum_of(bound.stream(QUESTION))):
            (call,) = message.tool_calls
            assert call["name"] == "Town" and Town(**call["args"]) and not message.text

    def test_none(self, chat: ChatSamKV) -> None:
        bound = chat.bind_tools([Town], tool_choice="none")
        with dictated(CALL):
            assert bound.invoke(QUESTION).text == CALL

    def test_what_is_no_choice(self, chat: ChatSamKV) -> None:
        with pytest.raises(
            InvalidOption, match="tool_choice='River'; allowed: none, auto, any, req"
        ):
            chat.bind_tools([Town], tool_choice="River")

    def test_structured_output_by_a_call(self, chat: ChatSamKV) -> None:
        structured = chat.with_structured_output(Town, method="function_calling")
        assert isinstance(structured.invoke(QUESTION), Town)


class TestRefused:
    def test_a_template_without_tools(self) -> None:
        chat = ChatSamKV(engine=Engine(tiny_model()))
        with pytest.raises(InvalidOption, match="chat template of 'tiny-llama' takes no tools"):
            chat.bind_tools([find_record])
        with pytest.raises(InvalidOption, match="takes no tools"):
            chat.with_structured_output(Town, method="function_calling")
        called = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "a"}])
        with pytest.raises(InvalidOption, match="takes no tools and no calls"):
            chat.invoke([HumanMessage(QUESTION), called, ToolMessage("x", tool_call_id="a")])

    def test_plain_strings(self, chat: ChatSamKV) -> None:
        with pytest.raises(UnknownOption, match="tools are for ChatSamKV"):
            SamKV(engine=chat.engine).invoke(QUESTION, tools=[])

    def test_options_that_there_are_not(self, bound: Runnable[Any, AIMessage]) -> None:
        with pytest.raises(UnknownOption, match="parallel_tool_calls"):
            bound.invoke(QUESTION, parallel_tool_calls=False)  # type: ignore[call-arg]
