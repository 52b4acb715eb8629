"""The evaluation of the reference model asks what its tables say, and leaves no cell out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reference_model import evaluate
from reference_model.evaluate import Cell, Item
from reference_model.prompts import BOS, PromptForms
from reference_model.scenes import draw_scene
from reference_model.world import World, is_held_out
from samkv_integrations.model.model import Model
from tests.support.models import tiny_model
from tests.support.records import builtin

WORLD = World.load()
FORMS = PromptForms.load()
RUN_FIELDS = {"model", "weights", "seed", "command", "commit", "dtype", "hardware", "torch"}


def drawn(cell: Cell, n: int = 24, seed: int = 3) -> list[Item]:
    return evaluate.draw_items(builtin(), WORLD, cell, n, seed)


def count(text: str) -> int:
    return len(builtin().tokenize(text, special=True))


@pytest.mark.parametrize(
    ("cell", "n_documents", "k"),
    [
        *((evaluate.single_hop(n), n, {n}) for n in (2, 4, 8, 12)),
        *((evaluate.records(n), n, {n}) for n in (4, 8)),
        *((evaluate.two_hop(n), n, {n // 2, n}) for n in (4, 6, 8)),
        *((evaluate.reference(n), n, {n // 2}) for n in (4, 8, 12)),
        *((evaluate.comparison(n), n, {2}) for n in (2, 4, 8)),
        *((evaluate.long("single-hop", n), n, {n}) for n in (4, 6, 8)),
        *((evaluate.long("two-hop", n), n, {n // 2, n}) for n in (4, 6, 8)),
        *((evaluate.long("reference", n), n, {n // 2}) for n in (4, 6, 8)),
    ],
    ids=lambda value: f"{value.name} {value.case}" if isinstance(value, Cell) else "",
)
def test_a_cell_holds_what_it_says(cell: Cell, n_documents: int, k: set[int]) -> None:
    items = drawn(cell)
    assert len(items) == 24 == len(set(items))
    assert {item.kind for item in items} == {cell.kind}
    assert {len(item.documents) for item in items} == {n_documents}
    assert {item.k for item in items} <= k
    assert len({item.documents for item in items}) >= 24 / evaluate.PER_SCENE
    for item in items:
        assert item.question in item.prompt and all(d in item.prompt for d in item.documents)
        assert any(evaluate.holds(item.documents[i], item.answer) for i in item.gold)
        assert len(item.gold) == {"two-hop": 2, "reference": 2, "comparison": 2}.get(item.kind, 1)


@pytest.mark.parametrize("n", [4, 8])
def test_records_have_60_to_120_tokens(n: int) -> None:
    lengths = [count(d) for item in drawn(evaluate.records(n)) for d in item.documents]
    assert min(lengths) >= 60 and max(lengths) <= 120


@pytest.mark.parametrize("tokens", [500, 1000, 2000, 4000])
def test_needles_lie_in_prompts_of_the_length_that_is_named(tokens: int) -> None:
    cell = evaluate.needle(tokens)
    if not evaluate.fits(builtin(), cell):
        assert tokens > builtin().context_window - evaluate.ANSWER_TOKENS - 1
        return
    items = drawn(cell)
    lengths = [1 + count(item.prompt) for item in items]
    assert 0.9 * tokens < sum(lengths) / len(lengths) < 1.1 * tokens
    assert max(lengths) + evaluate.ANSWER_TOKENS <= builtin().context_window
    assert {len(item.documents) for item in items} <= {5, 6, 7, 8}


def test_questions_follow_from_the_seed_and_are_about_names_that_training_never_drew() -> None:
    cell = evaluate.single_hop(4)
    items = drawn(cell)
    assert drawn(cell) == items != drawn(cell, seed=4)
    held_out = {
        stem + ending
        for endings in WORLD.endings.values()
        for s, stem in enumerate(WORLD.stems)
        for e, ending in enumerate(endings)
        if is_held_out(s, e)
    }
    for item in items:
        titles = [d.split("\n")[0][1:-1] for d in item.documents]
        assert all(held_out.intersection(title.split()) for title in titles)


def test_no_scene_that_fits_is_an_error_and_not_an_endless_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "TRIES", 20)
    with pytest.raises(SystemExit, match="20 scenes in a row are no records, 4 documents"):
        evaluate.draw_items(tiny_model(), WORLD, evaluate.records(4), 1, 0)  # a token a byte


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


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("It has 57 workers.", "57", True),
        ("It has 5712 workers.", "57", False),
        ("A lives on the river Rek.", "Reka", False),
        ("It was founded by Mira Reksen.", "Mira Reksen", True),
    ],
)
def test_an_answer_is_looked_for_as_whole_words(text: str, answer: str, expected: bool) -> None:
    assert evaluate.holds(text, answer) is expected


@pytest.mark.parametrize(("form", "chat"), list(evaluate.form_modes(FORMS)))
def test_every_form_reaches_the_model_as_it_was_drawn(form: Any, chat: bool) -> None:
    items = evaluate.draw_form_items(WORLD, FORMS, form, chat, 6, 2)
    assert len(items) == 6
    for item in items:
        ids = builtin().tokenize(item.prompt, special=True)
        assert ids.count(builtin().bos_id) == 1 and ids[0] == builtin().bos_id
        assert ("<|assistant|>" in item.prompt) == chat
        assert not item.answer.endswith("|>") and item.answer.strip() == item.answer
        assert item.kind == ("single-hop" if form.task == "answer" else form.task)
        if form.task == "answer":
            assert len(item.documents) == item.k == 4
            assert sum(evaluate.holds(d, item.answer) for d in item.documents) >= 1


def test_all_forms_are_asked_over_the_same_scenes() -> None:
    documents = {
        evaluate.draw_form_items(WORLD, FORMS, form, chat, 1, 2)[0].documents
        for form, chat in evaluate.form_modes(FORMS)
        if form.task == "answer"
    }
    assert len(documents) == 1


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let every variant answer with ``answer(variant, item)``."""

    def answers(_: Model, items: Any, variants: Any, what: str) -> Any:
        return {v: [answer(v, item) for item in items] for v in variants}

    monkeypatch.setattr(evaluate, "answers", answers)


