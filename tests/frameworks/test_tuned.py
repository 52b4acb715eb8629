"""LLMs of the frameworks take what was tuned for their folder of caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_samkv import ChatSamKV
from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import ChunkStore
from samkv_integrations.lab.tuned import TunedSetting, write_tuned
from tests.support.models import saved_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def setting(tiny: str, tmp_path: Path) -> TunedSetting:
    found = TunedSetting(model=tiny, method="epic", set=("recompute.first=3",), eviction="h2o")
    ChunkStore(tmp_path / "kv")
    write_tuned(tmp_path / "kv", found)
    return found


@pytest.mark.parametrize("kind", ["llama_index", "langchain"])
def test_a_method_that_is_named_wins_over_the_file(
    kind: str, tiny: str, setting: TunedSetting, tmp_path: Path
) -> None:
    def llm(**options: Any) -> Any:
        where = {"kv_dir": str(tmp_path / "kv"), **options}
        if kind == "langchain":
            return ChatSamKV(model=tiny, max_tokens=4, **where)
        return SamKVLLM(model_name=tiny, max_new_tokens=4, **where)

    tuned, named = llm(), llm(method="reuse")
    assert tuned.engine.method == setting.to_method() and tuned.engine.tuned == setting
    assert named.method == "reuse"
    for each, method in ((tuned, "epic"), (named, "reuse")):
        text = "[Town]\nThe river of the town is called R1, and its fair is in May."
        each.engine.cache_chunks([text])
        prompt = f"{text}\n\nWhich river?"
        each.invoke(prompt) if kind == "langchain" else each.complete(prompt)
        report = each.last_report
        assert (report.method, report.eviction) == (method, "h2o" if method == "epic" else None)
