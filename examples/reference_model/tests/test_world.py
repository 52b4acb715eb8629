"""Scenes, prompts and tokens of the reference model's training, read back by other means."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.chat_engine.condense_plus_context import (
    DEFAULT_CONDENSE_PROMPT_TEMPLATE,
    DEFAULT_CONTEXT_PROMPT_TEMPLATE,
)
from llama_index.core.chat_engine.context import DEFAULT_CONTEXT_TEMPLATE
from llama_index.core.prompts import chat_prompts, default_prompts
from tokenizers import Tokenizer

from reference_model.packing import encode
from reference_model.prompts import BOS, EOS, PromptForms, draw_prompt, join_documents
from reference_model.scenes import Document, Question, Scene, SceneStyle, draw_scene, tell
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
from reference_model.world import Fact, World, capitalised, in_a_sentence, is_held_out
from samkv_integrations.model.loading import builtin_path
from samkv_integrations.prompt.rag_template import rag_prompt

WORLD = World.load()
FORMS = PromptForms.load()
LONG_STYLES = (LONG, LONG_LINKED, LONG_CONTINUED)
STYLES = (SENTENCES, RECORDS, CONTINUED, LINKED, LONG_RECORDS, FILLER, COMPARED, *LONG_STYLES)
MODES = [
    pytest.param(form, chat, id=f"{form.name}{', chat' if chat else ''}")
    for form in FORMS.forms
    for chat in (False, True)
    if (form.chat if chat else form.plain)
]
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sentence as a reader takes it. place: document and sentence."""

    name: str
    kind: str
    fact: Fact
    value: str
    subject: str
    place: tuple[int, int]


def wordings(texts: list[str], **fixed: str) -> Iterator[re.Pattern[str]]:
    """Patterns with a group for each of {s} and {v} that is not fixed."""
    for text in texts:
        pattern = re.escape(text).replace(r"\{", "{").replace(r"\}", "}")
        groups = {key: f"(?P<{key}>.+)" for key in "sv"}
        yield re.compile(pattern.format(**groups | fixed), re.IGNORECASE)


IN_SINGULAR = {plural: verb for verb, plural in WORLD.plural.items()}
SAYS = [
    (kind, fact, pattern)
    for kind, facts in WORLD.facts.items()
    for fact in facts
    for pattern in wordings(fact.says)
]
IDLE = [re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(text))) for text in WORLD.idle_sentences]


def sentences(document: Document) -> list[str]:
    return re.split(r"(?<=\.) ", document.text)


def is_a(kind: str, text: str) -> bool:
    """Whether ``text`` is a name or a word of ``kind``."""
    if kind in WORLD.words:
        return text in WORLD.words[kind]
    words = text.split()
    if kind == "person" and words.pop(0) not in WORLD.first_names:
        return False
    if kind in WORLD.second_words and len(words) == 2:
        words = words[:1] if words[1] in WORLD.second_words[kind] else []
    return len(words) == 1 and bool(pairs(kind, words[0]))


def pairs(kind: str, word: str) -> list[tuple[int, int]]:
    """Stems and endings that make ``word``."""
    return [
        (WORLD.stems.index(word[:cut]), WORLD.endings[kind].index(word[cut:]))
        for cut in range(1, len(word))
        if word[:cut] in WORLD.stems and word[cut:] in WORLD.endings[kind]
    ]


def read(scene: Scene) -> list[Statement]:
    """Everything that the documents state; fails on a sentence that is no statement and not idle.

    A document without a name of its own is about the entity of the one before it.
    """
    found: list[Statement] = []
    name = ""
    for index, document in enumerate(scene.documents):
        goes_on = document.title in WORLD.follow_up["titles"]
        name = name if goes_on else document.title
        for number, sentence in enumerate(sentences(document)):
            statements = list(statements_of(sentence, name, (index, number)))
            assert len(statements) + any(p.fullmatch(sentence) for p in IDLE) == 1, sentence
            found += statements
    return found


def statements_of(sentence: str, name: str, place: tuple[int, int]) -> Iterator[Statement]:
    verb = re.fullmatch(r"(They )(\w+)( .*)", sentence)
    if verb:
        sentence = verb[1] + IN_SINGULAR.get(verb[2], verb[2]) + verb[3]
    for kind, fact, pattern in SAYS:
        match = pattern.fullmatch(sentence)
        if not match or not is_a(fact.value, match["v"]) or not is_a(kind, name):
            continue
        subject = match["s"][0].lower() + match["s"][1:]
        own = in_a_sentence(kind, name)
        others = [*WORLD.pronouns[kind], WORLD.follow_up[kind][0], WORLD.follow_up[kind][1]]
        if subject in others or match["s"] in (own, capitalised(own)):
            subject = subject if subject in others else ""
            yield Statement(
                name=name, kind=kind, fact=fact, value=match["v"], subject=subject, place=place
            )


