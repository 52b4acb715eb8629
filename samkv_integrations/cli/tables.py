"""Figures as tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from samkv_integrations.bench.scoring import exact_match, f1_score
from samkv_integrations.cli.documents import Question
from samkv_integrations.engine.report import Report
from samkv_integrations.figures import Row, percent, ratio, seconds, size

PIPE_WIDTH = 100
"""Columns of a table that goes to a file or another program, which have no width of their own."""


def console(*, stderr: bool = False) -> Console:
    """The console of this moment's standard output, or standard error."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    # texts of users are shown as they are: "[Title]" is no style, ":smile:" no emoji
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def answer_row(
    question: Question, text: str, sources: Sequence[str], report: Report
) -> dict[str, Any]:
    """The row of one answer: question, answer, whether it is right if that is known, figures.

    sources: names of the chunks that it was given, nearest first.
    """
    answer = text.strip()
    row: dict[str, Any] = {
        "question": question.question,
        "answer": answer,
        "sources": list(sources),
    }
    if question.answers:
        row["expected"] = list(question.answers)
        row["exact_match"] = exact_match(answer, question.answers)
        row["f1"] = f1_score(answer, question.answers)
    return row | report.to_dict()


def with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of one question; each gets ``ttft_ratio`` if `recompute` is among them."""
    truth = next((row["ttft_s"] for row in rows if row["method"] == "recompute"), None)
    added = [{} if truth is None else {"ttft_ratio": row["ttft_s"] / truth} for row in rows]
    return [{**row, **more} for row, more in zip(rows, added, strict=True)]


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, gap: int = 2
) -> Table:
    """A plain table; the first ``left`` columns hold words, the others right-aligned figures.

    gap: spaces between columns.
    """
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if index < left else "right",
            overflow="fold",
            no_wrap=index == 0 or index >= left,
        )
    for row in rows:
        made.add_row(*row)
    return made


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One method over many questions.

    n_right: exact matches among the n_known questions whose answer is known. same_share: questions
    answered as by `recompute`. bytes_read: a question, mean; bytes_share: of what `reuse` reads.
    ttft_s: median; ttft_ratio: median of the ratios to `recompute` at each question. None where the
    other did not run.
    """

    method: str
    n_questions: int
    n_known: int
    n_right: int
    same_share: float | None
    kept_ratio: float
    recompute_ratio: float
    bytes_read: float
    bytes_share: float | None
    ttft_s: float
    ttft_ratio: float | None


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """A summary of each method in ``rows``, in order of appearance.

    rows: question, answer, expected and exact_match if known, and the fields of a report. All
    methods must have answered the same questions, in the same order.
    """
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    truth, reused = by_method.get("recompute"), by_method.get("reuse")
    summaries = []
    for name, mine in by_method.items():
        known = [row for row in mine if row.get("expected")]
        bytes_read, ttft_s = mean(r["bytes_read"] for r in mine), median(r["ttft_s"] for r in mine)
        all_bytes = mean(r["bytes_read"] for r in reused) if reused else 0
        same = [a["answer"] == b["answer"] for a, b in zip(mine, truth or [], strict=False)]
        paired = [a["ttft_s"] / b["ttft_s"] for a, b in zip(mine, truth or [], strict=False)]
        summaries.append(
            Summary(
                method=name,
                n_questions=len(mine),
                n_known=len(known),
                n_right=sum(int(row["exact_match"]) for row in known),
                same_share=mean(same) if same else None,
                kept_ratio=mean(row["kept_ratio"] for row in mine),
                recompute_ratio=mean(row["recompute_ratio"] for row in mine),
                bytes_read=bytes_read,
                bytes_share=bytes_read / all_bytes if all_bytes else None,
                ttft_s=ttft_s,
                ttft_ratio=median(paired) if paired else None,
            )
        )
    return summaries


def summary_table(rows: Sequence[Row]) -> Table:
    """`summarise` as a table, one row a method."""
    columns = (
        "method", "answers\nright", "same as\nrecompute", "kept", "recom-\nputed",
        "bytes\nread", "of\nreuse", "first\ntoken", "of re-\ncompute",
    )  # fmt: skip
    return table(
        columns,
        [
            (
                s.method,
                f"{s.n_right} of {s.n_known}" if s.n_known else "-",
                percent(s.same_share),
                percent(s.kept_ratio),
                percent(s.recompute_ratio),
                size(s.bytes_read),
                percent(s.bytes_share),
                seconds(s.ttft_s),
                ratio(s.ttft_ratio),
            )
            for s in summarise(rows)
        ],
        gap=1,  # so that it fits into 80 columns
    )


def comparison_table(rows: Sequence[Row]) -> Table:
    """The answers to one question, one row a method."""
    columns = ("method", "answer", "kept", "recom-\nputed", "bytes\nread", "first\ntoken", "ratio")
    return table(
        columns,
        [
            (
                row["method"],
                row["answer"],
                percent(row["kept_ratio"]),
                percent(row["recompute_ratio"]),
                size(row["bytes_read"]),
                seconds(row["ttft_s"]),
                ratio(row.get("ttft_ratio")),
            )
            for row in rows
        ],
        left=2,
    )


def sources_table(sources: Sequence[str], texts: Sequence[str]) -> Table:
    """Where an answer comes from: file name and text of each chunk, nearest first."""
    cells = [(Path(s).name, _beginning(t)) for s, t in zip(sources, texts, strict=True)]
    return table(("source", "text"), cells, left=2)


def _beginning(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def report_lines(row: Row) -> list[str]:
    """What one answer cost, for a person."""
    missed = sum(row["chunk_misses"].values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in row["chunk_misses"].items())
    cached = f", {row['chunks_computed']} of them cached now" if row["chunks_computed"] else ""
    misses = f", {missed} from their text ({reasons}){cached}" if missed else ""
    came_to = f" (which did {row['ran']})" if row["ran"] != row["method"] else ""
    evicted = (
        f"; {size(row['kv_bytes'])} of working cache, {size(row['decode_kv_bytes'])} at the end "
        f"with {row['eviction']}"
        if row["eviction"]
        else ""
    )
    return [
        f"{row['method']}{came_to} on {row['model']}: {row['prompt_tokens']} prompt tokens, "
        f"{row['chunk_hits']} of {row['chunk_hits'] + missed} chunks from their caches{misses}",
        f"kept {percent(row['kept_ratio'])} of the chunks' tokens, recomputed "
        f"{percent(row['recompute_ratio'])}, read {size(row['bytes_read'])}, "
        f"first token after {seconds(row['ttft_s'])}{evicted}",
    ]
