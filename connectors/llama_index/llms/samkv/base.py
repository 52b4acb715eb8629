"""The LLM: LlamaIndex's interface of an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

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
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, field_serializer
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import (
    CompletionToPromptType,
    MessagesToPromptType,
    default_completion_to_prompt,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import BaseOutputParser, PydanticProgramMode

from llama_index.llms.samkv.conversion import (
    check_outputs_to_remove,
    to_chat,
    to_chats,
    to_completion,
    to_turns,
    to_wrapper,
    with_system_prompt,
)
from llama_index.llms.samkv.retrievals import expect_retrieved
from samkv_integrations.engine.engine import Engine, Prompt
from samkv_integrations.engine.report import Report
from samkv_integrations.engine.stream import AnswerStream
from samkv_integrations.errors import InvalidOption, PromptTooLong
from samkv_integrations.frameworks.call_options import checked_generate_kwargs, to_options
from samkv_integrations.frameworks.chat import count_tokens
from samkv_integrations.frameworks.engine_args import (
    MADE_BY,
    check_choices,
    check_fits,
    engine_of,
    folder_of,
)
from samkv_integrations.frameworks.engine_ref import EngineRef
from samkv_integrations.frameworks.pieces import off_loop
from samkv_integrations.prompt.resolve import OnMiss


class SamKVLLM(CustomLLM):
    """A local Hugging Face model that answers from the KV caches of the chunks in its prompt.

    Arguments are called what `HuggingFaceLLM` calls them. Texts of cached chunks in a prompt are
    answered from their caches, and so are handles, which `SamKVPostprocessor` can put there.
    Everything else is computed as usual.

    Args:
        model_name: a hub id, a local folder, or ``"builtin"``; beside ``model`` only a label.
        tokenizer_name: hub id or folder of the tokenizer, if it is not the model's own.
        model, tokenizer: loaded ones of transformers; ``model`` needs ``tokenizer`` or its name.
        context_window: most tokens of a prompt and its answer; None for the model's.
        max_new_tokens: most tokens of an answer.
        device_map: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; None for ``"cpu"``.
        dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"`` for the checkpoint's; float32 where this
            processor computes bfloat16 slowly.
        model_kwargs, tokenizer_kwargs: passed on to ``from_pretrained``: ``revision``, ``token``,
            ``cache_dir``, ``local_files_only`` and so on.
        tokenizer_outputs_to_remove: accepted as it is: a model is given token ids alone.
        stopping_ids: token ids that end an answer, beside the model's own.
        generate_kwargs: ``do_sample``, ``temperature``, ``top_p``, ``top_k``,
            ``repetition_penalty``, ``seed`` and ``stop`` of every call.
        system_prompt: put before every prompt, whatever method is called.
        query_wrapper_prompt: a template with ``{query_str}`` around the prompt of a completion.
        messages_to_prompt: makes the prompt of chat messages, in place of the chat template.
        completion_to_prompt: makes the prompt of a completion.
        is_chat_model: whether LlamaIndex shall prompt with messages; None if there is a template,
            and neither query_wrapper_prompt nor completion_to_prompt to prompt otherwise.
        kv_dir: folder of the chunk caches; None keeps them in memory.
        store_bits: bits of the numbers in chunk caches: 4, 8, or 16 for the model's dtype; None for
            the engine's, which are 4 by default.
        engine: an engine to share, in place of loading ``model_name`` over ``kv_dir``.
        method: how to answer, a name out of ``METHODS``; None for the engine's.
        eviction: which rows an answer goes on with after its first token, a name out of
            ``EVICTIONS`` or ``"none"`` for all; None for the engine's.
        match_text: whether texts of cached chunks are found in prompts; else handles alone are.
        cache_retrieved: whether nodes that any retriever of this process finds are cached when a
            prompt first holds them; for an index that was made without `SamKVCacheTransform`.
        on_miss: for a chunk without a usable cache: ``"compute"`` (as a chunk, and keep it; with
            ``auto`` only where that does not take longer than full prefill), ``"text"`` (compute
            its text, this once) or ``"error"``.

    Every call takes what generate_kwargs may hold, and max_tokens (or max_new_tokens).
    ``raw["samkv"]`` of a response, or `last_report`, says what the answer cost.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_name: str = Field(description="Hub id or folder of the model, or a label.")
    tokenizer_name: str | None = Field(description="Where the tokenizer is, if not with the model.")
    context_window: int = Field(description="Tokens that prompts are packed for.")
    max_new_tokens: int = Field(description="Most tokens of an answer.")
    device_map: str = Field(description="Where the model runs.")
    dtype: str = Field(description="Precision of weights and caches.")
    model_kwargs: dict[str, Any] = Field(description="For loading the model.", repr=False)
    tokenizer_kwargs: dict[str, Any] = Field(description="For loading the tokenizer.", repr=False)
    stopping_ids: list[int] = Field(description="Token ids that end an answer.")
    generate_kwargs: dict[str, Any] = Field(description="Options of every call.")
    query_wrapper_prompt: PromptTemplate | None = Field(description="Around every completion.")
    is_chat_model: bool = Field(description="Whether LlamaIndex prompts with messages.")
    kv_dir: str | None = Field(description="Folder of the chunk caches, None for memory.")
    store_bits: int = Field(description="Bits of the numbers in chunk caches.")
    method: str | None = Field(description="How to answer, None for the engine's method.")
    eviction: str | None = Field(description="Rows to evict, None for the engine's choice.")
    match_text: bool = Field(description="Whether texts of cached chunks are found in prompts.")
    cache_retrieved: bool = Field(description="Whether retrieved nodes are cached when needed.")
    on_miss: OnMiss = Field(description="What to do for a chunk without a usable cache.")

    _engine: EngineRef = PrivateAttr()
    _n_added: int = PrivateAttr(default=0)
    _last_report: Report | None = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        model_name: str | None = None,
        tokenizer_name: str | None = None,
        model: Any = None,  # noqa: ANN401
        tokenizer: Any = None,  # noqa: ANN401
        context_window: int | None = None,
        max_new_tokens: int = 256,
        device_map: str | None = "auto",
        dtype: str = "auto",
        model_kwargs: dict[str, Any] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        tokenizer_outputs_to_remove: list[str] | None = None,
        stopping_ids: list[int] | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        query_wrapper_prompt: str | PromptTemplate | None = None,
        messages_to_prompt: MessagesToPromptType | None = None,
        completion_to_prompt: CompletionToPromptType | None = None,
        is_chat_model: bool | None = None,
        callback_manager: CallbackManager | None = None,
        output_parser: BaseOutputParser | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
        kv_dir: str | Path | None = None,
        store_bits: int | None = None,
        engine: Engine | None = None,
        method: str | None = None,
        eviction: str | None = None,
        match_text: bool = True,
        cache_retrieved: bool = False,
        on_miss: OnMiss = "compute",
    ) -> None:
        # what can be wrong without a model first: loading one takes its time
        options = checked_generate_kwargs(generate_kwargs or {}, max_new_tokens)
        wrapper = to_wrapper(query_wrapper_prompt)
        check_outputs_to_remove(tokenizer_outputs_to_remove or ())
        if on_miss not in get_args(OnMiss):
            raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
        if cache_retrieved and (on_miss != "compute" or not match_text):
            raise InvalidOption(
                f"cache_retrieved=True with on_miss={on_miss!r} and match_text={match_text}; it "
                "finds nodes by their text and computes what is missing, so leave both out"
            )
        check_choices(method, eviction, store_bits)
        engine = engine_of(
            engine=engine,
            model=model,
            tokenizer=tokenizer,
            model_name=model_name,
            tokenizer_name=tokenizer_name,
            device_map=device_map or "cpu",
            dtype=dtype,
            model_kwargs=model_kwargs or {},
            tokenizer_kwargs=tokenizer_kwargs or {},
            kv_dir=kv_dir,
            store_bits=store_bits,
        )
        name, window = engine.model.name, engine.model.context_window
        if context_window is None:
            context_window = window
        if not 0 < context_window <= window:
            raise InvalidOption(
                f"context_window={context_window}; {name!r} has {window}, give at most that"
            )
        check_fits(engine.model, context_window, stopping_ids or (), max_new_tokens=max_new_tokens)
        if is_chat_model is None:
            is_chat_model = (
                engine.model.has_chat_template and wrapper is None and completion_to_prompt is None
            )
        super().__init__(
            model_name=name,
            tokenizer_name=tokenizer_name,
            context_window=context_window,
            max_new_tokens=max_new_tokens,
            device_map=device_map or "cpu",
            dtype=dtype,
            model_kwargs=dict(model_kwargs or {}),
            tokenizer_kwargs=dict(tokenizer_kwargs or {}),
            stopping_ids=list(stopping_ids or ()),
            generate_kwargs=options,
            system_prompt=system_prompt,
            query_wrapper_prompt=wrapper,
            messages_to_prompt=messages_to_prompt,
            completion_to_prompt=completion_to_prompt,
            is_chat_model=is_chat_model,
            callback_manager=callback_manager or CallbackManager([]),
            output_parser=output_parser,
            pydantic_program_mode=pydantic_program_mode,
            kv_dir=folder_of(engine),
            store_bits=engine.store_bits,
            method=method,
            eviction=eviction,
            match_text=match_text,
            cache_retrieved=cache_retrieved,
            on_miss=on_miss,
        )
        self._engine = EngineRef(engine)
        self._n_added = self._count_added()
        if cache_retrieved:
            expect_retrieved(engine)

    @classmethod
    def from_engine(cls, engine: Engine, **kwargs: Any) -> SamKVLLM:  # noqa: ANN401
        """An LLM on an engine that is there already; kwargs as for the class."""
        return cls(engine=engine, **kwargs)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised LLMs and events."""
        return "SamKV_LLM"

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> SamKVLLM:  # noqa: ANN401
        """The LLM that `to_dict` described, loaded anew by its name.

        kwargs: arguments that win over ``data``; with ``engine``, or ``model`` and ``tokenizer``,
        nothing is loaded. Functions, parsers and hub tokens are not in ``data``: give them again.
        """
        spared = {
            name
            for live, names in MADE_BY.items()
            if kwargs.get(live) is not None
            for name in names
            if name in data and name not in kwargs
        }
        llm: SamKVLLM = super().from_dict(
            {name: value for name, value in data.items() if name not in spared}, **kwargs
        )
        for name in spared:  # the next to be loaded from a dict needs them
            setattr(llm, name, data[name])
        return llm

    def __setstate__(self, state: dict[str, Any]) -> None:
        # LlamaIndex would call the constructor, and that would load the model again
        BaseModel.__setstate__(self, state)

    @field_serializer("model_kwargs", "tokenizer_kwargs")
    def _without_secrets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name != "token"}

    @field_serializer("query_wrapper_prompt")
    def _template(self, wrapper: PromptTemplate | None) -> str | None:
        return None if wrapper is None else wrapper.template

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model.

        The context window is what it may fill: without what the chat template and the system prompt
        add to a prompt, of which LlamaIndex does not know.
        """
        return LLMMetadata(
            context_window=self.context_window - self._n_added,
            num_output=self.max_new_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.model_name,
        )

    @property
    def engine(self) -> Engine:
        """The engine, which copies of this LLM share."""
        return self._engine.engine

    @property
    def last_report(self) -> Report | None:
        """What the answer that was finished last cost; None before the first."""
        return self._last_report

    @property
    def tokenizer_fn(self) -> Callable[[str], list[int]]:
        """A tokenizer for LlamaIndex's `PromptHelper`, which counts what it returns.

        A handle counts as its chunk; the numbers in the list mean nothing. It raises HandleError
        where a splitter would cut a handle in two.
        """
        return self._count

    def _count(self, text: str) -> list[int]:
        return [0] * count_tokens(self.engine, text)

    def _count_added(self) -> int:
        """Tokens that a prompt has beside what LlamaIndex has written of it."""
        written = "THE PROMPT"
        if self.is_chat_model:
            prompt = self._chat_prompt([ChatMessage(role=MessageRole.USER, content=written)])
        else:
            prompt = self._completion_prompt(written, formatted=False)
        text = prompt if isinstance(prompt, str) else self.engine.model.render_chat(prompt)
        added = text.replace(written, "", 1)
        n_added = self.engine.count_tokens(added) if added else 0
        if n_added + self.max_new_tokens >= self.context_window:
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
        """Like `complete`, piece by piece: ``delta`` is new, ``text`` is all so far.

        Mistakes raise here. The last piece has no new text; it carries the complete report.
        """
        return self._pieces(self._run(self._completion_prompt(prompt, formatted), kwargs))

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
        return off_loop(self._pieces(await asyncio.to_thread(self._run, complete, kwargs)))

    # -- chat -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:  # noqa: ANN401
        """The assistant's next message.

        Prompted with ``messages_to_prompt`` if that was given, else with the model's chat template,
        else (it has none) with LlamaIndex's plain form.
        """
        return to_chat(self._whole(self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:  # noqa: ANN401
        """Like `chat`, in pieces as those of `stream_complete`."""
        return to_chats(self._pieces(self._run(self._chat_prompt(messages), kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:  # noqa: ANN401
        """Like `chat`, off the event loop."""
        return to_chat(await self._awhole(self._chat_prompt(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(
        self,
        messages: Sequence[ChatMessage],
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResponseAsyncGen:
        """Like `stream_chat`, off the event loop."""
        prompt = self._chat_prompt(messages)
        pieces = self._pieces(await asyncio.to_thread(self._run, prompt, kwargs))
        return off_loop(to_chats(pieces))

    # -- the one way to an answer -----------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None  # LlamaIndex puts its default in
        is_plain = self.completion_to_prompt is default_completion_to_prompt
        if self.is_chat_model and is_plain and self.query_wrapper_prompt is None:
            return self._chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        return self._extend_prompt(self.completion_to_prompt(prompt))

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        assert self.messages_to_prompt is not None  # LlamaIndex puts its default in
        complete = with_system_prompt(messages, self.system_prompt)
        turns = to_turns(complete)
        is_custom = self.messages_to_prompt is not plain_messages_to_prompt
        if is_custom or not self.engine.model.has_chat_template:
            return self.messages_to_prompt(complete)
        return turns

    def _run(self, prompt: Prompt, given: dict[str, Any]) -> AnswerStream:
        options = to_options(given, self.generate_kwargs, self.max_new_tokens)
        if self.cache_retrieved:  # for later prompts, even where `auto` computes this one in full
            text = prompt if isinstance(prompt, str) else self.engine.model.render_chat(prompt)
            self.engine.announce(self.engine.found_in(text), "compute")
        try:
            return self.engine.stream(
                prompt,
                None if self.match_text else (),
                method=self.method,
                eviction=self.eviction,
                context_window=self.context_window,
                on_miss=self.on_miss,
                stop_ids=self.stopping_ids,
                **options,
            )
        except PromptTooLong as error:
            raise PromptTooLong(
                f"{error}. If LlamaIndex packed the prompt: it counts with another tokenizer, "
                "unless told Settings.tokenizer = llm.tokenizer_fn"
            ) from error

    def _whole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        stream = self._run(prompt, given)
        text = "".join(stream)
        self._last_report = stream.report
        return to_completion(text, stream.report)

    async def _awhole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        stream = await asyncio.to_thread(self._run, prompt, given)
        # piece by piece, so that no thread goes on with an answer when its task is cancelled
        text = "".join([piece async for piece in off_loop(stream)])
        self._last_report = stream.report
        return to_completion(text, stream.report)

    def _pieces(self, stream: AnswerStream) -> Generator[CompletionResponse]:
        text = ""
        with closing(stream):
            for delta in stream:
                text += delta
                yield to_completion(text, stream.report, delta)
        self._last_report = stream.report
        yield to_completion(text, stream.report, "")
