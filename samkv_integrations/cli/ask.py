"""``samkv ask``, ``samkv inspect`` and ``samkv methods``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.formatting import Row, percent, visible
from samkv_integrations.cli.loading import Answering, Asking, Embedded, Index, words
from samkv_integrations.errors import Given, InvalidOption
from samkv_integrations.option import check_options
from samkv_integrations.options import AnswerOptions, EngineOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from samkv_integrations.chroma.link import ChromaLink
    from samkv_integrations.lab.inspection import Inspection
    from samkv_integrations.serving.stream import Answer

TIMES = ("ttft", "answer")
"""Times to compare with full prefill: seconds to the first token, and to the last."""


def ask(
    index: Index, options: EngineOptions, asking: Asking, answering: Answering,
    of_answers: AnswerOptions, embedded: Embedded,
    compare: Annotated[str, typer.Option(help="Methods to compare: NAME,NAME,...")] = "",
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Answer a question from the ingested chunks."""
    if compare and answering.method:
        raise InvalidOption(
            Given("method", answering.method),
            " and ",
            Given("compare", compare),
            "; give one, because --compare names all methods",
        )
    check_options(AnswerOptions, of_answers)
    check_options(EngineOptions, options)
    index.require_folder()
    methods, rule = answering.methods(words(compare)), answering.rule
    collection = index.collection(asking.collection)  # raises if there is no database
    (link,) = index.links([collection], embedded.embeddings, **options)
    engine, most = link.engine, asking.max_new_tokens
    texts, sources, prompt = retrieved(link, asking.question, asking.top_k, asking.chat)
    is_compared = len(methods) > 1
    if is_compared:  # the first pass of a process is slow
        engine.generate(prompt, texts, method=methods[0], max_new_tokens=1)
    found = list[Row]()
    for each in methods or [engine.method]:
        if is_compared:  # so that no method has a cached prefix of another
            engine.sequences.clear()
        answer = engine.generate(
            prompt, texts, **of_answers | {"method": each, "eviction": rule, "max_new_tokens": most}
        )
        found.append({"question": asking.question, "sources": sources, **answer_row(answer)})
    rows, names = with_ratios(found), tables.sources_table(sources, texts)
    cut = f"\n(cut after {most} tokens, see --max-new-tokens)"
    text = rows[0]["answer"] + cut * (answer.finish_reason == "length")
    one: tuple[Table | str, ...] = (text, names, str(answer.report))
    shown = (tables.comparison_table(rows), names) if is_compared else one
    tables.report("ask", engine.model.name, rows, *shown, as_json=as_json)


def answer_row(answer: Answer) -> dict[str, Any]:
    """An answer with its report, and ``answer_s``, the seconds to its last token."""
    report = answer.report
    steps, per_s = report.completion_tokens - 1, report.decode_tokens_per_s
    answer_s = report.ttft_s + (steps / per_s if per_s else 0.0)
    return {"answer": answer.text.strip(), **report.to_dict(), "answer_s": answer_s}


def with_ratios(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows of one question, with ratios to the times of full prefill if it is among them."""
    full = next((row for row in rows if row["method"] == "recompute"), None)
    if full is None:
        return rows
    return [
        {**row, **{f"{name}_ratio": row[f"{name}_s"] / full[f"{name}_s"] for name in TIMES}}
        for row in rows
    ]


def retrieved(
    link: ChromaLink, question: str, top_k: int, chat: bool | None
) -> tuple[list[str], list[str], str | list[dict[str, str]]]:
    """Texts and sources of the nearest chunks, and the prompt that asks about them.

    chat: whether the prompt goes through the chat template; None for the model's default.
    """
    from samkv_integrations.prompt.rag_template import rag_prompt

    found = link.search(question, top_k)
    texts = [one.text for one in found]
    in_chat = link.engine.model.asks_in_chat if chat is None else chat
    return texts, [one.source for one in found], rag_prompt(question, texts, chat=in_chat)


def inspect(
    index: Index, options: EngineOptions, asking: Asking, answering: Answering,
    embedded: Embedded,
    html: Annotated[Path | None, typer.Option(help="Also write a web page to this file.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="Show the tokens of this layer. Default: of any layer.")
    ] = None,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Show which tokens of the chunks an answer kept, recomputed and dropped."""
    if html is not None and not html.parent.is_dir():
        raise InvalidOption(f"{html.parent} is not a folder; make it, or name another file")
    check_options(EngineOptions, options)
    index.require_folder()
    method, rule, question = answering.chosen, answering.rule, asking.question
    collection = index.collection(asking.collection)

    from samkv_integrations.lab.inspection import inspect as inspect_answer

    (link,) = index.links([collection], embedded.embeddings, **options)
    texts, sources, prompt = retrieved(link, question, asking.top_k, asking.chat)
    names = {text.strip(): Path(one).name for text, one in zip(texts, sources, strict=True)}
    seen = inspect_answer(
        link.engine, prompt, texts, method=method, eviction=rule,
        max_new_tokens=asking.max_new_tokens, title=question, names=names,
    )  # fmt: skip
    seen.state_at(layer)  # raises for a wrong layer before a page is written
    if html is not None:
        seen.save_html(html)
    if as_json:
        tables.report("inspect", link.engine.model.name, [seen.to_dict()], as_json=True)
        return
    show(seen, layer, tables.console())
    if html is not None:
        tables.console().print(f"\n{html}: the same as a page, with every layer and figure")


def show(seen: Inspection, layer: int | None, out: Console) -> None:
    """Show the chunks, the prompt in colours or marks, and both answers. layer: None for all."""
    from rich.text import Text

    from samkv_integrations.lab.inspection import State

    looks = {
        State.MISSED: ("black on red", "!", "!", "computed, without a usable cache"),
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


def methods(as_json: args.Json = False) -> None:
    """List the methods of answering from chunk caches, and of evicting KV entries."""
    from samkv_integrations.methods import METHODS
    from samkv_integrations.methods.eviction import EVICTIONS

    rows = [
        {"name": each.name, "kind": kind, "paper": each.paper, "summary": each.summary}
        for kind, known in (("method", METHODS), ("eviction", EVICTIONS))
        for each in known.values()
    ]
    table = tables.table([*rows[0]], [tuple(row.values()) for row in rows], left=4)
    tables.report("methods", None, rows, table, as_json=as_json)
