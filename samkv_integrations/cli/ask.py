"""``samkv ask``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from samkv_integrations.bench.data import Question
from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.link import ChromaLink, nearest
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.answers import answer_row, with_ratios
from samkv_integrations.cli.comma_lists import words
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.cli.method_options import eviction_of, given_methods
from samkv_integrations.cli.questions import question_of, read_questions
from samkv_integrations.engine.engine import Engine
from samkv_integrations.errors import InvalidOption
from samkv_integrations.eviction import Eviction
from samkv_integrations.figures import Row
from samkv_integrations.methods import Method


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """How each question is answered.

    methods: none for the engine's. eviction: a rule, ``"none"``, or None for the method's own.
    """

    methods: Sequence[Method]
    eviction: Eviction | str | None
    top_k: int
    max_new_tokens: int
    chat: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question with the chunks that were retrieved, nearest first, and a row a method."""

    sources: Sequence[str]
    texts: Sequence[str]
    rows: Sequence[Row]


def ask(
    question: args.QuestionText = None, questions: args.QuestionFile = None,
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None, model: args.ModelName = "builtin",
    device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, top_k: args.TopK = 4,
    method: args.MethodName = None, compare: args.Compare = "", settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_new_tokens: args.MaxNewTokens = 64, chat: args.Chat = False, namespace: args.Namespace = "",
    remote: args.Remote = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Answer from the ingested chunks."""
    if (question is None) == (questions is None):
        raise InvalidOption("give either a question or --questions FILE")
    wanted = read_questions(questions) if questions else [question_of(question or "")]
    options = AskOptions(
        methods=given_methods(words(compare or method or ""), settings or []),
        eviction=eviction_of(eviction, eviction_budget),
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        chat=chat,
    )
    opened = Database(folder / "chroma", chroma).collection(collection)
    engine = engine_of(
        model, folder / "kv", device, dtype, store_bits, namespace=namespace, remote=remote
    )
    engine.store.require(engine.fingerprint)
    options = options if options.methods else replace(options, methods=[engine.method])
    link = ChromaLink(opened, engine)
    asked = [
        _ask(one, link, engine, options, is_first=one is wanted[0])
        for one in tqdm(wanted, desc="asking", disable=questions is None)
    ]
    if as_json:
        tables.write_json("ask", model, [row for one in asked for row in one.rows])
    else:
        _show(asked, is_file=questions is not None)


def _ask(
    question: Question, link: ChromaLink, engine: Engine, options: AskOptions, *, is_first: bool
) -> Asked:
    """Retrieve chunks, and answer by every method. is_first: of the questions of this process."""
    found = nearest(link, question.question, options.top_k)
    texts, sources = tuple(one.text for one in found), [one.source for one in found]
    given = replace(question, documents=texts)
    if is_first and len(options.methods) > 1:
        _warm_up(engine, given, options)
    return Asked(sources=sources, texts=texts, rows=_answers(engine, given, sources, options))


def _warm_up(engine: Engine, question: Question, options: AskOptions) -> None:
    """Run a first pass, which is slower than all later ones of a process."""
    prompt = question.prompt(chat=options.chat)
    engine.generate(prompt, question.documents, method=options.methods[0], max_new_tokens=1)


def _answers(
    engine: Engine, question: Question, sources: Sequence[str], options: AskOptions
) -> list[Row]:
    """A row for each method."""
    answers = []
    for method in options.methods:
        if len(options.methods) > 1:  # they are compared: none goes on from another one's beginning
            engine.prefixes.clear()
        answer = engine.generate(
            question.prompt(chat=options.chat),
            question.documents,
            method=method,
            eviction=options.eviction,
            max_new_tokens=options.max_new_tokens,
        )
        answers.append(answer_row(question, answer.text, sources, answer.report))
    return with_ratios(answers)


def _show(asked: Sequence[Asked], *, is_file: bool) -> None:
    """The answers to a file of questions as a summary, those to a single question as they are."""
    out = tables.console()
    rows = [row for one in asked for row in one.rows]
    if is_file:
        out.print(tables.summary_table(rows))
    elif len(rows) > 1:
        out.print(tables.comparison_table(rows))
    else:
        out.print(rows[0]["answer"])
    if not is_file:
        out.print(tables.sources_table(asked[0].sources, asked[0].texts))
    if len(rows) == 1:
        out.print("\n".join(tables.report_lines(rows[0])))
