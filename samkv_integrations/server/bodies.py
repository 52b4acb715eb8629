"""Bodies of requests and responses of OpenAI's API: completions, chats and responses.

The server accepts a field that it does not support only with its neutral value, so that no client
gets an answer other than it asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.frameworks.fields import AnswerFields, SamplingFields
from samkv_integrations.frameworks.tool_calls import ToolCall, arguments_of, turn_of
from samkv_integrations.option import OnMiss
from samkv_integrations.report import Report

MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
"""Most stop strings of a request, and characters of each. Every token is checked against all of
them, and other answers wait meanwhile."""

MAX_ARGUMENTS = 500_000
"""Most characters of a call's arguments, which are parsed as JSON of their own."""

MAX_TOOLS = 128
"""Most tools of a request, and calls of a message."""

MAX_TEMPERATURE = 2


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):  # which equals 0 or 1 in Python
        raise PydanticCustomError("number", "it must be a number")
    return value


Zero = Annotated[Literal[0], BeforeValidator(_no_boolean)]
One = Annotated[Literal[1], BeforeValidator(_no_boolean)]


class Body(BaseModel):
    """A body, or a part of one. Null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:  # noqa: ANN401
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


def _mistake(field: str, message: str) -> PydanticCustomError:
    """An error of a whole body, or of a part of one, at one of its fields."""
    return PydanticCustomError("mistake", "{message}", {"message": message, "field": field})


def _listed(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("texts", "it must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _single(given: object) -> object:
    """The prompt in a list of one."""
    prompt = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(prompt, str):
        raise PydanticCustomError(
            "prompt", "it must be one string; token ids and several prompts are not supported"
        )
    return prompt


def _without_empty(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not empty; clients send back all fields of an answer."""
    return {n: value for n, value in given.items() if value or value not in (None, [], {})}


class TextPart(Body):
    """A part of a message's content. cache_control: ignored, because caches need no marks."""

    type: Literal["text"]
    text: str
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:  # noqa: ANN401
        return _without_empty(given) if isinstance(given, dict) else given


class _Content(BeforeValidator):
    """Content of a message as one text, with a line for each of its parts of a kind."""

    def __init__(self, kind: type[TextPart]) -> None:
        as_list: Any = list[kind]  # type: ignore[valid-type]  # computed types
        parts = TypeAdapter[list[TextPart]](Annotated[as_list, FailFast()])

        def joined(content: object) -> object:
            if isinstance(content, list):
                return "\n".join(part.text for part in parts.validate_python(content))
            if not isinstance(content, str):
                raise PydanticCustomError("content", "it must be a string or a list of text parts")
            return content

        super().__init__(joined, json_schema_input_type=str | as_list)


def _arguments(given: object) -> dict[str, Any]:
    """The arguments of a call, from JSON."""
    if not isinstance(given, str):
        raise PydanticCustomError("arguments", "it must be a string, the JSON of an object")
    if len(given) > MAX_ARGUMENTS:
        raise PydanticCustomError(
            "arguments", "it must have at most {most} characters", {"most": MAX_ARGUMENTS}
        )
    try:
        return arguments_of(given)
    except InvalidOption:
        raise PydanticCustomError("arguments", "it must be the JSON of an object") from None


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments, json_schema_input_type=str)]


class CalledFunction(Body):
    """The function of a call. arguments: JSON of an object. parsed_arguments: ignored."""

    name: str
    arguments: Arguments
    parsed_arguments: Any = None


