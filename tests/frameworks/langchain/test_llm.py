"""`ChatSamKV` and `SamKV` by themselves: arguments, ways to be called, what they refuse."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField

from langchain_samkv import ChatSamKV, SamKV
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import (
    HandleError,
    InvalidOption,
    SamkvError,
    TimedOut,
)
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.epic import EpicRecompute
from samkv_integrations.runtimes.transformers import loading
from samkv_integrations.runtimes.transformers.eviction import H2O
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asked import listen
from tests.support.handles import issued
from tests.support.models import byte_tokenizer, hf_model
from tests.support.records import (
    CHAT_TEMPLATE,
    COMPLETION_TEMPLATE,
    RECORDS,
    TEXTS,
    Record,
    builtin,
)
from tests.support.steps import Steps

ASKED = RECORDS[2]
ENDLESS = "Documents:\n\n[Dunlux"  # a prompt that the model goes on with for long
PATIENCE_S = 60
KINDS = (ChatSamKV, SamKV)


def prompt_about(record: Record = ASKED, kind: type = ChatSamKV) -> str:
    template = CHAT_TEMPLATE if kind is ChatSamKV else COMPLETION_TEMPLATE
    return template.format(context_str="\n\n".join(TEXTS), query_str=record.question)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The records, cached. For tests that only read it."""
    engine = Engine(builtin())
    engine.cache_chunks(TEXTS)
    return engine


@pytest.fixture
def chat(engine: Engine) -> ChatSamKV:
    return ChatSamKV(engine=engine, max_tokens=12)


@pytest.fixture
def llm(engine: Engine) -> SamKV:
    return SamKV(engine=engine, max_tokens=12)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Prompts and options that an engine is given."""
    seen: list[dict[str, Any]] = []

    def told(prompt: Any, chunks: Any, **options: Any) -> None:
        seen.append({"prompt": prompt, "chunks": chunks, **options})

    listen(monkeypatch, told)
    return seen


class Tokens(BaseCallbackHandler):
    """What callbacks hear."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends += 1


