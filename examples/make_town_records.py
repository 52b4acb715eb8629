"""Write the town records: small invented documents that compete, and questions about them.

The records describe people, companies, towns and products of the world that the built-in model
was trained on, under names that it never saw in training. All records of one kind state the same
facts, so that a question is answered by finding the right record, and not by finding the only
town or the only year in sight. Names, words and wordings are in town_world.toml.

    python examples/make_town_records.py                        # rewrite examples/town_records
    python examples/make_town_records.py --seed 7 --folder more_records
    python examples/make_town_records.py --questions 200 --documents 6 --output questions.jsonl

The same seed gives the same bytes on every machine, and no model is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "town_records"
WORLD_FILE = Path(__file__).parent / "town_world.toml"
SEED = 0
RECORDS_PER_KIND = 10
FACTS_PER_RECORD = 4
IDLE_SENTENCES = (4, 5)
QUESTIONS_PER_KIND = 6
MAX_DOCUMENTS = 10

# Questions of SEED that the built-in model did not answer by full prefill (how that was measured
# is in the folder's README). They are passed over. tests/test_examples.py reports new ones.
NOT_ANSWERED = frozenset(
    """
    person-thea-nilman-employer person-helga-mulian-birthplace person-edith-drekower-teacher
    company-vasumex-trading-staff company-kodium-labs-staff town-fovwood-river town-denbury-mayor
    town-sisstead-ware town-femmarsh-river product-stevara-kettle-designer
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing that every record of a kind can state.

    name: such as "founder".
    value: what the value is: a key of `World.endings` (a name) or of `World.words`.
    says, asks: wordings of the statement and of the question.
    """

    name: str
    value: str
    says: list[str]
    asks: list[str]


@dataclass(frozen=True, kw_only=True)
class World:
    """The content of town_world.toml, word lists split."""

    first_names: list[str]
    stems: list[str]
    endings: dict[str, list[str]]
    second_words: dict[str, list[str]]
    words: dict[str, list[str]]
    pronouns: dict[str, list[str]]
    plural: dict[str, str]
    idle_sentences: list[str]
    idle_words: dict[str, list[str]]
    facts: dict[str, list[Fact]]

    @classmethod
    def load(cls) -> World:
        """Read `WORLD_FILE`."""
        data = tomllib.loads(WORLD_FILE.read_text(encoding="utf-8"))
        numbers = {
            key: [str(number) for number in range(first, last + 1)]
            for key, (first, last) in data["ranges"].items()
        }
        return cls(
            first_names=data["first_names"].split(),
            stems=data["stems"].split(),
            endings=_split(data["endings"]),
            second_words=_split(data["second_words"]),
            words=_split(data["words"]) | numbers,
            pronouns=data["pronouns"],
            plural=data["plural"],
            idle_sentences=data["idle"]["sentences"],
            idle_words=_split(data["idle"]["words"]),
            facts={
                kind: [Fact(name=name, **fact) for name, fact in facts.items()]
                for kind, facts in data["facts"].items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the record ``title`` answers."""

    id: str
    kind: str
    question: str
    answer: str
    title: str


class Names:
    """Draws names that the model never saw in training, each with a stem of its own."""

    def __init__(self, world: World, rng: random.Random) -> None:
        """Use ``rng`` for every draw."""
        self.world = world
        self.rng = rng
        self._free = set(range(len(world.stems)))
        self._first_names = rng.sample(world.first_names, len(world.first_names))

    def draw(self, kind: str) -> str:
        """A new name for a key of `World.endings`."""
        endings = self.world.endings[kind]
        while True:
            stem = self.rng.randrange(len(self.world.stems))
            ending = self.rng.randrange(len(endings))
            if stem in self._free and is_new(stem, ending):
                break
        self._free.remove(stem)
        name = self.world.stems[stem] + endings[ending]
        if kind == "person":
            return f"{self._first_names.pop()} {name}"
        if kind == "river" or (kind == "town" and self.rng.random() < 0.75):
            return name
        return f"{name} {self.rng.choice(self.world.second_words[kind])}"


def is_new(stem: int, ending: int) -> bool:
    """Whether this pairing of a stem and an ending was kept out of training (one in ten was)."""
    return (7 * stem + 13 * ending + stem * ending % 5) % 10 == 0


def make_records(
    world: World, rng: random.Random, kinds: Sequence[str], n_records: int
) -> tuple[dict[str, str], list[Question]]:
    """Records of ``n_records`` entities of each kind, and every question that they answer.

    Records of one kind state the same facts with different values. A value that is an entity has
    a record too where its kind is one of ``kinds``.

    Returns:
        Title to text, and the questions, both in random order.
    """
    names = Names(world, rng)
    titles = {kind: [names.draw(kind) for _ in range(n_records)] for kind in kinds}
    records: dict[str, str] = {}
    questions: list[Question] = []
    for kind in kinds:
        facts = rng.sample(world.facts[kind], FACTS_PER_RECORD)
        columns = [_values(names, fact, titles, n_records) for fact in facts]
        for title, *values in zip(titles[kind], *columns, strict=True):
            stated = list(zip(facts, values, strict=True))
            records[title] = _tell(world, rng, kind, title, stated)
            for fact, value in stated:
                name = f"{kind}-{_slug(title)}-{fact.name}"
                question = rng.choice(fact.asks).format(s=_in_a_sentence(kind, title))
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


