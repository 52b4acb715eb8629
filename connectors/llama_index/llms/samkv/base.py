"""The LLM: LlamaIndex's interface of an `Engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
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
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import (
    CompletionToPromptType,
    MessagesToPromptType,
    default_completion_to_prompt,
)
from llama_index.core.types import BaseOutputParser, PydanticProgramMode

from llama_index.llms.samkv.conversion import (
    checked_generate_kwargs,
    off_loop,
    to_chat,
    to_completion,
    to_options,
    to_turns,
    with_system_prompt,
)
from llama_index.llms.samkv.engine_ref import EngineRef
from samkv_integrations.decode import AnswerStream
from samkv_integrations.engine import Engine, Prompt
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import get_eviction
from samkv_integrations.methods import get_method
from samkv_integrations.prompt import OnMiss
from samkv_integrations.report import Report
from samkv_integrations.store import ChunkStore


class SamKVLLM(CustomLLM):
    """A local Hugging Face model that answers from the KV caches of the chunks in its prompt.

    Arguments are called what `HuggingFaceLLM` calls them. Texts of cached chunks in a prompt are
    answered from their caches, and so are handles, which `SamKVPostprocessor` can put there.
    Everything else is computed as usual.

    Args:
        model_name: a hub id, a local folder, or ``"builtin"``.
        context_window: tokens that prompts are packed for; None for the model's, which is the most.
        max_new_tokens: most tokens of an answer.
        device_map: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype: ``"auto"`` (the checkpoint's), ``"float32"`` or ``"bfloat16"``.
        generate_kwargs: ``temperature``, ``top_p``, ``seed`` and ``stop`` of every call.
        system_prompt: put before every prompt, whatever method is called.
        messages_to_prompt: makes the prompt of chat messages, in place of the chat template.
        completion_to_prompt: makes the prompt of a completion.
        is_chat_model: whether LlamaIndex shall prompt with messages; None if there is a template.
        kv_dir: folder of the chunk caches; None keeps them in memory.
        engine: an engine to share, in place of loading ``model_name`` over ``kv_dir``.
        method: how to answer, a name out of ``METHODS``; None for the engine's.
        eviction: which rows an answer goes on with after its first token, a name out of
            ``EVICTIONS`` or ``"none"`` for all; None for the engine's.
        match_text: whether texts of cached chunks are found in prompts; else handles alone are.
        on_miss: for a chunk without a usable cache: ``"text"`` (compute its text, this once),
            ``"compute"`` (cache it anew) or ``"error"``.

    Every call takes temperature, top_p, seed, stop and max_tokens (or max_new_tokens) as well.
    ``raw["samkv"]`` of a response, or `last_report`, says what the answer cost.

    Raises:
        InvalidOption, UnknownOption: an argument is wrong, or contradicts ``engine``.
        ModelNotFound, UnsupportedModel, StoreError: see `Engine` and `ChunkStore`.
    """

    model_name: str = Field(description="Hub id or folder of the model.")
    context_window: int = Field(description="Tokens that prompts are packed for.")
    max_new_tokens: int = Field(description="Most tokens of an answer.")
    device_map: str = Field(description="Where the model runs.")
    dtype: str = Field(description="Precision of weights and caches.")
    generate_kwargs: dict[str, Any] = Field(description="Options of every call.")
    is_chat_model: bool = Field(description="Whether LlamaIndex prompts with messages.")
    kv_dir: str | None = Field(description="Folder of the chunk caches, None for memory.")
    method: str | None = Field(description="How to answer, None for the engine's method.")
    eviction: str | None = Field(description="Rows to evict, None for the engine's choice.")
    match_text: bool = Field(description="Whether texts of cached chunks are found in prompts.")
    on_miss: OnMiss = Field(description="What to do for a chunk without a usable cache.")

    _engine: EngineRef = PrivateAttr()
    _last_report: Report | None = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        model_name: str | None = None,
        context_window: int | None = None,
        max_new_tokens: int = 256,
        device_map: str = "auto",
        dtype: str = "auto",
        generate_kwargs: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        messages_to_prompt: MessagesToPromptType | None = None,
        completion_to_prompt: CompletionToPromptType | None = None,
        is_chat_model: bool | None = None,
        callback_manager: CallbackManager | None = None,
        output_parser: BaseOutputParser | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
        kv_dir: str | Path | None = None,
        engine: Engine | None = None,
        method: str | None = None,
        eviction: str | None = None,
        match_text: bool = True,
        on_miss: OnMiss = "text",
    ) -> None:
        options = checked_generate_kwargs(generate_kwargs or {}, max_new_tokens)
        if on_miss not in get_args(OnMiss):
            raise InvalidOption(f"on_miss={on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
        if method is not None:
            get_method(method)  # raises if there is none of that name
        get_eviction(eviction)  # likewise
        if engine is not None:
            _check_agreement(engine, model_name, kv_dir, device_map, dtype)
        elif model_name is not None:
            store = None if kv_dir is None else ChunkStore(kv_dir)
            engine = Engine.from_pretrained(model_name, store, device=device_map, dtype=dtype)
        else:
            raise InvalidOption("give model_name (a hub id, a folder or 'builtin'), or engine")
        name, window = engine.model.name, engine.model.context_window
        if context_window is None:
            context_window = window
        if not 0 < context_window <= window:
            raise InvalidOption(
                f"context_window={context_window}; {name!r} has {window}, give at most that"
            )
        if max_new_tokens >= context_window:
            raise InvalidOption(
                f"max_new_tokens={max_new_tokens} leaves no room for a prompt in a context window "
                f"of {context_window} tokens; give less"
            )
        chat = engine.model.has_chat_template if is_chat_model is None else is_chat_model
        super().__init__(
            model_name=name,
            context_window=context_window,
            max_new_tokens=max_new_tokens,
            device_map=device_map,
            dtype=dtype,
            generate_kwargs=options,
            system_prompt=system_prompt,
            messages_to_prompt=messages_to_prompt,
            completion_to_prompt=completion_to_prompt,
            is_chat_model=chat,
            callback_manager=callback_manager or CallbackManager([]),
            output_parser=output_parser,
            pydantic_program_mode=pydantic_program_mode,
            kv_dir=_folder(engine),
            method=method,
            eviction=eviction,
            match_text=match_text,
            on_miss=on_miss,
        )
        self._engine = EngineRef(engine)

    @classmethod
    def from_engine(cls, engine: Engine, **kwargs: Any) -> SamKVLLM:  # noqa: ANN401
        """An LLM on an engine that is there already; kwargs as for the class."""
        return cls(engine=engine, **kwargs)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised LLMs and events."""
        return "SamKV_LLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model."""
        return LLMMetadata(
            context_window=self.context_window,
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
        if not text:
            return []
        engine = self.engine
        n_added = int(engine.model.bos_id is not None)  # counted by the engine, not in the text
        return [0] * (engine.count_tokens(text) - n_added)

    # -- completions ------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ANN401
        """The answer to a prompt, which a chat model reads as one user message.

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
        complete = self._completion_prompt(prompt, formatted)
        return await asyncio.to_thread(self._whole, complete, kwargs)

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
        pieces = self._pieces(self._run(self._chat_prompt(messages), kwargs))
        return (to_chat(piece) for piece in pieces)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:  # noqa: ANN401
        """Like `chat`, off the event loop."""
        prompt = self._chat_prompt(messages)
        return to_chat(await asyncio.to_thread(self._whole, prompt, kwargs))

    @llm_chat_callback()
    async def astream_chat(
        self,
        messages: Sequence[ChatMessage],
        **kwargs: Any,  # noqa: ANN401
    ) -> ChatResponseAsyncGen:
        """Like `stream_chat`, off the event loop."""
        prompt = self._chat_prompt(messages)
        pieces = self._pieces(await asyncio.to_thread(self._run, prompt, kwargs))
        return off_loop(to_chat(piece) for piece in pieces)

    # -- the one way to an answer -----------------------------------------------------------

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        assert self.completion_to_prompt is not None  # LlamaIndex puts its default in
        if self.is_chat_model and self.completion_to_prompt is default_completion_to_prompt:
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
        return self.engine.stream(
            prompt,
            None if self.match_text else (),
            method=self.method,
            eviction=self.eviction,
            on_miss=self.on_miss,
            **options,
        )

    def _whole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        stream = self._run(prompt, given)
        text = "".join(stream)
        self._last_report = stream.report
        return to_completion(text, stream.report)

    def _pieces(self, stream: AnswerStream) -> Generator[CompletionResponse]:
        text = ""
        for delta in stream:
            text += delta
            yield to_completion(text, stream.report, delta)
        self._last_report = stream.report
        yield to_completion(text, stream.report, "")


def _check_agreement(
    engine: Engine, model_name: str | None, kv_dir: str | Path | None, device_map: str, dtype: str
) -> None:
    """Raises InvalidOption if the other arguments ask for another engine."""
    model = engine.model
    folder = None if kv_dir is None else str(Path(kv_dir))
    for name, value, allowed in (
        ("model_name", model_name, (None, model.name)),
        ("kv_dir", folder, (None, _folder(engine))),
        ("device_map", device_map, ("auto", model.device.type, str(model.device))),
        ("dtype", dtype, ("auto", model.dtype_name)),
    ):
        if value not in allowed:
            raise InvalidOption(
                f"{name}={value!r}, but the engine that was given has {allowed[-1]!r}; "
                f"leave out either engine or {name}"
            )


def _folder(engine: Engine) -> str | None:
    return str(engine.store.path) if isinstance(engine.store, ChunkStore) else None
