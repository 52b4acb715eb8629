"""Writes held-out questions with their documents, for the benchmarks.

``cd examples && python -m reference_model.questions --kind two-hop --output questions.jsonl``

One JSON object a line: id, question, answers, contexts (title and text), supporting (indices of the
contexts that it takes), kind, and k, the number of entities that state what is asked for. Every
question has names and documents of its own. With several kinds or numbers of documents their
combinations take turns, so that the first questions are as balanced as all of them. The same seed
gives the same bytes; no model is needed. ``--length long`` makes documents of 250 to 640 tokens of
the built-in model, prompts of 1,200 to 3,500 (the mean is about 2,000).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Literal, get_args

from reference_model.scenes import SceneStyle, draw_scene
from reference_model.stages import (
    COMPARED,
    CONTINUED,
    LINKED,
    LONG,
    LONG_CONTINUED,
    LONG_LINKED,
    RECORDS,
)
from reference_model.world import World

Length = Literal["short", "long"]
LEAST, MOST = 2, 12
# Documents as long as those of examples/town_records, so that budgets bind.
STYLES = {
    "single-hop": replace(RECORDS, facts=(4, 4), idle=(4, 5), continued=0.0),
    "two-hop": replace(LINKED, idle=(4, 5), continued=0.0),
    "reference": replace(CONTINUED, idle=(4, 5)),
    "comparison": COMPARED,
}
LONG_STYLES = {
    "single-hop": replace(LONG, facts=(4, 4)),
    "two-hop": replace(LONG_LINKED, facts=(3, 4), continued=0.0),
    "reference": replace(LONG_CONTINUED, facts=(4, 4)),
}
# Idle sentences of a long document by the number of documents, which are shorter where there are
# more of them: a sentence is some 10 tokens, and a prompt is to stay below 3,500.
LONG_IDLE = {4: (26, 48), 5: (25, 38), 6: (24, 32), 7: (24, 30), 8: (24, 28)}


def style_of(kind: str, documents: int, length: Length) -> SceneStyle:
    """What scenes of so many documents are like in which a kind is asked."""
    if length == "short":
        return replace(STYLES[kind], documents=(documents, documents))
    return replace(LONG_STYLES[kind], documents=(documents, documents), idle=LONG_IDLE[documents])


def numbers_of(kind: str, length: Length) -> range:
    """The numbers of documents that a kind can be asked over."""
    least, most = (min(LONG_IDLE), max(LONG_IDLE)) if length == "long" else (LEAST, MOST)
    return range(4, most + 1, 2) if kind == "reference" else range(least, most + 1)


def questions(
    kind: str, documents: int, seed: int, length: Length = "short"
) -> Iterator[dict[str, object]]:
    """Questions of a kind over so many documents, without end."""
    name = kind if length == "short" else f"{length}-{kind}"
    world, rng = World.load(), random.Random(f"{seed} {name} {documents}")
    style = style_of(kind, documents, length)
    made = 0
    while True:
        scene = draw_scene(world, style, rng, held_out=True)
        question = next((q for q in scene.questions if q.kind == kind), None)
        if question is None or len(scene.documents) != documents:
            continue
        yield {
            "id": f"builtin-{name}-{seed}-{documents}-{made}",
            "dataset": "builtin",
            "kind": kind,
            "k": question.k,
            "question": question.text,
            "answers": [question.answer],
            "contexts": [{"title": d.title, "text": d.text} for d in scene.documents],
            "supporting": sorted(question.documents),
        }
        made += 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="reference_model.questions", description=__doc__)
    parser.add_argument("--kind", nargs="+", choices=list(STYLES), default=["single-hop"])
    parser.add_argument("--questions", type=int, default=300, help="in all (300)")
    parser.add_argument("--documents", type=int, nargs="+", default=[6], help="of a question (6)")
    parser.add_argument(
        "--length", choices=get_args(Length), default="short", help="of the documents (short)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    cells = list(product(dict.fromkeys(options.kind), dict.fromkeys(options.documents)))
    for kind, documents in cells:
        if options.length == "long" and kind not in LONG_STYLES:
            parser.error(f"--kind {kind}: --length long has {', '.join(LONG_STYLES)}")
        possible = numbers_of(kind, options.length)
        if documents not in possible:
            numbers = f"{possible[0]} to {possible[-1]}"
            if kind == "reference":
                numbers = f"even numbers from {numbers}, as every second one continues another"
            parser.error(f"--documents {documents}: possible are {numbers}")
    if options.questions < 1:
        parser.error(f"--questions {options.questions}: at least 1 is needed")
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: the folder {options.output.parent} is not there")
    drawn = [questions(kind, n, options.seed, options.length) for kind, n in cells]
    rows = (next(each) for each in cycle(drawn))
    text = "".join(json.dumps(row) + "\n" for row in islice(rows, options.questions))
    options.output.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
