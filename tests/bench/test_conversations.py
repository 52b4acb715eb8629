"""``python -m benchmarks conversations`` on the built-in model: rows of both jobs, resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conversations import paired
from benchmarks.right_table import rows_of
from samkv_integrations.cli.formatting import Row
from samkv_integrations.lab.evaluation import Paired
from tests.bench.running import ran

BORN = {"Pavel Flalvek": "Nombury", "Tobias Trulman": "Flevport", "Nadine Frost": "Orvik"}
ABOUT = " was born in {place}, and has worked there for a baker, a painter and a clock maker since."


def file_of(folder: Path) -> Path:
    """Two conversations of two turns."""
    documents = [
        {"title": name, "text": name + ABOUT.format(place=place)} for name, place in BORN.items()
    ]
    questions = [
        {"question": f"Where was {name} born?", "answers": [place]} for name, place in BORN.items()
    ]
    records = [
        {"id": name, "documents": documents[at : at + 2], "questions": questions[at : at + 2]}
        for at, name in enumerate(("one", "two"))
    ]
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return file


def asked(folder: Path, job: str, *more: str) -> tuple[str, list[Row]]:
    shown = ran(
        "conversations", job, "--model", "builtin", "--dtype", "float32", "--conversations",
        file_of(folder), "--output", folder / job, *more,
    )  # fmt: skip
    return shown, rows_of(folder / job)


def test_every_question_counts_for_every_way(tmp_path: Path) -> None:
    _, first = asked(tmp_path, "answers", "--most", "1")
    shown, rows = asked(tmp_path, "answers")
    labels = ["recompute", "reuse", "auto", "auto, matched_again=0", "auto, nothing kept"]
    assert rows[: len(first)] == first  # a run goes on
    keys = {(row["conversation"], row["turn"], row["label"]) for row in rows}
    assert keys == {
        (name, turn, way) for name in ("one", "two") for turn in (1, 2) for way in labels
    }
    assert len(rows) == len(keys) == 20
    assert all(row["commit"] and row["hardware"]["cpu"] for row in rows)
    for row in rows:  # what a way has in memory it does not compute
        is_follow_up = row["turn"] == 2 and row["label"] != "auto, nothing kept"
        assert (row["computed_tokens"] < row["prompt_tokens"] / 2) or not is_follow_up, row
    assert "| auto / recompute |" in shown and "of 4 |" in shown
    (tmp_path / "some").mkdir()
    some, _ = asked(tmp_path / "some", "answers", "--way", "auto", "--way", "recompute")
    assert "| auto / recompute |" in some and "reuse" not in some
    both = ran("conversations", "pooled", tmp_path / "answers", tmp_path / "answers")
    assert "of 8 |" in both and "| auto / auto, nothing kept |" in both


def test_every_front_end_has_rows(tmp_path: Path) -> None:
    shown, rows = asked(tmp_path, "times", "--most", "1")
    ways = [
        ("langchain", "kept"), ("langchain", "match_text=False"), ("langchain", "transformers"),
        ("llama_index", "kept"), ("llama_index", "match_text=False"),
        ("agent", "kept"), ("agent", "match_text=False"), ("openai", "kept"),
    ]  # fmt: skip
    assert sorted((row["front_end"], row["label"]) for row in rows) == sorted(2 * ways)
    assert all(0 < row["first_s"] <= row["whole_s"] and row["completion_tokens"] for row in rows)
    for way in ways:
        assert f"| {' | '.join(way)} |" in shown
    for row in rows:
        assert row["turn"] == 1 or row["computed_tokens"] < row["prompt_tokens"] / 2, row
    # full prefill, and so the same answers: whatever a cache holds is right
    plain, theirs = (
        [row["text"].strip() for row in rows if (row["front_end"], row["label"]) == way]
        for way in ways[1:3]
    )
    assert plain == theirs


def test_the_interval_is_of_whole_conversations() -> None:
    """Five questions that change together are one draw, not five."""
    rows = [
        {
            "conversation": name,
            "turn": turn,
            "label": label,
            "right": label == "a" or name == "same",
        }
        for name in ("won", "same", "same too")
        for turn in range(5)
        for label in ("a", "b")
    ]
    found = paired(rows, "a", "b")
    assert (found.lost, found.won, found.questions) == (0, 10, 15)
    assert found.difference == pytest.approx(2 / 3)
    own, theirs = ([row["right"] for row in rows if row["label"] == way] for way in ("a", "b"))
    apart = Paired.of(own, theirs)
    assert (found.low, found.high) == (0.0, 1.0)
    assert apart.low > found.low and apart.high < found.high
