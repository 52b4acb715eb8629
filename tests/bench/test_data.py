"""Questions and prompts of the quality bench."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import datasets
from reference_model.questions import main as write_questions
from samkv_integrations.errors import EmptyInput, InvalidOption, SamkvError, UnknownOption
from samkv_integrations.prompt.text import rag_prompt
from tests.support.records import builtin

RECORD = {
    "id": "q0",
    "dataset": "town",
    "question": "Who?",
    "answers": ["Ada"],
    "contexts": [{"title": "One", "text": "It was Ada."}, {"title": "Two", "text": "No."}],
}


THEIRS = {
    "_id": "l0",
    "dataset": "hotpotqa",
    "input": "Who {x}?",
    "answers": ["Ada"],
    "context": "Passage 1:\nOne\nIt was {Ada}. See Passage 7:\n\nPassage 2:\nTwo\nNo.\n",
    "length": 9,
}


def written(folder: Path, *records: object, name: str = "asked.jsonl") -> str:
    path = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_shipped_questions_are_what_the_recipe_writes(tmp_path: Path) -> None:
    """The command is the one that benchmarks/data/README.md names."""
    path = tmp_path / "questions.jsonl"
    kinds, numbers = ["single-hop", "two-hop", "reference"], ["4", "8", "12"]
    write_questions(
        ["--kind", *kinds, "--documents", *numbers, "--questions", "360", "--output", str(path)]
    )
    assert path.read_bytes() == (datasets.DATA / "questions.jsonl").read_bytes()


def test_the_shipped_long_questions_are_what_the_recipe_writes(tmp_path: Path) -> None:
    """The command is the one that benchmarks/data/README.md names."""
    path = tmp_path / "questions-long.jsonl"
    kinds, numbers = ["single-hop", "two-hop", "reference"], ["4", "6", "8"]
    write_questions(
        ["--length", "long", "--kind", *kinds, "--documents", *numbers, "--questions", "144",
         "--seed", "2", "--output", str(path)]
    )  # fmt: skip
    assert path.read_bytes() == (datasets.DATA / "questions-long.jsonl").read_bytes()
    assert path.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("builtin_set", "n", "each"),
    [("short", 9, 1), ("short", 90, 10), ("short", 360, 40), ("long", 9, 1), ("long", 144, 16)],
)
def test_the_first_shipped_questions_are_balanced(builtin_set: str, n: int, each: int) -> None:
    cells = Counter((q.kind, len(q.documents)) for q in datasets.load(builtin_set=builtin_set)[:n])
    assert len(cells) == 9
    assert set(cells.values()) == {each}


def test_the_shipped_long_questions_are_long() -> None:
    """Tokens of the built-in model; the card's window is 4,096."""
    model = builtin()
    questions = datasets.load(builtin_set="long")
    prompts = [len(model.tokenize(str(q.prompt()), special=False)) + 1 for q in questions]
    assert min(prompts) >= 1_200 and max(prompts) <= 3_500
    assert 1_900 < fmean(prompts) < 2_100
    documents = {document for q in questions for document in q.documents}
    lengths = [len(model.tokenize(document, special=False)) for document in documents]
    assert min(lengths) >= 250 and max(lengths) <= 640


def test_a_set_is_one_of_those_that_come_with_the_package(tmp_path: Path) -> None:
    short, long = datasets.load(), datasets.load(builtin_set="long")
    assert datasets.load(builtin_set="short") == short
    assert not {q.id for q in short} & {q.id for q in long}
    mixed = datasets.load([datasets.BUILTIN, written(tmp_path, RECORD)], builtin_set="long")
    assert [q.id for q in mixed[:3]] == [long[0].id, "q0", long[1].id]
    with pytest.raises(UnknownOption, match="built-in questions 'huge'; known: long, short"):
        datasets.load(builtin_set="huge")