class TestChat:
    def test_invoke(self, chat: ChatSamKV) -> None:
        message = chat.invoke(prompt_about())
        assert message.content.strip() == ASKED.workers
        report = chat.last_report
        assert report.found == len(TEXTS) and not report.chunk_misses
        assert message.usage_metadata == {
            "input_tokens": report.prompt_tokens,
            "output_tokens": report.completion_tokens,
            "total_tokens": report.prompt_tokens + report.completion_tokens,
            "input_token_details": {"cache_read": report.cached_tokens},
        }
        assert message.response_metadata == {
            "model_name": "builtin",
            "model_provider": "samkv",
            "finish_reason": "stop",
            "samkv": report.to_dict(),
        }

    def test_finish_reasons(self, chat: ChatSamKV) -> None:
        def reason(prompt: str, **options: Any) -> str:
            return chat.invoke(prompt, **options).response_metadata["finish_reason"]

        n_tokens = chat.invoke(prompt_about()).usage_metadata["output_tokens"]
        assert reason(prompt_about(), max_tokens=n_tokens) == "length"  # no room for the end
        assert reason(prompt_about(), max_tokens=n_tokens + 1) == "stop"
        assert reason(prompt_about(), stop=[ASKED.workers[1:]]) == "stop"
        assert reason(prompt_about(), max_tokens=n_tokens, stop=[ASKED.workers[-1]]) == "stop"

    def test_a_streamed_answer_goes_back_into_the_history(self, chat: ChatSamKV) -> None:
        pieces = list(chat.stream(prompt_about()))
        answer = sum(pieces[1:], start=pieces[0])
        question, more = HumanMessage(prompt_about()), HumanMessage("And?")
        streamed = chat.invoke([question, answer, more])
        whole = chat.invoke([question, AIMessage(answer.content), more])
        assert streamed.text == whole.text

    def test_stream(self, chat: ChatSamKV, steps: Steps) -> None:
        handler, full, seen_at = Tokens(), None, []
        steps.hold()
        for chunk in chat.stream(prompt_about(), {"callbacks": [handler]}):
            full = chunk if full is None else full + chunk
            seen_at.append(steps.n)
            steps.release()
        assert seen_at[0] == 0 < seen_at[-1]  # it is there before the second token is
        whole = chat.invoke(prompt_about())
        assert full.content == "".join(handler.tokens) == whole.content
        assert handler.ends == 1
        assert full.usage_metadata == whole.usage_metadata
        assert chunk.chunk_position == "last" and chunk.content == ""
        named = {name: full.response_metadata[name] for name in ("model_name", "finish_reason")}
        assert named == {"model_name": "builtin", "finish_reason": "stop"}
        figures = full.response_metadata["samkv"]
        assert (figures["found"], figures["chunk_misses"]) == (len(TEXTS), {})

    def test_streaming_as_an_argument(self, engine: Engine) -> None:
        """LangChain streams ``invoke`` to callbacks if it is True, and never streams on False."""
        heard = []
        for streaming in (True, None, False):
            handler = Tokens()
            chat = ChatSamKV(engine=engine, max_tokens=12, streaming=streaming)
            chat.invoke(prompt_about(), {"callbacks": [handler]})
            assert len(list(chat.stream(prompt_about()))) > 1 or streaming is False
            heard.append(len(handler.tokens) > 1)
        assert heard == [True, False, False]

    def test_roles_become_turns(self, chat: ChatSamKV, given: list[dict[str, Any]]) -> None:
        chat.invoke(
            [
                SystemMessage("Be brief."),
                ChatMessage(role="developer", content="Be kind."),
                HumanMessage("One.", name="somebody"),
                HumanMessage([{"type": "text", "text": "Tw"}, "o."]),
                AIMessage("Yes."),
                ChatMessage(role="human", content="Three."),
            ]
        )
        assert given[0]["prompt"] == [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "One.\n\nTw\no."},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Three."},
        ]

    def test_a_document_a_block(self) -> None:
        texts = [
            "Denbury is a town on the river Tume, whose people build boats and mills of stone.",
            "Its bell tower has 1802 steps, and nobody has ever counted all of them in one day.",
        ]
        engine = Engine(builtin())
        engine.cache_chunks(texts)
        chat = ChatSamKV(engine=engine, max_tokens=2)
        chat.invoke([HumanMessage([{"type": "text", "text": text} for text in [*texts, "Where?"]])])
        assert (chat.last_report.found, chat.last_report.chunk_misses) == (2, {})

    def test_an_answer_can_be_a_message_again(self, engine: Engine) -> None:
        for version in ("v0", "v1"):
            chat = ChatSamKV(engine=engine, max_tokens=4, output_version=version)
            first = chat.invoke("Hello")
            again = chat.invoke([HumanMessage("Hello"), first, HumanMessage("Hello")])
            told = [("human", "Hello"), ("ai", first.text), ("human", "Hello")]
            assert first.text and again.text == chat.invoke(told).text


class TestStrings:
    def test_invoke_and_stream(self, llm: SamKV, steps: Steps) -> None:
        prompt = prompt_about(kind=SamKV)
        assert llm.invoke(prompt).strip() == ASKED.workers  # and not the prompt before it
        assert (llm.last_report.found, llm.last_report.chunk_misses) == (len(TEXTS), {})
        handler, seen_at, pieces, before = Tokens(), [], [], steps.n
        steps.hold()
        for piece in llm.stream(prompt, {"callbacks": [handler]}):
            pieces.append(piece)
            seen_at.append(steps.n - before)
            steps.release()
        assert seen_at[0] == 0 < seen_at[-1]
        assert "".join(pieces) == "".join(handler.tokens) == f" {ASKED.workers}"

    def test_an_error_is_of_its_prompt_alone(self, chat: ChatSamKV, llm: SamKV) -> None:
        prompts = ["Hello", issued(chat.engine, ASKED.text)[:20], "Hello"]
        for model in (chat, llm):
            for options in ({}, {"max_concurrency": 2}):
                found = model.batch(prompts, options, return_exceptions=True)
                later = asyncio.run(model.abatch(prompts, options, return_exceptions=True))
                for first, error, last in (found, later):
                    assert isinstance(error, HandleError)
                    assert getattr(first, "text", first) == getattr(last, "text", last)
                    assert not isinstance(first, Exception)
            with pytest.raises(HandleError):
                model.batch(prompts)
            assert model.batch([]) == []


