"""`SamKVLLM` by itself: its arguments, its prompts, its nine ways to be called."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ImageBlock
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MessageRole

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, PromptTooLong
from tests.support.handles import HANDLE, issued
from tests.support.llama_index_corpus import ASKED, Corpus, cached_prompt
from tests.support.models import tiny_model
from tests.support.records import COMPLETION_TEMPLATE, TEXTS, builtin
from tests.support.steps import Steps
from tests.support.tested_runtime import of_transformers_alone

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")


def user(content: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content)]


async def exhaust(stream: Any) -> list[Any]:
    return [response async for response in await stream]


PATHS: dict[str, Callable[[SamKVLLM, str], Any]] = {
    "complete": lambda llm, prompt: llm.complete(prompt),
    "stream_complete": lambda llm, prompt: list(llm.stream_complete(prompt)),
    "acomplete": lambda llm, prompt: asyncio.run(llm.acomplete(prompt)),
    "astream_complete": lambda llm, prompt: asyncio.run(exhaust(llm.astream_complete(prompt))),
    "chat": lambda llm, prompt: llm.chat(user(prompt)),
    "stream_chat": lambda llm, prompt: list(llm.stream_chat(user(prompt))),
    "achat": lambda llm, prompt: asyncio.run(llm.achat(user(prompt))),
    "astream_chat": lambda llm, prompt: asyncio.run(exhaust(llm.astream_chat(user(prompt)))),
    "predict": lambda llm, prompt: llm.predict(PromptTemplate(prompt)),
    "stream": lambda llm, prompt: list(llm.stream(PromptTemplate(prompt))),
    "apredict": lambda llm, prompt: asyncio.run(llm.apredict(PromptTemplate(prompt))),
    "astream": lambda llm, prompt: asyncio.run(exhaust(llm.astream(PromptTemplate(prompt)))),
}
"""Every way from a user's words to the engine."""


class TestCalls:
    """All nine ways to call an LLM."""

    def test_complete_of_a_chat_model_is_a_user_message(
        self, corpus: Corpus, prompts: list[Any]
    ) -> None:
        llm = corpus.llm()
        llm.complete("Hello")
        llm.complete("Hello", formatted=True)
        corpus.llm(is_chat_model=False).complete("Hello")
        corpus.llm(completion_to_prompt="<{}>".format).complete("Hello")
        assert prompts == [[{"role": "user", "content": "Hello"}], "Hello", "Hello", "<Hello>"]

    def test_chat(self, corpus: Corpus) -> None:
        messages = [ChatMessage(role="user", content=cached_prompt(corpus))]
        response = corpus.llm().chat(messages)
        assert response.message.role == MessageRole.ASSISTANT
        assert response.message.content.strip() == ASKED.workers
        report = response.raw["samkv"]
        assert (report["found"], report["chunk_misses"]) == (len(TEXTS), {})
        assert response.additional_kwargs["completion_tokens"] > 0
        # LlamaIndex writes these into the prompts of later turns
        assert response.message.additional_kwargs == {}

    def test_streams_are_incremental(self, corpus: Corpus, steps: Steps) -> None:
        llm = corpus.llm()
        prompt = "Documents:\n\n[Dunlux"  # goes on and on
        whole = llm.complete(prompt, formatted=True)
        messages = [ChatMessage(role="user", content=cached_prompt(corpus))]
        steps.hold()
        for start, text_of, expected in (
            (lambda: llm.stream_complete(prompt, formatted=True), lambda r: r.text, whole.text),
            (lambda: llm.stream_chat(messages), lambda r: r.message.content, f" {ASKED.workers}"),
        ):
            text, seen_at, before = "", [], steps.n
            for response in start():
                text += response.delta
                assert text_of(response) == text
                seen_at.append(steps.n - before)
                steps.release()
            steps.hold()
            assert text == expected
            assert seen_at[0] == 0 < seen_at[-1]  # it is there before the second token is
            assert response.delta == "" and response.raw["samkv"] == llm.last_report.to_dict()
        assert len(seen_at) > 3 or len(text) < 12

    def test_async_calls_answer_alike_off_the_loop(self, corpus: Corpus, steps: Steps) -> None:
        llm, prompt = corpus.llm(), cached_prompt(corpus)
        messages = [ChatMessage(role="user", content=prompt)]

        async def calls() -> list[str]:
            streamed = [r async for r in await llm.astream_complete(prompt)]
            chatted = [r async for r in await llm.astream_chat(messages)]
            assert len(streamed) > 2 and len(chatted) > 2
            return [
                (await llm.acomplete(prompt)).text,
                (await llm.achat(messages)).message.content,
                "".join(r.delta for r in streamed),
                "".join(r.delta for r in chatted),
                streamed[-1].text,
                chatted[-1].message.content,
            ]

        texts = asyncio.run(calls())
        assert steps.threads and threading.main_thread() not in steps.threads
        assert texts == [f" {ASKED.workers}"] * 6


