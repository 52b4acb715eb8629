"""Answers as objects: JSON of a schema, and the parsers that read it."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import TypeBaseModel, is_basemodel_subclass
from pydantic import BaseModel


class WholeJson(JsonOutputParser):
    """JSON that is complete: LangChain's parser would close the brackets of one that was cut.

    Raises OutputParserException for an answer that ended at max_tokens.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:  # noqa: ANN401
        """The object; with ``partial``, what there is of it while the answer goes on."""
        if isinstance(result[0], ChatGeneration):
            metadata = result[0].message.response_metadata
            if metadata.get("finish_reason") == "length":
                raise OutputParserException(
                    f"the answer was cut after {metadata['samkv']['completion_tokens']} tokens, "
                    "before its JSON was complete; give more max_tokens, or a schema with bounds "
                    "(maxLength, maxItems)",
                    llm_output=result[0].text,
                )
        return super().parse_result(result, partial=partial)


class WholeObject(WholeJson, PydanticOutputParser[Any]):
    """The same as an object of a pydantic class."""


_OF_A_TOOL = ("function", "parameters", "input_schema", "inputSchema", "toolSpec")


def json_schema_of(schema: dict[str, Any] | type) -> dict[str, Any]:
    """The JSON schema of a class, or of a tool as providers describe them; another dict is one."""
    if isinstance(schema, dict) and not any(name in schema for name in _OF_A_TOOL):
        return schema
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()  # LangChain's has no references, so that none may recur
    return convert_to_json_schema(schema)


def parser_of(schema: dict[str, Any] | type) -> WholeJson:
    """What reads the answer: objects of a pydantic class, dicts for anything else."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        pydantic_class: TypeBaseModel = schema
        return WholeObject(pydantic_object=pydantic_class)
    return WholeJson()


def parsed(
    llm: Runnable[Any, Any], parser: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[Any, Any]:
    """The chain of both; with include_raw ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return llm | parser
    read = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | read.with_fallbacks([failed], exception_key="parsing_error")
