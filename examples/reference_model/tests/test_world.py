"""Training draws no held-out name, and asks with the prompt of the package."""

from __future__ import annotations

import random
import re

import pytest

from reference_model.prompts import BOS, EOS, PromptForms, draw_prompt, join_documents
from reference_model.scenes import draw_scene
from reference_model.stages import (
    COMPARED,
    CONTINUED,
    FILLER,
    LINKED,
    LONG,
    LONG_CONTINUED,
    LONG_LINKED,
    LONG_RECORDS,
    RECORDS,
    SENTENCES,
    STAGES,
)
from reference_model.world import World, is_held_out
from samkv_integrations.prompt.rag_template import rag_prompt

WORLD = World.load()
FORMS = PromptForms.load()
LONG_STYLES = (LONG, LONG_LINKED, LONG_CONTINUED)
STYLES = (SENTENCES, RECORDS, CONTINUED, LINKED, LONG_RECORDS, FILLER, COMPARED, *LONG_STYLES)


def pairs(kind: str, word: str) -> list[tuple[int, int]]:
    """Stems and endings that make ``word``."""
    return [
        (WORLD.stems.index(word[:cut]), WORLD.endings[kind].index(word[cut:]))
        for cut in range(1, len(word))
        if word[:cut] in WORLD.stems and word[cut:] in WORLD.endings[kind]
    ]


def names_in(text: str, kind: str) -> set[str]:
    """Every stem and ending of ``kind`` in a text, where a name of that kind stands."""
    stem = "|".join(WORLD.stems)
    ending = "|".join(WORLD.endings[kind])
    before = f"(?:{'|'.join(WORLD.first_names)}) " if kind == "person" else ""
    after = f" (?:{'|'.join(WORLD.second_words.get(kind, []))})" if kind != "person" else ""
    if kind in ("town", "river"):
        after = ""
    return set(re.findall(rf"\b{before}((?:{stem})(?:{ending}))\b(?={after})", text))


@pytest.mark.parametrize("kind", ["person", "company", "product"])
def test_held_out_names_are_never_drawn_in_training_and_the_others_only_there(kind: str) -> None:
    rng = random.Random(kind)
    training, held_out = set(), set()
    for _ in range(60):
        for style in STYLES:
            scene = draw_scene(WORLD, style, rng, held_out=True)
            held_out |= names_in("\n".join(d.text for d in scene.documents), kind)
        for stage in STAGES:
            prompt = stage.draw(WORLD, FORMS, rng)
            text = prompt.context + "".join(q.text + q.answer for q in prompt.questions)
            training |= names_in(text, kind)
    assert len(training) > 400 and len(held_out) > 100
    assert not any(is_held_out(*pair) for name in training for pair in pairs(kind, name))
    assert all(is_held_out(*pair) for name in held_out for pair in pairs(kind, name))


def test_the_plain_form_is_the_prompt_of_the_package() -> None:
    rng = random.Random(5)
    scene = draw_scene(WORLD, RECORDS, rng)
    prompt = draw_prompt(FORMS, scene, rng, n_questions=6, various=False)
    bodies, *_ = join_documents("[{title}]\n{text}", scene, [""] * len(scene.documents))
    texts = [prompt.context + question.text for question in prompt.questions]
    by_text = {BOS + str(rag_prompt(q.text, bodies)): q.answer for q in scene.questions}
    assert [by_text[text] for text in texts] == [
        q.answer.removesuffix(EOS).removeprefix(" ") for q in prompt.questions
    ]
