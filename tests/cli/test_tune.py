"""``samkv tune``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.engine.tuned import (
    TUNED_FILE,
    Scalar,
    TunedSetting,
    read_tuned,
    write_tuned,
)
from samkv_integrations.tuning.run import AGREEMENT
from tests.cli.running import error_of, ran, rows_of, run
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
    asked += [{"question": "Who knows?"}, {"question": "Where?", "answers": []}]
    asked[0]["answers"] = ["an answer that stands nowhere"]
    Path("asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    options = ("--collection", "town", "--questions", "asked.jsonl", "--lose", "45")
    found = tuned(*options)
    assert (found["lose"], found["judged_by"]) == (0.45, "gold answers")
    assert (found["without_answers"], found["answers_in_no_document"]) == (2, 1)
    assert found["why"] == "" and found["held_out"][0]["difference"] >= -0.45
    setting = read_tuned(Path(".samkv/kv"))["builtin"]
    assert found["written"] == str(Path(".samkv/kv").resolve() / TUNED_FILE)
    assert found["recommended"] == setting.line
    assert setting.measured["collection"] == "town"
    assert {row["label"] for row in found["rows"]} >= {"reuse", "samkv-guided", "auto"}
    for row in found["rows"]:
        assert row["low"] <= row["difference"] <= row["high"] and row["first_kl"] >= 0
        assert row["right"] == row["full"] - row["lost"] + row["won"]
    full, held_out = found["rows"][0], found["held_out"][0]
    assert full["questions"] + held_out["questions"] == len(RECORDS)
    assert full["full"] + held_out["full"] < len(RECORDS)  # it has not all of them right
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town")
    assert row["method"] == setting.method
    checked = ran("tune", *FAST, *options, "--check", "--seed", "5")
    assert "2 questions left out: without answers" in checked and "right answers " in checked
    assert "1 question with answers that stand in none of the documents, counted" in checked
    assert setting.line in checked and "judged by gold answers.\nThat is enough" in checked
    assert "when it was written" in checked


def written(**measured: Scalar) -> None:
    setting = TunedSetting(model="builtin", method="reuse", measured=measured)
    write_tuned(Path(".samkv/kv"), setting)


@pytest.mark.slow  # answers questions five times
def test_a_check_compares_with_what_was_written(town: Path) -> None:
    """Questions that are made have no gold answers: agreement is what was, or was not, written."""
    ran("ingest", str(town), "--collection", "town")
    check = ("tune", *FAST, "--collection", "town", "--check", "--most", "3", "--lose", "99")
    judge = {"judged_by": AGREEMENT, "questions": 9}
    for low, high, said in ((-1.0, 0.0, "as when"), (0.5, 1.0, "worse than when")):
        written(**judge, difference=low, low=low, high=high)
        shown = " ".join(ran(*check).split())
        assert "same answers " in shown and "have gold answers, too few to judge by" in shown
        assert f"It is {said} it was written:" in shown and "points on 9 questions" in shown
    written(agreement=0.97, agreement_low=0.9, agreement_high=1.0)  # of an older version
    assert "has no figures of this judge; tune again to compare" in " ".join(ran(*check).split())
    written(judged_by="gold answers", difference=0.0, low=0.0, high=0.0)
    assert "has no figures of this judge" in " ".join(ran(*check).split())


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
    assert "--lose -1; it must be a number of points from 0" in error_of("tune", "--lose", "-1")
    assert "'--lose': Input should be a valid number" in run("tune", "--lose", "x").stderr
    assert "--top-k 0; give at least 1" in error_of("tune", "--top-k", "0")
    assert "holds no Chroma database" in error_of("tune")
    Path("empty.jsonl").touch()
    assert "empty.jsonl holds no question" in error_of("tune", "--questions", "empty.jsonl")
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
    assert {row["questions"] for row in found["rows"]} == {1}
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
    assert rows_of(*ask, "--set", "recompute.first=48")[0]["method"] == "auto"


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
