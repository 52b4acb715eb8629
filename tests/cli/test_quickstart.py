"""``samkv quickstart``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from samkv_integrations.cli.quickstart import COMPARED
from tests.cli.running import REPORT_FIELDS, error_of, ran, run
from tests.support.records import RECORDS, TEXTS


def test_quickstart_compares_every_method_and_follows_the_documents(town: Path) -> None:
    pytest.importorskip("llama_index.core")
    shown = ran("quickstart", "--documents", str(town))
    assert "6 prefilled now, 0 already cached" in shown
    assert RECORDS[0].question in shown and "breltech-shipping.txt" in shown
    assert all(f"\n{name} " in shown for name in COMPARED)
    assert "nonsense with every method, full prefill included" in " ".join(shown.split())
    assert "auto, the default, ran " in shown and "samkv bench quality" in shown
    # what a document said in an earlier run, and documents that are gone, are never retrieved
    (town / "breltech-shipping.txt").unlink()
    (town / "krasplex-systems.txt").write_text(TEXTS[1].replace("4524", "7391"))
    result = run("quickstart", "--documents", str(town), "--json")
    assert "1 prefilled now, 4 already cached" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == len(RECORDS) * len(COMPARED)
    for row in rows:
        assert set(row) > REPORT_FIELDS | {"question", "answer", "expected", "ttft_ratio"}
        prefix = row["ran"] == "prefix"  # the same five chunks as for another question
        assert prefix or (row["found"], row["chunk_misses"]) == (5, {})
        assert row["reused"] == 0 if row["ran"] == "recompute" else row["reused"] > 0
    answers = {row["answer"] for row in rows if row["question"] == RECORDS[1].question}
    assert "7391" in answers
    full, auto = (
        sum(row["exact_match"] for row in rows if row["method"] == name)
        for name in ("recompute", "auto")
    )
    assert full >= 3 and auto >= 3  # of the four that are still answered so


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
