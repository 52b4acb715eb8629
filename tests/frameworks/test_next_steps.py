"""Errors of the connectors say what to do next, and in the caller's words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock

from langchain_samkv import ChatSamKV, OfflineEmbeddings, SamKV, SamKVChroma
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption, StoreError
from samkv_integrations.methods import METHODS
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.runtimes.transformers import loading
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), method="recompute")


@pytest.mark.parametrize("name", ["model_name", "model", "kv_dir", "store_bits", "device_map"])
def test_a_configurable_model_is_an_alternative(engine: Engine, name: str) -> None:
    """It was refused only when a call set it, and as a contradiction."""
    llm = ChatSamKV(engine=engine, max_tokens=2)
    with pytest.raises(InvalidOption, match=f"{name}=.*share its engine.*configurable_alternativ"):
        llm.configurable_fields(**{name: ConfigurableField(id="it")})
    assert llm.configurable_fields(temperature=ConfigurableField(id="t")).invoke("Hello")


@pytest.mark.parametrize("make", [
    lambda folder: SamKVLLM(model_name="builtin", kv_dir=folder),
    lambda folder: ChatSamKV(model="builtin", kv_dir=folder),
])  # fmt: skip
def test_a_bad_folder_is_found_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any]
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(loading, "load_model", lambda *given, **_: loaded.append(given))
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(StoreError, match="name a new or empty folder"):
        make(tmp_path)
    assert loaded == []


def test_no_folder_is_made_where_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="give model_name"):
        SamKVLLM(kv_dir=tmp_path / "kv")
    for kind in (ChatSamKV, SamKV):  # LangChain's name of the argument
        with pytest.raises(InvalidOption, match=r"give model \(a hub id"):
            kind(kv_dir=tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("kind", [SamKVLLM, ChatSamKV, SamKV])
def test_what_is_for_a_folder_needs_one(kind: Any, tmp_path: Path) -> None:
    for given in ({"max_bytes": "20GB"}, {"kv_remote": "file:///x"}, {"hot_bytes": 2**20}):
        with pytest.raises(InvalidOption, match=f"^{next(iter(given))}=.*give kv_dir as well"):
            kind(model_name="builtin", **given)
    llm = kind(model_name="builtin", kv_dir=tmp_path / "kv", max_bytes="20GB")
    assert llm.engine.store.index.budget()[0] == 20 * 10**9
    for kv_dir in (None, tmp_path / "kv"):
        with pytest.raises(InvalidOption, match="max_bytes='20GX'; it must be a number of bytes"):
            kind(model_name="builtin", kv_dir=kv_dir, max_bytes="20GX")


@pytest.mark.parametrize("kind", [SamKVLLM, ChatSamKV, SamKV])
@pytest.mark.parametrize(("name", "part"), [
    ("method", METHODS["epic"]), ("eviction", EVICTIONS["h2o"]),
])  # fmt: skip
def test_a_method_of_ones_own(engine: Engine, kind: type, name: str, part: object) -> None:
    with pytest.raises(InvalidOption, match=f"an LLM takes a name.*{name}=\\.\\.\\."):
        kind(engine=engine, **{name: part})


class TestMessages:
    @pytest.mark.parametrize("kind", ["reasoning", "thinking"])
    def test_reasoning_of_an_earlier_answer_is_left_out(self, engine: Engine, kind: str) -> None:
        """Chat templates of models that reason do so, and a history is often another model's."""
        blocks = [{"type": kind, kind: "Let me see."}, {"type": "text", "text": "It is blue."}]
        llm = ChatSamKV(engine=engine, max_tokens=1)
        asked = HumanMessage("And now?")
        seen, plain = (
            llm.invoke([HumanMessage("Which?"), AIMessage(answer), asked]).usage_metadata
            for answer in (blocks, "It is blue.")
        )
        assert seen["input_tokens"] == plain["input_tokens"] > 0

    def test_that_of_llama_index(self, engine: Engine) -> None:
        llm = SamKVLLM(engine=engine, max_new_tokens=1)
        blocks = [ThinkingBlock(content="Let me see."), TextBlock(text="It is blue.")]
        seen, plain = (
            llm.chat([
                ChatMessage(role="user", content="Which?"),
                ChatMessage(role="assistant", blocks=answer),
                ChatMessage(role="user", content="And now?"),
            ]).raw["usage"]["prompt_tokens"]
            for answer in (blocks, blocks[1:])
        )  # fmt: skip
        assert seen == plain > 0


class TestVectorStores:
    def test_pickles(self, engine: Engine, tmp_path: Path) -> None:
        """It was a TypeError about a lock."""
        store = SamKVChroma("town", OfflineEmbeddings(), persist_directory=str(tmp_path),
                            engine=engine)  # fmt: skip
        with pytest.raises(InvalidOption, match="cannot be pickled.*make it again in the other"):
            pickle.dumps(store)
        store.add_texts(["Tobias Trulman was born in Flevport."])
        for copied in (copy(store), deepcopy(store)):
            assert len(copied.get()["ids"]) == 1


def test_a_folder_without_a_name_is_none() -> None:
    for make in (lambda: ChatSamKV(model="builtin", kv_dir=""),
                 lambda: SamKVLLM(model_name="builtin", kv_dir="")):  # fmt: skip
        with pytest.raises(InvalidOption, match="kv_dir=''; give a folder, or None"):
            make()
