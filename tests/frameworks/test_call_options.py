"""Options that every way of giving them takes: timeout, and what changes nothing here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, TimedOut, UnknownOption
from samkv_integrations.frameworks.local_llm import OF_TRANSFORMERS
from tests.support.models import tiny_model

KINDS = (ChatSamKV, SamKV)
HARMLESS = {
    name: 0 if value is ... else value
    for name, (value, _) in OF_TRANSFORMERS.items() if value is not None
}  # fmt: skip
WITHOUT_EFFECT = {name: row for name, row in OF_TRANSFORMERS.items() if row[0] not in (None, ...)}
SOON = 1e-9
LATE = r"timeout=1e-09: the answer was not complete after that many seconds; give more"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), method="recompute")


class TestTimeout:
    def test_llama_index(self, engine: Engine) -> None:
        plain = SamKVLLM(engine=engine, max_new_tokens=50)
        for llm, given in (
            (SamKVLLM(engine=engine, max_new_tokens=50, timeout=SOON), {}),
            (SamKVLLM(engine=engine, max_new_tokens=50, generate_kwargs={"timeout": SOON}), {}),
            (plain, {"timeout": SOON}),
        ):
            with pytest.raises(TimedOut, match=LATE):
                llm.complete("Hello", **given)
            with pytest.raises(TimedOut, match=LATE):
                list(llm.stream_complete("Hello", **given))
        assert plain.complete("Hello", timeout=600).text
        patient = SamKVLLM(engine=engine, max_new_tokens=5, timeout=SOON)
        assert patient.complete("Hello", timeout=600).text  # that of the call wins

    @pytest.mark.parametrize("timeout", [0, -1, "soon", True, 1e30, float("nan")])
    def test_that_nobody_could_wait(self, engine: Engine, timeout: Any) -> None:
        for call in (
            lambda: engine.generate("Hello", timeout=timeout),
            lambda: SamKVLLM(engine=engine, generate_kwargs={"timeout": timeout}),
            lambda: ChatSamKV(engine=engine).invoke("Hello", timeout=timeout),
        ):
            with pytest.raises(
                InvalidOption, match=rf"timeout={re.escape(repr(timeout))}; it must be above 0"
            ):
                call()


class TestWithoutEffect:
    """Code for transformers gives them; an error would be of no use to anybody."""

    @pytest.mark.parametrize("name", HARMLESS)
    def test_is_accepted(self, engine: Engine, name: str) -> None:
        given = {name: HARMLESS[name]}
        answer = SamKVLLM(engine=engine, max_new_tokens=3).complete("Hello").text
        assert SamKVLLM(engine=engine, max_new_tokens=3).complete("Hello", **given).text == answer
        llm = SamKVLLM(engine=engine, max_new_tokens=3, generate_kwargs=given)
        assert llm.complete("Hello").text == answer
        chat = ChatSamKV(engine=engine, max_tokens=3)
        assert chat.invoke("Hello", **given).text == chat.invoke("Hello").text

    @pytest.mark.parametrize("name", WITHOUT_EFFECT)
    def test_is_refused_where_it_would_have_one(self, engine: Engine, name: str) -> None:
        allowed, why = WITHOUT_EFFECT[name]
        given = {name: 3 if allowed == 1 and allowed is not True else not allowed}
        for call in (
            lambda: SamKVLLM(engine=engine, generate_kwargs=given),
            lambda: ChatSamKV(engine=engine).invoke("Hello", **given),
            lambda: ChatSamKV.from_model_id("builtin", pipeline_kwargs=given),
        ):
            with pytest.raises(InvalidOption, match=f"{name}=.*{why}, leave it out"):
                call()


class TestWhereOptionsBelong:
    def test_a_name_as_the_model(self) -> None:
        """As ChatSamKV and most LLMs call it; it was taken for a model without its tokenizer."""
        assert SamKVLLM(model="builtin").model_name == "builtin"
        assert SamKVLLM(model="builtin", model_name="builtin").model_name == "builtin"
        with pytest.raises(InvalidOption, match="'builtin' and model_name='mine' are the same"):
            SamKVLLM(model="builtin", model_name="mine")

    @pytest.mark.parametrize("kind", KINDS)
    def test_langchain_takes_the_llms_own_in_a_call(self, engine: Engine, kind: type) -> None:
        llm = kind(engine=engine, max_tokens=2)
        llm.invoke("Hello", method="reuse", eviction="h2o", on_miss="text")
        assert (llm.last_report.method, llm.last_report.eviction) == ("reuse", "h2o")
        llm.bind(method="epic").invoke("Hello")
        assert (llm.last_report.method, llm.last_report.eviction) == ("epic", None)
        for wrong in ({"method": "epick"}, {"eviction": "snap-kv"}):
            with pytest.raises(UnknownOption, match="did you mean"):
                llm.invoke("Hello", **wrong)

    def test_llama_index_takes_them_too(self, engine: Engine) -> None:
        llm = SamKVLLM(engine=engine, max_new_tokens=2)
        llm.complete("Hello", method="reuse", eviction="h2o", on_miss="text")
        assert (llm.last_report.method, llm.last_report.eviction) == ("reuse", "h2o")
        list(llm.stream_complete("Hello", method="epic"))
        assert (llm.last_report.method, llm.last_report.eviction) == ("epic", None)
