"""`with_structured_output`: objects of a schema from a model whose weights are random."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic.v1
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from langchain_samkv import ChatSamKV
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from tests.support.asked import listen
from tests.support.models import quoting_model

QUESTION = "Where was Tobias Trulman born?"


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=12)
    kind: Literal["port", "mine"]


class Birth(BaseModel):
    """Who was born where."""

    town: Town
    year: int | None = Field(default=None, ge=0, le=2100)


class BirthDict(TypedDict):
    """Who was born where."""

    town: Annotated[Literal["Flevport", "Denbury"], ..., "the town"]


@pytest.fixture(scope="module")
def chat() -> ChatSamKV:
    return ChatSamKV(
        engine=Engine(quoting_model(), method="reuse"), max_tokens=300, temperature=1.0, seed=1
    )


def test_pydantic(chat: ChatSamKV) -> None:
    for seed in range(5):
        structured = chat.bind(seed=seed).bound.with_structured_output(Birth)  # type: ignore[attr-defined]
        assert isinstance(structured.invoke(QUESTION), Birth)


def test_typed_dict_and_json_schema(chat: ChatSamKV) -> None:
    found = chat.with_structured_output(BirthDict).invoke(QUESTION)
    assert found["town"] in ("Flevport", "Denbury")
    found = chat.with_structured_output(Town.model_json_schema()).invoke(QUESTION)
    assert Town.model_validate(found)


def test_stream(chat: ChatSamKV) -> None:
    """A dict grows; an object is there as soon as its class takes what there is of it."""
    structured = chat.with_structured_output(Town.model_json_schema())
    chunks = list(structured.stream(QUESTION))
    assert len(chunks) > 2
    assert chunks[-1] == structured.invoke(QUESTION)


def test_json_mode(chat: ChatSamKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any object, which only the class is asked about."""
    seen: list[Any] = []

    def told(*_: Any, json_schema: Any, **options: Any) -> dict[str, Any]:
        seen.append(json_schema)
        return {"json_schema": {"const": {"name": "Denbury"}}, **options}

    listen(monkeypatch, told)
    found = chat.with_structured_output(Town, method="json_mode", include_raw=True).invoke(QUESTION)
    assert seen == [{"type": "object"}]
    assert "kind" in str(found["parsing_error"]) and found["raw"].text == '{"name": "Denbury"}'


class Tree(BaseModel):
    """One that recurs."""

    left: Tree | None


class V1(pydantic.v1.BaseModel):
    """One of the first pydantic."""

    alive: bool


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (Tree, Tree),
        (V1, V1),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}, dict),
        (convert_to_openai_tool(Town), dict),
        (convert_to_openai_tool(Town)["function"], dict),
    ],
    ids=["recurs", "v1", "no title", "tool", "function"],
)
def test_every_form_of_a_schema(chat: ChatSamKV, schema: Any, kind: type) -> None:
    assert isinstance(chat.with_structured_output(schema).invoke(QUESTION), kind)


class TestAnAnswerThatWasCut:
    """LangChain's own parser closes brackets, and would pass half an answer for a whole one."""

    REASON = "cut after 12 tokens, before its JSON was complete; give more max_tokens"

    def test_raises(self, chat: ChatSamKV) -> None:
        for schema in (Town, Town.model_json_schema()):
            structured = ChatSamKV(engine=chat.engine, max_tokens=12).with_structured_output(schema)
            with pytest.raises(OutputParserException, match=self.REASON):
                structured.invoke(QUESTION)
            with pytest.raises(OutputParserException, match=self.REASON):
                list(structured.stream(QUESTION))

    def test_include_raw(self, chat: ChatSamKV) -> None:
        cut = ChatSamKV(engine=chat.engine, max_tokens=12)
        found = cut.with_structured_output(Town, include_raw=True).invoke(QUESTION)
        assert found["parsed"] is None
        assert self.REASON in str(found["parsing_error"])
        assert found["raw"].text.startswith('{"name": "')


def test_a_cached_document_is_answered_from_its_cache(chat: ChatSamKV) -> None:
    document = "[Tobias Trulman] Tobias Trulman was born in Flevport, a town on the Tume."
    chat.engine.cache_chunks([document])
    prompt = ChatPromptTemplate.from_template("Documents:\n\n{context}\n\nQuestion: {question}")
    chain = prompt | chat.with_structured_output(Town, include_raw=True)
    found = chain.invoke({"context": document, "question": QUESTION})
    assert isinstance(found["parsed"], Town)
    assert found["raw"].response_metadata["samkv"]["reused"] >= 1  # the question quotes it too


def test_stop_strings_of_the_model_do_not_cut_it(chat: ChatSamKV) -> None:
    stopping = ChatSamKV(engine=chat.engine, max_tokens=300, stop=['"', "}"])
    assert isinstance(stopping.with_structured_output(Birth).invoke(QUESTION), Birth)
    with pytest.raises(InvalidOption, match="could cut the JSON"):
        stopping.with_structured_output(Birth).invoke(QUESTION, stop=["}"])  # type: ignore[call-arg]


def test_what_is_refused(chat: ChatSamKV) -> None:
    with pytest.raises(UnknownOption, match="'includeraw'; known: include_raw, method"):
        chat.with_structured_output(Town, includeraw=True)
    with pytest.raises(InvalidOption, match="method='xml'; allowed: json_schema, json_mode"):
        chat.with_structured_output(Town, method="xml")  # type: ignore[arg-type]
    unfit = chat.with_structured_output({"title": "x", "type": "array", "uniqueItems": True})
    with pytest.raises(InvalidOption, match="uniqueItems"):
        unfit.invoke(QUESTION)


def test_a_call_takes_a_schema_and_the_options_of_all_calls_do_not(chat: ChatSamKV) -> None:
    schema: dict[str, Any] = {"enum": ["Flevport"]}
    assert chat.invoke(QUESTION, json_schema=schema).text == '"Flevport"'
    with pytest.raises(UnknownOption, match="json_schema"):
        ChatSamKV(engine=chat.engine, json_schema=schema)