class Call(Body):
    """A call of a tool, in a message of the assistant. index: ignored."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One turn of a chat.

    content: optional for the assistant. tool_calls: of the assistant; tool_call_id: of a tool.
    All other fields are accepted and ignored, because clients send them back. Empty fields count
    as absent.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, _Content(TextPart)]
    tool_calls: Annotated[list[Call] | None, Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any] | None, Field(max_length=1024)] = None
    parsed: Any = None
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:  # noqa: ANN401
        if not isinstance(given, dict):
            return given
        kept = _without_empty(given)
        if given.get("role") == "assistant" or given.get("content") == []:
            kept.setdefault("content", "")
        return kept

    @model_validator(mode="after")
    def _check_tools(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise _mistake(name, f"it must come with role {role!r}")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The turn for a chat template."""
        calls = (
            ToolCall(each.function.name, each.function.arguments, each.id)
            for each in self.tool_calls or ()
        )
        return turn_of(
            self.role, self.content, calls=calls, call_id=self.tool_call_id or "", name=self.name
        )


class Function(Body):
    """A tool in the form of ``/v1/responses``, or what a `Tool` holds. parameters: a JSON schema.

    strict: accepted, without effect; a required call conforms to the schema, other calls may not.
    """

    type: Literal["function"] = "function"
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    cache_control: Any = None

    @property
    def tool(self) -> dict[str, Any]:
        """The tool for a chat template."""
        names = ("name", "description", "parameters")
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return {"type": "function", "function": given}


class Tool(Body):
    """A tool in the form of chat completions. cache_control: accepted, without effect."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None

    @property
    def tool(self) -> dict[str, Any]:
        """The tool for a chat template."""
        return self.function.tool


Messages = Annotated[list[Message], Field(min_length=1), FailFast()]
"""A list has FailFast or a greatest length, so that no body has thousands of errors."""


class StreamOptions(Body):
    """include_usage: whether a last event has the usage. include_obfuscation: not supported."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SchemaFormat(Body):
    """A JSON schema that the answer conforms to; always strictly."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaFormat | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise InvalidOption(
                Given("response_format.json_schema", None), ": type 'json_schema' needs it; give it"
            )
        return self.json_schema.schema_


class Samkv(AnswerFields, Body):
    """Options that OpenAI's API does not have, see `AnswerOptions`.

    The server's options replace absent ones. timeout: at most the server's.
    """

    method: str | None = None
    eviction: str | None = None
    on_miss: OnMiss = "compute"

    @property
    def given(self) -> dict[str, Any]:
        """The options that the request has."""
        return self.model_dump(include={*AnswerFields.model_fields}, exclude_unset=True)


class Asked(SamplingFields, Body):
    """The fields that all requests for answers share, beside those of sampling.

    max_tokens: most tokens of the answer; None for the server's limit, or less if the context
    window is smaller.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    ] = []
    samkv: Samkv = Samkv()
    n: One = 1
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    user: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("top_k", mode="before")
    @classmethod
    def _all_tokens(cls, top_k: object) -> object:
        return 0 if type(top_k) is int and top_k == -1 else top_k  # as other servers name them

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None) -> float | None:
        if temperature is not None and temperature > MAX_TEMPERATURE:
            raise PydanticCustomError(
                "temperature", "it must be at most {most}", {"most": MAX_TEMPERATURE}
            )
        return temperature

    @model_validator(mode="after")
    def _check_stream(self) -> Asked:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise _mistake("stream_options", "it needs stream=true; give both")
        return self

    @property
    def paths(self) -> dict[str, str]:
        """The fields in which the request gives the options of the engine, and the prompt."""
        return {name: f"samkv.{name}" for name in AnswerFields.model_fields}

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, if the client names a number."""
        return self.max_tokens

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, except the length of the answer."""
        given = self.model_dump(include={*SamplingFields.model_fields}, exclude_unset=True)
        return given | self.samkv.given | ({"stop": self.stop} if self.stop else {})


