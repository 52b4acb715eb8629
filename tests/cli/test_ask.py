"""``samkv ask``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samkv_integrations.chroma.client import open_collection
from tests.cli.running import REPORT_FIELDS, error_of, ran, rows_of
from tests.support.records import RECORDS


def test_ask_answers_and_names_its_sources(town: Path) -> None:
    ran("ingest", str(town))
    record = RECORDS[1]
    shown = ran("ask", record.question, "--method", "recompute")
    assert shown.startswith(f"{record.workers}\n")
    assert "krasplex-systems.txt" in shown and f"[{record.name}]" in shown
    assert "recompute: 0 of 4 chunks reused" in shown
    (row,) = rows_of("ask", record.question, "--top-k", "4")
    assert REPORT_FIELDS | {"question", "answer", "answer_s", "sources"} == set(row)
    assert len(row["sources"]) == 4 and row["sources"][0].endswith("/krasplex-systems.txt")
    assert (row["method"], row["found"], row["chunk_misses"]) == ("auto", 4, {})
    assert row["ran"] in ("recompute", "samkv-guided")


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
    both = error_of("ask", "Who?", "--method", "reuse", "--compare", "recompute,epic")
    assert "--method=reuse and --compare=recompute,epic; give one" in both


def test_a_collection_that_is_unknown_or_empty(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", "Who?", "--model", tiny)
    assert "'papers'; known: documents" in error_of(*asked, "--collection", "papers")
    open_collection(Path(".samkv/chroma").resolve(), "empty", create=True)
    assert "collection 'empty' is empty" in error_of(*asked, "--collection", "empty")


def test_the_only_collection_needs_no_name(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny, "--collection", "notes")
    (row,) = rows_of("ask", "Who?", "--max-new-tokens", "1")
    assert len(row["sources"]) == 4
    ran("ingest", str(town), "--collection", "others")
    assert "'documents'; known: notes, others" in error_of("ask", "Who?")


ACTING = "\x1b[31mred\x1b]0;title\x07 \x9b2J\u202eback \x08\r\x7f"


def acts(shown: str) -> list[str]:
    """Characters that a terminal would act on."""
    return [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 126 < ord(c) < 160]


def test_nothing_of_a_document_acts_on_the_terminal(town: Path, tiny: str) -> None:
    """Neither its text nor its name, nor what a model repeats of it."""
    (town / "evil\x1b[2J\nforged.txt").write_text(f"Who? {ACTING} {RECORDS[0].text}", newline="")
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", f"Who? {ACTING}", "--model", tiny, "--max-new-tokens", "20")
    shown = ran(*asked, "--top-k", "7")
    assert "red" in shown and "evil\ufffd[2J\ufffdforged.txt" in shown
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


def test_a_model_with_a_chat_template_is_asked_through_it(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    ask = ("ask", "Who?", "--model", tiny, "--max-new-tokens", "1")
    default, chat, plain = (
        rows_of(*ask, *flag)[0]["prompt_tokens"] for flag in ((), ("--chat",), ("--no-chat",))
    )
    assert default == chat != plain


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
    assert "give it with --model" in error_of(*ask)


def test_records_of_another_namespace_are_not_asked(town: Path) -> None:
    ran("ingest", str(town))
    line = error_of("ask", "Who?", "--namespace", "other")
    assert "have their caches in namespace ''" in line
