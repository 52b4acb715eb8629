"""Answers as rows: what each cost, whether it is right, and what many of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from samkv_integrations.bench.data import Question
from samkv_integrations.bench.scoring import exact_match, f1_score
from samkv_integrations.engine.report import Report
from samkv_integrations.figures import Row


def answer_row(question: Question, text: str, sources: Sequence[str], report: Report) -> Row:
    """The row of one answer: the texts, whether it is right if that is known, and the report.

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


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of one question; each gets ``ttft_ratio`` if `recompute` is among them."""
    truth = next((row["ttft_s"] for row in rows if row["method"] == "recompute"), None)
    added = [{} if truth is None else {"ttft_ratio": row["ttft_s"] / truth} for row in rows]
    return [{**row, **more} for row, more in zip(rows, added, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One method over many questions.

    n_right: exact matches among the n_known questions whose answer is known. same_share: share of
    the questions with the same answer as by `recompute`. bytes_read: mean over questions;
    bytes_share: its share of what `reuse` reads. ttft_s: median; ttft_ratio: median of the ratios
    to `recompute` at each question. None where `recompute` or `reuse` did not run.
    """

    method: str
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