def _tell(
    world: World, rng: random.Random, kind: str, title: str, stated: list[tuple[Fact, str]]
) -> str:
    """The text of a record: facts in random order, some with a pronoun, and idle sentences.

    No idle sentence separates a pronoun from the sentence before it: a reader would take "it" for
    the weather.
    """
    sentences: list[str] = []
    breaks: list[int] = []
    for fact, value in rng.sample(stated, len(stated)):
        subject, wording = _in_a_sentence(kind, title), rng.choice(fact.says)
        if sentences and rng.random() < 0.4:
            subject = rng.choice(world.pronouns[kind])
        elif sentences:
            breaks.append(len(sentences))
        if subject in ("it", "they"):
            wording = fact.says[0]
        sentence = wording.format(s=subject, v=value)
        if subject == "they" and sentence.startswith("they "):
            verb = sentence.split()[1]
            sentence = sentence.replace(verb, world.plural.get(verb, verb), 1)
        sentences.append(sentence[0].upper() + sentence[1:])
    breaks.append(len(sentences))
    # At most two idle sentences stand between facts: with more, answers get worse.
    inside = sorted((rng.choice(breaks) for _ in range(2)), reverse=True)
    for place in inside:
        sentences.insert(place, _idle(world, rng))
    n_idle = rng.randint(*IDLE_SENTENCES)
    return " ".join(sentences + [_idle(world, rng) for _ in range(n_idle - len(inside))])


def _idle(world: World, rng: random.Random) -> str:
    words = {key: rng.choice(choices) for key, choices in world.idle_words.items()}
    return rng.choice(world.idle_sentences).format(**words)


def _in_a_sentence(kind: str, title: str) -> str:
    return f"the {title}" if kind == "product" else title


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _split(lists: dict[str, str]) -> dict[str, list[str]]:
    return {key: words.split() for key, words in lists.items()}


def make_folder(seed: int) -> dict[str, str]:
    """File name to content: the records and questions.jsonl."""
    world = World.load()
    records, drawn = make_records(world, random.Random(seed), list(world.facts), RECORDS_PER_KIND)
    rows: list[str] = []
    for kind in world.facts:
        answered = [q for q in drawn if q.kind == kind and q.id not in NOT_ANSWERED]
        for q in answered[:QUESTIONS_PER_KIND]:
            row = {"id": q.id, "question": q.question, "answers": [q.answer]}
            rows.append(json.dumps(row | {"document": f"{_slug(q.title)}.txt"}) + "\n")
    files = {f"{_slug(title)}.txt": f"[{title}]\n{text}" for title, text in records.items()}
    return files | {"questions.jsonl": "".join(rows)}


def make_questions(seed: int, n_questions: int, n_documents: int) -> Iterator[dict[str, object]]:
    """Questions with their contexts. Each has names and documents of its own, all of one kind."""
    world, rng = World.load(), random.Random(seed)
    kinds = list(world.facts)
    for i in range(n_questions):
        records, questions = make_records(world, rng, [kinds[i % len(kinds)]], n_documents)
        yield {
            "id": f"town-records-{seed}-{n_documents}-{i}",
            "dataset": "builtin",
            "set": "town-records",
            "kind": "single-hop",
            "k": n_documents,
            "question": questions[0].question,
            "answers": [questions[0].answer],
            "contexts": [{"title": title, "text": text} for title, text in records.items()],
            "supporting": [list(records).index(questions[0].title)],
        }


def main() -> None:
    """Write the folder, or with --questions a file of questions with contexts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the records go")
    parser.add_argument("--questions", type=int, help="write this many questions with contexts")
    parser.add_argument("--documents", type=int, default=6, help="contexts of each question")
    parser.add_argument("--output", type=Path, help="file for --questions")
    options = parser.parse_args()
    # With more documents than colors two products would share one.
    if not 2 <= options.documents <= MAX_DOCUMENTS:
        parser.error(f"--documents {options.documents}: 2 to {MAX_DOCUMENTS} are possible")
    if (options.questions is None) != (options.output is None):
        parser.error("--questions and --output go together")
    if options.questions is None:
        options.folder.mkdir(parents=True, exist_ok=True)
        files = {options.folder / name: text for name, text in make_folder(options.seed).items()}
    else:
        rows = make_questions(options.seed, options.questions, options.documents)
        files = {options.output: "".join(json.dumps(row) + "\n" for row in rows)}
    for path, text in files.items():
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
