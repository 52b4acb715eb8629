"""The LLM: LlamaIndex's interface of an `Engine`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, field_serializer
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BeforeValidator
from pydantic.json_schema import SkipJsonSchema

from llama_index.llms.samkv.conversion import (
    as_in_repr,
    rendered,
    to_chat,
    to_completion,
    to_turns,
    to_wrapper,
    with_system_prompt,
)
from samkv_integrations import AnswerStream
from samkv_integrations.errors import AnswerCut, Given, InvalidOption, PromptTooLong
from samkv_integrations.frameworks.engine_args import MADE_BY, ModelSource
from samkv_integrations.frameworks.local_llm import (
    DEFAULT_MAX_NEW_TOKENS,
    GENERATE_KWARGS,
    LocalLLM,
    checked_generate_kwargs,
)
from samkv_integrations.frameworks.tool_calls import (
    ShownText,
    ToolAnswer,
    ToolUse,
    arguments_of,
    parts_of,
    takes_tools,
    with_tools,
)
from samkv_integrations.option import check_text
from samkv_integrations.prompt.reader import Prompt

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

_Wrapper = Annotated[str | PromptTemplate | None, BeforeValidator(to_wrapper)]
_NEEDS_ENGINE = "needs_engine"
"""Key in `to_dict` of an LLM that was made on a given engine, which a dictionary cannot hold."""
_T = TypeVar("_T")
_Made = Callable[[CompletionResponse, ToolAnswer], _T]


def _with_schema(name: str) -> Callable[..., Any]:
    """LlamaIndex's method ``name``, but each answer conforms to the schema of its class."""
    method = getattr(FunctionCallingLLM, name)

    @wraps(method)
    def predict(
        self: SamKVLLM, output_cls: type[BaseModel], prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any,
    ) -> Any:  # noqa: ANN401  # fmt: skip
        given = llm_kwargs or {}
        if self.pydantic_program_mode == PydanticProgramMode.LLM:
            given = {"json_schema": output_cls.model_json_schema(), **given}
        return method(self, output_cls, prompt, given, **prompt_args)

    return predict


