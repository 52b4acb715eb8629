"""Learning a prefix: better on held-out prompts or not kept, repeatable, resumable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from samkv_integrations.errors import EmptyInput, InvalidOption
from samkv_integrations.evaluation.questions import Question
from samkv_integrations.model.model import Model
from samkv_integrations.tuning import adapt
from samkv_integrations.tuning.adapt import Learned, Recipe, learn
from samkv_integrations.tuning.mixed_prompts import LEAST_CHUNKS, Part, Source, usable
from tests.support.models import tiny_model

RECIPE = Recipe(steps=12, n=4, tokens=3)
TEXTS = tuple(
    f"House {n}\nThe house of number {n} has {n % 7} rooms. Its owner came in the year {1900 + n}."
    for n in range(LEAST_CHUNKS)
)
SOURCE = Source(cuts=[TEXTS], most_tokens=500)


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    """Most of the time goes into held-out prompts, which are all alike."""
    with mock.patch.multiple(adapt, CHOOSING=4, JUDGING=4):
        yield


@pytest.fixture(scope="module")
def whole(few_held_out: None, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """What a run that nothing disturbs learns."""
    return learned(tiny_model("llama"), tmp_path_factory.mktemp("whole"))


def learned(model: Model, folder: Path, recipe: Recipe = RECIPE) -> Learned:
    return learn(model, SOURCE, recipe, partial=folder / "partial")


def test_it_is_the_same_again_and_the_model_stays_as_it_is(tmp_path: Path, whole: Learned) -> None:
    model = tiny_model("llama")
    before = model.weights_digest
    one, two = whole, learned(model, tmp_path)
    assert torch.equal(one.prefix.embeddings, two.prefix.embeddings)
    assert one.figures == two.figures and one.steps == 12
    assert model.identity.look() == 0 and tiny_model("llama").weights_digest == before


def test_an_interrupted_run_goes_on(tmp_path: Path, whole: Learned) -> None:
    model = tiny_model("llama")
    done: dict[str, list[int]] = {}

    def told(stage: str, so_far: int, of: int, kl: float | None) -> None:
        done.setdefault(stage, []).append(so_far)
        assert so_far <= of and (kl is None) == ("learning" not in done)

    def interrupt(stage: str, so_far: int, of: int, kl: float | None) -> None:
        told(stage, so_far, of, kl)
        if (stage, so_far) == ("learning", 10):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(model, SOURCE, RECIPE, partial=tmp_path / "partial", told=interrupt)
    assert done["preparing"] == list(range(9)) and done["learning"] == list(range(1, 11))
    done.clear()
    rest = learn(model, SOURCE, RECIPE, partial=tmp_path / "partial", told=told)
    assert done["learning"] == [11, 12] and done["judging what was learned"] == [1, 2, 3, 4]
    assert torch.equal(rest.prefix.embeddings, whole.prefix.embeddings)


def test_an_interruption_while_the_state_is_written(
    tmp_path: Path, whole: Learned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left what was being written beside the state, and nothing deleted it."""
    model = tiny_model("llama")
    partial, replace, times = tmp_path / "partial", os.replace, count(1)

    def interrupt(*names: Path) -> None:
        if next(times) == 3:
            raise KeyboardInterrupt
        replace(*names)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupt)
        learn(model, SOURCE, RECIPE, partial=partial)
    assert list(tmp_path.iterdir()) == [partial]
    rest = learn(model, SOURCE, RECIPE, partial=partial)
    assert torch.equal(rest.prefix.embeddings, whole.prefix.embeddings)


def interrupted_after(steps: int, *run: Any, partial: Path) -> list[int]:
    """The steps that a run told of before it was interrupted."""
    done = list[int]()

    def told(stage: str, so_far: int, of: int, kl: float | None) -> None:
        if stage == "learning":
            done.append(so_far)
            if len(done) == steps:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(*run, partial=partial, told=told)
    return done