def asked(text: str) -> list[tuple[str, Fact, str]]:
    """(kind, fact, of what) that a question may ask for."""
    return [
        (kind, fact, match["s"])
        for kind, facts in WORLD.facts.items()
        for fact in facts
        for pattern in wordings(fact.asks)
        if (match := pattern.fullmatch(text))
    ]


def bare(kind: str, phrase: str) -> str:
    return phrase.removeprefix("the ") if kind == "product" else phrase


def solutions(question: Question, known: list[Statement]) -> list[tuple[Statement, ...]]:
    """Every chain of statements that answers a question, last one last."""
    if question.kind == "comparison":
        return compared(question.text, known)
    found: list[tuple[Statement, ...]] = []
    for kind, fact, phrase in asked(question.text):
        last = [s for s in known if s.kind == kind and s.fact == fact]
        found += [(s,) for s in last if in_a_sentence(kind, s.name) == phrase]
        for first in known:
            matches = (p.fullmatch(phrase) for p in wordings(first.fact.phrases))
            of = [m["s"] for m in matches if m]
            if in_a_sentence(first.kind, first.name) in of:
                found += [(first, s) for s in last if s.name == first.value]
    return found


def compared(text: str, known: list[Statement]) -> list[tuple[Statement, ...]]:
    match = re.fullmatch(r"(?:Who|Which) (.+), (.+) or (.+)\?", text)
    assert match
    claim, *phrases = match.groups()
    found: list[tuple[Statement, ...]] = []
    for fact in {s.fact.name: s.fact for s in known}.values():
        pair = [
            s
            for phrase in phrases
            for s in known
            if s.fact == fact and in_a_sentence(s.kind, s.name) == phrase
        ]
        if len(pair) < 2:
            continue
        if claim == fact.compares:
            years = sorted(pair, key=lambda s: int(s.value))
            assert years[0].value != years[1].value
            found.append((years[1], years[0]))
        true = [s for s in pair if fact.says[0].format(s="", v=s.value) == f" {claim}."]
        if true:
            assert len(true) == 1
            found.append((next(s for s in pair if s != true[0]), true[0]))
    return found


def scenes(**changes: object) -> st.SearchStrategy[Scene]:
    return st.builds(
        lambda seed, style: draw_scene(WORLD, replace(style, **changes), random.Random(seed)),
        seeds,
        st.sampled_from(STYLES),
    )


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_no_two_statements_contradict_each_other(scene: Scene) -> None:
    values: dict[tuple[str, str], set[str]] = {}
    for s in read(scene):
        values.setdefault((s.name, s.fact.name), set()).add(s.value)
    assert all(len(found) == 1 for found in values.values())
    assert all(s.value != s.name for s in read(scene))  # nobody is their own teacher
    made = {(s.name, s.value) for s in read(scene) if s.fact.name == "product"}
    makers = {(s.value, s.name) for s in read(scene) if s.fact.name == "maker"}
    names = {s.name for s in read(scene)}
    both = {pair for pair in made | makers if set(pair) <= names}
    assert len({company for company, _ in both}) == len(both)
    assert len({product for _, product in both}) == len(both)


