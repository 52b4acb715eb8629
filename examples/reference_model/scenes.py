"""Scenes: a few documents whose facts compete, and every question that they answer.

All entities of one kind state the same facts in a scene, with different values. A question is then
answered by finding the right document, never by finding the only town or the only year in sight.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reference_model.world import Fact, Names, World, capitalised, in_a_sentence

Kind = Literal["single-hop", "two-hop", "reference", "needle", "comparison"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A place in a text that is about an entity and does not name it.

    end: characters from the start of the text to the end of the place.
    name: the entity.
    """

    end: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Value(Mention):
    """The first letter of the value of a fact, which is one of the entity ``name``."""

    fact: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document.

    mentions: where its text speaks of an entity by a pronoun or a description.
    values: where the values of its facts begin.
    """

    title: str
    text: str
    mentions: tuple[Mention, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a scene.

    k: how many entities of the scene state what is asked for: a guess among them is right in one
        of k cases.
    documents: the documents that it takes, as indices.
    subject, fact: the entity that the answer is a fact of, and which; empty where the answer is
        one of two entities.
    bridge: where the question speaks of an entity that another document names.
    """

    kind: Kind
    k: int
    text: str
    answer: str
    documents: tuple[int, ...]
    subject: str = ""
    fact: str = ""
    bridge: Mention | None = None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Documents in reading order, and questions in random order."""

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class SceneStyle:
    """What scenes are like. Ranges hold their ends; shares lie between 0 and 1.

    documents: how many documents.
    facts: how many facts each entity states.
    plain: share of facts told and asked in their first wording.
    pronouns: share of facts told with a pronoun, where one can stand.
    idle: sentences of a document that state nothing.
    apart: whether idle sentences may stand anywhere between facts (else at most two do).
    linked: share of scenes in which the values of one fact are the entities of others, so that
        two-hop questions arise.
    continued: share of scenes in which a document goes on in a second one that does not name its
        entity, so that reference questions arise.
    comparisons: share of scenes that ask which of two entities a fact is true of.
    kind_of_fact: the kind that questions about one fact are filed under.
    """

    documents: tuple[int, int]
    facts: tuple[int, int] = (1, 1)
    plain: float = 0.0
    pronouns: float = 0.0
    idle: tuple[int, int] = (0, 0)
    apart: bool = False
    linked: float = 0.0
    continued: float = 0.0
    comparisons: float = 0.0
    kind_of_fact: Literal["single-hop", "needle"] = "single-hop"


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """A fact as an entity states it."""

    kind: str
    name: str
    fact: Fact
    value: str
    document: int
    continued: bool

    @property
    def documents(self) -> tuple[int, ...]:
        """The document, after the one that names the entity if this one does not."""
        return (self.document - 1, self.document) if self.continued else (self.document,)


@dataclass(frozen=True, kw_only=True)
class _Link:
    """A fact of one kind of entity whose values are entities of the scene."""

    kind: str
    fact: str
    value: str


def draw_scene(
    world: World,
    style: SceneStyle,
    rng: random.Random,
    *,
    held_out: bool = False,
) -> Scene:
    """A scene of ``style``, with names that are kept out of training or with the others."""
    names = Names(world, rng, held_out=held_out)
    n_documents = rng.randint(*style.documents)
    continued = rng.random() < style.continued
    n_entities = max(2, n_documents // 2) if continued else n_documents
    link = None
    if n_entities >= 2 and rng.random() < style.linked:
        link = rng.choice(_links(world, same_kind=n_entities < 4))
    kinds = [rng.choice(list(world.facts))] if link is None else [link.kind, link.value]
    kinds = list(dict.fromkeys(kinds))
    entities: dict[str, list[str]] = {kind: [] for kind in kinds}
    for i in range(n_entities):
        kind = kinds[i % len(kinds)]
        entities[kind].append(names.draw(kind))

    facts: dict[str, list[tuple[Fact, list[str]]]] = {}
    later: dict[str, list[Fact]] = {}  # those told in a second document
    for kind in kinds:
        chosen = _choose_facts(world, rng, kind, rng.randint(*style.facts), link, continued)
        later[kind] = rng.sample(chosen, max(1, len(chosen) // 2)) if continued else []
        facts[kind] = [
            (fact, _values(names, kind, fact, entities, linked=_is(link, kind, fact)))
            for fact in chosen
        ]

    documents: list[Document] = []
    stated: list[_Stated] = []
    order = [(kind, i) for kind in kinds for i in range(len(entities[kind]))]
    rng.shuffle(order)
    for kind, i in order:
        name = entities[kind][i]
        for part in (False, True):
            here = [
                (fact, values[i]) for fact, values in facts[kind] if (fact in later[kind]) == part
            ]
            if not here:
                continue
            stated += [
                _Stated(
                    kind=kind,
                    name=name,
                    fact=fact,
                    value=value,
                    document=len(documents),
                    continued=part,
                )
                for fact, value in here
            ]
            title = rng.choice(world.follow_up["titles"]) if part else capitalised(name)
            documents.append(tell(world, style, rng, title, kind, name, here, follow_up=part))
    questions = _questions(world, style, rng, stated)
    return Scene(documents=tuple(documents), questions=tuple(questions))


def _choose_facts(
    world: World, rng: random.Random, kind: str, n: int, link: _Link | None, continued: bool
) -> list[Fact]:
    """``n`` facts that all entities of a kind state: one more where a link or a second document
    needs it."""
    possible = [fact for fact in world.facts[kind] if not _contradicts(fact, link)]
    chosen = rng.sample(possible, n)
    if link is not None and kind == link.kind and not any(_is(link, kind, f) for f in chosen):
        chosen[0] = next(fact for fact in possible if _is(link, kind, fact))
    only_linked = link is not None and kind == link.kind == link.value
    if len(chosen) == 1 and (continued or only_linked):
        chosen.append(rng.choice([fact for fact in possible if fact not in chosen]))
    return chosen


def _is(link: _Link | None, kind: str, fact: Fact) -> bool:
    return link is not None and (link.kind, link.fact) == (kind, fact.name)


def _links(world: World, *, same_kind: bool) -> list[_Link]:
    """All facts whose value is an entity; same_kind: only those from one kind to itself."""
    return [
        _Link(kind=kind, fact=fact.name, value=fact.value)
        for kind, facts in world.facts.items()
        for fact in facts
        if fact.phrases and (not same_kind or kind == fact.value)
    ]


def _contradicts(fact: Fact, link: _Link | None) -> bool:
    """Whether a fact says the same as ``link`` the other way round, with a value of its own."""
    return link is not None and {fact.name, link.fact} == {"maker", "product"}


def _values(
    names: Names, kind: str, fact: Fact, entities: dict[str, list[str]], *, linked: bool
) -> list[str]:
    """A value of a fact for each entity of a kind, different ones where there are enough."""
    rng, words, n = names.rng, names.world.words, len(entities[kind])
    if fact.value in words:
        pool = words[fact.value]
        values = rng.sample(pool, min(n, len(pool)))
        return values + [rng.choice(pool) for _ in range(n - len(values))]
    targets = entities.get(fact.value, [])
    if not targets or (fact.value == kind and n < 2) or not (linked or rng.random() < 0.4):
        return [names.draw(fact.value) for _ in range(n)]
    if fact.value == kind:
        # Shifted, so that nobody is their own teacher.
        shift = rng.randrange(1, n)
        return targets[shift:] + targets[:shift]
    order = rng.sample(targets, len(targets))
    order += [names.draw(fact.value) for _ in range(n - len(order))]
    return rng.sample(order[:n], n)


def tell(
    world: World,
    style: SceneStyle,
    rng: random.Random,
    title: str,
    kind: str,
    name: str,
    stated: Sequence[tuple[Fact, str]],
    *,
    follow_up: bool = False,
) -> Document:
    """A document about an entity: facts in random order among idle sentences.

    No idle sentence separates a pronoun from the sentence before it: a reader would take "it" for
    the weather.
    """
    # With the end of a mention, and the fact and the end of its value's first letter.
    sentences: list[tuple[str, int | None, tuple[str, int] | None]] = []
    breaks: list[int] = []
    for fact, stated_value in rng.sample(list(stated), len(stated)):
        subject, mentioned = in_a_sentence(kind, name), False
        if sentences and rng.random() < style.pronouns:
            subject, mentioned = rng.choice(world.pronouns[kind]), True
        else:
            if sentences:
                breaks.append(len(sentences))
            if follow_up:
                subject, mentioned = rng.choice(world.follow_up[kind]), True
        wording = fact.says[0] if rng.random() < style.plain else rng.choice(fact.says)
        if subject in ("it", "they"):
            wording = fact.says[0]
        before = wording[: wording.index("{s}")].format(v=stated_value)
        sentence = wording.format(s=subject, v=stated_value)
        if subject == "they":
            verb = sentence.split()[1]
            sentence = sentence.replace(verb, world.plural.get(verb, verb), 1)
        end = len(before) + len(subject) if mentioned else None
        # Counted from the end, as a subject may hold the value ("tea" in "Sisstead").
        tail = wording[wording.index("{v}") :].format(s=subject, v=stated_value)
        value = (fact.name, len(sentence) - len(tail) + 1)
        sentences.append((capitalised(sentence), end, value))
    n_idle = rng.randint(*style.idle)
    if style.apart:
        # Before the first fact too, so that facts stand at any depth.
        places = [rng.choice([0, *breaks, len(sentences)]) for _ in range(n_idle)]
    else:
        breaks.append(len(sentences))
        places = [rng.choice(breaks) for _ in range(min(2, n_idle))]
        places += [len(sentences)] * (n_idle - len(places))
    for place in sorted(places, reverse=True):
        sentences.insert(place, (world.idle(rng), None, None))
    mentions: list[Mention] = []
    values: list[Value] = []
    start = 0
    for sentence, mention_end, marked in sentences:
        if mention_end is not None:
            mentions.append(Mention(end=start + mention_end, name=name))
        if marked is not None:
            values.append(Value(end=start + marked[1], name=name, fact=marked[0]))
        start += len(sentence) + 1
    text = " ".join(sentence for sentence, _, _ in sentences)
    return Document(title=title, text=text, mentions=tuple(mentions), values=tuple(values))


def _questions(
    world: World, style: SceneStyle, rng: random.Random, stated: Sequence[_Stated]
) -> list[Question]:
    """Every question about ``stated`` that has one answer, in random order."""
    alike: dict[tuple[str, str], list[_Stated]] = {}
    about: dict[str, list[_Stated]] = {}
    for s in stated:
        alike.setdefault((s.kind, s.fact.name), []).append(s)
        about.setdefault(s.name, []).append(s)
    questions: list[Question] = []

    def wording(fact: Fact) -> str:
        return fact.asks[0] if rng.random() < style.plain else rng.choice(fact.asks)

    for s in stated:
        k = len(alike[s.kind, s.fact.name])
        questions.append(
            Question(
                kind="reference" if s.continued else style.kind_of_fact,
                k=k,
                text=wording(s.fact).format(s=in_a_sentence(s.kind, s.name)),
                answer=s.value,
                documents=s.documents,
                subject=s.name,
                fact=s.fact.name,
            )
        )
        for t in about.get(s.value, ()) if s.fact.phrases else ():
            # What leads back to the entity in question could be answered by repeating its name.
            if t.value == s.name or (s.continued and t.continued):
                continue
            phrase = rng.choice(s.fact.phrases).format(s=in_a_sentence(s.kind, s.name))
            ask = wording(t.fact)
            end = len(ask[: ask.index("{s}")]) + len(phrase)
            questions.append(
                Question(
                    kind="two-hop",
                    k=len(alike[t.kind, t.fact.name]),
                    text=ask.format(s=phrase),
                    answer=t.value,
                    documents=s.documents + t.documents,
                    subject=t.name,
                    fact=t.fact.name,
                    bridge=Mention(end=end, name=s.value),
                )
            )
    if rng.random() < style.comparisons:
        questions += [
            _comparison(rng, one, other)
            for group in alike.values()
            if len(group) > 1
            for one, other in (rng.sample(group, 2) for _ in group)
            if one.value != other.value
        ]
    rng.shuffle(questions)
    return questions


def _comparison(rng: random.Random, one: _Stated, other: _Stated) -> Question:
    """Which of two entities a fact is true of, or which has the smaller year."""
    who = "Who" if one.kind == "person" else "Which"
    true, claim = one, one.fact.says[0].removeprefix("{s} ").removesuffix(".").format(v=one.value)
    if one.fact.compares and rng.random() < 0.5:
        true, claim = min(one, other, key=lambda s: int(s.value)), one.fact.compares
    pair = rng.sample([one, other], 2)
    first, second = (in_a_sentence(s.kind, s.name) for s in pair)
    return Question(
        kind="comparison",
        k=2,
        text=f"{who} {claim}, {first} or {second}?",
        answer=capitalised(true.name),
        documents=pair[0].documents + pair[1].documents,
    )
