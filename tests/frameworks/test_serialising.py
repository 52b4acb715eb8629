"""What an LLM says of its engine survives a dictionary, a copy and a pickle, or is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.runnables import ConfigurableField

from langchain_samkv import ChatSamKV, SamKV
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.vector_stores.samkv import SamKVChromaVectorStore
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import InvalidOption, UnknownOption
from samkv_integrations.runtimes.transformers.loading import load_model
from tests.support.records import TEXTS, builtin
from tests.support.tested_runtime import of_transformers_alone

TEXT = TEXTS[0]
LLMS = (SamKVLLM, ChatSamKV, SamKV)


def engine_of(folder: Path, *, namespace: str = "", **options: Any) -> Engine:
    return Engine(builtin(), ChunkStore(folder, namespace=namespace), **options)


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    return tmp_path / "kv"


class TestBudget:
    @pytest.mark.parametrize("kind", LLMS)
    def test_is_written_down_in_the_folder(self, kind: type[Any], kv: Path) -> None:
        def budget() -> tuple[int | None, dict[str, int]]:
            return ChunkStore(kv).index.budget()

        llm = kind(model_name="builtin", kv_dir=kv, max_bytes=10**9)
        ChunkStore(kv).set_budget(10**9, {"tenant": 10**6})
        assert budget() == (10**9, {"tenant": 10**6})
        assert kind(model_name="builtin", kv_dir=kv).max_bytes is None
        assert budget() == (10**9, {"tenant": 10**6})
        again = kind(engine=llm.engine, max_bytes=10**8)
        assert again.engine is llm.engine and budget() == (10**8, {"tenant": 10**6})

    def test_goes_with_an_llm_that_is_written_and_read(self, kv: Path) -> None:
        llm = SamKVLLM(model_name="builtin", kv_dir=kv, max_bytes=10**9)
        assert SamKVLLM.from_dict(json.loads(llm.to_json())).max_bytes == 10**9
        assert SamKVLLM.from_dict(llm.to_dict(), engine=llm.engine).max_bytes == 10**9


class TestNamespace:
    @pytest.mark.parametrize("kind", LLMS)
    def test_is_an_argument(self, kind: type[Any], kv: Path) -> None:
        mine = kind(model_name="builtin", kv_dir=kv, namespace="tenant")
        assert (mine.namespace, mine.engine.store.namespace) == ("tenant", "tenant")
        mine.engine.cache_chunks([TEXT])
        others = kind(model_name="builtin", kv_dir=kv)
        assert (others.namespace, others.engine.is_cached(TEXT)) == ("", False)
        assert kind(model_name="builtin", namespace="tenant").engine.store.namespace == "tenant"

    @pytest.mark.parametrize("kind", LLMS)
    def test_is_the_engines_if_one_is_given(self, kind: type[Any], kv: Path) -> None:
        engine = engine_of(kv, namespace="tenant")
        assert kind(engine=engine).namespace == kind(engine=engine, namespace="tenant").namespace
        for other in ("", "another"):
            with pytest.raises(InvalidOption, match=f"namespace='{other}'.*'tenant'; leave out"):
                kind(engine=engine, namespace=other)
        with pytest.raises(InvalidOption, match="namespace=7: Input should be a valid string"):
            kind(engine=engine, namespace=7)

    @of_transformers_alone  # the name that is written means one of its models
    def test_is_written_and_read(self, kv: Path) -> None:
        """Without it the LLM that came back looked into another tenant's caches."""
        llm = SamKVLLM(engine=engine_of(kv, namespace="tenant"))
        llm.engine.cache_chunks([TEXT])
        data = json.loads(llm.to_json())
        assert data.pop("needs_engine")  # the user says that the defaults will do
        again = SamKVLLM.from_dict(data)
        assert again.engine is not llm.engine and again.namespace == "tenant"
        assert again.engine.key_of(TEXT) == llm.engine.key_of(TEXT)
        assert again.engine.is_cached(TEXT)
        with pytest.raises(InvalidOption, match="namespace='tenant'"):
            SamKVLLM.from_dict(llm.to_dict(), engine=engine_of(kv))

    @pytest.mark.parametrize("kind", [ChatSamKV, SamKV])
    def test_langchain_configures_and_dumps_with_it(self, kind: type[Any], kv: Path) -> None:
        llm = kind(engine=engine_of(kv, namespace="tenant", method="reuse"), max_tokens=4)
        chosen = llm.configurable_fields(max_tokens=ConfigurableField(id="n"))
        made, _ = chosen.prepare({"configurable": {"n": 1}})
        assert (made.namespace, made.max_tokens) == ("tenant", 1)
        assert made.engine is llm.engine
        dumped = json.dumps(dumpd(llm))
        assert "namespace='tenant'" in dumped and "not_implemented" in dumped

    def test_transforms_and_vector_stores_are_told_whose_it_is(self, kv: Path) -> None:
        """Neither holds an engine in its dictionary; a transform that moves says so to caches."""
        mine, theirs = engine_of(kv), engine_of(kv, namespace="tenant")
        transform = SamKVCacheTransform(engine=mine)
        moved = SamKVCacheTransform.from_dict(transform.to_dict(), engine=theirs)
        assert moved.store_id != transform.store_id
        with pytest.raises(InvalidOption, match="give either llm"):
            SamKVCacheTransform.from_dict(transform.to_dict())
        store = SamKVChromaVectorStore.from_params("t-1", persist_dir=kv.parent / "c", engine=mine)
        with pytest.raises(UnknownOption, match="chroma_collection"):
            SamKVChromaVectorStore.from_dict(store.to_dict())