class SamKVLLM(LocalLLM, FunctionCallingLLM):
    r"""A local Hugging Face model that reuses the KV caches of the chunks in its prompt.

    Texts of cached chunks in a prompt are loaded from their caches, and so are handles, which
    `SamKVPostprocessor` can put there. Everything else is computed as usual.

    Arguments have the names of `HuggingFaceLLM`. They are the fields of this class and of
    `LocalLLM`, and those of every LLM of LlamaIndex: ``system_prompt``, ``messages_to_prompt``,
    ``completion_to_prompt``, ``callback_manager``, ... A call takes the options of generate_kwargs,
    and max_tokens (or max_new_tokens).

    ``raw["samkv"]`` of a response, and `last_report`, hold the report of the answer.

    Instantiate:
        ```python
        from llama_index.llms.samkv import SamKVLLM

        llm = SamKVLLM(model_name="builtin", max_new_tokens=16)  # or a hub id, or a folder
        ```

    Use:
        ```python
        document = "[Tobias Trulman] Tobias Trulman was born in Flevport."
        llm.engine.cache_chunks([document])  # SamKVCacheTransform does it for nodes
        prompt = f"Documents:\n\n{document}\n\nQuestion: Where was Tobias Trulman born?"
        print(llm.complete(prompt), llm.last_report)
        ```

    Stream:
        ```python
        for response in llm.stream_complete(prompt):
            print(response.delta, end="")
        ```

    Async:
        ```python
        response = await llm.acomplete(prompt)
        async for response in await llm.astream_complete(prompt):
            print(response.delta, end="")
        ```

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """A loaded model of transformers, whose label is model_name; or, as a string, another name of
    model_name, as is model_path. None once the engine has it."""
    if TYPE_CHECKING:  # type checkers know it as an argument
        model_path: str = ""
    tokenizer: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """A loaded tokenizer of transformers; ``model`` needs it, or tokenizer_name."""
    tokenizer_outputs_to_remove: list[str] | None = Field(default=None, exclude=True, repr=False)
    """Accepted for compatibility with `HuggingFaceLLM`; a model here gets token ids only."""
    context_window: int | None = Field(default=None, strict=True)
    """Tokens that LlamaIndex may fill with a prompt and its answer; None for the model's. A prompt
    that exceeds it is computed if the model's own window has room."""
    max_new_tokens: int = Field(default=DEFAULT_MAX_NEW_TOKENS, strict=True)
    """Most tokens of an answer."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of every call: ``do_sample``, ``stop``, ``timeout`` and those of sampling."""
    query_wrapper_prompt: _Wrapper = None  # type: ignore[assignment]  # upstream's is no string
    """A template with ``{query_str}`` around the prompt of a completion."""
    is_chat_model: bool | None = None
    """Whether LlamaIndex prompts with messages; None: if there is a chat template, and neither
    query_wrapper_prompt nor completion_to_prompt."""

    _elsewhere: ClassVar[Mapping[str, str]] = {
        **LocalLLM._elsewhere,
        **{
            name: f"give generate_kwargs={{{name!r}: ...}}, or {name} to a call"
            for name in GENERATE_KWARGS
        },
        "max_tokens": "give max_new_tokens",
    }
    _n_added: int = PrivateAttr(default=0)
    _takes_tools: bool = PrivateAttr(default=False)
    _needs_engine: bool = PrivateAttr(default=False)

    @classmethod
    def _arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(given)
        for synonym in ("model", "model_path"):  # other LLMs have these names for model_name
            if isinstance(found.get(synonym), str | os.PathLike):
                name = os.fspath(found.pop(synonym))
                if str(found.setdefault("model_name", name)) != name:
                    raise InvalidOption(
                        Given(synonym, name),
                        f" and model_name={found['model_name']!r} are the same option; give one",
                    )
        return super()._arguments(found)

    def _check(self) -> None:
        self.generate_kwargs = checked_generate_kwargs(self.generate_kwargs, self.max_new_tokens)
        super()._check()

    def _source(self) -> ModelSource:
        given = {"model": self.model, "tokenizer": self.tokenizer}
        return super()._source().model_copy(update=given)

    def _attach(self) -> None:
        self._needs_engine = self.engine is not None
        super()._attach()
        self.model = self.tokenizer = None  # copies and pickles of the LLM hold neither
        model = self.engine.model
        if self.context_window is None:
            self.context_window = model.context_window
        self._require_room(self.context_window, max_new_tokens=self.max_new_tokens)
        if self.is_chat_model is None:
            is_plain = self.completion_to_prompt is default_completion_to_prompt
            self.is_chat_model = (
                model.has_chat_template and self.query_wrapper_prompt is None and is_plain
            )
        if self.pydantic_program_mode == PydanticProgramMode.DEFAULT:
            self.pydantic_program_mode = PydanticProgramMode.LLM  # see `structured_predict`
        self._n_added, self._takes_tools = self._count_added(), takes_tools(model)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised LLMs and events."""
        return "SamKV_LLM"

    @field_serializer("query_wrapper_prompt")
    def _template(self, wrapper: PromptTemplate | None) -> str | None:
        return None if wrapper is None else wrapper.template

    @property
    def metadata(self) -> LLMMetadata:
        """The metadata that LlamaIndex reads.

        The context window excludes the tokens that the chat template and the system prompt add,
        because LlamaIndex does not count them.
        """
        return LLMMetadata(
            context_window=(self.context_window or 0) - self._n_added,
            num_output=self.max_new_tokens,
            is_chat_model=bool(self.is_chat_model),
            model_name=self.model_name,
            is_function_calling_model=bool(self.is_chat_model) and self._takes_tools,
        )

    def tokenizer_fn(self, text: str) -> list[int]:
        """A tokenizer for LlamaIndex's `PromptHelper`, which reads only the length of the list.

        A handle counts as its chunk, a text as the longer of itself and its `repr`.
        """
        return [0] * max(self._n_tokens(form) for form in {text, as_in_repr(text)})

    def _count_added(self) -> int:
        """Tokens that the chat template and the system prompt add to a prompt."""
        written = "THE PROMPT"
        if self.is_chat_model:
            prompt = self._chat_prompt([ChatMessage(role=MessageRole.USER, content=written)])
        else:
            prompt = self._completion_prompt(written, formatted=False)
        added = self.engine.render(prompt).text.replace(written, "", 1)
        n_added = self.engine.count_tokens(added) if added else 0
        if n_added + self.max_new_tokens >= (self.context_window or 0):
            raise InvalidOption(
                f"chat template and system prompt take {n_added} tokens; beside them and "
                f"max_new_tokens={self.max_new_tokens} a context window of {self.context_window} "
                "has no room for a prompt; shorten the system prompt, or ask for fewer tokens"
            )
        return n_added

    # -- as a dictionary --------------------------------------------------------------------

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments as a dictionary. kwargs: those of LlamaIndex.

        For an LLM on a given engine it has ``needs_engine``, and `from_dict` needs an engine.
        """
        data: dict[str, Any] = super().to_dict(**kwargs)
        return data | ({_NEEDS_ENGINE: True} if self._needs_engine else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """The LLM that `to_dict` described, loaded by its name.

        kwargs: arguments that override ``data``; with ``engine``, or ``model`` and ``tokenizer``,
        nothing is loaded. ``data`` holds no functions, parsers and hub tokens: give them again.

        Raises InvalidOption if ``data`` has ``needs_engine``, and no ``engine`` is given.
        """
        data = dict(data)
        if data.pop(_NEEDS_ENGINE, False) and kwargs.get("engine") is None:
            raise InvalidOption(
                "the LLM was made on an engine, which a dictionary cannot hold, and another engine "
                "might use other caches or answer differently; make that engine again, give it to "
                f"from_dict as engine=, or leave {_NEEDS_ENGINE!r} out of the dictionary"
            )
        for live, names in MADE_BY.items():  # arguments for loading it have no effect
            if kwargs.get(live) is not None:
                data = {name: value for name, value in data.items() if name not in names}
        llm: Self = super().from_dict(data, **kwargs)
        return llm

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex would call the constructor, and that would load the model again
        BaseModel.__setstate__(self, state)

    @field_serializer("model_kwargs", "tokenizer_kwargs")
    def _without_secrets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name != "token"}

    # -- completions ------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to a prompt, which becomes one user message of a chat model.

        ``completion_to_prompt`` and ``query_wrapper_prompt`` take the place of the chat template.

        formatted: whether the model reads the prompt unchanged.
        """
        return self._whole(self._completion_prompt(prompt, formatted), kwargs, _response)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Like `complete`, as a stream: ``delta`` is new, ``text`` is everything so far.

        Errors are raised here. The last response has an empty delta and the complete report.
        """
        stream = self._run(self._completion_prompt(prompt, formatted), kwargs)
        return self._deltas(stream, kwargs, _response)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Like `complete`, off the event loop."""
        return await self._awhole(self._completion_prompt(prompt, formatted), kwargs, _response)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, off the event loop."""
        stream = await self._arun(self._completion_prompt(prompt, formatted), kwargs)
        return self._adeltas(stream, kwargs, _response)

    # -- chat -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The assistant's next message.

        The prompt is made by ``messages_to_prompt`` if it was given, else by the model's chat
        template, else by LlamaIndex's default.
        """
        prompt, use = with_tools(self.engine.model, self._chat_prompt(messages), kwargs)
        return self._whole(prompt, kwargs, to_chat, use)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Like `chat`, but streams: each response has the new text (``delta``) and all so far."""
        prompt, use = with_tools(self.engine.model, self._chat_prompt(messages), kwargs)
        return self._deltas(self._run(prompt, kwargs), kwargs, to_chat, use)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Like `chat`, off the event loop."""
        prompt, use = with_tools(self.engine.model, self._chat_prompt(messages), kwargs)
        return await self._awhole(prompt, kwargs, to_chat, use)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Like `stream_chat`, off the event loop."""
        prompt, use = with_tools(self.engine.model, self._chat_prompt(messages), kwargs)
        stream = await self._arun(prompt, kwargs)
        return self._adeltas(stream, kwargs, to_chat, use)

    # -- objects ----------------------------------------------------------------------------

    structured_predict = _with_schema("structured_predict")
    """An object of ``output_cls``; llm_kwargs: options of the call.

    LlamaIndex writes the schema into the prompt, and each token of the answer conforms to it. With
    ``pydantic_program_mode`` ``function`` the answer is a call of a tool instead.

    Raises:
        AnswerCut: the answer reached max_new_tokens before it was complete.
        InvalidOption: the schema of the class cannot be decided token by token.
        MissingExtra: llguidance is not installed.
    """
    astructured_predict = _with_schema("astructured_predict")
    """Like `structured_predict`, off the event loop."""
    _structured_stream_call = _with_schema("_structured_stream_call")
    _structured_astream_call = _with_schema("_structured_astream_call")

    # -- tools ------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        return {
            "messages": messages,
            # a description longer than OpenAI's limit is no problem here
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("any" if tool_required else None),
            **kwargs,
        }

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """The response; without parallel calls it keeps only its first call."""
        others = [] if allow_parallel_tool_calls else _calls_of(response)[1:]
        blocks = response.message.blocks
        response.message.blocks = [block for block in blocks if block not in others]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of an answer. Raises InvalidOption if there are none, unless told otherwise."""
        found = [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=arguments_of(block.tool_kwargs),
            )
            for block in _calls_of(response)
        ]
        if not found and error_on_no_tool_call:
            raise InvalidOption(
                f"the model called no tool; it answered {response.message.content!r}; use "
                "tool_required=True, or error_on_no_tool_call=False"
            )
        return found

    # -- calls of the engine -----------------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        check_text("prompt", prompt)
        if formatted:
            return prompt
        made = self.completion_to_prompt
        assert made is not None  # LlamaIndex puts its default in
        if made is not default_completion_to_prompt or self.query_wrapper_prompt is not None:
            render = self.engine.model.special_tokens.rendered
            return render(prompt, lambda hidden: self._extend_prompt(made(hidden)))
        if self.is_chat_model:
            return self._chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        return self._extend_prompt(prompt)

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        assert self.messages_to_prompt is not None  # LlamaIndex puts its default in
        complete = with_system_prompt(messages, self.system_prompt)
        turns = to_turns(complete)
        is_custom = self.messages_to_prompt is not plain_messages_to_prompt
        if is_custom or not self.engine.model.has_chat_template:
            return rendered(complete, self.messages_to_prompt, self.engine.model)
        return turns

    def _run(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        options = self._options(given)
        with _saying_how_llama_index_counts():
            return self.engine.stream(prompt, **options)

    async def _arun(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        options = self._options(given)
        with _saying_how_llama_index_counts():
            return await self.engine.astream(prompt, **options)

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return self._options_of(given, self.generate_kwargs, self.max_new_tokens)

    def _whole(
        self, prompt: Prompt, given: dict[str, Any], made: _Made[_T], use: ToolUse | None = None
    ) -> _T:
        stream = self._run(prompt, given)
        text = "".join(stream)
        self._end(stream, given)
        return made(to_completion(text, stream.report), parts_of(text, use))

    async def _awhole(
        self, prompt: Prompt, given: dict[str, Any], made: _Made[_T], use: ToolUse | None = None
    ) -> _T:
        async with await self._arun(prompt, given) as stream:
            text = "".join([delta async for delta in stream])
        self._end(stream, given)
        return made(to_completion(text, stream.report), parts_of(text, use))

    def _deltas(
        self, stream: AnswerStream, given: Mapping[str, Any], made: _Made[_T],
        use: ToolUse | None = None,
    ) -> Generator[_T]:  # fmt: skip
        """The result of ``made`` for each response of a stream and the answer's parts so far."""
        shown = ShownText(use)
        with closing(stream):
            for piece in stream:
                if delta := shown.push(piece):
                    response = to_completion(shown.text, stream.report, delta)
                    yield made(response, ToolAnswer(shown.text))
        self._end(stream, given)
        yield made(*_last(stream, shown))

    async def _adeltas(
        self, stream: AnswerStream, given: Mapping[str, Any], made: _Made[_T],
        use: ToolUse | None = None,
    ) -> AsyncGenerator[_T]:  # fmt: skip
        """Like `_deltas`, for a task."""
        shown = ShownText(use)
        async with stream:
            async for piece in stream:
                if delta := shown.push(piece):
                    response = to_completion(shown.text, stream.report, delta)
                    yield made(response, ToolAnswer(shown.text))
        self._end(stream, given)
        yield made(*_last(stream, shown))

    def _end(self, stream: AnswerStream, given: Mapping[str, Any]) -> None:
        """Note the report. Raises AnswerCut for an object that was cut."""
        self._last_report = stream.report
        if given.get("json_schema") is not None and stream.finish_reason == "length":
            raise AnswerCut(
                f"the answer was cut after {stream.report.completion_tokens} tokens, before its "
                "JSON was complete; give more max_new_tokens, or a schema with bounds (maxLength, "
                "maxItems)"
            )


def _calls_of(response: ChatResponse) -> list[ToolCallBlock]:
    return [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


def _response(response: CompletionResponse, parts: ToolAnswer) -> CompletionResponse:
    """The response of a completion, which has no tools."""
    return response


def _last(stream: AnswerStream, shown: ShownText) -> tuple[CompletionResponse, ToolAnswer]:
    _, found = shown.rest()
    delta = found.full_text[len(shown.text) :]
    return to_completion(found.full_text, stream.report, delta), found


@contextmanager
def _saying_how_llama_index_counts() -> Iterator[None]:
    try:
        yield
    except PromptTooLong as error:
        raise PromptTooLong(
            f"{error}. If LlamaIndex packed the prompt: it counts with another tokenizer, "
            "unless told Settings.tokenizer = llm.tokenizer_fn"
        ) from error
