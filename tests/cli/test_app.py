"""The command line: what it prints for people and programs, and how it says what is wrong."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, LlamaConfig
from typer.testing import CliRunner, Result

from samkv_integrations import EVICTIONS, METHODS, figures
from samkv_integrations.cache.disk import ChunkStore
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.cli import tables
from samkv_integrations.cli.app import COMPARED, app
from samkv_integrations.engine.costs import name_of
from samkv_integrations.engine.doctor import Check
from samkv_integrations.engine.report import Report
from samkv_integrations.model.loading import load_model
from tests.support.models import SHAPE, byte_tokenizer, hf_model
from tests.support.old_store import old_store
from tests.support.records import RECORDS, TEXTS

REPORT_FIELDS = set(Report.__dataclass_fields__)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model, one token a byte."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    hf_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer(bos=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def town(working_folder: Path) -> Path:
    """A folder of six documents and the questions that they answer."""
    folder = working_folder / "town"
    folder.mkdir()
    for record in RECORDS:
        name = record.name.lower().replace(" ", "-")
        (folder / f"{name}.txt").write_text(record.text + "\n", encoding="utf-8")
    rows = [{"question": r.question, "answers": [r.workers]} for r in RECORDS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def ran(*arguments: str) -> str:
    """Standard output of a command that must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows of a command with --json, whose standard output must be one object."""
    found = json.loads(ran(*arguments, "--json"))
    assert list(found) == ["command", "version", "commit", "model", "rows"]
    assert found["command"] == " ".join(a for a in arguments[:2] if a in COMMANDS)
    rows: list[dict[str, Any]] = found["rows"]
    return rows


COMMANDS = {"methods", "doctor", "ingest", "ask", "quickstart", "store", "stats", "sync"}


def error_of(*arguments: str) -> str:
    """The one line that a wrong call prints."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    # a progress bar may stand before it, and ends with a line break or a carriage return
    *before, line = result.stderr.strip().replace("\r", "\n").split("\n")
    assert line.startswith("samkv: "), result.stderr
    assert not any("Traceback" in other or "samkv: " in other for other in before)
    return line


# -- what it prints -----------------------------------------------------------------------------


def test_methods_lists_all_of_them() -> None:
    shown = ran("methods")
    assert all(name in shown for name in (*METHODS, *EVICTIONS))
    rows = rows_of("methods")
    assert [row["name"] for row in rows if row["kind"] == "method"] == list(METHODS)
    assert [row["name"] for row in rows if row["kind"] == "eviction"] == list(EVICTIONS)
    assert all(list(row) == ["name", "kind", "paper", "summary"] for row in rows)


def test_bench_is_part_of_it() -> None:
    assert {"latency", "quality"} <= set(ran("bench", "--help").split())
    assert "unknown shape 'huge'" in error_of("bench", "latency", "--shape", "huge")


def test_version() -> None:
    assert ran("--version") == f"samkv {figures.version()}\n"


def test_ingest_prefills_once(town: Path) -> None:
    shown = ran("ingest", str(town))
    assert "6 files, 6 chunks" in shown and "6 prefilled, 0 already cached" in shown
    assert "0 prefilled, 6 already cached" in ran("ingest", str(town))
    (row,) = rows_of("ingest", str(town))
    assert (row["files"], row["n_records"], row["n_cached"], row["n_hit"]) == (6, 6, 0, 6)
    assert row["bytes_on_disk"] == 0 and row["seconds"] > 0
    (held,) = rows_of("store", "stats")
    assert (held["model"], held["chunks"]) == ("builtin", 6)
    assert held["bytes"] > 0
    assert "6 chunks" in ran("store", "stats")


