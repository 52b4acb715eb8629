"""``samkv inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from samkv_integrations.chroma.client import Database
from samkv_integrations.chroma.link import ChromaLink, nearest
from samkv_integrations.cli import arguments as args
from samkv_integrations.cli import tables
from samkv_integrations.cli.loading import engine_of
from samkv_integrations.cli.method_options import eviction_of, given_methods
from samkv_integrations.cli.questions import question_of
from samkv_integrations.engine.watch import State
from samkv_integrations.errors import InvalidOption
from samkv_integrations.figures import percent, visible
from samkv_integrations.inspection import Inspection
from samkv_integrations.inspection import inspect as inspect_answer

STYLES = {
    State.MISSED: "black on red", State.KEPT: "green",
    State.RECOMPUTED: "black on yellow", State.DROPPED: "dim strike",
}  # fmt: skip
MARKS = {
    State.MISSED: ("!", "!"), State.KEPT: ("", ""), State.RECOMPUTED: ("<", ">"),
    State.DROPPED: ("~", "~"),
}  # fmt: skip
"""What stands around tokens where there are no colours."""

NAMES = {
    State.MISSED: "computed for want of a cache", State.KEPT: "kept from its cache",
    State.RECOMPUTED: "recomputed", State.DROPPED: "dropped",
}  # fmt: skip


def inspect(
    question: args.InspectedQuestion,
    collection: args.Collection = "documents", folder: args.Folder = Path(".samkv"),
    chroma: args.ChromaServer = None, model: args.ModelName = "builtin",
    device: args.Device = "auto", dtype: args.Dtype = "auto",
    store_bits: args.CacheBits = None, top_k: args.TopK = 4,
    method: args.MethodName = None, settings: args.Settings = None,
    eviction: args.EvictionName = None, eviction_budget: args.EvictionBudget = None,
    max_new_tokens: args.MaxNewTokens = 64, chat: args.Chat = False, namespace: args.Namespace = "",
    remote: args.Remote = None, html: args.HtmlPage = None, layer: args.ShownLayer = None,
    as_json: args.Json = False,
) -> None:  # fmt: skip
    """Show what one answer read: tokens kept, recomputed and dropped, beside full prefill."""
    asked = question_of(question)
    chosen = [*given_methods([method] if method else [], settings or []), None][0]
    rule = eviction_of(eviction, eviction_budget)
    if html is not None and not html.parent.is_dir():
        raise InvalidOption(f"{html.parent} is not a folder; make it, or name another file")
    opened = Database(folder / "chroma", chroma).collection(collection)
    engine = engine_of(
        model, folder / "kv", device, dtype, store_bits, namespace=namespace, remote=remote
    )
    engine.store.require(engine.fingerprint)
    found = nearest(ChromaLink(opened, engine), asked.question, top_k)
    given = replace(asked, documents=tuple(one.text for one in found))
    seen = inspect_answer(
        engine, given.prompt(chat=chat), given.documents, method=chosen, eviction=rule,
        max_new_tokens=max_new_tokens, title=asked.question,
        names={one.text.strip(): Path(one.source).name for one in found},
    )  # fmt: skip
    seen.state_at(layer)  # refuses one that there is not, before a page is written
    if html is not None:
        seen.save_html(html)
    if as_json:
        tables.write_json("inspect", model, [seen.to_dict()])
        return
    show(seen, layer, tables.console())
    if html is not None:
        tables.console().print(f"\n{html}: the same as a page, with every layer and figure")


def show(seen: Inspection, layer: int | None, out: Console) -> None:
    """The chunks, the prompt in colours, and both answers. layer: None for all of them."""
    out.print(_chunk_table(seen, layer))
    out.print()
    out.print(_text(seen, layer, out), soft_wrap=not out.is_terminal)
    same = "the same answer" if seen.is_same else "another answer"
    out.print(f"\n{seen.report.ran}: {seen.answer}\nfull prefill: {seen.full_answer} ({same})")
    if seen.report.eviction:
        share = percent(seen.report.kept_ratio)
        out.print(f"later tokens go on with {share} of the chunks' tokens ({seen.report.eviction})")
    if seen.report.chunk_misses:
        misses = ", ".join(f"{n} {reason}" for reason, n in seen.report.chunk_misses.items())
        out.print(f"without a usable cache: {misses}")


def _chunk_table(seen: Inspection, layer: int | None) -> object:
    columns = (
        "chunk", "tokens", "kept", "recom-\nputed", "dropped", "attention", "in full\nprefill",
        "best\nscore",
    )  # fmt: skip
    rows = []
    for chunk in seen.chunks_at(layer):
        shares = (chunk.kept, chunk.recomputed, chunk.dropped)
        rows.append((
            chunk.name, str(chunk.n_tokens),
            *(percent(share) if chunk.is_cached else "no cache" for share in shares),
            percent(chunk.attention), percent(chunk.full_attention),
            "-" if chunk.score is None else f"{chunk.score:.3g}",
        ))  # fmt: skip
    return tables.table(columns, rows)


def _text(seen: Inspection, layer: int | None, out: Console) -> Text:
    """The prompt, its tokens in the colours of their states, or between marks."""
    has_colours = out.is_terminal and not out.no_color
    where = "at any layer" if layer is None else f"at layer {layer}"
    text = Text(f"What became of each token {where}: ")
    states = seen.state_at(layer)
    for state in sorted({*states} - {State.UNCACHED}):
        text.append_text(_run(NAMES[state], state, has_colours=has_colours)).append("  ")
    text.append("\n\n")
    for state, piece in _runs(seen, states):
        text.append_text(_run(piece, state, has_colours=has_colours))
    return text


def _runs(seen: Inspection, states: list[State]) -> Iterator[tuple[State, str]]:
    """Neighbouring tokens of one chunk and one state, as one text."""
    tokens = zip(seen.chunk_of.tolist(), states, seen.pieces, strict=True)
    for (_, state), run in groupby(tokens, key=lambda token: token[:2]):
        yield state, "".join(piece for _, _, piece in run)


def _run(piece: str, state: State, *, has_colours: bool) -> Text:
    if state == State.UNCACHED or has_colours:
        return Text(visible(piece), style=STYLES.get(state, ""))
    before, after = MARKS[state]
    return Text(f"{before}{visible(piece)}{after}")