def test_records_become_questions(tmp_path: Path) -> None:
    path = written(tmp_path, RECORD, "", RECORD | {"id": "q1", "set": "odd", "kind": "two-hop"})
    first, second = datasets.load([path])
    assert first.documents == ("[One]\nIt was Ada.", "[Two]\nNo.")
    assert first.prompt() == rag_prompt("Who?", first.documents)
    assert (first.kind, second.kind, first.max_new_tokens) == ("town", "odd", 16)
    assert [q.id for q in datasets.load([path], kinds=["odd"])] == ["q1"]
    assert [q.id for q in datasets.load([path], kinds=["two-hop"])] == ["q1"]
    assert [q.max_new_tokens for q in datasets.load([path], max_new_tokens=5)] == [5, 5]
    del (unnamed := dict(RECORD))["dataset"]
    assert datasets.load([written(tmp_path, unnamed, name="my-town.jsonl")])[0].dataset == "my-town"
    places = [{"supporting": value, "id": f"q{value}"} for value in ([1, 0], [], None)]
    found = datasets.load([written(tmp_path, RECORD, *(RECORD | place for place in places))])
    assert [q.supporting for q in found] == [(), (1, 0), (), ()]


def test_numbers_of_documents_are_picked() -> None:
    assert {len(q.documents) for q in datasets.load(documents=[4, 12])} == {4, 12}
    with pytest.raises(InvalidOption, match="no question has 5 documents.*4, 8, 12"):
        datasets.load(documents=[5])


def test_files_take_turns(tmp_path: Path) -> None:
    one = written(tmp_path, RECORD, RECORD | {"id": "q1"}, RECORD | {"id": "q2"}, name="one")
    two = written(tmp_path, RECORD | {"id": "p0"}, name="two")
    assert [q.id for q in datasets.load([one, two])] == ["q0", "p0", "q1", "q2"]
    with pytest.raises(InvalidOption, match="two questions have the id 'q0'"):
        datasets.load([one, written(tmp_path, RECORD, name="three")])


@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimqa", "musique"])
def test_longbench_s_sets_are_asked_as_longbench_asks(tmp_path: Path, dataset: str) -> None:
    (asked,) = datasets.load([written(tmp_path, RECORD | {"dataset": dataset})])
    assert asked.prompt() == (
        "Answer the question based on the given passages. Only give me the answer and do not "
        "output any other words.\n\nThe following are given passages.\nPassage 1:\nOne\nIt was "
        "Ada.\nPassage 2:\nTwo\nNo.\n\nAnswer the question based on the given passages. Only give "
        "me the answer and do not output any other words.\n\nQuestion: Who?\nAnswer:"
    )
    assert asked.documents == ("Passage 1:\nOne\nIt was Ada.", "Passage 2:\nTwo\nNo.")
    assert asked.max_new_tokens == 32
    assert asked.prompt(chat=True) == [{"role": "user", "content": asked.prompt()}]
    (plain,) = datasets.load([written(tmp_path, RECORD | {"dataset": dataset})], prompt="rag")
    assert plain.prompt() == rag_prompt("Who?", ("[One]\nIt was Ada.", "[Two]\nNo."))
    assert plain.max_new_tokens == 32


def test_dureader_is_asked_in_chinese(tmp_path: Path) -> None:
    (asked,) = datasets.load([written(tmp_path, RECORD | {"dataset": "dureader"})])
    assert asked.documents[1] == "文章2\n标题：Two\nNo."
    assert isinstance(asked.prompt(), str) and "问题：Who?\n回答：" in asked.prompt()
    assert (asked.language, asked.max_new_tokens) == ("zh", 128)


def test_longbench_s_own_files_keep_their_text(tmp_path: Path) -> None:
    chinese = THEIRS | {"_id": "l1", "dataset": "dureader", "input": "谁？",
                        "context": "文章1\n标题：一\n是她。\n文章2\n标题：二\n不是。"}  # fmt: skip
    english, zh = datasets.load([written(tmp_path, THEIRS, chinese)])
    assert english.documents == (
        "Passage 1:\nOne\nIt was {Ada}. See Passage 7:", "Passage 2:\nTwo\nNo."
    )  # fmt: skip
    assert zh.documents == ("文章1\n标题：一\n是她。", "文章2\n标题：二\n不是。")
    for question, context in ((english, THEIRS["context"]), (zh, chinese["context"])):
        prompt = question.prompt()
        assert isinstance(prompt, str) and str(context) in prompt
        places = [prompt.index(document) for document in question.documents]
        assert places == sorted(places)
        assert all(prompt.count(document) == 1 for document in question.documents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, "answers is \\[\\]; it must be a list of one text or more"),
        ({"answers": "Ada"}, "answers is 'Ada'"),
        ({"question": " "}, "question is ' '; it must be a text"),
        ({"question": 3}, "question is 3"),
        ({"contexts": []}, "contexts must be a list of one document or more"),
        ({"contexts": [{"title": "x"}]}, "the field 'text' is missing"),
        ({"contexts": ["x"]}, "each of contexts must have a title and a text"),
        ({"contexts": [{"title": "x", "text": ""}]}, "text is ''"),
        ({"id": None}, "id is None"),
        ({"supporting": [2]}, "supporting is \\[2\\]; it must be a list of places in contexts"),
        ({"supporting": 1}, "supporting is 1"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=f"asked.jsonl, line 2: {message}"):
        datasets.load([written(tmp_path, RECORD, RECORD | {"id": "q1"} | change)])


