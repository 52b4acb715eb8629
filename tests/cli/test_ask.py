"""``samkv ask``."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samkv_integrations.chroma.client import open_collection
from samkv_integrations.cli import tables
from samkv_integrations.engine import engine as engine_module
from samkv_integrations.engine.beginnings import Beginnings
from samkv_integrations.engine.engine import Engine
from samkv_integrations.engine.stream import Answer
from samkv_integrations.errors import InvalidOption
from samkv_integrations.evaluation.questions import read_questions
from tests.cli.running import REPORT_FIELDS, error_of, ran, rows_of
from tests.support.records import RECORDS


def test_ask_answers_and_names_its_sources(town: Path) -> None:
    ran("ingest", str(town))
    record = RECORDS[1]
    shown = ran("ask", record.question, "--method", "recompute")
    assert shown.startswith(f"{record.workers}\n")
    assert "krasplex-systems.txt" in shown and f"[{record.name}]" in shown
    assert "4 chunks found, 0 reused, 4 computed with the prompt" in shown
    (row,) = rows_of("ask", record.question, "--top-k", "4")
    assert REPORT_FIELDS | {"question", "answer", "answer_s", "sources"} == set(row)
    assert len(row["sources"]) == 4 and row["sources"][0].endswith("/krasplex-systems.txt")
    assert (row["method"], row["found"], row["chunk_misses"]) == ("auto", 4, {})
    assert row["ran"] in ("recompute", "epic")


def test_ask_evicts_entries_while_it_answers(town: Path) -> None:
    ran("ingest", str(town))
    ask = ("ask", RECORDS[1].question)
    (row,) = rows_of(*ask, "--method", "recompute")
    assert row["eviction"] is None and row["decode_kv_bytes"] >= row["kv_bytes"]
    guided = (*ask, "--method", "samkv-guided")
    assert rows_of(*guided)[0]["eviction"] is None
    assert rows_of(*guided, "--eviction", "quest")[0]["eviction"] == "quest"
    evicting = (*ask, "--method", "recompute", "--eviction", "h2o", "--eviction-budget", "0.5")
    (row,) = rows_of(*evicting)
    assert row["eviction"] == "h2o"
    assert 0.4 < row["decode_kv_bytes"] / row["kv_bytes"] <= 0.5
    assert "at the end with h2o" in ran(*evicting)


def test_ask_says_what_is_wrong_with_an_eviction(town: Path) -> None:
    ran("ingest", str(town))
    assert "unknown eviction 'magic'; known: h2o, none" in error_of(
        "ask", "x", "--eviction", "magic"
    )
    assert "budget_ratio=7.0" in error_of("ask", "x", "--eviction", "h2o", "--eviction-budget", "7")
    assert "without an eviction" in error_of("ask", "x", "--eviction-budget", "0.5")


def test_ask_compares_methods_on_the_same_chunks(town: Path) -> None:
    ran("ingest", str(town))
    compared = ("--compare", "recompute, reuse,samkv-overwrite")
    rows = rows_of("ask", RECORDS[0].question, *compared)
    assert [row["method"] for row in rows] == ["recompute", "reuse", "samkv-overwrite"]
    assert len({row["prompt_tokens"] for row in rows}) == 1
    assert rows[0]["ttft_ratio"] == 1.0
    for row in rows:
        assert row["ttft_ratio"] == pytest.approx(row["ttft_s"] / rows[0]["ttft_s"])
    assert "samkv-overwrite" in ran("ask", RECORDS[0].question, *compared)
    without = rows_of("ask", RECORDS[0].question, "--compare", "reuse,samkv-overwrite")
    assert not any("ttft_ratio" in row for row in without)


def test_a_comparison_is_a_line_an_answer(town: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran("ingest", str(town))
    monkeypatch.setattr(tables, "PIPE_WIDTH", 200)
    generate = Engine.generate

    def verbose(*given: Any, **options: Any) -> Answer:
        answer = generate(*given, **options)
        return replace(answer, text=f"It is\n\n\t{answer.text}")

    monkeypatch.setattr(Engine, "generate", verbose)
    ask = ("ask", RECORDS[0].question, "--compare", "recompute,reuse")
    full, reuse = rows_of(*ask)
    assert full["answer"].startswith("It is\n\n\t") and full["kept_ratio"] == 1
    shown = ran(*ask)
    assert re.search(rf"^recompute +It is {RECORDS[0].workers} +100 % +100 %", shown, re.M), shown
    assert re.search(r"^reuse +It is \S+ +100 % +\d %", shown, re.M), shown
    (of_one,) = ran(*ask[:2], "--method", "recompute").splitlines()[-1:]
    assert of_one.startswith("recomputed 100 % of the chunks' tokens, read")


def test_ask_many_questions(town: Path) -> None:
    ran("ingest", str(town))
    command = ("ask", "--questions", str(town / "questions.jsonl"), "--compare", "recompute,reuse")
    rows = rows_of(*command)
    assert len(rows) == 2 * len(RECORDS)
    for row in rows:
        assert row["exact_match"] == float(row["answer"] == row["expected"][0])
        assert 0 <= row["f1"] <= 1
    n_right = sum(row["exact_match"] for row in rows if row["method"] == "recompute")
    assert n_right >= 5  # the built-in model answers such questions
    assert f"{n_right:.0f} of 6" in ran(*command)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "it is no JSON object"),
        ("{}", "question must be a string"),
        ('{"question": 1}', "question must be a string"),
        ('{"question": "Who?", "answers": "one"}', "answers a list"),
        ('{"question": " "}', "the question is empty"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion depth"),
        (r'{"question": "Who \ud800?"}', "surrogates not allowed"),
    ],
)
def test_a_line_that_is_no_question(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f'{{"question": "Who?"}}\n{line}\n')
    with pytest.raises(InvalidOption, match=f"line 2: .*{why}") as caught:
        read_questions(file)
    assert "Error(" not in str(caught.value)


def test_a_file_that_a_windows_editor_wrote(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Who?"}\n', encoding="utf-8-sig")
    assert [one.question for one in read_questions(file)] == ["Who?"]


def test_ask_with_the_chat_template(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    plain, chat = (
        rows_of("ask", "Who?", "--model", tiny, "--max-new-tokens", "1", flag)[0]
        for flag in ("--no-chat", "--chat")
    )
    around, left_out = 3, len("\nAnswer:")  # user, end, assistant; the answer is a turn of its own
    assert chat["prompt_tokens"] == plain["prompt_tokens"] + around - left_out


def test_an_option_of_a_method_changes_it(town: Path) -> None:
    ran("ingest", str(town))
    ask = ("ask", RECORDS[0].question, "--method", "samkv-guided", "--set")
    none, some = (
        rows_of(*ask, f"recompute.matched={matched}", "--set", "recompute.first=0")[0]
        for matched in (0, 96)
    )
    assert none["recompute_ratio"] == 0 < some["recompute_ratio"]


def test_an_answer_goes_on_with_the_method_s_own_rule_unless_told_otherwise(town: Path) -> None:
    ran("ingest", str(town))
    for flags, rule in (((), None), (("--eviction", "quest"), "quest")):
        (row,) = rows_of("ask", RECORDS[0].question, "--method", "samkv-guided", *flags)
        assert row["eviction"] == rule


def test_a_collection_that_is_unknown_or_empty(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", "Who?", "--model", tiny)
    assert "'papers'; known: documents" in error_of(*asked, "--collection", "papers")
    open_collection(Path(".samkv/chroma").resolve(), "empty", create=True)
    assert "collection 'empty' is empty" in error_of(*asked, "--collection", "empty")


def test_a_prompt_that_is_too_long_names_both_sizes(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    line = error_of("ask", "Who?", "--model", tiny, "--max-new-tokens", "2000")
    assert "2000 new tokens exceed the context window of 2048" in line


ACTING = "\x1b[31mred\x1b]0;title\x07 \x9b2J\u202eback \x08\r\x7f"


def acts(shown: str) -> list[str]:
    """Characters that a terminal would act on."""
    return [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 126 < ord(c) < 160]


def test_nothing_of_a_document_acts_on_the_terminal(town: Path, tiny: str) -> None:
    """Neither its text nor its name, nor what a model repeats of it."""
    (town / "evil\x1b[2J.txt").write_text(f"Who? {ACTING} {RECORDS[0].text}", newline="")
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", f"Who? {ACTING}", "--model", tiny, "--max-new-tokens", "20")
    shown = ran(*asked, "--top-k", "7")
    assert "red" in shown and "evil\N{REPLACEMENT CHARACTER}[2J.txt" in shown
    assert not acts(shown) and "\u202e" not in shown
    assert not acts(ran(*asked, "--compare", "recompute,reuse"))


def test_json_holds_everything_and_escapes_it(town: Path, tiny: str) -> None:
    name = f"{town}/evil\x1b\x9b\x7f.txt"
    Path(name).write_text(f"Who? {ACTING}")
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", f"Who? {ACTING}", "--model", tiny, "--max-new-tokens", "1", "--json")
    shown = ran(*asked, "--top-k", "7")
    assert not acts(shown)
    (row,) = json.loads(shown)["rows"]
    assert row["question"] == f"Who? {ACTING}" and f"{name}" in row["sources"]


def test_an_error_shows_a_name_without_what_acts(town: Path) -> None:
    ran("ingest", str(town))
    assert not acts(error_of("ask", "Who?", "--collection", ACTING))
    assert not acts(error_of("ingest", f"gone{ACTING}"))


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question(question: str, working_folder: Path) -> None:
    assert "the question is empty; say what to ask" in error_of("ask", question)
    assert not list(working_folder.iterdir())


def test_an_empty_question_in_a_file(working_folder: Path) -> None:
    (working_folder / "asked.jsonl").write_text('{"question": "Who?"}\n{"question": " "}\n')
    line = error_of("ask", "--questions", "asked.jsonl")
    assert "line 2" in line and "the question is empty" in line


def test_a_model_with_a_chat_template_is_asked_through_it(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    ask = ("ask", "Who?", "--model", tiny, "--max-new-tokens", "1")
    default, chat, plain = (
        rows_of(*ask, *flag)[0]["prompt_tokens"] for flag in ((), ("--chat",), ("--no-chat",))
    )
    assert default == chat != plain


def test_a_store_of_another_model_names_the_option(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    line = error_of("ask", "Who?", "--model", "builtin")
    assert f"ingest again, or give the model {tiny!r} (--model of a command)" in line
    assert "and dtype='float32'" in line


def test_a_collection_is_asked_as_it_was_ingested(
    town: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model, type and bits need not be said again, from any folder; what is said counts."""
    monkeypatch.chdir(Path(tiny).parent)
    ingest = ("ingest", str(town), "--dir", str(tmp_path / "d"))
    ran(*ingest, "--model", Path(tiny).name, "--store-bits", "8")
    ran(*ingest, "--collection", "other", "--model", "builtin", "--dtype", "bfloat16")
    monkeypatch.chdir(tmp_path)
    ask = ("ask", "Who?", "--dir", "d", "--max-new-tokens", "1", "--method", "reuse")
    found = json.loads(ran(*ask, "--json"))
    assert found["model"] == tiny and found["rows"][0]["reused"] == 4
    other = json.loads(ran(*ask, "--collection", "other", "--json"))
    assert other["model"] == "builtin" and other["rows"][0]["reused"] == 4
    assert "load" in error_of(*ask, "--model", "builtin", "--dtype", "float32")
    by_path = json.loads(ran(*ask, "--model", str(Path(tiny) / "."), "--json"))
    assert by_path["rows"][0]["reused"] == 4  # its 8 bits
    ran(*ingest, "--model", "builtin", "--dtype", "float32")  # the last ingest counts
    assert json.loads(ran(*ask, "--json"))["model"] == "builtin"
    Path("d/kv/ingested.json").write_text("{damaged")
    assert json.loads(ran(*ask, "--json"))["model"] == "builtin"


def test_records_of_another_namespace_are_not_asked(town: Path) -> None:
    ran("ingest", str(town))
    line = error_of("ask", "Who?", "--namespace", "other")
    assert "have their caches in namespace ''" in line


@pytest.mark.beginnings
def test_a_question_may_do_without_exact_beginnings(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Noted(Beginnings):
        def __init__(self, *given: Any) -> None:
            made.append("made")
            super().__init__(*given)

    monkeypatch.setattr(engine_module, "Beginnings", Noted)
    ran("ingest", str(town))
    made.clear()
    ran("ask", "Who works there?", "--no-exact-beginnings")
    assert made == []
    ran("ask", "Who works there?")
    assert made == ["made"]