class TestTheRestOfAnEngine:
    def test_method_and_eviction_are_the_engines_if_the_llm_has_none(self, kv: Path) -> None:
        llm = SamKVLLM(engine=engine_of(kv, method="reuse", eviction="h2o"), max_new_tokens=2)
        assert (llm.method, llm.eviction) == (None, None)
        llm.complete("Hello")
        assert llm.last_report is not None
        assert (llm.last_report.method, llm.last_report.eviction) == ("reuse", "h2o")
        own = SamKVLLM(engine=llm.engine, method="epic", eviction="quest")
        assert (own.method, own.eviction) == ("epic", "quest")

    def test_the_dtype_is_the_engines(self, kv: Path) -> None:
        model = load_model("builtin", device="cpu", dtype="bfloat16")
        llm = SamKVLLM(engine=Engine(model, ChunkStore(kv)))
        data = llm.to_dict()
        del data["needs_engine"]
        assert SamKVLLM.from_dict(data).engine.key_of(TEXT) == llm.engine.key_of(TEXT)

    @pytest.mark.parametrize("way", [lambda llm: llm, lambda llm: pickle.loads(pickle.dumps(llm))])
    def test_an_engine_cannot_be_written_and_is_asked_for(
        self, kv: Path, way: Callable[[SamKVLLM], SamKVLLM]
    ) -> None:
        """An LLM without it could find no caches, or answer otherwise, and not say so."""
        llm = SamKVLLM(engine=engine_of(kv, prefix="none"), max_new_tokens=2)
        data = json.loads(way(llm).to_json())
        with pytest.raises(InvalidOption, match="made on an engine.*give it to from_dict"):
            SamKVLLM.from_dict(data)
        again = SamKVLLM.from_dict(data, engine=llm.engine)
        assert again.engine is llm.engine and again.to_dict() == data
        del data["needs_engine"]
        assert SamKVLLM.from_dict(data).engine.fingerprint.weights

    def test_events_and_calls_go_on(self, kv: Path) -> None:
        """LlamaIndex describes an LLM for its events, whatever it cannot write of it."""
        llm = SamKVLLM(engine=engine_of(kv, prefix="none"), max_new_tokens=2)
        assert llm.complete("Hello").text and llm.to_payload()
