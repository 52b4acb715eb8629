"""Every option of sampling is an option of both frameworks, and of their guides."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import TextNode
from pydantic import TypeAdapter

from langchain_samkv import ChatSamKV, SamKV
from langchain_samkv.base import LocalModel
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.option import declared
from samkv_integrations.options import SamplingOptions
from tests.support.asked import listen
from tests.support.records import builtin

NAMES = sorted(declared(SamplingOptions).keys() - {"max_new_tokens"})
PROMPT = "Question: Where was Tobias Trulman born?"
IN_RANGE = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "top_k": 3, "seed": 3,
            "repetition_penalty": 1.5}  # fmt: skip
OUT_OF_RANGE = {"temperature": -1.0, "top_p": 2.0, "min_p": 2.0, "top_k": -1, "seed": 2**64,
                "repetition_penalty": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(builtin())


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every answer that an engine is asked for."""
    seen: list[dict[str, Any]] = []
    listen(monkeypatch, lambda *_, **options: seen.append(options))
    return seen


@pytest.mark.parametrize("name", NAMES)
class TestEveryOption:
    def test_langchain(self, engine: Engine, name: str, sampled: list[dict[str, Any]]) -> None:
        assert LocalModel.model_fields[name].description
        for kind in (ChatSamKV, SamKV):
            kind(engine=engine, max_tokens=1, **{name: IN_RANGE[name]}).invoke(PROMPT)
            kind(engine=engine, max_tokens=1).invoke(PROMPT, **{name: IN_RANGE[name]})
            with pytest.raises(InvalidOption, match=f"{name}={OUT_OF_RANGE[name]}; it must be"):
                kind(engine=engine, **{name: OUT_OF_RANGE[name]})
        assert [options[name] for options in sampled] == [IN_RANGE[name]] * 4

    def test_llama_index(self, engine: Engine, name: str, sampled: list[dict[str, Any]]) -> None:
        given = {name: IN_RANGE[name]}
        SamKVLLM(engine=engine, max_new_tokens=1, generate_kwargs=given).complete(PROMPT)
        SamKVLLM(engine=engine, max_new_tokens=1).complete(PROMPT, **given)
        with pytest.raises(InvalidOption, match=f"{name}={OUT_OF_RANGE[name]}; it must be"):
            SamKVLLM(engine=engine, generate_kwargs={name: OUT_OF_RANGE[name]})
        assert [options[name] for options in sampled] == [IN_RANGE[name]] * 2


class TestArgumentsOfSamKVLLM:
    @pytest.mark.parametrize("name", ["stopping_ids", "generate_kwargs", "callback_manager"])
    def test_none_is_as_good_as_nothing(self, engine: Engine, name: str) -> None:
        without = SamKVLLM(engine=engine).to_dict()
        assert SamKVLLM(engine=engine, **{name: None}).to_dict() == without

    @pytest.mark.parametrize("kind", [SamKVLLM, ChatSamKV])
    def test_what_one_takes_is_said(self, kind: type[Any]) -> None:
        with pytest.raises(InvalidOption, match=r"device_map=\{'': 'cpu'\}.*model_kwargs="):
            kind(model="builtin", device_map={"": "cpu"})

    def test_one_that_is_made_is_taken_as_it_is(self) -> None:
        """By another component's field, for example; its model is not loaded a second time."""
        llm = SamKVLLM(model_name="builtin", tokenizer_kwargs={"max_length": 2048})
        assert TypeAdapter(SamKVLLM).validate_python(llm) is llm

    def test_a_pickle_takes_nothing_from_the_original(self, engine: Engine) -> None:
        llm = SamKVLLM(engine=engine, completion_to_prompt=lambda text: f"<{text}>")
        pickle.dumps(llm)  # without the function, which no pickle can hold
        assert llm.completion_to_prompt("Hello") == "<Hello>" and llm.engine is engine


def test_pipelines_notice_another_store() -> None:
    """The cache of a pipeline is keyed with what `to_dict` says of a step."""
    nodes = [TextNode(text="Tobias Trulman was born in Flevport.")]
    engines = [Engine(builtin()) for _ in range(2)]
    steps = [SamKVCacheTransform(engine=each) for each in (*engines, engines[0])]
    one, two, again = (get_transformation_hash(nodes, step) for step in steps)
    assert one == again != two
    with pytest.raises(UnknownOption, match="store_id"):
        SamKVCacheTransform(engine=engines[0], store_id="mine")  # type: ignore[call-arg]
    moved = SamKVCacheTransform.from_dict(steps[0].to_dict(), engine=engines[1])
    assert moved.store_id == steps[1].store_id != steps[0].store_id