class AskedInChat(Asked):
    """The fields that both forms of a chat share.

    tool_choice: which tool must be called: ``none``, ``auto``, ``required``, or a name, also as
    OpenAI's API has it. parallel_tool_calls: whether an answer may hold several calls.
    max_completion_tokens: another name of max_tokens. safety_identifier, prompt_cache_key,
    prompt_cache_retention: accepted and ignored. store: accepted, but nothing is stored.
    """

    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: Zero = 0
    parallel_tool_calls: bool = True
    tools: Sequence[Tool | Function] = []
    tool_choice: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = "auto"
    service_tier: Literal["auto", "default"] = "auto"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool = False

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            name = type(self).model_fields["max_completion_tokens"].alias
            raise _mistake(
                name or "max_completion_tokens", "it is the same option as max_tokens; give one"
            )
        return self

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, if the client names a number."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def form(self) -> ResponseFormat:
        """The requested form of the answer."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, except the length of the answer; and those of tools."""
        options = super().options
        if (schema := self.form.schema_of_answer) is not None:
            options["json_schema"] = schema
        if self.tools and self.tool_choice != "none":
            if "json_schema" in options:
                raise InvalidOption(
                    Given("tools", ...),
                    " and a JSON schema for the answer exclude each other; leave one out, "
                    "or give tool_choice='none'",
                )
            options["tools"] = [each.tool for each in self.tools]
            options["tool_choice"] = self.tool_choice
        # LlamaIndex's OpenAILike sends "required" even without tools
        elif self.tool_choice not in ("none", "auto", "required"):
            raise InvalidOption(Given("tool_choice", self.tool_choice), " without tools; give both")
        return options


class ChatRequest(AskedInChat):
    """``POST /v1/chat/completions``."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    response_format: ResponseFormat = ResponseFormat()
    logprobs: Literal[False] = False
    modalities: Annotated[list[Literal["text"]], FailFast()] = ["text"]
    reasoning_effort: Literal["none"] = "none"
    verbosity: Literal["medium"] = "medium"

    @property
    def form(self) -> ResponseFormat:
        """The form of the answer."""
        return self.response_format

    @property
    def paths(self) -> dict[str, str]:
        """The fields in which the request gives the options of the engine, and the prompt."""
        own = {"messages": "messages", "json_schema": "response_format.json_schema.schema"}
        return super().paths | own


class CompletionRequest(Asked):
    """``POST /v1/completions``. prompt: one text, read without a chat template."""

    prompt: Annotated[str, BeforeValidator(_single, json_schema_input_type=str | list[str])]
    best_of: One = 1
    echo: Literal[False] = False

    @property
    def paths(self) -> dict[str, str]:
        """The fields in which the request gives the options of the engine, and the prompt."""
        return super().paths | {"messages": "prompt"}


class InputPart(TextPart):
    """A part of a message's content in ``/v1/responses``. annotations, logprobs: ignored."""

    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]
    annotations: Any = None
    logprobs: Any = None


class _Item(Body):
    """An item of the input. id, status, phase: ignored, because clients send them back."""

    id: Any = None
    status: Any = None
    phase: Any = None


class InputMessage(_Item, Message):
    """A message in the input of ``/v1/responses``."""

    type: Literal["message"] = "message"
    content: Annotated[str, _Content(InputPart)]


class FunctionCall(_Item):
    """A call of a tool in the input."""

    type: Literal["function_call"]
    call_id: str = ""
    name: str
    arguments: Arguments

    @property
    def turn(self) -> dict[str, Any]:
        """The turn for a chat template."""
        call = ToolCall(self.name, self.arguments, self.call_id)
        return turn_of("assistant", "", calls=[call])


class FunctionCallOutput(_Item):
    """The result of a call in the input."""

    type: Literal["function_call_output"]
    call_id: str = ""
    output: Annotated[str, _Content(InputPart)]

    @property
    def turn(self) -> dict[str, Any]:
        """The turn for a chat template."""
        return turn_of("tool", self.output, call_id=self.call_id)


_ITEMS: dict[str, type[Body]] = {
    "message": InputMessage, "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
}  # fmt: skip
_NOT_READ = "reasoning"  # an item that clients send back


