"""The LLM: LlamaIndex's interface of an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

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
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BeforeValidator
from pydantic.json_schema import SkipJsonSchema

from llama_index.llms.samkv.answers import AnsweringLLM
from llama_index.llms.samkv.conversion import (
    as_in_repr,
    checked_outputs_to_remove,
    rendered,
    to_achats,
    to_chat,
    to_chats,
    to_turns,
    to_wrapper,
    with_system_prompt,
)
from llama_index.llms.samkv.description import WrittenLLM
from llama_index.llms.samkv.retrievals import expect_retrieved
from llama_index.llms.samkv.structured import StructuredPredictions
from llama_index.llms.samkv.tools import ToolCallingLLM
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.stream import AnswerStream, off_loop
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.frameworks.call_options import (
    DEFAULT_MAX_NEW_TOKENS,
    checked_generate_kwargs,
    to_options,
)
from samkv_integrations.frameworks.engine_args import ModelSource, check_fits
from samkv_integrations.frameworks.tool_calls import takes_tools
from samkv_integrations.prompt.reader import Prompt
from samkv_integrations.prompt.text import check_text

_Wrapper = Annotated[str | PromptTemplate | None, BeforeValidator(to_wrapper)]


class SamKVLLM(AnsweringLLM, WrittenLLM, StructuredPredictions, ToolCallingLLM):
    r"""A local Hugging Face model that answers from the KV caches of the chunks in its prompt.

    Arguments are called what `HuggingFaceLLM` calls them. Texts of cached chunks in a prompt are
    answered from their caches, and so are handles, which `SamKVPostprocessor` can put there.
    Everything else is computed as usual.

    Arguments are the fields of this class and of `LocalLLM`, and those of every LLM of LlamaIndex:
    ``system_prompt``, ``messages_to_prompt``, ``completion_to_prompt``, ``callback_manager``, ...
    Every call takes what generate_kwargs may hold, and max_tokens (or max_new_tokens).

    ``raw["samkv"]`` of a response, or `last_report`, says what the answer cost.

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
    """A loaded model of transformers, for which model_name is a label then; None once the engine
    has it."""
    tokenizer: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """A loaded tokenizer of transformers; a ``model`` needs it, or tokenizer_name."""
    tokenizer_outputs_to_remove: Annotated[
        list[str] | None, BeforeValidator(checked_outputs_to_remove)
    ] = Field(default=None, exclude=True, repr=False)
    """Accepted so that arguments of `HuggingFaceLLM` fit: a model is given token ids alone."""
    context_window: int | None = Field(default=None, strict=True)
    """Tokens that LlamaIndex may fill with a prompt and its answer; None for the model's. What it
    gets wrong is computed all the same, as long as the model's own window has room."""
    max_new_tokens: int = Field(default=DEFAULT_MAX_NEW_TOKENS, strict=True)
    """Most tokens of an answer."""
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of every call: ``do_sample``, ``stop``, ``timeout`` and those of sampling."""
    query_wrapper_prompt: _Wrapper = None  # type: ignore[assignment]  # upstream's is no string
    """A template with ``{query_str}`` around the prompt of a completion."""
    is_chat_model: bool | None = None
    """Whether LlamaIndex shall prompt with messages; None if there is a template, and neither
    query_wrapper_prompt nor completion_to_prompt to prompt otherwise."""
    cache_retrieved: bool = False
    """Whether nodes that any retriever of this process finds are cached when a prompt first holds
    them; for an index that was made without `SamKVCacheTransform`."""

    _n_added: int = PrivateAttr(default=0)
    _takes_tools: bool = PrivateAttr(default=False)

    def _check(self) -> None:
        self.generate_kwargs = checked_generate_kwargs(self.generate_kwargs, self.max_new_tokens)
        if self.cache_retrieved and (self.on_miss != "compute" or not self.match_text):
            raise InvalidOption(
                f"cache_retrieved=True with on_miss={self.on_miss!r} and "
                f"match_text={self.match_text}; it finds nodes by their text and computes what is "
                "missing, so leave both out"
            )
        super()._check()

    def _source(self) -> ModelSource:
        return replace(super()._source(), model=self.model, tokenizer=self.tokenizer)

    def _attach(self) -> None:
        super()._attach()
        self.model = self.tokenizer = None  # copies and pickles of the LLM hold neither
        model = self.engine.model
        if self.context_window is None:
            self.context_window = model.context_window
        max_tokens = {"max_new_tokens": self.max_new_tokens}
        check_fits(model, self.context_window, self.stopping_ids, **max_tokens)
        if self.is_chat_model is None:
            is_plain = self.completion_to_prompt is default_completion_to_prompt
            self.is_chat_model = (
                model.has_chat_template and self.query_wrapper_prompt is None and is_plain
            )
        if self.pydantic_program_mode == PydanticProgramMode.DEFAULT:
            self.pydantic_program_mode = PydanticProgramMode.LLM  # see `StructuredPredictions`
        self._n_added, self._takes_tools = self._count_added(), takes_tools(model)
        if self.cache_retrieved:
            expect_retrieved(self.engine)

    @classmethod
    def from_engine(cls, engine: Engine, **kwargs: Any) -> SamKVLLM:  # noqa: ANN401
        """An LLM on an engine that is there already; kwargs as for the class."""
        return cls(engine=engine, **kwargs)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised LLMs and events."""
        return "SamKV_LLM"

    @field_serializer("query_wrapper_prompt")
    def _template(self, wrapper: PromptTemplate | None) -> str | None:
        return None if wrapper is None else wrapper.template

    @property
    def _window(self) -> int:
        assert self.context_window is not None  # the model's, if none was given
        return self.context_window

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model.

        The context window is what it may fill: without what the chat template and the system prompt
        add to a prompt, of which LlamaIndex does not know.
        """
        return LLMMetadata(
            context_window=self._window - self._n_added,
            num_output=self.max_new_tokens,
            is_chat_model=bool(self.is_chat_model),
            model_name=self.model_name,
            is_function_calling_model=bool(self.is_chat_model) and self._takes_tools,
        )

    @property
    def tokenizer_fn(self) -> Callable[[str], list[int]]:
        """A tokenizer for LlamaIndex's `PromptHelper`, which counts what it returns.

        A handle counts as its chunk, and a text as the longer of itself and what `repr` writes of
        it; the numbers in the list mean nothing.
        """
        return self._count

    def _count(self, text: str) -> list[int]:
        return [0] * max(self._n_tokens(form) for form in {text, as_in_repr(text)})

    def _count_added(self) -> int:
        """Tokens that a prompt has beside what LlamaIndex has written of it."""
        written = "THE PROMPT"
        if self.is_chat_model:
            prompt = self._chat_prompt([ChatMessage(role=MessageRole.USER, content=written)])
        else:
            prompt = self._completion_prompt(written, formatted=False)
        added = self.engine.render(prompt).text.replace(written, "", 1)
        n_added = self.engine.count_tokens(added) if added else 0
        if n_added + self.max_new_tokens >= self._window:
            raise InvalidOption(
                f"chat template and system prompt take {n_added} tokens; beside them and "
                f"max_new_tokens={self.max_new_tokens} a context window of {self.context_window} "
                "has no room for a prompt; shorten the system prompt, or ask for fewer tokens"
            )
        return n_added

    # -- completions ------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ANN401
        """The answer to a prompt, which a chat model reads as one user message.

        With ``completion_to_prompt`` or ``query_wrapper_prompt`` it reads what they make of it.

        formatted: whether the prompt is what the model shall read, to the letter.
        """
        return self._whole(self._completion_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> CompletionResponseGen:
        """Like `complete`, delta by delta: ``delta`` is new, ``text`` is all so far.

        Mistakes raise here. The last response has no new text; it carries the complete report.
        """
        return self._deltas(self._run(self._completion_prompt(prompt, formatted), kwargs), kwargs)

    @llm_completion_callback()
    async def acomplete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> CompletionResponse:
        """Like `complete`, off the event loop."""
        return await self._awhole(self._completion_prompt(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> CompletionResponseAsyncGen:
        """Like `stream_complete`, off the event loop."""
        complete = self._completion_prompt(prompt, formatted)
        return self._adeltas(await self._arun(complete, kwargs), kwargs)

    # -- chat -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:  # noqa: ANN401
        """The assistant's next message.

        Prompted with ``messages_to_prompt`` if that was given, else with the model's chat template,
        else (it has none) with LlamaIndex's plain form.
        """
        prompt, use = self._asked(self._chat_prompt(messages), kwargs)
        return to_chat(self._whole(prompt, kwargs), use)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:  # noqa: ANN401
        """Like `chat`, in responses as those of `stream_complete`."""
        prompt, use = self._asked(self._chat_prompt(messages), kwargs)
        return to_chats(self._deltas(self._run(prompt, kwargs), kwargs), use)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:  # noqa: ANN401
        """Like `chat`, off the event loop."""
        prompt, use = self._asked(self._chat_prompt(messages), kwargs)
        return to_chat(await self._awhole(prompt, kwargs), use)

    @llm_chat_callback()
    async def astream_chat(
        self,
        messages: Sequence[ChatMessage],
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResponseAsyncGen:
        """Like `stream_chat`, off the event loop."""
        prompt, use = self._asked(self._chat_prompt(messages), kwargs)
        return to_achats(self._adeltas(await self._arun(prompt, kwargs), kwargs), use)

    # -- the one way to an answer -----------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        check_text("prompt", prompt)
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None  # LlamaIndex puts its default in
        is_plain = self.completion_to_prompt is default_completion_to_prompt
        if self.is_chat_model and is_plain and self.query_wrapper_prompt is None:
            return self._chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        if is_plain and self.query_wrapper_prompt is None:
            return self._extend_prompt(prompt)
        made = self.completion_to_prompt
        render = self.engine.model.special_tokens.rendered
        return render(prompt, lambda hidden: self._extend_prompt(made(hidden)))

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
        self._announce(prompt)
        with _saying_how_llama_index_counts():
            return self.engine.stream(prompt, self._chunks, **options)

    async def _arun(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        options = self._options(given)
        await off_loop(self._announce, prompt)
        with _saying_how_llama_index_counts():
            return await self.engine.astream(prompt, self._chunks, **options)

    @property
    def _chunks(self) -> tuple[str, ...] | None:
        return None if self.match_text else ()

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        always = {"timeout": self.timeout, **self.generate_kwargs}
        return {
            "method": self.method,
            "eviction": self.eviction,
            "on_miss": self.on_miss,
            "stop_ids": self.stopping_ids,
            **to_options(given, always, self.max_new_tokens),
        }

    def _announce(self, prompt: Prompt) -> None:
        if self.cache_retrieved:  # for later prompts, even where `auto` computes this one in full
            self.engine.announce(self.engine.found_in(prompt), "compute")


@contextmanager
def _saying_how_llama_index_counts() -> Iterator[None]:
    try:
        yield
    except PromptTooLong as error:
        raise PromptTooLong(
            f"{error}. If LlamaIndex packed the prompt: it counts with another tokenizer, "
            "unless told Settings.tokenizer = llm.tokenizer_fn"
        ) from error