class TestArguments:
    def test_all_of_them_reach_the_engine(
        self, engine: Engine, given: list[dict[str, Any]]
    ) -> None:
        numbers = {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
        how = {"method": "reuse", "eviction": "h2o", "on_miss": "error"}
        for kind in KINDS:
            model = kind(engine=engine, seed=1, stopping_ids=[5], max_tokens=2, **numbers, **how)
            model.invoke("Hello")
            expected = {**numbers, **how, "seed": 1, "stop_ids": [5], "max_new_tokens": 2}
            assert expected.items() <= given[-1].items()
            assert given[-1]["chunks"] is None
            model.invoke("Hello", top_k=3, max_new_tokens=4, stop_sequences=["x"], do_sample=False)
            now = {"top_k": 3, "temperature": 0.0, "max_new_tokens": 4, "stop": ["x"]}
            assert now.items() <= given[-1].items()
            model.bind(temperature=0.3, stop="y").invoke("Hello")
            assert {"temperature": 0.3, "stop": ["y"]}.items() <= given[-1].items()
            kind(engine=engine, match_text=False, max_tokens=2, stop=["z"]).invoke("Hello", seed=3)
            assert given[-1]["chunks"] == () and given[-1]["stop"] == ["z"]

    def test_standard_ones_and_their_other_names(self, engine: Engine) -> None:
        first = ChatSamKV(model="builtin", engine=engine, max_tokens=7, stop=["x"])
        second = ChatSamKV(
            model_name="builtin", engine=engine, max_new_tokens=7, stop_sequences=["x"]
        )
        assert first == second
        assert (first.model_name, first.max_tokens, first.stop) == ("builtin", 7, ["x"])
        silent = ChatSamKV(
            engine=engine, temperature=None, max_tokens=None, stop=None, timeout=None,
            max_retries=None, model=None, api_key="none",
        )  # fmt: skip
        assert silent.max_tokens == 256 and "none" not in repr(silent)

    def test_a_folder_is_the_same_however_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        engine = Engine(builtin(), ChunkStore("kv"))
        for folder in ("kv", tmp_path / "kv", "./x/../kv"):
            assert ChatSamKV(engine=engine, kv_dir=folder).kv_dir == "kv"
        with pytest.raises(InvalidOption, match="kv_dir='other'.*'kv'"):
            ChatSamKV(engine=engine, kv_dir="other")

    def test_loads_by_name(self, tmp_path: Path) -> None:
        chat = ChatSamKV(model="builtin", device_map=None, kv_dir=tmp_path / "kv", max_tokens=12)
        assert chat.kv_dir == str(tmp_path / "kv")
        chat.engine.cache_chunks(TEXTS)
        assert chat.invoke(prompt_about()).content == f" {ASKED.workers}"
        assert (chat.last_report.found, chat.last_report.chunk_misses) == (len(TEXTS), {})
        again = ChatSamKV(model="builtin", kv_dir=tmp_path / "kv")
        assert again.engine is not chat.engine
        assert again.engine.store.keys(again.engine.fingerprint)

    def test_from_model_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hf_model("llama").save_pretrained(tmp_path / "model")
        byte_tokenizer(bos=True).save_pretrained(tmp_path / "model")
        asked = []
        load = loading.load_model
        monkeypatch.setattr(
            loading,
            "load_model",
            lambda name, **options: asked.append(options) or load(name, **options),
        )
        for kind in KINDS:
            model = kind.from_model_id(
                model_id=str(tmp_path / "model"),
                task="text-generation",
                device=-1,
                model_kwargs={"local_files_only": True, "token": "hf_secret"},
                pipeline_kwargs={"max_new_tokens": 3, "top_k": 5, "return_full_text": False},
                method="reuse",
                model=None,  # no opinion
                top_k=None,
            )
            assert (model.max_tokens, model.top_k, model.method) == (3, 5, "reuse")
            assert model.device_map == "cpu" and model.model_name == str(tmp_path / "model")
            model.invoke("Hello")
            assert "hf_secret" not in f"{model!r}{model._identifying_params}{vars(model)}"
        hub = {"local_files_only": True, "token": "hf_secret"}
        assert asked[0]["model_kwargs"] == asked[0]["tokenizer_kwargs"] == hub

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"modle": "builtin"}, "argument of .* 'modle'; known: api_key, .*min_p, model"),
            ({"model": "builtin", "model_name": "builtin"}, "same option; give one"),
            ({"stop": ["x"], "stop_sequences": ["x"]}, "same option; give one"),
            ({"temperature": 0, "do_sample": True}, "contradict"),
            ({"max_tokens": 10**6}, "max_tokens=1000000 leaves no room"),
            ({"stop": [""]}, r"stop=\[''\]"),
            ({"max_retries": -1}, "max_retries=-1"),
            ({"on_miss": "skip"}, "on_miss='skip'"),
            ({"method": "magic"}, "method 'magic'"),
            ({"store_bits": 3}, "store_bits=3; allowed: 4, 8, 16"),
            ({"store_bits": 16}, "store_bits=16.* that was given has"),
            ({"stopping_ids": [10**6]}, "stop id 1000000; it must be a token id"),
            ({"model": "other"}, "model_name='other'.*'builtin'"),
            ({"kv_dir": "elsewhere"}, "kv_dir='elsewhere'"),
            ({"device_map": "cuda"}, "device_map='cuda'.*'cpu'"),
            ({"dtype": "bfloat16"}, "dtype='bfloat16'.*'float"),
            ({"tokenizer_name": "builtin"}, "tokenizer_name is for loading"),
            ({"engine": "builtin"}, "engine='builtin'"),
            ({"engine": None}, "give model"),
        ],
    )
    def test_wrong_ones(
        self, engine: Engine, kind: type, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(SamkvError, match=message):
            kind(**{"engine": engine, **options})

    def test_misses_are_computed_as_chunks_by_default(self) -> None:
        for kind in KINDS:
            engine = Engine(builtin(), method="samkv-guided")
            llm = kind(engine=engine, max_tokens=1)
            engine.expect([ASKED.text])
            llm.invoke(f"Documents:\n\n{ASKED.text}\n\nQuestion: Who?")
            assert (llm.on_miss, llm.last_report.computed_now) == ("compute", 1)
            assert engine.is_cached(ASKED.text)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temprature": 1}, "option of a call 'temprature'; known: do_sample"),
            ({"temperature": "hot"}, "temperature='hot'"),
            ({"model": "other"}, "'model' is not an option of a call: an LLM runs one model"),
            ({"response_format": {}}, "'response_format' is not an option of a call: use with"),
            ({"n": 2}, "'n' is not an option of a call"),
        ],
    )
    def test_wrong_ones_of_a_call(
        self, chat: ChatSamKV, llm: SamKV, options: dict[str, Any], message: str
    ) -> None:
        for model in (chat, llm):
            with pytest.raises(SamkvError, match=message):
                model.invoke("Hello", **options)
            with pytest.raises(SamkvError, match=message):
                next(model.stream("Hello", **options))


