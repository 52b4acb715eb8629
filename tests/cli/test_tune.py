"""``samkv tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.lab.tuned import (
    TUNED_FILE,
    TunedSetting,
    read_tuned,
    write_tuned,
)
from tests.cli.running import error_of, ran, rows_of
from tests.support.records import RECORDS

FAST = ("--top-k", "2", "--max-new-tokens", "4")


def tuned(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran("tune", *FAST, *arguments, "--json"))
    assert found["command"] == "tune"
    return found


@pytest.mark.slow  # half a minute of measuring
def test_tune_counts_right_answers_and_writes_a_setting_that_ask_takes(town: Path) -> None:
    # in float32: one of 14 answers hangs on how 16 bits are rounded
    ran("ingest", str(town), "--collection", "town", "--dtype", "float32")
    asked = [json.loads(line) for line in (town / "questions.jsonl").read_text().splitlines()]
    asked += [{"question": "Who knows?"}, {"question": "Where?", "answers": []}, asked[1]]
    asked[0]["answers"] = ["an answer that stands nowhere"]
    Path("asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    options = ("--collection", "town", "--questions", "asked.jsonl", "--lose", "45")
    found = tuned(*options)
    assert found["lose"] == 0.45
    assert (found["without_answers"], found["answers_in_no_document"]) == (2, 1)
    assert found["repeated"] == 1
    assert found["why"] == "" and found["held_out"][0]["difference"] >= -0.45
    setting = read_tuned(Path(".samkv/kv"))["builtin"]
    assert found["written"] == str(Path(".samkv/kv").resolve() / TUNED_FILE)
    assert found["recommended"] == setting.line
    assert setting.measured["collection"] == "town"
    assert {row["label"] for row in found["rows"]} >= {"reuse", "epic", "auto"}
    for row in found["rows"]:
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["right"] == row["full"] - row["lost"] + row["won"]
    full, held_out = found["rows"][0], found["held_out"][0]
    assert full["questions"] + held_out["questions"] == len(RECORDS)
    assert full["full"] + held_out["full"] < len(RECORDS)  # it has not all of them right
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town")
    assert row["method"] == setting.method


@pytest.mark.slow  # every setting answers a question
def test_tune_says_when_nothing_is_enough_and_writes_nothing(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    options = ("--collection", "town", "--minutes", "0.001", "--questions", "town/questions.jsonl")
    shown = ran("tune", *FAST, *options)
    assert "Recommended: --method recompute: the time was over" in " ".join(shown.split())
    assert not Path(".samkv/kv", TUNED_FILE).exists()


def test_options_without_a_method_are_of_the_default_one(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    write_tuned(Path(".samkv/kv"), TunedSetting(model="builtin", method="reuse"))
    ask = ("ask", RECORDS[0].question, "--collection", "town")
    assert rows_of(*ask)[0]["method"] == "reuse"
    assert rows_of(*ask, "--set", "recompute.first=48")[0]["method"] == "auto"


def test_five_different_questions_with_answers_are_needed(working_folder: Path) -> None:
    for asked, n in (('"answers": ["the"]', 0), ('"answers": ["Ida"]', 1)):
        Path("asked.jsonl").write_text(f'{{"question": "Who?", {asked}}}\n' * 5)
        few = error_of("tune", "--questions", "asked.jsonl")
        assert f"asked.jsonl has {n} different question" in few and "and 5 are needed" in few
