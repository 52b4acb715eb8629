"""Tools in chats and responses. Answers are dictated; a forced call is of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel, Field

from samkv_integrations.prompt.quoting import Chat
from samkv_integrations.server.app import create_app
from samkv_integrations.server.service import Settings
from samkv_integrations.server.tenancy import ApiKeys, Tenancy, Tenant
from samkv_integrations.serving.fairness import FairTurns
from samkv_integrations.serving.scheduler import Scheduler
from tests.server.conftest import App
from tests.support.live_server import answering
from tests.support.tools import dictated, tool_model

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
QUESTION = "Which river is Denbury on?"
RECORD = "[Denbury] Denbury is a town on the river Tume, an hour from Flevport."
JSON = '{"name": "find_record", "arguments": {"town": "Denbury"}}'
CALL = f"<tool_call>\n{JSON}\n</tool_call>"
FUNCTION: dict[str, Any] = {
    "name": "find_record",
    "description": "Finds the record of a town.",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 8}},
        "required": ["town"],
    },
}
TOOL: Any = {"type": "function", "function": FUNCTION}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=8)


def find_record(town: str) -> str:
    """Finds the record of a town."""
    return RECORD if town == "Denbury" else "none"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tenancy = Tenancy(
        Scheduler(tool_model(), turns=FairTurns), tmp_path_factory.mktemp("tools"), method="reuse"
    )
    tenancy.engine(Tenant()).cache_chunks([RECORD])
    keys, settings = ApiKeys("", Tenant()), Settings(model_name="tiny", most_tokens=200)
    with answering(create_app(tenancy, keys, settings), keys) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def chat(client: OpenAI, messages: Any = ASKED, **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "tools": [TOOL], **more}
    )


# -- OpenAI's client ------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [CALL, JSON, f"```json\n{JSON}\n```"])
def test_a_call(client: OpenAI, answer: str) -> None:
    with dictated(answer, answer):
        (choice,) = chat(client).choices
        chunks = [chunk.choices[0] for chunk in chat(client, stream=True)]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    (streamed,) = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    for each in (call, streamed):
        assert each.function.name == "find_record" and len(each.id) == 9
        assert json.loads(each.function.arguments) == {"town": "Denbury"}
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_a_call_after_text_and_no_call(client: OpenAI) -> None:
    with dictated(f"I look.\n{CALL}{CALL}", f"I look.\n{CALL}{CALL}", "On the < Tume."):
        both = chat(client).choices[0].message
        first = chat(client, parallel_tool_calls=False).choices[0].message
        (none,) = chat(client).choices
    assert both.content == "I look." and len(both.tool_calls) == 2
    assert len(first.tool_calls) == 1
    assert (none.finish_reason, none.message.content) == ("stop", "On the < Tume.")
    assert none.message.tool_calls is None


@pytest.mark.parametrize(
    "broken", [JSON.replace("record", "river"), CALL.replace("record", "river"), f"{CALL[:-20]}"]
)
def test_what_only_resembles_a_call_is_text(client: OpenAI, broken: str) -> None:
    with dictated(broken, broken):
        (choice,) = chat(client).choices
        chunks = [chunk.choices[0].delta for chunk in chat(client, stream=True)]
    assert (choice.finish_reason, choice.message.content) == ("stop", broken)
    assert "".join(chunk.content or "" for chunk in chunks) == broken


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": FUNCTION}])
def test_a_call_that_is_required(client: OpenAI, choice: Any) -> None:
    (message,) = (c.message for c in chat(client, tool_choice=choice, temperature=1.0).choices)
    (call,) = message.tool_calls
    assert len(json.loads(call.function.arguments)["town"]) <= 8
    (cut,) = chat(client, tool_choice=choice, max_tokens=5).choices
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", "", None)


def test_the_prompt_is_that_of_the_connectors(client: OpenAI) -> None:
    """Other fields of a tool are not the model's business; tool_choice none leaves tools out."""
    strict = {"type": "function", "function": FUNCTION | {"strict": True}}
    with dictated("A.", "A."):
        usage = chat(client, tools=[strict]).usage
        without = chat(client, tool_choice="none").usage
    model = tool_model()
    for found, tools in ((usage, [TOOL]), (without, [])):
        prompt = model.render_chat(Chat(ASKED, tools))
        assert found.prompt_tokens == len(model.tokenize_prompt(prompt))