class TestBadInput:
    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ([], "the list of messages is empty"),
            (
                [HumanMessage([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}])],
                "block of type 'image_url'; it must be text",
            ),
            (
                [HumanMessage([{"type": "image", "base64": "AA==", "mime_type": "image/png"}])],
                "block of type 'image'",
            ),
            (
                [
                    HumanMessage(
                        [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]
                    )
                ],
                "block of type 'audio'",  # as LangChain rewrites it
            ),
            ([ToolMessage("42", tool_call_id="1")], "takes no tools and no calls of tools"),
            ([FunctionMessage("42", name="f")], "role 'function' of a message is not supported"),
            ([RemoveMessage("1")], "role 'remove' of a message is not supported"),
            ([ChatMessage("42", role="critic")], "role 'critic' of a message is not supported"),
            (
                [AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])],
                "takes no tools and no calls of tools",
            ),
            (
                [AIMessage("", additional_kwargs={"function_call": {"name": "f"}})],
                "a function_call of OpenAI's first interface; give tool_calls",
            ),
        ],
    )  # fmt: skip
    def test_what_no_text_model_can_read(
        self, chat: ChatSamKV, messages: list[Any], message: str
    ) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: chat.invoke(messages),
            lambda: list(chat.stream(messages)),
            lambda: asyncio.run(chat.ainvoke(messages)),
        ]
        for call in calls:
            with pytest.raises(InvalidOption, match=message):
                call()


