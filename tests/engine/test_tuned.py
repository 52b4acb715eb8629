"""``samkv.toml``: what it may say, and who follows it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samkv_integrations import METHODS, ChunkStore, Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.tuned import TUNED_FILE, TunedSetting, read_tuned, write_tuned
from samkv_integrations.methods.eviction import EVICTIONS
from samkv_integrations.prompt import rag_prompt
from samkv_integrations.store.upkeep import gc, verify
from tests.support.models import tiny_model

TEXTS = ["The river of Hesmere is the Hidow. " * 6, "The fair of Herstead is in January. " * 6]
PROMPT = rag_prompt("On which river does Hesmere lie?", TEXTS)
SETTING = TunedSetting(
    model="tiny-llama", method="samkv-guided", set=("recompute.first=48", "recompute.matched=192"),
    eviction="quest", eviction_budget=0.5, measured={"collection": 'notes "1"', "agreement": 0.97},
)  # fmt: skip

EPIC = "[models.tiny-llama]\nmethod = 'epic'"


def engine_on(folder: Path, **options: object) -> Engine:
    return Engine(tiny_model(), ChunkStore(folder / "kv"), **options)  # type: ignore[arg-type]


def tuned_folder(folder: Path, setting: TunedSetting = SETTING) -> Path:
    ChunkStore(folder / "kv")
    write_tuned(folder / "kv", setting)
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    odd = replace(SETTING, model='a "b"\\ü\x7f\n/😀', set=(), eviction="none", eviction_budget=None)
    write_tuned(tmp_path, SETTING)
    write_tuned(tmp_path, odd)
    assert read_tuned(tmp_path) == {SETTING.model: SETTING, odd.model: odd}
    newer = replace(SETTING, method="reuse", set=(), eviction="none", eviction_budget=None)
    write_tuned(str(tmp_path), newer)
    assert read_tuned(tmp_path) == {SETTING.model: newer, odd.model: odd}
    assert [file.name for file in tmp_path.iterdir()] == [TUNED_FILE]


def test_the_file_is_its_owners_and_what_a_kill_leaves_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was readable by the umask, and its temporary file had a name that gc does not know."""
    store = ChunkStore(tmp_path / "kv")
    before = os.umask(0)
    try:
        assert stat.S_IMODE(write_tuned(store.path, SETTING).stat().st_mode) == 0o600
    finally:
        os.umask(before)
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", lambda *_: None)
        killed.setattr(os, "unlink", lambda *_: None)
        write_tuned(store.path, SETTING)
    (left,) = [file for file in store.path.iterdir() if file.name.count(TUNED_FILE + ".")]
    os.utime(left, (0, 0))
    assert gc(store).recovered.n_unfinished == 1 and not left.exists()


def test_what_people_write_of_their_measurements_is_kept(tmp_path: Path) -> None:
    (tmp_path / TUNED_FILE).write_text(
        "[models.a]\nmethod = 'reuse'\n[models.a.measured]\n'by hand' = 'a \"b\"'\n'ü' = true\n"
        "most = inf\nleast = -inf\nn = 3\n",
        encoding="utf-8",
    )
    before = read_tuned(tmp_path)
    write_tuned(tmp_path, SETTING)
    assert read_tuned(tmp_path) == {**before, SETTING.model: SETTING}
    assert before["a"].measured["by hand"] == 'a "b"' and before["a"].measured["n"] == 3


def test_a_setting_of_the_file_answers_as_the_same_setting_given(tmp_path: Path) -> None:
    tuned = engine_on(tuned_folder(tmp_path))
    tuned.cache_chunks(TEXTS)
    rule = replace(EVICTIONS["quest"], budget_tokens=None, budget_ratio=0.5)
    guided = METHODS["samkv-guided"]
    again = replace(guided.recompute, first=48, matched=192)  # type: ignore[call-arg]
    given = engine_on(tmp_path, method=replace(guided, recompute=again), eviction=rule)
    default = engine_on(tmp_path, method="samkv-guided")
    follow = list(range(20, 28))
    one, other, third = (
        engine.logits(PROMPT, TEXTS, follow=follow) for engine in (tuned, given, default)
    )
    assert torch.equal(one, other) and not torch.equal(one, third)
    texts = [engine.generate(PROMPT, TEXTS, max_new_tokens=8) for engine in (tuned, given)]
    assert texts[0].text == texts[1].text
    assert texts[0].report.eviction == texts[1].report.eviction == "quest"
    assert texts[0].report.method == "samkv-guided"
    assert tuned.tuned == SETTING and given.tuned is None