def test_ingest_splits_long_documents_and_forgets_what_they_no_longer_say(
    tiny: str, working_folder: Path
) -> None:
    file = working_folder / "long.md"
    file.write_text("\n\n".join(f"# Part {n}\n\n" + "Some words here. " * 9 for n in range(5)))
    (row,) = rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    collection = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    texts = collection.get(include=["documents"])["documents"]
    assert len(texts) == row["n_records"] > 5
    assert max(len(text.encode()) for text in texts) <= 100  # one token a byte
    file.write_text("Short now.")
    rows_of("ingest", "long.md", "--model", tiny, "--chunk-size", "100")
    assert collection.get(include=["documents"])["documents"] == ["Short now."]


def test_ingest_releases_what_documents_no_longer_say(town: Path, tiny: str) -> None:
    rows_of("ingest", str(town), "--model", tiny)
    (town / "krasplex-systems.txt").write_text("Something else.")
    rows_of("ingest", str(town), "--model", tiny)
    (held,) = rows_of("store", "stats")
    assert held["chunks"] == 6


def test_sync_mends_what_went_past_it(town: Path, tiny: str) -> None:
    model = ("--model", tiny)
    ran("ingest", str(town), *model)
    documents = open_collection(Path(".samkv/chroma").resolve(), "documents", create=False)
    first, *_ = documents.get()["ids"]
    documents.delete(ids=[first])
    notes = open_collection(Path(".samkv/chroma").resolve(), "notes", create=True)
    notes.add(ids=["n", "bare"], documents=["A note.", " "], embeddings=[[1.0]] * 2)
    sync = ("store", "sync", *model)

    def summary(*options: str) -> list[tuple[Any, ...]]:
        fields = ("collection", "n_records", "n_cached", "n_linked", "n_skipped", "n_pruned")
        rows = rows_of(*sync, *options)
        assert all(set(fields) | {"n_in_grace", "bytes_freed", "seconds"} == set(r) for r in rows)
        return [tuple(row[field] for field in fields) for row in rows]

    assert summary("--no-build", "--no-prune", "--collection", "documents") == [
        ("documents", 5, 0, 0, 0, 0)
    ]
    assert summary("--no-build") == [("documents", 5, 0, 0, 0, 0), ("notes", 2, 0, 1, 1, 0)]
    result = run(*sync)
    assert "syncing notes" in result.stderr and "syncing" not in result.stdout
    assert "0 unused caches deleted (0 B), 1 kept for now" in result.stdout
    assert summary("--grace", "0") == [("documents", 5, 0, 0, 0, 0), ("notes", 2, 0, 0, 1, 1)]
    (held,) = rows_of("store", "stats")
    assert held["chunks"] == 6  # five records and a note
    assert summary("--collection", "notes", "--collection", "documents", "--grace", "0") == [
        ("notes", 2, 0, 0, 1, 0), ("documents", 5, 0, 0, 0, 0),
    ]  # fmt: skip


def test_sync_says_what_is_wrong(town: Path, tiny: str, working_folder: Path) -> None:
    sync = ("store", "sync", "--model", tiny)
    ran("ingest", str(town), "--model", tiny)
    assert "'papers'; known: documents" in error_of(*sync, "--collection", "papers")
    assert "grace_s=-1.0" in error_of(*sync, "--grace", "-1")
    assert "dtype is 'bfloat16' here" in error_of(*sync, "--dtype", "bfloat16")
    empty = open_collection(working_folder / "hollow/chroma", "town", create=True)
    empty._client.delete_collection("town")
    assert "hollow/chroma holds no collection" in error_of(*sync, "--dir", "hollow")


def test_ingest_leaves_its_own_folder_and_hidden_files_out(town: Path) -> None:
    (town / ".hidden.txt").write_text("Nobody shall read this.")
    rows_of("ingest", str(town), "--dir", str(town / "kept"))
    assert list((town / "kept").rglob("*.txt")), "the caches hold no text: nothing to leave out"
    (row,) = rows_of("ingest", str(town), "--dir", str(town / "kept"))
    assert row["files"] == 6


