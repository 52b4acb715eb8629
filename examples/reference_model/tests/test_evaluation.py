"""The evaluation of the reference model: its rows, its controls, and the caches of its methods."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reference_model import evaluate
from reference_model.evaluate import Cell, Item
from reference_model.prompts import BOS
from reference_model.scenes import draw_scene
from reference_model.world import World
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import tiny_model
from tests.support.records import builtin

WORLD = World.load()
RUN_FIELDS = {"model", "weights", "seed", "command", "commit", "dtype", "hardware", "torch"}


def drawn(cell: Cell, n: int = 24, seed: int = 3) -> list[Item]:
    return evaluate.draw_items(builtin(), WORLD, cell, n, seed)


@pytest.mark.parametrize("cell", [evaluate.single_hop(4), evaluate.needle(1000)])
def test_controls_hold_no_sentence_with_the_answer(cell: Cell) -> None:
    for item in drawn(cell):
        nothing = evaluate.without_documents(item)
        assert item.question in nothing.prompt and nothing.documents == ()
        assert not any(d.split("\n")[1] in nothing.prompt for d in item.documents)
        (gold,) = item.gold
        left = evaluate.without_answer(item)
        assert evaluate.holds(item.documents[gold], item.answer)
        assert not evaluate.holds(left.documents[gold], item.answer)
        before, after = (set(x.documents[gold].split("\n")[1].split(". ")) for x in (item, left))
        assert {s.rstrip(".") for s in after} < {s.rstrip(".") for s in before}
        for index, document in enumerate(item.documents):
            assert index == gold or left.documents[index] == document
        assert all(document in left.prompt for document in left.documents)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let every variant answer with ``answer(variant, item)``."""

    def answers(_: Model, items: Any, variants: Any, what: str) -> Any:
        return {v: [answer(v, item) for item in items] for v in variants}

    monkeypatch.setattr(evaluate, "answers", answers)


def test_a_row_counts_by_k_and_against_full_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(number: int, k: int) -> Item:
        return Item(kind="two-hop", k=k, question="", answer=str(number), prompt=BOS)

    items = [item(0, 2), item(1, 2), item(2, 4), item(3, 4)]
    reuse = evaluate.Variant(method="reuse", prefix="bos")
    said = {"recompute": ["0", "1", "2", "x"], "reuse": ["0", "y", "z", "x"]}
    answering(monkeypatch, lambda v, i: said[v.method][int(i.answer)])
    full, mine = evaluate.rows_of(builtin(), "n", "c", items, [evaluate.Variant(), reuse])
    assert full.by_k == {"2": (2, 2), "4": (1, 2)} and full.same_as_recompute == 1
    assert mine.by_k == {"2": (1, 2), "4": (0, 2)} and mine.same_as_recompute == 0.5
    assert (full.right, mine.right, mine.exact_match) == (3, 1, 0.25)
    assert full.k == "2-4" and full.chance == (2 / 2 + 2 / 4) / 4
    assert full.low <= full.exact_match <= full.high and full.low < full.high
    assert full.tokens == 1  # BOS is counted once, in the prompt or not
    (alone,) = evaluate.rows_of(builtin(), "n", "c", items, [reuse])
    assert alone.same_as_recompute is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model in place of what --model names, and short answers."""
    model = tiny_model()
    monkeypatch.setattr(evaluate, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(evaluate, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(evaluate, "QUESTION_TOKENS", 2)
    return model


def rows_in(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    output = tmp_path / "out.json"
    evaluate.main(["--output", str(output), "--seed", "2", *arguments])
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    return rows


def test_the_command_writes_a_row_for_every_cell(
    small: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_in(tmp_path, "--questions", "3", "--only", "comparison", "two-hop")
    assert [(row["name"], row["case"]) for row in rows] == [
        *(("comparison", f"{n} documents") for n in (2, 4, 8)),
        *(("two-hop", f"{n} documents") for n in (4, 6, 8)),
    ]
    for row in rows:
        assert RUN_FIELDS < row.keys()
        assert row["n"] == 3 == sum(n for _, n in row["by_k"].values())
        assert row["method"] == "recompute" and row["prefix"] is None
        assert row["command"].startswith("python -m reference_model.evaluate --output ")
    table = capsys.readouterr().out
    assert "## comparison" in table and "## two-hop" in table
    assert table.count(" documents |") == 6


def test_variants_get_the_caches_of_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """One document after the text that it was prefilled with is exact: reuse is full prefill."""
    scene = draw_scene(WORLD, evaluate.SceneStyle(documents=(1, 1)), random.Random(0))
    items = [evaluate.plain_item(scene, question) for question in scene.questions]
    variants = [evaluate.Variant()] + [
        evaluate.Variant(method="reuse", prefix=prefix, prefix_text=text)
        for prefix, text in evaluate.PREFIXES
    ]
    made: list[Any] = []

    class Recorded(evaluate.Engine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(evaluate, "Engine", Recorded)
    found = evaluate.answers(tiny_model(), items, variants, "")
    prefixes = [engine.prefix for engine in made]
    text = tuple(tiny_model().tokenize("Documents:\n\n", special=True))
    bos = (tiny_model().bos_id,)
    assert prefixes == [bos, (), bos, bos + text]
    assert [len(engine.store.keys()) for engine in made] == [0, 1, 1, 1]
    assert found[variants[3]] == found[variants[0]] != found[variants[1]]