def needed(scene: Scene, statement: Statement) -> tuple[int, ...]:
    """Its document, after the one that says whom it is about if it does not say so itself."""
    at = statement.place[0]
    goes_on = scene.documents[at].title in WORLD.follow_up["titles"]
    return (at - 1, at) if goes_on else (at,)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_every_question_has_one_answer_and_names_its_documents(scene: Scene) -> None:
    known = read(scene)
    for question in scene.questions:
        (chain,) = solutions(question, known)
        last = chain[-1]
        if question.kind == "comparison":
            assert question.answer == capitalised(last.name)
            assert set(question.documents) == {d for s in chain for d in needed(scene, s)}
            assert question.k == 2
            continue
        assert question.answer == last.value
        assert question.k == len(
            {s.name for s in known if s.kind == last.kind and s.fact == last.fact}
        )
        assert (question.kind == "two-hop") == (len(chain) == 2)
        assert question.documents == tuple(d for s in chain for d in needed(scene, s))
        if question.kind == "reference":
            assert len(question.documents) == 2
            assert scene.documents[question.documents[0]].title == last.name
        if question.bridge:
            phrase = question.text[: question.bridge.end]
            assert question.bridge.name == last.name == chain[0].value
            assert any(
                phrase.endswith(p.format(s=in_a_sentence(chain[0].kind, chain[0].name)))
                for p in chain[0].fact.phrases
            )
            assert not re.match(r"\w", question.text[question.bridge.end :])


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_values_of_one_fact_differ_as_far_as_the_words_go(scene: Scene) -> None:
    values: dict[tuple[str, str], list[str]] = {}
    for s in read(scene):
        values.setdefault((s.kind, s.fact.name), []).append(s.value)
    for (kind, name), found in values.items():
        fact = next(fact for fact in WORLD.facts[kind] if fact.name == name)
        most = len(WORLD.words.get(fact.value, found))
        assert len(set(found)) == min(len(found), most)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_a_mention_ends_where_a_pronoun_or_description_ends(scene: Scene) -> None:
    known = read(scene)
    for index, document in enumerate(scene.documents):
        starts, start = [], 0
        for sentence in sentences(document):
            starts.append(start)
            start += len(sentence) + 1
        expected = []
        for s in known:
            if s.place[0] != index or not s.subject:
                continue
            begin = starts[s.place[1]]
            at = document.text.lower().index(s.subject, begin)
            expected.append((at + len(s.subject), capitalised(s.name)))
            # "it" and "they" never follow a sentence about something else
            if s.subject in WORLD.pronouns[s.kind]:
                assert any(other.place == (index, s.place[1] - 1) for other in known)
        found = [(m.end, capitalised(m.name)) for m in document.mentions]
        assert found == expected


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_every_value_is_marked_at_its_first_letter(scene: Scene) -> None:
    known = read(scene)
    for index, document in enumerate(scene.documents):
        here = [s for s in known if s.place[0] == index]
        assert len(here) == len(document.values)
        for statement, marked in zip(here, document.values, strict=True):
            assert marked.fact == statement.fact.name
            assert capitalised(marked.name) == capitalised(statement.name)
            assert document.text[marked.end - 1 :].startswith(statement.value)


@pytest.mark.parametrize(
    ("kind", "name", "fact", "value"),
    [("town", "Sisstead", "ware", "tea"), ("product", "Dredio pump", "color", "red")],
)
def test_a_value_is_not_marked_inside_of_a_name(
    kind: str, name: str, fact: str, value: str
) -> None:
    told = next(one for one in WORLD.facts[kind] if one.name == fact)
    texts = set()
    for seed in range(10):
        document = tell(WORLD, RECORDS, random.Random(seed), name, kind, name, [(told, value)])
        (marked,) = document.values
        assert re.search(rf" {value}\b", document.text[marked.end - 2 :]).start() == 0
        texts.add(document.text)
    assert len(texts) > 1


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


def test_about_one_name_in_twelve_is_held_out() -> None:
    for kind, endings in WORLD.endings.items():
        n = len(WORLD.stems) * len(endings)
        held_out = sum(
            is_held_out(s, e) for s in range(len(WORLD.stems)) for e in range(len(endings))
        )
        assert 0.07 < held_out / n < 0.1, kind


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(builtin_path() / "tokenizer.json"))


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(("form", "chat"), MODES)
def test_parts_of_a_prompt_are_tokenised_apart_as_they_are_together(
    tokenizer: Tokenizer, form: object, chat: bool
) -> None:
    forms = replace(FORMS, forms=[replace(form, plain=not chat, chat=chat)])
    rng = random.Random(f"{form} {chat}")
    for _ in range(12):
        scene = draw_scene(WORLD, RECORDS, rng)
        prompt = draw_prompt(forms, scene, rng, n_questions=6, various=True)
        context = tokens(tokenizer, prompt.context)
        assert context.count(tokenizer.token_to_id(BOS)) == 1
        for question in prompt.questions:
            text = tokens(tokenizer, question.text)
            answer = tokens(tokenizer, question.answer)
            assert tokens(tokenizer, prompt.context + question.text) == context + text
            if not question.text.endswith(" "):
                # After a space the answer is what follows the space's own token.
                whole = prompt.context + question.text + question.answer
                assert tokens(tokenizer, whole) == context + text + answer
            assert tokenizer.decode(answer, skip_special_tokens=False) == question.answer


