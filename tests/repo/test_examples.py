"""The example folders are what their README says: regenerable, answerable, safe to ingest."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import make_town_records as script
from reference_model.world import World, is_held_out
from samkv_integrations.embedding import HashingEmbedding
from samkv_integrations.evaluation import is_in_documents
from samkv_integrations.model.loading import load_model
from samkv_integrations.model.model import Model
from tests.support.records import builtin

EXAMPLES = Path(__file__).parents[2] / "examples"
TOWN, ARCHIVE = script.FOLDERS["short"], script.FOLDERS["long"]
PARAGRAPHS = EXAMPLES / "paragraphs"
HEADER = "Documents:\n\n"


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


def test_all_documents_of_a_kind_compete() -> None:
    world = World.load()
    _, questions = script.make_records(world, random.Random(script.SEED), list(world.facts), 10)
    stated: dict[tuple[str, str], list[str]] = {}
    for q in questions:
        stated.setdefault((q.kind, q.id.rsplit("-", 1)[1]), []).append(q.answer)
    assert len(stated) == 16
    assert all(len(answers) == len(set(answers)) == 10 for answers in stated.values())


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


@pytest.mark.parametrize(("folder", "expected"), [(TOWN, (76, 98)), (ARCHIVE, (350, 454))])
def test_tokens_of_a_document_do_not_merge_with_its_neighbours(
    folder: Path, expected: tuple[int, int]
) -> None:
    model = builtin()
    bodies = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    parts = [HEADER] + [part for body in bodies for part in (body, "\n\n")] + ["Question: Who?"]
    apart = [model.tokenize(part, special=False) for part in parts]
    assert model.tokenize("".join(parts), special=False) == sum(apart, [])
    lengths = [len(ids) for ids in apart[1:-1:2]]
    assert (min(lengths), max(lengths)) == expected  # as the README says


def test_full_prefill_answers_every_question() -> None:
    """With five others of its kind, in float32, in which a near tie does not depend on the CPU."""
    world = World.load()
    records, questions = script.make_records(
        world, random.Random(script.SEED), list(world.facts), script.RECORDS_PER_KIND
    )
    kinds = {q.title: q.kind for q in questions}
    by_id = {q.id: q for q in questions}
    model = load_model("builtin", device="cpu", dtype="float32")
    wrong = []
    for row in rows_of(TOWN):
        q = by_id[row["id"]]
        rng = random.Random(f"{q.id}/0")
        others = sorted(t for t, kind in kinds.items() if kind == q.kind and t != q.title)
        titles = [*rng.sample(others, 5), q.title]
        rng.shuffle(titles)
        context = "".join(f"[{t}]\n{records[t]}\n\n" for t in titles)
        if full_prefill(model, f"{HEADER}{context}Question: {q.question}\nAnswer:") != q.answer:
            wrong.append(q.id)
    assert not wrong


def full_prefill(model: Model, prompt: str) -> str:
    """The greedy answer of the plain transformers model, which no code of ours touches."""
    ids = torch.tensor([[1, *model.tokenize(prompt, special=False)]])
    out = model.hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
    )
    return model.detokenize(out[0, ids.shape[1] : -1].tolist()).strip()


def test_words_alone_find_the_long_document_of_a_question() -> None:
    """Among the five that the quickstart retrieves; of one question they do not."""
    files = sorted(ARCHIVE.glob("*.txt"))
    vectors = torch.tensor(HashingEmbedding().embed([f.read_text("utf-8") for f in files]))
    missed = []
    for row in rows_of(ARCHIVE):
        asked = torch.tensor(HashingEmbedding().embed([row["question"]])[0])
        nearest = (vectors @ asked).topk(5).indices.tolist()
        if row["document"] not in {files[i].name for i in nearest}:
            missed.append(row["id"])
    assert len(missed) <= 1, missed


def test_each_question_of_the_paragraphs_has_an_answer_that_one_of_them_states() -> None:
    rows = rows_of(PARAGRAPHS)
    assert len({row["question"] for row in rows}) == len(rows) == 9
    blocks = [block for path in PARAGRAPHS.glob("*.txt") for block in blocks_of(path)]
    for row in rows:
        assert any(answer in text for answer in row["answers"] for _, text in blocks), row


def test_words_alone_find_most_answers_among_the_chunks_of_the_quickstart() -> None:
    """Among the four of 250 tokens that it retrieves; of three questions they do not."""
    splitter = pytest.importorskip("llama_index.core.node_parser").SentenceSplitter
    files = sorted(PARAGRAPHS.glob("*.txt"))
    text = "\n\n".join(file.read_text("utf-8").strip() for file in files)
    chunks = splitter(chunk_size=250, chunk_overlap=0).split_text(text)
    vectors, missed = torch.tensor(HashingEmbedding().embed(chunks)), []
    for row in rows_of(PARAGRAPHS):
        asked = torch.tensor(HashingEmbedding().embed([row["question"]])[0])
        nearest = [chunks[i] for i in (vectors @ asked).topk(4).indices.tolist()]
        if not is_in_documents(row["answers"], nearest):
            missed.append(row["question"])
    assert len(missed) <= 3, missed


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
