"""``samkv adapt``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samkv_integrations import ChunkStore, Engine
from samkv_integrations.engine.chunk_prefix import LEARNED_FILE
from samkv_integrations.model.loading import load_model
from samkv_integrations.tuning import adapt
from samkv_integrations.tuning.adapt import Learned
from tests.cli.running import error_of, ran, run
from tests.support.models import saved_tiny

KEPT = Path(".samkv/kv", LEARNED_FILE)
SHORT = ("--steps", "100", "--most-tokens", "1000")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of documents that give chunks enough."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(25):
        text = f"House {n} has {n % 7} rooms. Its owner came in the year {1900 + n}, by boat.\n"
        (folder / f"{n}.md").write_text(f"# House {n}\n\n{text * 2}")
    return folder


def test_what_is_no_better_is_not_kept(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learned, "is_better", False)
    for name in ("CHOOSING", "JUDGING"):  # most of the time goes into them
        monkeypatch.setattr(adapt, name, 4)
    model = ("--model", saved_tiny(tmp_path / "tiny"))
    two = ("adapt", *model, "--data", str(notes), "--steps", "2", "--most-tokens", "700")
    result = run(*two, "--json")
    assert result.exit_code == 1, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["first"] for row in rows] == [0, 16]
    assert all(row["steps"] == 2 and row["kept"] is None for row in rows)
    assert all(0 <= row[when]["top1"] <= 1 for row in rows for when in ("before", "after"))
    assert not list(Path(".samkv/kv").glob("samkv-prefix*"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    shown = run(*two)
    assert "not clearly better" in shown.stdout and "More --steps" in shown.stdout
    hasty = run(*two[:-4], "--minutes", "0.00001", "--most-tokens", "700")
    assert "More --minutes" in hasty.stdout and not KEPT.exists()
    assert len(list(KEPT.parent.glob(f"{LEARNED_FILE}.*.partial"))) == 1


@pytest.mark.slow  # a hundred steps
def test_what_is_better_is_kept_and_engines_take_it(notes: Path, tmp_path: Path) -> None:
    """Even a model of random weights has something to learn."""
    folder = saved_tiny(tmp_path / "tiny")
    result = run("adapt", "--model", folder, "--data", str(notes), *SHORT, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert all(row["after"]["kl"] < row["before"]["kl"] for row in rows)
    assert rows[0]["kept"] == str(KEPT.resolve())
    model, store = load_model(folder), ChunkStore(".samkv/kv")
    assert "0 damaged" in ran("store", "verify")
    assert Engine(model, store).fingerprint == Engine(model, store, prefix="learned").fingerprint
    assert Engine(model, store).fingerprint != Engine(model, store, prefix="documents").fingerprint
    for prefix in ("documents", "learned"):
        Engine(model, store, prefix=prefix).cache_chunks(["The ferry leaves at noon."])
    shown = ran("store", "stats")
    assert (
        "learned" in shown
        and str(len(Engine(model, prefix="documents").chunks.prefix.ids)) in shown
    )
    other = ("adapt", "--model", folder, "--dtype", "bfloat16", "--data", str(notes))
    assert "a folder has one; give another --dir" in error_of(*other)


def test_adapt_says_what_is_wrong(notes: Path, tmp_path: Path) -> None:
    model = ("--model", saved_tiny(tmp_path / "tiny"))
    assert "--data none does not exist" in error_of("adapt", *model, "--data", "none")
    one = str(next(notes.iterdir()))
    assert "is a document; give a folder" in error_of("adapt", *model, "--data", one)
    assert "--minutes 0" in error_of("adapt", *model, "--data", str(notes), "--minutes", "0")
    short = ("--minutes", "1e-12", "--most-tokens", "500")
    assert "no step fits" in error_of("adapt", *model, "--data", str(notes), *short)
    assert "--steps 0" in error_of("adapt", *model, "--data", str(notes), "--steps", "0")
    for file in list(notes.iterdir())[1:]:
        file.unlink()
    assert "questions to learn from (1)" in error_of("adapt", *model, "--data", str(notes))
    few = tmp_path / "few.jsonl"
    few.write_text('{"question": "Who?", "documents": ["A text.", "Another."]}\n' * 4)
    assert "questions to learn from (4)" in error_of("adapt", *model, "--data", str(few))
    few.write_text('{"question": "Who?", "documents": ["A text.", "Another."]}\n' * 40)
    assert "no prompt holds a chunk of 16 tokens" in error_of("adapt", *model, "--data", str(few))
    assert not KEPT.exists()
