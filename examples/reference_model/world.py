"""The invented world of the built-in model: its words, its names, and the facts it can state."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

WORLD_FILE = Path(__file__).parent / "world.toml"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing that every record of a kind can state.

    name: such as "founder".
    value: what the value is: a key of `World.endings` (a name) or of `World.words`.
    says, asks: wordings of the statement and of the question; the first statement begins with the
        entity, so that a pronoun can stand there.
    phrases: wordings that stand for the value in a question about it ("the founder of {s}").
    compares: what distinguishes the entity with the smaller value ("opened first").
    """

    name: str
    value: str
    says: list[str]
    asks: list[str]
    phrases: list[str] = field(default_factory=list)
    compares: str = ""


@dataclass(frozen=True, kw_only=True)
class World:
    """The content of world.toml, word lists split."""

    first_names: list[str]
    stems: list[str]
    endings: dict[str, list[str]]
    second_words: dict[str, list[str]]
    words: dict[str, list[str]]
    pronouns: dict[str, list[str]]
    plural: dict[str, str]
    follow_up: dict[str, list[str]]
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
            follow_up=data["follow_up"],
            idle_sentences=data["idle"]["sentences"],
            idle_words=_split(data["idle"]["words"]),
            facts={
                kind: [Fact(name=name, **fact) for name, fact in facts.items()]
                for kind, facts in data["facts"].items()
            },
        )

    def idle(self, rng: random.Random) -> str:
        """A sentence that states nothing about anybody."""
        words = {key: rng.choice(choices) for key, choices in self.idle_words.items()}
        return rng.choice(self.idle_sentences).format(**words)


class Names:
    """Draws names, each with a stem of its own, so that first pieces of names differ.

    held_out: draw the names that are kept out of training, or only the others.
    """

    def __init__(self, world: World, rng: random.Random, *, held_out: bool) -> None:
        """Use ``rng`` for every draw."""
        self.world = world
        self.rng = rng
        self.held_out = held_out
        self._free = set(range(len(world.stems)))
        self._first_names = rng.sample(world.first_names, len(world.first_names))

    def draw(self, kind: str) -> str:
        """A new name for a key of `World.endings`."""
        endings = self.world.endings[kind]
        while True:
            stem = self.rng.randrange(len(self.world.stems))
            ending = self.rng.randrange(len(endings))
            if stem in self._free and is_held_out(stem, ending) == self.held_out:
                break
        self._free.remove(stem)
        name = self.world.stems[stem] + endings[ending]
        if kind == "person":
            return f"{self._first_names.pop()} {name}"
        if kind == "river" or (kind == "town" and self.rng.random() < 0.75):
            return name
        return f"{name} {self.rng.choice(self.world.second_words[kind])}"


def is_held_out(stem: int, ending: int) -> bool:
    """Whether this pairing of a stem and an ending is kept out of training.

    One in twelve is, of names of every kind and of 96 of the 120 stems.
    """
    return (7 * stem + 13 * ending + stem * ending % 5) % 10 == 0


def in_a_sentence(kind: str, name: str) -> str:
    """A name as it stands inside a sentence."""
    return f"the {name}" if kind == "product" else name


def capitalised(text: str) -> str:
    """``text`` with a capital first letter, the rest as it is."""
    return text[0].upper() + text[1:]


def _split(lists: dict[str, str]) -> dict[str, list[str]]:
    return {key: words.split() for key, words in lists.items()}
