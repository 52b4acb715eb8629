"""The example folders are what their README says: regenerable, answerable, safe to ingest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import make_town_records as script
from reference_model.world import World, is_held_out

EXAMPLES = Path(__file__).parents[2] / "examples"
TOWN, ARCHIVE = script.FOLDERS["short"], script.FOLDERS["long"]
PARAGRAPHS = EXAMPLES / "paragraphs"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def blocks_of(path: Path) -> list[tuple[str, str]]:
    """Title and text of each paragraph of a file."""
    blocks = []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        title, _, text = block.partition("\n")
        assert title.startswith("[") and title.endswith("]"), (path, title)
        assert text and "\n" not in text, (path, title)
        blocks.append((title[1:-1], text))
    return blocks


@pytest.mark.parametrize("length", script.FOLDERS)
def test_the_folder_is_what_the_script_makes(length: script.Length) -> None:
    made = script.make_folder(script.SEED, length)
    folder = script.FOLDERS[length]
    found = {path.name: path.read_bytes().decode() for path in folder.iterdir()}
    assert found == made
    assert len(made) == 41
    assert script.make_folder(script.SEED + 1, length) != made


@pytest.mark.parametrize("folder", [TOWN, ARCHIVE])
def test_each_question_names_a_document_that_states_the_answer(folder: Path) -> None:
    rows = rows_of(folder)
    assert len({row["id"] for row in rows}) == len(rows) == 24
    for row in rows:
        text = (folder / row["document"]).read_text(encoding="utf-8")
        title = blocks_of(folder / row["document"])[0][0]
        assert title in row["question"]
        assert row["answers"][0] in text.partition("\n")[2]


def test_every_name_was_kept_out_of_training() -> None:
    world = World.load()
    new = {
        world.stems[s] + ending
        for endings in world.endings.values()
        for s in range(len(world.stems))
        for e, ending in enumerate(endings)
        if is_held_out(s, e)
    }
    titles = [blocks_of(path)[0][0] for each in (TOWN, ARCHIVE) for path in each.glob("*.txt")]
    assert len(set(titles)) == len(titles) == 80
    assert all(any(word in new for word in title.split()) for title in titles)


def test_each_question_of_the_paragraphs_has_an_answer_that_one_of_them_states() -> None:
    rows = rows_of(PARAGRAPHS)
    assert len({row["question"] for row in rows}) == len(rows) == 32
    texts = [path.read_text(encoding="utf-8").lower() for path in PARAGRAPHS.glob("*.txt")]
    for row in rows:
        assert any(answer.lower() in text for answer in row["answers"] for text in texts), row


def test_every_source_is_named() -> None:
    licence = (PARAGRAPHS / "LICENSE").read_text(encoding="utf-8")
    assert "dureader" not in licence.lower()
    for path in PARAGRAPHS.glob("*.txt"):
        assert path.name in licence.split()


@pytest.mark.parametrize("folder", [TOWN, ARCHIVE, PARAGRAPHS])
def test_whatever_would_be_ingested_is_a_document(folder: Path) -> None:
    """A README.md in these folders would become a chunk that questions retrieve."""
    ingested = [path for path in folder.iterdir() if path.suffix in (".txt", ".md")]
    assert all(blocks_of(path) for path in ingested)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