def _item(given: object) -> object:
    """An item of the input; None for one that is not read."""
    kind = (given.get("type") or "message") if isinstance(given, dict) else "message"
    if kind == _NOT_READ:
        return None
    if not (isinstance(kind, str) and kind in _ITEMS):
        known = ", ".join(map(repr, [*_ITEMS, _NOT_READ]))
        raise _mistake("type", f"it must be one of {known}")
    return _ITEMS[kind].model_validate(given)


Item = InputMessage | FunctionCall | FunctionCallOutput


def _as_input(given: object) -> object:
    if not isinstance(given, str | list):
        raise PydanticCustomError("input", "it must be a string or a list of items")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _read(items: list[Item | None]) -> list[Item | None]:
    return [each for each in items if each is not None]


class TextForm(SchemaFormat):
    """The form of an answer, with the schema beside its name."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    @model_validator(mode="after")
    def _check_schema(self) -> TextForm:
        if ("schema_" in self.model_fields_set) != (self.type == "json_schema"):
            raise _mistake("schema", "it and type 'json_schema' need each other; give both")
        return self


class TextOptions(Body):
    """The form of an answer."""

    format: TextForm = TextForm()
    verbosity: Literal["medium"] = "medium"


class Reasoning(Body):
    """How a model that reasons does so: not at all."""

    effort: Literal["none"] = "none"


class ResponseRequest(AskedInChat):
    """``POST /v1/responses``.

    input: a user message, or several messages, calls and their results. instructions: a system
    message before them. max_output_tokens: the same as ``max_tokens``. truncation: a prompt that is
    too long is refused in any case. include: of what there is none.
    """

    tools: Annotated[list[Function], Field(max_length=MAX_TOOLS)] = []
    input: Annotated[
        list[Annotated[Item | None, BeforeValidator(_item, json_schema_input_type=Item)]],
        FailFast(),
        BeforeValidator(_as_input, json_schema_input_type=str | list[Item]),
        AfterValidator(_read),
        Field(min_length=1),
    ]
    instructions: str | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, alias="max_output_tokens")] = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    background: Literal[False] = False
    truncation: Literal["disabled", "auto"] = "disabled"
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] = []

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns for a chat template."""
        turns = list[dict[str, Any]]()
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        for turn in (item.turn for item in self.input if item is not None):
            is_call = "tool_calls" in turn and not turn["content"]
            if is_call and turns and turns[-1]["role"] == "assistant":  # one turn has all calls
                turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
        return turns

    @property
    def form(self) -> ResponseFormat:
        """The form of the answer."""
        return ResponseFormat(type=self.text.format.type, json_schema=self.text.format)

    @property
    def paths(self) -> dict[str, str]:
        """The fields in which the request gives the options of the engine, and the prompt."""
        return super().paths | {"messages": "input", "json_schema": "text.format.schema"}


# -- responses ----------------------------------------------------------------------------------


class Error(BaseModel):
    """An error in OpenAI's form. param: the wrong field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of a response with another status than 2xx."""

    error: Error


class PromptDetails(BaseModel):
    """cached_tokens: prompt tokens that were not computed for this answer."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """tokens_per_step: tokens after the first, per step of the model; 0 with one token."""

    tokens_per_step: float


class Usage(BaseModel):
    """Tokens of prompt and answer, cached ones included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class OpenAIAnswer(BaseModel):
    """An answer in the form of OpenAI's API, whose reference has its other fields.

    samkv: the report of the answer. completion_tokens_details of the usage, output_tokens_details
    in ``/v1/responses``, have a field of ours: ``tokens_per_step``, as in `Usage`.
    """

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion", "text_completion", "response"]
    model: str
    usage: dict[str, Any]
    samkv: Report


def with_stream(model: type[BaseModel], events: str) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with a body, or with a stream of events.

    events: describes their data.
    """
    text = {"type": "string", "description": events}
    return {
        200: {
            "model": model,
            "description": "The answer, or the events of a stream.",
            "content": {"text/event-stream": {"schema": text}},
        }
    }
