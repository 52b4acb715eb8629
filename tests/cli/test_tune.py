"""``samkv tune``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.engine.options import TUNED_FILE, TunedSetting, read_tuned, write_tuned
from tests.cli.running import error_of, ran, rows_of
from tests.support.records import RECORDS

FAST = ("--top-k", "2", "--max-new-tokens", "4")


def tuned(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran("tune", *FAST, *arguments, "--json"))
    assert found["command"] == "tune"
    return found


@pytest.mark.slow  # half a minute of measuring
def test_tune_writes_a_setting_that_ask_takes(town: Path) -> None:
    # in float32: one of 14 answers hangs on how 16 bits are rounded
    ran("ingest", str(town), "--collection", "town", "--dtype", "float32")
    options = ("--collection", "town", "--agree", "0.6", "--minutes", "1")
    found = tuned(*options)
    assert found["why"] == "" and found["held_out"][-1]["agreement"] >= 0.6
    setting = read_tuned(Path(".samkv/kv"))["builtin"]
    assert found["written"] == str(Path(".samkv/kv").resolve() / TUNED_FILE)
    assert found["recommended"] == setting.line
    assert setting.measured["collection"] == "town"
    assert {row["label"] for row in found["rows"]} >= {"reuse", "epic", "auto"}
    for row in found["rows"]:
        low, high = row["first_kl_interval"]
        assert low <= row["first_kl"] <= high and row["low"] <= row["agreement"] <= row["high"]
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town")
    assert row["method"] == setting.method
    shown = ran("tune", *FAST, *options, "--no-write")
    assert "Recommended: " + setting.line in shown and "Not written" in shown
    assert not Path(".samkv/tune").exists()  # a run leaves nothing but its setting
    checked = ran("tune", *FAST, *options, "--check", "--seed", "5", "--most", "10")
    assert setting.line in checked and "On 10 questions: agreement" in checked
    assert "its interval, [" in checked


@pytest.mark.slow  # every setting answers a question, twice
def test_tune_says_when_nothing_is_enough_and_writes_nothing(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    options = ("--collection", "town", "--minutes", "0.001", "--questions", "town/questions.jsonl")
    shown = ran("tune", *FAST, *options)
    assert "Recommended: full prefill, --method recompute: the time was over" in " ".join(
        shown.split()
    )
    assert "--fall-back writes it" in shown
    assert not Path(".samkv/kv", TUNED_FILE).exists()
    assert "Written to" in ran("tune", *FAST, *options, "--fall-back")
    assert read_tuned(Path(".samkv/kv"))["builtin"].method == "recompute"
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town")
    assert (row["method"], row["ran"]) == ("recompute", "recompute")
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town", "--method", "auto")
    assert row["method"] == "auto"


def test_tune_says_what_is_wrong(town: Path) -> None:
    assert "--agree 95" in error_of("tune", "--agree", "95")
    assert "--by 'bleu'; allowed: exact, f1" in error_of("tune", "--by", "bleu")
    assert "--top-k 0; give at least 1" in error_of("tune", "--top-k", "0")
    assert "holds no Chroma database" in error_of("tune")
    ran("ingest", str(town), "--collection", "town")
    assert "unknown collection 'twon'" in error_of("tune", "--collection", "twon")
    assert "has no entry for 'builtin'" in error_of("tune", "--collection", "town", "--check")


@pytest.mark.slow  # every setting answers a question
def test_another_machine_tunes_on_caches_of_a_remote_tier(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one its chunks had no caches, and no question was left."""
    monkeypatch.setenv("SAMKV_STORE_SECRET", "5a" * 32)
    remote = ("--remote", f"file://{Path.cwd()}/bucket")
    ran("ingest", str(town), "--collection", "town", *remote)
    shutil.move(".samkv/kv", "first-machine")
    found = tuned("--collection", "town", "--minutes", "0.001", "--no-write", *remote)
    assert {row["n"] for row in found["rows"]} == {1}
    assert list(Path(".samkv/kv").rglob("*.safetensors"))


def test_a_broken_file_is_an_error_of_every_command_that_opens_the_caches(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    Path(".samkv/kv", TUNED_FILE).write_text(
        "[models.builtin]\nmethod = 'magic'\n", encoding="utf-8"
    )
    for command in (("ask", "x"), ("tune",)):
        assert "unknown method 'magic'; known: a3" in error_of(*command, "--collection", "town")


def test_options_without_a_method_are_of_the_default_one(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    write_tuned(Path(".samkv/kv"), TunedSetting(model="builtin", method="reuse"))
    ask = ("ask", RECORDS[0].question, "--collection", "town")
    assert rows_of(*ask)[0]["method"] == "reuse"
    assert rows_of(*ask, "--set", "recompute.matched=48")[0]["method"] == "auto"


def test_chunks_of_which_no_question_can_be_made(working_folder: Path) -> None:
    Path("short.txt").write_text("Hidow.")
    ran("ingest", "short.txt", "--collection", "town")
    assert "a sentence of a few words; give --questions FILE" in error_of(
        "tune", *FAST, "--collection", "town"
    )


def test_a_setting_of_caches_of_other_bits_is_not_checked(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    write_tuned(Path(".samkv/kv"), TunedSetting(model="builtin", method="reuse", store_bits=8))
    assert "is of caches of 8 bits, which have 4 here" in error_of(
        "tune", "--collection", "town", "--check"
    )
