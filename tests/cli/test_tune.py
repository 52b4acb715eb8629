"""``samkv tune``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations import METHODS, Engine
from samkv_integrations.cli.tune import as_arguments, as_flags
from samkv_integrations.lab.tuning import Setting
from samkv_integrations.methods import get_method
from samkv_integrations.methods.base import with_option
from tests.cli.running import error_of, ran, rows_of
from tests.support.models import tiny_model
from tests.support.records import RECORDS

FAST = ("--top-k", "2", "--max-new-tokens", "4")


def tuned(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran("tune", *FAST, *arguments, "--json"))
    assert found["command"] == "tune"
    return found


@pytest.mark.slow  # half a minute of measuring
def test_tune_counts_right_answers_and_recommends_flags_that_ask_takes(town: Path) -> None:
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
    assert {row["label"] for row in found["rows"]} >= {"reuse", "epic", "auto"}
    for row in found["rows"]:
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["right"] == row["full"] - row["lost"] + row["won"]
    full, held_out = found["rows"][0], found["held_out"][0]
    assert full["questions"] + held_out["questions"] == len(RECORDS)
    assert full["full"] + held_out["full"] < len(RECORDS)  # it has not all of them right
    flags = found["recommended"].split()
    (row,) = rows_of("ask", RECORDS[0].question, "--collection", "town", *flags)
    assert row["method"] == flags[1] and f"method={flags[1]!r}" in found["arguments"]


@pytest.mark.slow  # every setting answers a question
def test_tune_says_when_nothing_is_enough(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    options = ("--collection", "town", "--minutes", "0.001", "--questions", "town/questions.jsonl")
    shown = ran("tune", *FAST, *options)
    assert "Recommended: recompute: the time was over" in " ".join(shown.split())
    assert "for commands: --method recompute --store-bits 4" in shown


def test_what_is_recommended_can_be_pasted() -> None:
    setting = Setting(method="auto", set=("recompute.first=48",), eviction="quest", store_bits=8)
    assert as_flags(setting) == (
        "--method auto --set recompute.first=48 --eviction quest --store-bits 8"
    )
    names = {"get_method": get_method, "with_option": with_option, "Engine": Engine}
    model = tiny_model()
    made: Engine = eval(f"Engine(model, {as_arguments(setting)})", {**names, "model": model})
    assert made.method.recompute == replace(METHODS["auto"].recompute, first=48)
    assert (made.eviction, made.store_bits) == ("quest", 8)
    assert as_arguments(Setting(method="epic", store_bits=4)) == "method='epic', store_bits=4"


def test_options_without_a_method_are_of_the_default_one(town: Path) -> None:
    ran("ingest", str(town), "--collection", "town")
    ask = ("ask", RECORDS[0].question, "--collection", "town")
    assert rows_of(*ask, "--set", "recompute.first=48")[0]["method"] == "auto"


def test_five_different_questions_with_answers_are_needed(working_folder: Path) -> None:
    for asked, n in (('"answers": ["the"]', 0), ('"answers": ["Ida"]', 1)):
        Path("asked.jsonl").write_text(f'{{"question": "Who?", {asked}}}\n' * 5)
        few = error_of("tune", "--questions", "asked.jsonl")
        assert f"asked.jsonl has {n} different question" in few and "and 5 are needed" in few