class TestPrompts:
    @pytest.mark.parametrize("path", PATHS)
    def test_system_prompt_in_every_path_once(
        self, corpus: Corpus, prompts: list[Any], path: str
    ) -> None:
        ask = PATHS[path]
        ask(corpus.llm(system_prompt="Be brief."), "Hi you")
        turns = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi you"},
        ]
        assert prompts.pop() == turns
        ask(corpus.llm(system_prompt=""), "Hi you")  # what HuggingFaceLLM has without one
        assert prompts.pop() == turns[1:]
        ask(corpus.llm(system_prompt="Be brief.", is_chat_model=False), "Hi you")
        if "chat" in path:  # they are messages, so the model's template is what they need
            assert prompts.pop() == turns
        else:
            assert prompts.pop() == "Be brief.\n\nHi you"

    @pytest.mark.parametrize("path", ["complete", "chat"])
    def test_system_prompt_with_forms_of_ones_own(
        self, corpus: Corpus, prompts: list[Any], path: str
    ) -> None:
        def join(messages: Any) -> str:
            return "|".join(f"{m.role.value}={m.content}" for m in messages)

        PATHS[path](corpus.llm(system_prompt="Be brief.", messages_to_prompt=join), "Hi you")
        assert prompts.pop() == "system=Be brief.|user=Hi you"
        form = {"completion_to_prompt": "<{}>".format, "messages_to_prompt": join}
        PATHS[path](corpus.llm(system_prompt="Be brief.", **form), "Hi you")
        if "chat" in path:
            assert prompts == ["system=Be brief.|user=Hi you"]
        else:
            assert prompts == ["Be brief.\n\n<Hi you>"]

    def test_formatted_prompts_are_read_to_the_letter(
        self, corpus: Corpus, prompts: list[Any]
    ) -> None:
        llm = corpus.llm(
            system_prompt="Be brief.",
            completion_to_prompt="<{}>".format,
            query_wrapper_prompt="Q: {query_str}",
        )
        llm.complete("Hi", formatted=True)
        list(llm.stream_complete("Hi", formatted=True))
        asyncio.run(llm.acomplete("Hi", formatted=True))
        asyncio.run(exhaust(llm.astream_complete("Hi", formatted=True)))
        assert prompts == ["Hi"] * 4

    @pytest.mark.parametrize(
        ("first", "expected"),
        [
            ("Be brief.", "Be brief."),  # as LlamaIndex's predict puts it there
            ("Be brief.\nContext: none.", "Be brief.\nContext: none."),  # and its chat engines
            ("Be kind.", "Be brief.\n\nBe kind."),
            ("Be brief. Or not.", "Be brief.\n\nBe brief. Or not."),  # another that begins alike
        ],
    )
    def test_system_prompt_before_a_system_message(
        self, corpus: Corpus, prompts: list[Any], first: str, expected: str
    ) -> None:
        messages = [ChatMessage(role="system", content=first), ChatMessage(role="user", content="")]
        corpus.llm(system_prompt="Be brief.").chat(messages)
        assert prompts[0][0] == {"role": "system", "content": expected}
        assert len(prompts[0]) == 2

    def test_roles_become_turns(self, corpus: Corpus, prompts: list[Any]) -> None:
        corpus.llm(system_prompt="Be brief.").chat(
            [
                ChatMessage(role="developer", content="Be kind."),
                ChatMessage(role="user", content="One."),
                ChatMessage(role="user", content="Two."),
                ChatMessage(role="model", content="Yes."),
                ChatMessage(role="user", content="Three."),
            ]
        )
        assert prompts == [
            [
                {"role": "system", "content": "Be brief.\n\nBe kind."},
                {"role": "user", "content": "One.\n\nTwo."},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Three."},
            ]
        ]

    def test_what_no_text_model_can_read(self, corpus: Corpus) -> None:
        llm = corpus.llm()
        with pytest.raises(InvalidOption, match="takes no tools .* leave them out of the messages"):
            llm.chat([ChatMessage(role="tool", content="42")])
        image = ChatMessage(role="user", blocks=[ImageBlock(url="file:///a.png")])
        with pytest.raises(InvalidOption, match="ImageBlock; it must hold text only"):
            llm.chat([image])

    @of_transformers_alone
    def test_model_without_template(
        self, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("llama")
        monkeypatch.setattr(model.tokenizer, "chat_template", None)
        llm = SamKVLLM(engine=Engine(model), max_new_tokens=2)
        assert not llm.metadata.is_chat_model
        llm.chat([ChatMessage(role="user", content="Hi")])
        assert prompts == ["user: Hi\nassistant: "]


class TestTokenCounter:
    def test_handle_counts_as_its_chunk(self, corpus: Corpus) -> None:
        count, handle = corpus.llm().tokenizer_fn, issued(corpus.engine, ASKED.text)
        n_tokens = len(builtin().tokenize(ASKED.text, special=False))
        assert len(count(handle)) == n_tokens
        assert len(count("Question: who?")) == len(
            builtin().tokenize("Question: who?", special=True)
        )
        assert count("") == []

    def test_prompt_helper_packs_by_real_length(self, corpus: Corpus) -> None:
        llm = corpus.llm(context_window=150, is_chat_model=False)
        handles = [issued(corpus.engine, text) for text in TEXTS]
        template = PromptTemplate(COMPLETION_TEMPLATE)
        helper = PromptHelper.from_llm_metadata(llm.metadata, tokenizer=llm.tokenizer_fn)
        packed = helper.repack(template, handles)
        assert len(packed) > 2
        assert [handle for text in packed for handle in HANDLE.findall(text)] == handles
        for text in packed:
            report = llm.complete(template.format(context_str=text, query_str="?")).raw["samkv"]
            assert report["prompt_tokens"] + llm.max_new_tokens <= llm.context_window


class TestConfiguration:
    def test_length_and_stop(self, corpus: Corpus) -> None:
        llm, prompt = corpus.llm(), "Documents:\n\n[Dunlux"
        text = llm.complete(prompt, formatted=True).text
        for name in ("max_tokens", "max_new_tokens"):
            response = llm.complete(prompt, formatted=True, **{name: 3})
            assert response.raw["usage"]["completion_tokens"] == 3
            assert text.startswith(response.text)
        stop = text[4:7]
        for given in (stop, [stop]):
            shortened = llm.complete(prompt, formatted=True, stop=given).text
            assert shortened == text[: text.index(stop)]
        always = corpus.llm(generate_kwargs={"stop": [stop]})
        assert always.complete(prompt, formatted=True).text == shortened

    def test_store_bits_are_those_of_the_engine(self, corpus: Corpus) -> None:
        assert corpus.llm().store_bits == corpus.engine.store_bits == builtin().default_store_bits
        llm = SamKVLLM(model_name="builtin", store_bits=16)
        assert llm.store_bits == llm.engine.store_bits == 16
        assert SamKVLLM.from_dict(llm.to_dict()).engine.store_bits == 16
        with pytest.raises(InvalidOption, match="store_bits=3"):  # nothing is loaded for it
            SamKVLLM(model_name="nowhere/to-be-found", store_bits=3)

    def test_metadata_comes_from_the_model(self, corpus: Corpus) -> None:
        metadata = SamKVLLM(engine=corpus.engine).metadata
        assert metadata.model_name == "builtin"
        assert (metadata.num_output, metadata.is_chat_model) == (256, True)
        assert not metadata.is_function_calling_model

    @pytest.mark.parametrize("options", [
        {"context_window": 600},
        {"is_chat_model": False, "completion_to_prompt": lambda text: f"Read this:\n{text}\nOh?"},
    ])  # fmt: skip
    def test_window_is_what_a_prompt_may_fill(self, corpus: Corpus, options: Any) -> None:
        llm = corpus.llm(**options)
        room = llm.metadata.context_window - llm.metadata.num_output
        assert room <= options.get("context_window", builtin().context_window) - 12
        # as many tokens of text as LlamaIndex may pack, and one more
        exactly = "salt" + " salt" * (room - 1)
        while len(llm.tokenizer_fn(exactly)) > room:
            exactly = exactly.removesuffix(" salt")
        usage = llm.complete(exactly, max_tokens=1).raw["usage"]
        assert abs(usage["prompt_tokens"] + 12 - llm.context_window) <= 2  # where pieces meet
        beyond = exactly + " salt" * 4
        if llm.context_window < builtin().context_window:  # LlamaIndex packs for it, no more
            usage = llm.complete(beyond, max_tokens=1).raw["usage"]
            assert usage["prompt_tokens"] + 12 > llm.context_window
        else:
            with pytest.raises(PromptTooLong, match=f"context window of {llm.context_window} "):
                llm.complete(beyond)

    def test_window_without_room(self, corpus: Corpus) -> None:
        with pytest.raises(InvalidOption, match="system prompt take .* tokens.*shorten"):
            corpus.llm(context_window=30, system_prompt="Be brief. " * 10)

    def test_loads_by_name_and_folder(self, tmp_path: Path) -> None:
        llm = SamKVLLM(model_name="builtin", kv_dir=tmp_path / "kv", device_map="cpu")
        key = llm.engine.cache_chunks([ASKED.text])[0]
        other = SamKVLLM.from_dict(llm.to_dict())
        assert other.engine is not llm.engine
        assert other.engine.store.keys(other.engine.fingerprint) == [key]

    def test_copies_share_the_engine_and_nothing_else(self, corpus: Corpus) -> None:
        llm = corpus.llm(generate_kwargs={"temperature": 0.5})
        for other in (copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert other.engine is llm.engine
            other.generate_kwargs["temperature"] = 0.9
            assert llm.generate_kwargs == {"temperature": 0.5}
        travelled = pickle.loads(pickle.dumps(llm))
        assert travelled.metadata == llm.metadata
        with pytest.raises(InvalidOption, match="out of a pickle"):
            travelled.complete("Hello")
