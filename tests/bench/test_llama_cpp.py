"""The benches beside llama.cpp's own loop, on a tiny model. Times are printed, never asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import answer_grid
from benchmarks.answer_grid import Cell
from benchmarks.pairs import Seconds, ratios, spread
from samkv_integrations.engine import Engine
from samkv_integrations.runtimes import load_runtime
from tests.bench.running import ran, run
from tests.support.gguf_files import model_for_gguf, write_gguf
from tests.support.llama_cpp import with_llama_cpp

pytestmark = [with_llama_cpp, pytest.mark.usefixtures("one_thread")]

CONTEXTS = [
    {"title": "Pavel Flalvek", "text": "Pavel Flalvek was born in Nombury, and is a baker there."},
    {"title": "Nadine Frost", "text": "Nadine Frost was born in Orvik, and is a painter there."},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, model_for_gguf("llama", max_position_embeddings=4096))


def shown(name: str, file: Path, *arguments: str | Path) -> dict[str, Any]:
    """The JSON of a benchmark with llama.cpp."""
    found = json.loads(
        ran(name, "--runtime", "llama_cpp", "--model", file, "--json", *arguments)
    )  # fmt: skip
    assert found["commit"] and found["command"] and found["hardware"]["build"]
    return dict(found)


def test_the_loop_gives_the_tokens_of_full_prefill(file: Path) -> None:
    from benchmarks.llama_loop import LlamaLoop

    model = load_runtime(str(file), "llama_cpp", n_threads=1)
    model.end_ids = lambda more: frozenset()  # type: ignore[method-assign]
    prompt = "The river Witham flows past Bardney. " * 20  # more tokens than one call decodes
    answer = Engine(model).generate(prompt, method="recompute", max_new_tokens=8)
    loop = LlamaLoop(model)  # type: ignore[arg-type]
    ids = model.tokenize(prompt, special=True)
    assert len(ids) > 512
    for _ in range(2):  # nothing stays from one answer to the next
        assert model.detokenize(loop.answer(ids, 8)) == answer.text


def test_first_tokens_are_of_pairs_of_one_question(tmp_path: Path, file: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"id": name, "question": f"Where was {name} born?", "answers": ["-"], "contexts": CONTEXTS}
        for name in ("Pavel", "Nadine", "Tobias")
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = shown("latency", file, "--questions", f"{questions}@2", "--repeats", "2")["rows"]
    assert [row["way"] for row in found] == ["reuse", "auto"]
    assert {row["questions"] for row in found} == {2}
    assert found[0]["recomputed"] == "0.000"
    assert run("latency", "--runtime", "llama_cpp", "--model", file).exit_code == 2  # no questions


def test_a_later_token_and_an_ingest_have_a_row_each(file: Path) -> None:
    (row,) = shown("step", file, "--contexts", "200", "--rounds", "1")["rows"]
    assert row["anchor"] == "llama.cpp"
    (row,) = shown("ingest", file, "--chunks", "3", "--chunk-tokens", "60", "--repeats", "1")[
        "rows"
    ]
    assert row["n_chunks"] == 3 and 90 <= row["n_tokens"] <= 190
    assert row["forward_s"] > 0 and row["ingest_s"] > 0


def test_the_grid_beside_llama_cpp_is_of_cached_answers_and_uncached_first_tokens(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = answer_grid.cells_beside_llama_cpp()
    assert {(cell.cached, cell.new_tokens) for cell in cells} == {
        (1.0, 32), (1.0, 128), (1.0, 256), (0.0, 1),
    }  # fmt: skip
    small = [
        Cell(chunks=2, chunk_tokens=60, others=0, cached=cached, new_tokens=new)
        for cached, new in ((1.0, 4), (0.0, 1))
    ]
    monkeypatch.setattr(answer_grid, "cells_beside_llama_cpp", lambda: small)
    saved = tmp_path / "grid.json"
    monkeypatch.setattr(
        sys, "argv",
        ["grid", "--runtime", "llama_cpp", "--model", str(file), "--cpu", "--rounds", "1",
         "--ways", "reuse", "--json", str(saved)],
    )  # fmt: skip
    answer_grid.main()
    found = json.loads(saved.read_text(encoding="utf-8"))
    assert found["hardware"]["build"] and found["cpu_seconds"]
    assert [row["cell"]["new_tokens"] for row in found["rows"]] == [4, 1]
    assert all(row["ratio"]["median"] > 0 for row in found["rows"])


@pytest.mark.slow  # processes that ingest 80 paragraphs, and ask
def test_a_command_is_watched_up_to_its_first_decode(file: Path) -> None:
    found = json.loads(ran("ask", "--model", file, "--rounds", "1", "--top-k", "1", "--json"))
    (row,) = found["rows"]
    assert row["file_size_bytes"] == file.stat().st_size
    assert row["anonymous_bytes"] > 0 and row["file_bytes"] > 0
    assert "builtin" in run("ask", "--model", "builtin").output


def test_ratios_are_of_pairs() -> None:
    mine = [Seconds(cpu=1.0, wall=4.0), Seconds(cpu=20.0, wall=20.0)]
    theirs = [Seconds(cpu=2.0, wall=2.0), Seconds(cpu=10.0, wall=10.0)]
    cpu, wall = ratios(mine, theirs)
    assert (cpu.median, wall.median) == (1.25, 2.0)
    assert (cpu.low, cpu.high) == (0.875, 1.625)
    assert str(spread([1.0, 1.0])) == "1.000 (1.000 to 1.000)"
