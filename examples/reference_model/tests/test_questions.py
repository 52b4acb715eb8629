"""The recipe's questions for the benchmarks: what a line holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from reference_model.questions import LONG_STYLES, STYLES, main
from reference_model.world import World, is_held_out

WORLD = World.load()
FIELDS = {"id", "dataset", "kind", "k", "question", "answers", "contexts", "supporting"}
FOLLOW_UPS = WORLD.follow_up["titles"]
HELD_OUT, DRAWN = (
    {
        stem + ending
        for endings in WORLD.endings.values()
        for s, stem in enumerate(WORLD.stems)
        for e, ending in enumerate(endings)
        if is_held_out(s, e) == held_out
    }
    for held_out in (True, False)
)


def written(path: Path, *arguments: str) -> list[dict[str, Any]]:
    main([*arguments, "--output", str(path)])
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def holds(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


@pytest.fixture(
    params=[*((kind, "short") for kind in STYLES), *((kind, "long") for kind in LONG_STYLES)],
    ids=" ".join,
    scope="module",
)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """30 questions of a kind over 6 documents."""
    kind, length = request.param
    path = tmp_path_factory.mktemp("questions") / "rows.jsonl"
    return written(path, "--kind", kind, "--length", length, "--questions", "30")


def test_a_row_has_its_fields(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 30 == len({row["id"] for row in rows})
    assert len({row["question"] for row in rows}) == 30
    for row in rows:
        assert set(row) == FIELDS
        assert row["dataset"] == "builtin" and row["kind"] in row["id"]
        assert row["question"].endswith("?") and len(row["answers"]) == 1
        assert len(row["contexts"]) == 6
        assert all(set(context) == {"title", "text"} for context in row["contexts"])


def test_supporting_documents_hold_the_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        (answer,) = row["answers"]
        assert row["supporting"] == sorted(set(row["supporting"]))
        assert len(row["supporting"]) == (1 if row["kind"] == "single-hop" else 2)
        found = [row["contexts"][at] for at in row["supporting"]]
        assert any(holds(f"{c['title']}\n{c['text']}", answer) for c in found)
        if row["kind"] == "reference":
            first, second = found
            assert row["supporting"][1] == row["supporting"][0] + 1
            assert second["title"] in FOLLOW_UPS and holds(second["text"], answer)
            assert not holds(second["text"], first["title"])  # it does not say who it is about
            assert holds(row["question"].lower(), first["title"].lower())
        if row["kind"] == "two-hop":
            asked = [holds(row["question"].lower(), c["title"].lower()) for c in found]
            assert sorted(asked) == [False, True]
            one, other = found if asked[0] else found[::-1]
            assert holds(one["text"].lower(), other["title"].lower())
            assert holds(other["text"], answer)


def test_no_name_is_one_that_training_draws(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        titles = [c["title"] for c in row["contexts"] if c["title"] not in FOLLOW_UPS]
        assert len(titles) == (3 if row["kind"] == "reference" else 6)
        assert all(words(title) & HELD_OUT for title in titles)
        everything = words(json.dumps([row["contexts"], row["question"], row["answers"]]))
        assert not everything & (DRAWN - HELD_OUT - {"Boris"})  # who has it for a first name