@pytest.mark.parametrize(
    ("given", "right"),
    [("  mira reksen.\n", 1), ("MIRA  REKSEN", 1), ("Mira Reksen, Bor", 0), ("", 0)],
)
def test_an_answer_is_right_whatever_its_case_punctuation_and_space(
    monkeypatch: pytest.MonkeyPatch, given: str, right: int
) -> None:
    item = Item(kind="single-hop", k=4, question="Who?", answer="Mira Reksen", prompt="Who?")
    answering(monkeypatch, lambda *_: given)
    (row,) = evaluate.rows_of(builtin(), "single-hop", "4 documents", [item])
    assert (row.right, row.n, row.exact_match) == (right, 1, right)


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


def test_reuse_is_asked_with_every_method_and_prefix(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "reference", lambda n: evaluate.single_hop(2))
    monkeypatch.setattr(evaluate, "needle", lambda n: evaluate.single_hop(2))
    monkeypatch.setattr(evaluate, "two_hop", lambda n: evaluate.comparison(2))
    rows = rows_in(tmp_path, "--questions", "2", "--only", "reuse-costs")
    text = "Documents:\n\n"
    reused = [("none", ""), ("bos", ""), ("bos", text)]
    expected = [("recompute", None, "")]
    expected += [(m, *prefix) for prefix in reused for m in ("reuse", "reuse-local")]
    for start in range(0, len(rows), 7):
        cell = rows[start : start + 7]
        assert [(r["method"], r["prefix"], r["prefix_text"]) for r in cell] == expected
        assert len({(r["case"], r["tokens"], r["n"]) for r in cell}) == 1
        assert cell[0]["same_as_recompute"] == 1
    assert len(rows) == 4 * 7


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "reuze"], "reuze"),
        (["--model", "/nowhere/at/all"], "does not exist"),
        (["--questions", "0"], None),
        (["--only", "nonsense"], None),
    ],
)
def test_a_wrong_option_ends_the_command_with_what_is_wrong(
    arguments: list[str], message: str | None, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        evaluate.main(["--output", str(tmp_path / "out.json"), *arguments])
    assert not list(tmp_path.iterdir())
