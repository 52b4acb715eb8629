"""Everything but tensors works on a runtime of a hundred lines, which looks tokens up in a table.

Its answers depend on every entry of a prompt: a wrong or a missing cache changes them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.methods import METHODS, names_by_tokens
from samkv_integrations.methods.base import with_option
from samkv_integrations.methods.guided import LARGE, GuidedRecompute
from tests.contracts.runtime_contract import CHAT, PROMPT, TEXTS, RuntimeContract
from tests.support.table_runtime import TableRuntime


class TestTableRuntime(RuntimeContract):
    is_exact = True

    def runtime(self) -> TableRuntime:
        return TableRuntime()


@pytest.fixture
def engine() -> Engine:
    engine = Engine(TableRuntime())
    engine.cache_chunks(TEXTS)
    return engine


def test_a_reused_prompt_computes_its_other_tokens_only(engine: Engine) -> None:
    report = engine.generate(PROMPT, method="reuse").report
    runtime = engine.model
    assert isinstance(runtime, TableRuntime)
    assert runtime.n_computed == report.prompt_tokens - sum(len(text.encode()) for text in TEXTS)
    assert report.cached_tokens == sum(len(text.encode()) for text in TEXTS)


def test_a_conversation_over_caches_goes_on_from_memory(engine: Engine) -> None:
    first = engine.generate(CHAT)
    assert first.report.stays
    turns = [*CHAT, {"role": "assistant", "content": first.text},
             {"role": "user", "content": "And when was the harbour built?"}]  # fmt: skip
    second = engine.generate(turns)
    assert second.report.prefix_tokens > first.report.prompt_tokens
    assert second.text == Engine(TableRuntime(), method="recompute").generate(turns).text


class Large(TableRuntime):
    """Of the same answers, and with more parameters."""

    n_parameters = LARGE


@pytest.mark.parametrize(
    ("runtime", "options", "first", "matched"),
    [(TableRuntime, {}, 8, 96), (Large, {}, 4, 0), (Large, {"first": 9}, 9, 0),
     (Large, {"matched": 32}, 4, 32), (TableRuntime, {"first": 4, "matched": 0}, 4, 0)],
)  # fmt: skip
def test_auto_recomputes_what_suits_the_models_size(
    runtime: type[TableRuntime], options: dict[str, int], first: int, matched: int
) -> None:
    """Unless an option says how much. Without a comparison of times, as the prompt is short."""
    auto = replace(METHODS["auto"], else_way="")
    for name, number in options.items():
        auto = with_option(auto, f"recompute.{name}={number}")
    own = replace(METHODS["samkv-guided"], recompute=GuidedRecompute(first=first, matched=matched))
    engine, reports = Engine(runtime(), prefix_bytes=0), []
    engine.cache_chunks(TEXTS)
    for method in (auto, own):
        reports.append(engine.generate(PROMPT, method=method, max_new_tokens=4).report)
    assert reports[0].recompute_ratio == reports[1].recompute_ratio > 0
    assert reports[0].uncached_tokens == reports[1].uncached_tokens


@pytest.mark.parametrize(
    ("n_parameters", "setting", "ran"),
    [(0, "first=8", "samkv-guided"), (LARGE, "first=8", "epic"), (0, "matched=0", "epic"),
     (LARGE, "matched=96", "samkv-guided")],
)  # fmt: skip
def test_reports_name_what_auto_chose(n_parameters: int, setting: str, ran: str) -> None:
    auto = with_option(METHODS["auto"], f"recompute.{setting}")
    assert auto.for_model(n_parameters).way == ran
    assert replace(auto, else_way="").for_model(n_parameters).way == "auto"


@pytest.mark.parametrize("options", [{"method": "samkv-fusion"}, {"eviction": "h2o"}])
def test_what_needs_tensors_is_refused(engine: Engine, options: Any) -> None:
    with pytest.raises(InvalidOption, match="needs the transformers runtime"):
        engine.generate(PROMPT, **options)
    with pytest.raises(InvalidOption, match="needs the transformers runtime"):
        Engine(engine.model, **options)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in names_by_tokens()])
def test_the_refusal_names_the_methods_that_it_runs(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        engine.generate(PROMPT, method=name)
    assert str(raised.value).endswith(f"; choose one of {', '.join(names_by_tokens())}")


def test_a_schema_is_refused_where_there_is_no_vocabulary_for_it(engine: Engine) -> None:
    with pytest.raises(InvalidOption, match="cannot follow a schema"):
        engine.generate(PROMPT, json_schema={"type": "object"})


ALONE = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None  # importing it fails, as if it were not installed

from tests.contracts.runtime_contract import CHAT, PROMPT, TEXTS
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.errors import InvalidOption
from tests.support.table_runtime import TableRuntime

engine = Engine(TableRuntime(), ChunkStore(sys.argv[1]))
engine.cache_chunks(TEXTS)
assert engine.generate(PROMPT, method="reuse").report.reused == len(TEXTS)
assert engine.generate(CHAT).text
try:
    engine.generate(PROMPT, method="reuse-local")
except InvalidOption as error:
    assert "choose one of recompute, reuse, epic" in str(error), error
else:
    raise AssertionError("reuse-local is not by token ids")
assert engine.forget(TEXTS) == len(TEXTS)
"""


def test_torch_and_transformers_are_not_needed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
