"""``samkv ask``, ``samkv inspect`` and ``samkv methods``."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import Index, eviction_of, given_methods, words
from samkv_integrations.engine.options import OwnEngineOptions
from samkv_integrations.errors import InvalidOption
from samkv_integrations.formatting import Row, percent, visible

if TYPE_CHECKING:
    from rich.console import Console

    from samkv_integrations.inspection import Inspection


def ask(
    index: Index, options: OwnEngineOptions,
    question: args.QuestionText = None, questions: args.QuestionFile = None,
    collection: args.Collection = "documents", top_k: args.TopK = 4,
    method: args.MethodName = None, compare: args.Compare = "", settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_new_tokens: args.MaxNewTokens = 64, chat: args.Chat = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Answer a question from the ingested chunks."""
    from tqdm.auto import tqdm

    from samkv_integrations.chroma.link import nearest
    from samkv_integrations.cli.answers import answer_row, with_ratios
    from samkv_integrations.evaluation.questions import question_of, read_questions

    if (question is None) == (questions is None):
        raise InvalidOption("give either a question or --questions FILE")
    wanted = read_questions(questions) if questions else [question_of(question or "")]
    methods = given_methods(words(compare or method or ""), settings or [])
    rule = eviction_of(eviction, eviction_budget)
    (link,) = index.links([collection], **options)
    engine, rows, sources, texts = link.engine, list[Row](), list[str](), list[str]()
    for one in tqdm(wanted, desc="asking", disable=questions is None):
        found = nearest(link, one.question, top_k)
        texts, sources = [each.text for each in found], [each.source for each in found]
        in_chat = engine.model.asks_in_chat if chat is None else chat
        prompt = replace(one, documents=tuple(texts)).prompt(chat=in_chat)
        if one is wanted[0] and len(methods) > 1:  # the first pass of a process is slow
            engine.generate(prompt, texts, method=methods[0], max_new_tokens=1)
        answered: list[Row] = []
        for each in methods or [engine.method]:
            if len(methods) > 1:  # so that none reuses the prefix of another
                engine.prefixes.clear()
            answer = engine.generate(
                prompt, texts, method=each, eviction=rule, max_new_tokens=max_new_tokens
            )
            answered.append(answer_row(one, answer.text, sources, answer.report))
        rows += with_ratios(answered)
    if as_json:
        tables.write_json("ask", engine.model.name, rows)
        return
    out = tables.console()
    if questions:
        out.print(tables.summary_table(rows))
    else:
        out.print(tables.comparison_table(rows) if len(rows) > 1 else rows[0]["answer"])
        out.print(tables.sources_table(sources, texts))
    if len(rows) == 1:
        out.print("\n".join(tables.report_lines(rows[0])))


def inspect(
    index: Index, options: OwnEngineOptions, question: args.InspectedQuestion,
    collection: args.Collection = "documents", top_k: args.TopK = 4,
    method: args.MethodName = None, settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_new_tokens: args.MaxNewTokens = 64, chat: args.Chat = None,
    html: args.HtmlPage = None, layer: args.ShownLayer = None, as_json: args.Json = False,
) -> None:  # fmt: skip
    """Show which tokens of the chunks an answer kept, recomputed and dropped."""
    from samkv_integrations.chroma.link import nearest
    from samkv_integrations.evaluation.questions import question_of
    from samkv_integrations.inspection import inspect as inspect_answer

    asked = question_of(question)
    chosen = [*given_methods([method] if method else [], settings or []), None][0]
    rule = eviction_of(eviction, eviction_budget)
    if html is not None and not html.parent.is_dir():
        raise InvalidOption(f"{html.parent} is not a folder; make it, or name another file")
    (link,) = index.links([collection], **options)
    engine, found = link.engine, nearest(link, asked.question, top_k)
    asked = replace(asked, documents=tuple(one.text for one in found))
    prompt = asked.prompt(chat=engine.model.asks_in_chat if chat is None else chat)
    seen = inspect_answer(
        engine, prompt, asked.documents, method=chosen, eviction=rule,
        max_new_tokens=max_new_tokens, title=asked.question,
        names={one.text.strip(): Path(one.source).name for one in found},
    )  # fmt: skip
    seen.state_at(layer)  # raises for a wrong layer before a page is written
    if html is not None:
        seen.save_html(html)
    if as_json:
        tables.write_json("inspect", engine.model.name, [seen.to_dict()])
        return
    show(seen, layer, tables.console())
    if html is not None:
        tables.console().print(f"\n{html}: the same as a page, with every layer and figure")