def test_ask_answers_and_names_its_sources(town: Path) -> None:
    ran("ingest", str(town))
    record = RECORDS[1]
    shown = ran("ask", record.question, "--method", "recompute")
    assert shown.startswith(f"{record.workers}\n")
    assert "krasplex-systems.txt" in shown and f"[{record.name}]" in shown
    assert "4 of 4 chunks from their caches" in shown
    (row,) = rows_of("ask", record.question, "--top-k", "4")
    assert REPORT_FIELDS | {"question", "answer", "sources"} == set(row)
    assert len(row["sources"]) == 4 and row["sources"][0].endswith("/krasplex-systems.txt")
    assert (row["method"], row["chunk_hits"], row["chunk_misses"]) == ("auto", 4, {})
    assert row["ran"] in ("recompute", "samkv-guided")


def test_ask_evicts_rows_while_it_answers(town: Path) -> None:
    ran("ingest", str(town))
    ask = ("ask", RECORDS[1].question)
    (row,) = rows_of(*ask, "--method", "recompute")
    assert row["eviction"] is None and row["decode_kv_bytes"] >= row["kv_bytes"]
    guided = (*ask, "--method", "samkv-guided")
    assert rows_of(*guided)[0]["eviction"] == "quest"  # the method's own
    assert rows_of(*guided, "--eviction", "none")[0]["eviction"] is None
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