class TestTokenCounts:
    def test_handle_counts_as_its_chunk(self, chat: ChatSamKV, llm: SamKV) -> None:
        handle = issued(chat.engine, ASKED.text)
        n_tokens = len(builtin().tokenize(ASKED.text, special=False))
        for model in (chat, llm):
            assert model.get_num_tokens(handle) == n_tokens == model.get_num_tokens(ASKED.text)
            assert model.get_num_tokens("") == 0
            assert model.get_token_ids("Hello you") == builtin().tokenize("Hello you", special=True)
            assert model.get_num_tokens(handle[:20]) == len(model.get_token_ids(handle[:20]))


class TestTime:
    @pytest.mark.parametrize("kind", KINDS)
    def test_timeout(self, engine: Engine, kind: type) -> None:
        model = kind(engine=engine, max_tokens=100, timeout=1e-9)

        async def astream() -> None:
            async for _ in model.astream(ENDLESS):
                pass

        for call in (
            lambda: model.invoke(ENDLESS),
            lambda: list(model.stream(ENDLESS)),
            lambda: asyncio.run(model.ainvoke(ENDLESS)),
            lambda: asyncio.run(astream()),
        ):
            with pytest.raises(TimedOut, match="timeout=1e-09: the answer was not complete"):
                call()
        with pytest.raises(TimeoutError):  # what others catch
            model.invoke(ENDLESS)
        assert model.invoke(ENDLESS, timeout=PATIENCE_S)


class TestCachedAnswers:
    @pytest.mark.parametrize(
        "other",
        [{"temperature": 0.5}, {"method": "reuse"}, {"eviction": "h2o"}, {"stop": ["x"]},
         {"max_tokens": 5}, {"seed": 3}, {"stopping_ids": [5]}, {"match_text": False}],
    )  # fmt: skip
    @pytest.mark.parametrize("kind", KINDS)
    def test_another_llm_is_another_question(
        self, engine: Engine, kind: type, other: dict[str, Any], given: list[dict[str, Any]]
    ) -> None:
        cache = InMemoryCache()
        kind(engine=engine, cache=cache, **{"max_tokens": 4}).invoke("Hello")
        kind(engine=engine, cache=cache, **{"max_tokens": 4, **other}).invoke("Hello")
        assert len(given) == 2

    def test_options_of_a_call_are_another_question(
        self, engine: Engine, given: list[dict[str, Any]]
    ) -> None:
        """For chat models; LangChain's caches of string LLMs are keyed without them."""
        chat = ChatSamKV(engine=engine, cache=InMemoryCache(), max_tokens=4)
        for options in ({}, {"top_k": 1}, {"stop": ["x"]}, {"top_k": 1}):
            chat.invoke("Hello", **options)
        assert len(given) == 3

    @pytest.mark.parametrize(
        "other",
        [
            {"method": replace(METHODS["epic"], recompute=EpicRecompute(first=4))},
            {"method": replace(METHODS["epic"], update=lambda new, old: old)},
            {"eviction": H2O(budget_ratio=0.5)},
            {"prefix": "none"},
            {"block_size": 16},
            {"store_bits": 8},
        ],
    )
    def test_another_engine_is_another_question(
        self, other: dict[str, Any], given: list[dict[str, Any]]
    ) -> None:
        """Names are the same: of model, method and eviction."""
        cache = InMemoryCache()
        same = {"method": "epic", "eviction": "h2o", "block_size": 8}
        for options in (same, same, {**same, **other}):
            SamKV(engine=Engine(builtin(), **options), cache=cache, max_tokens=2).invoke("Hello")
        assert len(given) == 2

    def test_another_chat_template_is_another_question(self, given: list[dict[str, Any]]) -> None:
        cache = InMemoryCache()
        for template in ("{{ messages[0].content }}", "{{ messages[0].content }}!"):
            tokenizer = byte_tokenizer(bos=True)
            tokenizer.chat_template = template
            model = Model(hf_model("llama"), tokenizer, "mine")
            ChatSamKV(engine=Engine(model), cache=cache, max_tokens=2).invoke("Hello")
        assert len(given) == 2

    def test_other_weights_of_the_same_name(self, given: list[dict[str, Any]]) -> None:
        cache = InMemoryCache()
        for seed in (0, 1):
            model = Model(hf_model("llama", seed=seed), byte_tokenizer(bos=True), "mine")
            SamKV(engine=Engine(model), cache=cache, max_tokens=2).invoke("Hello")
        assert len(given) == 2


