"""Prompts around a scene: what frameworks send, with and without the chat template."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from reference_model.scenes import Kind, Mention, Question, Scene, Value

PROMPTS_FILE = Path(__file__).parent / "prompts.toml"
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
PLAIN = "plain"  # the prompt that the command line and the benchmarks ask with

_Place = TypeVar("_Place", bound=Mention)
_SYSTEM_SHARE = 0.3
_HISTORY_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """One entry of prompts.toml. messages: (role, text) pairs."""

    name: str
    share: float
    messages: list[tuple[str, str]]
    plain: bool = False
    chat: bool = False
    task: Literal["answer", "refine", "condense"] = "answer"

    @property
    def context_first(self) -> bool:
        """Whether the documents stand before the question, so that questions can share them."""
        whole = "".join(text for _, text in self.messages)
        return whole.index("{context}") < whole.index("{question}")

    @property
    def conversational(self) -> bool:
        """Whether the question is a turn of its own, so that other turns can come before it."""
        return self.messages[-1][1] == "{question}"


@dataclass(frozen=True, kw_only=True)
class PromptForms:
    """The content of prompts.toml."""

    forms: list[PromptForm]
    documents: list[tuple[float, str]]
    folders: list[str]
    endings: list[str]
    system: list[str]

    @classmethod
    def load(cls) -> PromptForms:
        """Read `PROMPTS_FILE`."""
        data = tomllib.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
        return cls(
            forms=[PromptForm(**form) for form in data["prompt"]],
            documents=[(share, text) for share, text in data["documents"]["formats"]],
            folders=data["documents"]["folders"],
            endings=data["documents"]["endings"],
            system=data["system"]["messages"],
        )

    def named(self, name: str) -> PromptForm:
        """The form of that name."""
        return next(form for form in self.forms if form.name == name)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question as it stands after the context, with the answer that is to follow.

    text, answer: with the special tokens of the chat template; the answer ends with one.
    subject, fact: the entity that the answer is a fact of, and which, if there is one.
    bridge: where ``text`` speaks of an entity that another document names.
    """

    kind: Kind
    k: int
    text: str
    answer: str
    subject: str = ""
    fact: str = ""
    bridge: Mention | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A context, from BOS on, and questions that may each be asked after it."""

    context: str
    mentions: tuple[Mention, ...]
    questions: tuple[Asked, ...]
    values: tuple[Value, ...] = ()


def draw_prompt(
    forms: PromptForms, scene: Scene, rng: random.Random, *, n_questions: int, various: bool
) -> Prompt:
    """A prompt around ``scene`` with up to ``n_questions`` of its questions.

    various: any form and any format of documents, with its share; else the plain ones.
    """
    if not various:
        form, fmt, chat = forms.named(PLAIN), forms.documents[0][1], False
    else:
        form = rng.choices(forms.forms, [form.share for form in forms.forms])[0]
        fmt = rng.choices([f for _, f in forms.documents], [s for s, _ in forms.documents])[0]
        chat = form.chat and (not form.plain or rng.random() < 0.5)
    questions = _choose(scene.questions, n_questions)
    if form.task == "condense":
        return _condense(form, questions, rng, chat)
    if form.task == "refine":
        return _refine(forms, form, fmt, scene, rng, chat)
    messages = form.messages
    if chat and messages[0][0] == "user" and rng.random() < _SYSTEM_SHARE:
        messages = [("system", rng.choice(forms.system)), *messages]
    template = _template(messages, chat=chat)
    if not form.context_first:
        question = questions[0]
        template = template.replace("{question}", question.text)
        return _one(forms, fmt, scene, rng, template, question, question.answer, chat)
    body, mentions, values = _join(forms, fmt, scene, rng)
    before, after = template.split("{context}")
    # What all questions have in common goes with the context.
    cut = _last_cut(after[: after.index("{question}")])
    asked: list[Asked] = []
    for question in questions:
        own = after[cut:]
        others = [q for q in scene.questions if q != question]
        if chat and form.conversational and others and rng.random() < _HISTORY_SHARE:
            earlier = rng.choice(others)
            own = f"{earlier.text}{END}<|assistant|> {earlier.answer}{END}<|user|>{own}"
        start = own.rindex("{question}")
        bridge = question.bridge
        if bridge is not None:
            bridge = Mention(end=start + bridge.end, name=bridge.name)
        asked.append(
            Asked(
                kind=question.kind,
                k=question.k,
                text=own[:start] + question.text + own[start + len("{question}") :],
                answer=_answer(question.answer, own, chat),
                subject=question.subject,
                fact=question.fact,
                bridge=bridge,
            )
        )
    return Prompt(
        context=before + body + after[:cut],
        mentions=_moved(mentions, len(before)),
        values=_moved(values, len(before)),
        questions=tuple(asked),
    )


def _one(
    forms: PromptForms,
    fmt: str,
    scene: Scene,
    rng: random.Random,
    template: str,
    question: Question,
    answer: str,
    chat: bool,
) -> Prompt:
    """A prompt that holds its one question before or after the documents already."""
    body, mentions, values = _join(forms, fmt, scene, rng)
    before, after = template.split("{context}")
    cut = _last_cut(after[:-1])
    text = after[cut:]
    asked = Asked(
        kind=question.kind,
        k=question.k,
        text=text,
        answer=_answer(answer, after, chat),
        subject=question.subject,
        fact=question.fact,
    )
    return Prompt(
        context=before + body + after[:cut],
        mentions=_moved(mentions, len(before)),
        values=_moved(values, len(before)),
        questions=(asked,),
    )


def _last_cut(text: str) -> int:
    """The last place where a text can be cut and tokenised apart: no token reaches across."""
    special = text.rfind("|>")
    return max(text.rfind("\n") + 1, special + 2 if special >= 0 else 0)


def _moved(places: Sequence[_Place], by: int) -> tuple[_Place, ...]:
    return tuple(replace(place, end=place.end + by) for place in places)


def _choose(questions: Sequence[Question], n: int) -> list[Question]:
    """At most ``n`` questions, at most half of them two-hop and a third of them comparisons."""
    left = {"two-hop": max(1, n // 2), "comparison": max(1, n // 3)}
    chosen: list[Question] = []
    for question in questions:
        if len(chosen) == n:
            break
        if left.get(question.kind, 1) > 0:
            left[question.kind] = left.get(question.kind, n) - 1
            chosen.append(question)
    return chosen


def _template(messages: Sequence[tuple[str, str]], *, chat: bool) -> str:
    """The prompt as one text, up to where the answer begins."""
    if not chat:
        ((_, text),) = messages
        return BOS + text
    turns = "".join(f"<|{role}|>{text}{END}" for role, text in messages)
    return f"{BOS}{turns}<|assistant|>"


def _answer(answer: str, text: str, chat: bool) -> str:
    """The answer as the model is to continue ``text``."""
    space = "" if text.endswith((" ", "\n")) else " "
    return f"{space}{answer}{END if chat else EOS}"


def join_documents(
    fmt: str, scene: Scene, paths: Sequence[str]
) -> tuple[list[str], tuple[Mention, ...], tuple[Value, ...]]:
    """Every document in a format; mentions and values in all of them, joined by an empty line."""
    bodies: list[str] = []
    mentions: list[Mention] = []
    values: list[Value] = []
    start = 0
    for number, (document, path) in enumerate(zip(scene.documents, paths, strict=True), 1):
        head = fmt.removesuffix("{text}").format(title=document.title, number=number, path=path)
        bodies.append(head + document.text)
        mentions += _moved(document.mentions, start + len(head))
        values += _moved(document.values, start + len(head))
        start += len(bodies[-1]) + 2
    return bodies, tuple(mentions), tuple(values)


def _join(
    forms: PromptForms, fmt: str, scene: Scene, rng: random.Random
) -> tuple[str, tuple[Mention, ...], tuple[Value, ...]]:
    folder, ending, first = rng.choice(forms.folders), rng.choice(forms.endings), rng.randrange(90)
    names = [f"record_{first + i}" for i in range(len(scene.documents))]
    if rng.random() < 0.5:
        names = [document.title.lower().replace(" ", "-") for document in scene.documents]
    paths = [f"{folder}/{name}{ending}" for name in names]
    bodies, mentions, values = join_documents(fmt, scene, paths)
    return "\n\n".join(bodies), mentions, values


def _refine(
    forms: PromptForms,
    form: PromptForm,
    fmt: str,
    scene: Scene,
    rng: random.Random,
    chat: bool,
) -> Prompt:
    """An answer to be replaced by what the documents say, or to be kept if they say nothing."""
    question = next((q for q in scene.questions if len(q.documents) == 1), scene.questions[0])
    question = replace(question, k=1)  # the answer is in sight: this is another task
    existing = rng.choice(scene.questions).answer
    answer = question.answer
    if len(question.documents) == 1 and rng.random() < 0.5:
        left_out = {question.documents[0], question.documents[0] + 1}
        kept = [d for i, d in enumerate(scene.documents) if i not in left_out]
        if kept:
            scene, answer = Scene(documents=tuple(kept), questions=()), existing
            question = replace(question, subject="", fact="")
    template = _template(form.messages, chat=chat)
    template = template.replace("{question}", question.text).replace("{existing}", existing)
    return _one(forms, fmt, scene, rng, template, question, answer, chat)


def _condense(
    form: PromptForm, questions: Sequence[Question], rng: random.Random, chat: bool
) -> Prompt:
    """A conversation and a question that stands alone already, to be repeated."""
    history = [
        f"{role}: {text}"
        for question in questions[: rng.randint(1, 3)]
        for role, text in (("user", question.text), ("assistant", question.answer))
    ]
    template = _template(form.messages, chat=chat).replace("{context}", "\n".join(history))
    cut = _last_cut(template[: template.index("{question}")])
    context, own = template[:cut], template[cut:]
    asked = tuple(
        Asked(
            kind=question.kind,
            k=1,
            text=own.replace("{question}", question.text),
            answer=_answer(question.text, own, chat),
        )
        for question in questions[-4:]
    )
    return Prompt(context=context, mentions=(), questions=asked)
