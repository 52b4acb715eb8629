"""The bodies of requests: what is taken of OpenAI's API, and what is refused.

A field that would change nothing is taken with the one value that it has here; one that would
change something and cannot is refused, so that no client is answered otherwise than it asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from samkv_integrations.engine.options import AnswerOptions
from samkv_integrations.errors import InvalidOption
from samkv_integrations.prompt.resolve import OnMiss

MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
"""Most stop strings of a request, and characters of one: each token of the answer is compared with
all of them, while other answers wait."""


class Body(BaseModel):
    """A body, or a part of one. A null is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:  # noqa: ANN401
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


def _only(allowed: object) -> AfterValidator:
    """Refuses all values of a field but the one that it has here in any case."""

    def check(value: object) -> object:
        if value != allowed:
            raise PydanticCustomError(
                "unsupported", "only {allowed} is supported here", {"allowed": repr(allowed)}
            )
        return value

    return AfterValidator(check)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _text_of(content: object) -> object:
    """The text of a message, whose parts stand on lines of their own."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PydanticCustomError(
                "unsupported", "a part of type {kind}; this model reads text only",
                {"kind": ascii(kind)[:80]},  # pydantic can write no lone surrogate
            )  # fmt: skip
        given = {name: value for name, value in part.items() if value is not None}
        if given.keys() != {"type", "text"} or not isinstance(given["text"], str):
            raise PydanticCustomError("text_part", "a part of type 'text' has a string, 'text'")
    return "\n".join(part["text"] for part in content)


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a chat. name, refusal: taken and not read, as clients send answers back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[TextPart])]
    name: str | None = None
    refusal: str | None = None

    @property
    def turn(self) -> dict[str, str]:
        """The turn as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class StreamOptions(Body):
    """include_usage: a last event with the usage. include_obfuscation: there is none."""

    include_usage: bool = False
    include_obfuscation: Annotated[bool, _only(False)] = False


class SchemaFormat(Body):
    """What an answer is held to; every schema is kept to strictly."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer is held to; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise InvalidOption("response_format=json_schema without json_schema; give it")
        return self.json_schema.schema_


class Samkv(Body):
    """What OpenAI's API has no words for; None for the server's choice. See `AnswerOptions`."""

    method: str | None = None
    eviction: str | None = None
    on_miss: OnMiss | None = None


class Asked(Body):
    """What both kinds of completions may be asked with.

    max_tokens: most tokens of the answer; None for as many as the server allows, and as fit.
    temperature: 0, the default, takes the likeliest token. top_k, min_p, repetition_penalty: as
    vLLM's API has them, see `SamplingOptions`.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    ] = []
    samkv: Samkv = Samkv()
    n: Annotated[int, _only(1)] = 1
    presence_penalty: Annotated[float, _only(0.0)] = 0.0
    frequency_penalty: Annotated[float, _only(0.0)] = 0.0
    logit_bias: Annotated[dict[str, float], _only({})] = {}
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Asked:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options goes with stream=true only")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, if the client says."""
        return self.max_tokens

    @property
    def options(self) -> AnswerOptions:
        """The options of the answer that were given, but for its length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        given = {name: getattr(self, name) for name in names}
        given |= {"stop": self.stop or None, **self.samkv.model_dump()}
        return cast(AnswerOptions, {n: value for n, value in given.items() if value is not None})


class ChatRequest(Asked):
    """``POST /v1/chat/completions``. safety_identifier, prompt_cache_key: hints, and not read."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    response_format: ResponseFormat | None = None
    logprobs: Annotated[bool, _only(False)] = False
    top_logprobs: Annotated[int, _only(0)] = 0
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Any], _only([])] = []
    tool_choice: Annotated[Any, _only("none")] = "none"
    modalities: Annotated[list[str], _only(["text"])] = ["text"]
    store: Annotated[bool, _only(False)] = False
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_length(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "length", "max_tokens and max_completion_tokens are the same thing; give one"
            )
        return self

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, if the client says."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [message.turn for message in self.messages]

    @property
    def options(self) -> AnswerOptions:
        """The options of the answer that were given, but for its length."""
        options, form = super().options, self.response_format
        if form is not None and (schema := form.schema_of_answer) is not None:
            options["json_schema"] = schema
        return options


class CompletionRequest(Asked):
    """``POST /v1/completions``. prompt: one, as text, which is read to the letter."""

    prompt: Annotated[str, BeforeValidator(lambda given: _single(given))]
    best_of: Annotated[int, _only(1)] = 1
    echo: Annotated[bool, _only(False)] = False


def _single(given: object) -> object:
    """The only prompt of a list of one."""
    return given[0] if isinstance(given, list) and len(given) == 1 else given