def test_the_state_of_another_run_is_not_taken(tmp_path: Path) -> None:
    model, other, partial = tiny_model("llama"), tiny_model("llama", seed=7), tmp_path / "partial"
    runs = [
        (model, SOURCE, RECIPE),
        (other, SOURCE, RECIPE),
        (model, replace(SOURCE, cuts=[TEXTS[::-1]]), RECIPE),
        (model, replace(SOURCE, most_tokens=499), RECIPE),
        (model, SOURCE, replace(RECIPE, seed=1)),
    ]
    assert [interrupted_after(1, *run, partial=partial) for run in runs] == [[1]] * len(runs)
    assert interrupted_after(1, *runs[-1], partial=partial) == [2]


@pytest.mark.parametrize("how", ["a bit", "its end", "no file"])
def test_a_damaged_state_is_not_taken(tmp_path: Path, how: str) -> None:
    run, partial = (tiny_model("llama"), SOURCE, RECIPE), tmp_path / "partial"
    interrupted_after(1, *run, partial=partial)
    found = bytearray(partial.read_bytes())
    if how == "no file":
        partial.unlink()
        os.mkfifo(partial)
    else:
        found[len(found) // 2] ^= how == "a bit"
        partial.write_bytes(found if how == "a bit" else found[:-1])
    assert interrupted_after(1, *run, partial=partial) == [1]


def test_what_could_not_be_written_is_not_learned_again(tmp_path: Path, whole: Learned) -> None:
    """The state stays until the prefix is there."""
    model = tiny_model("llama")
    interrupted_after(RECIPE.steps, model, SOURCE, RECIPE, partial=tmp_path / "partial")
    with mock.patch.object(adapt, "loss", side_effect=AssertionError("a step")):
        again = learned(model, tmp_path)
    assert torch.equal(again.prefix.embeddings, whole.prefix.embeddings)


def test_a_time_limit_ends_it_with_the_best_so_far(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidOption, match="no step fits into 1e-09 minutes"):
        learn(model, SOURCE, RECIPE, partial=tmp_path / "partial", minutes=1e-9)
    found = learn(model, SOURCE, RECIPE, partial=tmp_path / "partial", minutes=1e-3)
    assert 1 <= found.steps < RECIPE.steps


def test_prompts_are_mixed_and_repeatable() -> None:
    model = tiny_model("llama")
    made = [SOURCE.prompt(model, str(seed), "learn") for seed in range(20)]
    assert made == [SOURCE.prompt(model, str(seed), "learn") for seed in range(20)]
    assert len({len(one.chunks) for one in made}) > 2
    assert all(len(one.ids) <= 500 for one in made)


def test_held_out_prompts_hold_nothing_that_is_learned_from() -> None:
    model = tiny_model("llama")
    seen = {
        part: {
            chunk.token_ids
            for seed in range(30)
            for chunk in SOURCE.prompt(model, str(seed), part).chunks
        }
        for part in get_args(Part)
    }
    assert sum(map(len, seen.values())) == len(set().union(*seen.values())) == len(TEXTS)


def test_too_little_to_learn_from() -> None:
    with pytest.raises(EmptyInput, match="too few chunks.*19.*at least 20"):
        Source(cuts=[TEXTS[:-1], TEXTS[:3]])
    lone = Question(question="Which?", documents=TEXTS[:1])
    with pytest.raises(InvalidOption, match="fewer than 2 documents"):
        Source(questions=[lone])
    assert usable(tiny_model("llama"), ["short", *TEXTS, TEXTS[0]]) == list(TEXTS)


def test_questions_bring_their_documents() -> None:
    asked = [
        Question(question=f"Who owns house {n}?", documents=TEXTS[n : n + 3] + TEXTS[:2])
        for n in range(LEAST_CHUNKS - 4)
    ]
    source = Source(questions=asked * 2, most_tokens=600)
    model = tiny_model("llama")
    assert all(2 <= len(source.prompt(model, str(n), "learn").chunks) <= 5 for n in range(10))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"tokens": 0}])
def test_a_recipe_that_learns_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOption, match="give at least 1"):
        Recipe(**wrong)