class TestCopies:
    @pytest.mark.parametrize("kind", KINDS)
    def test_they_share_the_engine(self, engine: Engine, kind: type) -> None:
        model = kind(engine=engine, stop=["x"])
        for other in (copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True)):
            assert other.engine is engine
        other = copy.deepcopy(model)
        other.stop.append("y")
        assert model.stop == ["x"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_pickles_leave_it_behind(self, engine: Engine, kind: type) -> None:
        model = kind(engine=engine, max_tokens=3)
        pickled = pickle.dumps(model)
        assert len(pickled) < 10_000
        travelled = pickle.loads(pickled)
        assert travelled.max_tokens == 3
        for use in (lambda: travelled.invoke("Hello"), lambda: travelled.engine):
            with pytest.raises(InvalidOption, match="out of a pickle"):
                use()
        with pytest.raises(AttributeError):
            _ = travelled.something_else
        for other in (copy.copy(travelled), copy.deepcopy(travelled)):
            assert other.max_tokens == 3
            with pytest.raises(InvalidOption, match="out of a pickle"):
                other.invoke("Hello")

    def test_made_anew_by_langchain(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[dict[str, Any]]
    ) -> None:
        """`configurable_fields` makes an LLM for every call, out of the fields of the first."""
        chat = ChatSamKV(
            model="builtin",
            model_kwargs={"local_files_only": True},
            kv_dir=tmp_path / "kv",
            max_tokens=4,
        )

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(loading, "load_model", refuse)
        runnable = chat.configurable_fields(temperature=ConfigurableField(id="heat"))
        runnable.invoke("Hello", {"configurable": {"heat": 0.9}})
        assert given[-1]["temperature"] == 0.9
        pieces = list(runnable.stream("Hello", {"configurable": {"heat": 0.0}}))
        assert len(pieces) > 2  # not made with streaming=False


class TestCallersThatGoAway:
    """Nothing is computed for them any more, and nobody else has to wait."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_closed_stream(self, engine: Engine, kind: type, steps: Steps) -> None:
        model = kind(engine=engine, max_tokens=100)
        steps.hold()
        steps.allow(5)
        stream: Iterator[Any] = model.stream(ENDLESS)
        next(stream)
        next(stream)
        stream.close()
        assert list(stream) == [] and model.last_report is None
        steps.release()
        for _ in model.stream(ENDLESS):
            break
        assert steps.of_the_first <= 6  # one of them was under way
        assert SamKV(engine=engine, max_tokens=12).invoke(prompt_about(kind=SamKV)).strip()

    @pytest.mark.parametrize("form", ["ainvoke", "astream"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_cancelled_task(self, engine: Engine, kind: type, form: str, steps: Steps) -> None:
        model = kind(engine=engine, max_tokens=200)

        async def call() -> None:
            if form == "astream":
                async for _ in model.astream(ENDLESS):
                    pass
            else:
                await model.ainvoke(ENDLESS)

        async def cancel_on_the_way() -> None:
            steps.hold()
            steps.allow(1)
            task = asyncio.create_task(call())
            await asyncio.to_thread(steps.wait_for, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            steps.release()
            other = SamKV(engine=engine, max_tokens=12)
            answer = await other.ainvoke(prompt_about(kind=SamKV))
            assert answer == f" {ASKED.workers}"
            assert steps.of_the_first <= 2  # one was under way
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(cancel_on_the_way())