def test_a_document_is_the_same_by_whatever_path(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran("ingest", "town", "--dir", "kept")
    monkeypatch.chdir(town)
    ran("ingest", ".", "--dir", "../kept")
    collection = open_collection(town.parent / "kept/chroma", "documents", create=False)
    assert collection.count() == len(RECORDS)


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
    none, some = (rows_of(*ask, f"recompute.ratio={ratio}")[0] for ratio in (0, 0.1))
    assert none["recompute_ratio"] == 0 < some["recompute_ratio"]


def test_an_answer_goes_on_with_the_method_s_own_rule_unless_told_otherwise(town: Path) -> None:
    ran("ingest", str(town))
    for flags, rule in (((), "quest"), (("--eviction", "none"), None)):
        (row,) = rows_of("ask", RECORDS[0].question, "--method", "samkv-guided", *flags)
        assert row["eviction"] == rule


def test_doctor_exits_with_1_if_a_check_fails(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    rows = rows_of("doctor", "--model", tiny)
    assert all(set(row) == {"check", "ok", "detail"} and row["ok"] for row in rows)
    assert "can be served exactly" in ran("doctor", "--model", tiny, "--dtype", "bfloat16")
    checks = [Check(name="rotation", ok=False, detail="off by 3")]
    monkeypatch.setattr(
        "samkv_integrations.engine.doctor.examine", lambda model, store: iter(checks)
    )
    result = run("doctor", "--model", tiny)
    assert result.exit_code == 1
    assert "FAILED: rotation" in result.stdout
    result = run("doctor", "--model", tiny, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rows"][0]["ok"] is False


def test_quickstart_compares_every_method_and_prefills_once(town: Path) -> None:
    pytest.importorskip("llama_index.core")
    shown = ran("quickstart", "--documents", str(town))
    assert "6 prefilled now, 0 already cached" in shown
    assert RECORDS[0].question in shown and "breltech-shipping.txt" in shown
    assert all(f"\n{name} " in shown for name in COMPARED)
    assert "auto, the default, ran " in shown and "samkv bench quality" in shown
    result = run("quickstart", "--documents", str(town), "--json")
    assert "0 prefilled now, 6 already cached" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(RECORDS) * len(COMPARED)
    for row in rows:
        assert set(row) > REPORT_FIELDS | {"question", "answer", "expected", "ttft_ratio"}
        prefix = row["ran"] == "prefix"  # the same five chunks as for another question
        assert prefix or (row["chunk_hits"], row["chunk_misses"]) == (5, {})
    full, auto = (
        sum(row["exact_match"] for row in rows if row["method"] == name)
        for name in ("recompute", "auto")
    )
    assert full >= 5 and auto >= 5


def test_quickstart_follows_the_documents(town: Path) -> None:
    """What a document said in an earlier run, and documents that are gone, are never retrieved."""
    pytest.importorskip("llama_index.core")
    ran("quickstart", "--documents", str(town))
    (town / "breltech-shipping.txt").unlink()
    (town / "krasplex-systems.txt").write_text(TEXTS[1].replace("4524", "7391"))
    result = run("quickstart", "--documents", str(town), "--json")
    assert "1 prefilled now, 4 already cached" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    answer = next(r["answer"] for r in rows if r["question"] == RECORDS[1].question)
    assert answer == "7391"


# -- figures ------------------------------------------------------------------------------------


def _row(method: str, question: str, answer: str, *, right: bool, **changed: float) -> figures.Row:
    known = {"expected": ["x"], "exact_match": float(right)}
    base = {"kept_ratio": 0.5, "recompute_ratio": 0.25, "bytes_read": 100, "ttft_s": 1.0}
    return {"method": method, "question": question, "answer": answer} | known | base | changed


def test_summary_of_many_answers() -> None:
    rows = [
        _row("recompute", "a", "x", right=True, ttft_s=1.0),
        _row("reuse", "a", "x", right=True, ttft_s=0.5, bytes_read=1000),
        _row("recompute", "b", "x", right=True, ttft_s=3.0),
        _row("reuse", "b", "y", right=False, ttft_s=0.5, bytes_read=3000, kept_ratio=1.0),
    ]
    full, reuse = tables.summarise(rows)
    assert (full.method, full.n_right, full.n_known, full.same_share) == ("recompute", 2, 2, 1.0)
    assert (reuse.n_right, reuse.same_share, reuse.kept_ratio) == (1, 0.5, 0.75)
    assert (reuse.bytes_read, reuse.bytes_share, full.bytes_share) == (2000, 1.0, 0.05)
    assert reuse.ttft_s == 0.5
    assert reuse.ttft_ratio == pytest.approx((0.5 / 1.0 + 0.5 / 3.0) / 2)  # paired by question
    (alone,) = tables.summarise(rows[1::2])
    assert (alone.same_share, alone.ttft_ratio) == (None, None)


def test_the_summary_fits_into_a_terminal() -> None:
    shown = {"ttft_s": 0.555, "bytes_read": 777_777, "kept_ratio": 1.0, "recompute_ratio": 1.0}
    names = ("recompute", "reuse", "samkv-overwrite")
    rows = [_row(name, str(n), "x", right=True, **shown) for name in names for n in range(100)]
    out = Console(file=io.StringIO(), width=80)
    out.print(tables.summary_table(rows))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert len(shown.splitlines()) == 2 + len(names), shown
    assert "samkv-overwrite 100 of 100" in shown and "777.8 kB" in shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.size(999), "999 B"),
        (figures.size(1500), "1.5 kB"),
        (figures.size(2e12), "2.0 TB"),
        (figures.seconds(0.0421), "42 ms"),
        (figures.seconds(1.25), "1.2 s"),
        (figures.percent(0.155), "16 %"),
        (figures.percent(None), "-"),
        (figures.ratio(0.1234), "0.12"),
    ],
)
def test_figures_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_commit_is_that_of_a_checkout_and_of_nothing_else(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment inside a project's folder must not report the project's commit."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (working_folder / "figures.py").write_text("")
    monkeypatch.setattr(figures, "__file__", str(working_folder / "figures.py"))
    assert figures.commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "something else")
    assert figures.commit() is None
    git("add", "figures.py")
    git("commit", "-m", "figures")
    assert figures.commit() == git("rev-parse", "HEAD")


# -- what is wrong ------------------------------------------------------------------------------


