"""What a pipeline gives to `HuggingFaceLLM` means the same to `SamKVLLM`, or is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import PromptTemplate

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations.errors import InvalidOption, ModelNotFound
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.asked import listen
from tests.support.llama_index_corpus import Corpus, cached_prompt
from tests.support.models import byte_tokenizer, hf_model

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("no_other_model")

ENDLESS = "Documents:\n\n[Dunlux"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that somebody saved, its tokenizer elsewhere."""
    path = tmp_path_factory.mktemp("saved")
    hf_model("llama").save_pretrained(path / "model")
    byte_tokenizer(bos=True).save_pretrained(path / "tokenizer")
    return path


class TestLoadedModels:
    def test_model_and_tokenizer(self) -> None:
        hf, tokenizer = hf_model("llama"), byte_tokenizer(bos=True)
        llm = SamKVLLM(model=hf, tokenizer=tokenizer, model_name="mine", max_new_tokens=4)
        assert llm.engine.model.hf is hf
        assert llm.metadata.model_name == llm.complete("Hello").raw["samkv"]["model"] == "mine"
        assert llm.context_window == 4096
        other = SamKVLLM(model=hf_model("llama"), tokenizer=tokenizer, model_name="another label")
        assert other.engine.fingerprint.digest == llm.engine.fingerprint.digest

    def test_tokenizer_of_another_place(self, folder: Path) -> None:
        by_name = SamKVLLM(
            model_name=str(folder / "model"),
            tokenizer_name=str(folder / "tokenizer"),
            model_kwargs={"local_files_only": True},
            tokenizer_kwargs={"max_length": 2048},  # many pipelines give it; texts are never cut
            device_map=None,
            max_new_tokens=4,
        )
        text = "A text. " * 300
        assert by_name.complete(text).raw["usage"]["prompt_tokens"] > len(text)
        by_object = SamKVLLM(
            model_name=str(folder / "model"),
            tokenizer=byte_tokenizer(bos=True),
            max_new_tokens=4,
            device_map="cpu",
        )
        assert by_object.complete(text).text == by_name.complete(text).text
        with pytest.raises(ModelNotFound, match="tokenizer 'nowhere/to-be-found'"):
            SamKVLLM(
                model_name=str(folder / "model"),
                tokenizer_name="nowhere/to-be-found",
                tokenizer_kwargs={"local_files_only": True},
            )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"model": True}, "model was given without its tokenizer"),
            ({"model": True, "tokenizer": True, "model_kwargs": {"revision": "x"}}, "model_kwargs"),
            ({"tokenizer": True, "tokenizer_kwargs": {"revision": "x"}}, "tokenizer_kwargs"),
            ({"model": True, "tokenizer": True, "device_map": "cuda"}, "device_map='cuda'"),
            ({"model": True, "tokenizer": True, "dtype": "bfloat16"}, "dtype='bfloat16'"),
            ({"model_name": "builtin", "model_kwargs": {"torch_dtype": "auto"}}, "'torch_dtype'"),
            ({"model_name": "builtin", "tokenizer_outputs_to_remove": "mask"}, "valid list"),
            ({"model_name": "builtin", "device_map": "balanced"}, "'balanced'; allowed: auto"),
        ],
    )  # fmt: skip
    def test_contradictions(self, options: dict[str, Any], message: str) -> None:
        live = {"model": lambda: hf_model("llama"), "tokenizer": lambda: byte_tokenizer(bos=True)}
        given = {n: live[n]() if v is True else v for n, v in options.items()}
        with pytest.raises(InvalidOption, match=message):
            SamKVLLM(**given)

    def test_what_belongs_to_an_engine(self, corpus: Corpus) -> None:
        for name, value in (
            ("model", hf_model("llama")),
            ("tokenizer", byte_tokenizer(bos=True)),
            ("tokenizer_name", "elsewhere"),
            ("model_kwargs", {"revision": "main"}),
            ("tokenizer_kwargs", {"revision": "main"}),
        ):
            with pytest.raises(InvalidOption, match=f"{name}.*leave out"):
                corpus.llm(**{name: value})

    def test_outputs_that_never_come(self, corpus: Corpus) -> None:
        llm = corpus.llm(tokenizer_outputs_to_remove=["token_type_ids", "attention_mask"])
        assert llm.complete("Hi").text == corpus.llm().complete("Hi").text != ""