def test_an_answer_is_sent_back_as_it_came(client: OpenAI) -> None:
    """And what the tool found is answered from its cache."""
    with dictated(CALL, CALL, "On the Tume.", "On the Tume."):
        message = chat(client).choices[0].message
        with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[TOOL]) as stream:
            gathered = stream.get_final_completion().choices[0].message
        for said in (message, gathered):
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": RECORD}
            answer = chat(client, [*ASKED, said.model_dump(), result])
            assert answer.choices[0].message.content == "On the Tume."
            assert answer.model_extra["samkv"]["reused"] == 1


def test_responses(client: OpenAI) -> None:
    flat: Any = {"type": "function", "strict": True, **FUNCTION}
    ask: dict[str, Any] = {"model": "tiny", "tools": [flat]}
    with dictated(f"I look.\n{CALL}{CALL}", CALL, "On the Tume."):
        answer = client.responses.create(**ask, input=ASKED)
        with client.responses.stream(**ask, input=ASKED) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_response()
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RECORD}
            for call in answer.output[1:]
        ]
        thought = {"type": "reasoning", "id": "rs_1", "summary": []}
        last = client.responses.create(**ask, input=[*ASKED, thought, *answer.output, *results])
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == "I look."
    (call,) = streamed.output
    assert (call.name, json.loads(call.arguments)) == ("find_record", {"town": "Denbury"})
    assert "response.function_call_arguments.done" in events
    assert not any("output_text" in name for name in events)
    assert last.output_text == "On the Tume." and last.model_extra["samkv"]["reused"] == 2
    forced = client.responses.create(
        **ask, input=ASKED, tool_choice={"type": "function", "name": "find_record"}
    )
    assert forced.output[0].type == "function_call"


def test_items_of_calls_become_the_turn_of_a_chat(client: OpenAI) -> None:
    calls = [{"id": f"abcdefgh{n}", "type": "function",
              "function": {"name": "find_record", "arguments": "{}"}} for n in (1, 2)]  # fmt: skip
    items = [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    said = {"role": "assistant", "content": "I look."}
    with dictated("A.", "A."):
        there = chat(client, [*ASKED, said | {"tool_calls": calls}])
        here = client.responses.create(model="tiny", input=[*ASKED, said, *items], tools=[
            {"type": "function", "strict": None, **FUNCTION}])  # fmt: skip
    assert here.usage is not None and here.usage.input_tokens == there.usage.prompt_tokens


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "find_river"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_what_is_refused(client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **more)
    assert caught.value.param == param


async def test_nesting_that_python_cannot_follow(
    make_app: Callable[..., App], tmp_path: Path
) -> None:
    client = make_app(model=tool_model(), max_body_bytes=400_000).client
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"not": schema}
    deep = {"type": "function", "function": FUNCTION | {"parameters": schema}}
    called = {"name": "f", "arguments": '{"a": ' * 30_000}
    said = {"role": "assistant", "tool_calls": [{"type": "function", "function": called}]}
    for body in (
        {"messages": ASKED, "tools": [deep]},
        {"messages": ASKED, "tools": [deep], "tool_choice": "required"},
        {"messages": [said]},
    ):
        reply = await client.posted(CHAT, {"model": "tiny", **body})
        assert reply.status == 400, reply.text


# -- LangChain and LlamaIndex ---------------------------------------------------------------------


@pytest.fixture
def langchain_llm(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="tiny", base_url=url, api_key="unused", max_retries=0)


def test_langchain(langchain_llm: ChatOpenAI) -> None:
    bound = langchain_llm.bind_tools([tool(find_record)])
    with dictated(CALL, CALL):
        message = bound.invoke(QUESTION)
        first, *others = bound.stream(QUESTION)
    for other in others:
        first += other
    for each in (message, first):
        (call,) = each.tool_calls
        assert (call["name"], call["args"]) == ("find_record", {"town": "Denbury"})
    structured = langchain_llm.with_structured_output(Town, method="function_calling")
    assert isinstance(structured.invoke(QUESTION), Town)


def llama_index_llm(url: str, **more: Any) -> OpenAILike:
    return OpenAILike(
        model="tiny", api_base=url, api_key="unused", is_chat_model=True, max_retries=0,
        context_window=8192, **more,
    )  # fmt: skip


def test_objects_of_llama_index(url: str) -> None:
    by_call = llama_index_llm(url, is_function_calling_model=True)
    assert isinstance(by_call.structured_predict(Town, PromptTemplate("Where?")), Town)
    as_it_is = llama_index_llm(url)  # requires a call and gives no tools, and reads JSON from text
    with dictated('{"name": "Denbury"}'):
        found = as_it_is.structured_predict(Town, PromptTemplate("Where?"))
    assert found == Town(name="Denbury")