def test_a_model_of_another_family_is_refused(working_folder: Path) -> None:
    GPT2Config().save_pretrained(working_folder / "gpt2")
    assert "'gpt2' is not supported; supported: llama" in error_of("doctor", "--model", "gpt2")


def test_a_model_with_yarn_is_refused(working_folder: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    LlamaConfig(rope_parameters=rope, **SHAPE).save_pretrained(working_folder / "yarn")
    assert "'yarn'" in error_of("doctor", "--model", "yarn")


def test_a_model_that_is_not_there(working_folder: Path) -> None:
    missing = "/nowhere/at/all"  # no hub id: nothing is asked of the network
    assert f"the folder {missing!r} does not exist" in error_of("doctor", "--model", missing)
    (working_folder / "empty").mkdir()
    assert "holds no config.json" in error_of("doctor", "--model", "empty")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("doctor", "--dtype", "float16"), "allowed: auto, float32, bfloat16"),
        (("ingest", "nothing.txt"), "nothing.txt does not exist"),
        (("ingest", "town/questions.jsonl"), "known kinds: .txt, .md"),
        (("ingest", "hollow"), "no document (.txt, .md) in hollow"),
        (("ingest", "blank"), "the 1 documents hold no text"),
        (("ingest", "town", "--chunk-size", "0"), "it must be at least 1 token"),
        (("ingest", "town", "--collection", "?"), "'?'"),
        (("ask", "Who?", "--dir", "nowhere"), "nowhere/chroma holds no Chroma database"),
        (("ask",), "give either a question or --questions FILE"),
        (("ask", "Who?", "--questions", "x"), "give either a question or --questions FILE"),
        (("ask", "--questions", "missing.jsonl"), "missing.jsonl does not exist"),
        (("ask", "--questions", "hollow/none.jsonl"), "holds no question"),
        (("ask", "--questions", "town/breltech-shipping.txt"), "breltech-shipping.txt, line 1"),
        (("ask", "Who?", "--method", "magic"), "'magic'; known: a3, ape, auto, cacheblend"),
        (("ask", "Who?", "--compare", "reuse,magic"), "unknown method 'magic'"),
        (("ask", "Who?", "--set", "select.top=3"), "known: recompute.before"),
        (("ask", "Who?", "--set", "select.window=many"), "'many' is not a whole number"),
        (("ask", "Who?", "--method", "samkv-fusion", "--set", "select.bias=so"), "not True or"),
        (("ask", "Who?", "--set", "select.window=0"), "it must be at least 1"),
        (("ingest", "town", "--store-bits", "3"), "store_bits=3; allowed: 4, 8, 16"),
        (("store", "stats", "--dir", "nowhere"), "nowhere/kv does not exist"),
        (("store", "sync", "--dir", "nowhere"), "nowhere/chroma holds no Chroma database"),
        (("quickstart",), "examples/town_archive is not a folder"),
        (("quickstart", "--documents", "hollow"), "no document"),
        (("quickstart", "--documents", "blank"), "blank/questions.jsonl does not exist"),
    ],
)
def test_mistakes(
    town: Path, working_folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    (working_folder / "hollow").mkdir()
    (working_folder / "hollow/none.jsonl").write_text("\n")
    (working_folder / "blank").mkdir()
    (working_folder / "blank/blank.txt").write_text(" \n")
    assert expected in error_of(*arguments)


def test_unknown_options_and_commands_are_typers_own() -> None:
    for arguments in (("ask", "--fast"), ("answer",), ("store", "repair")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Usage" in result.stderr and "Traceback" not in result.stderr


def test_a_collection_that_is_unknown_or_empty(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    asked = ("ask", "Who?", "--model", tiny)
    assert "'papers'; known: documents" in error_of(*asked, "--collection", "papers")
    open_collection(Path(".samkv/chroma").resolve(), "empty", create=True)
    assert "collection 'empty' is empty" in error_of(*asked, "--collection", "empty")


def test_a_store_of_another_model_or_dtype(town: Path, tiny: str, working_folder: Path) -> None:
    ran("ingest", str(town), "--model", tiny)
    other = working_folder / "other"
    hf_model("llama", seed=1).save_pretrained(other)
    byte_tokenizer(bos=True).save_pretrained(other)
    assert "weights is" in error_of("ask", "Who?", "--model", "other")
    line = error_of("ask", "Who?", "--model", tiny, "--dtype", "bfloat16")
    assert "dtype is 'bfloat16' here and 'float32' there" in line


def test_a_store_of_other_bits(town: Path, tiny: str) -> None:
    wide = ("--model", tiny, "--store-bits", "16")
    ran("ingest", str(town), *wide)
    assert [row["store_bits"] for row in rows_of("store", "stats")] == [16]
    for command in (("ask", "Who?"), ("store", "sync")):
        line = error_of(*command, "--model", tiny)
        assert "store_bits is 4 here and 16 there; next step: give store_bits=16" in line
    (row,) = rows_of("ask", "Who?", *wide, "--max-new-tokens", "1")
    assert (row["chunk_hits"], row["chunk_misses"]) == (4, {})
    assert rows_of("store", "sync", *wide)[0]["n_cached"] == 0


def test_the_doctor_keeps_what_passes_cost_where_ask_looks(town: Path) -> None:
    torch.set_num_threads(2)  # times are kept by the number of threads
    rows = rows_of("doctor", "--dir", "kept")
    assert rows[-1]["check"] == "speed" and rows[-1]["detail"].endswith("/kept/kv")
    torch.set_num_threads(2)
    ran("ingest", str(town), "--dir", "kept")
    assert ChunkStore(Path("kept/kv")).note(name_of(load_model("builtin"))) is not None


def test_stats_name_the_chunks_of_an_older_format(working_folder: Path) -> None:
    old_store(working_folder / ".samkv/kv")
    (held,) = rows_of("store", "stats")
    assert (held["format_version"], held["chunks"], held["store_bits"]) == (1, 2, 16)
    assert "2 chunks are of an older format and not used; ingest them again" in ran(
        "store", "stats"
    )


def test_a_store_of_a_newer_format_version(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    Path(".samkv/kv/store.json").write_text('{"format_version": 99}')
    for command in (("ask", "Who?"), ("ingest", str(town))):
        assert "format version 99" in error_of(*command, "--model", tiny)
    assert "format version 99" in error_of("store", "stats")


def test_a_chunk_longer_than_the_context_window(working_folder: Path, tiny: str) -> None:
    (working_folder / "long.txt").write_text("words " * 500)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "5000")
    assert "2999 tokens is longer than the 2047" in line


def test_a_prompt_that_is_too_long_names_both_sizes(town: Path, tiny: str) -> None:
    ran("ingest", str(town), "--model", tiny)
    line = error_of("ask", "Who?", "--model", tiny, "--max-new-tokens", "2000")
    assert "2000 new tokens exceed the context window of 2048" in line


def test_a_long_document_without_the_splitter(
    working_folder: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "semantic_text_splitter", None)
    (working_folder / "long.txt").write_text("words " * 100)
    line = error_of("ingest", "long.txt", "--model", tiny, "--chunk-size", "100")
    assert "pip install 'samkv-integrations[chroma]'" in line


def test_quickstart_of_blank_documents(working_folder: Path) -> None:
    pytest.importorskip("llama_index.core")
    folder = working_folder / "blank"
    folder.mkdir()
    (folder / "blank.txt").write_text(" \n")
    (folder / "questions.jsonl").write_text('{"question": "Who?"}\n')
    assert "1 documents hold no text" in error_of("quickstart", "--documents", "blank")


def test_quickstart_without_llama_index(town: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="llama_index")

    monkeypatch.setattr(importlib, "import_module", refuse)
    line = error_of("quickstart", "--documents", str(town))
    assert "pip install 'samkv-integrations[llama-index]'" in line