@pytest.mark.parametrize("field", ["id", "question", "answers", "contexts"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    record = {name: value for name, value in RECORD.items() if name != field}
    with pytest.raises(InvalidOption, match=f"line 1: the field '{field}' is missing"):
        datasets.load([written(tmp_path, record)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', "line 2: .*Expecting value"),
        ("[1]", "line 2: a line must be a JSON object"),
        (json.dumps(THEIRS | {"dataset": "narrativeqa"}), "line 2: .*'narrativeqa'.*2wikimqa"),
        (json.dumps(THEIRS | {"context": "no header"}), "line 2: no document begins in context"),
        (json.dumps(THEIRS | {"answers": []}), "line 2: answers is"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(SamkvError, match=message):
        datasets.load([written(tmp_path, RECORD, line)])


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, RECORD)
    with pytest.raises(InvalidOption, match="unknown data 'nothing'; give 'builtin' or an"):
        datasets.load(["nothing"])
    with pytest.raises(UnknownOption, match="unknown kind 'odd'; known: town"):
        datasets.load([path], kinds=["odd"])
    with pytest.raises(UnknownOption, match="'town'; known: 2wikimqa, dureader, hotpotqa, musique"):
        datasets.load([path], prompt="longbench")
    with pytest.raises(InvalidOption, match="prompt 'alpaca'; allowed: auto, rag, longbench"):
        datasets.load([path], prompt="alpaca")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="max_new_tokens=0"):
        datasets.load([path], max_new_tokens=0)
    with pytest.raises(EmptyInput, match="holds no question"):
        datasets.load([written(tmp_path, "")])
    two = written(tmp_path, RECORD | {"kind": "a"}, RECORD | {"id": "q1", "kind": "b", "contexts":
                  [{"title": "x", "text": "y"}]})  # fmt: skip
    with pytest.raises(EmptyInput, match="asked for: b, 2 documents"):
        datasets.load([two], kinds=["b"], documents=[2])


def test_without_labels_a_question_and_its_documents_are_enough(tmp_path: Path) -> None:
    bare = {"question": "Who?", "documents": ["One. ", "Two."]}
    theirs = {name: THEIRS[name] for name in ("input", "context", "dataset")}
    path = written(tmp_path, bare, bare | {"id": "mine", "answers": ["Ada"]}, theirs, RECORD)
    found = datasets.load([path], labelled=False)
    assert [q.id for q in found] == ["asked:1", "mine", "asked:3", RECORD["id"]]
    assert [q.answers for q in found] == [(), ("Ada",), (), ("Ada",)]
    assert found[0].documents == ("One.", "Two.") and found[2].context == THEIRS["context"]
    assert found[0].prompt() == rag_prompt("Who?", ["One.", "Two."])
    with pytest.raises(InvalidOption, match="line 1: the field 'id' is missing; needed are id, qu"):
        datasets.load([path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": []}, "documents must be a list of one text or more"),
        ({"documents": "One."}, "documents must be a list of one text or more"),
        ({"documents": ["One.", " "]}, "documents is ' '; it must be a text"),
        ({"answers": "Ada"}, "answers is 'Ada'"),
        ({"question": ""}, "question is ''; .*needed are question and documents, a list of texts"),
    ],
)
def test_a_broken_line_without_labels_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    bare = {"question": "Who?", "documents": ["One."]}
    with pytest.raises(InvalidOption, match=f"asked.jsonl, line 1: {message}"):
        datasets.load([written(tmp_path, bare | change)], labelled=False)