def show(seen: Inspection, layer: int | None, out: Console) -> None:
    """Show the chunks, the prompt in colours or marks, and both answers. layer: None for all."""
    from rich.text import Text

    from samkv_integrations.inspection import State

    looks = {
        State.MISSED: ("black on red", "!", "!", "computed for want of a cache"),
        State.KEPT: ("green", "", "", "kept from its cache"),
        State.RECOMPUTED: ("black on yellow", "<", ">", "recomputed"),
        State.DROPPED: ("dim strike", "~", "~", "dropped"),
    }
    columns = (
        "chunk", "tokens", "kept", "recom-\nputed", "dropped", "attention", "in full\nprefill",
    )  # fmt: skip
    cells = [
        (
            chunk.name, str(chunk.n_tokens),
            *(percent(share) if chunk.is_cached else "no cache"
              for share in (chunk.kept, chunk.recomputed, chunk.dropped)),
            percent(chunk.attention), percent(chunk.full_attention),
        )
        for chunk in seen.chunks_at(layer)
    ]  # fmt: skip
    out.print(tables.table(columns, cells))

    def styled(piece: str, state: State) -> Text:
        style, before, after, _ = looks.get(state, ("", "", "", ""))
        if out.is_terminal and not out.no_color:
            return Text(visible(piece), style=style)
        return Text(f"{before}{visible(piece)}{after}")

    where, states = "any layer" if layer is None else f"layer {layer}", seen.state_at(layer)
    text = Text(f"\nWhat became of each token at {where}: ")
    for state in sorted({*states} & looks.keys()):
        text.append_text(styled(looks[state][-1], state)).append("  ")
    text.append("\n\n")
    tokens = zip(seen.chunk_of.tolist(), states, seen.pieces, strict=True)
    for (_, state), run in groupby(tokens, key=lambda token: token[:2]):
        text.append_text(styled("".join(piece for _, _, piece in run), state))
    out.print(text, soft_wrap=not out.is_terminal)
    same = "the same answer" if seen.is_same else "another answer"
    out.print(f"\n{seen.report.ran}: {seen.answer}\nfull prefill: {seen.full_answer} ({same})")
    if seen.report.eviction:
        share = percent(seen.report.kept_ratio)
        out.print(f"later tokens go on with {share} of the chunks' tokens ({seen.report.eviction})")
    if seen.report.chunk_misses:
        misses = ", ".join(f"{n} {reason}" for reason, n in seen.report.chunk_misses.items())
        out.print(f"without a usable cache: {misses}")


def methods(as_json: args.Json = False, markdown: args.AsMarkdown = False) -> None:
    """List the methods of answering from chunk caches, and of evicting KV entries."""
    from samkv_integrations.eviction import EVICTIONS
    from samkv_integrations.methods import METHODS

    rows = [
        {"name": each.name, "kind": kind, "paper": each.paper, "summary": each.summary}
        for kind, known in (("method", METHODS), ("eviction", EVICTIONS))
        for each in known.values()
    ]
    if as_json:
        tables.write_json("methods", None, rows)
        return
    columns, cells = ("name", "kind", "paper", "summary"), [tuple(row.values()) for row in rows]
    if markdown:
        marked = [(f"`{name}`", *rest) for name, *rest in cells]
        typer.echo(tables.markdown_table(columns, marked, left=4))
    else:
        tables.console().print(tables.table(columns, cells, left=4))
