"""Function calling of LlamaIndex: the prompt tells of the tools, and calls come out of the answer.

What is answered is dictated, because no model that is trained to call tools is at hand; what is
forced comes from random weights.
"""

from __future__ import annotations

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import AnswerCut, InvalidOption
from tests.support.models import tiny_model
from tests.support.tools import (
    CALL,
    QUESTION,
    RECORD,
    Town,
    dictated,
    find_record,
    tool_model,
)

TOOL = FunctionTool.from_defaults(find_record)


@pytest.fixture(scope="module")
def llm() -> SamKVLLM:
    sampling = {"temperature": 1.0, "seed": 1}
    return SamKVLLM(
        engine=Engine(tool_model(), method="reuse"),
        max_new_tokens=900,
        generate_kwargs=sampling,
    )


def test_metadata(llm: SamKVLLM) -> None:
    assert llm.metadata.is_function_calling_model
    assert not SamKVLLM(engine=llm.engine, is_chat_model=False).metadata.is_function_calling_model
    for model in (tiny_model(), tool_model("unknown")):
        assert not SamKVLLM(engine=Engine(model)).metadata.is_function_calling_model


def test_a_call(llm: SamKVLLM) -> None:
    with dictated(f"I look.\n{CALL}{CALL}"):
        response = llm.chat_with_tools([TOOL], QUESTION)
    (call,) = llm.get_tool_calls_from_response(response)  # several are not allowed
    assert (call.tool_name, call.tool_kwargs) == ("find_record", {"town": "Denbury"})
    assert response.message.content == "I look." and call.tool_id


def test_no_call(llm: SamKVLLM) -> None:
    with dictated("On the Tume."):
        response = llm.chat_with_tools([TOOL], QUESTION)
    assert response.message.content == "On the Tume."
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(InvalidOption, match="called no tool; it answered 'On the Tume.'"):
        llm.get_tool_calls_from_response(response)


@pytest.mark.parametrize("answer", [f"I look.\n{CALL}", "On the < Tume.", CALL])
async def test_streams_are_the_same_answer(llm: SamKVLLM, answer: str) -> None:
    with dictated(answer, answer, answer):
        whole = llm.chat_with_tools([TOOL], QUESTION)
        chunks = list(llm.stream_chat_with_tools([TOOL], QUESTION))
        awaited = [each async for each in await llm.astream_chat_with_tools([TOOL], QUESTION)]
    for each in (chunks, awaited):
        assert "".join(chunk.delta or "" for chunk in each) == whole.message.content
        assert each[-1].message.content == whole.message.content
        calls = [block for block in each[-1].message.blocks if isinstance(block, ToolCallBlock)]
        assert len(calls) == len(llm.get_tool_calls_from_response(whole, False))


def test_forced(llm: SamKVLLM) -> None:
    response = llm.chat_with_tools([TOOL], QUESTION, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(response)
    assert call.tool_name == "find_record" and isinstance(call.tool_kwargs["town"], str)
    with pytest.raises(AnswerCut, match="cut after 9 tokens"):
        llm.chat_with_tools([TOOL], QUESTION, tool_required=True, max_tokens=9)


async def test_agent(llm: SamKVLLM) -> None:
    """What the tool found is answered from its cache."""
    llm.engine.cache_chunks([RECORD])
    with dictated(CALL, "On the Tume."):
        result = await FunctionAgent(tools=[TOOL], llm=llm).run(QUESTION)
    assert str(result) == "On the Tume."
    assert llm.last_report is not None and llm.last_report.reused == 1


def test_structured_prediction_by_a_call(llm: SamKVLLM) -> None:
    by_call = SamKVLLM(
        engine=llm.engine,
        max_new_tokens=200,
        generate_kwargs=llm.generate_kwargs,
        pydantic_program_mode=PydanticProgramMode.FUNCTION,
    )
    assert isinstance(by_call.structured_predict(Town, PromptTemplate("Where?")), Town)


def test_refused(llm: SamKVLLM) -> None:
    with pytest.raises(InvalidOption, match="chat template of 'tiny-llama' takes no tools"):
        SamKVLLM(engine=Engine(tiny_model())).chat_with_tools([TOOL], QUESTION)
    custom = SamKVLLM(engine=llm.engine, messages_to_prompt=lambda messages: "Where?")
    with pytest.raises(InvalidOption, match="tools with messages_to_prompt"):
        custom.chat_with_tools([TOOL], QUESTION)
    called = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="f", tool_kwargs="no")])
    with pytest.raises(InvalidOption, match="arguments='no' of a call; they must be an object"):
        llm.chat([called])