class TestStoppingIds:
    def test_they_end_an_answer_and_are_no_part_of_it(self, corpus: Corpus) -> None:
        whole = corpus.llm().complete(ENDLESS, formatted=True).text
        model = corpus.engine.model
        ids = model.tokenize(whole, special=False)
        at = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
        llm = corpus.llm(stopping_ids=[ids[at]])
        response = llm.complete(ENDLESS, formatted=True)
        assert response.raw["usage"]["completion_tokens"] == at
        assert whole.startswith(response.text) and len(response.text) < len(whole)
        streamed = list(llm.stream_complete(ENDLESS, formatted=True))
        assert streamed[-1].text == response.text
        # the model's own still count
        asked = cached_prompt(corpus)
        assert llm.complete(asked).text == corpus.llm().complete(asked).text

    @pytest.mark.parametrize("wrong", [None, -1, 10**6, "</s>"])
    def test_what_is_no_token(self, corpus: Corpus, wrong: Any) -> None:
        # convert_tokens_to_ids gives None for a token that it does not know
        with pytest.raises(InvalidOption, match="stop id .* must be a token id of 'builtin'"):
            corpus.llm(stopping_ids=[wrong])


class TestGenerateKwargs:
    def spied(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        listen(monkeypatch, lambda *_, **options: seen.append(options))
        return seen

    @pytest.mark.parametrize(
        ("always", "call", "temperature"),
        [
            ({}, {}, None),
            ({"do_sample": True}, {}, 1.0),
            ({"temperature": 0.7}, {}, 0.7),
            # in the examples of HuggingFaceLLM; greedy there as well
            ({"do_sample": False, "temperature": 0.7}, {}, 0.0),
            ({"do_sample": False}, {"temperature": 0.3}, 0.3),
            ({}, {"do_sample": None, "temperature": None}, None),
        ],
    )
    def test_do_sample(
        self,
        corpus: Corpus,
        monkeypatch: pytest.MonkeyPatch,
        always: dict[str, Any],
        call: dict[str, Any],
        temperature: float | None,
    ) -> None:
        seen = self.spied(monkeypatch)
        corpus.llm(generate_kwargs=always).complete("Hello", **call)
        assert seen[0].get("temperature") == temperature and "do_sample" not in seen[0]


class TestQueryWrapperPrompt:
    @pytest.mark.parametrize("wrapper", ["Q: {query_str} A:", PromptTemplate("Q: {query_str} A:")])
    def test_around_completions(self, corpus: Corpus, prompts: list[Any], wrapper: Any) -> None:
        llm = corpus.llm(query_wrapper_prompt=wrapper)
        assert not llm.metadata.is_chat_model  # so that query engines prompt with it
        llm.complete("{Hi}")
        list(llm.stream_complete("{Hi}"))
        llm.predict(PromptTemplate("{x}"), x="{Hi}")
        assert prompts == ["Q: {Hi} A:"] * 3

    def test_around_all_the_rest(self, corpus: Corpus, prompts: list[Any]) -> None:
        form: dict[str, Any] = {
            "query_wrapper_prompt": "Q: {query_str} A:",
            "system_prompt": "Be brief.",
            "completion_to_prompt": "<{}>".format,
        }
        corpus.llm(**form).complete("Hi")
        corpus.llm(**form).predict(PromptTemplate("Hi"))
        corpus.llm(**form, is_chat_model=True).complete("Hi")
        assert prompts == ["Q: Be brief.\n\n<Hi> A:"] * 3

    def test_messages_go_through_the_chat_template(
        self, corpus: Corpus, prompts: list[Any]
    ) -> None:
        llm = corpus.llm(query_wrapper_prompt="Q: {query_str} A:", is_chat_model=True)
        llm.predict(PromptTemplate("Hi"))
        assert prompts == [[{"role": "user", "content": "Hi"}]]

    def test_nothing_around(self, corpus: Corpus) -> None:
        llm = corpus.llm(query_wrapper_prompt="{query_str}")  # the default of HuggingFaceLLM
        assert llm.query_wrapper_prompt is None and llm.metadata.is_chat_model

    @pytest.mark.parametrize("wrong", ["no place", "{query_str} {other}", "{query}", 5])
    def test_without_a_place_for_the_query(self, corpus: Corpus, wrong: Any) -> None:
        with pytest.raises(InvalidOption, match=r"query_wrapper_prompt=.*\{query_str\} once"):
            corpus.llm(query_wrapper_prompt=wrong)


class TestSerialisation:
    def test_round_trip_over_the_folder(self, folder: Path, tmp_path: Path) -> None:
        llm = SamKVLLM(
            model_name=str(folder / "model"),
            tokenizer_name=str(folder / "tokenizer"),
            model_kwargs={"local_files_only": True, "token": "hf_secret"},
            tokenizer_kwargs={"max_length": 2048, "token": "hf_secret"},
            tokenizer_outputs_to_remove=["token_type_ids"],
            stopping_ids=[5, 6],
            query_wrapper_prompt="Q: {query_str}",
            generate_kwargs={"do_sample": True, "top_k": 50},
            kv_dir=tmp_path / "kv",
            max_new_tokens=4,
        )
        assert "hf_secret" not in llm.to_json() + repr(llm)
        data = json.loads(llm.to_json())
        again = SamKVLLM.from_dict(data)
        assert again.to_dict() == llm.to_dict() == data
        assert again.engine is not llm.engine
        asked = {"do_sample": False}
        assert again.complete("Hello", **asked).text == llm.complete("Hello", **asked).text
        assert again.query_wrapper_prompt.template == "Q: {query_str}"
        # with something live nothing is loaded, and what would load it is left out
        model, tokenizer = llm.engine.model.hf, llm.engine.model.tokenizer
        not_loaded = {"model_kwargs": {}, "tokenizer_kwargs": {}}
        for live, left_out in (
            ({"engine": llm.engine}, {"tokenizer_name": None, "needs_engine": True}),
            ({"model": model, "tokenizer": tokenizer}, {}),
        ):
            described = SamKVLLM.from_dict(data, **live).to_dict()
            # the dtype of what lives, whatever was asked for
            assert described == data | {"dtype": "float32"} | not_loaded | left_out

    def test_live_objects_stay_behind(self) -> None:
        hf, tokenizer = hf_model("llama"), byte_tokenizer(bos=True)
        llm = SamKVLLM(model=hf, tokenizer=tokenizer, model_name="mine")
        data = json.loads(llm.to_json())
        assert not {"model", "tokenizer", "engine"} & data.keys()
        assert SamKVLLM.from_dict(data, model=hf, tokenizer=tokenizer).to_dict() == data
        with pytest.raises(ModelNotFound, match="'mine'"):
            SamKVLLM.from_dict(data | {"model_kwargs": {"local_files_only": True}})

    def test_a_pickle_never_loads_a_model(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm = SamKVLLM(model=hf_model("llama"), tokenizer_name=str(folder / "tokenizer"))
        llm.stopping_ids.append(7)
        pickled = pickle.dumps(llm)
        assert len(pickled) < 10_000

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(Model, "__init__", refuse)
        monkeypatch.setattr(SamKVLLM, "__init__", refuse)
        travelled = pickle.loads(pickled)
        assert travelled.to_dict() == llm.to_dict()
        with pytest.raises(InvalidOption, match="out of a pickle"):
            travelled.complete("Hello")