def test_explicit_arguments_win(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    assert engine_on(tmp_path, method="reuse").method == METHODS["reuse"]
    engine = engine_on(tmp_path, eviction="none")
    assert engine.method == SETTING.to_method() and engine.eviction == "none"
    engine = engine_on(tmp_path)
    engine.cache_chunks(TEXTS)
    report = engine.generate(PROMPT, TEXTS, max_new_tokens=2, method="recompute").report
    assert (report.method, report.eviction) == ("recompute", None)


def test_another_model_has_the_default(tmp_path: Path) -> None:
    tuned_folder(tmp_path, replace(SETTING, model="another"))
    assert engine_on(tmp_path).method == METHODS["auto"]
    assert Engine(tiny_model()).method == METHODS["auto"]


def test_bits_are_those_of_the_file(tmp_path: Path) -> None:
    eight = replace(SETTING, store_bits=8)
    engine = engine_on(tuned_folder(tmp_path, eight))
    assert (engine.store_bits, engine.method) == (8, SETTING.to_method())


@pytest.mark.parametrize(("measured", "given"), [(4, 8), (8, 4), (8, 16)])
def test_a_setting_is_not_for_caches_of_bits_that_it_was_not_measured_on(
    measured: int, given: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned_folder(tmp_path, replace(SETTING, store_bits=measured))
    engine = engine_on(tmp_path, store_bits=given)
    assert (engine.store_bits, engine.method) == (given, METHODS["auto"])
    assert f"measured on caches of {measured} bits" in caplog.text
    caplog.clear()
    assert engine_on(tmp_path, store_bits=measured).method == SETTING.to_method()
    assert engine_on(tmp_path, store_bits=given, method="reuse").method == METHODS["reuse"]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("method = ", "Invalid value"),
        ("models = " + 20_000 * "[", "recursion"),
        ("[other]\nx = 1", "other={'x': 1}: Extra inputs"),
        ("[models]\ntiny-llama = 3", "models.tiny-llama=3: Input should be a valid dict"),
        ("[models.tiny-llama]\nset = []", "models.tiny-llama: method: Field required"),
        ("[models.tiny-llama]\nmethod = 'magic'", "models.tiny-llama: unknown method 'magic';"),
        (f"{EPIC}\nmetod = 'x'", "models.tiny-llama: metod='x': Unexpected"),
        (f"{EPIC}\nset = ['recompute.firs=3']", "did you mean 'recompute.fir"),
        (f"{EPIC}\nset = [3]", "set.0=3: Input should be a valid string"),
        (f"{EPIC}\neviction_budget = 0.1", "without an eviction"),
        (f"{EPIC}\nstore_bits = 5", "store_bits=5"),
        (f"{EPIC}\nmeasured.of = {{a = 1}}", "measured.of.str={'a': 1}: Input should"),
    ],
)
def test_a_broken_file_is_named_with_what_is_allowed(
    tmp_path: Path, text: str, expected: str
) -> None:
    ChunkStore(tmp_path / "kv")
    (tmp_path / "kv" / TUNED_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOption) as raised:
        engine_on(tmp_path)
    assert str(tmp_path / "kv" / TUNED_FILE) in str(raised.value) and expected in str(raised.value)
    assert "samkv tune" in str(raised.value)
    engine_on(tmp_path, method="reuse", store_bits=4)  # who says all needs no file


@pytest.mark.parametrize("text", ["method = ", "[other]\nx = 1"])
def test_a_file_of_something_else_is_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / TUNED_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOption, match="mend or delete it"):
        write_tuned(tmp_path, SETTING)
    assert (tmp_path / TUNED_FILE).read_text(encoding="utf-8") == text


def test_windows_editors_begin_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = write_tuned(tmp_path, SETTING)
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read_tuned(tmp_path) == {SETTING.model: SETTING}


def test_the_store_leaves_the_file_alone(tmp_path: Path) -> None:
    engine = engine_on(tuned_folder(tmp_path))
    engine.cache_chunks(TEXTS)
    before = (tmp_path / "kv" / TUNED_FILE).read_bytes()
    store = ChunkStore(tmp_path / "kv")
    assert not verify(store, repair=True).damaged
    gc(store)
    engine.forget(TEXTS)
    assert (tmp_path / "kv" / TUNED_FILE).read_bytes() == before
