"""Write the town records: invented documents that compete, and questions about them.

The records describe people, companies, towns and products of the world that the built-in model
was trained on, under names that it never saw in training. All records of one kind state the same
facts, so that a question is answered by finding the right record, and not by finding the only
town or the only year in sight. Names, words and wordings are in reference_model/world.toml.

    python examples/make_town_records.py                        # rewrite examples/town_records
    python examples/make_town_records.py --length long          # rewrite examples/town_archive
    python examples/make_town_records.py --seed 7 --folder more_records
    python examples/make_town_records.py --length long --every-question archive.jsonl

The short ones are a few sentences each, to read along with. The long ones state as much, among
sentences that say nothing about anybody: five make a prompt of 2,000 tokens, long enough to show
how much time caches save.

The same seed gives the same bytes on every machine, and no model is needed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from reference_model.scenes import SceneStyle, tell
from reference_model.stages import LONG
from reference_model.world import Fact, Names, World, in_a_sentence

Length = Literal["short", "long"]
FOLDERS: dict[Length, Path] = {
    "short": Path(__file__).parent / "town_records",
    "long": Path(__file__).parent / "town_archive",
}
SEED = 0
RECORDS_PER_KIND = 10
FACTS_PER_RECORD = 4
QUESTIONS_PER_KIND = 6
STYLES: dict[Length, SceneStyle] = {
    "short": SceneStyle(documents=(1, 1), pronouns=0.4, idle=(4, 5)),
    # Every sentence names its subject, because the offline retrieval compares words only.
    "long": replace(LONG, documents=(1, 1), pronouns=0.0, idle=(30, 40)),
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the record ``title`` answers."""

    id: str
    kind: str
    question: str
    answer: str
    title: str


def make_records(
    world: World,
    rng: random.Random,
    kinds: Sequence[str],
    n_records: int,
    length: Length = "short",
) -> tuple[dict[str, str], list[Question]]:
    """Records of ``n_records`` entities of each kind, and every question that they answer.

    Records of one kind state the same facts with different values. A value that is an entity has
    a record too where its kind is one of ``kinds``.

    Returns:
        Title to text, and the questions, both in random order.
    """
    names = Names(world, rng, held_out=True)
    titles = {kind: [names.draw(kind) for _ in range(n_records)] for kind in kinds}
    records: dict[str, str] = {}
    questions: list[Question] = []
    for kind in kinds:
        facts = rng.sample(world.facts[kind], FACTS_PER_RECORD)
        columns = [_values(names, fact, titles, n_records) for fact in facts]
        for title, *values in zip(titles[kind], *columns, strict=True):
            stated = list(zip(facts, values, strict=True))
            records[title] = tell(world, STYLES[length], rng, title, kind, title, stated).text
            for fact, value in stated:
                name = f"{kind}-{_slug(title)}-{fact.name}"
                question = rng.choice(fact.asks).format(s=in_a_sentence(kind, title))
                questions.append(
                    Question(id=name, kind=kind, question=question, answer=value, title=title)
                )
    rng.shuffle(questions)
    return dict(rng.sample(list(records.items()), len(records))), questions


def _values(names: Names, fact: Fact, titles: dict[str, list[str]], n_records: int) -> list[str]:
    """A different value of a fact for each record of a kind."""
    rng, words = names.rng, names.world.words
    if fact.value in words:
        return rng.sample(words[fact.value], n_records)
    if fact.value not in titles:
        return [names.draw(fact.value) for _ in range(n_records)]
    # A product and its maker name each other, so both columns stay in order. Every other column
    # is shifted, so that nobody is their own teacher.
    shift = 0 if fact.name in ("maker", "product") else rng.randrange(1, n_records)
    column = titles[fact.value]
    return column[shift:] + column[:shift]


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def rng_of(seed: int, length: Length) -> random.Random:
    """A generator for each length, so that no name is in both folders with different facts."""
    return random.Random(seed if length == "short" else f"{seed} {length}")


def make_folder(seed: int, length: Length = "short") -> dict[str, str]:
    """File name to content: the records and questions.jsonl."""
    world, rng = World.load(), rng_of(seed, length)
    records, drawn = make_records(world, rng, list(world.facts), RECORDS_PER_KIND, length)
    rows: list[str] = []
    for kind in world.facts:
        for q in [q for q in drawn if q.kind == kind][:QUESTIONS_PER_KIND]:
            row = {"id": q.id, "question": q.question, "answers": [q.answer]}
            rows.append(json.dumps(row | {"document": f"{_slug(q.title)}.txt"}) + "\n")
    files = {f"{_slug(title)}.txt": f"[{title}]\n{text}" for title, text in records.items()}
    return files | {"questions.jsonl": "".join(rows)}


def every_question(seed: int, length: Length = "short") -> str:
    """Every question that the records of `make_folder` answer, in each wording, as JSON Lines."""
    world, rng = World.load(), rng_of(seed, length)
    _, drawn = make_records(world, rng, list(world.facts), RECORDS_PER_KIND, length)
    rows = []
    for q in drawn:
        fact = next(f for f in world.facts[q.kind] if q.id.endswith(f"-{f.name}"))
        for number, ask in enumerate(fact.asks):
            question = ask.format(s=in_a_sentence(q.kind, q.title))
            row = {"id": f"{q.id}-{number}", "question": question, "answers": [q.answer]}
            rows.append(json.dumps(row) + "\n")
    return "".join(rows)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--length", choices=get_args(Length), default="short", help="of the records (short)"
    )
    parser.add_argument("--folder", type=Path, help="where the records go")
    parser.add_argument(
        "--every-question", type=Path, metavar="FILE",
        help="write no records, but every question that they answer, in all its wordings",
    )  # fmt: skip
    options = parser.parse_args()
    if options.every_question:
        text = every_question(options.seed, options.length)
        options.every_question.write_text(text, encoding="utf-8", newline="\n")
        return
    folder = options.folder or FOLDERS[options.length]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in make_folder(options.seed, options.length).items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