@pytest.mark.parametrize(("form", "chat"), MODES)
def test_a_document_has_the_same_tokens_alone_and_in_a_prompt(
    tokenizer: Tokenizer, form: object, chat: bool
) -> None:
    if form.task == "condense":
        pytest.skip("holds no documents")
    space_before = re.search(r"[^\s] \{context\}", "".join(t for _, t in form.messages))
    rng = random.Random(f"{form} {chat}")
    for _, fmt in FORMS.documents:
        only = replace(
            FORMS,
            forms=[replace(form, plain=not chat, chat=chat)],
            documents=[(1.0, fmt)],
            folders=["data"],
            endings=[".txt"],
        )
        scene = draw_scene(WORLD, RECORDS, rng)
        prompt = draw_prompt(only, scene, rng, n_questions=1, various=True)
        for document in scene.documents:
            text = prompt.context + prompt.questions[0].text
            end = text.find(document.text) + len(document.text)
            if end < len(document.text):  # the refine forms leave documents out
                continue
            start = start_of(text, fmt, document, end)
            if space_before and text[start - 1] == " ":
                start -= 1  # a token that begins with a space is not the one without
            before, body, after = text[:start], text[start:end], text[end:]
            apart = [tokens(tokenizer, part) for part in (before, body, after)]
            assert tokens(tokenizer, text) == sum(apart, [])


def test_every_stage_but_the_last_has_an_end() -> None:
    """One without gates is left after its first steps."""
    assert all(stage.gates for stage in STAGES[:-1])
    assert not STAGES[-1].gates


@pytest.mark.parametrize("style", LONG_STYLES, ids=["facts", "linked", "continued"])
def test_the_longest_documents_of_training_fit_into_the_window(
    tokenizer: Tokenizer, style: SceneStyle
) -> None:
    """A prompt that does not ends the training."""
    most = replace(
        style,
        documents=(style.documents[1],) * 2,
        facts=(style.facts[1],) * 2,
        idle=(style.idle[1],) * 2,
    )
    rng = random.Random(4)
    for _ in range(20):
        scene = draw_scene(WORLD, most, rng)
        prompt = draw_prompt(FORMS, scene, rng, n_questions=8, various=True)
        assert encode(tokenizer, prompt).longest < 4096


def start_of(text: str, fmt: str, document: Document, end: int) -> int:
    """Where a document begins, its title and path included."""
    fixed = fmt.replace("{title}", document.title).removesuffix("{text}")
    pattern = re.escape(fixed).replace(r"\{number\}", r"\d+").replace(r"\{path\}", r"\S+")
    found = list(re.finditer(pattern + re.escape(document.text), text[:end]))
    return found[-1].start()


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


def shape_of(template: str) -> str:
    """With the placeholders of prompts.toml."""
    renamed = {
        "context_str": "context",
        "context_msg": "context",
        "query_str": "question",
        "existing_answer": "existing",
        "chat_history": "context",
    }
    for theirs, ours in renamed.items():
        template = template.replace(f"{{{theirs}}}", f"{{{ours}}}")
    return template


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("text-qa", default_prompts.DEFAULT_TEXT_QA_PROMPT_TMPL),
        ("tree-summarize", default_prompts.DEFAULT_TREE_SUMMARIZE_TMPL),
        ("refine", default_prompts.DEFAULT_REFINE_PROMPT_TMPL),
        ("condense", DEFAULT_CONDENSE_PROMPT_TEMPLATE),
    ],
)
def test_plain_prompts_are_word_for_word_those_of_llama_index(name: str, template: str) -> None:
    ((role, text),) = FORMS.named(f"llama-index {name}").messages
    assert (role, text) == ("user", shape_of(template))


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("text-qa", chat_prompts.TEXT_QA_PROMPT_TMPL_MSGS),
        ("tree-summarize", chat_prompts.TREE_SUMMARIZE_PROMPT_TMPL_MSGS),
        ("refine", chat_prompts.CHAT_REFINE_PROMPT_TMPL_MSGS),
    ],
)
def test_chat_prompts_are_word_for_word_those_of_llama_index(name: str, messages: list) -> None:
    expected = [[m.role.value, shape_of(m.content)] for m in messages]
    assert [list(m) for m in FORMS.named(f"llama-index chat {name}").messages] == expected


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("context", DEFAULT_CONTEXT_TEMPLATE),
        ("condense-plus-context", DEFAULT_CONTEXT_PROMPT_TEMPLATE),
    ],
)
def test_chat_engines_prompts_are_word_for_word_those_of_llama_index(
    name: str, template: str
) -> None:
    found = [list(m) for m in FORMS.named(f"llama-index {name} chat").messages]
    assert found == [["system", shape_of(template)], ["user", "{question}"]]
