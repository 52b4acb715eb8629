"""The stages of training: what is drawn in each, and what a model must answer to leave it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from reference_model.prompts import Prompt, PromptForms, draw_prompt
from reference_model.scenes import SceneStyle, draw_scene
from reference_model.world import World


@dataclass(frozen=True, kw_only=True)
class Part:
    """One ingredient of a stage.

    share: compared with the stage's other parts.
    n_questions: at most so many questions of a scene.
    various: share of prompts in any form; the others are plain.
    """

    share: float
    style: SceneStyle
    n_questions: int
    various: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A mixture of scenes.

    gates: by kind of question, the exact match with two or more competing entities that training
        must reach before the next stage.
    """

    name: str
    parts: tuple[Part, ...]
    gates: dict[str, float]

    def draw(self, world: World, forms: PromptForms, rng: random.Random) -> Prompt:
        """A prompt of this stage."""
        part = rng.choices(self.parts, [part.share for part in self.parts])[0]
        while True:
            scene = draw_scene(world, part.style, rng)
            if scene.questions:
                break
        return draw_prompt(
            forms,
            scene,
            rng,
            n_questions=part.n_questions,
            various=rng.random() < part.various,
        )


SENTENCES = SceneStyle(documents=(4, 8), facts=(1, 1), plain=1.0)
FACTS = SceneStyle(documents=(4, 12), facts=(1, 2), plain=0.2)
RECORDS = SceneStyle(documents=(3, 10), facts=(2, 3), pronouns=0.35, idle=(0, 1), continued=0.2)
CONTINUED = SceneStyle(documents=(4, 14), facts=(2, 4), pronouns=0.35, idle=(0, 2), continued=1.0)
LINKED = SceneStyle(
    documents=(4, 8), facts=(1, 2), pronouns=0.3, idle=(0, 1), linked=1.0, continued=0.1
)
LINKED_FIRST = SceneStyle(documents=(4, 6), facts=(1, 2), plain=0.5, linked=1.0)
LONG_RECORDS = SceneStyle(
    documents=(3, 8),
    facts=(2, 4),
    pronouns=0.4,
    idle=(2, 8),
    continued=0.2,
    linked=0.3,
    comparisons=0.3,
)
FILLER = SceneStyle(
    documents=(2, 5), facts=(1, 3), idle=(8, 24), apart=True, pronouns=0.2, kind_of_fact="needle"
)
NEEDLE = SceneStyle(
    documents=(4, 8), facts=(1, 3), idle=(14, 28), apart=True, pronouns=0.2, kind_of_fact="needle"
)
COMPARED = SceneStyle(documents=(2, 6), facts=(1, 2), pronouns=0.2, idle=(0, 1), comparisons=1.0)
# Documents of 100 to 500 tokens, prompts of 600 to 3,400: what is learnt on the short ones of them
# reaches into the long ones.
LONG = SceneStyle(documents=(4, 8), facts=(3, 4), pronouns=0.2, idle=(6, 40), apart=True)
LONG_LINKED = replace(LONG, facts=(2, 4), linked=1.0, continued=0.1)
LONG_CONTINUED = replace(LONG, facts=(3, 5), continued=1.0)

STAGES = (
    Stage(
        name="sentences",
        parts=(Part(share=1, style=SENTENCES, n_questions=10),),
        gates={"single-hop": 0.82},
    ),
    Stage(
        name="facts",
        parts=(
            Part(share=1, style=SENTENCES, n_questions=10),
            Part(share=4, style=FACTS, n_questions=14, various=0.2),
        ),
        gates={"single-hop": 0.85},
    ),
    Stage(
        name="records",
        parts=(
            Part(share=1, style=FACTS, n_questions=14, various=0.25),
            Part(share=3, style=RECORDS, n_questions=18, various=0.25),
        ),
        gates={"single-hop": 0.9, "reference": 0.7},
    ),
    Stage(
        name="links",
        parts=(
            Part(share=1, style=RECORDS, n_questions=18, various=0.4),
            Part(share=1, style=CONTINUED, n_questions=20, various=0.3),
            Part(share=3, style=LINKED_FIRST, n_questions=20),
            Part(share=2, style=LINKED, n_questions=24, various=0.3),
        ),
        gates={"single-hop": 0.9, "two-hop": 0.75},
    ),
    Stage(
        name="prompts",
        parts=(
            Part(share=2, style=RECORDS, n_questions=18, various=0.6),
            Part(share=1.5, style=CONTINUED, n_questions=20, various=0.4),
            Part(share=1, style=LINKED_FIRST, n_questions=20, various=0.2),
            Part(share=3, style=LINKED, n_questions=24, various=0.5),
            Part(share=1.5, style=LONG_RECORDS, n_questions=24, various=0.6),
            Part(share=0.5, style=COMPARED, n_questions=12, various=0.4),
            Part(share=1, style=FILLER, n_questions=10, various=0.4),
            Part(share=1.5, style=NEEDLE, n_questions=14, various=0.3),
        ),
        gates={"single-hop": 0.95, "two-hop": 0.9, "reference": 0.9, "needle": 0.92},
    ),
    Stage(
        name="long",
        parts=(
            Part(share=1, style=RECORDS, n_questions=18, various=0.6),
            Part(share=1, style=CONTINUED, n_questions=20, various=0.4),
            Part(share=0.5, style=LINKED_FIRST, n_questions=20, various=0.2),
            Part(share=2, style=LINKED, n_questions=24, various=0.5),
            Part(share=1, style=LONG_RECORDS, n_questions=24, various=0.6),
            Part(share=0.3, style=COMPARED, n_questions=12, various=0.4),
            Part(share=0.3, style=FILLER, n_questions=10, various=0.4),
            Part(share=0.5, style=NEEDLE, n_questions=14, various=0.3),
            Part(share=0.3, style=LONG, n_questions=32, various=0.3),
            Part(share=1.5, style=LONG_LINKED, n_questions=32, various=0.3),
            Part(share=2, style=LONG_CONTINUED, n_questions=32, various=0.3),
        ),
        gates={},
    ),
)
